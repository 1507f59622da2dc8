"""merge: attention over parts of the columns, put together, is attention over all of them."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks

Array = np.ndarray
Part = tuple[Any, Any]
# numpy arrays go in as well.
merge: Any = flashjax.merge
B, T, S, N, K, H, V = 2, 9, 24, 4, 2, 8, 5
# One part has no columns.
CUTS = (0, 8, 8, 16, 24)


def inputs(dtype: Any = np.float32, seed: int = 0) -> tuple[Array, Array, Array]:
    r = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    query, key, value = (r.normal(size=shape).astype(dtype) for shape in shapes)
    return query, key, value


def attend(query: Any, key: Any, value: Any, **how: Any) -> Part:
    out, lse = flashjax.dot_product_attention(
        query, key, value, implementation="reference", return_residual=True, **how
    )
    return out, lse


def by_parts(query: Any, key: Any, value: Any, causal: bool = False) -> list[Part]:
    parts = []
    for begin, end in itertools.pairwise(CUTS):
        mask = masks.Causal(np.asarray(-begin, np.int32)) if causal else None
        parts.append(attend(query, key[:, begin:end], value[:, begin:end], mask=mask))
    return parts


def assert_close(found: Part, expected: Part, tolerance: float = 1e-5) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_columns_equal_the_whole(causal: bool) -> None:
    """With the causal mask, later parts are empty for early rows."""
    x = inputs()
    assert_close(merge(by_parts(*x, causal)), attend(*x, is_causal=causal))


def test_float64_stays_exact() -> None:
    with jax.enable_x64(True):
        x = inputs(np.float64)
        out, lse = merge(by_parts(*x, True))
        assert out.dtype == lse.dtype == np.float64
        assert_close((out, lse), attend(*x, is_causal=True), 1e-14)


def test_narrow_outputs_keep_their_dtype() -> None:
    """bfloat16 outputs carry a rounding of their own; LSE stays float32."""
    x = inputs(jnp.bfloat16)
    out, lse = merge(by_parts(*x))
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    whole, whole_lse = attend(*x)
    difference = np.asarray(out, np.float32) - np.asarray(whole, np.float32)
    assert abs(difference).max() < 2**-7 * abs(np.asarray(whole, np.float32)).max()
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5)


def test_order_and_grouping_do_not_matter() -> None:
    parts = by_parts(*inputs(), True)
    whole = merge(parts)
    assert_close(merge(parts[::-1]), whole, 1e-6)
    assert_close(merge([merge(parts[:2]), merge(parts[2:])]), whole, 1e-6)
    assert_close(merge([parts[0], merge([parts[1], merge(parts[2:])])]), whole, 1e-6)


def same_bits(a: Part, b: Part) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


EMPTY = (np.zeros((B, T, N, V), np.float32), np.full((B, T, N), -np.inf, np.float32))


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_empties_are_the_identity_to_the_bit(before: int, after: int) -> None:
    part = attend(*inputs())
    same_bits(merge([EMPTY] * before + [part] + [EMPTY] * after), part)


def test_members_of_which_some_rows_are_empty() -> None:
    """Rows mix: empty in one part, in the other, in both, in none."""
    x = inputs()
    lengths = np.asarray([0, 2], np.int32), np.asarray([3, 0], np.int32)
    halves = [(x[1][:, :12], x[2][:, :12]), (x[1][:, 12:], x[2][:, 12:])]
    parts = [
        attend(x[0], *half, key_value_seq_lengths=n)
        for half, n in zip(halves, lengths, strict=True)
    ]
    kept = np.concatenate(
        [np.arange(12) < n[:, None] for n in lengths], -1
    )[:, None, None]  # fmt: skip
    assert_close(merge(parts), attend(*x, mask=kept))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_empty_is_empty(count: int) -> None:
    out, lse = merge([EMPTY] * count)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()

    def loss(parts: Sequence[Part]) -> Any:
        out, lse = merge(parts)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    for grad in jax.tree.leaves(jax.grad(loss)([EMPTY] * count)):
        assert (np.asarray(grad) == 0).all()


@pytest.mark.parametrize("top", [1e4, -1e4, 3e38])
def test_large_lses_neither_overflow_nor_vanish(top: float) -> None:
    out, _ = attend(*inputs())
    lse = np.full((B, T, N), top, np.float32)
    merged, total = merge([(out, lse), (3 * out, lse)])
    np.testing.assert_allclose(merged, 2 * out, rtol=1e-6)
    np.testing.assert_allclose(total, lse + np.log(2), rtol=1e-6)
    same_bits(merge([(out, lse), (out, np.full_like(lse, -3e38))]), (out, lse))


def test_a_sink_in_one_part_counts_once() -> None:
    query, key, value = inputs()
    sinks = np.asarray([0.5, -1, 2, 0], np.float32)
    parts = [
        attend(query, key[:, :10], value[:, :10], sinks=sinks),
        attend(query, key[:, 10:], value[:, 10:]),
    ]
    assert_close(merge(parts), attend(query, key, value, sinks=sinks))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_the_wholes(causal: bool) -> None:
    """Of out and LSE together, with parts that are empty in some rows or wholly."""
    r = np.random.default_rng(1)
    d_out, d_lse = r.normal(size=(B, T, N, V)), r.normal(size=(B, T, N))

    def loss(result: Part) -> Any:
        out, lse = result
        return (out * d_out).sum() + (lse * d_lse).sum()

    def of_parts(query: Any, key: Any, value: Any) -> Any:
        return loss(merge(by_parts(query, key, value, causal)))

    def of_whole(*x: Any) -> Any:
        return loss(attend(*x, is_causal=causal))

    with jax.enable_x64(True), jax.debug_nans(True):
        x = inputs(np.float64)
        split, whole = (jax.jit(jax.grad(f, (0, 1, 2))) for f in (of_parts, of_whole))
        for a, b in zip(split(*x), whole(*x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_parts_are_finite() -> None:
    """Also with respect to the −inf itself."""
    parts = [*by_parts(*inputs(), True), EMPTY]

    def loss(parts: Sequence[Part]) -> Any:
        out, lse = merge(parts)
        return (out**2).sum() + lse.sum()

    grads = jax.grad(loss)(parts)
    for (_, lse), (d_out, d_lse) in zip(parts, grads, strict=True):
        assert np.isfinite(d_out).all()
        assert np.isfinite(d_lse).all()
        assert (np.asarray(d_lse)[np.asarray(lse) == -np.inf] == 0).all()


def test_under_jit_and_vmap() -> None:
    parts = by_parts(*inputs(), True)
    whole = merge(parts)
    assert_close(jax.jit(merge)(parts), whole, 1e-6)
    assert_close(jax.vmap(merge)(parts), whole, 1e-6)
    assert_close(jax.vmap(merge, 2, 2)(parts), whole, 1e-6)


def test_any_number_of_batch_dims() -> None:
    parts = by_parts(*inputs())
    unbatched = [(out[0], lse[0]) for out, lse in parts]
    assert_close(merge(unbatched), (merge(parts)[0][0], merge(parts)[1][0]), 1e-6)


def test_refused() -> None:
    out, lse = EMPTY
    with pytest.raises(ValueError, match=r"merge: parts is empty; wanted at least one"):
        merge([])
    with pytest.raises(
        TypeError, match=r"parts\[0\] is a .*; wanted a pair \(out, lse\), in a list"
    ):
        merge(EMPTY)
    with pytest.raises(ValueError, match=r"parts\[1\] has out \(2, 9, 4, 4\) and lse .*wanted"):
        merge([EMPTY, (out[..., :4], lse)])
    # jax.nn's layout of the LSE.
    with pytest.raises(ValueError, match=r"parts\[0\] has out .* and lse \(2, 4, 9\); wanted"):
        merge([(out, lse.swapaxes(1, 2))])
