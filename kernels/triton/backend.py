"""The backend "triton": what the kernels take, their configurations, and how they are called."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from flashjax.backend import Config, Device, other_gpu
from flashjax.kernels.functions import unknown_function
from flashjax.kernels.triton.backward import Given, backward
from flashjax.kernels.triton.config import (
    CAPABILITIES,
    LARGEST_HEAD_DIM,
    BackwardConfig,
    ForwardConfig,
    backward_configs,
    forward_configs,
)
from flashjax.kernels.triton.forward import forward
from flashjax.kernels.triton.replay import TRITON
from flashjax.spec import Operands, Spec


@dataclasses.dataclass(frozen=True)
class Triton:
    """``interpret`` runs the kernels in Pallas's interpreter, on any device: for tests."""

    interpret: bool = False
    name: str = "triton"

    @property
    def platform(self) -> str | None:
        return None if self.interpret else "cuda"

    def unsupported(self, spec: Spec, device: Device, *, backward: bool = False) -> str | None:
        if not self.interpret:
            other = other_gpu(device, "Triton", CAPABILITIES)
            if other is not None:
                return other
        if spec.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"query has dtype {spec.dtype}; the kernels take bfloat16, float16 and float32"
        for name, dim in (("query", spec.head_dim), ("value", spec.value_dim)):
            if dim > LARGEST_HEAD_DIM:
                return f"{name} has head dim {dim}; the kernels take up to {LARGEST_HEAD_DIM}"
        reason = unknown_function(spec, TRITON, backward=True)
        if reason is not None:
            return reason
        if not self.configs(spec, device) or not self.configs(spec, device, backward=True):
            return (
                f"head dims {spec.head_dim} and {spec.value_dim} in {spec.dtype} fit no tile of "
                f"the kernels in the shared memory of {device}"
            )
        return None

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        capability = "9.0" if self.interpret else device.capability or ""
        made = backward_configs if backward else forward_configs
        return made(spec, capability)

    def forward(
        self, spec: Spec, config: Config, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        assert isinstance(config, ForwardConfig)
        return forward(spec, config, operands, interpret=self.interpret)

    def backward(
        self,
        spec: Spec,
        config: Config,
        operands: Operands,
        lse: jax.Array,
        delta: jax.Array,
        d_out: jax.Array,
    ) -> Operands:
        assert isinstance(config, BackwardConfig)
        given = Given(operands, lse, delta, d_out)
        return backward(spec, config, given, interpret=self.interpret)


BACKEND = Triton()
