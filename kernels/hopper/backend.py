"""The backend "mosaic" on Hopper: what its kernels take, and how they are called."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.backend import Config, Device, OtherDevice, other_gpu
from flashjax.kernels.functions import unknown_function
from flashjax.kernels.hopper.backward import backward
from flashjax.kernels.hopper.backward_config import BackwardConfig, backward_configs
from flashjax.kernels.hopper.config import (
    CAPABILITIES,
    ROWS,
    ForwardConfig,
    forward_configs,
)
from flashjax.kernels.hopper.forward import forward
from flashjax.kernels.hopper.order import LIMIT, too_large
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.kernels.sums import all_sums
from flashjax.masks import Blocks
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
        reason = _wrong_operands(spec) or unknown_function(spec, MOSAIC, backward=backward)
        if reason is None and backward:
            reason = _without_backward(spec)
        if reason is None and not self.configs(spec, device, backward=backward):
            reason = (
                f"head dims {spec.head_dim} and {spec.value_dim} fit no tile of the kernels in the "
                "shared memory of Hopper"
            )
        return reason

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        if backward:
            return backward_configs(spec)
        return forward_configs(spec, device.kind)

    def forward(
        self, spec: Spec, config: Config, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        assert isinstance(config, ForwardConfig)
        # The kernel's results do not say over which axes of a mesh they differ.
        axes = varying_axes(operands)
        found = forward(spec, config, cast_varying(operands, axes), interpret=self.interpret)
        return cast_varying(found, axes)

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
        given = (operands, lse, delta, d_out)
        axes = varying_axes(given)
        found = backward(spec, config, *cast_varying(given, axes), interpret=self.interpret)
        return cast_varying(found, axes)


BACKEND = Hopper()


# What users call the fields of `Operands`.
_ARGUMENTS = {"mask": "mask or segment_ids", "score": "score_mod"}


def _without_backward(spec: Spec) -> OtherDevice | None:
    """Whose backward is another backend's: kernels too, so that nobody is warned."""
    by_dims = any(config.by_dims for config in backward_configs(spec))
    more = sorted({x.name for x in all_sums(spec) if x.has_rows or by_dims})
    if more:
        where = f"head dims {spec.head_dim} and {spec.value_dim}" if by_dims else "rows of its own"
        return OtherDevice(f"the backward makes no gradient of {', '.join(more)} with {where}")
    if spec.deterministic_backward and not ordered(spec):
        return OtherDevice(
            "deterministic_backward=True: the order of the additions to dQ would be a table of "
            f"more than {LIMIT} entries"
        )
    return None


def ordered(spec: Spec) -> bool:
    """Whether the kernels can keep to one order."""
    return all(
        not too_large(spec, Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns))
        for config in backward_configs(spec)
    )


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
