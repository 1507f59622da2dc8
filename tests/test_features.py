"""Every argument, alone and combined: values and all gradients against the oracle."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import flashjax
from tests.features import PARTS, build, pairwise
from tests.inputs import (
    BF16,
    F16,
    F32,
    F64,
    IMPLEMENTATIONS,
    Case,
    Shape,
    check,
    pulled,
    qkv,
    same_bits,
    small_tiles,
)

SHAPES = {
    "gqa": Shape(),  # B 2, T 37, S 53, N 4, K 2, H 16, Hv 8
    "square": Shape(1, 48, 48, 2, 2, 8, 8),
    "mqa": Shape(2, 5, 66, 3, 1, 24, 11),
    "tiles": Shape(2, 150, 170, 2, 1, 16, 16),  # with 32 × 48: 5 × 4 tiles
    "long": Shape(1, 300, 530, 2, 1, 16, 16),  # 2 × 2 of the default tiles
}
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
AXES = {
    "mask": (
        "", "is_causal", "window lengths", "segments", "boolean_of_columns", "prefix",
        "intervals bottom_right", "predicate",
    ),
    "bias": ("", "bias (1,N,T,S)", "bias of −inf (B,1,T,S)"),
    "scale": ("", "traced_scale"),
    "cap": ("", "soft_cap"),
    "score": ("", "alibi", "score_mod"),
    "sinks": ("", "sinks"),
    "dropout": ("", "dropout"),
    "shape": ("gqa", "square", "mqa"),
    "dtype": tuple(DTYPES),
}  # fmt: skip
TABLE = pairwise(AXES)

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.cache
def made(shape: str, names: tuple[str, ...], dtype: Any = F32) -> Case:
    return build(SHAPES[shape], names, dtype)


@pytest.mark.parametrize("name", ["plain", *PARTS])
def test_alone(name: str, implementation: Any) -> None:
    names = () if name == "plain" else (name,)
    check(implementation, made("square" if name == "segments" else "gqa", names))


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_combined(index: int, implementation: Any) -> None:
    row = dict(TABLE[index])
    shape, dtype = row.pop("shape"), DTYPES[row.pop("dtype")]
    parts = [choice for choice in row.values() if choice]
    names = [name for part in parts for name in ([part] if part in PARTS else part.split())]
    check(implementation, made(shape, tuple(names), dtype))


@pytest.mark.parametrize(
    "names",
    [
        ("is_causal",),
        ("window", "sinks"),
        ("segments", "is_causal", "dropout"),
        ("prefix", "soft_cap", "traced_scale"),
        ("sink_tokens_and_window", "alibi"),
        ("intervals", "bias (N,1,S)"),
        ("block_sparse", "score_mod"),
        ("lengths", "boolean", "bias of −inf (B,1,T,S)"),
        ("boolean_per_head", "causal_offset_per_batch"),
    ],
    ids="+".join,
)
def test_over_many_tiles(
    names: tuple[str, ...], implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, 32, 48)
    check(implementation, made("tiles", names))


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("names", [("is_causal", "score_mod", "sinks"), ("segments", "soft_cap")])
def test_dtypes_over_many_tiles(
    names: tuple[str, ...], dtype: Any, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, 32, 48)
    check(implementation, made("tiles", names, dtype))


@pytest.mark.parametrize("names", [("bottom_right", "dropout"), ("window", "bias (1,N,T,S)")])
def test_over_default_tiles(names: tuple[str, ...], implementation: Any) -> None:
    check(implementation, made("long", names))


def test_everything_at_once_in_float64(implementation: Any) -> None:
    names = ("lengths", "prefix", "bias (B,N,T,S)", "traced_scale", "soft_cap", "score_mod")
    check(implementation, made("gqa", (*names, "sinks", "dropout"), F64))


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2, 1)], ids=str)
def test_any_number_of_batch_dims(batch: tuple[int, ...], implementation: Any) -> None:
    """The same as one batch dimension, in values, gradients, shapes and residuals."""
    flat = Shape(B=int(np.prod(batch)), T=9, S=11, N=4, K=2, H=8, V=6)
    case = build(flat, ("lengths", "bias (B,N,T,S)", "sinks"))

    def unflattened(x: Any) -> Any:
        return x.reshape(*batch, *x.shape[1:])

    operands = dict(case.operands) | {"bias": unflattened(case.operands["bias"])}
    arguments = {n: x.reshape(batch) for n, x in case.arguments.items()}

    def attend(query: Any, key: Any, value: Any, operands: Any) -> Any:
        return flashjax.dot_product_attention(
            query, key, value, **operands, **arguments,
            implementation=implementation, return_residual=True,
        )  # fmt: skip

    inputs = [*map(unflattened, (case.query, case.key, case.value)), operands]
    (out, lse), grads = pulled(attend, inputs, tuple(map(unflattened, case.cotangents)))
    *grads, d_operands = grads
    results = dict(zip(("query", "key", "value"), grads, strict=True)) | d_operands
    assert out.shape == (*batch, 9, 4, 6)
    assert lse.shape == (*batch, 9, 4)
    expected = case.judge.reference
    results |= {"out": out, "lse": lse}
    flattened = {n: np.reshape(x, expected[n].shape) for n, x in results.items()}
    case.judge.hold(flattened)


def test_without_residual_gives_out_alone(implementation: Any) -> None:
    inputs = qkv(Shape())
    out, _ = flashjax.dot_product_attention(
        *inputs, implementation=implementation, return_residual=True
    )
    alone = flashjax.dot_product_attention(*inputs, implementation=implementation)
    assert same_bits(out, alone)


def test_heads_share_their_groups_keys(implementation: Any) -> None:
    """K < N is the same as key and value repeated G times each."""
    query, key, value = qkv(SHAPES["gqa"])
    grouped = flashjax.dot_product_attention(query, key, value, implementation=implementation)
    repeated = flashjax.dot_product_attention(
        query, key.repeat(2, axis=2), value.repeat(2, axis=2), implementation=implementation
    )
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


def test_a_score_modifier_that_hides_columns(implementation: Any) -> None:
    """−inf from a modifier weighs nothing, also where that is a row's every column."""

    def hide(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
        visible = (column <= row) & (row != 3)
        return jax.numpy.where(visible, score, -jax.numpy.inf)

    row, column = np.ogrid[:37, :53]
    masked = build(SHAPES["gqa"], ())
    masked = Case(
        masked.query, masked.key, masked.value,
        arguments={"score_mod": flashjax.scores.ScoreMod(hide)},
        options={"keep": (column <= row) & (row != 3)},
    )  # fmt: skip
    check(implementation, masked)
