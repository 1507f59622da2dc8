"""The bound passes other orders of the same sums and refuses small damage."""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import bound, oracle
from tests.dense import Dense, by_position
from tests.oracle import Array, Problem

BF16, F16, F32, F64 = map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
Results = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with all that the bound needs."""

    dtype: np.dtype
    inputs: dict[str, Any]
    d_out: Array
    d_lse: Array
    options: dict[str, Any]
    judge: bound.Judge

    def problem(self, **changed: Any) -> Problem:
        work = np.float64 if self.dtype == F64 else np.float32
        return Problem.of(**self.inputs, **(self.options | changed), work=work)

    def emulate(self, tile: int = bound.TILE, **changed: Any) -> Results:
        return bound.baseline(self.problem(**changed), self.dtype, self.d_out, self.d_lse, tile)


@functools.cache
def call(dtype: np.dtype, seed: int = 0, rows: int = 40, columns: int = 300) -> Call:
    r = np.random.default_rng(seed)
    shapes = {"query": (1, rows, 4, 32), "key": (1, columns, 2, 32), "value": (1, columns, 2, 16)}
    inputs: dict[str, Any] = {
        name: r.normal(size=shape).astype(dtype) for name, shape in shapes.items()
    }
    d_out = r.normal(size=(1, rows, 4, 16)).astype(dtype)
    d_lse = r.normal(size=(1, rows, 4)).astype(np.float32)
    keep = np.tri(rows, columns, columns - rows - 3, dtype=bool)
    options: dict[str, Any] = {
        "keep": keep,
        "bias": r.normal(size=(4, rows, 1)).astype(np.float32),
        "scale": 0.3,
    }
    judge = bound.Judge.of(**inputs, d_out=d_out, d_lse=d_lse, **options)
    return Call(dtype, inputs, d_out, d_lse, options, judge)


def other_order(c: Call) -> Results:
    """Two passes, heads' dims permuted, exp2, P normalised before P·V, Δ from P, scale in dS."""
    p, x = c.problem(), Dense.of(c.problem(), c.d_out, c.d_lse)
    work = x.q.dtype

    def low(values: Array) -> Array:
        return values.astype(c.dtype).astype(work)

    order = np.random.default_rng(1).permutation(x.q.shape[-1])
    log2e = work.type(np.log2(np.e))
    dot = np.ascontiguousarray(x.q[..., order]) @ x.k[..., order].swapaxes(2, 3)
    e = dot * (p.scale * log2e) + (0 if p.bias is None else p.bias) * log2e
    e = np.where(x.e > -np.inf, e, -np.inf)
    top = e.max(-1, keepdims=True)
    above = np.exp2(e - top)
    total = above.sum(-1, keepdims=True)
    weights = above / total
    out = low(weights) @ x.v
    d_p = x.d_out @ x.v.swapaxes(2, 3)
    delta = (weights * d_p).sum(-1) - x.d_lse
    d_z = weights * (d_p - delta[..., None])
    scaled = low(d_z * p.scale)
    groups = p.groups
    return {
        "out": by_position(out, 1).astype(c.dtype),
        "lse": (top / log2e + np.log(total))[..., 0].transpose(0, 2, 1),
        "query": by_position(scaled @ x.k, 1).astype(c.dtype),
        "key": by_position(scaled.swapaxes(2, 3) @ x.q, groups).astype(c.dtype),
        "value": by_position(low(weights).swapaxes(2, 3) @ x.d_out, groups).astype(c.dtype),
        "bias": oracle.summed_to(d_z, p.shapes["bias"]),
        "scale": (d_z * dot).sum(),
    }


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_other_orders_of_the_same_sums_pass(dtype: np.dtype) -> None:
    for seed in range(2):
        c = call(dtype, seed)
        for tile in (32, 96, 512):
            c.judge.hold(c.emulate(tile))
        c.judge.hold(other_order(c))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_one_altered_row_is_caught(dtype: np.dtype) -> None:
    c = call(dtype)
    for name in ("out", "lse", "query", "key", "value"):
        damaged = c.judge.baseline[name].copy()
        row = damaged[0, 17, 1:2]
        row[...] = row * (1.02 if name != "lse" else 1 + 2.0**-18)
        with pytest.raises(AssertionError, match=r"1 of \d+ rows .* worst \(0, 17, 1\)"):
            c.judge.hold({name: damaged})


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_one_lost_column_is_caught(dtype: np.dtype) -> None:
    c = call(dtype)
    keep = c.options["keep"].copy()
    keep[:, 130] = False
    lost = c.emulate(keep=keep)
    for name in ("out", "lse", "query", "key", "value", "scale"):
        with pytest.raises(AssertionError, match=rf"^{name} "):
            c.judge.hold(lost, name)
    keep = c.options["keep"].copy()
    logits = Dense.of(c.problem(), c.d_out, c.d_lse).e[0, 2, 23]
    weights = np.exp(logits - c.judge.reference["lse"][0, 23, 2].astype(np.float32))
    typical = np.abs(weights - 1 / (weights > 0).sum()).argmin()
    keep[23, typical] = False  # an average column, of one row only
    lost = c.emulate(keep=keep)
    for name in ("out", "lse", "query"):
        with pytest.raises(AssertionError, match=rf"^{name} .* worst \(0, 23"):
            c.judge.hold(lost, name)
    with pytest.raises(AssertionError, match=rf"^value .* worst \(0, {typical}, "):
        c.judge.hold(lost, "value")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_normaliser_wrong_by_3_percent_is_caught(dtype: np.dtype) -> None:
    c = call(dtype)
    wrong: Results = {
        "out": c.judge.baseline["out"] * 1.03,
        "lse": c.judge.baseline["lse"] + np.float32(np.log(1.03)),
    }
    # The backward reads the LSE: with it wrong, every P and dS of the row is.
    wrong |= {name: c.judge.baseline[name] * 1.03 for name in ("query", "key", "value")}
    for name in wrong:
        with pytest.raises(AssertionError, match=rf"^{name} "):
            c.judge.hold(wrong, name)


def test_tf32_products_are_caught_in_float32() -> None:
    c = call(F32)

    def tf32(values: Array) -> Array:
        half, step = 1 << 12, 1 << 13  # of 23 mantissa bits TF32 keeps 10
        return ((values.view(np.int32) + half) // step * step).view(np.float32)

    rounded = c.inputs | {name: tf32(c.inputs[name]) for name in ("query", "key")}
    problem = Problem.of(**rounded, **c.options, work=np.float32)
    results = bound.baseline(problem, c.dtype, c.d_out, c.d_lse)
    for name in ("out", "lse", "query", "key", "value"):
        with pytest.raises(AssertionError, match=rf"^{name} "):
            c.judge.hold(results, name)


def test_bf16_scores_are_caught_by_the_lse() -> None:
    c = call(BF16)
    e = Dense.of(c.problem(), c.d_out, c.d_lse).e.astype(BF16).astype(np.float32)
    with pytest.raises(AssertionError, match=r"^lse "):
        c.judge.hold({"lse": np.log(np.exp(e).sum(-1)).transpose(0, 2, 1)})


def test_the_floor_is_no_looser_than_the_roundings() -> None:
    """The baseline's own error lies near the deviation that the floor assumes, for every result."""
    for dtype, least in ((BF16, 0.25), (F32, 0.2)):
        c = call(dtype)
        for name in ("out", "lse", "query", "key", "value"):
            error = np.abs(
                c.judge.baseline[name].astype(c.judge.reference[name].dtype)
                - c.judge.reference[name]
            )
            deviation = c.judge.floor[name] / bound.EXPECTED
            if error.ndim == 4:
                error, deviation = error.max(-1), deviation.max(-1)
            some = deviation > 0  # columns that no row sees have no error to show
            assert np.median(error[some] / deviation[some]) > least, (dtype, name)


def test_nan_infinity_and_shape_are_caught() -> None:
    c = call(F32)
    for value, said in ((np.nan, "NaN at"), (np.inf, "outside")):
        damaged = c.judge.baseline["out"].copy()
        damaged[0, 3, 2, 1] = value
        with pytest.raises(AssertionError, match=said):
            c.judge.hold({"out": damaged})
    empty = np.full_like(c.judge.baseline["lse"], -np.inf)
    truth, zeros = np.full_like(empty, -np.inf), np.zeros_like(empty)
    bound.assert_close("lse", empty, truth, empty, F32, 2.0)
    for wrong in (zeros, np.full_like(empty, np.inf)):
        with pytest.raises(AssertionError, match="infinity"):
            bound.assert_close("lse", wrong, truth, empty, F32, 2.0)
    with pytest.raises(AssertionError, match="outside"):
        bound.assert_close("lse", empty, zeros, zeros, F32, 2.0)
    with pytest.raises(AssertionError, match="wanted"):
        c.judge.hold({"out": c.judge.baseline["out"][..., :-1]})
