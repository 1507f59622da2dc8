"""The tile schedule: for each block of one axis, the tiles of the other to visit.

Two forms. Ranges of tiles, at most two a block, where the mask has a closed form: O(T + S) memory.
Else a list of tile indices a block, made from verdicts. Tiles ascend and none comes twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.masks.algebra import EMPTY, FULL, Mask
from flashjax.masks.bounds import Axis, Blocks, Bounds, Range

# A mask whose closed form is only a hull (Intervals) gets the exact list while one batch member's
# and head's list stays below this many tiles: 16 MiB of int32, 262k tokens in tiles of 128.
LIST_LIMIT = 2**22


class Step(NamedTuple):
    """One tile of a walk: its index, and whether it needs no element mask."""

    tile: jax.Array
    full: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranges:
    """``visit`` and ``full``: int32 (B|1, N|1, blocks, ranges, 2), begin and end in tiles."""

    visit: jax.Array
    full: jax.Array

    @property
    def count(self) -> jax.Array:
        """Tiles to visit: (B|1, N|1, blocks)."""
        return (self.visit[..., 1] - self.visit[..., 0]).sum(-1, dtype=jnp.int32)

    def step(self, index: jax.Array | int) -> Step:
        """The index-th tile to visit; on a schedule taken at one block (`at`)."""
        begin, end = self.visit[..., 0], self.visit[..., 1]
        tile = begin[..., 0] + index
        for r in range(1, self.visit.shape[-2]):
            before = (end - begin)[..., :r].sum(-1, dtype=jnp.int32)
            tile = jnp.where(index >= before, begin[..., r] + index - before, tile)
        inside = (self.full[..., 0] <= tile[..., None]) & (tile[..., None] < self.full[..., 1])
        return Step(tile, inside.any(-1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """``codes``: int32 (B|1, N|1, blocks|1, tiles), 2·tile + full, the first ``count`` valid."""

    count: jax.Array
    codes: jax.Array

    def step(self, index: jax.Array | int) -> Step:
        code = self.codes[..., index]
        return Step(code // 2, code % 2 == 1)


Schedule = Ranges | Lists


def schedule(mask: Mask | None, rows: Blocks, columns: Blocks, axis: Axis) -> Schedule:
    """The walk of each block of `axis` over the tiles of the other axis.

    ``axis="rows"`` drives forward and dQ, ``"columns"`` dK and dV. A tile that hangs over the end
    of the walked axis is never FULL, so that its kernel masks what does not exist. A FULL tile may
    hang over the end of `axis` itself: there the results of what does not exist are not kept.
    """
    own, other = (rows, columns) if axis == "rows" else (columns, rows)
    if mask is None:
        bounds: Bounds | None = Bounds((Range(0, other.length),), (Range(0, other.length),))
    else:
        bounds = mask.bounds(own, other.length, axis)
    if bounds is not None and (bounds.exact or own.count * other.count > LIST_LIMIT):
        return _ranges(bounds, own, other)
    assert mask is not None
    verdict = mask.verdict(rows, columns)
    verdict = verdict.reshape((1,) * (4 - verdict.ndim) + verdict.shape)
    verdict = verdict if axis == "rows" else verdict.swapaxes(-1, -2)
    return _lists(verdict, other)


def at(walk: Schedule, block: jax.Array | int) -> Schedule:
    """One block's part of a schedule; a blocks dimension of 1 serves every block."""

    def take(x: jax.Array) -> jax.Array:
        return x[:, :, 0 if x.shape[2] == 1 else block]

    if isinstance(walk, Lists):
        return Lists(take(walk.count), take(walk.codes))
    return Ranges(take(walk.visit), take(walk.full))


def tiles(walk: Schedule, own: Blocks, other: Blocks) -> tuple[jax.Array, jax.Array]:
    """Tiles visited, and FULL ones among them, a batch member and head on average."""
    index = jnp.arange(other.count, dtype=jnp.int32)

    def one(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = at(walk, block)
        step = jax.vmap(part.step, out_axes=-1)(index)
        full = (step.full & (index < part.count[..., None])).sum(-1)
        return part.count.mean(dtype=jnp.float32), full.mean(dtype=jnp.float32)

    visited, full = jax.lax.map(one, jnp.arange(own.count, dtype=jnp.int32))
    return visited.sum(), full.sum()


Pair = tuple[Any, Any]


def tile_ranges(bounds: Bounds, other: Blocks) -> tuple[list[Pair], list[Pair]]:
    """Ranges of tiles for ranges of positions: those to visit and those that are FULL.

    Both are disjoint and ascend.

    Works on the bounds of all blocks, and inside a kernel on those of one.
    """

    def clipped(x: Any) -> jax.Array:
        return jnp.clip(jnp.asarray(x, jnp.int32), 0, other.length)

    size, visit, full = other.size, [], []
    for begin, end in bounds.visit:
        begin, end = clipped(begin), clipped(end)
        some = begin < end
        visit.append((jnp.where(some, begin // size, 0), jnp.where(some, -(-end // size), 0)))
    for begin, end in bounds.full:
        first, stop = -(-clipped(begin) // size), clipped(end) // size
        some = first < stop
        full.append((jnp.where(some, first, 0), jnp.where(some, stop, 0)))
    return _disjoint(visit), _disjoint(full)


def _ranges(bounds: Bounds, own: Blocks, other: Blocks) -> Ranges:
    visit, full = tile_ranges(bounds, other)
    shapes = (jnp.shape(x) for pair in (*visit, *full) for x in pair)
    lead = jnp.broadcast_shapes((1, 1, own.count), *shapes)
    return Ranges(_pairs(visit, lead), _pairs(full, lead))


def _disjoint(ranges: list[Pair]) -> list[Pair]:
    """Orders two ranges of tiles and takes from the second what the first already holds."""
    if len(ranges) == 1:
        return ranges
    (b0, e0), (b1, e1) = ranges
    swap = b1 < b0
    b0, b1 = jnp.where(swap, b1, b0), jnp.where(swap, b0, b1)
    e0, e1 = jnp.where(swap, e1, e0), jnp.where(swap, e0, e1)
    b1 = jnp.maximum(b1, e0)
    return [(b0, e0), (b1, jnp.maximum(b1, e1))]


def _pairs(ranges: list[Pair], lead: tuple[int, ...]) -> jax.Array:
    return jnp.stack(
        [jnp.stack([jnp.broadcast_to(x, lead) for x in pair], -1) for pair in ranges], -2
    )


def _lists(verdict: jax.Array, other: Blocks) -> Lists:
    lead = verdict.shape[:-1]
    verdict = jnp.broadcast_to(verdict, (*lead, other.count))
    index = jnp.arange(other.count, dtype=jnp.int32)
    whole = (index + 1) * other.size <= other.length
    empty = verdict == EMPTY
    codes = 2 * index + ((verdict == FULL) & whole).astype(jnp.int32)
    order = jnp.argsort(empty, axis=-1, stable=True)
    codes = jnp.take_along_axis(codes, order, -1)
    return Lists((~empty).sum(-1, dtype=jnp.int32), codes)


def groups(walk: Schedule) -> tuple[int, int]:
    """How many batch members and heads have schedules of their own (1 = all share one)."""
    leaf = jax.tree.leaves(walk)[0]
    return leaf.shape[0], leaf.shape[1]


def size_bytes(walk: Schedule) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(walk))


@functools.lru_cache(maxsize=4096)
def hides(mask: Mask | None, rows: int, columns: int) -> tuple[bool, bool]:
    """Whether some row sees no column at all, and whether some column is seen by no row.

    True where that is not known before the arrays are.
    """
    if mask is None:
        return False, False
    by_row = mask.seen(np.arange(rows), columns, "rows")
    by_column = mask.seen(np.arange(columns), rows, "columns")

    def any_empty(seen: Range | None, length: int) -> bool:
        return seen is None or bool(
            (np.maximum(seen.begin, 0) >= np.minimum(seen.end, length)).any()
        )

    return any_empty(by_row, columns), any_empty(by_column, rows)
