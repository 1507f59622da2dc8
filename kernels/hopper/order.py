"""One order for the additions to a row block's dQ: that in which its blocks of columns begin.

Each (row block, head, batch member) counts, for each consumer, the additions that are done. A
program waits for its turn, so only for programs that began before it: none waits for ever.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from flashjax.kernels.hopper.layouts import SCALAR
from flashjax.kernels.hopper.walk import Walker
from flashjax.masks import Blocks, Lists, Mask, Schedule, schedule
from flashjax.spec import Spec
from flashjax.structure import is_blocked

LIMIT = 2**24  # entries of a table of turns: 64 MiB

AWAIT = (
    "{ .reg .pred early; .reg .b32 count;"
    " AGAIN: ld.acquire.gpu.global.s32 count, [$0]; setp.lt.s32 early, count, $1;"
    " @early bra AGAIN; }"
)
# By one thread of the warpgroup, after all of them have added.
PASS = (
    "{ .reg .pred first; .reg .b32 thread;"
    " mov.u32 thread, %tid.x; and.b32 thread, thread, 127; setp.eq.u32 first, thread, 0;"
    " @first fence.acq_rel.gpu; @first red.relaxed.gpu.global.add.s32 [$0], $1; }"
)


class Order:
    """The turn of each block of columns at each block of rows.

    Where all blocks of columns up to the last one visit a row block, as without a mask and under
    Causal, it is the block's index; else it is read from a table.
    """

    def __init__(self, spec: Spec, walker: Walker) -> None:
        rows, columns, mask = walker.other, walker.own, walker.mask
        self.shape = spec.batch, spec.heads, rows.count
        self.arrays: list[jax.Array] = []
        if walker.arrays:
            assert mask is not None
            walk = schedule(mask, rows, columns, "columns")
            self.arrays = [turns(walk, columns, rows)]
        elif mask is not None:
            table = _table(mask, rows, columns)
            self.arrays = [] if table is None else [jnp.asarray(table)]

    def counters(self, consumers: int) -> jax.Array:
        return jnp.zeros(math.prod(self.shape) * consumers, jnp.int32)

    def counter(self, at: Any, rows: Any, consumer: int, consumers: int) -> Any:
        """Which of them counts a consumer's additions to a block of rows."""
        _, heads, blocks = (jnp.int32(x) for x in self.shape)
        index = ((at[0] * heads + at[1]) * blocks + rows) * jnp.int32(consumers)
        return index + jnp.int32(consumer)

    def turn(self, refs: Any, at: Any, block: Any, rows: Any) -> Any:
        """Of a block of columns of batch member and head `at` at a block of rows."""
        if not self.arrays:
            return block
        lead = (i if n != 1 else 0 for i, n in zip(at, self.arrays[0].shape, strict=False))
        return refs[0][tuple(jnp.int32(x) for x in (*lead, block, rows))]


def too_large(spec: Spec, rows: Blocks, columns: Blocks) -> bool:
    """Whether a table of the call's turns would be."""
    mask = spec.shapes.mask
    if mask is None:
        return False
    leaves = jax.tree.leaves(mask, is_leaf=is_blocked)
    shapes = [(x.values if is_blocked(x) else x).shape[:2] for x in leaves]
    lead = np.broadcast_shapes((1, 1), *shapes)
    return math.prod(lead) * rows.count * columns.count > LIMIT


def turns(walk: Schedule, own: Blocks, other: Blocks) -> jax.Array:
    """How many blocks visit a tile before each block: int32 (B|1, N|1, blocks, tiles)."""
    visits = visited(walk, own, other).astype(jnp.int32)
    return jnp.cumsum(visits, 2, dtype=jnp.int32) - visits


def visited(walk: Schedule, own: Blocks, other: Blocks) -> jax.Array:
    """Whether a block visits a tile: (B|1, N|1, blocks, tiles)."""
    if isinstance(walk, Lists):
        # Lists name every tile once, those that are visited first.
        found = jnp.argsort(walk.codes, axis=-1) < walk.count[..., None]
    else:
        tile = jnp.arange(other.count, dtype=jnp.int32)
        begin, end = (walk.visit[..., None, i] for i in range(2))
        found = ((begin <= tile) & (tile < end)).any(-2)
    return jnp.broadcast_to(found, (*found.shape[:2], own.count, other.count))


@functools.lru_cache(maxsize=64)
def _table(mask: Mask, rows: Blocks, columns: Blocks) -> np.ndarray[Any, Any] | None:
    """The turns under a mask without arrays; None where they are the blocks' indices."""

    @jax.jit
    def found() -> tuple[jax.Array, jax.Array]:
        walk = schedule(mask, rows, columns, "columns")
        return turns(walk, columns, rows), visited(walk, columns, rows)

    # A thread of its own, as for `walk.visited`.
    with ThreadPoolExecutor(1) as pool:
        table, visits = pool.submit(lambda: jax.device_get(found())).result()
    own: np.ndarray[Any, Any] = np.arange(columns.count)[:, None]
    return None if (table == own)[visits].all() else table


def await_turn(counter: Any, turn: Any) -> None:
    """Waits until so many additions are done."""
    _inline(AWAIT, "await_turn", counter, turn, together=False)


def pass_turn(counter: Any, count: Any) -> None:
    """Counts `count` more."""
    _inline(PASS, "pass_turn", counter, count, together=True)


def _inline(assembly: str, name: str, counter: Any, number: Any, *, together: bool) -> None:
    """With `together`, when all threads of the warpgroup have come."""

    def run(_: Any, counter: Any, number: Any) -> None:
        if together:
            mgpu.utils.warpgroup_barrier()
        pointer = mgpu.utils.memref_ptr(counter)
        operands = [pointer, number.registers.item()]
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, operands, assembly, "l,r,~{memory}", has_side_effects=True)

    run.__name__ = name  # by which the tests' interpreter knows it
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))(run)(counter, number)
