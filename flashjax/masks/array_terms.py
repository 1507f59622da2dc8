"""Mask terms that carry arrays: ids, intervals, dense values, blocks, a user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.elementwise import (
    UserFunction,
    check_function,
    check_named,
    check_tile_verdict,
    trial,
)
from flashjax.masks.algebra import EMPTY, FULL, PARTIAL, Mask
from flashjax.masks.bounds import (
    INT_MAX,
    Axis,
    Blocks,
    Bounds,
    Range,
    comparable,
    hull,
    prefix_max,
    search,
    suffix_min,
)
from flashjax.structure import (
    At,
    Blocked,
    Dims,
    Place,
    clipped,
    describe,
    moved,
    operand,
    replace,
    structure,
)


@structure
class Segments(Mask):
    """Columns whose segment id equals the row's; a negative id is padding and matches nothing.

    ``query`` (*batch, T) or (T,), ``key`` (*batch, S) or (S,); ``key=None`` takes ``query``.
    Ids may stand in any order; tiles are skipped best when they ascend, as in packed documents.
    """

    query: Any = operand("row", integer=True)
    key: Any = operand("column", integer=True, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ids in (("query", self.query), ("key", self.key)):
            if ids is not None and ids.dtype in (jnp.uint32, jnp.uint64):
                raise TypeError(
                    f"Segments({name}=…) has dtype {ids.dtype}, where padding cannot be negative; "
                    "wanted a signed or short integer dtype. Cast the ids to int32."
                )

    def aligned(self, dims: Dims) -> Self:
        if self.key is None and dims.rows != dims.columns:
            raise ValueError(
                f"Segments(key=…) is None with T = {dims.rows} and S = {dims.columns}; wanted the "
                "key/value side's ids too. Pass Segments(query, key), or segment_ids=(q, kv)."
            )
        both = replace(self, key=self.query if self.key is None else self.key)
        new = super(Segments, both).aligned(dims)

        wide = jnp.int64 in (new.query.dtype, new.key.dtype)
        dtype = jnp.int64 if wide else jnp.int32
        return replace(self, query=new.query.astype(dtype), key=new.key.astype(dtype))

    def placed(self, place: Place) -> Self:
        if self.key is None:
            raise ValueError(
                "Segments(key=…) is None while decoding; wanted the ids of the rows of this call "
                "and those of the cache's columns. Pass Segments(query, key), or "
                "segment_ids=(q, kv)."
            )
        return super().placed(place)

    def keep(self, at: At) -> jax.Array:
        return (self.query == self.key) & (self.query >= 0)

    def _vectors(self, axis: Axis) -> tuple[jax.Array, jax.Array]:
        query, key = self.query[..., 0], self.key[..., 0, :]
        return (query, key) if axis == "rows" else (key, query)

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        own, other = self._vectors(axis)
        low, high, uniform = _id_span(blocks, own)
        if comparable(low.size * length):
            at = other[..., None, :]
            visit, whole = hull((at >= low[..., None]) & (at <= high[..., None]))
            same = visit
        else:
            visit, same, whole = _search_ids(other, low, high)
        end = jnp.where(uniform & whole, same.end, same.begin)
        return Bounds((visit,), (Range(same.begin, end),))

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        query, key = self._vectors("rows")
        q_low, q_high, q_uniform = (x[..., :, None] for x in _id_span(rows, query))
        k_low, k_high, k_uniform = (x[..., None, :] for x in _id_span(columns, key))
        meet = (q_low <= k_high) & (k_low <= q_high)
        full = q_uniform & k_uniform & (q_low == k_low)
        return jnp.where(meet, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int8)


def _search_ids(
    other: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[Range, Range, jax.Array]:
    """The range that may hold ids of low … high; one that holds `low` alone; without padding?"""
    # Both hulls ascend, for unsorted ids too: before `begin` every id is below the block's
    # lowest, from `end` on every id is above its highest.
    upper = prefix_max(jnp.where(other >= 0, other, -1))
    lower = suffix_min(jnp.where(other >= 0, other, jnp.iinfo(other.dtype).max))
    visit = Range(search(upper, low, "left"), search(lower, high, "right"))
    # Where both hulls equal the block's one id, so does every id between, padding apart.
    begin = jnp.maximum(visit.begin, search(lower, low, "left"))
    end = jnp.minimum(search(upper, low, "right"), visit.end)
    begin = jnp.minimum(begin, end)
    padding = jnp.cumsum(other < 0, axis=-1, dtype=jnp.int32)
    padding = jnp.pad(padding, [(0, 0)] * (padding.ndim - 1) + [(1, 0)])
    padding = jnp.broadcast_to(padding, (*begin.shape[:-1], padding.shape[-1]))
    clean = jnp.take_along_axis(padding, end, -1) == jnp.take_along_axis(padding, begin, -1)
    return visit, Range(begin, end), clean


def _id_span(blocks: Blocks, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per block: lowest and highest id that is no padding, and whether all are one such id."""
    real = ids >= 0
    low = blocks.minimum(jnp.where(real, ids, jnp.iinfo(ids.dtype).max))
    high = blocks.maximum(jnp.where(real, ids, -1))
    return low, high, (low == high) & (blocks.minimum(ids) >= 0)


@structure
class Intervals(Mask):
    """Column j is allowed for rows ``begin[j] … end[j]−1``; arrays (S,) or (*batch, [N|1,] S).

    One term says documents, causal documents (with ``& Causal()``), a shared question with
    several answers, random eviction; ``|`` and ``~`` give more. After FlashMask (Wang et al.
    2024, arXiv:2410.01359), which lists the hidden intervals; ``~Intervals`` is a hidden one.
    """

    begin: Any = operand("column", integer=True)
    end: Any = operand("column", integer=True)

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        return replace(
            self,
            begin=clipped(jnp.asarray(new.begin), 0, dims.rows),
            end=clipped(jnp.asarray(new.end), 0, dims.rows),
        )

    def placed(self, place: Place) -> Self:
        new = super().placed(place)
        return replace(new, begin=moved(new.begin, -place.row), end=moved(new.end, -place.row))

    def keep(self, at: At) -> jax.Array:
        return (at.row >= self.begin) & (at.row < self.end)

    def _vectors(self) -> tuple[jax.Array, jax.Array]:
        """Begin and end per column; an empty interval starts after every row and ends before."""
        begin, end = jnp.broadcast_arrays(self.begin[..., 0, :], self.end[..., 0, :])
        empty = begin >= end
        return jnp.where(empty, INT_MAX, begin), jnp.where(empty, -1, end)

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        begin, end = self._vectors()
        if axis == "columns":
            visit = Range(blocks.minimum(begin), blocks.maximum(end))
            full = Range(blocks.maximum(begin), blocks.minimum(end))
        elif comparable(begin.size * blocks.count):
            first, last = blocks.begin[:, None], blocks.last[:, None]
            begin, end = begin[..., None, :], end[..., None, :]
            visit, _ = hull((begin <= last) & (end > first))
            (start, stop), whole = hull((begin <= first) & (end > last))
            full = Range(start, jnp.where(whole, stop, start))
        else:
            first, last = blocks.begin, blocks.last
            visit = Range(
                search(prefix_max(end), first, "right"), search(suffix_min(begin), last, "right")
            )
            full = Range(
                search(suffix_min(end), last, "right"), search(prefix_max(begin), first, "right")
            )
        return Bounds((visit,), (full,), exact=False)

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        begin, end = self._vectors()
        first, last = rows.begin[:, None], rows.last[:, None]

        def per_tile(x: jax.Array) -> jax.Array:
            return x[..., None, :]

        meet = (per_tile(columns.minimum(begin)) <= last) & (per_tile(columns.maximum(end)) > first)
        full = (per_tile(columns.maximum(begin)) <= first) & (per_tile(columns.minimum(end)) > last)
        return jnp.where(meet, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int8)


@structure
class Dense(Mask):
    """A boolean array, True where allowed, that broadcasts to (*batch, N, T, S)."""

    values: Any = operand("tile")

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = getattr(self.values, "dtype", type(self.values).__name__)
        if dtype != jnp.bool_:
            raise TypeError(
                f"mask has dtype {dtype}; wanted bool, True where a column is allowed. "
                "Of a 0/1 mask write mask.astype(bool); an additive mask (0, −inf) goes in as bias."
            )

    def keep(self, at: At) -> jax.Array:
        return self.values

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        values = self.values.astype(jnp.int8)
        low, high = values, values
        if values.shape[-1] != 1:
            low, high = columns.minimum(low), columns.maximum(high)
        if values.shape[-2] != 1:
            low = rows.minimum(low.swapaxes(-1, -2)).swapaxes(-1, -2)
            high = rows.maximum(high.swapaxes(-1, -2)).swapaxes(-1, -2)
        return low + high


@structure
class BlockSparse(Mask):
    """A boolean per block of ``block_rows`` × ``block_columns``: ([*batch,] [N|1,] nr, nc)."""

    blocks: Any = operand("tile")
    block_rows: int = dataclasses.field(default=128)
    block_columns: int = dataclasses.field(default=128)

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = getattr(self.blocks, "dtype", type(self.blocks).__name__)
        if dtype != jnp.bool_:
            raise TypeError(f"BlockSparse(blocks=…) has dtype {dtype}; wanted bool.")
        for name in ("block_rows", "block_columns"):
            size: Any = getattr(self, name)
            if isinstance(size, np.integer):
                object.__setattr__(self, name, size := int(size))
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"BlockSparse({name}=…) is {size!r}; wanted a Python int >= 1.")

    def aligned(self, dims: Dims) -> Self:
        counts = (-(-dims.rows // self.block_rows), -(-dims.columns // self.block_columns))
        if tuple(self.blocks.shape[-2:]) != counts:
            raise ValueError(
                f"BlockSparse.blocks has shape {tuple(self.blocks.shape)}; wanted (…, {counts[0]}, "
                f"{counts[1]}) for T = {dims.rows}, S = {dims.columns} in blocks of "
                f"{self.block_rows} × {self.block_columns}."
            )
        blocks = super().aligned(Dims(dims.batch, dims.heads, *counts)).blocks
        return replace(self, blocks=Blocked(blocks, self.block_rows, self.block_columns))

    def placed(self, place: Place) -> Self:
        raise NotImplementedError(
            "mask holds BlockSparse while decoding: its blocks do not lie on the blocks of a part. "
            "Pass the rows of this call as a bool array instead."
        )

    def keep(self, at: At) -> jax.Array:
        return self.blocks

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        # Counts of allowed blocks under every corner, so that a tile of any size costs four reads.
        values = self.blocks.values.astype(jnp.int32)
        corner = jnp.cumsum(jnp.cumsum(values, -1), -2)
        corner = jnp.pad(corner, [(0, 0)] * (values.ndim - 2) + [(1, 0), (1, 0)])
        top, bottom = rows.begin // self.block_rows, rows.last // self.block_rows + 1
        left, right = columns.begin // self.block_columns, columns.last // self.block_columns + 1

        def count(r: Any, c: Any) -> jax.Array:
            return corner[..., r[:, None], c[None, :]]

        allowed = count(bottom, right) - count(top, right) - count(bottom, left) + count(top, left)
        size = (bottom - top)[:, None] * (right - left)[None, :]
        return jnp.where(allowed == 0, EMPTY, jnp.where(allowed == size, FULL, PARTIAL)).astype(
            jnp.int8
        )


@structure
class Predicate(UserFunction, Mask):
    """A user's elementwise jnp function ``fn(row, column, **arrays) -> bool``.

    ``rows`` (T,) or (*batch, T), ``columns`` (S,) or (*batch, S), ``scalars`` () or (*batch,) and
    ``heads`` (N,) are dicts of arrays that `fn` takes as keyword arguments, on the tile. `fn` is
    compared by identity: define it once, outside the step function. ``tile_verdict(row_begin,
    row_end, column_begin, column_end)`` may tell tiles apart: ends exclusive, returns
    ``masks.EMPTY``, ``PARTIAL`` or ``FULL`` elementwise; without it every tile is PARTIAL. `fn`
    sees ``row + row_offset`` and ``column + column_offset``.
    """

    fn: Callable[..., jax.Array]
    rows: Any = operand("row", default_factory=dict)
    columns: Any = operand("column", default_factory=dict)
    scalars: Any = operand("scalar", default_factory=dict)
    heads: Any = operand("head", default_factory=dict)
    tile_verdict: Callable[..., jax.Array] | None = None
    row_offset: Any = operand("scalar", integer=True, default=0)
    column_offset: Any = operand("scalar", integer=True, default=0)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Predicate(fn=…) is {describe(self.fn)}; wanted a function.")
        if self.tile_verdict is not None and not callable(self.tile_verdict):
            raise TypeError(
                f"Predicate(tile_verdict=…) is {describe(self.tile_verdict)}; wanted a function of "
                "(row_begin, row_end, column_begin, column_end), or None."
            )
        super().__post_init__()
        check_named(self, "rows", "columns", "scalars", "heads")

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        tile = trial(jnp.int32)
        out = check_function("Predicate(fn=…)", self.fn, (tile, tile), self._named())
        if out.dtype != jnp.bool_:
            raise TypeError(
                f"Predicate(fn=…) returns {describe(out)} for a tile; wanted bool: compare."
            )
        if self.tile_verdict is not None:
            check_tile_verdict("Predicate(tile_verdict=…)", self.tile_verdict)
        return new

    def keep(self, at: At) -> jax.Array:
        row, column = at.row + self.row_offset, at.column + self.column_offset
        return self.fn(row, column, **self._named())

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        if self.tile_verdict is not None:
            return None
        return Bounds((Range(0, length),), (Range(0, 0),))

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        if self.tile_verdict is None:
            return super().verdict(rows, columns)
        row, column = self.row_offset, self.column_offset
        found = jnp.asarray(
            self.tile_verdict(
                rows.begin[:, None] + row,
                rows.last[:, None] + 1 + row,
                columns.begin[None, :] + column,
                columns.last[None, :] + 1 + column,
            )
        )
        # Offsets that are operands bring batch and heads in front.
        lead = jnp.broadcast_shapes((1, 1), *(jnp.shape(x)[:2] for x in (row, column)))
        grid = (*lead, rows.count, columns.count)
        padded = (1,) * (4 - found.ndim) + found.shape
        if len(padded) != 4 or any(x not in (1, n) for x, n in zip(padded, grid, strict=True)):
            raise ValueError(
                f"Predicate(tile_verdict=…) returned shape {found.shape} for {grid[2:]} tiles; "
                "wanted one verdict a tile: combine its arguments elementwise."
            )
        return jnp.broadcast_to(found.astype(jnp.int8).reshape(padded), grid)
