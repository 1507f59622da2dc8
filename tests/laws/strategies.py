"""Masks to try the laws on, each drawn with the boolean array that it should mean.

The array is made in numpy from the term's definition in words, not from the term's code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st

from flashjax import masks
from flashjax.structure import Dims

Array = np.ndarray
Axis = Literal["rows", "columns"]
AXES: tuple[Axis, ...] = ("rows", "columns")
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Grid(NamedTuple):
    """The logits' dimensions and the tiles they are cut into."""

    batch: tuple[int, ...]
    heads: int
    rows: int
    columns: int
    row_block: int
    column_block: int

    @property
    def dims(self) -> Dims:
        return Dims(self.batch, self.heads, self.rows, self.columns)

    @property
    def logits(self) -> tuple[int, int, int, int]:
        return int(np.prod(self.batch)), self.heads, self.rows, self.columns

    @property
    def row_blocks(self) -> masks.Blocks:
        return masks.Blocks(self.rows, self.row_block)

    @property
    def column_blocks(self) -> masks.Blocks:
        return masks.Blocks(self.columns, self.column_block)

    def along(self, axis: Axis) -> tuple[masks.Blocks, masks.Blocks]:
        """The blocks of the axis, and those of the other one, which is walked."""
        blocks = self.row_blocks, self.column_blocks
        return blocks if axis == "rows" else blocks[::-1]

    @property
    def positions(self) -> tuple[Array, Array]:
        """Row and column of every element, int64, (T, 1) and (1, S)."""
        return np.arange(self.rows)[:, None], np.arange(self.columns)[None, :]


@dataclasses.dataclass(frozen=True, repr=False)
class Drawn:
    grid: Grid
    mask: masks.Mask
    dense: Array  # (B, N, T, S): what the mask should mean

    def __repr__(self) -> str:
        values = [np.asarray(x).tolist() for x in jax.tree.leaves(self.mask)]
        return f"{self.mask!r} holding {values} on {self.grid}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def with_mask(self, mask: masks.Mask, dense: Array) -> "Drawn":
        return dataclasses.replace(self, mask=mask, dense=dense)

    def __and__(self, other: "Drawn") -> "Drawn":
        return self.with_mask(self.mask & other.mask, self.dense & other.dense)

    def __or__(self, other: "Drawn") -> "Drawn":
        return self.with_mask(self.mask | other.mask, self.dense | other.dense)

    def __invert__(self) -> "Drawn":
        return self.with_mask(~self.mask, ~self.dense)


LENGTHS = (1, 2, 5, 8, 13, 31, 32, 47, 64, 67, 70)
TILE_SIZES = (1, 3, 4, 7, 8, 13, 16, 32, 64)


@st.composite
def grids(draw: Draw, square: bool = False) -> Grid:
    rows = draw(st.sampled_from(LENGTHS))
    columns = rows if square else draw(st.sampled_from(LENGTHS))
    return Grid(
        draw(st.sampled_from([(), (1,), (2,), (2, 1)])),
        draw(st.sampled_from([1, 3])),
        rows,
        columns,
        draw(st.sampled_from(TILE_SIZES)),
        draw(st.sampled_from(TILE_SIZES)),
    )


def meaning(grid: Grid, mask: masks.Mask, dense: Any) -> Drawn:
    return Drawn(grid, mask, np.broadcast_to(dense, grid.logits))


def generators() -> st.SearchStrategy[np.random.Generator]:
    """For arrays too long to draw element by element."""
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


FAR = (-(2**31), -(2**30), 2**30, 2**31 - 1)
OFFSETS = st.one_of(st.integers(-3, 3), st.integers(-80, 80), st.sampled_from(FAR))
SIZES = st.one_of(st.integers(0, 5), st.integers(-3, 80), st.sampled_from(FAR))


@st.composite
def scalars(draw: Draw, grid: Grid, values: st.SearchStrategy[int]) -> tuple[Any, Array]:
    """An integer in any form that a scalar operand may have, and int64 (B|1, N|1, 1, 1)."""
    b, n = grid.batch, grid.heads
    forms = [None, (), b, (*b, n), (*b, 1), (*(1 for _ in b), n)]
    shape = draw(st.sampled_from(forms))
    if shape is None:
        value = draw(st.one_of(values, st.sampled_from([-(2**40), 2**40])))
        return value, np.full((1, 1, 1, 1), value)
    size = int(np.prod(shape))
    array = np.reshape(draw(st.lists(values, min_size=size, max_size=size)), shape)
    kinds = [t for t in (np.int32, np.uint32, np.int8, np.uint8) if _fits(array, t)]
    batched = shape[: len(b)] if len(shape) >= len(b) > 0 else ()
    wide = array.reshape(int(np.prod(batched)), -1, 1, 1).astype(np.int64)
    return array.astype(draw(st.sampled_from(kinds))), wide


def _fits(array: Array, dtype: Any) -> bool:
    return bool(np.all((np.iinfo(dtype).min <= array) & (array <= np.iinfo(dtype).max)))


@st.composite
def causal(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    offset, o = draw(scalars(grid, OFFSETS))
    align, shift = draw(
        st.sampled_from([("top_left", 0), ("bottom_right", grid.columns - grid.rows)])
    )
    return meaning(grid, masks.Causal(offset, align), column <= row + o + shift)


@st.composite
def window(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    side = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 80), st.just(2**31 - 1))
    left, right = draw(side), draw(side)
    # Sides without end are for offsets within the array, and the other way round.
    endless = 2**31 - 1 in (left, right)
    offset, o = (0, 0) if endless else draw(scalars(grid, OFFSETS))
    dense = np.ones(grid.logits, bool)
    if left is not None:
        dense &= column >= row + o - left
    if right is not None:
        dense &= column <= row + o + right
    return meaning(grid, masks.Window(left, right, offset), dense)


@st.composite
def lengths(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    dense, limits = np.ones(grid.logits, bool), []
    for position in (row, column):
        if draw(st.booleans()):
            limit, wide = draw(scalars(grid, SIZES))
            dense &= position < wide
            limits.append(limit)
        else:
            limits.append(None)
    return meaning(grid, masks.Lengths(*limits), dense)


@st.composite
def prefix(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    length, wide = draw(scalars(grid, SIZES))
    return meaning(grid, masks.Prefix(length), (column < wide) & (row >= 0))


@st.composite
def chunked(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    size = draw(st.one_of(st.integers(1, 9), st.integers(1, 80), st.just(2**30)))
    offset, o = draw(scalars(grid, OFFSETS))
    return meaning(grid, masks.Chunked(size, offset), (row + o) // size == column // size)


def segment_ids(r: np.random.Generator, shape: tuple[int, ...], order: str) -> Array:
    """Ids "ascending" with padding at both ends, or with "holes" of it, or in "any" order."""
    if order == "any":
        return r.integers(-2, r.integers(1, 5), shape)
    ids = np.sort(r.integers(0, r.integers(1, 6), shape), -1)
    if order == "holes":
        return np.where(r.random(shape) < 0.1, -3, ids)
    padding = r.integers(0, shape[-1] + 1, 2) if r.random() < 0.5 else (0, 0)
    position = np.arange(shape[-1])
    return np.where((position < padding[0] // 2) | (position >= shape[-1] - padding[1]), -1, ids)


def rank4(grid: Grid, array: Array, axis: str) -> Array:
    """A row or column vector, (L,), (*batch, L) or (*batch, N|1, L), as (B|1, N|1, T|1, S|1)."""
    rest = array.shape[len(grid.batch) :] if array.ndim > 1 else array.shape
    lead = (int(np.prod(array.shape[: array.ndim - len(rest)])), *rest[:-1])
    lead = lead if len(lead) == 2 else (*lead, 1)
    length = array.shape[-1]
    return array.reshape(*lead, *((length, 1) if axis == "rows" else (1, length)))


def _vector_shape(draw: Draw, grid: Grid, length: int) -> tuple[int, ...]:
    b, n = grid.batch, grid.heads
    return (*draw(st.sampled_from([(), b, (*b, 1), (*b, n)])), length)


@st.composite
def segments(draw: Draw, grid: Grid) -> Drawn:
    r = draw(generators())
    order = draw(st.sampled_from(["any", "ascending", "holes"]))
    query = segment_ids(r, _vector_shape(draw, grid, grid.rows), order)
    key = segment_ids(r, _vector_shape(draw, grid, grid.columns), order)
    if grid.rows == grid.columns and draw(st.booleans()):
        key = query
    q, k = rank4(grid, query, "rows"), rank4(grid, key, "columns")
    dtype = draw(st.sampled_from([np.int32, np.int8]))
    arrays = [query.astype(dtype)] + ([] if key is query else [key.astype(np.int32)])
    return meaning(grid, masks.Segments(*arrays), (q == k) & (q >= 0))


@st.composite
def intervals(draw: Draw, grid: Grid) -> Drawn:
    r = draw(generators())
    shape = _vector_shape(draw, grid, grid.columns)
    end_shape = shape if draw(st.booleans()) else (grid.columns,)
    longest = draw(st.sampled_from([3, 20, 150]))
    begin = r.integers(-5, grid.rows + 5, shape)
    end = np.asarray(r.integers(-5, grid.rows + 5, end_shape))
    if end_shape == shape:
        end = begin + r.integers(-2, longest, shape)
    begin, end = (np.sort(x, -1) if draw(st.booleans()) else x for x in (begin, end))
    b, e = rank4(grid, begin, "columns"), rank4(grid, end, "columns")
    row, _ = grid.positions
    term = masks.Intervals(begin.astype(np.int32), end.astype(np.int32))
    return meaning(grid, term, (row >= b) & (row < e))


def _tile_shape(draw: Draw, grid: Grid, rows: int, columns: int) -> tuple[int, ...]:
    """Shapes that broadcast to (*batch, N, rows, columns) from the right."""
    full = (*grid.batch, grid.heads, rows, columns)
    kept = full[draw(st.integers(0, len(full) - 2)) :]
    return tuple(size if draw(st.booleans()) else 1 for size in kept[:-2]) + kept[-2:]


def _flat(grid: Grid, values: Array) -> Array:
    """Values that broadcast to (*batch, N, …, …) as (B, N, …, …)."""
    full = (*grid.batch, grid.heads, *values.shape[-2:])
    return np.broadcast_to(values, full).reshape(*grid.logits[:2], *values.shape[-2:])


@st.composite
def dense(draw: Draw, grid: Grid) -> Drawn:
    rows, columns = (draw(st.sampled_from([1, size])) for size in (grid.rows, grid.columns))
    shape = _tile_shape(draw, grid, rows, columns)
    values = draw(generators()).random(shape) < draw(st.sampled_from([0.05, 0.5, 0.95]))
    return meaning(grid, masks.Dense(values), _flat(grid, values))


@st.composite
def block_sparse(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    sizes = [draw(st.sampled_from([1, 4, 5, 16, 30])) for _ in range(2)]
    counts = (-(-grid.rows // sizes[0]), -(-grid.columns // sizes[1]))
    shape = _tile_shape(draw, grid, *counts)
    blocks = draw(generators()).random(shape) < draw(st.sampled_from([0.2, 0.5, 0.8]))
    meant = _flat(grid, blocks)[:, :, row // sizes[0], column // sizes[1]]
    return meaning(grid, masks.BlockSparse(blocks, *sizes), meant)


def _matches(row: Any, column: Any, tag: Any, other: Any, shift: Any, stride: Any) -> Any:
    return (tag == other) | (column + shift == row * stride)


@st.composite
def predicate(draw: Draw, grid: Grid) -> Drawn:
    row, column = grid.positions
    r = draw(generators())
    tag = r.integers(0, 4, _vector_shape(draw, grid, grid.rows)).astype(np.int32)
    other = r.integers(0, 4, _vector_shape(draw, grid, grid.columns)).astype(np.int32)
    shift, wide = draw(scalars(grid, st.integers(0, 9)).filter(lambda x: not isinstance(x[0], int)))
    stride = r.integers(1, 4, grid.heads).astype(np.int32)
    term = masks.Predicate(
        _matches, {"tag": tag}, {"other": other}, {"shift": shift}, {"stride": stride}
    )
    t, o = rank4(grid, tag, "rows"), rank4(grid, other, "columns")
    return meaning(grid, term, _matches(row, column, t, o, wide, stride[:, None, None]))


def _below(row: Any, column: Any) -> Any:
    return column < row


def _below_verdict(row_begin: Any, row_end: Any, column_begin: Any, column_end: Any) -> Any:
    some = column_begin < row_end - 1
    every = column_end <= row_begin
    return some.astype(np.int8) + every.astype(np.int8)


def predicate_with_verdict(grid: Grid) -> st.SearchStrategy[Drawn]:
    row, column = grid.positions
    term = masks.Predicate(_below, tile_verdict=_below_verdict)
    return st.just(meaning(grid, term, column < row))


Maker = Callable[[Grid], st.SearchStrategy[Drawn]]

TERMS: dict[str, Maker] = {
    "Causal": causal,
    "Window": window,
    "Lengths": lengths,
    "Prefix": prefix,
    "Chunked": chunked,
    "Segments": segments,
    "Intervals": intervals,
    "Dense": dense,
    "BlockSparse": block_sparse,
    "Predicate": predicate,
    "Predicate with verdict": predicate_with_verdict,
}


def composed(terms: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    """Terms under one or more of &, | and ~."""

    def extend(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
        pair = st.tuples(inner, inner)
        return st.one_of(
            pair.map(lambda p: p[0] & p[1]),
            pair.map(lambda p: p[0] | p[1]),
            inner.map(lambda d: ~d),
        )

    return extend(st.recursive(terms, extend, max_leaves=3))


def compositions(grid: Grid) -> st.SearchStrategy[Drawn]:
    return composed(st.one_of([make(grid) for make in TERMS.values()]))


@st.composite
def two_ranges(draw: Draw, grid: Grid) -> Drawn:
    """Rows that see two ranges of columns, in either order, apart, touching or overlapping."""
    row, column = grid.positions
    near = st.integers(-40, 40)

    def local() -> Drawn:
        left, right, offset = draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(near)
        distance = column - row - offset
        dense = (distance >= -left) & (distance <= right)
        return meaning(grid, masks.Window(left, right, offset), dense)

    def start() -> Drawn:
        length = draw(st.integers(0, 40))
        return meaning(grid, masks.Prefix(length), (column < length) & (row >= 0))

    def after() -> Drawn:
        offset = draw(near)
        return meaning(grid, ~masks.Causal(offset), column > row + offset)

    parts = [draw(st.sampled_from([local, start, after]))() for _ in range(2)]
    both = draw(st.sampled_from([lambda: parts[0] | parts[1], lambda: ~local()]))()
    return both & draw(causal(grid)) if draw(st.booleans()) else both


def drawn_masks() -> st.SearchStrategy[Drawn]:
    return grids().flatmap(compositions)


COMPOSITIONS: dict[str, Maker] = {
    "composition": compositions,
    "two ranges": two_ranges,
}


def term(name: str) -> st.SearchStrategy[Drawn]:
    return grids().flatmap((TERMS | COMPOSITIONS)[name])


def pairs_of(masks_on: Maker, grid: Grid | None = None) -> st.SearchStrategy[tuple[Drawn, Drawn]]:
    """Two masks on the same grid."""
    on = st.just(grid) if grid else grids()
    return on.flatmap(lambda g: st.tuples(masks_on(g), masks_on(g)))
