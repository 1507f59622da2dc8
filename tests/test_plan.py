"""The plan: which backend, on which device, why not another; explain and doctor print it."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import chunked, doctor, masks, plan
from flashjax.backend import Config, Device, OtherDevice

H200 = Device("cuda", "NVIDIA H200", "9.0")
Q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)


@dataclasses.dataclass
class OnlyCuda:
    """A stand-in for a kernel: lowers for CUDA only, refuses float32."""

    name: str = "triton"
    platform: str | None = "cuda"
    calls: set[str] = dataclasses.field(default_factory=set)

    def unsupported(self, spec: Any, device: Device, *, backward: bool = False) -> str | None:
        if device.platform != "cuda":
            return OtherDevice(f"it needs an NVIDIA GPU, not {device}")
        return (
            "query is float32 and the stand-in takes bfloat16" if spec.dtype == "float32" else None
        )

    def configs(self, spec: Any, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        return (Config(64, 32) if backward else Config(128, 64),)

    def forward(self, spec: Any, config: Config, operands: Any) -> Any:
        self.calls.add("forward")
        return chunked.BACKEND.forward(spec, config, operands)

    def backward(self, *args: Any) -> Any:
        self.calls.add("backward")
        return chunked.BACKEND.backward(*args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = OnlyCuda()
    others = {name: one for name, one in plan.BACKENDS.items() if name != "mosaic"}
    monkeypatch.setattr(plan, "BACKENDS", others | {"triton": lambda: made})
    plan.plan.cache_clear()
    plan._warn_once.cache_clear()
    yield made
    plan.plan.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "forward", "backward"),
    [
        ("9.0", jnp.bfloat16, 64, "mosaic", "mosaic"),
        ("9.0", jnp.float16, 256, "mosaic", "mosaic"),
        ("9.0", jnp.float32, 64, "triton", "triton"),
        ("8.0", jnp.bfloat16, 64, "triton", "triton"),
    ],
)
def test_the_kernels_that_a_device_gets(
    capability: str, dtype: Any, width: int, forward: str, backward: str
) -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, width), dtype)
    device = Device("cuda", "NVIDIA GPU", capability)
    found = flashjax.explain(x, x, x, is_causal=True, device=device).plan
    assert found is not None
    assert (found.forward.implementation, found.backward.implementation) == (forward, backward)


@pytest.mark.parametrize("capability", [None, "90", "sm_90"])
def test_a_capability_that_is_none(capability: Any) -> None:
    with pytest.raises(ValueError, match=f"device has capability {capability!r}; wanted"):
        flashjax.explain(Q, Q, Q, device=Device("gpu", "NVIDIA H200", capability))


def test_a_kernel_is_preferred_where_its_device_is(kernel: Any) -> None:
    found = flashjax.explain(Q, Q, Q, device=H200)
    assert found.implementation == "triton"
    assert found.plan is not None
    assert (found.plan.forward.config, found.plan.backward.config) == (
        Config(128, 64),
        Config(64, 32),
    )
    assert "triton, tiles of 128 × 64" in str(found)


def test_elsewhere_the_chunked_path_serves_and_nobody_is_warned(kernel: Any) -> None:
    found = flashjax.explain(Q, Q, Q)
    assert found.implementation == "xla"
    assert dict(found.refused)["triton"].startswith("it needs an NVIDIA GPU")
    x = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashjax.dot_product_attention(x, x, x)


def test_falling_from_a_kernel_that_the_device_has_warns_once(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashjax.vjp, "current_device", lambda: H200)
    x = jnp.ones((1, 17, 2, 8), jnp.float32)
    with pytest.warns(
        flashjax.FlashjaxFallbackWarning, match="instead of 'triton': query is float32"
    ):
        flashjax.dot_product_attention(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashjax.dot_product_attention(x[:, :9], x, x)


def test_a_call_traced_for_a_gpu_still_lowers_and_runs_on_the_cpu(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashjax.vjp, "current_device", lambda: H200)
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 8), jnp.bfloat16)

    def loss(q: jax.Array, implementation: str | None) -> jax.Array:
        out = flashjax.dot_product_attention(q, x, x, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    found = jax.jit(jax.grad(loss), static_argnums=1)(x, None)
    assert kernel.calls == {"forward", "backward"}  # traced for CUDA, beside the default
    wanted = jax.grad(loss)(x, "xla")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_a_named_implementation_that_cannot_says_why(kernel: Any) -> None:
    with pytest.raises(
        NotImplementedError, match="'triton' cannot do this call: it needs an NVIDIA"
    ):
        flashjax.explain(Q, Q, Q, implementation="triton")
    x = jnp.ones((1, 16, 2, 8))
    with pytest.raises(
        NotImplementedError, match="'cudnn' cannot do this call: it needs an NVIDIA"
    ):
        flashjax.dot_product_attention(x, x, x, implementation="cudnn")


def test_the_device_is_the_abstract_meshs_else_the_default() -> None:
    assert plan.current_device().platform == "cpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert plan.current_device().platform == "cpu"
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        found = plan.current_device()
    assert (found.platform, found.kind) == ("cuda", "NVIDIA H200")


def test_explain_counts_tiles_where_it_knows_the_mask() -> None:
    causal = flashjax.explain(Q, Q, Q, is_causal=True)
    assert causal.forward is not None
    assert causal.forward.visited is not None
    assert 0 < causal.forward.visited < causal.forward.total
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    unknown = flashjax.explain(Q, Q, Q, segment_ids=ids)
    assert unknown.forward is not None
    assert unknown.forward.visited is None
    assert "depends on the mask's values" in str(unknown)
    known = flashjax.explain(Q, Q, Q, segment_ids=np.repeat(np.arange(4), 256))
    assert known.backward is not None
    assert known.backward.visited is not None


def test_explain_notes_a_predicate_that_skips_nothing() -> None:
    found = flashjax.explain(Q, Q, Q, mask=masks.Predicate(_later))
    assert "_later" in found.notes[0]
    assert "skips no tile" in found.notes[0]


def _later(row: jax.Array, column: jax.Array) -> jax.Array:
    return row > column


def test_explain_refuses_what_the_call_refuses() -> None:
    with pytest.raises(ValueError, match="logits_soft_cap is -1"):
        flashjax.explain(Q, Q, Q, logits_soft_cap=-1)
    with pytest.raises(TypeError, match="causal"):
        flashjax.explain(Q, Q, Q, causal=True)


def test_doctor_reports_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.report() == 0
    printed = capsys.readouterr().out
    for wanted in ("flashjax", "jaxlib", "implementation", "xla", "pass", "not mosaic"):
        assert wanted in printed


def test_doctor_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashjax.dot_product_attention

    def wrong(*args: Any, implementation: str | None, **kwargs: Any) -> jax.Array:
        out = right(*args, implementation=implementation, **kwargs)
        return out if implementation == "reference" else out * 1.03

    monkeypatch.setattr(flashjax, "dot_product_attention", wrong)
    assert doctor.report() == 1


def test_a_named_device_is_read_as_jax_names_it() -> None:
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    found = flashjax.explain(x, x, x, device=flashjax.Device("gpu", "NVIDIA A100", "8.0"))
    assert found.implementation == "triton"
    with pytest.raises(ValueError, match=r"device has platform 'NVIDIA A100'; wanted one of cpu"):
        flashjax.explain(x, x, x, device=flashjax.Device("NVIDIA A100", "NVIDIA A100", "8.0"))


def test_explain_says_where_cudnn_may_run() -> None:
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    h200 = flashjax.Device("cuda", "NVIDIA H200", "9.0")
    may = "'cudnn' may take this call too"
    assert may in str(flashjax.explain(x, x, x, is_causal=True, device=h200))
    found = str(flashjax.explain(x, x, x, logits_soft_cap=3.0, device=h200))
    assert may not in found
    assert "not 'cudnn': jax.nn has no logits_soft_cap" in found
