"""The oracle against finite differences, closed forms and jax.nn."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.oracle import Array, Score

ALIBI = Score(
    lambda s, i, j, b, n: s - np.array([0.3, 0.7])[n] * np.abs(i - j),
    lambda s, i, j, b, n: {"score": np.ones_like(s), "slopes": -np.abs(i - j) + 0.0 * s},
    {"slopes": (1, 2, 1, 1)},
)


def _quadratic(weight: Array) -> Score:
    """A modifier with curvature in the score and an operand for each (batch, column)."""

    def value(s: Any, i: Any, j: Any, b: Any, n: Any) -> Any:
        return s + weight[b, 0, 0, j] * s * s * (1 + n)

    def partials(s: Any, i: Any, j: Any, b: Any, n: Any) -> dict[str, Any]:
        return {"score": 1 + 2 * weight[b, 0, 0, j] * s * (1 + n), "weight": s * s * (1 + n)}

    return Score(value, partials, {"weight": weight.shape})


def problem(seed: int = 0) -> dict[str, Any]:
    """B 2, T 4, S 5, N 2, K 1, H 3, Hv 2, in float64."""
    r = np.random.default_rng(seed)
    shapes = {"query": (2, 4, 2, 3), "key": (2, 5, 1, 3), "value": (2, 5, 1, 2)}
    return {name: r.normal(size=shape) for name, shape in shapes.items()}


def hard_mask() -> Array:
    keep = np.random.default_rng(5).random((2, 2, 4, 5)) > 0.3
    keep[0, 0, 1] = False
    keep[1, :, 2] = False
    keep[1, :, :, 3] = False
    return keep


R = np.random.default_rng(7)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"keep": hard_mask()},
    "bias": {"bias": R.normal(size=(1, 2, 1, 5)), "scale": 0.8},
    "hidden by bias": {"bias": np.where(hard_mask(), 0.25, -np.inf)},
    "cap": {"soft_cap": 1.5, "scale": 2.0, "bias": R.normal(size=(4, 1))},
    "sinks": {"sinks": R.normal(size=2), "keep": hard_mask()},
    "alibi": {"score": ALIBI},
    "quadratic": {
        "score": _quadratic(R.normal(size=(2, 1, 1, 5)) / 5),
        "soft_cap": 2.0,
        "bias": R.normal(size=(2, 1, 4, 5)),
    },
    "dropout": {"dropout_keep": R.random((2, 2, 4, 5)) > 0.3, "dropout_rate": 0.3},
    "all": {
        "keep": hard_mask(),
        "bias": R.normal(size=(2, 2, 4, 5)),
        "scale": 1.3,
        "soft_cap": 3.0,
        "score": _quadratic(R.normal(size=(2, 1, 1, 5)) / 5),
        "sinks": R.normal(size=2),
        "dropout_keep": R.random((2, 2, 4, 5)) > 0.3,
        "dropout_rate": 0.3,
    },
}


def objective(x: dict[str, Any], d_out: Array, d_lse: Array) -> Any:
    out, lse = oracle.attention(**x)
    return (out * d_out).sum() + (np.where(np.isfinite(lse), lse, 0) * d_lse).sum()


def difference(x: dict[str, Any], name: str, index: tuple[int, ...], cotangents: Any) -> Any:
    """Central difference of the objective in one element, in long double."""
    step = np.longdouble(1e-6)
    ends = []
    for sign in (1, -1):
        moved = np.asarray(x[name], np.longdouble).copy()
        moved[index] += sign * step
        ends.append(objective(x | {name: moved, "work": np.longdouble}, *cotangents))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    x = problem() | OPTIONS[name]
    r = np.random.default_rng(1)
    cotangents = r.normal(size=(2, 4, 2, 2)), r.normal(size=(2, 4, 2))
    grads = oracle.gradients(**x, d_out=cotangents[0], d_lse=cotangents[1])
    checked: list[str] = [n for n in ("query", "key", "value", "bias", "sinks") if n in x]
    checked += ["scale"] if "scale" in x else []
    assert set(checked) <= set(grads)
    for operand in checked:
        for index in itertools.islice(np.ndindex(np.shape(x[operand])), 0, None, 3):
            if np.isneginf(np.asarray(x[operand])[index]):
                continue
            expected = difference(x, operand, index, cotangents)
            np.testing.assert_allclose(
                grads[operand][index], expected, rtol=1e-8, atol=1e-9, err_msg=f"{operand}{index}"
            )


def test_gradients_reach_the_score_modifiers_operands() -> None:
    x, weight = problem(), np.random.default_rng(2).normal(size=(2, 1, 1, 5)) / 5
    cotangents = np.ones((2, 4, 2, 2)), np.full((2, 4, 2), 0.5)
    grads = oracle.gradients(
        **x, d_out=cotangents[0], d_lse=cotangents[1], score=_quadratic(weight)
    )
    for index in np.ndindex(weight.shape):
        ends = []
        for sign in (1, -1):
            moved = weight.copy()
            moved[index] += sign * 1e-6
            ends.append(objective(x | {"score": _quadratic(moved)}, *cotangents))
        expected = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(grads["weight"][index], expected, rtol=1e-6, atol=1e-7)
    assert oracle.gradients(**x, d_out=cotangents[0], score=ALIBI)["slopes"].shape == (1, 2, 1, 1)


def test_two_columns_and_a_sink_by_hand() -> None:
    q, k = np.full((1, 1, 1, 1), 1.0), np.array([0.0, np.log(3.0)]).reshape(1, 2, 1, 1)
    v = np.array([8.0, 16.0]).reshape(1, 2, 1, 1)
    out, lse = oracle.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(out, 14.0)
    np.testing.assert_allclose(lse, np.log(4))
    out, lse = oracle.attention(q, k, v, scale=1.0, sinks=np.log([4.0]))
    np.testing.assert_allclose(out, 7.0)
    np.testing.assert_allclose(lse, np.log(8))


def test_rows_that_see_nothing() -> None:
    x, keep = problem(), hard_mask()
    for sinks in (None, np.array([0.5, -1.0])):
        out, lse = oracle.attention(**x, keep=keep, sinks=sinks)
        assert (out[0, 1, 0] == 0).all()
        assert (out[1, 2] == 0).all()
        assert lse[0, 1, 0] == (-np.inf if sinks is None else sinks[0])
        grads = oracle.gradients(
            **x, d_out=np.ones((2, 4, 2, 2)), d_lse=np.ones((2, 4, 2)), keep=keep, sinks=sinks
        )
        assert (grads["query"][1, 2] == 0).all()
        assert (grads["key"][1, 3] == 0).all()
    only_sink = oracle.gradients(
        **x, d_out=np.ones((2, 4, 2, 2)), d_lse=np.ones((2, 4, 2)), sinks=np.zeros(2),
        keep=np.zeros((1, 1, 1, 1), bool),
    )  # fmt: skip
    np.testing.assert_array_equal(only_sink["sinks"], [8.0, 8.0])  # lse = sink in all 2 × 4 rows


def test_what_is_hidden_does_not_matter() -> None:
    x, keep = problem(), hard_mask()
    cotangents = {"d_out": np.ones((2, 4, 2, 2)), "d_lse": np.ones((2, 4, 2))}
    bias = np.where(keep, 0.1, np.nan)
    poisoned = {name: array.copy() for name, array in x.items()}
    poisoned["query"][1, 2] = np.nan
    poisoned["key"][1, 3] = np.inf
    poisoned["value"][1, 3] = np.nan
    bad_cotangents = {name: array.copy() for name, array in cotangents.items()}
    bad_cotangents["d_out"][1, 2] = np.nan
    bad_cotangents["d_lse"][1, 2] = np.nan
    clean = oracle.gradients(**x, **cotangents, keep=keep, bias=np.full((2, 2, 4, 5), 0.1))
    dirty = oracle.gradients(**poisoned, **bad_cotangents, keep=keep, bias=bias)
    for name, array in clean.items():
        np.testing.assert_array_equal(array, dirty[name], err_msg=name)


def test_no_columns_no_rows_no_batch() -> None:
    for batch, rows, columns in ((2, 3, 0), (2, 0, 3), (0, 3, 3)):
        q, k = np.ones((batch, rows, 2, 4)), np.ones((batch, columns, 1, 4))
        out, lse = oracle.attention(q, k, k)
        assert out.shape == (batch, rows, 2, 4)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        grads = oracle.gradients(q, k, k, out, lse)
        assert all((g == 0).all() for g in grads.values())


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_jax_nn(causal: bool) -> None:
    r = np.random.default_rng(3)
    q, k, v = (r.normal(size=(2, 6, n, 8)) for n in (4, 2, 2))
    bias = r.normal(size=(1, 4, 6, 6))
    with jax.enable_x64(True):
        theirs, pull = jax.vjp(
            lambda *a: jax.nn.dot_product_attention(*a, scale=0.4, is_causal=causal), q, k, v, bias
        )
        their_grads = pull(jnp.asarray(q))
    options: dict[str, Any] = {
        "bias": bias,
        "scale": 0.4,
        "keep": np.tri(6, dtype=bool) if causal else None,
    }
    out, _ = oracle.attention(q, k, v, **options)
    grads = oracle.gradients(q, k, v, q, **options)
    np.testing.assert_allclose(out.astype(float), theirs, atol=1e-6)  # jax.nn's softmax is float32
    for name, theirs in zip(("query", "key", "value", "bias"), their_grads, strict=True):
        np.testing.assert_allclose(grads[name].astype(float), theirs, atol=3e-6, err_msg=name)
