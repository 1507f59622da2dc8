"""The Hopper kernel in JAX's interpreter of Mosaic GPU kernels, which raises where threads race."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks, scores
from flashjax.backend import Device
from flashjax.bind import Arguments, bind
from flashjax.kernels.hopper import BACKEND, Hopper, items, shares
from flashjax.kernels.hopper.config import ForwardConfig, heads_beside, shared_memory
from flashjax.kernels.hopper.items import Items
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.kernels.hopper.rows import rest_of
from flashjax.kernels.hopper.walk import Walker
from flashjax.masks import Blocks, BlockSparse, Causal, Mask, Prefix, Segments
from flashjax.spec import Spec
from scripts.deviceless import abstract_mesh
from tests.features import build
from tests.inputs import (
    BF16,
    F16,
    F32,
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
from tests.oracle import Array

H200 = Device("cuda", "NVIDIA H200", "9.0")
ONE_AN_ITEM = ForwardConfig(128, 64, 2, False, 0)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    mosaic.install()
    yield
    mosaic.reset()


def forward(case: Case, config: ForwardConfig) -> dict[str, Array]:
    """out and LSE in one configuration."""
    backend = Hopper(mosaic.params())

    def run(query: Any, key: Any, value: Any, operands: Any, arrays: Any) -> Any:
        bound = bind(query, key, value, Arguments(**said(case, operands, arrays)))
        assert backend.unsupported(bound.spec, H200) is None
        return backend.forward(bound.spec, config, bound.operands)

    inputs = (case.query, case.key, case.value, dict(case.operands), arrays_of(case.arguments))
    out, lse = jit(run)(*inputs)
    found = {"out": np.asarray(out), "lse": np.asarray(lse).swapaxes(1, 2)}
    assert not mosaic.races_found()
    return found


# Every kind of mask and of operand, grouped heads, ragged ends, a padded head dim.
TOGETHER: dict[str, tuple[tuple[str, ...], Shape, Any]] = {
    "causal": (("is_causal", "sinks"), Shape(1, 150, 200, 2, 1, 64, 64), BF16),
    "documents": (
        ("segments", "is_causal", "dropout", "score_mod"), Shape(1, 140, 140, 2, 2, 24, 40), BF16,
    ),
    "arrays": (
        ("lengths", "boolean_per_head", "causal_offset_per_batch", "bias (N,1,S)", "traced_scale"),
        Shape(2, 70, 130, 2, 1, 64, 64), F16,
    ),
    "two ranges": (
        ("sink_tokens_and_window", "bias (1,N,T,S)"), Shape(1, 140, 200, 2, 1, 64, 64), BF16,
    ),
    "whole tiles of operands": (
        ("boolean_per_head", "bias (1,N,T,S)"), Shape(1, 128, 128, 2, 1, 64, 64), BF16,
    ),
    "capped": (("soft_cap", "chunks"), Shape(1, 130, 190, 1, 1, 64, 64), BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_features_together(name: str) -> None:
    names, shape, dtype = TOGETHER[name]
    made = build(shape, names, dtype)
    made.judge.hold(forward(made, ONE_AN_ITEM))


CONFIGS = {
    "programs that share items": (Shape(1, 300, 300, 4, 2, 64, 64), (128, 64, 2, False, 2)),
    "items that overlap": (Shape(1, 300, 260, 4, 2, 64, 64), (128, 64, 2, False, 2, True)),
    "output through Q, overlapping": (
        Shape(1, 200, 184, 2, 2, 128, 128),
        (128, 160, 2, False, 2, True),
    ),
    "two programs together": (
        Shape(1, 600, 264, 2, 2, 64, 64),
        (128, 64, 2, False, 4, False, 2),
    ),
    "two together, overlapping": (
        Shape(1, 300, 260, 2, 2, 64, 64),
        (128, 64, 2, False, 2, True, 2),
    ),
    "two heads together": (
        Shape(1, 300, 260, 8, 2, 64, 64),
        (128, 64, 2, False, 4, True, 2),
    ),
    "queries in registers": (Shape(1, 300, 300, 2, 2, 64, 64), (128, 64, 2, True, 2)),
    "output through Q": (Shape(1, 200, 100, 2, 2, 256, 256), (128, 64, 2, False, 2)),
    "three consumers, a wide value": (Shape(1, 200, 150, 1, 1, 64, 96), (192, 96, 3, False, 0)),
    "head dims of no tile": (Shape(1, 150, 100, 2, 1, 80, 20), (128, 64, 2, False, 0)),
    "a narrow value": (Shape(1, 200, 104, 1, 1, 192, 128), (128, 96, 2, False, 0)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    shape, numbers = CONFIGS[name]
    made = build(shape, ("is_causal",), BF16)
    made.judge.hold(forward(made, ForwardConfig(*numbers)))


# Items that programs share in parts, and what of them: shape, features, configuration.
CUT: dict[str, tuple[Shape, tuple[str, ...], tuple[Any, ...]]] = {
    "fewer items than programs": (
        Shape(1, 150, 700, 1, 1, 64, 64), ("sinks",), (128, 64, 2, False, 5),
    ),
    "causal, overlapping": (
        Shape(1, 300, 300, 3, 1, 64, 64), ("is_causal",), (128, 64, 2, False, 4, True),
    ),
    "output through Q": (
        Shape(1, 200, 330, 1, 1, 256, 256), (), (128, 64, 2, False, 3),
    ),
    "two programs together": (
        Shape(1, 500, 330, 1, 1, 64, 40), (), (128, 64, 2, False, 6, False, 2),
    ),
    "two heads together": (
        Shape(1, 300, 300, 4, 2, 64, 64), (), (128, 64, 2, True, 8, False, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_items_that_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WORTH", -1)
    monkeypatch.setattr(shares, "LEAST", 1)
    cut: list[int] = []

    def counted(*arguments: Any, **_: Any) -> shares.Shares:
        found = shares.shared_out(*arguments)
        cut.append(len(found.parts))
        return found

    monkeypatch.setattr(items, "shared_out", counted)
    shape, features, numbers = CUT[name]
    made = build(shape, features, BF16)
    made.judge.hold(forward(made, ForwardConfig(*numbers)))
    assert min(cut) > 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_where_it_is(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items of two and of three parts; a value that the last member alone sees."""
    monkeypatch.setattr(shares, "WORTH", -1)
    monkeypatch.setattr(shares, "LEAST", 1)
    made = case(Shape(3, 64, 700, 1, 1, 64, 64), BF16)
    values = np.array(made.value)
    values[2, 600:] = value
    config = ForwardConfig(128, 64, 2, False, 5)
    found = forward(Case(made.query, made.key, values), config)["out"].astype(np.float32)
    clean = forward(made, config)["out"]
    assert same_bits(found[:2], clean[:2].astype(np.float32))
    whole = ForwardConfig(128, 64, 2, False, 0)
    wanted = forward(Case(made.query, made.key, values), whole)["out"].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


def test_two_numbers_of_a_part_add_up() -> None:
    x = jnp.array([1 / 3, -3e-5, 0.0, 3.4e38, -np.inf], jnp.float32)
    for dtype in (BF16, F16):
        first, rest = (np.asarray(y, np.float32) for y in (x.astype(dtype), rest_of(x, dtype)))
        held = np.isfinite(first)
        np.testing.assert_allclose(
            (first + rest)[held], np.asarray(x)[held], rtol=2**-16, atol=1e-8
        )
        np.testing.assert_array_equal((first + rest)[~held], first[~held])


def test_blocks_that_hold_whole_tiles() -> None:
    shape = Shape(1, 200, 300, 2, 1, 64, 64)
    blocks = np.random.default_rng(3).random((1, 2, 4, 3)) < 0.5
    keep = np.repeat(np.repeat(blocks, 64, 2), 128, 3)[..., : shape.T, : shape.S]
    mask = BlockSparse(blocks, block_rows=64, block_columns=128)
    made = case(shape, BF16, arguments={"mask": mask}, options={"keep": keep})
    made.judge.hold(forward(made, ONE_AN_ITEM))


def test_one_row_and_less_than_a_tile() -> None:
    made = case(Shape(2, 1, 5, 2, 1, 64, 64), BF16)
    made.judge.hold(forward(made, ONE_AN_ITEM))


@pytest.mark.parametrize("levels", [(-200, -200, -200, -4, -90, -9, 20, 3), (3, 3, -50, 90)])
def test_maxima_on_both_sides_of_0(levels: tuple[float, ...]) -> None:
    """Scores around one level in each half of a tile."""
    made = case(Shape(1, 70, 32 * len(levels), 2, 1, 64, 64), BF16)
    query, key = np.array(made.query), np.array(made.key)
    query[..., 0] = 8  # √H
    key[..., 0] = np.repeat(levels, 32)[:, None]
    made = Case(query, key, made.value)
    made.judge.hold(forward(made, ONE_AN_ITEM))


@pytest.mark.parametrize("size", [2.4, 40.0])
def test_scores_near_and_beyond_a_soft_cap(size: float) -> None:
    """Near are those below 0.4 of it, here 12."""
    arguments, options = {"logits_soft_cap": 30.0}, {"soft_cap": 30.0}
    made = case(Shape(1, 70, 200, 2, 1, 64, 64), BF16, arguments=arguments, options=options)
    query = np.array(made.query)
    query[:, :16] *= size
    query[:, 16:] *= 2.4
    made = Case(query, made.key, made.value, arguments=arguments, options=options)
    made.judge.hold(forward(made, ONE_AN_ITEM))


@pytest.mark.parametrize("cap", [None, 4.0])
def test_a_row_of_one_column_is_its_values(cap: float | None) -> None:
    """Whatever its score, its weight in bfloat16 is a power of 2."""
    shape = Shape(1, 70, 70, 2, 1, 64, 64)
    arguments = {"local_window_size": (0, 0), "logits_soft_cap": cap}
    made = case(shape, BF16, arguments=arguments)
    assert (forward(made, ONE_AN_ITEM)["out"] == np.repeat(made.value, 2, axis=2)).all()


def test_float16_keeps_a_long_tail_below_a_maximum_below_0() -> None:
    made = case(Shape(1, 64, 2048, 1, 1, 64, 64), F16)
    query, key, value = (np.zeros_like(x) for x in (made.query, made.key, made.value))
    query[..., 0], key[..., 0], value[...] = 8, -17.5, 1
    key[:, 5, :, 0], value[:, 5] = -5.3, -1
    Case(query, key, value).judge.hold(forward(Case(query, key, value), ONE_AN_ITEM))


def test_what_is_hidden_never_arrives() -> None:
    """The same bits with NaN in columns that no row sees, beside some that a row sees."""
    clean = build(Shape(2, 34, 140, 2, 1, 64, 64), ("lengths",), BF16, seed=1)
    keep = np.broadcast_to(clean.options["keep"], clean.shape.logits)
    columns = keep.any((1, 2))
    assert not columns.all()
    spoilt = Case(
        clean.query,
        poisoned(clean.key, ~columns),
        poisoned(clean.value, ~columns),
        arguments=clean.arguments,
        options=clean.options,
    )
    expected = forward(clean, ONE_AN_ITEM)
    clean.judge.hold(expected)
    for name, x in forward(spoilt, ONE_AN_ITEM).items():
        assert same_bits(x, expected[name]), name


def spec_of(rows: int, heads: int, batch: int, mask: Mask | None, dtype: Any = BF16) -> Spec:
    x = jax.ShapeDtypeStruct((batch, rows, heads, 64), dtype)
    found: list[Spec] = []

    def trace(q: jax.Array) -> None:
        found.append(bind(q, q, q, Arguments(mask=mask)).spec)

    jax.eval_shape(trace, x)
    return found[0]


@pytest.mark.parametrize(("programs", "heads"), [(0, 2), (3, 1), (5, 6), (96, 2), (1000, 3)])
def test_every_item_has_one_program(programs: int, heads: int) -> None:
    spec = spec_of(1000, 6, 2, Causal())
    rows, columns = Blocks(1000, 128), Blocks(1000, 64)
    found = Items(spec, Walker(spec, Causal(), rows, columns), programs, heads)
    if found.shared:
        table = np.asarray(found.arrays[0])
        taken = [i for row in table for i in row[1 : 1 + row[0]]]
    else:
        taken = list(range(found.programs))
    assert len(taken) == len(set(taken))
    whole = [i if i < found.count else found.parts[i - found.count].item for i in taken]
    places = {tuple(int(x) for x in found.places(np.int32(i))) for i in whole}
    assert len(set(whole)) == len(places)
    assert places == {(t, n, b) for t in range(8) for n in range(6) for b in range(2)}


def test_programs_that_share_items_end_together() -> None:
    spec = spec_of(4096, 16, 4, Causal())
    rows, columns = Blocks(4096, 128), Blocks(4096, 128)
    walker = Walker(spec, Causal(), rows, columns)
    found = Items(spec, walker, 132, 8)
    lengths = walker.lengths
    assert lengths is not None
    np.testing.assert_array_equal(lengths, np.arange(1, 33))
    loads = []
    for row in np.asarray(found.arrays[0]):
        own = [found.places(np.int32(i))[0] for i in row[1 : 1 + row[0]]]
        loads.append(sum(int(lengths[int(block)]) + 1 for block in own))
    assert max(loads) <= 1.01 * np.mean(loads)


@pytest.mark.parametrize(
    ("width", "value"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_a_configuration_is_offered_and_fits(width: int, value: int, mask: Any) -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 8, width), BF16)
    v = jax.ShapeDtypeStruct((1, 4096, 8, value), BF16)
    found: list[Spec] = []
    jax.eval_shape(lambda q, v: found.append(bind(q, q, v, Arguments(mask=mask)).spec), x, v)
    offered = BACKEND.configs(found[0], H200)
    assert offered
    for config in offered:
        assert isinstance(config, ForwardConfig)
        assert shared_memory(found[0], config) <= 227 * 1024


@pytest.mark.parametrize(
    ("rows", "key_heads", "mask", "paired"),
    [
        (4096, 8, None, True),
        (4096, 2, Causal(), True),
        (1024, 8, Causal(), False),  # walks of a few tiles
        (3 * 128, 8, None, False),  # one of two programs would have no rows in every fourth item
        (3 * 128, 4, None, True),  # two heads of a group have
        (4096, 8, Prefix(np.ones((1, 8), np.int32)), False),  # columns that no row sees
    ],
)
def test_who_works_in_pairs(rows: int, key_heads: int, mask: Any, paired: bool) -> None:
    x = jax.ShapeDtypeStruct((16, rows, 8, 128), BF16)
    k = jax.ShapeDtypeStruct((16, 4096 if mask is None else rows, key_heads, 128), BF16)
    found: list[Spec] = []
    jax.eval_shape(lambda q, k: found.append(bind(q, k, k, Arguments(mask=mask)).spec), x, k)
    first = BACKEND.configs(found[0], H200)[0]
    assert isinstance(first, ForwardConfig)
    assert (first.cluster == 2) == paired
    assert first.query_in_registers == (paired and key_heads < 8)


@pytest.mark.parametrize(
    ("heads", "columns", "mask", "beside"),
    [(16, 4096, Causal(), 8), (16, 2**20, Causal(), 1), (16, 4096, None, 2), (3, 64, None, 1)],
)
def test_heads_beside_one_another(heads: int, columns: int, mask: Any, beside: int) -> None:
    x = jax.ShapeDtypeStruct((1, columns, heads, 128), BF16)
    found: list[Spec] = []
    jax.eval_shape(lambda q: found.append(bind(q, q, q, Arguments(mask=mask)).spec), x)
    assert heads_beside(found[0]) == beside
    k = jax.ShapeDtypeStruct((1, columns, 1, 128), BF16)
    jax.eval_shape(lambda q, k: found.append(bind(q, k, k, Arguments(mask=mask)).spec), x, k)
    assert heads_beside(found[1]) == heads  # a whole group


def test_what_it_cannot_do_it_says() -> None:
    reason = BACKEND.unsupported(spec_of(64, 2, 1, None, F32), H200)
    assert reason == "query has dtype float32; the kernels take bfloat16 and float16"
    blocks = BlockSparse(np.ones((2, 1), bool), block_rows=32, block_columns=64)
    reason = BACKEND.unsupported(spec_of(64, 2, 1, blocks), H200)
    assert reason == "mask has blocks of 32 × 64; the kernels take multiples of 64"
    with jax.enable_x64(True):
        segments = Segments(np.zeros((1, 64), np.int64), np.zeros((1, 64), np.int64))
        reason = BACKEND.unsupported(spec_of(64, 2, 1, segments), H200)
    wanted = "mask or segment_ids holds an array of dtype int64; the kernels take 32 bits"
    assert reason is not None
    assert reason.startswith(wanted)


def test_strict_promotion() -> None:
    """Traced alone."""
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def run(q: Any) -> Any:
        bound = bind(q, q, q, Arguments(is_causal=True, logits_soft_cap=4.0))
        return Hopper(mosaic.params()).forward(bound.spec, ONE_AN_ITEM, bound.operands)

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(run, shape)[0].dtype == jnp.bfloat16


def test_devices_without_the_kernels() -> None:
    spec = spec_of(64, 2, 1, None)
    assert BACKEND.unsupported(spec, H200) is None
    reason = BACKEND.unsupported(spec, Device("cuda", "NVIDIA B200", "10.0"))
    assert reason is not None
    assert "compute capability 9.0; this device has 10.0" in reason


X = np.concatenate([np.linspace(-50, 50, 4001), [0.5, 1.5, -0.5, -1.5, 3e4, -3e4, 2.0**24]])
X = X.astype(np.float32)


@pytest.mark.parametrize(
    "fn",
    [
        jnp.floor, jnp.ceil, jnp.round, jnp.isfinite, jnp.tanh, jnp.sin, jnp.cos, lambda x: x**-3,
        jax.nn.relu6, lambda x: jnp.mod(x, 1.25), lambda x: jax.lax.rem(x, x.dtype.type(-0.75)),
        lambda x: x // 1.5, lambda x: ~(x < 1), lambda x: x.astype(bool),
        lambda x: (x % 100).astype(jnp.int8) * jnp.int8(3),
    ],
    ids=[
        "floor", "ceil", "round", "isfinite", "tanh", "sin", "cos", "power",
        "relu6", "mod", "rem", "floor_divide", "not", "bool", "int8",
    ],
)  # fmt: skip
def test_replayed_functions_give_the_same(fn: Any) -> None:
    x = X[X != 0]
    replayed = MOSAIC.lowerable(fn)
    assert MOSAIC.unknown(replayed, x) in (None, "sin", "cos", "integer_pow")
    found, wanted = np.asarray(jax.jit(replayed)(x)), np.asarray(fn(x.astype(np.float64)))
    # Sine and cosine lose what the argument lost of a turn.
    np.testing.assert_allclose(
        found, wanted, rtol=4e-7, atol=1e-6 if fn in (jnp.sin, jnp.cos, jnp.tanh) else 0
    )


PREDICATES = {
    "not": lambda i, j: ~(i < j),
    "bools": lambda i, j: i.astype(bool) & jnp.logical_not(j.astype(bool)),
    "int8": lambda i, j: i.astype(jnp.int8) >= j.astype(jnp.int8),
}
SCORES = {
    "relu": jax.nn.relu,
    "mod": lambda s: jnp.mod(s, 1.3),
    "floor_divide": lambda s: s // 1.5,
}


@pytest.mark.parametrize("name", [*PREDICATES, *SCORES])
def test_users_functions_lower_for_a_gpu(name: str) -> None:
    """What planning takes, Mosaic's lowering takes, under a mesh too."""
    said: dict[str, Any] = {}
    if name in PREDICATES:
        said["mask"] = masks.Predicate(PREDICATES[name])
    else:
        said["score_mod"] = scores.ScoreMod(lambda s, *_: SCORES[name](s))
    lower(jax.ShapeDtypeStruct((1, 128, 2, 64), BF16), **said)


@pytest.mark.parametrize(("rows", "width"), [(8, 64), (1, 128), (77, 64), (77, 128), (77, 96)])
def test_any_length_lowers_for_a_gpu(rows: int, width: int) -> None:
    """TMA refuses rows in eights where there are others: the interpreter does not."""
    lower(jax.ShapeDtypeStruct((1, rows, 2, width), BF16), is_causal=True)


def lower(x: Any, **arguments: Any) -> None:
    def call(q: Any) -> Any:
        return flashjax.dot_product_attention(q, q, q, implementation="mosaic", **arguments)

    with jax.sharding.use_abstract_mesh(abstract_mesh("9.0")):
        jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))


def test_a_predicate_that_is_the_same_everywhere_is_refused() -> None:
    mask = masks.Predicate(lambda i, j: jnp.ones_like(i) > 0)
    reason = BACKEND.unsupported(spec_of(64, 2, 1, mask), H200)
    assert reason is not None
    assert "uses a constant" in reason
