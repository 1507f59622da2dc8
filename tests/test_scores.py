"""Score modifiers as values, what they compute, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
import flashjax.scores
from flashjax.scores import Score, alibi_slopes
from flashjax.structure import At, Dims
from tests.inputs import ANYWHERE

Array = np.ndarray
DIMS = Dims((2,), 3, 5, 7)
LOGITS = (2, 3, 5, 7)
ROW, COLUMN = np.arange(5)[:, None], np.arange(7)[None, :]
BATCH, HEAD = np.arange(2).reshape(2, 1, 1, 1), np.arange(3).reshape(1, 3, 1, 1)
# The type checker would refuse as well what is wrong here on purpose.
scores: Any = flashjax.scores
ScoreMod: Any = flashjax.scores.ScoreMod
attention: Any = flashjax.dot_product_attention


def some_scores(scale: float = 3.0) -> Array:
    return (scale * np.random.default_rng(0).normal(size=LOGITS)).astype(np.float32)


def applied(modifier: Score, values: Array) -> Array:
    """The modifier on all elements at once, as the dense implementation calls it."""
    row, column = np.indices(LOGITS[2:], np.int32)
    at = At(row, column, jnp.asarray(BATCH), jnp.asarray(HEAD))
    return np.asarray(modifier.aligned(DIMS).apply(jnp.asarray(values), at))


def doubled(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
    return 2 * score


def shifted(score: Any, row: Any, column: Any, batch: Any, head: Any, **by: Any) -> Any:
    return score + by["r"] + 10 * by["c"] + 100 * by["s"] + 1000 * by["h"]


# soft_cap.


@pytest.mark.parametrize("cap", [0.5, 30, np.float32(2), np.asarray([1, 4], np.float32)], ids=str)
def test_soft_cap(cap: Any) -> None:
    values = some_scores()
    c = np.reshape(cap, (-1, 1, 1, 1)).astype(np.float64)
    found = applied(scores.soft_cap(cap), values)
    np.testing.assert_allclose(found, c * np.tanh(values / c), rtol=1e-5)
    assert (abs(found) <= c).all()


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_logits_soft_cap_says_the_same(implementation: str) -> None:
    x = np.random.default_rng(0).normal(size=(1, 9, 2, 4)).astype(np.float32)

    def call(**how: Any) -> Array:
        return np.asarray(attention(x, x, x, implementation=implementation, **how))

    np.testing.assert_array_equal(call(logits_soft_cap=0.5), call(score_mod=scores.soft_cap(0.5)))
    twice = call(score_mod=ScoreMod(doubled), logits_soft_cap=0.5)
    np.testing.assert_array_equal(
        twice, call(score_mod=ScoreMod(doubled).then(scores.soft_cap(0.5)))
    )


# Alibi.

SLOPES = {
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    3: [1 / 16, 1 / 256, 1 / 4],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [2.0**-x for x in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes_are_the_papers(heads: int) -> None:
    """A geometric series from 2^(−8/N); else that of the lower power and half of the next."""
    found = alibi_slopes(heads)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, SLOPES[heads], rtol=1e-6)


@pytest.mark.parametrize("heads", range(1, 40))
def test_alibi_slopes_are_distinct_for_any_number_of_heads(heads: int) -> None:
    found = alibi_slopes(heads)
    assert found.shape == (heads,)
    assert len(set(found.tolist())) == heads
    assert ((found > 0) & (found < 1)).all()


@pytest.mark.parametrize("offset", [0, 3, -2, np.int32(1), np.asarray([2, -9], np.int16)], ids=str)
def test_alibi_falls_with_the_distance(offset: Any) -> None:
    values, slopes = some_scores(), np.asarray([0.5, 0.25, 2], np.float32)
    by_member = np.reshape(offset, (-1, 1, 1, 1)).astype(int)
    distance = abs(ROW + by_member - COLUMN)
    found = applied(scores.Alibi(slopes, offset), values)
    np.testing.assert_allclose(found, values - slopes[:, None, None] * distance, rtol=1e-5)
    default = applied(scores.Alibi(offset=offset), values)
    paper = np.reshape(SLOPES[3], (3, 1, 1))
    np.testing.assert_allclose(default, values - paper * distance, rtol=1e-5)


@pytest.mark.parametrize("offset", [2**40, -(2**31), 2**31 - 1])
def test_alibi_takes_any_offset(offset: int) -> None:
    assert np.isfinite(applied(scores.Alibi(offset=offset), some_scores())).all()


# ScoreMod.


def test_score_mod_takes_arrays_of_every_kind_by_name() -> None:
    r = np.random.default_rng(1)
    row, column = r.normal(size=5), r.normal(size=(2, 7))
    scalar, head = r.normal(size=2), r.normal(size=3)
    named = [
        {n: x.astype(np.float32)} for n, x in zip("rcsh", (row, column, scalar, head), strict=True)
    ]
    values = some_scores()
    expected = values + row[:, None] + 10 * column[:, None, None, :]
    expected = expected + 100 * scalar[:, None, None, None] + 1000 * head[:, None, None]
    np.testing.assert_allclose(applied(ScoreMod(shifted, *named), values), expected, rtol=1e-4)


@pytest.mark.parametrize("factor", [2.0, 2, np.float32(2), np.asarray(2.0, np.float32)], ids=type)
def test_score_mod_takes_numbers_by_name(factor: Any) -> None:
    def times(score: Any, *_: Any, factor: Any) -> Any:
        return factor * score

    values = some_scores()
    found = applied(ScoreMod(times, scalars={"factor": factor}), values)
    np.testing.assert_allclose(found, 2 * values)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_score_mod_knows_where_it_is(implementation: str) -> None:
    """Scores of 0 become the position's number; the LSE tells it, batch dims counted as one."""
    shape, rows, columns, heads = (2, 3), 4, 5, 2

    def position(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
        number = row + 10 * column + 100 * head + 1000 * batch
        return score + number.astype(score.dtype) / 512

    _, lse = attention(
        np.zeros((*shape, rows, heads, 1), np.float32),
        np.zeros((*shape, columns, heads, 1), np.float32),
        np.zeros((*shape, columns, heads, 1), np.float32),
        score_mod=ScoreMod(position), implementation=implementation, return_residual=True,
    )  # fmt: skip
    b, t, n, s = np.ogrid[:6, :rows, :heads, :columns]
    number = (t + 10 * s + 100 * n + 1000 * b) / 512
    expected = np.log(np.exp(number).sum(-1)).reshape(*shape, rows, heads)
    np.testing.assert_allclose(lse, expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_what_hidden_elements_become_does_not_matter(implementation: str) -> None:
    x = np.random.default_rng(0).normal(size=(1, 9, 2, 4)).astype(np.float32)

    def poisoned(score: Any, row: Any, column: Any, batch: Any, head: Any, *, slope: Any) -> Any:
        return jnp.where(column > row, jnp.nan, slope * score)

    def loss(q: Any, slope: Any) -> Any:
        modifier = ScoreMod(poisoned, scalars={"slope": slope})
        return attention(
            q, x, x, is_causal=True, score_mod=modifier, implementation=implementation
        ).sum()

    value, grads = jax.value_and_grad(loss, (0, 1))(x, jnp.float32(1))
    plain = attention(x, x, x, is_causal=True).sum()
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)


def test_results_keep_the_dtype_of_scores() -> None:
    with jax.enable_x64(True):
        values = some_scores().astype(np.float64)
        slopes = np.ones(3, np.float32)
        for modifier in (scores.soft_cap(3.0), scores.Alibi(slopes), ScoreMod(doubled)):
            assert applied(modifier, values).dtype == np.float64


# Chains, hashes, pytrees.


def test_chains_apply_in_order() -> None:
    values, cap = some_scores(), scores.soft_cap(1.0)
    np.testing.assert_allclose(
        applied(cap.then(ScoreMod(doubled)), values), 2 * np.tanh(values), rtol=1e-5
    )
    np.testing.assert_allclose(
        applied(ScoreMod(doubled).then(cap), values), np.tanh(2 * values), rtol=1e-5
    )
    three = cap.then(ScoreMod(doubled)).then(scores.soft_cap(0.5))
    expected = 0.5 * np.tanh(4 * np.tanh(values))
    np.testing.assert_allclose(applied(three, values), expected, rtol=1e-5)
    assert repr(three) == "SoftCap(cap=1.0) then ScoreMod(fn=doubled) then SoftCap(cap=0.5)"


ONE = np.ones(3, np.float32)


def test_hash_looks_at_the_function_and_the_shapes() -> None:
    same = [
        (ScoreMod(doubled), ScoreMod(doubled)),
        (scores.Alibi(ONE), scores.Alibi(2 * ONE)),
        (scores.soft_cap(jnp.float32(1)), scores.soft_cap(jnp.float32(2))),
    ]
    for a, b in same:
        assert a == b
        assert hash(a) == hash(b)
    different = [
        (ScoreMod(doubled), ScoreMod(lambda *a: 2 * a[0])),
        (ScoreMod(shifted, heads={"h": ONE}), ScoreMod(shifted, heads={"x": ONE})),
        (scores.Alibi(ONE), scores.Alibi(ONE[:2])),
        (scores.Alibi(), scores.Alibi(ONE)),
        (scores.soft_cap(1.0), scores.soft_cap(2.0)),
        (scores.soft_cap(1.0).then(scores.Alibi()), scores.Alibi().then(scores.soft_cap(1.0))),
    ]
    for a, b in different:
        assert a != b
        assert len({a, b}) == 2


def test_modifiers_are_pytrees_of_their_arrays() -> None:
    modifier = scores.Alibi(ONE).then(ScoreMod(shifted, heads={"h": ONE}))
    leaves, tree = jax.tree.flatten(modifier)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves) == modifier
    back = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(modifier)
    assert back == jax.tree.map(jnp.asarray, modifier)
    np.testing.assert_array_equal(jax.tree.leaves(back)[0], 2 * ONE)
    assert jax.tree.leaves(scores.soft_cap(3.0)) == []


# What is refused: every message names the argument, what came and what was wanted.

OUTER = jnp.arange(4.0)


def captures(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
    return score * OUTER[0]


def named_x(score: Any, row: Any, column: Any, batch: Any, head: Any, x: Any) -> Any:
    return score * x


Refusal = tuple[Callable[[], Any], type[Exception], str]
REFUSED: dict[str, Refusal] = {
    "cap of 0": (
        lambda: scores.soft_cap(0),
        ValueError,
        r"soft_cap\(cap=…\) is 0; wanted a finite number",
    ),
    "cap below 0": (lambda: scores.soft_cap(-1.0), ValueError, r"soft_cap\(cap=…\) is -1.0"),
    "cap NaN": (lambda: scores.soft_cap(math.nan), ValueError, r"soft_cap\(cap=…\) is nan"),
    "cap inf": (lambda: scores.soft_cap(math.inf), ValueError, r"soft_cap\(cap=…\) is inf"),
    "cap None": (lambda: scores.soft_cap(None), ValueError, r"soft_cap\(cap=…\) is None"),
    "cap str": (lambda: scores.soft_cap("1"), TypeError, r"\(cap=…\) is a str; wanted a number"),
    "slopes of a wrong length": (
        lambda: scores.Alibi(np.ones(2)),
        ValueError,
        r"Alibi.slopes has shape \(2,\); wanted \(3,\) \(one value per query head\)",
    ),
    "slopes of one number": (
        lambda: scores.Alibi(0.5),
        TypeError,
        r"Alibi\(slopes=…\) is 0.5; wanted",
    ),
    "a broken offset": (
        lambda: scores.Alibi(offset=0.5),
        TypeError,
        r"Alibi\(offset=…\) is 0.5; wanted an integer or an integer array",
    ),
    "no function": (lambda: ScoreMod(ONE), TypeError, r"ScoreMod\(fn=…\) is .*; wanted a function"),
    "no dict": (
        lambda: ScoreMod(shifted, heads=ONE),
        TypeError,
        r"ScoreMod\(heads=…\) is a ndarray; wanted a dict of named arrays",
    ),
    "one name twice": (
        lambda: ScoreMod(named_x, rows={"x": np.ones(5)}, heads={"x": ONE}),
        ValueError,
        r"ScoreMod.*'?x'?",
    ),
    "an array of a wrong length": (
        lambda: ScoreMod(shifted, columns={"c": np.ones(5)}),
        ValueError,
        r"ScoreMod.columns\['c'\] has shape \(5,\); wanted \(7,\)",
    ),
    "a captured array": (
        lambda: ScoreMod(captures),
        ValueError,
        r"captures captures an array \(float32\[4\]\).*Pass it as an operand: rows=, columns=",
    ),
    "a sum": (
        lambda: ScoreMod(lambda *a: a[0].sum()),
        TypeError,
        r"ScoreMod\(fn=…\) is not elementwise: .* reduce_sum",
    ),
    "an integer result": (
        lambda: ScoreMod(lambda *a: a[1]),
        TypeError,
        r"ScoreMod\(fn=…\) returns int32\[2,3\] for a tile of scores; wanted floats",
    ),
    "a chain with a function": (
        lambda: scores.soft_cap(1.0).then(doubled),
        TypeError,
        r"doubled|function",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    make, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        make().aligned(DIMS)


def test_a_captured_tracer_is_refused() -> None:
    @jax.jit
    def traced(factor: Any) -> Any:
        return ScoreMod(lambda score, *_: score * factor).aligned(DIMS)

    with pytest.raises(ValueError, match=r"captures an array.*Pass it as an operand"):
        traced(3.0)


@pytest.mark.parametrize("wrong", [doubled, 3, "alibi"], ids=["function", "number", "name"])
def test_attention_takes_modifiers_only(wrong: Any) -> None:
    x = np.ones((1, 4, 1, 2), np.float32)
    hint = r"score_mod is a .*; wanted a flashjax.scores modifier.*ScoreMod\(fn\)"
    with pytest.raises(TypeError, match=hint):
        attention(x, x, x, score_mod=wrong)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_an_integer_array_beside_a_float_one(implementation: str) -> None:
    """The float one has its gradient all the same."""
    q = jax.random.normal(jax.random.key(0), (2, 9, 2, 4))

    def total(slopes: Any) -> Any:
        score = scores.Alibi(slopes, offset=jnp.array([3, -2]))
        out = flashjax.dot_product_attention(
            q, q, q, score_mod=score, implementation=implementation
        )
        return (out**2).sum()

    slopes = jnp.array([0.5, 0.25])
    step = 1e-2 * jnp.array([1.0, 0.0])
    difference = (total(slopes + step) - total(slopes - step)) / 2e-2
    # The third derivative of a sum of 144 squares over 6, times the step's square.
    np.testing.assert_allclose(jax.grad(total)(slopes)[0], difference, rtol=2e-3)
