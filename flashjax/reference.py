"""The dense implementation: the definition of the operation, in plain jnp.

O = dropout(softmax(mod(scale · QKᵀ + bias), masked)) V, with T × S memory. It is differentiable
any number of times, in both modes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flashjax import dropout
from flashjax.scores import Score
from flashjax.spec import Operands, Spec
from flashjax.structure import At, Blocked, is_blocked


def forward(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T) of operands in canonical form."""
    at = _positions(spec, operands)
    keep = _keep(spec, operands, at)
    query, key, value = _seen(spec, operands, keep)

    # The G query heads of a key head stay together, so that dK and dV are summed over them wide.
    scores = jnp.einsum(
        "btkgh,bskh->bkgts",
        query.reshape(*query.shape[:2], spec.key_heads, spec.group, spec.head_dim),
        key,
        precision=spec.precision,
        preferred_element_type=spec.accumulator,
    ).reshape(spec.batch, spec.heads, spec.rows, spec.columns)
    scores = scores * (operands.scale if spec.scale is None else spec.scale)
    if operands.bias is not None:
        scores = scores + _where(keep, operands.bias.astype(scores.dtype), 0)
    # Both arms of every where are finite: a NaN in the arm not taken would reach the gradient.
    scores = _where(keep, scores, 0)
    if operands.score is not None:
        scores = _modified(scores, operands.score, keep, at)
    scores = _where(keep, scores, -jnp.inf)

    weights, lse = _softmax(scores, operands.sinks)
    if spec.dropout_rate:
        stays = dropout.keep(operands.seed, at.row, at.column, spec.dropout_rate)
        weights = jnp.where(stays, weights / (1 - spec.dropout_rate), 0)
    grouped = (spec.batch, spec.key_heads, spec.group, spec.rows, spec.columns)
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.astype(spec.dtype).reshape(grouped),
        value,
        precision=spec.precision,
        preferred_element_type=spec.accumulator,
    ).reshape(spec.out.shape)
    if keep is not None:
        # Not to change the value: an inf in such a row's dO would meet P = 0 in dV.
        out = jnp.where(keep.any(-1).swapaxes(1, 2)[..., None], out, 0)
    return out.astype(spec.dtype), lse


def _positions(spec: Spec, operands: Operands) -> At:
    row = jnp.arange(spec.rows, dtype=jnp.int32)[:, None]
    column = jnp.arange(spec.columns, dtype=jnp.int32)[None, :]
    row, column = (jnp.broadcast_to(x, (spec.rows, spec.columns)) for x in (row, column))
    return At(row, column, operands.batch_id, operands.head_id)


def _keep(spec: Spec, operands: Operands, at: At) -> jax.Array | None:
    """Which elements take part, (B|1, N|1, T, S); None where all do."""
    keep = None
    if operands.mask is not None:

        def spread(leaf: jax.Array | Blocked) -> jax.Array:
            if not isinstance(leaf, Blocked):
                return leaf
            rows = jnp.repeat(leaf.values, leaf.block_rows, axis=-2)[..., : spec.rows, :]
            return jnp.repeat(rows, leaf.block_columns, axis=-1)[..., : spec.columns]

        mask = jax.tree.map(spread, operands.mask, is_leaf=is_blocked)
        keep = mask.keep(at)
    if operands.bias is not None:
        visible = operands.bias != -jnp.inf
        keep = visible if keep is None else keep & visible
    if keep is None:
        return None
    shape = jnp.broadcast_shapes(keep.shape, (1, 1, spec.rows, spec.columns))
    return jnp.broadcast_to(keep, shape)


def _seen(
    spec: Spec, operands: Operands, keep: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, v with zeros in rows and columns that nobody sees: 0 · NaN is NaN."""
    query, key, value = operands.query, operands.key, operands.value
    if keep is not None:
        row_used = keep.any(-1).swapaxes(1, 2)[..., None]
        column_used = keep.any(-2)
        if keep.shape[1] != 1:
            shape = (keep.shape[0], spec.key_heads, spec.group, spec.columns)
            column_used = column_used.reshape(shape).any(2)
        column_used = column_used.swapaxes(1, 2)[..., None]
        query = jnp.where(row_used, query, 0)
        key, value = jnp.where(column_used, key, 0), jnp.where(column_used, value, 0)
    return query, key, value


def _modified(scores: jax.Array, score: Score, keep: jax.Array | None, at: At) -> jax.Array:
    """The score modifier, with its arrays cut off from gradients at hidden elements (0 · inf)."""

    def cut(leaf: jax.Array) -> jax.Array:
        if keep is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(keep, leaf, jax.lax.stop_gradient(leaf))

    return jax.tree.map(cut, score).apply(scores, at)


def _where(keep: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    return x if keep is None else jnp.where(keep, x, jnp.asarray(otherwise, x.dtype))


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Softmax over columns and LSE (B, N, T); a row of −inf gives weights 0 and LSE −inf."""
    largest = scores.max(-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks.astype(scores.dtype))
    largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
    exp = jnp.exp(scores - largest)
    total = exp.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(scores.dtype) - largest)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + largest)
    return exp / total, lse[..., 0]
