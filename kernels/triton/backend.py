"""The backend "triton": what the kernels take, their configurations, and how they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.backend import Config, Device, OtherDevice
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
from flashjax.kernels.triton.replay import unknown
from flashjax.masks import Mask, Predicate
from flashjax.scores import pulled_back
from flashjax.spec import Aval, Operands, Spec
from flashjax.structure import At


@dataclasses.dataclass(frozen=True)
class Triton:
    """``interpret`` runs the kernels in Pallas's interpreter, on any device: for tests."""

    interpret: bool = False
    name: str = "triton"

    @property
    def platform(self) -> str | None:
        return None if self.interpret else "cuda"

    def unsupported(self, spec: Spec, device: Device) -> str | None:
        if not self.interpret:
            reason = _wrong_device(device)
            if reason is not None:
                return OtherDevice(reason)
        if spec.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"query has dtype {spec.dtype}; the kernels take bfloat16, float16 and float32"
        for name, dim in (("query", spec.head_dim), ("value", spec.value_dim)):
            if dim > LARGEST_HEAD_DIM:
                return f"{name} has head dim {dim}; the kernels take up to {LARGEST_HEAD_DIM}"
        reason = _unknown_function(spec)
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


def _wrong_device(device: Device) -> str | None:
    if device.platform != "cuda":
        return f"it needs an NVIDIA GPU and this call runs on {device}"
    if device.capability not in CAPABILITIES:
        return (
            f"the Triton kernels are made for compute capability {', '.join(CAPABILITIES)}; this "
            f"device has {device.capability}"
        )
    return None


def _unknown_function(spec: Spec) -> str | None:
    """A user's function with a primitive that the kernels lack, in words."""
    tile: Any = Aval((16, 16), jnp.int32)
    at = At(tile, tile, tile, tile)
    for term in _terms(spec.shapes.mask):
        if isinstance(term, Predicate):
            name = unknown(lambda term, at: term.keep(at), _on_tile(term), at)
            if name is not None:
                return f"mask={term} uses {name}, which the Triton lowering does not have"
    score = spec.shapes.score
    if score is not None:
        values = Aval((16, 16), jnp.float32)
        name = unknown(lambda score, s, at: score.apply(s, at), _on_tile(score), values, at)
        name = name or unknown(
            lambda score, s, at: pulled_back(score, s, at, s), _on_tile(score), values, at
        )
        if name is not None:
            return f"score_mod={score} uses {name}, which the Triton lowering does not have"
    return None


def _on_tile(structure: Any) -> Any:
    return jax.tree.map(lambda x: Aval((16, 16), x.dtype), structure)


def _terms(mask: Mask | None) -> Iterator[Mask]:
    waiting = [] if mask is None else [mask]
    while waiting:
        term = waiting.pop()
        waiting += getattr(term, "parts", ())
        yield term
