"""What happens to one tile of scores, the same in every pass: scale, bias, modifier, mask, dropout.

A plain scale is folded into the unit of the exponents (`softmax.Exponents`): a tile costs one
multiply-add before its exp2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from flashjax import dropout
from flashjax.kernels import softmax
from flashjax.kernels.replay import Lowering
from flashjax.masks.schedule import hides
from flashjax.scores import Score, SoftCap, pulled_back
from flashjax.spec import Operands, Spec
from flashjax.structure import At, is_blocked

# Scales that float32 holds with log2(e) to spare; others multiply every score.
LEAST_FOLDED = 2.0**-64

# Up to this cap a score's multiply-add loses nothing worth a subtraction by itself.
CAPPED = 2.0**10


class Tile(NamedTuple):
    """Where a tile lies. Its arrays are rows × columns, or columns × rows where `transposed`."""

    row: Any
    column: Any
    rows: int
    columns: int
    transposed: bool = False
    block: tuple[int, int] = (
        0,
        0,
    )  # rows and columns of what it is a part of, if more than its own

    @property
    def shape(self) -> tuple[int, int]:
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def row_axis(self) -> int:
        return 1 if self.transposed else 0

    @property
    def column_axis(self) -> int:
        return 1 - self.row_axis

    def of_rows(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, self.shape, (self.row_axis,))

    def of_columns(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, self.shape, (self.column_axis,))

    def positions(self) -> tuple[jax.Array, jax.Array]:
        return (
            self.row + lax.broadcasted_iota(jnp.int32, self.shape, self.row_axis),
            self.column + lax.broadcasted_iota(jnp.int32, self.shape, self.column_axis),
        )


def cap_of(score: Score | None) -> float:
    """The cap of a call that has no other modifier; infinite where it is not a number."""
    cap = score.cap if isinstance(score, SoftCap) else None
    return float(cap) if isinstance(cap, (int, float)) else math.inf


class Scored(NamedTuple):
    """A tile of scores and what its backward needs."""

    scores: jax.Array  # in units of the exponents, −inf where hidden
    raw: jax.Array  # scale · q·k + bias; q·k itself where the unit holds the scale
    products: jax.Array  # q·k
    keep: jax.Array | None  # None where all elements take part


class Pulled(NamedTuple):
    """A tile's weights and gradients."""

    weights: jax.Array  # P, after dropout
    raw: jax.Array  # gradient of Scored.raw
    products: jax.Array  # gradient of q·k, but for a scale that the unit holds
    leaves: list[jax.Array]  # gradients of the score modifier's floating arrays


def inside(spec: Spec, tile: Tile) -> tuple[jax.Array | None, jax.Array | None]:
    """Which of the tile's rows and columns exist; None where all do."""
    rows = columns = None
    block_rows, block_columns = tile.block
    if spec.rows % (block_rows or tile.rows):
        rows = tile.row + lax.iota(jnp.int32, tile.rows) < spec.rows
    if spec.columns % (block_columns or tile.columns):
        columns = tile.column + lax.iota(jnp.int32, tile.columns) < spec.columns
    return rows, columns


def exists(spec: Spec, tile: Tile) -> jax.Array | None:
    """Which of the tile's elements exist; None where all do."""
    rows, columns = inside(spec, tile)
    found = None if rows is None else tile.of_rows(rows)
    return found if columns is None else _and(found, tile.of_columns(columns))


class Leaf(Protocol):
    """How one rank-4 operand lies on a tile, and how an architecture reads it."""

    def load(self, ref: Any, at: Any, tile: Tile, spec: Spec) -> jax.Array:
        """The tile's values of batch member and head `at`; a scalar, or a full tile."""
        ...


class Scorer:
    """A call's operands beside q, k and v: what a kernel takes in, and how it reads its tiles.

    ``leaf`` makes of an operand (an array or `Blocked` ones) what the kernel takes and its `Leaf`.
    """

    def __init__(
        self,
        spec: Spec,
        operands: Operands,
        leaf: Callable[[Any], tuple[jax.Array, Leaf]],
        lowering: Lowering,
        exp2: softmax.Exp2,
    ) -> None:
        rest = dataclasses.replace(operands, query=None, key=None, value=None)
        leaves, tree = jax.tree.flatten(rest, is_leaf=is_blocked)
        self._tree: Any = tree
        self.spec, self.lowering = spec, lowering
        pairs = [leaf(x) for x in leaves]
        self.arrays, self.leaves = [x for x, _ in pairs], [x for _, x in pairs]
        shapes = spec.shapes
        plain = shapes.bias is None and shapes.score is None
        scale = spec.scale if spec.scale is not None else 0.0
        self.folded = plain and LEAST_FOLDED <= scale <= 1 / LEAST_FOLDED
        # What no row sees may be NaN, and 0 · NaN is NaN: such columns (and rows) are read as 0.
        hidden_rows, hidden_columns = hides(spec.shapes.mask, spec.rows, spec.columns)
        by_bias = shapes.bias is not None
        self.guards_rows = hidden_rows or by_bias
        self.guards_columns = hidden_columns or by_bias
        unit = softmax.LOG2_E * scale if self.folded else None
        if shapes.bias is None and cap_of(shapes.score) < CAPPED:
            unit = softmax.LOG2_E
        self.exponents = softmax.Exponents(exp2, unit)

    def modified(
        self, score: Score, at: At, raw: jax.Array, products: jax.Array, scale: Any
    ) -> jax.Array:
        """A tile of raw scores, without a bias `products` · `scale`, after the call's modifier."""
        found: jax.Array = self.lowering.lowerable(score.apply)(raw, at)
        return found

    def at(self, refs: Any, at: Any = (0, 0)) -> Reader:
        """What a program reads of one of its batch members and heads, counted within its own."""
        pairs = [_Pair(ref, leaf) for ref, leaf in zip(refs, self.leaves, strict=True)]
        return Reader(self, self._tree.unflatten(pairs), at)


class _Pair(NamedTuple):
    ref: Any
    leaf: Leaf


def _is_pair(x: Any) -> bool:
    return isinstance(x, _Pair)


class Reader:
    """One head's operands, read tile by tile."""

    def __init__(self, scorer: Scorer, operands: Any, at: Any) -> None:
        self.scorer, self.spec = scorer, scorer.spec
        self._operands, self._at = operands, at

    def load(self, name: str, tile: Tile) -> Any:
        """The operand's values on the tile, in its own structure."""

        def one(pair: Any) -> jax.Array:
            ref, leaf = pair
            return leaf.load(ref, self._at, tile, self.spec)

        return jax.tree.map(one, getattr(self._operands, name), is_leaf=_is_pair)

    def scale(self, tile: Tile) -> Any:
        """The factor of q·k that the unit does not hold."""
        if self.scorer.folded:
            return None
        if self.spec.scale is not None:
            return self.spec.scale
        return self.load("scale", tile).astype(jnp.float32)

    def at(self, tile: Tile, ids: bool) -> At:
        row, column = tile.positions()
        if not ids:
            return At(row, column)
        batch, head = (self.load(name, tile) for name in ("batch_id", "head_id"))
        return At(row, column, *(jnp.full(tile.shape, x, jnp.int32) for x in (batch, head)))

    def score(self, products: jax.Array, tile: Tile, masked: bool) -> Scored:
        shapes, scale = self.spec.shapes, self.scale(tile)
        raw = products if scale is None else products * scale
        keep = exists(self.spec, tile) if masked else None
        if shapes.bias is not None:
            bias = self.load("bias", tile)
            bias = jnp.broadcast_to(bias, tile.shape).astype(jnp.float32)
            keep = _and(keep, bias != -jnp.inf)
            # A modifier is spared the −inf; without one the sum is hidden below, NaN or not.
            raw = raw + (bias if shapes.score is None else jnp.where(keep, bias, 0.0))
        if masked and shapes.mask is not None:
            mask = self.load("mask", tile)
            at = self.at(tile, mask.uses_ids)
            keep = _and(
                keep, jnp.broadcast_to(self.scorer.lowering.lowerable(mask.keep)(at), tile.shape)
            )
        scores = raw
        if shapes.score is not None:
            score = self.load("score", tile)
            at = self.at(tile, score.uses_ids)
            scores = self.scorer.modified(score, at, raw, products, scale)
        if keep is not None:
            scores = jnp.where(keep, scores, -jnp.inf)
        return Scored(scores, raw, products, keep)

    def drop(self, tile: Tile, *tiles: jax.Array) -> tuple[jax.Array, ...]:
        """Dropout on tiles of weights: each is 0 or divided by 1 − rate."""
        rate = self.spec.dropout_rate
        if not rate:
            return tiles
        row, column = tile.positions()
        stays = dropout.keep(self.load("seed", tile), row, column, rate)
        return tuple(jnp.where(stays, x * (1 / (1 - rate)), 0.0) for x in tiles)

    def pull(
        self, scored: Scored, d_scores: jax.Array, tile: Tile
    ) -> tuple[jax.Array, list[jax.Array]]:
        """From dS of the modified scores to that of the raw ones, and of the modifier's arrays.

        The arrays' gradients are full tiles, of its floating leaves alone, in their order.
        """
        if self.spec.shapes.score is None:
            return d_scores, []
        score = self.load("score", tile)
        at = self.at(tile, score.uses_ids)
        score = jax.tree.map(lambda x: jnp.broadcast_to(x, tile.shape), score)

        def back(score: Score, raw: jax.Array, d_scores: jax.Array) -> Any:
            return pulled_back(score, raw, at, d_scores)

        d_raw, d_leaves = self.scorer.lowering.lowerable(back)(score, scored.raw, d_scores)
        return hidden(d_raw, scored.keep), [
            hidden(x.astype(jnp.float32), scored.keep) for x in d_leaves if x is not None
        ]

    def back(
        self, scored: Scored, lse: jax.Array, delta: jax.Array, d_p: jax.Array, tile: Tile
    ) -> Pulled:
        """From a tile of scores and dP = dO·Vᵀ to P and dS = P ∘ (dP − Δ), taken back to q·k.

        `lse` and `delta` are vectors of rows.
        """
        p = self.weights(scored, self.scorer.exponents.shift(lse), tile)
        return self.gradients(scored, p, delta, d_p, tile)

    def weights(self, scored: Scored, shift: jax.Array | None, tile: Tile) -> jax.Array:
        """P before dropout; `shift` is that of the rows' LSE, None where the scores hold it."""
        spread = None if shift is None else tile.of_rows(shift)
        return self.scorer.exponents.weights(scored.scores, spread)

    def gradients(
        self, scored: Scored, p: jax.Array, delta: jax.Array | None, d_p: jax.Array, tile: Tile
    ) -> Pulled:
        """:meth:`back` from P before dropout; `delta` is None where `d_p` holds it already."""
        dropped, d_p = self.drop(tile, p, d_p)
        if delta is not None:
            d_p = d_p - tile.of_rows(delta)
        d_scores = hidden(p * d_p, scored.keep)
        d_raw, d_leaves = self.pull(scored, d_scores, tile)
        scale = self.scale(tile)
        return Pulled(dropped, d_raw, d_raw if scale is None else d_raw * scale, d_leaves)


def seen(scored: Scored, along: int) -> jax.Array:
    """Which rows or columns of a masked tile have an element that takes part, looking `along`."""
    assert scored.keep is not None
    return jnp.where(scored.keep, jnp.int32(1), jnp.int32(0)).max(along) > 0


def hidden(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    """`x`, with 0 where an element is hidden."""
    return x if keep is None else jnp.where(keep, x, 0.0)


def _and(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b
