"""The truth: attention and its gradients in numpy float64, one row at a time. No jax in here.

A row sees only the columns that it keeps, by index, so whatever lies in the others cannot reach it.
float64 inputs are computed in long double, so that the truth is better than what it judges.

For one row with kept columns j, z_j = scale · q·k_j + bias_j, f_j = score(z_j), e_j = cap(f_j):

    lse = log(Σ_j exp(e_j) + exp(sink))        p_j = exp(e_j − lse)        r_j = D_j / (1 − rate)
    o = Σ_j p_j r_j v_j                        (D: the dropout pattern; without dropout r_j = 1)

With the cotangents dO and dLSE, dP_j = r_j (dO·v_j), and because Σ_j p_j r_j (dO·v_j) = o·dO,

    ∂p_i/∂e_j = p_i (δ_ij − p_j)   and   ∂lse/∂e_j = p_j    give
    dE_j = p_j (dP_j − Δ),  Δ = o·dO − dLSE                 dV_j += p_j r_j dO
    dF_j = dE_j cap'(f_j),  dZ_j = dF_j ∂score/∂z           dQ += scale Σ_j dZ_j k_j
    dK_j += scale dZ_j q     dBias_j = dZ_j                 dScale += Σ_j dZ_j (q·k_j)
    dSink = −exp(sink − lse) Δ                              dOperand_j = dF_j ∂score/∂operand

since the sink is one more column whose value vector is zero (its dP is 0).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Score:
    """A score modifier in numpy: both functions take (score, row, column, batch, head).

    `partials` gives the derivatives: under "score" with respect to the score, under any other name
    with respect to that operand's element. Both must work elementwise on arrays that broadcast.
    `shapes` gives each operand's shape, brought to rank 4 so that it broadcasts to (B, N, T, S).
    """

    value: Callable[..., Any]
    partials: Callable[..., Mapping[str, Any]]
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def _identity_partials(score: Any, *_: Any) -> Mapping[str, Any]:
    return {"score": np.ones_like(score)}


IDENTITY = Score(lambda score, *_: score, _identity_partials)


class Row(NamedTuple):
    """What one row computes: arrays over its kept columns, and its scalars."""

    columns: Array
    dot: Array
    weights: Array
    keep_scale: Array
    score_slope: Array
    partials: Mapping[str, Array]
    lse: Any
    sink_weight: Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, in the oracle's working precision, with everything broadcast to (B, N, T, S)."""

    query: Array
    key: Array
    value: Array
    keep: Array
    bias: Array | None
    scale: Any
    soft_cap: float | None
    score: Score
    sinks: Array | None
    keep_scale: Array | None
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        query: Array,
        key: Array,
        value: Array,
        *,
        keep: Array | None = None,
        bias: Array | None = None,
        scale: Any = None,
        soft_cap: float | None = None,
        score: Score | None = None,
        sinks: Array | None = None,
        dropout_keep: Array | None = None,
        dropout_rate: float = 0.0,
        work: Any = None,
    ) -> "Problem":
        """Takes query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv); the rest may broadcast.

        A bias of −inf hides its column, before any score modifier sees it.
        """
        if work is None:
            work = np.longdouble if query.dtype == np.float64 else np.float64
        logits = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        kept = np.broadcast_to(np.bool_(True) if keep is None else keep, logits)
        shapes: dict[str, tuple[int, ...]] = {"scale": (), **(score.shapes if score else {})}
        if bias is not None:
            shapes["bias"] = bias.shape
            bias = np.broadcast_to(bias.astype(work), logits)
            kept = kept & (bias != -np.inf)
        if sinks is not None:
            shapes["sinks"] = sinks.shape
        keep_scale = None
        if dropout_keep is not None:
            keep_scale = np.broadcast_to(dropout_keep, logits) / work(1 - dropout_rate)
        return cls(
            query.astype(work),
            key.astype(work),
            value.astype(work),
            keep=kept,
            bias=bias,
            scale=1 / np.sqrt(work(query.shape[-1])) if scale is None else work(scale),
            soft_cap=soft_cap,
            score=score or IDENTITY,
            sinks=None if sinks is None else sinks.astype(work),
            keep_scale=keep_scale,
            shapes=shapes,
        )

    @property
    def logits(self) -> tuple[int, ...]:
        return self.keep.shape

    @property
    def groups(self) -> int:
        return self.query.shape[2] // max(self.key.shape[2], 1)

    def row(self, b: int, n: int, t: int) -> Row:
        columns = np.flatnonzero(self.keep[b, n, t])
        dot = self.key[b, columns, n // self.groups] @ self.query[b, t, n]
        z = self.scale * dot
        if self.bias is not None:
            z = z + self.bias[b, n, t, columns]
        where = (np.asarray(t), columns, np.asarray(b), np.asarray(n))
        f = self.score.value(z, *where)
        visible = f > -np.inf  # a modifier may hide a column by −inf
        if not visible.all():
            columns, dot, z, f = columns[visible], dot[visible], z[visible], f[visible]
            where = (where[0], columns, *where[2:])
        partials = self.score.partials(z, *where)
        partials = {name: np.broadcast_to(x, z.shape) for name, x in partials.items()}
        e, slope = capped(f, self.soft_cap)
        lse, weights, sink_weight = _softmax(e, None if self.sinks is None else self.sinks[n])
        keep_scale = np.ones_like(e) if self.keep_scale is None else self.keep_scale[b, n, t]
        keep_scale = keep_scale if self.keep_scale is None else keep_scale[columns]
        return Row(columns, dot, weights, keep_scale, slope, partials, lse, sink_weight)


def capped(score: Array, cap: float | None) -> tuple[Array, Array]:
    """cap · tanh(score / cap) and its derivative."""
    if cap is None:
        return score, np.ones_like(score)
    tanh = np.tanh(score / cap)
    return cap * tanh, 1 - tanh * tanh


def _softmax(e: Array, sink: Any) -> tuple[Any, Array, Any]:
    """(lse, weights, the sink's weight); lse = −inf where there is nothing to weigh."""
    logits = e if sink is None else np.append(e, sink)
    top = logits.max(initial=-np.inf)
    if top == -np.inf:
        return top, np.zeros_like(e), 0.0
    lse = top + np.log(np.exp(logits - top).sum())
    return lse, np.exp(e - lse), 0.0 if sink is None else np.exp(sink - lse)


def attention(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
    """out (B, T, N, Hv) and lse (B, T, N). Options as `Problem.of`'s."""
    problem = Problem.of(query, key, value, **options)
    batch, heads, rows, _ = problem.logits
    out = np.zeros((batch, rows, heads, value.shape[-1]), problem.query.dtype)
    lse = np.full((batch, rows, heads), -np.inf, problem.query.dtype)
    for b, n, t in np.ndindex(batch, heads, rows):
        row = problem.row(b, n, t)
        seen = problem.value[b, row.columns, n // problem.groups]
        out[b, t, n] = (row.weights * row.keep_scale) @ seen
        lse[b, t, n] = row.lse
    return out, lse


def gradients(
    query: Array, key: Array, value: Array, d_out: Array, d_lse: Array | None = None, **options: Any
) -> dict[str, Array]:
    """Gradients of Σ out·d_out + Σ lse·d_lse, by the formulae above.

    Keys: query, key, value, scale; bias, sinks and the score modifier's operands where given, each
    in its own shape (the operands' brought to rank 4).
    """
    problem = Problem.of(query, key, value, **options)
    batch, heads, rows, _ = problem.logits
    work = problem.query.dtype
    d_out = d_out.astype(work)
    d_lse = np.zeros((batch, rows, heads), work) if d_lse is None else d_lse.astype(work)
    grads = {name: np.zeros_like(getattr(problem, name)) for name in ("query", "key", "value")}
    dense = {name: np.zeros(problem.logits, work) for name in ("bias", *problem.shapes)}
    d_sinks = np.zeros(heads, work)
    for b, n, t in np.ndindex(batch, heads, rows):
        row, head = problem.row(b, n, t), n // problem.groups
        q, d_o = problem.query[b, t, n], d_out[b, t, n]
        k, v = (x[b, row.columns, head] for x in (problem.key, problem.value))
        dropped = row.weights * row.keep_scale
        seen = dropped.size > 0  # d_out of a row that sees nothing must not matter, NaN included
        delta = ((dropped @ v) @ d_o if seen else 0) - (d_lse[b, t, n] if row.lse > -np.inf else 0)
        d_f = row.weights * ((v @ d_o) * row.keep_scale - delta) * row.score_slope
        d_z = d_f * row.partials["score"]
        grads["query"][b, t, n] = problem.scale * (d_z @ k)
        grads["key"][b, row.columns, head] += problem.scale * np.outer(d_z, q)
        grads["value"][b, row.columns, head] += np.outer(dropped, d_o)
        d_sinks[n] -= row.sink_weight * delta
        elementwise = {"bias": d_z, "scale": d_z * row.dot}
        elementwise |= {name: d_f * x for name, x in row.partials.items() if name != "score"}
        for name, values in elementwise.items():
            dense[name][b, n, t, row.columns] = values
    if problem.sinks is not None:
        grads["sinks"] = d_sinks
    summed = {name: shape for name, shape in problem.shapes.items() if name != "sinks"}
    return grads | {name: summed_to(dense[name], shape) for name, shape in summed.items()}


def summed_to(dense: Array, shape: tuple[int, ...]) -> Array:
    """Sums a dense array over the axes along which an array of `shape` was broadcast."""
    padded = (1,) * (dense.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, (n, m) in enumerate(zip(dense.shape, padded, strict=True)) if n != m)
    return dense.sum(axis=axes, keepdims=True).reshape(shape)
