"""The backend "mosaic" on Hopper: what its kernels take, and how they are called."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from flashjax.backend import Config, Device, OtherDevice, other_gpu
from flashjax.kernels.functions import unknown_function
from flashjax.kernels.hopper.config import (
    CAPABILITIES,
    ROWS,
    ForwardConfig,
    forward_configs,
)
from flashjax.kernels.hopper.forward import forward
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.spec import Operands, Spec
from flashjax.structure import is_blocked
from flashjax.varying import cast_varying, varying_axes


@dataclasses.dataclass(frozen=True)
class Hopper:
    """``interpret`` is what Pallas's interpreter of GPU kernels takes, on any device: for tests."""

    interpret: Any = None
    name: str = "mosaic"

    @property
    def platform(self) -> str | None:
        return None if self.interpret is not None else "cuda"

    def unsupported(self, spec: Spec, device: Device, *, backward: bool = False) -> str | None:
        if self.interpret is None:
            other = other_gpu(device, "Mosaic GPU", CAPABILITIES)
            if other is not None:
                return other
        if backward:
            return OtherDevice("the Mosaic GPU kernels of this version have no backward")
        reason = _wrong_operands(spec) or unknown_function(spec, MOSAIC, backward=False)
        if reason is None and not self.configs(spec, device):
            reason = (
                f"head dims {spec.head_dim} and {spec.value_dim} fit no tile of the kernels in the "
                "shared memory of Hopper"
            )
        return reason

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        return () if backward else forward_configs(spec, device.kind)

    def forward(
        self, spec: Spec, config: Config, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        assert isinstance(config, ForwardConfig)
        # The kernel's results do not say over which axes of a mesh they differ.
        axes = varying_axes(operands)
        found = forward(spec, config, cast_varying(operands, axes), interpret=self.interpret)
        return cast_varying(found, axes)

    def backward(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the Mosaic GPU kernels have no backward")


BACKEND = Hopper()


# What users call the fields of `Operands`.
_ARGUMENTS = {"mask": "mask or segment_ids", "score": "score_mod"}


def _wrong_operands(spec: Spec) -> str | None:
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"query has dtype {spec.dtype}; the kernels take bfloat16 and float16"
    rest = dataclasses.replace(spec.shapes, query=None, key=None, value=None)
    for path, leaf in jax.tree_util.tree_leaves_with_path(rest, is_leaf=is_blocked):
        if is_blocked(leaf):
            if leaf.block_rows % ROWS or leaf.block_columns % ROWS:
                return (
                    f"mask has blocks of {leaf.block_rows} × {leaf.block_columns}; the kernels "
                    f"take multiples of {ROWS}"
                )
            leaf = leaf.values
        if jnp.dtype(leaf.dtype).itemsize > 4:
            field = path[0].name
            name = _ARGUMENTS.get(field, field)
            return f"{name} holds an array of dtype {leaf.dtype}; the kernels take 32 bits at most"
    return None
