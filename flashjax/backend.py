"""The backend protocol, devices as the plan sees them, and tile configurations."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax

from flashjax.spec import Operands, Spec


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels need to know of a device. ``capability`` is CUDA's, such as "9.0"."""

    platform: str
    kind: str = ""
    capability: str | None = None

    def __str__(self) -> str:
        capability = f", compute capability {self.capability}" if self.capability else ""
        return f"{self.platform} ({self.kind}{capability})" if self.kind else self.platform


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes: rows × columns. Backends subclass it for what else they tune.

    Fields are numbers and words, so that a table can hold them, and configurations: a backward
    that makes a gradient in a pass of its own keeps that pass's in a field named for the operand.
    Tuning pairs passes as it finds them.
    """

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.columns}"


class OtherDevice(str):
    """A reason that lies in the device, not in the call: nobody is warned of it."""


def no_nvidia(device: Device) -> OtherDevice | None:
    if device.platform == "cuda":
        return None
    return OtherDevice(f"it needs an NVIDIA GPU and this call runs on {device}")


def other_gpu(device: Device, kernels: str, capabilities: tuple[str, ...]) -> OtherDevice | None:
    """Why a device does not run `kernels`, made for NVIDIA GPUs of these `capabilities`."""
    if device.platform == "cuda" and device.capability not in capabilities:
        return OtherDevice(
            f"the {kernels} kernels are made for compute capability {', '.join(capabilities)}; "
            f"this device has {device.capability}"
        )
    return no_nvidia(device)


class Backend(Protocol):
    """One way to compute attention and its gradient."""

    @property
    def name(self) -> str: ...

    @property
    def platform(self) -> str | None:
        """The platform that its code lowers for, None for any.

        On others the chunked path steps in.
        """
        ...

    def unsupported(self, spec: Spec, device: Device, *, backward: bool = False) -> str | None:
        """Why this backend cannot do one direction of the call, in words that name the argument.

        None if it can.
        """
        ...

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        """The tile configurations that fit, best first."""
        ...

    def forward(
        self, spec: Spec, config: Config, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        """Output (B, T, N, Hv) in the query's dtype and LSE (B, N, T) in ``spec.accumulator``."""
        ...

    def backward(
        self,
        spec: Spec,
        config: Config,
        operands: Operands,
        lse: jax.Array,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> Operands:
        """Gradients of ``spec.wanted`` except sinks, in the operands' shapes; None elsewhere.

        `delta` is rowsum(O·dO) − dLSE, (B, N, T) in ``spec.accumulator``.
        """
        ...
