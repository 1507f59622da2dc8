"""Whether any thread's rows are True, so that threads may branch together.

The interpreter has no inline assembly: there it is `jnp.any`, the one difference from the compiled
kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flashjax.kernels.hopper.tile import ROW

WARP = (
    "{ .reg .pred mine, any; setp.gt.f32 mine, $1, 0f00000000;"
    " vote.sync.any.pred any, mine, 0xffffffff; selp.s32 $0, 1, 0, any; }"
)
# The barrier is the one by which a warpgroup's threads wait for one another elsewhere.
WARPGROUP = (
    "{ .reg .pred mine, any; .reg .b32 id;"
    " mov.u32 id, %tid.x; shr.u32 id, id, 7; add.u32 id, id, 1;"
    " setp.gt.f32 mine, $1, 0f00000000; barrier.cta.red.or.pred any, id, 128, mine;"
    " selp.s32 $0, 1, 0, any; }"
)


def any_of_warp(rows: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of (64,) bools, those of each warp for itself."""
    return jnp.any(rows) if interpreted else _vote(rows, WARP)


def any_of_warpgroup(rows: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of (64,) bools."""
    return jnp.any(rows) if interpreted else _vote(rows, WARPGROUP)


def _vote(rows: jax.Array, assembly: str) -> jax.Array:
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=scalar)
    def vote(_: Any, x: Any) -> Any:
        most = functools.reduce(arith.maximumf, x.registers.flat)
        integer = ir.IntegerType.get_signless(32)
        found = llvm.inline_asm(integer, [most], assembly, "=r,f", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    found: jax.Array = vote(jnp.where(rows, 1.0, 0.0)) != 0
    return found
