"""The two passes over tiles that ``chunked`` is made of, for operands that share one schedule.

A tile of P or dS is never transposed: dK and dV are summed as Kᵀ-shaped (H, columns) products of
qᵀ and dOᵀ, which are transposed once for the whole call (docs/kernel-notes.md, "chunked").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashjax import dropout
from flashjax.backend import Config
from flashjax.kernels import softmax
from flashjax.masks import Blocks, Schedule
from flashjax.masks.schedule import at as at_block
from flashjax.scores import pulled_back
from flashjax.spec import Operands, Spec
from flashjax.structure import At, is_blocked
from flashjax.tiles import (
    Tiles,
    column_blocks,
    from_column_blocks,
    from_row_blocks,
    row_blocks,
    row_vector_blocks,
    transposed_rows,
)
from flashjax.varying import cast_varying, varying_axes


class _Scored(NamedTuple):
    """A tile of scores and what its backward needs."""

    scores: jax.Array  # modified and masked, −inf where hidden
    raw: jax.Array  # scale · q·k + bias
    products: jax.Array  # q·k
    keep: jax.Array | None  # None where all elements take part


class _Scorer:
    """Computes tiles of scores; the same code in both passes, so that both see the same bits."""

    def __init__(self, spec: Spec, config: Config, operands: Operands) -> None:
        self.spec = spec
        self.rows = Blocks(spec.rows, config.rows)
        self.columns = Blocks(spec.columns, config.columns)
        self.tiles = Tiles(spec, self.rows, self.columns)
        rest = dataclasses.replace(operands, query=None, key=None, value=None)
        # Blocked leaves are read by position and need no padding.
        self.operands = jax.tree.map(
            lambda x: x if is_blocked(x) else self.tiles.padded(x), rest, is_leaf=is_blocked
        )
        # Folding the scale into q spares a pass over every tile. In 16 bits only a power of two
        # leaves q's bits as they are (in fp16 not even that: its small numbers are subnormal).
        scale, exact = spec.scale, spec.dtype in (jnp.float32, jnp.float64)
        if scale is not None and spec.dtype == jnp.bfloat16:
            exact = math.frexp(scale)[0] == 0.5
        self.folded = scale if scale is not None and exact else None
        query = operands.query if self.folded is None else operands.query * self.folded
        self.query = row_blocks(query.astype(spec.dtype), self.rows, spec.key_heads)
        self.key = column_blocks(operands.key, self.columns)
        self.value = column_blocks(operands.value, self.columns)
        self.axes = varying_axes(operands.query)

    def tile_kinds(self) -> tuple[bool, ...]:
        """Which variants of a tile's code exist: masked, not masked, or both."""
        if self.spec.shapes.bias is not None:
            return (True,)  # any element of a bias may be −inf
        if self.rows.count * self.columns.count == 1:
            return (self.spec.shapes.mask is not None or self.tiles.ragged,)
        if self.spec.shapes.mask is None and not self.tiles.ragged:
            return (False,)
        return (False, True)

    def positions(self, i: Any, j: Any) -> At:
        at = self.tiles.positions(i, j)
        ids = (self.operands.batch_id, self.operands.head_id)
        return At(at.row, at.column, *self.tiles.load_tree(ids, i, j))

    def product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            equation,
            a,
            b,
            precision=self.spec.precision,
            preferred_element_type=self.spec.accumulator,
        )

    def score(self, query: jax.Array, key_t: jax.Array, i: Any, j: Any, masked: bool) -> _Scored:
        products = self.product("bkgth,bkhs->bkgts", query, key_t)
        scale = self.scale(i, j)
        raw = products if scale is None else products * scale
        keep = self._exists(i, j) if masked else None
        if self.operands.bias is not None:
            bias = self.tiles.load(self.operands.bias, i, j)
            keep = _and(keep, bias != -jnp.inf)
            raw = raw + jnp.where(bias == -jnp.inf, 0, bias.astype(raw.dtype))
        if masked and self.operands.mask is not None:
            mask = self.tiles.load_tree(self.operands.mask, i, j)
            kept = mask.keep(self.positions(i, j))
            shape = jnp.broadcast_shapes(kept.shape, (self.rows.size, self.columns.size))
            keep = _and(keep, jnp.broadcast_to(kept, shape))
        scores = raw
        if self.operands.score is not None:
            score = self.tiles.load_tree(self.operands.score, i, j)
            scores = score.apply(raw, self.positions(i, j))
        if keep is not None:
            keep = keep.reshape((1,) * (5 - keep.ndim) + keep.shape)
            scores = jnp.where(keep, scores, -jnp.inf)
        return _Scored(scores, raw, products, keep)

    def scale(self, i: Any, j: Any) -> Any:
        """The factor still to apply to q·k and to its gradient; None where q carries it."""
        if self.folded is not None:
            return None
        if self.spec.scale is not None:
            return self.spec.scale
        return self.tiles.load(self.operands.scale, i, j).astype(self.spec.accumulator)

    def _exists(self, i: Any, j: Any) -> jax.Array | None:
        if not self.tiles.ragged:
            return None
        at = self.tiles.positions(i, j)
        return (at.row < self.rows.length) & (at.column < self.columns.length)

    def drop(self, i: Any, j: Any) -> jax.Array | None:
        """Dropout's factor on each weight: 0 or 1 / (1 − rate)."""
        rate = self.spec.dropout_rate
        if not rate:
            return None
        at = self.tiles.positions(i, j)
        seed = self.tiles.load_tree(self.operands.seed, i, j)
        stays = dropout.keep(seed, at.row, at.column, rate)
        return jnp.where(stays, jnp.asarray(1 / (1 - rate), self.spec.accumulator), 0)


def _and(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b


def _by_kind(kinds: tuple[bool, ...], full: jax.Array, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(masked, *args): one variant where only one exists, else chosen by the tile."""
    if len(kinds) == 1:
        return fn(kinds[0], *args)
    return lax.cond(full, lambda *a: fn(False, *a), lambda *a: fn(True, *a), *args)


def _column_used(keep: jax.Array) -> jax.Array:
    """(B|1, K|1, columns, 1): which columns of a tile any of its rows may see."""
    return keep.any((2, 3))[..., None]


def forward_pass(
    spec: Spec, config: Config, operands: Operands, walk: Schedule
) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T)."""
    scorer = _Scorer(spec, config, operands)
    kinds = scorer.tile_kinds()
    shape = (spec.batch, spec.key_heads, spec.group, config.rows)
    sinks = operands.sinks
    if sinks is not None:
        sinks = scorer.tiles.load(sinks, 0, 0)[..., 0].astype(spec.accumulator)

    key_t = scorer.key.swapaxes(-1, -2)

    def row_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, path = scorer.query[i], at_block(walk, i)

        def take(masked: bool, carry: Any, j: jax.Array) -> Any:
            running, acc = carry
            scored = scorer.score(query, key_t[j], i, j, masked)
            value = scorer.value[j]
            if scored.keep is not None:
                value = jnp.where(_column_used(scored.keep), value, 0)
            running, alpha, p = softmax.update(running, scored.scores)
            factor = scorer.drop(i, j)
            p = p if factor is None else p * factor
            summed = scorer.product("bkgts,bksh->bkgth", p.astype(spec.dtype), value)
            return running, acc * alpha[..., None] + summed

        def visit(index: jax.Array, carry: Any) -> Any:
            step = path.step(index)
            return _by_kind(kinds, step.full[0, 0], take, carry, step.tile[0, 0])

        start = (
            softmax.start(shape, spec.accumulator),
            jnp.zeros((*shape, spec.value_dim), spec.accumulator),
        )
        count = path.count[0, 0]
        running, acc = lax.fori_loop(0, count, visit, cast_varying(start, scorer.axes))
        factor, lse = softmax.finish(running, sinks)
        return (acc * factor[..., None]).astype(spec.dtype), lse

    out, lse = lax.map(row_block, jnp.arange(scorer.rows.count, dtype=jnp.int32))
    lse = from_row_blocks(lse[..., None], scorer.rows)[..., 0].swapaxes(1, 2)
    return from_row_blocks(out, scorer.rows), lse


class _TileGradients(NamedTuple):
    query: jax.Array
    key_t: jax.Array
    value_t: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None
    score: tuple[jax.Array | None, ...] | None


class _Rows(NamedTuple):
    """What the backward reads of one row block."""

    query: jax.Array
    query_t: jax.Array
    d_out: jax.Array
    d_out_t: jax.Array
    lse: jax.Array
    delta: jax.Array


class _Column(NamedTuple):
    """What the backward reads of one column block."""

    key: jax.Array
    key_t: jax.Array
    value_t: jax.Array


def backward_pass(
    spec: Spec,
    config: Config,
    operands: Operands,
    walk: Schedule,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> Operands:
    """Gradients of ``spec.wanted``, in the accumulator's dtype and the operands' shapes."""
    scorer = _Scorer(spec, config, operands)
    kinds = scorer.tile_kinds()
    d_out_blocks = row_blocks(d_out, scorer.rows, spec.key_heads)
    rows = _Rows(
        scorer.query,
        transposed_rows(scorer.query),
        d_out_blocks,
        transposed_rows(d_out_blocks),
        row_vector_blocks(lse, scorer.rows, spec.key_heads),
        row_vector_blocks(delta, scorer.rows, spec.key_heads),
    )
    tiles, wanted, acc = scorer.tiles, spec.wanted, spec.accumulator

    def zeros(name: str) -> Any:
        """Accumulators in the operands' padded shapes, for what is added to tile by tile."""
        leaves = [
            jnp.zeros(x.shape, acc) if jnp.issubdtype(x.dtype, jnp.floating) else None
            for x in jax.tree.leaves(getattr(scorer.operands, name))
        ]
        return tuple(leaves) if name == "score" else leaves[0]

    sums = {name: zeros(name) for name in ("scale", "bias", "score") if name in wanted}
    d_query = jnp.zeros(scorer.query.shape, acc)
    sums, d_query = cast_varying((sums, d_query), scorer.axes)

    def column_block(carry: Any, j: jax.Array) -> Any:
        path = at_block(walk, j)
        column = _Column(
            scorer.key[j], *(x[j].swapaxes(-1, -2) for x in (scorer.key, scorer.value))
        )

        def visit(index: jax.Array, carry: Any) -> Any:
            sums, d_query, d_key, d_value = carry
            step = path.step(index)
            i = step.tile[0, 0]

            def take(masked: bool, row: _Rows) -> _TileGradients:
                return _tile_gradients(scorer, row, column, i, j, masked)

            row = jax.tree.map(lambda x: x[i], rows)
            # Columns that do not exist would enter the sums over a row's columns.
            whole = (j + 1) * scorer.columns.size <= scorer.columns.length
            grads = _by_kind(kinds, step.full[0, 0] & whole, take, row)
            sums = {
                name: jax.tree.map(lambda x, g: tiles.add(x, g, i, j), total, getattr(grads, name))
                for name, total in sums.items()
            }
            return (
                sums,
                d_query.at[i].add(grads.query),
                d_key + grads.key_t,
                d_value + grads.value_t,
            )

        start = cast_varying(
            (jnp.zeros(column.key_t.shape, acc), jnp.zeros(column.value_t.shape, acc)), scorer.axes
        )
        sums, d_query, d_key, d_value = lax.fori_loop(0, path.count[0, 0], visit, (*carry, *start))
        return (sums, d_query), (d_key, d_value)

    index = jnp.arange(scorer.columns.count, dtype=jnp.int32)
    (sums, d_query), (d_key, d_value) = lax.scan(column_block, (sums, d_query), index)

    def cropped(total: jax.Array | None, like: jax.Array) -> jax.Array | None:
        return None if total is None else tiles.cropped(total, like.shape)

    found: dict[str, Any] = {
        "query": from_row_blocks(
            d_query if scorer.folded is None else d_query * scorer.folded, scorer.rows
        ),
        "key": from_column_blocks(d_key.swapaxes(-1, -2), scorer.columns),
        "value": from_column_blocks(d_value.swapaxes(-1, -2), scorer.columns),
    }
    for name, total in sums.items():
        like = jax.tree.leaves(getattr(operands, name))
        if name == "score":  # None where a leaf is an integer
            found[name] = tuple(map(cropped, total, like))
        else:
            found[name] = cropped(total, like[0])
    empty = dict.fromkeys(("query", "key", "value"))
    return Operands(**{**empty, **{k: v for k, v in found.items() if k in wanted}})


def _tile_gradients(
    scorer: _Scorer, row: _Rows, column: _Column, i: Any, j: Any, masked: bool
) -> _TileGradients:
    """One tile's part of every gradient: P from S and LSE, dP = dO·Vᵀ, dS = P ∘ (dP − Δ)."""
    spec, product = scorer.spec, scorer.product
    key = column.key
    scored = scorer.score(row.query, column.key_t, i, j, masked)
    keep = scored.keep
    if keep is not None:
        row_used = keep.any(-1)
        across, along = row_used[..., None], row_used[:, :, None]
        row = row._replace(
            query_t=jnp.where(along, row.query_t, 0),
            d_out=jnp.where(across, row.d_out, 0),
            d_out_t=jnp.where(along, row.d_out_t, 0),
        )
        key = jnp.where(_column_used(keep), key, 0)
    p = softmax.probabilities(scored.scores, row.lse)
    d_p = product("bkgth,bkhs->bkgts", row.d_out, column.value_t)
    factor = scorer.drop(i, j)
    dropped = p
    if factor is not None:
        dropped, d_p = p * factor, d_p * factor
    d_scores = _masked(p * (d_p - row.delta[..., None]), keep)
    d_raw, d_leaves = _score_gradients(scorer, scored, d_scores, i, j)
    scale = scorer.scale(i, j)
    d_products = (d_raw if scale is None else d_raw * scale).astype(spec.dtype)
    return _TileGradients(
        query=product("bkgts,bksh->bkgth", d_products, key),
        key_t=product("bkhgt,bkgts->bkhs", row.query_t, d_products),
        value_t=product("bkhgt,bkgts->bkhs", row.d_out_t, dropped.astype(spec.dtype)),
        scale=_masked(d_raw * scored.products, keep) if "scale" in spec.wanted else None,
        bias=d_raw if "bias" in spec.wanted else None,
        score=d_leaves,
    )


def _masked(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    return x if keep is None else jnp.where(keep, x, 0)


def _score_gradients(
    scorer: _Scorer, scored: _Scored, d_scores: jax.Array, i: Any, j: Any
) -> tuple[jax.Array, tuple[jax.Array | None, ...] | None]:
    """From dS of the modified scores to that of the raw ones, and of the modifier's arrays."""
    if scorer.operands.score is None:
        return d_scores, None
    score = scorer.tiles.load_tree(scorer.operands.score, i, j)
    score = jax.tree.map(lambda x: jnp.broadcast_to(x, scored.raw.shape), score)
    d_raw, d_leaves = pulled_back(score, scored.raw, scorer.positions(i, j), d_scores)
    d_raw = _masked(d_raw, scored.keep)
    if "score" not in scorer.spec.wanted:
        return d_raw, None
    return d_raw, tuple(
        None if x is None else _masked(x, scored.keep).astype(d_raw.dtype) for x in d_leaves
    )
