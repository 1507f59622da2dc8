"""Set-up that all tests share: where JAX runs, GPU skips, and how hypothesis searches."""

import functools
import os
from collections.abc import Iterator

# The oracle's products are small: a second thread waits more than it computes, and workers share
# the cores. It must be set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX's interpreter of Mosaic GPU kernels runs each warpgroup on a thread of XLA's pool, which has
# as many as there are cores unless told: with two cores it waits for ever.
os.environ.setdefault("NPROC", "16")

import hypothesis
import pytest

hypothesis.settings.register_profile(
    # An example with a new shape compiles: its time says nothing, and a few have to suffice. In CI
    # the same commit has to give the same verdict.
    "flashjax",
    deadline=None,
    max_examples=25,
    derandomize=bool(os.environ.get("CI")),
)
hypothesis.settings.load_profile("flashjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--implementation",
        help="run the suite that all implementations share with this one alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose JAX's platform before any test module imports JAX."""
    if chosen := config.getoption("implementation"):
        os.environ["FLASHJAX_TEST_IMPLEMENTATION"] = chosen
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4".strip()
    if config.getoption("markexpr") == "gpu" or os.environ.get("FLASHJAX_TEST_GPU") == "1":
        # pytest-xdist's workers share the GPU: none may take three quarters of it at its start.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Tests compile much and run little: half the optimisation halves their time.
        if "--xla_backend_optimization_level" not in flags:
            os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=1"


@functools.cache
def gpu_fault() -> str | None:
    """Why the tests marked `gpu` cannot run, or None."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "runs with FLASHJAX_TEST_GPU=1 or -m gpu"
    import jax

    platforms = {device.platform for device in jax.devices()}
    return None if "gpu" in platforms else f"no GPU: JAX sees {', '.join(sorted(platforms))}"


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """For tests of which nearly all the time is XLA's: what they compute is tiny."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --implementation on a GPU the shared suite is one for the GPU."""
    chosen = config.getoption("implementation")
    if chosen and config.getoption("markexpr") == "gpu":
        for item in items:
            if (
                getattr(item, "callspec", None)
                and item.callspec.params.get(  # type: ignore[attr-defined]
                    "implementation"
                )
                == chosen
            ):
                item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and (reason := gpu_fault()):
        pytest.skip(reason)
