"""The Hopper backward in JAX's interpreter of Mosaic GPU kernels, which raises at races."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks, plan
from flashjax.backend import Device
from flashjax.bind import Arguments, bind
from flashjax.kernels.hopper import Hopper
from flashjax.kernels.hopper.backward_config import BackwardConfig, shared_memory
from flashjax.kernels.hopper.order import Order
from flashjax.kernels.hopper.walk import Walker
from flashjax.masks import Blocks, Causal
from flashjax.scores import Alibi, ScoreMod
from flashjax.spec import Spec
from scripts.deviceless import abstract_mesh
from tests.features import PARTS, Part, build
from tests.inputs import (
    BF16,
    F16,
    Case,
    Shape,
    arrays_of,
    case,
    jit,
    poisoned,
    said,
    same_bits,
)
from tests.kernels import mosaic
from tests.oracle import Array, Score

H200 = Device("cuda", "NVIDIA H200", "9.0")
NAMES = ("query", "key", "value")


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    mosaic.install()
    yield
    mosaic.reset()


def wanting(spec: Spec, *names: str) -> Spec:
    return dataclasses.replace(spec, wanted=frozenset(names or NAMES))


def gradients(
    case: Case,
    rows: int | None = None,
    *,
    more: tuple[str, ...] = (),
    deterministic: bool = False,
) -> dict[str, Array]:
    """Of query, key and value, from the oracle's output and LSE; with tiles of so many rows.

    With `more`, fields of `Operands`, also those of the case's operands.
    """
    backend = Hopper(mosaic.params())

    def run(inputs: Any, operands: Any, arrays: Any, out: Any, lse: Any, cotangents: Any) -> Any:
        bound = bind(*inputs, Arguments(**said(case, operands, arrays)))
        spec, (d_out, d_lse) = wanting(bound.spec, *NAMES, *more), cotangents
        spec = dataclasses.replace(spec, deterministic_backward=deterministic)
        assert backend.unsupported(spec, H200, backward=True) is None
        config: Any = backend.configs(spec, H200, backward=True)[0]
        config = dataclasses.replace(config, rows=rows or config.rows)
        products = jnp.where(out == 0, 0, out * d_out.astype(jnp.float32)).sum(-1)
        delta = jnp.where(lse == -jnp.inf, 0, products - d_lse).swapaxes(1, 2)
        given = bound.operands, lse.swapaxes(1, 2), delta, d_out
        found = backend.backward(spec, config, *given)

        def bound_floats(operands: Any) -> list[Any]:
            bound = bind(*inputs, Arguments(**said(case, operands, arrays))).operands
            leaves = jax.tree.leaves([getattr(bound, name) for name in more])
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

        _, pull = jax.vjp(bound_floats, operands)
        (others,) = pull(jax.tree.leaves([getattr(found, name) for name in more]))
        return {name: getattr(found, name) for name in NAMES} | (others if more else {})

    reference = case.judge.reference
    out, lse = (reference[name].astype(np.float32) for name in ("out", "lse"))
    inputs = case.query, case.key, case.value
    arrays = arrays_of(case.arguments)
    found = jit(run)(inputs, dict(case.operands), arrays, out, lse, case.cotangents)
    assert not mosaic.races_found()
    return {name: np.asarray(x).reshape(reference[name].shape) for name, x in found.items()}


# Parts of a call, its shape and dtype, rows of a tile.
CASES: dict[str, tuple[tuple[str, ...], Shape, Any, int | None]] = {
    "full": ((), Shape(1, 256, 256, 1, 1, 64, 64), BF16, None),
    "wide": ((), Shape(1, 128, 256, 2, 2, 128, 128), BF16, None),
    "causal, grouped": (("is_causal",), Shape(1, 200, 200, 4, 2, 64, 64), F16, None),
    "ragged": (("is_causal",), Shape(1, 150, 203, 2, 1, 128, 128), BF16, None),
    "columns end with a warpgroup": ((), Shape(1, 70, 192, 1, 1, 64, 64), BF16, 64),
    "window, head dims of no tile": (("window",), Shape(1, 130, 190, 2, 2, 80, 20), F16, None),
    "a wide value": ((), Shape(2, 72, 136, 1, 1, 64, 128), BF16, None),
    "a narrow value": (("sinks",), Shape(1, 72, 136, 1, 1, 128, 40), BF16, None),
    "dropped, capped": (
        ("is_causal", "dropout", "soft_cap"), Shape(1, 140, 140, 2, 1, 64, 64), BF16, 128,
    ),
    "documents, modified": (
        ("segments", "is_causal", "dropout", "score_mod"), Shape(2, 140, 140, 2, 1, 24, 40),
        BF16, None,
    ),
    "arrays": (
        ("lengths", "boolean_per_head", "bias (N,1,S)", "traced_scale"),
        Shape(2, 70, 130, 2, 1, 64, 64), BF16, None,
    ),
    "whole tiles of operands": (
        ("boolean_per_head", "bias (1,N,T,S)"), Shape(1, 100, 130, 2, 1, 64, 64), BF16, None,
    ),
    "256 head dims": (("is_causal",), Shape(1, 150, 136, 2, 1, 256, 256), BF16, None),
    "192 head dims": ((), Shape(1, 136, 136, 1, 1, 192, 128), BF16, None),
    "documents, 136 head dims": (
        ("segments", "dropout", "soft_cap"), Shape(2, 72, 80, 1, 1, 136, 24), F16, None,
    ),
    "two ranges": (("sink_tokens_and_window",), Shape(1, 200, 200, 2, 1, 64, 64), BF16, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    names, shape, dtype, rows = CASES[name]
    made = build(shape, names, dtype)
    made.judge.hold(gradients(made, rows))


# Names of `CASES`.
ORDERED = ("full", "causal, grouped", "documents, modified", "256 head dims", "two ranges")


@pytest.mark.parametrize("name", ORDERED)
def test_gradients_added_in_one_order(name: str) -> None:
    """The interpreter takes programs in turn, and the shim wants each turn to be the next."""
    names, shape, dtype, rows = CASES[name]
    made = build(shape, names, dtype)
    made.judge.hold(gradients(made, rows, deterministic=True))


def _bent(
    score: Any, row: Any, column: Any, batch: Any, head: Any, *, b: Any, c: Any, d: Any
) -> Any:
    return d * score + b * c * (row - column).astype(score.dtype) / 16


def _bent_oracle(x: Any) -> Score:
    b, d = x["b"][:, None, None, :], x["d"].reshape(1, -1, 1, 1)
    c = x["c"].reshape(1, 1, 1, 1)

    def value(s: Any, i: Any, j: Any, m: Any, n: Any) -> Any:
        return d[0, n, 0, 0] * s + b[m, 0, 0, j] * c.item() * (i - j).astype(s.dtype) / 16

    def partials(s: Any, i: Any, j: Any, m: Any, n: Any) -> dict[str, Any]:
        far = (i - j).astype(s.dtype) / 16
        found = {"score": d[0, n, 0, 0] + 0 * s, "d": s}
        return found | {"b": c.item() * far, "c": b[m, 0, 0, j] * far}

    return Score(value, partials, {"b": b.shape, "c": c.shape, "d": d.shape})


def modified(shape: Shape, r: np.random.Generator) -> Part:
    """A modifier with columns, heads and a scalar."""
    arrays = {
        "b": 0.3 * r.normal(size=(shape.B, shape.S)),
        "c": np.asarray(0.5),
        "d": 1 + 0.2 * r.normal(size=shape.N),
    }

    def make(x: Any) -> Any:
        columns, heads = {"b": x["b"]}, {"d": x["d"]}
        return ScoreMod(_bent, columns=columns, scalars={"c": x["c"]}, heads=heads)

    return Part(operands=arrays, options={"score": _bent_oracle}, score_mod=make)


# Parts of a call, those fields of its operands that have gradients, its shape and dtype.
SUMMED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Shape, Any]] = {
    "a scale, slopes": (
        ("traced_scale", "alibi", "is_causal"), ("scale", "score"),
        Shape(1, 70, 150, 4, 2, 64, 40), F16,
    ),
    "a bias of columns": (
        ("lengths", "bias (N,1,S)"), ("bias",), Shape(2, 34, 130, 2, 1, 128, 128), BF16,
    ),
    "modified": (("dropout", "modified"), ("score",), Shape(2, 70, 72, 2, 1, 24, 64), BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_operands_without_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, more, shape, dtype = SUMMED[name]
    monkeypatch.setitem(PARTS, "modified", modified)
    made = build(shape, names, dtype)
    found = gradients(made, more=more)
    assert found.keys() == {*NAMES, *made.operands}
    made.judge.hold(found)


LENGTHS = 600, 700  # T and S
MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": masks.Causal,
    "window": lambda: masks.Causal() & masks.Window(150, 0),
    "prefix": lambda: masks.Causal() | masks.Prefix(200),
    "two ranges": lambda: masks.Causal() & (masks.Window(100, 0) | masks.Prefix(70)),
    "chunked": lambda: masks.Causal() & masks.Chunked(200),
    "documents": lambda: (
        masks.Causal() & masks.Segments(*(np.arange(2 * n).reshape(2, n) // 170 for n in LENGTHS))
    ),
    "blocks": lambda: masks.BlockSparse(np.random.default_rng(0).random((2, 1, 5, 6)) < 0.4),
    "dense": lambda: masks.Dense(np.random.default_rng(1).random((1, 2, *LENGTHS)) < 0.0002),
}


@pytest.mark.parametrize("name", MASKS)
def test_turns_count_on_as_blocks_of_columns_begin(name: str) -> None:
    rows, columns = Blocks(LENGTHS[0], 64), Blocks(LENGTHS[1], 128)
    query, key = (jnp.zeros((2, n, 2, 64), BF16) for n in LENGTHS)
    spec, operands, _ = bind(query, key, key, Arguments(mask=MASKS[name]()))
    walker = Walker(spec, operands.mask, rows, columns, "columns")
    order = Order(spec, walker)
    assert bool(order.arrays) == (name not in ("none", "causal", "prefix"))
    for at in np.ndindex(2, 2):
        done: Counter[int] = Counter()
        for block in range(columns.count):
            walk = walker.at(walker.arrays, at, jnp.int32(block)).descending()
            for t in range(int(walk.total)):
                tile = int(walk.tile(jnp.int32(t)))
                assert int(order.turn(order.arrays, at, block, tile)) == done[tile]
                done[tile] += 1


def test_scores_far_below_0() -> None:
    """Exponentials of what lies beyond the last column would be infinite."""
    made = case(Shape(1, 40, 70, 1, 1, 64, 64), BF16)
    query, key = np.array(made.query), np.array(made.key)
    query[..., 0], key[..., 0] = 8, -150  # √H
    made = Case(query, key, made.value)
    made.judge.hold(gradients(made))


@pytest.mark.parametrize("sinks", [(), ("sinks",)])
def test_what_is_hidden_never_arrives(sinks: tuple[str, ...]) -> None:
    """The same bits with NaN in rows that see nothing and in columns that no row sees."""
    clean = build(Shape(2, 34, 140, 2, 1, 64, 64), ("lengths", *sinks), BF16, seed=1)
    keep = np.broadcast_to(clean.options["keep"], clean.shape.logits)
    rows, columns = ~keep.any((1, 3)), ~keep.any((1, 2))
    assert rows.any()
    assert columns.any()
    spoilt = Case(
        poisoned(clean.query, rows),
        poisoned(clean.key, columns),
        poisoned(clean.value, columns, np.inf),
        arguments=clean.arguments,
        options=clean.options,
        operands=clean.operands,
    )
    d_out, d_lse = clean.cotangents
    # What a cached property of either would be made of.
    spoilt.__dict__["cotangents"] = poisoned(d_out, rows), d_lse
    spoilt.__dict__["judge"] = clean.judge
    expected = gradients(clean)
    clean.judge.hold(expected)
    for name, x in gradients(spoilt).items():
        assert same_bits(x, expected[name]), name


@pytest.mark.parametrize("whose", ["query", "key"])
def test_what_is_infinite_and_has_no_weight(whose: str) -> None:
    """All of its scores are −inf: the same bits as where the mask hides it."""
    shape = Shape(1, 34, 140, 1, 1, 64, 64)
    made = case(shape, BF16)
    seen = np.ones(shape.logits, bool)
    seen[..., 130:] = False
    less = seen.copy()
    less[(..., 20, slice(None)) if whose == "query" else (..., 20)] = False
    arrays = {"query": np.array(made.query), "key": np.array(made.key)}
    other = arrays["key" if whose == "query" else "query"]
    other[..., 3] = -abs(other[..., 3]) - 1

    def masked(keep: Any) -> Case:
        return Case(**arrays, value=made.value, arguments={"mask": keep}, options={"keep": keep})

    clean = masked(less)
    expected = gradients(clean)
    arrays = {name: np.array(x) for name, x in arrays.items()}
    arrays[whose][0, 20, 0, 3] = np.inf
    spoilt = masked(seen)
    spoilt.__dict__["judge"] = clean.judge
    for name, x in gradients(spoilt).items():
        assert same_bits(x, expected[name]), name


def test_rows_past_the_end_of_half_a_block() -> None:
    """Above 128 head dims a consumer's rows may all lie there, and a bias has no LSE beside it."""
    bias = np.full((1, 1, 1, 72), 100.0, np.float32)
    made = case(Shape(1, 96, 72, 1, 1, 192, 64), BF16, operands={"bias": bias})
    made.judge.hold(gradients(made))


def spec_of(width: int, value: int, length: int = 1024, **arguments: Any) -> Spec:
    x = jax.ShapeDtypeStruct((1, length, 8, width), BF16)
    v = jax.ShapeDtypeStruct((1, length, 8, value), BF16)
    found: list[Spec] = []
    jax.eval_shape(lambda q, v: found.append(bind(q, q, v, Arguments(**arguments)).spec), x, v)
    return found[0]


@pytest.mark.parametrize(
    ("width", "value"),
    [(64, 64), (96, 96), (128, 128), (20, 128), (192, 192), (192, 128), (256, 256), (24, 200)],
)
def test_a_configuration_is_offered_and_fits(width: int, value: int) -> None:
    spec = wanting(spec_of(width, value, is_causal=True))
    offered = Hopper().configs(spec, H200, backward=True)
    assert offered
    for config in offered:
        assert isinstance(config, BackwardConfig)
        assert shared_memory(spec, config) <= 227 * 1024


def test_what_it_cannot_do_triton_does() -> None:
    """And the forward stays."""
    others = {
        "more than 16777216 entries": wanting(
            spec_of(64, 64, 2**19, is_causal=True, deterministic_backward=True)
        ),
        "no gradient of bias with rows of its own": wanting(
            spec_of(64, 64, bias=np.zeros((1024, 1), BF16)), "query", "bias"
        ),
        "no gradient of score with head dims 64 and 136": wanting(
            spec_of(64, 136, score_mod=Alibi(np.ones(8, np.float32))), "query", "score"
        ),
    }
    for words, spec in others.items():
        made = plan.plan(spec, "mosaic", H200)
        assert (made.forward.implementation, made.backward.implementation) == ("mosaic", "triton")
        ((name, reason),) = [x for x in made.backward.refused if x[0] == "mosaic"]
        assert words in reason, name
    made = plan.plan(wanting(spec_of(64, 64), "query", "sinks"), None, H200)
    assert made.backward.implementation == "mosaic"


def test_walks_of_columns_take_every_tile_once() -> None:
    """FULL tiles count as PARTIAL where a block hangs over the last column."""
    spec, rows, columns = spec_of(64, 64), Blocks(1000, 64), Blocks(1000, 128)
    walker = Walker(spec, Causal(), rows, columns, "columns")
    for block in range(columns.count):
        walk = walker.at([], (0, 0), jnp.int32(block))
        taken = [
            (int(walk.tile(t)), masked)
            for masked, begin, end in walk.all_loops()
            for t in range(int(begin), int(end))
        ]
        assert sorted(tile for tile, _ in taken) == list(range(2 * block, rows.count))
        first_full = 2 * (block + 1) if block < columns.count - 1 else rows.count
        inside = {tile for tile, masked in taken if not masked}
        assert inside == set(range(first_full, rows.count - 1))  # the last row block is ragged


@pytest.mark.parametrize("width", [64, 128])
def test_sums_lower_for_a_gpu(width: int) -> None:
    x = jax.ShapeDtypeStruct((1, 77, 2, width), BF16)
    scale, slopes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    bias = jax.ShapeDtypeStruct((2, 1, 77), BF16)

    def loss(q: Any, scale: Any, slopes: Any, bias: Any) -> Any:
        out = flashjax.dot_product_attention(
            q, q, q, bias, scale=scale, score_mod=Alibi(slopes), is_causal=True,
            implementation="mosaic",
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(abstract_mesh("9.0")):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(x, scale, slopes, bias)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "flashjax_backward" in lowered
    assert "flashjax_backward_key" not in lowered  # Triton's


@pytest.mark.parametrize(
    ("rows", "width"), [(8, 64), (1, 128), (77, 64), (77, 96), (256, 128), (77, 192), (256, 256)]
)
def test_any_length_lowers_for_a_gpu(rows: int, width: int) -> None:
    x = jax.ShapeDtypeStruct((1, rows, 2, width), BF16)

    def loss(q: Any) -> Any:
        out = flashjax.dot_product_attention(q, q, q, is_causal=True, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(abstract_mesh("9.0")):
        lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "flashjax_backward" in text
    assert "flashjax_backward_key" not in text  # Triton's


def test_strict_promotion() -> None:
    """Traced alone."""
    shape = jax.ShapeDtypeStruct((1, 128, 4, 64), BF16)
    key = jax.ShapeDtypeStruct((1, 128, 2, 64), BF16)
    lse = jax.ShapeDtypeStruct((1, 4, 128), jnp.float32)

    def run(q: Any, k: Any, lse: Any) -> Any:
        bound = bind(q, k, k, Arguments(is_causal=True, logits_soft_cap=4.0))
        backend, spec = Hopper(mosaic.params()), wanting(bound.spec)
        (config,) = backend.configs(spec, H200, backward=True)[:1]
        return backend.backward(spec, config, bound.operands, lse, lse, q)

    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(run, shape, key, lse)
    assert found.query.shape == shape.shape
    assert found.key.dtype == jnp.bfloat16
