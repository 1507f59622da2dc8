"""The mask protocol and its algebra: terms, ``&``, ``|``, ``~``.

A mask says which columns a row may attend to. It answers three questions from one truth:
``keep`` elementwise, ``verdict`` per tile, ``bounds`` per block in closed form where there is one.
``verdict`` and ``bounds`` take masks whose arrays are aligned (``Structure.aligned``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.masks.bounds import Axis, Blocks, Bounds, Range, complement, intersect, unite
from flashjax.structure import At, Structure, nested, structure

# Verdicts are ordered so that And is their minimum, Or their maximum and Not their reversal.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Mask(Structure):
    """Base of all mask terms. Combine with ``&``, ``|`` and ``~``."""

    def keep(self, at: At) -> jax.Array:
        """Which elements are allowed, bool. Arrays on ``self`` hold their values on the tile."""
        raise NotImplementedError

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        """The ranges of the other axis (`length` positions) that each block of `axis` sees.

        None where at most two ranges a block cannot say it; then `verdict` serves.
        """
        return None

    def seen(self, positions: Any, length: int, axis: Axis) -> Range | None:
        """The range of the other axis (`length` positions) that each position sees, in numpy.

        None where it is no range, or depends on arrays.
        """
        return None

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        """EMPTY, PARTIAL or FULL per tile: int8, broadcasts to (B, N, row blocks, column blocks).

        PARTIAL is always sound; EMPTY and FULL are promises.
        """
        bounds = self.bounds(rows, columns.length, "rows")
        if bounds is None:
            raise NotImplementedError(f"{type(self).__name__} must define bounds or verdict")

        def meets(begin: Any, end: Any) -> jax.Array:
            begin, end = _per_tile(begin), _per_tile(end)
            return (begin < end) & (begin <= columns.last) & (end > columns.begin)

        def holds(begin: Any, end: Any) -> jax.Array:
            return (_per_tile(begin) <= columns.begin) & (_per_tile(end) > columns.last)

        visited = functools.reduce(jnp.logical_or, (meets(*r) for r in bounds.visit))
        full = functools.reduce(jnp.logical_or, (holds(*r) for r in bounds.full))
        return (visited.astype(jnp.int8) + (visited & full).astype(jnp.int8)).astype(jnp.int8)

    def __and__(self, other: Mask) -> Mask:
        return And(_flattened(And, self, _mask(other)))

    def __or__(self, other: Mask) -> Mask:
        return Or(_flattened(Or, self, _mask(other)))

    def __invert__(self) -> Mask:
        return Not((self,))

    # numpy and JAX arrays on the left leave the operation to the two methods below.
    __array_ufunc__ = None

    def __rand__(self, other: Any) -> Mask:
        return _mask(other) & self

    def __ror__(self, other: Any) -> Mask:
        return _mask(other) | self

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with &, | and ~")


def _per_tile(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x[..., None] if x.ndim else x


def _mask(other: Any) -> Mask:
    if not isinstance(other, Mask):
        raise TypeError(
            f"cannot combine a mask with {type(other).__name__}; "
            "wrap a boolean array in flashjax.masks.Dense"
        )
    return other


def _flattened(cls: type[And] | type[Or], *masks: Mask) -> tuple[Mask, ...]:
    return tuple(p for m in masks for p in (m.parts if isinstance(m, cls) else (m,)))


class _Combined(Mask):
    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts or not all(isinstance(part, Mask) for part in self.parts):
            raise TypeError(
                f"{type(self).__name__}(parts=…) is {self.parts!r}; wanted a tuple of masks. Write "
                "a & b, a | b, ~a."
            )

    @property
    def uses_ids(self) -> bool:  # type: ignore[override]
        return any(part.uses_ids for part in self.parts)

    def _fold(
        self,
        join: Callable[[Bounds, Bounds], Bounds | None],
        blocks: Blocks,
        length: int,
        axis: Axis,
    ) -> Bounds | None:
        joined = self.parts[0].bounds(blocks, length, axis)
        for part in self.parts[1:]:
            bounds = part.bounds(blocks, length, axis)
            if joined is None or bounds is None:
                return None
            joined = join(joined, bounds)
        return joined


@structure
class And(_Combined):
    """Columns that every part allows."""

    parts: tuple[Mask, ...] = nested()

    def keep(self, at: At) -> jax.Array:
        return functools.reduce(jnp.logical_and, (part.keep(at) for part in self.parts))

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        return self._fold(intersect, blocks, length, axis)

    def seen(self, positions: Any, length: int, axis: Axis) -> Range | None:
        parts = [part.seen(positions, length, axis) for part in self.parts]
        ranges = [part for part in parts if part is not None]
        if len(ranges) < len(parts):
            return None
        return Range(
            functools.reduce(np.maximum, (r.begin for r in ranges)),
            functools.reduce(np.minimum, (r.end for r in ranges)),
        )

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        return functools.reduce(jnp.minimum, (p.verdict(rows, columns) for p in self.parts))

    def __repr__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, Or) else repr(p) for p in self.parts)


@structure
class Or(_Combined):
    """Columns that at least one part allows."""

    parts: tuple[Mask, ...] = nested()

    def keep(self, at: At) -> jax.Array:
        return functools.reduce(jnp.logical_or, (part.keep(at) for part in self.parts))

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        return self._fold(unite, blocks, length, axis)

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        return functools.reduce(jnp.maximum, (p.verdict(rows, columns) for p in self.parts))

    def __repr__(self) -> str:
        return " | ".join(f"({p})" if isinstance(p, And) else repr(p) for p in self.parts)


@structure
class Not(_Combined):
    """Columns that its one part does not allow."""

    parts: tuple[Mask, ...] = nested()

    def keep(self, at: At) -> jax.Array:
        # jnp.logical_not has no rule in some kernel lowerings; comparison does.
        return self.parts[0].keep(at) == False  # noqa: E712

    def bounds(self, blocks: Blocks, length: int, axis: Axis) -> Bounds | None:
        bounds = self.parts[0].bounds(blocks, length, axis)
        return None if bounds is None else complement(bounds, length)

    def verdict(self, rows: Blocks, columns: Blocks) -> jax.Array:
        return jnp.int8(FULL) - self.parts[0].verdict(rows, columns)

    def __repr__(self) -> str:
        inner = self.parts[0]
        return f"~({inner})" if isinstance(inner, (And, Or)) else f"~{inner}"
