"""From a ``Spec`` and a device to a backend and its tile sizes, forward and backward apart.

This is the only place that asks which device the call runs on, and what ``explain`` prints.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax import lax

from flashjax import chunked, tuning
from flashjax.backend import Backend, Config, Device, OtherDevice, no_nvidia
from flashjax.spec import Operands, Spec


def _mosaic() -> Backend:
    from flashjax.kernels.hopper import BACKEND

    return BACKEND


def _triton() -> Backend:
    from flashjax.kernels.triton import BACKEND

    return BACKEND


# Best first. A backend is loaded when a call may use it: Mosaic GPU alone costs 0.4 s to import.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "mosaic": _mosaic,
    "triton": _triton,
    "xla": lambda: chunked.BACKEND,
}
# Backends for NVIDIA GPUs: elsewhere they need not be loaded to tell.
PLATFORMS = {"mosaic": "cuda", "triton": "cuda"}
NAMED_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def implementation_names() -> tuple[str, ...]:
    """What ``implementation`` may be, besides None."""
    return (*BACKENDS, "reference", "cudnn")


Direction = Literal["forward", "backward"]


class FlashjaxFallbackWarning(UserWarning):
    """A call fell from a kernel that this device has to a slower implementation."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One direction's backend and tile sizes, and why better backends do not serve.

    ``source`` says where the tile sizes are from: "tuned on this machine", "shipped table" or
    "default".
    """

    implementation: str
    config: Config
    refused: tuple[tuple[str, str], ...] = ()
    source: str = tuning.DEFAULT

    def __str__(self) -> str:
        return f"{self.implementation}, tiles of {self.config} (rows × columns), {self.source}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Both directions' choices on one device."""

    device: Device
    forward: Choice
    backward: Choice

    def __str__(self) -> str:
        lines = [f"device: {self.device}"]
        for direction in ("forward", "backward"):
            choice: Choice = getattr(self, direction)
            lines.append(f"{direction}: {choice}")
            lines += [f"  not {name}: {reason}" for name, reason in choice.refused]
        return "\n".join(lines)


def current_device() -> Device:
    """The abstract mesh's device, else ``jax_default_device``, else the default backend's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        platform = abstract.platform or _platform_of(abstract.device_kind)
        return _gpu(platform, abstract.device_kind, getattr(abstract, "compute_capability", None))
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return device_of(default if default is not None else jax.devices()[0])


def device_of(device: jax.Device | Device) -> Device:
    """A device as backends see it; JAX says "gpu" where they say "cuda"."""
    if isinstance(device, Device):
        if device.platform not in NAMED_PLATFORMS:
            raise ValueError(
                f"device has platform {device.platform!r}; wanted one of "
                f"{', '.join(NAMED_PLATFORMS)}, as in Device('cuda', 'NVIDIA A100', '8.0')."
            )
        found = _gpu(device.platform, device.kind, device.capability)
        if found.platform == "cuda" and not re.fullmatch(r"\d+\.\d+", found.capability or ""):
            raise ValueError(
                f"device has capability {device.capability!r}; wanted CUDA's compute capability as "
                "JAX gives it, as in Device('cuda', 'NVIDIA A100', '8.0')."
            )
        return found
    return _gpu(device.platform, device.device_kind, getattr(device, "compute_capability", None))


def _gpu(platform: str, kind: str, capability: Any) -> Device:
    platform = "cuda" if platform == "gpu" and "AMD" not in kind else platform
    return Device(platform, kind, str(capability) if capability else None)


def _platform_of(kind: str) -> str:
    return "cuda" if "NVIDIA" in kind else "cpu"


@functools.lru_cache(maxsize=4096)
def plan(spec: Spec, implementation: str | None, device: Device) -> Plan:
    """The plan of a call.

    Raises:
      NotImplementedError: `implementation` is named and cannot do the call.
    """
    return Plan(
        device,
        _choose(spec, implementation, device, "forward"),
        _choose(spec, implementation, device, "backward"),
    )


def _choose(spec: Spec, implementation: str | None, device: Device, direction: Direction) -> Choice:
    names = list(BACKENDS)
    if implementation:
        # A named one without this backward keeps its forward.
        names = [implementation, *(BACKENDS if direction == "backward" else ())]
    refused: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        reason = refusal(name, spec, device, direction)
        if reason is None:
            offered = BACKENDS[name]().configs(spec, device, backward=direction == "backward")
            config, source = tuning.chosen(name, spec, device, direction, offered)
            return Choice(name, config, tuple(refused), source)
        refused.append((name, reason))
    name, reason = refused[-1]
    raise NotImplementedError(
        f"implementation={name!r} cannot do this call: {reason}. Pass implementation=None for the "
        "best one that can, or 'xla', which does every call on any device."
    )


def check_implementation(name: Any) -> None:
    """Raises ValueError unless `name` is None or an implementation's name."""
    names = implementation_names()
    if name is not None and name not in names:
        raise ValueError(
            f"implementation is {name!r}; wanted None or one of {', '.join(map(repr, names))}."
        )


def refusal(name: str, spec: Spec, device: Device, direction: Direction = "forward") -> str | None:
    """Why the named backend cannot do one direction of the call; None if it can."""
    if PLATFORMS.get(name, device.platform) != device.platform:
        return no_nvidia(device)
    return BACKENDS[name]().unsupported(spec, device, backward=direction == "backward")


def warn_of_fallback(made: Plan) -> None:
    """Warns, once per reason, where this device has a kernel that the call cannot use."""
    for choice in (made.forward, made.backward):
        for name, reason in choice.refused:
            if not isinstance(reason, OtherDevice):
                _warn_once(name, choice.implementation, str(reason))


@functools.cache
def _warn_once(name: str, instead: str, reason: str) -> None:
    warnings.warn(
        f"flashjax takes implementation {instead!r} instead of {name!r}: {reason}.",
        FlashjaxFallbackWarning,
        stacklevel=2,
    )


def run_forward(made: Plan, spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    def with_backend(backend: Backend, config: Config) -> Callable[..., Any]:
        return functools.partial(backend.forward, spec, config)

    return _on_platform(made.forward, spec, with_backend, "forward")(operands)


def run_backward(
    made: Plan,
    spec: Spec,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> Operands:
    def with_backend(backend: Backend, config: Config) -> Callable[..., Any]:
        return functools.partial(backend.backward, spec, config)

    return _on_platform(made.backward, spec, with_backend, "backward")(operands, lse, delta, d_out)


def _on_platform(
    choice: Choice,
    spec: Spec,
    bound: Callable[[Backend, Config], Callable[..., Any]],
    direction: Direction,
) -> Callable[..., Any]:
    """The chosen backend on its platform, the chunked path on every other.

    A call traced on a machine with a GPU thus still lowers for the CPU.
    """
    backend = BACKENDS[choice.implementation]()
    chosen = bound(backend, choice.config)
    if backend.platform is None:
        return chosen
    config = chunked.BACKEND.configs(spec, Device("cpu"), backward=direction == "backward")[0]
    branches = {backend.platform: chosen}
    return functools.partial(
        lax.platform_dependent, default=bound(chunked.BACKEND, config), **branches
    )


def implementations(spec: Spec, device: Device) -> Iterator[tuple[str, str | None]]:
    """Every backend's name with the reason why it cannot do the call, None if it can."""
    for name in BACKENDS:
        yield name, refusal(name, spec, device)
