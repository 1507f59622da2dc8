"""The dropout pattern: what the hash is, how it spreads, and that every implementation uses it."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import dropout, masks
from tests.inputs import ANYWHERE

Array = np.ndarray
WORD = 0xFFFFFFFF
# Some arguments are wrong on purpose.
attention: Any = flashjax.dot_product_attention


@functools.cache
def pattern(seed: int, shape: tuple[int, int, int, int], rate: float) -> Array:
    """Which weights stay, (B, N, T, S), by the library's hash."""
    batch, heads, rows, columns = shape
    words = dropout.seeds(jax.random.key(seed), batch, heads)
    row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
    return np.asarray(dropout.keep((words[0], words[1]), row, column, rate))


# The hash.


def mix(x: int) -> int:
    """MurmurHash3's finaliser, on Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def stays(words: list[int], b: int, n: int, row: int, column: int, rate: float) -> bool:
    """The whole hash by hand: a seed for each member and head, then for each row and column."""
    first = mix(mix(words[0] + b * 0x9E3779B1 & WORD) + n * 0xC2B2AE35 & WORD)
    second = mix(mix(words[1] ^ first) + n * 0x9E3779B1 + b & WORD)
    of_row = mix(first + row * 0x9E3779B1 & WORD) ^ second
    return mix(of_row ^ (column * 0x85EBCA6B & WORD)) >= int(rate * 2**32)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_hash_is_what_python_computes(seed: int, rate: float) -> None:
    words = [int(x) for x in jax.random.bits(jax.random.key(seed), (2,), jnp.uint32)]
    rows, columns = [0, 1, 2, 77, 2**20 + 1, 2**31 - 1], [0, 1, 5, 128, 2**20, 2**31 - 2]
    seeds = dropout.seeds(jax.random.key(seed), 2, 3)
    row, column = jnp.asarray(rows)[:, None], jnp.asarray(columns)[None, :]
    kept = np.asarray(dropout.keep((seeds[0], seeds[1]), row, column, rate))
    assert kept.shape == (2, 3, 6, 6)
    for b, n, (i, t), (j, s) in itertools.product(
        range(2), range(3), enumerate(rows), enumerate(columns)
    ):
        assert kept[b, n, i, j] == stays(words, b, n, t, s, rate)


def test_a_higher_rate_drops_more_of_the_same() -> None:
    kept = [pattern(3, (1, 1, 64, 64), rate) for rate in (0.1, 0.4, 0.8)]
    assert (kept[0] >= kept[1]).all()
    assert (kept[1] >= kept[2]).all()


def test_the_rates_at_the_ends() -> None:
    assert pattern(0, (1, 1, 64, 64), 1e-12).all()
    assert not pattern(0, (1, 1, 64, 64), 1 - 2.0**-40).any()


def test_shared_seeds_give_one_pattern() -> None:
    assert dropout.seeds(jax.random.key(0), 4, 3, shared=True).shape == (2, 1, 1, 1, 1)


# How it spreads. The seeds are fixed: a test passes always or never.

SHAPE = (3, 3, 96, 80)
SIGMAS = 5.0


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_weights_stay_at_the_rate(rate: float) -> None:
    """As a whole, in every row, in every column."""
    kept = np.concatenate([pattern(seed, SHAPE, rate) for seed in range(3)])
    for axes in [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2)]:
        mean = kept.mean(axes)
        sigma = np.sqrt(rate * (1 - rate) * mean.size / kept.size)
        assert np.abs(mean - (1 - rate)).max() < SIGMAS * sigma


def correlation_in_sigmas(a: Array, b: Array, rate: float) -> float:
    """How far the correlation of two patterns is from none, in its standard deviations."""
    centred = (a - (1 - rate)) * (b - (1 - rate))
    return float(abs(centred.sum()) / (rate * (1 - rate) * np.sqrt(centred.size)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("distance", [1, 2, 3, 16, 32])
@pytest.mark.parametrize("move", [(0, 1), (1, 0), (1, 1), (1, -1)], ids=str)
def test_neighbours_are_independent(move: tuple[int, int], distance: int, rate: float) -> None:
    """Rows, columns and both diagonals."""
    kept = pattern(1, SHAPE, rate)
    down, right = distance * move[0], distance * move[1]
    moved = np.roll(kept, (-down, -right), (2, 3))
    rows, columns = SHAPE[2] - down, SHAPE[3] - abs(right)
    inside = slice(0, rows), slice(max(0, -right), max(0, -right) + columns)
    assert correlation_in_sigmas(kept[:, :, *inside], moved[:, :, *inside], rate) < SIGMAS


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_all_rows_are_independent_of_each_other(rate: float) -> None:
    """Also where one is the other's columns in another order, as xor of the column gives."""
    kept = pattern(2, (1, 1, 64, 4096), rate)[0, 0]
    for order in (0, 1, 2, 64):
        centred = kept - (1 - rate)
        moved = centred[:, np.arange(4096) ^ order]
        gram = np.abs(centred @ moved.T) / (rate * (1 - rate) * np.sqrt(4096))
        np.fill_diagonal(gram, 0)
        # Of 4032 pairs, the largest is not to stand out.
        assert gram.max() < SIGMAS


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_heads_members_and_seeds_are_independent(rate: float) -> None:
    """Each to each: members and heads count up, and so do users' seeds."""
    kept = np.concatenate([pattern(seed, SHAPE, rate) for seed in range(3)])
    patterns = kept.reshape(-1, *SHAPE[2:])
    for a, b in itertools.combinations(patterns, 2):
        assert correlation_in_sigmas(a, b, rate) < SIGMAS


# What attention makes of it.


def weights(implementation: str | None, logits: tuple[int, int, int, int], **options: Any) -> Array:
    """The weights (B, N, T, S): scores of 0, values that are the columns of an identity."""
    batch, heads, rows, columns = logits
    query = np.zeros((batch, rows, heads, 1), np.float32)
    key = np.zeros((batch, columns, 1, 1), np.float32)
    parts = []
    width = min(columns, 256)
    for first in range(0, columns, width):
        # Of one width, so that all compile once.
        one_hot = np.eye(columns, width, -first, dtype=np.float32)
        value = np.broadcast_to(one_hot[:, None], (batch, columns, 1, width))
        parts.append(attention(query, key, value, implementation=implementation, **options))
    return np.concatenate(parts, -1)[..., :columns].transpose(0, 2, 1, 3)


# Several tiles of "xla" in both directions.
LARGE = (2, 2, 300, 530)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_every_implementation_drops_the_same(implementation: str) -> None:
    kept = pattern(5, LARGE, 0.3)
    found = weights(implementation, LARGE, dropout_rate=0.3, dropout_key=jax.random.key(5))
    np.testing.assert_array_equal(found > 0, kept)
    np.testing.assert_allclose(found[kept], 1 / 530 / 0.7, rtol=1e-5)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_members_with_tiles_of_their_own_drop_the_same(implementation: str) -> None:
    """A mask that differs by member and head gives each a walk of its own."""
    lengths = np.asarray([[100, 530], [420, 7]], np.int32)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
    found = weights(implementation, LARGE, mask=masks.Lengths(key=lengths), **options)
    seen = np.arange(530) < lengths[:, :, None, None]
    np.testing.assert_array_equal(found > 0, pattern(5, LARGE, 0.3) & seen)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_the_backward_drops_the_same(implementation: str) -> None:
    """The gradient of a value is the sum of the weights on it."""
    batch, heads, rows, columns = LARGE
    zeros = np.zeros((batch, rows, heads, 1), np.float32)

    def total(value: Any) -> Any:
        return attention(
            zeros, np.zeros((batch, columns, heads, 1), np.float32), value,
            dropout_rate=0.3, dropout_key=jax.random.key(5), implementation=implementation,
        ).sum()  # fmt: skip

    grad = jax.grad(total)(np.zeros((batch, columns, heads, 1), np.float32))
    expected = pattern(5, LARGE, 0.3).sum(2).swapaxes(1, 2) / columns / 0.7
    np.testing.assert_allclose(grad[..., 0], expected, rtol=1e-4)


def test_batch_dims_count_as_one_row_major() -> None:
    zeros = np.zeros((2, 3, 5, 1, 1), np.float32)
    value = np.broadcast_to(np.eye(5, dtype=np.float32)[:, None], (2, 3, 5, 1, 5))
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    found = attention(zeros, zeros, value, **options)
    kept = pattern(1, (6, 1, 5, 5), 0.5).reshape(2, 3, 5, 1, 5)
    np.testing.assert_array_equal(np.asarray(found) > 0, kept)


# Keys.

SMALL = (2, 3, 8, 40)
read = functools.partial(weights, None, SMALL, dropout_rate=0.4)


def test_typed_and_raw_keys_are_the_same() -> None:
    expected = pattern(3, SMALL, 0.4)
    for key in (jax.random.key(3), jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
        np.testing.assert_array_equal(read(dropout_key=key) > 0, expected)


def test_another_key_is_another_pattern() -> None:
    assert (pattern(3, SMALL, 0.4) != pattern(4, SMALL, 0.4)).any()
    other = read(dropout_key=jax.random.key(3, impl="rbg")) > 0
    assert (other != pattern(3, SMALL, 0.4)).any()


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_vmap_over_keys_equals_the_loop(implementation: str) -> None:
    query, key = np.zeros((2, 8, 3, 1), np.float32), np.zeros((2, 40, 1, 1), np.float32)
    value = np.broadcast_to(np.eye(40, dtype=np.float32)[:, None], (2, 40, 1, 40))

    def dropped(dropout_key: Any) -> Any:
        return attention(
            query, key, value, dropout_rate=0.4, dropout_key=dropout_key,
            implementation=implementation,
        )  # fmt: skip

    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.vmap(dropped)(keys)
    for one, from_map in zip(keys, mapped, strict=True):
        np.testing.assert_array_equal(np.asarray(from_map), np.asarray(dropped(one)))
    assert len({np.asarray(x).tobytes() for x in mapped}) == 3


def test_the_mean_over_keys_is_the_undropped_value() -> None:
    r = np.random.default_rng(0)
    query, key, value = (r.normal(size=(1, n, 2, 4)).astype(np.float32) for n in (16, 48, 48))

    def dropped(dropout_key: Any) -> Any:
        return attention(query, key, value, dropout_rate=0.25, dropout_key=dropout_key)

    out = np.asarray(jax.vmap(dropped)(jax.random.split(jax.random.key(9), 400)), np.float64)
    undropped = np.asarray(attention(query, key, value))
    assert (np.abs(out.mean(0) - undropped) < SIGMAS * out.std(0) / np.sqrt(400)).all()


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_lse_is_undropped(implementation: str) -> None:
    x = np.random.default_rng(0).normal(size=(1, 9, 2, 4)).astype(np.float32)
    call = functools.partial(
        attention, x, x, x,
        implementation=implementation, return_residual=True,
    )  # fmt: skip
    _, lse = call()
    _, with_dropout = call(dropout_rate=0.5, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(with_dropout))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no key": ({"dropout_rate": 0.5}, ValueError, "dropout_key is None with dropout_rate = 0.5"),
    "rate of 1": (
        {"dropout_rate": 1.0, "dropout_key": jax.random.key(0)},
        ValueError,
        "dropout_rate is 1.0; wanted 0 <= rate < 1",
    ),
    "negative rate": ({"dropout_rate": -0.1}, ValueError, "dropout_rate is -0.1; wanted 0 <="),
    "rate of a wrong kind": ({"dropout_rate": "0.1"}, TypeError, "dropout_rate is '0.1'; wanted a"),
    "several keys": (
        {"dropout_rate": 0.5, "dropout_key": jax.random.split(jax.random.key(0))},
        TypeError,
        r"dropout_key is key<fry>\[2\]; wanted one key",
    ),
    "a number for a key": (
        {"dropout_rate": 0.5, "dropout_key": 3},
        TypeError,
        "dropout_key is 3; wanted one key",
    ),
    "floats for a key": (
        {"dropout_rate": 0.5, "dropout_key": np.zeros(2, np.float32)},
        TypeError,
        r"dropout_key is float32\[2\]; wanted one key",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    options, error, message = REFUSED[what]
    x = np.ones((1, 4, 1, 2), np.float32)
    with pytest.raises(error, match=message):
        attention(x, x, x, **options)


def test_a_traced_rate_is_refused() -> None:
    x = np.ones((1, 4, 1, 2), np.float32)

    @jax.jit
    def traced(rate: Any) -> Any:
        key = jax.random.key(0)
        return attention(x, x, x, dropout_rate=rate, dropout_key=key)

    with pytest.raises(TypeError, match=r"dropout_rate is .*; wanted a Python number"):
        traced(0.5)
