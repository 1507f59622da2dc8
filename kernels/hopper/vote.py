"""Whether any thread's rows are True, so that threads may branch together.

The interpreter has no inline assembly: there it is `jnp.any`, the one difference from the compiled
kernel.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from flashjax.kernels.hopper.layouts import ROW, SCALAR, TILE

# NaN is beyond any limit (gtu): a row of them decides for its warp.
WARP = (
    "{ .reg .pred mine, any; setp.gtu.f32 mine, $1, LIMIT;"
    " vote.sync.any.pred any, mine, 0xffffffff; selp.s32 $0, 1, 0, any; }"
)
# The barrier is the one by which a warpgroup's threads wait for one another elsewhere.
WARPGROUP = (
    "{ .reg .pred mine, any; .reg .b32 id;"
    " mov.u32 id, %tid.x; shr.u32 id, id, 7; add.u32 id, id, 1;"
    " setp.gtu.f32 mine, $1, LIMIT; barrier.cta.red.or.pred any, id, 128, mine;"
    " selp.s32 $0, 1, 0, any; }"
)


def any_of_warp(rows: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of (64,) bools, those of each warp for itself."""
    return jnp.any(rows) if interpreted else _vote(rows, WARP)


def any_of_warpgroup(rows: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of (64,) bools."""
    return jnp.any(rows) if interpreted else _vote(rows, WARPGROUP)


def any_beyond(tile: jax.Array, limit: float, *, interpreted: bool) -> jax.Array:
    """Whether a warp's part of a float32 tile has anything farther from 0 than `limit`."""
    sizes = jnp.abs(tile)
    return jnp.any(~(sizes <= limit)) if interpreted else _vote_beyond(sizes, limit, WARP, TILE)


def _vote(rows: jax.Array, assembly: str) -> jax.Array:
    return _vote_beyond(jnp.where(rows, 1.0, 0.0), 0.0, assembly, ROW)


def _vote_beyond(x: jax.Array, limit: float, assembly: str, layout: Any) -> jax.Array:
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=scalar)
    def vote(_: Any, x: Any) -> Any:
        most = functools.reduce(arith.maximumf, x.registers.flat)
        if isinstance(most.type, ir.VectorType):
            (size,) = ir.VectorType(most.type).shape
            each = [vector.extract(most, [], [i]) for i in range(size)]
            most = functools.reduce(arith.maximumf, each)
        integer = ir.IntegerType.get_signless(32)
        words = assembly.replace("LIMIT", "0f" + struct.pack(">f", limit).hex())
        found = llvm.inline_asm(integer, [most], words, "=r,f", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    found: jax.Array = vote(x) != 0
    return found
