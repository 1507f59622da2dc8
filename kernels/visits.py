"""The tile schedule as kernels read it: PARTIAL tiles first, then FULL ones, each a simple loop.

A loop whose body never changes is one that a compiler can pipeline, so a kernel runs two: one that
evaluates the element mask and one that does not. The online softmax takes tiles in any order.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.masks import Lists, Ranges, Schedule
from flashjax.masks.schedule import Pair


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """``ranges``: int32 (B|1, N|1, blocks|1, R, 2), begin and end; the first ``partial`` of the R
    hold PARTIAL tiles, the rest FULL ones. They hold tile indices, or where ``tiles`` is given,
    int32 (B|1, N|1, blocks|1, tiles), positions in it.
    """

    ranges: Any
    tiles: Any
    partial: int = dataclasses.field(metadata={"static": True})


def visits(walk: Schedule, *, masked: bool = False) -> Visits:
    """Parts a schedule; with `masked` every tile counts as PARTIAL."""
    if isinstance(walk, Lists):
        return _from_lists(walk, masked)
    return _from_ranges(walk, masked)


def _from_lists(walk: Lists, masked: bool) -> Visits:
    codes, count = walk.codes, walk.count
    valid = jnp.arange(codes.shape[-1], dtype=jnp.int32) < count[..., None]
    full = valid & (codes % 2 == 1)
    if masked:
        full = jnp.zeros_like(full)
    order = jnp.argsort(jnp.where(valid, full.astype(jnp.int32), 2), axis=-1, stable=True)
    tiles = jnp.take_along_axis(jnp.broadcast_to(codes // 2, order.shape), order, -1)
    n_partial = count - full.sum(-1, dtype=jnp.int32)
    partial = jnp.stack([jnp.zeros_like(n_partial), n_partial], -1)
    whole = jnp.stack([n_partial, jnp.broadcast_to(count, n_partial.shape)], -1)
    ranges = [partial] if masked else [partial, whole]
    return Visits(jnp.stack(ranges, -2), tiles, 1)


def _from_ranges(walk: Ranges, masked: bool) -> Visits:
    partial, full = parted(_pairs(walk.visit), _pairs(walk.full), masked=masked)
    stacked = [jnp.stack(jnp.broadcast_arrays(*pair), -1) for pair in (*partial, *full)]
    return Visits(jnp.stack(stacked, -2), None, len(partial))


def parted(
    visit: list[Pair], full: list[Pair], *, masked: bool = False
) -> tuple[list[Pair], list[Pair]]:
    """Ranges of PARTIAL and of FULL tiles, from disjoint ranges of all and of FULL ones."""
    if masked:
        return visit, []
    inside = [(jnp.maximum(b, x), jnp.minimum(e, y)) for b, e in visit for x, y in full]
    outside: list[Pair] = []
    for begin, end in visit:
        starts, ends = [y for _, y in full], [x for x, _ in full]
        for start, stop in zip([begin, *starts], [*ends, end], strict=True):
            outside.append((jnp.maximum(begin, start), jnp.minimum(end, stop)))

    def ordered(pairs: list[Pair]) -> list[Pair]:
        return [(begin, jnp.maximum(begin, end)) for begin, end in pairs]

    return ordered(outside), ordered(inside)


def _pairs(ranges: jax.Array) -> list[Pair]:
    return [(ranges[..., i, 0], ranges[..., i, 1]) for i in range(ranges.shape[-2])]


def tile_at(ranges: list[Pair], index: Any) -> Any:
    """The index-th of the tiles in the ranges, from scalars in a kernel."""
    before = list(itertools.accumulate((end - begin for begin, end in ranges), initial=0))
    tile = ranges[0][0] + index
    for (begin, _), count in zip(ranges[1:], before[1:], strict=False):
        tile = jnp.where(index >= count, begin + index - count, tile)
    return tile


def count_of(ranges: list[Pair]) -> Any:
    return sum(end - begin for begin, end in ranges)
