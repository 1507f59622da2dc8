"""Bad input is refused at trace time, with the argument's name, what came and what was wanted."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks, scores
from tests.inputs import BF16, IMPLEMENTATIONS, Shape, qkv

# B 2, T 4, S 6, N 4, K 2, H 8, Hv 5.
Q, K, V = qkv(Shape(2, 4, 6, 4, 2, 8, 5))
IDS = np.zeros((2, 4), np.int32)
KEY = jax.random.key(0)
CAPTURED = jnp.arange(6.0)


def _float_predicate(row: Any, column: Any) -> Any:
    return row * 1.0


def _scalar_score(score: Any, *_: Any) -> Any:
    return score.sum()


def _capturing_mask(row: Any, column: Any) -> Any:
    return CAPTURED[column] > 0


def _capturing_score(score: Any, row: Any, column: Any, batch: Any, head: Any) -> Any:
    return score + CAPTURED[column]


# (what the error is about, the arguments, the error, its argument's name, what came)
CALLS: list[tuple[str, dict[str, Any], type[Exception], str, str]] = [
    ("query None", {"query": None}, TypeError, "query", "None"),
    ("query rank", {"query": Q[0, 0]}, ValueError, "query", "(4, 8)"),
    ("query dict", {"query": {"q": Q}}, TypeError, "query", "dict"),
    ("integer query", {"query": Q.astype(int)}, TypeError, "query", "int"),
    ("mixed key", {"key": K.astype(BF16)}, TypeError, "key", "bfloat16"),
    ("mixed value", {"value": V.astype(np.float16)}, TypeError, "value", "float16"),
    ("key batch", {"key": K[:1]}, ValueError, "key", "(1,)"),
    ("key rank", {"key": K[0]}, ValueError, "key", "()"),
    ("key dim", {"key": K[..., :7]}, ValueError, "key", "7"),
    ("value length", {"value": V[:, :5]}, ValueError, "value", "(2, 5, 2, 5)"),
    ("value heads", {"value": V[:, :, :1]}, ValueError, "value", "(2, 6, 1, 5)"),
    ("heads", {"query": Q[:, :, :3]}, ValueError, "query", "3 heads"),
    ("wide head", {"value": np.zeros((2, 6, 2, 257), "f")}, ValueError, "value", "257"),
    ("no head dim", {"value": V[..., :0]}, ValueError, "value", "0"),
    ("bias integer", {"bias": np.zeros((4, 6), int)}, TypeError, "bias", "int"),
    ("bias bool", {"bias": np.ones((4, 6), bool)}, TypeError, "bias", "bool"),
    ("bias shape", {"bias": np.zeros((4, 5), "f")}, ValueError, "bias", "(4, 5)"),
    ("bias heads", {"bias": np.zeros((2, 1, 1), "f")}, ValueError, "bias", "(2, 1, 1)"),
    ("bias rank", {"bias": np.zeros((1, 1, 1, 1, 6), "f")}, ValueError, "bias", "(1, 1, 1, 1, 6)"),
    ("mask integer", {"mask": np.ones((4, 6), int)}, TypeError, "mask", "int"),
    ("mask float", {"mask": np.ones((4, 6), "f")}, TypeError, "mask", "float32"),
    ("mask shape", {"mask": np.ones((6, 4), bool)}, ValueError, "mask", "(6, 4)"),
    ("mask rank", {"mask": np.ones((1, 1, 1, 4, 6), bool)}, ValueError, "mask", "(1, 1, 1, 4, 6)"),
    (
        "mask of batch members", {"mask": np.ones((2, 4, 6), bool)}, ValueError,
        "mask", "mask[..., None, :, :]",
    ),
    ("mask function", {"mask": _float_predicate}, TypeError, "mask", "function"),
    ("mask string", {"mask": "causal"}, TypeError, "mask", "str"),
    ("scale string", {"scale": "big"}, TypeError, "scale", "str"),
    ("scale integer array", {"scale": np.ones((), int)}, TypeError, "scale", "int"),
    ("scale shape", {"scale": np.ones(3, "f")}, ValueError, "scale", "(3,)"),
    ("causal integer", {"is_causal": 1}, TypeError, "is_causal", "1"),
    ("causal string", {"is_causal": "yes"}, TypeError, "is_causal", "yes"),
    ("lengths float", {"query_seq_lengths": np.ones(2)}, TypeError, "query_seq_lengths", "float"),
    (
        "lengths shape", {"key_value_seq_lengths": np.ones(3, int)}, ValueError,
        "key_value_seq_lengths", "(3,)",
    ),
    ("window float", {"local_window_size": 2.5}, TypeError, "local_window_size", "2.5"),
    ("window of 3", {"local_window_size": (1, 2, 3)}, TypeError, "local_window_size", "(1, 2, 3)"),
    ("window negative", {"local_window_size": (-1, 0)}, ValueError, "local_window_size", "(-1, 0)"),
    ("one segment_ids", {"segment_ids": IDS}, ValueError, "segment_ids", "T = 4"),
    (
        "segment_ids float", {"segment_ids": (IDS, np.zeros((2, 6)))}, TypeError,
        "segment_ids", "float",
    ),
    ("segment_ids shape", {"segment_ids": (IDS, IDS)}, ValueError, "segment_ids", "(2, 4)"),
    ("segment_ids triple", {"segment_ids": (IDS, IDS, IDS)}, TypeError, "segment_ids", "3"),
    ("cap zero", {"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap", "0.0"),
    ("cap negative", {"logits_soft_cap": -5}, ValueError, "logits_soft_cap", "-5"),
    ("score function", {"score_mod": _capturing_score}, TypeError, "score_mod", "function"),
    ("sinks shape", {"sinks": np.zeros(2, "f")}, ValueError, "sinks", "(2,)"),
    ("sinks integer", {"sinks": np.zeros(4, int)}, TypeError, "sinks", "int"),
    ("rate one", {"dropout_rate": 1.0, "dropout_key": KEY}, ValueError, "dropout_rate", "1.0"),
    ("rate below", {"dropout_rate": -0.1, "dropout_key": KEY}, ValueError, "dropout_rate", "-0.1"),
    ("rate string", {"dropout_rate": "some"}, TypeError, "dropout_rate", "some"),
    ("key missing", {"dropout_rate": 0.1}, ValueError, "dropout_key", "None"),
    ("key integer", {"dropout_rate": 0.1, "dropout_key": 7}, TypeError, "dropout_key", "7"),
    (
        "keys", {"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY)}, TypeError,
        "dropout_key", "[2]",
    ),
    (
        "deterministic integer", {"deterministic_backward": 1}, TypeError,
        "deterministic_backward", "1",
    ),
    ("precision", {"precision": "best"}, ValueError, "precision", "best"),
    ("implementation", {"implementation": "cuda"}, ValueError, "implementation", "cuda"),
    ("residual", {"return_residual": "yes"}, TypeError, "return_residual", "yes"),
    (
        "slopes", {"score_mod": scores.Alibi(np.ones(3, "f"))}, ValueError,
        "Alibi.slopes", "(3,)",
    ),
    (
        "predicate's dtype", {"mask": masks.Predicate(_float_predicate)}, TypeError,
        "Predicate(fn", "float32",
    ),
    (
        "score's rows", {"score_mod": scores.ScoreMod(_scalar_score, rows={"a": np.ones(5, "f")})},
        ValueError, "ScoreMod.rows['a']", "(5,)",
    ),
    (
        "blocks", {"mask": masks.BlockSparse(np.ones((1, 2), bool), 2, 3)}, ValueError,
        "BlockSparse.blocks", "(1, 2)",
    ),
    ("term's ids", {"mask": masks.Segments(IDS)}, ValueError, "Segments(key", "T = 4"),
    (
        "term's offset", {"mask": masks.Causal(offset=np.zeros(3, int))}, ValueError,
        "Causal.offset", "(3,)",
    ),
    (
        "intervals", {"mask": masks.Intervals(np.zeros(5, int), np.zeros(6, int))}, ValueError,
        "Intervals.begin", "(5,)",
    ),
]  # fmt: skip

TERMS: list[tuple[str, Callable[[], Any], type[Exception], str, str]] = [
    ("align", lambda: masks.Causal(align="left"), ValueError, "Causal(align", "left"),  # type: ignore[arg-type]
    ("offset", lambda: masks.Causal(offset=1.5), TypeError, "Causal(offset", "1.5"),
    ("side", lambda: masks.Window(-2, 0), ValueError, "Window(left", "-2"),
    ("side's type", lambda: masks.Window(0, "a"), TypeError, "Window(right", "'a'"),  # type: ignore[arg-type]
    ("chunk", lambda: masks.Chunked(0), ValueError, "Chunked(size", "0"),
    ("length", lambda: masks.Lengths(key=np.ones(2)), TypeError, "Lengths(key", "float"),
    ("prefix", lambda: masks.Prefix(np.ones(2)), TypeError, "Prefix(length", "float"),
    ("no ids", lambda: masks.Segments(None), TypeError, "Segments(query", "None"),
    (
        "unsigned ids", lambda: masks.Segments(IDS.astype(np.uint32)), TypeError,
        "Segments(query", "uint32",
    ),
    (
        "begin", lambda: masks.Intervals(np.zeros(6), np.zeros(6, int)), TypeError,
        "Intervals(begin", "float",
    ),
    ("values", lambda: masks.Dense(np.ones((4, 6), int)), TypeError, "mask", "int"),
    (
        "blocks", lambda: masks.BlockSparse(np.ones((2, 2))), TypeError,
        "BlockSparse(blocks", "float",
    ),
    (
        "block size", lambda: masks.BlockSparse(np.ones((2, 2), bool), block_rows=0), ValueError,
        "BlockSparse(block_rows", "0",
    ),
    ("predicate", lambda: masks.Predicate(3), TypeError, "Predicate(fn", "3"),  # type: ignore[arg-type]
    (
        "named", lambda: masks.Predicate(_float_predicate, rows=IDS), TypeError,
        "Predicate(rows", "dict",
    ),
    ("score", lambda: scores.ScoreMod(3), TypeError, "ScoreMod(fn", "3"),  # type: ignore[arg-type]
    ("cap", lambda: scores.soft_cap(-1.0), ValueError, "soft_cap(cap", "-1.0"),
]  # fmt: skip


def holds(error: pytest.ExceptionInfo[Exception], name: str, came: str) -> None:
    said = str(error.value)
    assert name in said, said
    assert came in said, said
    assert "want" in said, said


@pytest.mark.parametrize("call", CALLS, ids=[call[0] for call in CALLS])
def test_bad_arguments_are_named(call: Any) -> None:
    _, arguments, kind, name, came = call
    given = {"query": Q, "key": K, "value": V} | arguments
    for implementation in IMPLEMENTATIONS:
        with pytest.raises(kind) as error:
            flashjax.dot_product_attention(**({"implementation": implementation} | given))
        holds(error, name, came)
    if "return_residual" not in arguments:
        with pytest.raises(kind) as error:
            flashjax.explain(**given)
        holds(error, name, came)


def test_a_length_beyond_int32_positions_is_named() -> None:
    short, long = (jax.ShapeDtypeStruct((1, n, 1, 64), BF16) for n in (8, 2**30))
    with pytest.raises(ValueError, match=rf"key has length {2**30}; wanted at most") as error:
        flashjax.explain(short, long, long)
    holds(error, "key", str(2**30))


@pytest.mark.parametrize("term", TERMS, ids=[term[0] for term in TERMS])
def test_bad_terms_are_named(term: Any) -> None:
    _, make, kind, name, came = term
    with pytest.raises(kind) as error:
        make()
    holds(error, name, came)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": masks.Predicate(_capturing_mask)},
        {"score_mod": scores.ScoreMod(_capturing_score)},
    ],
    ids=["Predicate", "ScoreMod"],
)
def test_captured_arrays_are_refused_with_the_way_out(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"\(fn=…\).* captures an array .*columns=.*"):
        flashjax.dot_product_attention(Q, K, V, **arguments)


def test_functions_that_are_not_elementwise_are_refused() -> None:
    with pytest.raises(TypeError, match=r"ScoreMod\(fn=…\) is not elementwise: .*reduce_sum"):
        flashjax.dot_product_attention(Q, K, V, score_mod=scores.ScoreMod(_scalar_score))


def test_traced_flags_are_refused() -> None:
    """Flags and rates are compiled in; a traced one is told so."""
    attend = functools.partial(flashjax.dot_product_attention, Q, K, V)
    for name, value in (("is_causal", True), ("deterministic_backward", True)):
        with pytest.raises(TypeError, match=rf"{name} is .*wanted True or False"):
            jax.jit(lambda x, name=name: attend(**{name: x}))(value)
    with pytest.raises(TypeError, match=r"dropout_rate is .*wanted a Python number"):
        jax.jit(lambda rate: attend(dropout_rate=rate, dropout_key=KEY))(0.1)
    with pytest.raises(TypeError, match=r"local_window_size is .*wanted"):
        jax.jit(lambda width: attend(local_window_size=width))(3)


def test_unknown_arguments_are_refused() -> None:
    for fn in (flashjax.dot_product_attention, flashjax.explain):
        with pytest.raises(TypeError, match="dropout"):
            fn(Q, K, V, dropout=0.1)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["mosaic", "triton", "cudnn"])
def test_an_implementation_that_cannot_says_why_and_what_to_do(name: Any) -> None:
    with pytest.raises(NotImplementedError) as error:
        flashjax.dot_product_attention(Q, K, V, implementation=name)
    said = str(error.value)
    assert f"implementation='{name}' cannot do this call: " in said
    assert "implementation=None" in said or "'xla'" in said


def test_merge_names_the_part_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="parts is empty"):
        flashjax.merge([])
    out, lse = jnp.zeros((2, 4, 4, 5)), jnp.zeros((2, 4, 4))
    with pytest.raises(ValueError, match=r"parts\[1\] has out \(2, 4, 4, 5\) and lse \(2, 4\)"):
        flashjax.merge([(out, lse), (out, lse[..., 0])])
