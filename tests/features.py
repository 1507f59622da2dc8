"""Every argument of the public function as a part that a case is put together from.

A part says the same to both sides: `arguments` and `operands` to flashjax, `keep` and `options` to
the oracle. Parts of different kinds combine freely.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import masks, scores
from tests.inputs import F32, F64, USUAL, Case, Shape, case, dropout_pattern
from tests.oracle import Array, Score

Rng = np.random.Generator


@dataclasses.dataclass
class Part:
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep: Array | None = None
    operands: dict[str, Array] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    score_mod: Callable[[Mapping[str, Any]], Any] | None = None


Maker = Callable[[Shape, Rng], Part]


def build(shape: Shape, names: Sequence[str], dtype: Any = USUAL, seed: int = 0) -> Case:
    """A case with the named parts; masks are combined by And."""
    r = np.random.default_rng([seed, 1])
    parts = [PARTS[name](shape, r) for name in names]
    arguments: dict[str, Any] = {}
    operands: dict[str, Array] = {}
    options: dict[str, Any] = {}
    for part in parts:
        mask = part.arguments.get("mask")
        if mask is not None and "mask" in arguments:
            part.arguments["mask"] = _term(arguments["mask"]) & _term(mask)
        arguments |= part.arguments
        operands |= part.operands
        options |= part.options
    kept = [np.broadcast_to(p.keep, shape.logits) for p in parts if p.keep is not None]
    if kept:
        options["keep"] = functools.reduce(np.logical_and, kept)
    wide = F64 if dtype == F64 else F32
    operands = {name: x.astype(wide) for name, x in operands.items()}
    makers = [p.score_mod for p in parts if p.score_mod is not None]
    assert len(makers) <= 1, "one score modifier at a time"
    if callable(options.get("score")):
        options["score"] = options["score"](operands)
    return case(
        shape, dtype, seed, arguments=arguments, operands=operands, options=options,
        score_mod=makers[0] if makers else None,
    )  # fmt: skip


def far_from_0(shape: Shape, dtype: Any = USUAL, **arguments: Any) -> Case:
    """Large inputs, and scores of some rows that lie 160 lower or higher: float32's exponential of
    an LSE would be 0 or infinite."""
    made = case(shape, dtype)
    query, key, value = 5 * made.query, 3 * made.key, 3 * made.value
    key[..., 0] = 16
    query[..., 0] = (np.arange(shape.T) % 3 - 1)[:, None] * 10 * np.sqrt(shape.H)
    made = Case(query, key, value, arguments=arguments)
    lse = made.judge.reference["lse"]
    assert lse.min() < -88
    assert lse.max() > 88
    return made


def _term(mask: Any) -> masks.Mask:
    return mask if isinstance(mask, masks.Mask) else masks.Dense(mask)


def grid(s: Shape) -> tuple[Array, Array]:
    return np.arange(s.T)[:, None], np.arange(s.S)[None, :]


# Masks.


def is_causal(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    return Part({"is_causal": True}, column <= row)


def window(s: Shape, r: Rng) -> Part:
    # With tiles of 16 × 24 the window's corners fall on tiles' corners.
    row, column = grid(s)
    return Part({"local_window_size": (9, 1)}, (column >= row - 9) & (column <= row + 1))


def half_open_window(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    return Part({"mask": masks.Window(None, 3, offset=2)}, column <= row + 5)


def lengths(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    q, kv = r.integers(1, s.T + 1, s.B), r.integers(1, s.S + 1, s.B)
    kv[-1] = 0 if s.B > 1 else kv[-1]
    keep = (row < q[:, None, None]) & (column < kv[:, None, None])
    arguments = {
        "query_seq_lengths": q.astype(np.int32),
        "key_value_seq_lengths": kv.astype(np.uint16),
    }
    return Part(arguments, keep[:, None])


def _ids(s: Shape, r: Rng, length: int) -> Array:
    """Ascending ids with gaps, padding (−1) at the end."""
    ids = np.sort(r.integers(0, 4, (s.B, length)), axis=1)
    ids[:, length - length // 8 :] = -1
    return ids.astype(np.int32)


def _same_segment(q: Array, kv: Array) -> Array:
    same = (q[:, :, None] == kv[:, None, :]) & (q[:, :, None] >= 0)
    return np.asarray(same[:, None])


def segments(s: Shape, r: Rng) -> Part:
    q = _ids(s, r, s.T)
    if s.T == s.S:
        return Part({"segment_ids": q}, _same_segment(q, q))
    kv = _ids(s, r, s.S)
    return Part({"segment_ids": (q, kv)}, _same_segment(q, kv))


def unsorted_segments(s: Shape, r: Rng) -> Part:
    q, kv = r.integers(-1, 3, (s.B, s.T)), r.integers(-1, 3, (s.B, s.S))
    return Part({"mask": masks.Segments(q.astype(np.int16), kv)}, _same_segment(q, kv))


def boolean(s: Shape, r: Rng) -> Part:
    keep = r.random((s.T, s.S)) > 0.4
    keep[s.T // 2] = False
    return Part({"mask": keep}, keep)


def boolean_per_head(s: Shape, r: Rng) -> Part:
    keep = r.random(s.logits) > 0.5
    return Part({"mask": keep}, keep)


def boolean_of_columns(s: Shape, r: Rng) -> Part:
    keep = r.random((s.B, 1, 1, s.S)) > 0.3
    return Part({"mask": keep}, keep)


def bottom_right(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    return Part({"mask": masks.Causal(align="bottom_right")}, column <= row + s.S - s.T)


def causal_offset_per_batch(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    offset = r.integers(-2, s.S // 2, s.B).astype(np.int32)
    keep = column <= row + offset[:, None, None]
    return Part({"mask": masks.Causal(offset=offset)}, keep[:, None])


def prefix(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    length = r.integers(1, s.S // 2 + 1, s.B).astype(np.int32)
    keep = (column < length[:, None, None]) | (column <= row)
    return Part({"mask": masks.Prefix(length) | masks.Causal()}, keep[:, None])


def chunks(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    return Part({"mask": masks.Chunked(7)}, row // 7 == column // 7)


def sink_tokens_and_window(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    keep = ((column < 3) | (column >= row - 4)) & (column <= row)
    return Part({"mask": (masks.Prefix(3) | masks.Window(4, 0)) & masks.Causal()}, keep)


def intervals(s: Shape, r: Rng) -> Part:
    begin = r.integers(0, s.T, (s.B, s.S)).astype(np.int32)
    end = (begin + r.integers(0, s.T, (s.B, s.S))).astype(np.int32)
    row = np.arange(s.T)[:, None]
    keep = (row >= begin[:, None, :]) & (row < end[:, None, :])
    return Part({"mask": masks.Intervals(begin, end)}, keep[:, None])


def block_sparse(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    blocks = r.random((s.N, -(-s.T // 16), -(-s.S // 8))) > 0.5
    term = masks.BlockSparse(blocks, block_rows=16, block_columns=8)
    return Part({"mask": term}, blocks[:, row // 16, column // 8])


def complement(s: Shape, r: Rng) -> Part:
    row, column = grid(s)
    return Part({"mask": ~(masks.Causal() & masks.Chunked(9))}, ~_chunk_of_9(row, column))


def _chunk_of_9(row: Array, column: Array) -> Array:
    return np.asarray((column <= row) & (row // 9 == column // 9))


def _lattice(row: Any, column: Any, phase: Any, gap: Any, limit: Any, shift: Any) -> Any:
    return (row + phase + column * gap + shift) % 7 < limit


def predicate(s: Shape, r: Rng) -> Part:
    phase = r.integers(0, 7, (s.B, s.T)).astype(np.int32)
    gap = r.integers(1, 4, s.S).astype(np.int32)
    shift = r.integers(0, 7, s.N).astype(np.int32)
    term = masks.Predicate(
        _lattice,
        rows={"phase": phase},
        columns={"gap": gap},
        scalars={"limit": np.int32(4)},
        heads={"shift": shift},
    )
    row, column = grid(s)
    per_head = shift[None, :, None, None]
    return Part({"mask": term}, _lattice(row, column, phase[:, None, :, None], gap, 4, per_head))


# Biases: the shape says which.


def bias(*dims: str, hidden: bool = False) -> Maker:
    def make(s: Shape, r: Rng) -> Part:
        values = r.normal(size=tuple(1 if d == "1" else getattr(s, d) for d in dims))
        if hidden:
            values[r.random(values.shape) > 0.8] = -np.inf
        return Part(operands={"bias": values})

    return make


# Scores.


def traced_scale(s: Shape, r: Rng) -> Part:
    return Part(operands={"scale": np.asarray(0.37)})


def static_scale(s: Shape, r: Rng) -> Part:
    return Part({"scale": 0.7}, options={"scale": 0.7})


def soft_cap(s: Shape, r: Rng) -> Part:
    return Part({"logits_soft_cap": 2.5}, options={"soft_cap": 2.5})


def _alibi(slopes: Any) -> Score:
    slopes = slopes.reshape(1, -1, 1, 1)
    return Score(
        lambda s, i, j, b, n: s - slopes[0, n, 0, 0] * np.abs(i - j).astype(slopes.dtype),
        lambda s, i, j, b, n: {
            "score": np.ones_like(s),
            "slopes": -np.abs(i - j) + np.zeros_like(s),
        },
        {"slopes": slopes.shape},
    )


def alibi(s: Shape, r: Rng) -> Part:
    return Part(
        operands={"slopes": r.uniform(0.05, 0.5, s.N)},
        options={"score": lambda operands: _alibi(operands["slopes"])},
        score_mod=lambda operands: scores.Alibi(operands["slopes"]),
    )


def _bent(
    score: Any, row: Any, column: Any, batch: Any, head: Any, *, a: Any, b: Any, c: Any, d: Any
) -> Any:
    distance = (row - column).astype(score.dtype) * (1 + batch).astype(score.dtype)
    return a * score + b * c * distance / 16 + d * jnp.sin(score) * (head % 2 == 1)


def _bent_oracle(x: Mapping[str, Array]) -> Score:
    a, c = x["a"].reshape(1, 1, -1, 1), x["c"].reshape(1, 1, 1, 1)
    b, d = x["b"][:, None, None, :], x["d"].reshape(1, -1, 1, 1)

    def value(s: Any, i: Any, j: Any, m: Any, n: Any) -> Any:
        far = ((i - j) * (1 + m) / 16).astype(a.dtype)
        return a[0, 0, i, 0] * s + b[m, 0, 0, j] * c[0, 0, 0, 0] * far + _odd(d, n) * np.sin(s)

    def partials(s: Any, i: Any, j: Any, m: Any, n: Any) -> dict[str, Any]:
        far = ((i - j) * (1 + m) / 16).astype(a.dtype)
        return {
            "score": a[0, 0, i, 0] + _odd(d, n) * np.cos(s),
            "a": s,
            "b": c[0, 0, 0, 0] * far,
            "c": b[m, 0, 0, j] * far,
            "d": np.sin(s) * (n % 2 == 1),
        }

    return Score(value, partials, {"a": a.shape, "b": b.shape, "c": c.shape, "d": d.shape})


def _odd(d: Array, head: Any) -> Any:
    return d[0, head, 0, 0] * (head % 2 == 1)


def score_mod(s: Shape, r: Rng) -> Part:
    operands = {
        "a": 1 + 0.2 * r.normal(size=s.T),
        "b": 0.3 * r.normal(size=(s.B, s.S)),
        "c": np.asarray(0.5),
        "d": 0.5 * r.normal(size=s.N),
    }

    def make(x: Mapping[str, Any]) -> Any:
        return scores.ScoreMod(
            _bent,
            rows={"a": x["a"]},
            columns={"b": x["b"]},
            scalars={"c": x["c"]},
            heads={"d": x["d"]},
        )

    return Part(operands=operands, options={"score": _bent_oracle}, score_mod=make)


def sinks(s: Shape, r: Rng) -> Part:
    return Part(operands={"sinks": r.normal(size=s.N)})


def dropout(s: Shape, r: Rng) -> Part:
    options = {"dropout_keep": dropout_pattern(3, s, 0.25), "dropout_rate": 0.25}
    return Part({"dropout_rate": 0.25, "dropout_key": jax.random.key(3)}, options=options)


def deterministic(s: Shape, r: Rng) -> Part:
    return Part({"deterministic_backward": True})


PARTS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        is_causal, window, half_open_window, lengths, segments,
        unsorted_segments, boolean, boolean_per_head, boolean_of_columns, bottom_right,
        causal_offset_per_batch, prefix, chunks, sink_tokens_and_window, intervals, block_sparse,
        complement, predicate, traced_scale, static_scale, soft_cap, alibi,
        score_mod, sinks, dropout, deterministic,
    )
}  # fmt: skip
PARTS |= {
    "bias (B,N,T,S)": bias("B", "N", "T", "S"),
    "bias (1,N,T,S)": bias("1", "N", "T", "S"),
    "bias (N,1,S)": bias("N", "1", "S"),
    "bias (T,1)": bias("T", "1"),
    "bias (B,1,1,1)": bias("B", "1", "1", "1"),
    "bias of −inf (B,1,T,S)": bias("B", "1", "T", "S", hidden=True),
}


def pairwise(axes: Mapping[str, Sequence[str]], seed: int = 0) -> list[dict[str, str]]:
    """Rows of one choice per axis such that any two choices of two axes meet in some row."""
    r = np.random.default_rng(seed)
    pairs = list(itertools.combinations(axes, 2))
    left = {(a, x, b, y) for a, b in pairs for x in axes[a] for y in axes[b]}

    def met(row: Mapping[str, str]) -> set[tuple[str, str, str, str]]:
        return {(a, row[a], b, row[b]) for a, b in pairs} & left

    rows = []
    while left:
        # Starting from an open pair, so that every row makes progress.
        a, x, b, y = min(left)
        tries = [
            {name: choices[int(r.integers(len(choices)))] for name, choices in axes.items()}
            | {a: x, b: y}
            for _ in range(50)
        ]
        rows.append(max(tries, key=lambda row: len(met(row))))
        left -= met(rows[-1])
    return rows
