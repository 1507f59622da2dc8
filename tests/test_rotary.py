"""Rotary embedding against numpy in float64, its precision far out, and the length scalings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flashjax import Rotary, rotary
from tests.layer_oracle import Layer

H = 16


def frequencies(head_dim: int, base: float = 10_000.0) -> np.ndarray:
    return base ** (-np.arange(0, head_dim, 2) / head_dim)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("begin", [0, 2**15, 2**20, 2**30 - 6, -2_000_000_000])
def test_angles_are_right_far_out(begin: int) -> None:
    """Angles are 32-bit fractions of a turn: wrong by position · 2π · 2⁻³³ at the most."""
    positions = begin + np.arange(5)
    x = normal(2, 5, 3, H).astype(np.float32)
    wanted = Layer(frequencies=frequencies(H)).turned(x.astype(np.float64), positions)
    found = Rotary()(x, positions)
    of_angles = abs(begin) * 2 * math.pi * 2.0**-33
    # The turned pair is longer than a component by √2; sin, cos and two products round to 2⁻²⁴.
    allowed = np.abs(x).max() * math.sqrt(2) * (of_angles + 4 * 2.0**-24)
    assert np.abs(found - wanted).max() <= allowed
    if begin == 2**20:
        # What a product in float32 would give.
        angles = positions[:, None].astype(np.float32) * frequencies(H).astype(np.float32)
        assert np.abs(angles - positions[:, None] * frequencies(H)).max() > 20 * of_angles


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtype_stays(dtype: Any) -> None:
    with jax.enable_x64(dtype == np.float64):
        x = normal(2, 7, 3, H).astype(dtype)
        found = Rotary()(jnp.asarray(x), jnp.arange(7))
        assert found.dtype == dtype
        wanted = Layer(frequencies=frequencies(H)).turned(x.astype(np.float64), np.arange(7))
        u = {2: 2.0**-8, 4: 2.0**-22, 8: 1e-14}[np.dtype(dtype).itemsize]
        assert (
            np.abs(np.asarray(found).astype(np.float64) - wanted).max() <= u * np.abs(wanted).max()
        )


def test_scores_depend_on_distances() -> None:
    q, k = normal(2, 1, 1, 1, H).astype(np.float32)
    turn = Rotary()

    def score(row: int, column: int) -> float:
        one, other = turn(q, np.array([row])), turn(k, np.array([column]))
        return float(np.sum(np.asarray(one) * np.asarray(other)))

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-3)


def test_the_rest_of_the_head_stays() -> None:
    x = normal(1, 4, 2, H).astype(np.float32)
    found = Rotary(dims=6)(x, np.arange(4))
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    np.testing.assert_allclose(found[..., :6], Rotary()(x[..., :6], np.arange(4)), atol=1e-6)


def test_gradients_turn_back() -> None:
    x, positions = normal(1, 4, 2, H).astype(np.float32), np.arange(4)
    _, pull = jax.vjp(lambda x: Rotary()(x, positions), x)
    (found,) = pull(Rotary()(x, positions))
    np.testing.assert_allclose(found, x, atol=1e-5)


def test_linear() -> None:
    f = frequencies(H)
    np.testing.assert_array_equal(Rotary(scaling=rotary.Linear(4.0)).frequencies(H), f / 4)


def test_llama3() -> None:
    """The three cases of Llama 3.1's definition, component by component."""
    f = frequencies(128, 500_000.0)
    found = Rotary(500_000.0, scaling=rotary.Llama3()).frequencies(128)
    for plain, scaled in zip(f, found, strict=True):
        length = 2 * math.pi / plain
        if length < 8192 / 4:
            assert scaled == plain
        elif length > 8192 / 1:
            assert scaled == pytest.approx(plain / 8)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            assert scaled == pytest.approx((1 - smooth) * plain / 8 + smooth * plain)
    assert {True, False} == {bool(x) for x in found == f}


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    """Components of more than 32 turns in the original length stay, of less than 1 are divided."""
    base, dims, original = 150_000.0, 64, 4096
    f = frequencies(dims, base)
    scaling = rotary.Yarn(32.0, original, truncate=truncate)
    found = Rotary(base, scaling=scaling).frequencies(dims)

    def place(turns: float) -> float:
        """Where along the components one turns so often, from the definition of the frequencies."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    begin, end = place(32), place(1)
    if truncate:
        begin, end = math.floor(begin), math.ceil(end)
    for i, (plain, scaled) in enumerate(zip(f, found, strict=True)):
        share = min(max((i - begin) / (end - begin), 0), 1)
        assert scaled == pytest.approx(plain * (1 - share) + plain / 32 * share)
    assert found[0] == f[0]
    assert found[-1] == pytest.approx(f[-1] / 32)


def test_magnitude() -> None:
    x = normal(1, 4, 2, H).astype(np.float32)
    found = Rotary(magnitude=1.5)(x, np.arange(4))
    np.testing.assert_allclose(found, 1.5 * Rotary()(x, np.arange(4)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"base": 0.0}, ValueError, r"Rotary\(base=…\) is 0.0"),
        ({"base": "big"}, TypeError, r"Rotary\(base=…\) is 'big'"),
        ({"magnitude": math.inf}, ValueError, r"Rotary\(magnitude=…\) is inf"),
        ({"dims": 5}, ValueError, r"Rotary\(dims=…\) is 5"),
        ({"scaling": 4.0}, TypeError, r"Rotary\(scaling=…\) is 4.0"),
        ({"dims": 18}, ValueError, "turns 18 components of a head dim of 16"),
        ({"scaling": lambda f: f[1:]}, ValueError, r"gave frequencies of shape \(7,\)"),
        ({"scaling": lambda f: f * math.nan}, ValueError, "wanted finite frequencies"),
        ({"base": 1.0, "scaling": rotary.Yarn(4.0, 99)}, ValueError, "Yarn needs frequencies that"),
    ],
)
def test_mistakes_are_named(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Rotary(**options)(jnp.ones((1, 3, 2, H)), jnp.arange(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rotary.Linear(0.0), r"Linear\(factor=…\) is 0.0; wanted a finite number > 0"),
        (lambda: rotary.Llama3(low_turns=4.0), "low_turns=….* is 4.0 and high_turns 4.0"),
        (lambda: rotary.Yarn(4.0, 0), r"Yarn\(original_length=…\) is 0"),
    ],
)
def test_mistaken_scalings_are_named(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_only_floats_turn() -> None:
    with pytest.raises(TypeError, match="x has dtype int32; wanted floats"):
        Rotary()(jnp.ones((1, 3, 2, H), jnp.int32), jnp.arange(3))


def test_equal_settings_are_equal() -> None:
    """A layer's static attributes are compared when it is compiled again."""
    for make in (
        lambda: Rotary(scaling=rotary.Llama3()),
        lambda: Rotary(scaling=rotary.Yarn(4.0, 64)),
        lambda: Rotary(scaling=rotary.Linear(2.0)),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
