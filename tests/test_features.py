"""Every argument, alone and combined: values and all gradients against the oracle."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import flashjax
from flashjax import masks, scores
from tests.features import PARTS, build, far_from_0, pairwise
from tests.inputs import (
    BF16,
    F16,
    F32,
    F64,
    IMPLEMENTATIONS,
    USUAL,
    Case,
    Shape,
    attention,
    case,
    check,
    jit,
    poisoned,
    pulled,
    qkv,
    run,
    same_bits,
    small_tiles,
    step_of,
)

SHAPES = {
    "gqa": Shape(),  # B 2, T 37, S 53, N 4, K 2, H 16, Hv 8
    "square": Shape(1, 48, 48, 2, 2, 8, 8),
    "mqa": Shape(2, 5, 66, 3, 1, 24, 11),
    "tiles": Shape(2, 66, 75, 4, 2, 12, 8),  # with SMALL tiles: 5 × 4 of them
    "square tiles": Shape(2, 66, 66, 4, 2, 12, 8),
    "long": Shape(1, 300, 530, 2, 1, 16, 16),  # 2 × 2 of the default tiles
}
SMALL = (16, 24)
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
ALONE = (
    "is_causal", "window", "half_open_window", "lengths", "segments", "unsorted_segments",
    "boolean", "boolean_per_head", "bottom_right", "causal_offset_per_batch", "prefix", "chunks",
    "sink_tokens_and_window", "intervals", "block_sparse", "complement", "predicate",
    "bias (1,N,T,S)", "bias of −inf (B,1,T,S)", "traced_scale", "static_scale", "soft_cap",
    "alibi", "score_mod", "sinks", "dropout",
)  # fmt: skip
AXES = {
    "mask": (
        "", "is_causal", "window lengths", "segments boolean_of_columns",
        "intervals predicate bottom_right",
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
IDS, LENGTHS = np.array([[0] * 5 + [1] * 7, [2] * 9 + [-1] * 3]), np.array([7, 12])
KEEP = np.random.default_rng(5).random((12, 12)) > 0.4
BIAS = np.random.default_rng(6).normal(size=(12, 12)).astype(np.float32)
SLOPES = np.array([2.0**-4, 2.0**-8, 2.0**-2], np.float32)  # the paper's for 3 heads

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.cache
def made(shape: str, names: tuple[str, ...], dtype: Any = USUAL) -> Case:
    return build(SHAPES[shape], names, dtype)


@pytest.mark.parametrize("name", ["plain", *ALONE])
def test_alone_over_many_tiles(
    name: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, *SMALL)
    shape = "square tiles" if name == "segments" else "tiles"
    check(implementation, made(shape, () if name == "plain" else (name,)))


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
        ("segments", "is_causal", "dropout", "score_mod"),
        ("lengths", "boolean_per_head", "causal_offset_per_batch", "bias (N,1,S)", "traced_scale"),
    ],
    ids="+".join,
)
def test_combined_over_many_tiles(
    names: tuple[str, ...], implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, *SMALL)
    check(implementation, made("tiles", names))


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_dtypes_over_many_tiles(
    dtype: Any, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, *SMALL)
    check(implementation, made("tiles", ("is_causal", "score_mod", "sinks"), dtype))


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
        return attention(implementation, **operands, **arguments)(query, key, value)

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


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"local_window_size": 4}, {"local_window_size": (4, 4)}),
    "window term": ({"local_window_size": (5, 2)}, {"mask": masks.Window(5, 2)}),
    "causal term": ({"is_causal": True}, {"mask": masks.Causal()}),
    "lengths": ({"key_value_seq_lengths": LENGTHS}, {"mask": masks.Lengths(key=LENGTHS)}),
    "segments": ({"segment_ids": IDS}, {"segment_ids": (IDS, IDS)}),
    "segments term": ({"segment_ids": IDS}, {"mask": masks.Segments(IDS)}),
    "mask": ({"mask": KEEP}, {"mask": masks.Dense(KEEP[None, None])}),
    "bias": ({"bias": BIAS}, {"bias": BIAS[None, None]}),
    "scale": ({}, {"scale": 8**-0.5}),
    "soft cap": ({"logits_soft_cap": 1.5}, {"score_mod": scores.soft_cap(1.5)}),
    "slopes": ({"score_mod": scores.Alibi()}, {"score_mod": scores.Alibi(SLOPES)}),
    "key": (
        {"dropout_rate": 0.25, "dropout_key": jax.random.key(3)},
        {"dropout_rate": 0.25, "dropout_key": jax.random.PRNGKey(3)},
    ),
    "deterministic": ({"is_causal": True}, {"is_causal": True, "deterministic_backward": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_say_the_same(name: str, implementation: Any) -> None:
    inputs = qkv(Shape(2, 12, 12, 3, 3, 8, 4))
    first, second = (attention(implementation, **arguments)(*inputs) for arguments in SAME[name])
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_without_residual_gives_out_alone(implementation: Any) -> None:
    inputs = qkv(Shape())
    out, _ = attention(implementation)(*inputs)
    alone = attention(implementation, return_residual=False)(*inputs)
    assert same_bits(out, alone)


def test_heads_share_their_groups_keys(implementation: Any) -> None:
    """K < N is the same as key and value repeated G times each."""
    query, key, value = qkv(SHAPES["gqa"])
    attend = attention(implementation)
    grouped, _ = attend(query, key, value)
    repeated, _ = attend(query, key.repeat(2, axis=2), value.repeat(2, axis=2))
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


def test_gradients_of_shared_heads_are_summed_wide(implementation: Any) -> None:
    """dK and dV of 32 query heads: rounding each head's to bf16 before the sum is outside."""
    check(implementation, build(Shape(1, 40, 40, 32, 1, 16, 16), ("is_causal",), BF16))


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


HIDING = {
    "lengths": ("lengths",),
    "lengths and sinks": ("lengths", "sinks"),
    "segments": ("segments", "score_mod"),
    "mask and bias": ("boolean_of_columns", "bias of −inf (B,1,T,S)", "sinks"),
    "causal": ("bottom_right", "alibi"),
}


@pytest.mark.parametrize("names", HIDING.values(), ids=HIDING)
def test_what_is_hidden_never_arrives(
    names: tuple[str, ...], implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits whatever lies in rows and columns that take no part, in many tiles too."""
    small_tiles(monkeypatch, *SMALL)
    clean = build(Shape(2, 70, 61, 2, 1, 8, 8), names)
    step = step_of(implementation, clean)
    expected = run(implementation, clean, step)
    clean.judge.hold(expected)
    for value in (np.nan, np.inf):
        for name, x in run(implementation, with_hidden(clean, value), step).items():
            assert same_bits(x, expected[name]), (name, value)


@pytest.mark.parametrize("pad", [-1e10, -1e30, float(np.finfo(np.float32).min)])
def test_biases_that_hide_by_large_numbers(
    pad: float, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles of them come before what a row sees: their exponents must not overflow."""
    small_tiles(monkeypatch, *SMALL)
    shape = Shape(1, 70, 300, 2, 1, 8, 8)
    column = np.arange(shape.S)
    bias = np.where((column < 130) | (column >= 170), pad, 0)[None, None, None].astype(F32)
    check(implementation, case(shape, USUAL, 6, operands={"bias": bias}))


@pytest.mark.parametrize("dtype", [USUAL, BF16, F16][USUAL == BF16 :], ids=str)
def test_scores_far_from_0(
    dtype: Any, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, *SMALL)
    check(implementation, far_from_0(Shape(1, 70, 83, 2, 1, 8, 8), dtype))


def with_hidden(case: Case, value: float) -> Case:
    """The case with `value` in all that no row sees, and in rows that see nothing."""
    keep, bias = np.broadcast_to(case.options["keep"], case.shape.logits), case.operands.get("bias")
    keep = keep if bias is None else keep & (bias > -np.inf)
    rows, columns = keep.any((1, 3)), keep.any((1, 2))
    assert not (rows.all() and columns.all())
    operands = dict(case.operands)
    if "b" in operands:  # the score modifier's array of columns
        operands["b"] = poisoned(operands["b"], ~columns, value)
    if bias is not None:
        seen = keep.any(1, keepdims=True) | (bias == -np.inf)
        operands["bias"] = np.where(seen, bias, np.float32(value))
    changed = dataclasses.replace(
        case,
        query=poisoned(case.query, ~rows, value),
        key=poisoned(case.key, ~columns, value),
        value=poisoned(case.value, ~columns, -value),
        operands=operands,
    )
    d_out, d_lse = case.cotangents
    if "sinks" not in operands:  # with a sink, a row that sees nothing has an LSE to differentiate
        d_lse = poisoned(d_lse, ~rows, value)
    changed.__dict__["cotangents"] = (poisoned(d_out, ~rows, value), d_lse)
    changed.__dict__["judge"] = case.judge
    return changed


def test_rows_do_not_depend_on_other_batch_members(implementation: Any) -> None:
    case = made("gqa", ("is_causal", "sinks"))
    query, key, value = (
        np.concatenate([x[:1], 3 * x[1:]]) for x in (case.query, case.key, case.value)
    )
    changed = dataclasses.replace(case, query=query, key=key, value=value)
    changed.__dict__["judge"] = case.judge
    step = step_of(implementation, case)
    first, second = run(implementation, case, step), run(implementation, changed, step)
    assert not same_bits(first["out"][1], second["out"][1])
    for name in ("out", "lse"):
        assert same_bits(first[name][0], second[name][0]), name


def test_rows_do_not_depend_on_how_much_padding_follows(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit at one tile size. The dense reference has none: it is held to the bound."""
    small_tiles(monkeypatch, *SMALL)
    outs = []
    for columns in (40, 70, 130):
        query, key, value = qkv(Shape(2, 20, 130, 2, 1, 8, 8), USUAL, 4)
        attend = attention(implementation, key_value_seq_lengths=np.array([37, 40]))
        outs.append(jit(attend)(query, key[:, :columns], value[:, :columns]))
    for results in outs[1:]:
        for x, y in zip(results, outs[0], strict=True):
            # Sums of at most 40 terms of size about 1, in another order: 40 · 2⁻²⁴ each, twice.
            furthest = np.abs(np.asarray(x) - np.asarray(y)).max()
            assert same_bits(x, y) or (implementation == "reference" and furthest < 40 * 2**-23)


def test_precision_of_float32_products(implementation: Any) -> None:
    """Full accuracy by default; the argument first, then the configuration, decide otherwise."""
    inputs = qkv(SHAPES["square"], F32)

    def products(**arguments: Any) -> str:
        return str(jax.make_jaxpr(attention(implementation, **arguments))(*inputs))

    assert "HIGHEST" in products()
    assert "HIGHEST" not in products(precision="default")
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in products()
        assert "HIGHEST" in products(precision="highest")
    low = [x.astype(BF16) for x in inputs]
    dots = [
        x for x in str(jax.make_jaxpr(attention(implementation))(*low)).split() if "preferred" in x
    ]
    assert dots
    assert all("float32" in x for x in dots)
