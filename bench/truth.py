"""Attention in numpy float64 on a sample of rows and columns, to judge results of any length by.

For a row with logits e, p = softmax(e), Δ = Σ p (dO·v): dE = p (dO·v − Δ), dQ = scale Σ dZ k; for a
column, dK = scale Σ dZ q and dV = Σ p dO over the rows that see it. dZ is dE behind the soft cap.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from bench.programs import as_float64
from flashjax.cases import Workload

Array = np.ndarray[Any, Any]

ROWS, HEADS, COLUMNS = 64, 2, 64
# Elements of score matrices that a check of dK and dV may compute: about two seconds of numpy.
MOST_ELEMENTS = 2**26
# Under a causal mask few rows see the last columns.
LAST = 256
CHUNK = 512


class Row(NamedTuple):
    """Some rows of one head: p and dZ over all columns, the output."""

    weights: Array
    d_scores: Array
    out: Array


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the sample needs of batch member 0, on the host; `bias` and `sinks` may be None."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    bias: Any
    sinks: Any


@dataclasses.dataclass(frozen=True)
class Truth:
    """Right answers: out (R, Hv) and dq (R, H) of each of `heads`; dk (C, H) and dv (C, Hv) of
    `key_head` over the `columns`, None where they would take too long."""

    rows: Array
    heads: tuple[int, ...]
    columns: Array
    key_head: int
    out: Array
    dq: Array
    dk: Array | None
    dv: Array | None

    def errors(self, out: Any = None, gradients: Any = None) -> dict[str, float]:
        """Largest |error| of what is given, and, under names with "relative", its ratio to the
        largest right answer."""
        pairs: dict[str, tuple[Array, Array]] = {}
        for name, whole, right in (
            ("out", out, self.out),
            ("dq", gradients[0] if gradients else None, self.dq),
        ):
            if whole is not None:
                # Rows first: an index of an array and a number side by side would change the axes.
                found = [as_float64(whole, (0, slice(None), n))[self.rows] for n in self.heads]
                pairs[name] = (np.stack(found), right)
        if gradients is not None and self.dk is not None and self.dv is not None:
            at = (0, slice(None), self.key_head)
            pairs["dk"] = as_float64(gradients[1], at)[self.columns], self.dk
            pairs["dv"] = as_float64(gradients[2], at)[self.columns], self.dv
        errors: dict[str, float] = {}
        for name, (got, right) in pairs.items():
            error = np.abs(got - right).max()
            errors[name] = float(error)
            errors[f"{name} relative"] = float(error / max(np.abs(right).max(), 1e-300))
        return errors


def truth(workload: Workload, operands: Operands, seed: int = 0) -> Truth:
    random = np.random.default_rng(seed)
    # A row of a million columns takes 8 MB in each of a dozen arrays.
    count = min(ROWS if workload.columns < 2**19 else 8, workload.rows)
    rows = np.sort(random.choice(workload.rows, count, replace=False))
    heads = tuple(sorted(random.choice(workload.heads, min(HEADS, workload.heads), replace=False)))
    heads = tuple(int(n) for n in heads)
    key_head = int(random.integers(workload.key_heads))
    parts = [_rows(workload, operands, n, rows) for n in heads]
    columns = sampled_columns(workload, random)
    dk, dv = (None, None)
    if columns is not None:
        dk, dv = _columns(workload, operands, key_head, columns)
    return Truth(
        rows,
        heads,
        np.zeros(0, int) if columns is None else columns,
        key_head,
        np.stack([row.out for row, _ in parts]),
        np.stack([dq for _, dq in parts]),
        dk,
        dv,
    )


def sampled_columns(workload: Workload, random: np.random.Generator) -> Array | None:
    """Columns of which dK and dV can be computed in time: any, else some of the last; or None."""
    group = workload.heads // workload.key_heads
    for first in (0, max(0, workload.columns - LAST)):
        choice = np.arange(first, workload.columns)
        columns = np.sort(random.choice(choice, min(COLUMNS, choice.size), replace=False))
        if group * _viewers(workload, columns).size * workload.columns <= MOST_ELEMENTS:
            return columns
    return None


def _viewers(workload: Workload, columns: Array) -> Array:
    """The rows that see any of the columns."""
    found = []
    for begin in range(0, workload.rows, 2**16):
        rows = np.arange(begin, min(begin + 2**16, workload.rows))
        found.append(rows[workload.visible(rows, columns).any(1)])
    return np.concatenate(found)


def _rows(w: Workload, operands: Operands, head: int, rows: Array) -> tuple[Row, Array]:
    k = as_float64(operands.k, (0, slice(None), _key_head(w, head)))
    v = as_float64(operands.v, (0, slice(None), _key_head(w, head)))
    row = _row(w, operands, head, rows, k, v)
    return row, row.d_scores @ k / np.sqrt(w.head_dim)


def _columns(w: Workload, operands: Operands, key_head: int, columns: Array) -> tuple[Array, Array]:
    k = as_float64(operands.k, (0, slice(None), key_head))
    v = as_float64(operands.v, (0, slice(None), key_head))
    dk, dv = np.zeros((columns.size, w.head_dim)), np.zeros((columns.size, w.value_dim))
    viewers = _viewers(w, columns)
    group = w.heads // w.key_heads
    for head in range(key_head * group, (key_head + 1) * group):
        q = as_float64(operands.q, (0, slice(None), head))
        d_out = as_float64(operands.d_out, (0, slice(None), head))
        for begin in range(0, viewers.size, CHUNK):
            rows = viewers[begin : begin + CHUNK]
            row = _row(w, operands, head, rows, k, v, q[rows], d_out[rows])
            dv += row.weights[:, columns].T @ d_out[rows]
            dk += row.d_scores[:, columns].T @ q[rows] / np.sqrt(w.head_dim)
    return dk, dv


def _row(
    w: Workload,
    operands: Operands,
    head: int,
    rows: Array,
    k: Array,
    v: Array,
    q: Array | None = None,
    d_out: Array | None = None,
) -> Row:
    if q is None or d_out is None:
        q = as_float64(operands.q, (0, slice(None), head))[rows]
        d_out = as_float64(operands.d_out, (0, slice(None), head))[rows]
    columns = np.arange(w.columns)
    scores = q @ k.T / np.sqrt(w.head_dim)
    if operands.bias is not None:
        scores += as_float64(operands.bias, (0, head))[rows]
    if w.alibi:
        scores -= float(w.slopes()[head]) * np.abs(rows[:, None] - columns)
    slope: Any = 1.0
    if w.soft_cap is not None:
        tanh = np.tanh(scores / w.soft_cap)
        scores, slope = w.soft_cap * tanh, 1 - tanh**2
    scores = np.where(w.visible(rows, columns), scores, -np.inf)
    top = scores.max(1, keepdims=True)
    sink = None if operands.sinks is None else float(operands.sinks[head])
    if sink is not None:
        top = np.maximum(top, sink)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    weights /= np.where(total == 0, 1, total)
    out = weights @ v
    delta = (out * d_out).sum(1, keepdims=True)
    return Row(weights, weights * (d_out @ v.T - delta) * slope, out)


def _key_head(w: Workload, head: int) -> int:
    return head // (w.heads // w.key_heads)
