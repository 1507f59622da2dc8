"""Score modifiers: elementwise functions of a logit, its row, column, batch and head.

They act on ``scale · q·k + bias`` in float32 (float64 for float64 inputs) before any mask. The
backward differentiates them inside the tile with ``jax.vjp``, so none carries a derivative.
Gradients reach their arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from flashjax.elementwise import UserFunction, check_function, check_named, trial
from flashjax.structure import (
    POSITION_LIMIT,
    At,
    Dims,
    Place,
    Structure,
    clipped,
    describe,
    moved,
    nested,
    operand,
    replace,
    structure,
)


class Score(Structure):
    """Base of score modifiers. ``a.then(b)`` applies `a` first."""

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        """The new score; arrays on ``self`` hold their values on the tile."""
        raise NotImplementedError

    def then(self, after: Score) -> Score:
        if not isinstance(after, Score):
            raise TypeError(
                f"then(after) is a {type(after).__name__}; wanted a flashjax.scores modifier. Wrap "
                "a function as flashjax.scores.ScoreMod(fn)."
            )
        return Chain((self, after))


def pulled_back(
    score: Score, raw: jax.Array, at: At, d_score: jax.Array
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """The gradients of ``score.apply(raw, at)``: of `raw`, and of each array, None for integers.

    Give the arrays as full tiles: their gradients are then elementwise, and hidden elements can be
    taken out before they are summed.
    """
    leaves, treedef = jax.tree.flatten(score)
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def modified(raw: jax.Array, floats: list[jax.Array]) -> jax.Array:
        rest = iter(floats)
        filled = [next(rest) if f else x for f, x in zip(floating, leaves, strict=True)]
        full: Score = jax.tree.unflatten(treedef, filled)
        return full.apply(raw, at)

    floats = [x for f, x in zip(floating, leaves, strict=True) if f]
    d_raw, d_floats = jax.vjp(modified, raw, floats)[1](d_score)
    found = iter(d_floats)
    return d_raw, tuple(next(found) if f else None for f in floating)


@structure
class Chain(Score):
    """Score modifiers applied in order."""

    parts: tuple[Score, ...] = nested()

    @property
    def uses_ids(self) -> bool:  # type: ignore[override]
        return any(part.uses_ids for part in self.parts)

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        return functools.reduce(lambda s, part: part.apply(s, at), self.parts, score)

    def __repr__(self) -> str:
        return " then ".join(map(repr, self.parts))


@structure
class SoftCap(Score):
    """``cap · tanh(score / cap)``, as in Gemma 2 (arXiv:2408.00118, §2)."""

    cap: Any = operand("scalar")

    def __post_init__(self) -> None:
        if self.cap is not None:
            super().__post_init__()
        if self.cap is None or (isinstance(self.cap, (int, float)) and not 0 < self.cap < math.inf):
            raise ValueError(f"soft_cap(cap=…) is {self.cap!r}; wanted a finite number > 0.")

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        cap = self.cap if isinstance(self.cap, (int, float)) else self.cap.astype(score.dtype)
        return cap * jnp.tanh(score / cap)


def soft_cap(cap: float | jax.Array) -> Score:
    """Keeps scores within ±cap smoothly. ``logits_soft_cap=cap`` says the same."""
    return SoftCap(cap)


@structure
class Alibi(Score):
    """``score − slope · |row + offset − column|`` per head (arXiv:2108.12409).

    ``slopes`` (N,), by default the paper's: 2^(−8/N), 2^(−16/N), … for N a power of two, else
    those of the next lower power and every second one of the next higher.
    """

    slopes: Any = operand("head", default=None)
    offset: Any = operand("scalar", integer=True, default=0)

    def aligned(self, dims: Dims) -> Self:
        slopes = alibi_slopes(dims.heads) if self.slopes is None else self.slopes
        new = super(Alibi, replace(self, slopes=slopes)).aligned(dims)
        return replace(new, offset=clipped(new.offset, -POSITION_LIMIT, POSITION_LIMIT))

    def placed(self, place: Place) -> Self:
        return replace(self, offset=moved(self.offset, place.row - place.column))

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        distance = jnp.abs(at.row + self.offset - at.column)
        return score - self.slopes.astype(score.dtype) * distance.astype(score.dtype)


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """The slopes of the ALiBi paper for any number of heads, float32 (heads,)."""
    power = 2 ** int(np.log2(heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    if power < heads:
        finer = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
        slopes = np.concatenate([slopes, finer[: heads - power]])
    return slopes.astype(np.float32)


@structure
class ScoreMod(UserFunction, Score):
    """A user's function ``fn(score, row, column, batch, head, **arrays) -> score``, elementwise.

    ``rows`` (T,) or (*batch, T), ``columns`` (S,) or (*batch, S), ``scalars`` () or (*batch,) and
    ``heads`` (N,) are dicts of arrays that `fn` takes as keyword arguments, on the tile; float
    ones get gradients. `fn` is compared by identity: define it once, outside the step function.
    Where a mask hides an element, what `fn` gives there does not matter, NaN included. `fn` sees
    ``row + row_offset`` and ``column + column_offset``.
    """

    fn: Callable[..., jax.Array]
    rows: Any = operand("row", default_factory=dict)
    columns: Any = operand("column", default_factory=dict)
    scalars: Any = operand("scalar", default_factory=dict)
    heads: Any = operand("head", default_factory=dict)
    row_offset: Any = operand("scalar", integer=True, default=0)
    column_offset: Any = operand("scalar", integer=True, default=0)

    uses_ids = True

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"ScoreMod(fn=…) is {describe(self.fn)}; wanted a function.")
        super().__post_init__()
        check_named(self, "rows", "columns", "scalars", "heads")

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        tiles = (trial(jnp.float32), *[trial(jnp.int32)] * 4)
        out = check_function("ScoreMod(fn=…)", self.fn, tiles, self._named())
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(
                f"ScoreMod(fn=…) returns {describe(out)} for a tile of scores; wanted floats."
            )
        return new

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        row, column = at.row + self.row_offset, at.column + self.column_offset
        new = self.fn(score, row, column, at.batch, at.head, **self._named())
        return new.astype(score.dtype)
