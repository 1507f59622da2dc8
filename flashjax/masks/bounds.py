"""Blocks of an axis, ranges of positions seen from each block, and their algebra.

Ranges are half-open, in elements (not tiles), and hold arrays that broadcast to
(B|1, N|1, number of blocks). Every range list is a union; at most two ranges describe a mask in
closed form, which covers sink tokens plus a window, or a prefix plus a causal part.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Axis = Literal["rows", "columns"]
MAX_RANGES = 2
INT_MAX = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An axis of `length` positions cut into blocks of `size`; the last may be ragged."""

    length: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def padded(self) -> int:
        return self.count * self.size

    # jnp, not numpy: a traced numpy array becomes a captured constant, which custom_partitioning
    # does not take.
    @property
    def begin(self) -> jax.Array:
        return jnp.arange(self.count, dtype=jnp.int32) * self.size

    @property
    def last(self) -> jax.Array:
        """The last position of each block that exists."""
        return jnp.minimum(self.begin + self.size, self.length) - 1

    def minimum(self, vector: jax.Array) -> jax.Array:
        """Per-block minimum over the last axis: (…, length) -> (…, count)."""
        return self._split(vector, jnp.iinfo(vector.dtype).max).min(-1)

    def maximum(self, vector: jax.Array) -> jax.Array:
        return self._split(vector, jnp.iinfo(vector.dtype).min).max(-1)

    def _split(self, vector: jax.Array, fill: int) -> jax.Array:
        pad = [(0, 0)] * (vector.ndim - 1) + [(0, self.padded - self.length)]
        padded = jnp.pad(vector, pad, constant_values=fill)
        return padded.reshape(*vector.shape[:-1], self.count, self.size)


class Range(NamedTuple):
    """Positions begin … end−1; empty where end <= begin."""

    begin: Any
    end: Any


class Bounds(NamedTuple):
    """What each block sees of the other axis.

    ``visit``: outside these ranges nothing is allowed. ``full``: inside them everything is.
    ``exact``: no tile within ``visit`` is EMPTY; else a tile list can skip more.
    """

    visit: tuple[Range, ...]
    full: tuple[Range, ...]
    exact: bool = True


def intersect(a: Bounds, b: Bounds) -> Bounds | None:
    visit = _products(a.visit, b.visit)
    if len(visit) > MAX_RANGES:
        return None
    # Ranges of FULL tiles may be dropped: a tile is then masked for nothing, but right.
    return Bounds(visit, _products(a.full, b.full)[:MAX_RANGES], a.exact and b.exact)


def unite(a: Bounds, b: Bounds) -> Bounds | None:
    visit = a.visit + b.visit
    if len(visit) > MAX_RANGES:
        return None
    return Bounds(visit, (a.full + b.full)[:MAX_RANGES], a.exact and b.exact)


def complement(a: Bounds, length: int) -> Bounds | None:
    """The bounds of Not: what was FULL is EMPTY, what was outside ``visit`` is FULL."""
    visit, full = _complement(a.full, length), _complement(a.visit, length)
    if len(visit) > MAX_RANGES:
        return None
    return Bounds(visit, full[:MAX_RANGES], a.exact)


def _products(a: tuple[Range, ...], b: tuple[Range, ...]) -> tuple[Range, ...]:
    return tuple(Range(_max(x.begin, y.begin), _min(x.end, y.end)) for x in a for y in b)


def _complement(ranges: tuple[Range, ...], length: int) -> tuple[Range, ...]:
    kept: tuple[Range, ...] = (Range(0, length),)
    for begin, end in ranges:
        opens = isinstance(begin, int) and begin <= 0
        closes = isinstance(end, int) and end >= length
        if opens and closes:
            outside = [Range(0, 0)]
        elif opens:
            outside = [Range(end, length)]
        elif closes:
            outside = [Range(0, begin)]
        else:
            # An empty range may lie anywhere; moved to 0 … 0, its complement is everything.
            empty = jnp.asarray(begin) >= jnp.asarray(end)
            outside = [
                Range(0, jnp.where(empty, 0, begin)),
                Range(jnp.where(empty, 0, end), length),
            ]
        kept = _products(kept, tuple(outside))
    return kept


def _max(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _min(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def span(first: Range, last: Range) -> Bounds:
    """The bounds of a block from the ranges that its first and last position see.

    Right where both ends of the range move monotonically along the axis and neighbouring
    positions' ranges touch, so that their union has no gap.
    """
    return Bounds(
        visit=(Range(_min(first.begin, last.begin), _max(first.end, last.end)),),
        full=(Range(_max(first.begin, last.begin), _min(first.end, last.end)),),
    )


# The most block, position pairs that `hull` compares at once: 64 MiB where a compiler keeps them.
HULL_LIMIT = 2**24


def comparable(pairs: int) -> bool:
    """Whether to find ranges by :func:`hull` (else by :func:`search` in running extremes).

    Comparing all with all is one fused reduction. A binary search and a running maximum do less, in
    O(T + S) memory, but in loops and scans: on a GPU rows of launches, about 1 ms a mask.
    """
    return pairs <= HULL_LIMIT


def hull(seen: jax.Array) -> tuple[Range, jax.Array]:
    """From the first to the last position that each block sees (…, blocks, length); whether all."""
    length = seen.shape[-1]
    position = jnp.arange(length, dtype=jnp.int32)
    begin = jnp.where(seen, position, length).min(-1)
    end = jnp.where(seen, position + 1, 0).max(-1)
    return Range(begin, end), seen.sum(-1, dtype=jnp.int32) == end - begin


def search(ordered: jax.Array, values: Any, side: Literal["left", "right"]) -> jax.Array:
    """``searchsorted`` along the last axis; leading dims broadcast. Returns int32."""
    values = jnp.asarray(values, ordered.dtype)
    lead = jnp.broadcast_shapes(ordered.shape[:-1], values.shape[:-1])
    flat = jnp.broadcast_to(ordered, (*lead, ordered.shape[-1])).reshape(-1, ordered.shape[-1])
    wanted = jnp.broadcast_to(values, (*lead, values.shape[-1])).reshape(-1, values.shape[-1])
    found = jax.vmap(lambda o, v: jnp.searchsorted(o, v, side=side))(flat, wanted)
    return found.astype(jnp.int32).reshape(*lead, values.shape[-1])


def prefix_max(vector: jax.Array) -> jax.Array:
    return jax.lax.cummax(vector, axis=vector.ndim - 1)


def suffix_min(vector: jax.Array) -> jax.Array:
    return jax.lax.cummin(vector, axis=vector.ndim - 1, reverse=True)
