"""Mask terms in closed form. Row = query position, column = key position.

Scalar fields take an int (compiled in), a traced scalar, or an array (*batch,) or
(*batch|1, N|1).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.masks.algebra import Mask
from flashjax.masks.bounds import Axis, Blocks, Bounds, Range, span
from flashjax.structure import (
    POSITION_LIMIT,
    At,
    Dims,
    Place,
    clipped,
    moved,
    operand,
    replace,
    structure,
)


def _per_block(x: Any) -> Any:
    """An aligned scalar (B|1, N|1, 1, 1) as (B|1, N|1, 1), beside a vector of blocks."""
    return x if isinstance(x, int) or x is None else x[..., 0]


class _Band(Mask):
    """A term whose rows see one range of columns, with ends monotone in the row, and vice versa."""

    def _columns_of(self, row: Any, columns: int) -> Range:
        raise NotImplementedError

    def _rows_of(self, column: Any, rows: int) -> Range:
        raise NotImplementedError

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        seen = self._columns_of if axis == "rows" else self._rows_of
        return span(seen(blocks.begin, length), seen(blocks.last, length))


class _Line(_Band):
    """A band whose ends are the position plus a number, or open."""

    offset: Any

    def seen(self, positions: Any, length: int, axis: Axis) -> Range | None:
        if not isinstance(self.offset, int):
            return None
        seen = self._columns_of if axis == "rows" else self._rows_of
        return seen(positions, length)


@structure
class Causal(_Line):
    """Columns up to ``row + offset``.

    ``align="top_left"`` (as in jax.nn) counts rows from 0; ``"bottom_right"`` lets the last row
    see the last column (adds S − T to the offset).
    """

    offset: Any = operand("scalar", integer=True, default=0)
    align: Literal["top_left", "bottom_right"] = "top_left"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align not in ("top_left", "bottom_right"):
            raise ValueError(
                f"Causal(align=…) is {self.align!r}; wanted 'top_left' or 'bottom_right'."
            )

    def aligned(self, dims: Dims) -> Self:
        shift = dims.columns - dims.rows if self.align == "bottom_right" else 0
        offset = clipped(super().aligned(dims).offset, -POSITION_LIMIT, POSITION_LIMIT)
        return replace(self, offset=offset + shift, align="top_left")

    def placed(self, place: Place) -> Self:
        # In the whole sequence T = S, where both alignments are one.
        offset = moved(self.offset, place.row - place.column)
        return replace(self, offset=offset, align="top_left")

    def keep(self, at: At) -> jax.Array:
        return at.column <= at.row + self.offset

    def _columns_of(self, row: Any, columns: int) -> Range:
        return Range(0, row + 1 + _per_block(self.offset))

    def _rows_of(self, column: Any, rows: int) -> Range:
        return Range(column - _per_block(self.offset), rows)


@structure
class Window(_Line):
    """Columns ``row + offset − left … row + offset + right``; None leaves a side open."""

    left: int | None
    right: int | None
    offset: Any = operand("scalar", integer=True, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("left", "right"):
            side: Any = getattr(self, name)
            if isinstance(side, np.integer):
                object.__setattr__(self, name, side := int(side))
            if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
                raise TypeError(
                    f"Window({name}=…) is {side!r}; wanted a Python int or None. "
                    "A window whose width is traced is masks.Predicate with scalars=."
                )
            if side is not None and side < 0:
                raise ValueError(f"Window({name}=…) is {side}; wanted 0 or more, or None.")

    def aligned(self, dims: Dims) -> Self:
        offset = clipped(super().aligned(dims).offset, -POSITION_LIMIT, POSITION_LIMIT)
        left = clipped(self.left, 0, POSITION_LIMIT)
        return replace(self, offset=offset, left=left, right=clipped(self.right, 0, POSITION_LIMIT))

    def placed(self, place: Place) -> Self:
        return replace(self, offset=moved(self.offset, place.row - place.column))

    def keep(self, at: At) -> jax.Array:
        distance = at.column - (at.row + self.offset)
        if self.left is None and self.right is None:
            return distance == distance
        if self.left is None:
            return distance <= self.right
        if self.right is None:
            return distance >= -self.left
        return (distance >= -self.left) & (distance <= self.right)

    def _columns_of(self, row: Any, columns: int) -> Range:
        centre = row + _per_block(self.offset)
        return Range(
            0 if self.left is None else centre - self.left,
            columns if self.right is None else centre + self.right + 1,
        )

    def _rows_of(self, column: Any, rows: int) -> Range:
        centre = column - _per_block(self.offset)
        return Range(
            0 if self.right is None else centre - self.right,
            rows if self.left is None else centre + self.left + 1,
        )


@structure
class Lengths(_Band):
    """Rows below ``query`` and columns below ``key``: the sequences' real lengths."""

    query: Any = operand("scalar", integer=True, default=None)
    key: Any = operand("scalar", integer=True, default=None)

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        query, key = clipped(new.query, 0, dims.rows), clipped(new.key, 0, dims.columns)
        return replace(self, query=query, key=key)

    def placed(self, place: Place) -> Self:
        query, key = moved(self.query, -place.row), moved(self.key, -place.column)
        return replace(self, query=query, key=key)

    def keep(self, at: At) -> jax.Array:
        kept = at.row >= 0 if self.query is None else at.row < self.query
        return kept & (at.column >= 0 if self.key is None else at.column < self.key)

    def _columns_of(self, row: Any, columns: int) -> Range:
        return self._of(row, self.query, columns if self.key is None else self.key)

    def _rows_of(self, column: Any, rows: int) -> Range:
        return self._of(column, self.key, rows if self.query is None else self.query)

    @staticmethod
    def _of(position: Any, limit: Any, other: Any) -> Range:
        other = _per_block(other)
        if limit is None:
            return Range(0, other)
        return Range(0, jnp.where(position < _per_block(limit), other, 0))


@structure
class Prefix(_Band):
    """Columns below ``length``, for every row. ``Prefix(p) | Causal()`` is a prefix LM."""

    length: Any = operand("scalar", integer=True)

    def aligned(self, dims: Dims) -> Self:
        return replace(self, length=clipped(super().aligned(dims).length, 0, dims.columns))

    def placed(self, place: Place) -> Self:
        return replace(self, length=moved(self.length, -place.column))

    def keep(self, at: At) -> jax.Array:
        return (at.column < self.length) & (at.row >= 0)

    def _columns_of(self, row: Any, columns: int) -> Range:
        return Range(0, _per_block(self.length))

    def _rows_of(self, column: Any, rows: int) -> Range:
        return Range(0, jnp.where(column < _per_block(self.length), rows, 0))


@structure
class Chunked(_Band):
    """Columns in the same chunk of ``size`` positions as ``row + offset``.

    Chunks begin where column + ``phase`` is a multiple of ``size``.
    """

    size: int
    offset: Any = operand("scalar", integer=True, default=0)
    phase: Any = operand("scalar", integer=True, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        size: Any = self.size
        if isinstance(size, np.integer):
            object.__setattr__(self, "size", size := int(size))
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Chunked(size=…) is {self.size!r}; wanted a Python int >= 1.")

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        offset, phase = (
            clipped(x, -POSITION_LIMIT, POSITION_LIMIT) for x in (new.offset, new.phase)
        )
        return replace(self, offset=offset, phase=phase, size=min(self.size, POSITION_LIMIT))

    def placed(self, place: Place) -> Self:
        offset = moved(self.offset, place.row - place.column)
        return replace(self, offset=offset, phase=moved(self.phase, place.column))

    def keep(self, at: At) -> jax.Array:
        start = self._start(at.row + self.offset, self.phase)
        return (at.column >= start) & (at.column < start + self.size)

    def _start(self, position: Any, phase: Any) -> Any:
        # Remainder with the sign of the divisor, spelt for lowerings that truncate.
        remainder = jax.lax.rem(jnp.asarray(position + phase, jnp.int32), jnp.int32(self.size))
        return position - jnp.where(remainder < 0, remainder + self.size, remainder)

    def _columns_of(self, row: Any, columns: int) -> Range:
        start = self._start(row + _per_block(self.offset), _per_block(self.phase))
        return Range(start, start + self.size)

    def _rows_of(self, column: Any, rows: int) -> Range:
        start = self._start(column, _per_block(self.phase)) - _per_block(self.offset)
        return Range(start, start + self.size)
