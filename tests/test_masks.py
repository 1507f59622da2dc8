"""Masks as values: how they print, compare, travel through JAX's transforms, and refuse."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks
from flashjax.masks import Mask
from flashjax.structure import Dims
from tests.laws.answers import keep

Array = np.ndarray
DIMS = Dims((2,), 3, 5, 7)
ROW, COLUMN = np.arange(5)[:, None], np.arange(7)[None, :]


def ints(*shape: int, dtype: Any = np.int32) -> Array:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def below(row: Any, column: Any) -> Any:
    return column < row


def near(row: Any, column: Any, *, start: Any, stop: Any, reach: Any, shift: Any) -> Any:
    return (column >= start - shift) & (row < stop) & (abs(column - row) < reach)


def everywhere(mask: Mask, dims: Dims = DIMS) -> Array:
    """What the mask keeps, bool (B, N, T, S)."""
    shape = (int(np.prod(dims.batch)), *dims[1:])
    return np.broadcast_to(keep(mask.aligned(dims), dims), shape)


# How a mask prints.

PRINTED = {
    "Causal()": masks.Causal(),
    "Causal(offset=3, align='bottom_right')": masks.Causal(3, align="bottom_right"),
    "Causal(offset=int32[2])": masks.Causal(ints(2)),
    "Causal(offset=int32[])": masks.Causal(jnp.int32(1)),
    "Window(left=256, right=0)": masks.Window(256, 0),
    "Window(left=None, right=3)": masks.Window(None, 3),
    "Lengths(key=uint8[2])": masks.Lengths(key=ints(2, dtype=np.uint8)),
    "Lengths(query=3, key=4)": masks.Lengths(3, 4),
    "Prefix(length=4)": masks.Prefix(4),
    "Chunked(size=8)": masks.Chunked(8),
    "Segments(query=int32[2,5])": masks.Segments(ints(2, 5)),
    "Intervals(begin=int32[7], end=int32[7])": masks.Intervals(ints(7), ints(7)),
    "Dense(values=bool[5,7])": masks.Dense(np.ones((5, 7), bool)),
    "BlockSparse(blocks=bool[1,1])": masks.BlockSparse(np.ones((1, 1), bool)),
    "BlockSparse(blocks=bool[1,2], block_columns=64)": masks.BlockSparse(
        np.ones((1, 2), bool), block_columns=64
    ),
    "Predicate(fn=below)": masks.Predicate(below),
    "Predicate(fn=near, columns={start: int32[7]})": masks.Predicate(
        near, columns={"start": ints(7)}
    ),
    "Causal() & Window(left=1, right=None) & Prefix(length=2)": masks.Causal()
    & (masks.Window(1, None) & masks.Prefix(2)),
    "(Causal() | Prefix(length=2)) & Chunked(size=3)": (masks.Causal() | masks.Prefix(2))
    & masks.Chunked(3),
    "(Causal() & Chunked(size=3)) | Prefix(length=2)": masks.Causal() & masks.Chunked(3)
    | masks.Prefix(2),
    "~(Causal() | Prefix(length=2)) & ~Chunked(size=3)": ~(masks.Causal() | masks.Prefix(2))
    & ~masks.Chunked(3),
}


@pytest.mark.parametrize("text", PRINTED)
def test_repr_says_what_a_mask_is(text: str) -> None:
    assert repr(PRINTED[text]) == text


def test_masks_have_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"combine masks with &, \| and ~"):
        bool(masks.Causal())
    with pytest.raises(TypeError, match=r"combine masks with &, \| and ~"):
        masks.Causal() and masks.Prefix(3)


def test_masks_combine_with_masks_only() -> None:
    with pytest.raises(TypeError, match=r"ndarray; wrap a boolean array in flashjax.masks.Dense"):
        masks.Causal() & np.ones((5, 7), bool)


# Hash and equality.


def documents(key: Any = None) -> Mask:
    return masks.Segments(ints(2, 5), key) & masks.Causal()


SAME = [
    (masks.Causal(ints(2)), masks.Causal(7 + ints(2))),
    (masks.Causal(ints(2)), masks.Causal(jnp.zeros(2, jnp.int32))),
    (documents(), documents()),
    (masks.Predicate(below), masks.Predicate(below)),
    (~masks.Prefix(np.asarray(3)), ~masks.Prefix(np.asarray(4))),
    (masks.Dense(np.ones((5, 7), bool)), masks.Dense(np.zeros((5, 7), bool))),
]
DIFFERENT = [
    (masks.Causal(3), masks.Causal(4)),
    (masks.Causal(3), masks.Causal(np.asarray(3))),
    (masks.Causal(), masks.Causal(align="bottom_right")),
    (masks.Causal(ints(2)), masks.Causal(ints(3))),
    (masks.Causal(ints(2)), masks.Causal(ints(2, dtype=np.int8))),
    (masks.Window(3, 0), masks.Window(0, 3)),
    (masks.Window(3, None), masks.Window(3, 0)),
    (masks.Lengths(3, None), masks.Lengths(None, 3)),
    (documents(), documents(ints(2, 5))),
    (masks.Causal() & masks.Prefix(3), masks.Causal() | masks.Prefix(3)),
    (masks.Causal(), ~~masks.Causal()),
    (masks.Predicate(below), masks.Predicate(lambda row, column: column < row)),
    (masks.Predicate(below), masks.Predicate(below, tile_verdict=near)),
    (masks.Predicate(near, {"a": ints(5)}), masks.Predicate(near, {"b": ints(5)})),
    (masks.BlockSparse(np.ones((1, 1), bool)), masks.BlockSparse(np.ones((1, 1), bool), 64)),
    (masks.Causal(), None),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_values_of_arrays_do_not_tell_masks_apart(a: Mask, b: Mask) -> None:
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b}) == 1


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_structure_static_fields_shapes_and_dtypes_do(a: Mask, b: Mask) -> None:
    assert a != b
    assert len({a, b}) == 2


# Pytrees and transforms.

TREES = {
    "no arrays": (masks.Causal(3) & masks.Lengths(None, 4) | ~masks.Window(None, 2), 0),
    "Causal": (masks.Causal(ints(2)), 1),
    "Window": (masks.Window(2, None, ints(2)), 1),
    "Lengths": (masks.Lengths(None, ints(2)), 1),
    "Prefix": (masks.Prefix(ints(2)), 1),
    "Chunked": (masks.Chunked(3, ints(2)), 1),
    "Segments": (masks.Segments(ints(2, 5) // 2, ints(7) // 2), 2),
    "Intervals": (masks.Intervals(ints(7), ints(7) + 2), 2),
    "Dense": (masks.Dense(ints(5, 7) % 3 > 0), 1),
    "BlockSparse": (masks.BlockSparse(ints(2, 4) % 3 > 0, 4, 2), 1),
    "Predicate": (
        masks.Predicate(
            near,
            {"start": ints(5)},
            {"stop": ints(2, 7)},
            {"reach": ints(2)},
            {"shift": ints(3)},
        ),
        4,
    ),
    "nested": (~(masks.Causal(ints(2)) & documents(ints(7)) | masks.Prefix(ints(2))), 4),
}


@pytest.mark.parametrize("name", TREES)
def test_masks_are_pytrees_of_their_arrays(name: str) -> None:
    mask, arrays = TREES[name]
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == arrays
    again = jax.tree.unflatten(tree, leaves)
    assert again == mask
    assert repr(again) == repr(mask)
    moved = jax.tree.map(jnp.asarray, mask)
    np.testing.assert_array_equal(everywhere(moved), everywhere(mask))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mask)]
    assert len(set(paths)) == arrays


@pytest.mark.parametrize("name", TREES)
def test_masks_pass_through_jit(name: str) -> None:
    mask, _ = TREES[name]
    traces = []

    @jax.jit
    def kept(mask: Mask) -> Any:
        traces.append(hash(mask))
        return keep(mask.aligned(DIMS), DIMS), mask

    values, back = kept(mask)
    np.testing.assert_array_equal(np.broadcast_to(values, (2, 3, 5, 7)), everywhere(mask))
    assert back == jax.tree.map(jnp.asarray, mask)
    changed = jax.tree.map(lambda x: x if x.dtype == bool else x + x.dtype.type(1), mask)
    values, _ = kept(changed)
    np.testing.assert_array_equal(np.broadcast_to(values, (2, 3, 5, 7)), everywhere(changed))
    assert traces == [hash(mask)], "other values compile nothing anew"


def test_masks_pass_through_scan_as_carry_and_as_xs() -> None:
    offsets = np.asarray([-2, 0, 3], np.int32)

    def step(carried: Mask, mask: Mask) -> Any:
        both = carried & mask
        moved = jax.tree.map(lambda x: x + 1, carried)
        return moved, keep(both.aligned(DIMS), DIMS)

    start = masks.Prefix(jnp.int32(4))
    last, kept = jax.lax.scan(step, start, masks.Causal(offsets))
    assert last == start
    assert jax.tree.leaves(last) == [7]
    for index, offset in enumerate(offsets):
        expected = (index > COLUMN - 4) & (offset >= COLUMN - ROW)
        np.testing.assert_array_equal(kept[index], expected[None, None])


def test_masks_pass_through_while_loop() -> None:
    """Grows a prefix until something is kept in the last column."""

    def unseen(mask: Mask) -> Any:
        return ~keep(mask.aligned(DIMS), DIMS)[..., -1].any()

    grown = jax.lax.while_loop(
        unseen,
        lambda mask: jax.tree.map(lambda x: x + 1, mask),
        masks.Prefix(jnp.int32(0)) & ~masks.Causal(jnp.int32(-9)),
    )
    assert [int(x) for x in jax.tree.leaves(grown)] == [7, -2]


def test_vmap_over_a_mask_equals_the_loop() -> None:
    one = Dims((), 3, 5, 7)
    lengths, queries, keys = ints(4), ints(4, 5) // 3, ints(4, 7) // 2

    def kept(mask: Mask) -> Any:
        return keep(mask.aligned(one), one)

    mapped = jax.vmap(kept)(masks.Lengths(lengths, 3) & masks.Segments(queries, keys))
    for index in range(4):
        part = masks.Lengths(np.asarray(lengths[index]), 3)
        np.testing.assert_array_equal(
            mapped[index], kept(part & masks.Segments(queries[index], keys[index]))
        )


# Operands.

SHORT = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


@pytest.mark.parametrize("dtype", [*SHORT, np.int64, np.uint64], ids=lambda x: x.__name__)
def test_lengths_of_every_integer_dtype(dtype: Any) -> None:
    highest = np.iinfo(dtype).max
    lengths = np.asarray([3, highest], dtype)
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        kept = everywhere(masks.Lengths(key=jnp.asarray(lengths)))
        assert (kept == (np.asarray([3, 7])[:, None, None, None] > COLUMN)).all()
        assert (everywhere(masks.Prefix(jnp.asarray(lengths))) == kept).all()
        past = everywhere(masks.Causal(jnp.asarray(lengths)))
        assert (past[0] == (COLUMN <= ROW + 3)).all()
        assert past[1].all()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64], ids=lambda x: x.__name__)
def test_negative_numbers_hide(dtype: Any) -> None:
    lowest = np.asarray([np.iinfo(dtype).min, -1], dtype)
    with jax.enable_x64(dtype == np.int64):
        assert not everywhere(masks.Lengths(key=jnp.asarray(lowest))).any()
        assert not everywhere(masks.Prefix(jnp.asarray(lowest))).any()
        assert not everywhere(masks.Causal(jnp.asarray(lowest)))[0].any()


SHAPES = [(), (7,), (1,), (5, 1), (5, 7), (3, 5, 7), (3, 1, 1), (1, 1, 7), (2, 1, 1, 7)]
SHAPES += [(1, 1, 5, 7), (2, 1, 5, 1), (1, 3, 1, 1), (2, 3, 5, 7), (2, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_broadcasts_from_the_right(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).random(shape) > 0.5
    kept = everywhere(masks.Dense(np.asarray(values)))
    np.testing.assert_array_equal(kept, np.broadcast_to(values, (2, 3, 5, 7)))


# Functions of the user.

OFFSETS = jnp.arange(5)


def test_predicate_takes_arrays_of_every_kind_by_name() -> None:
    mask, _ = TREES["Predicate"]
    start, stop = ints(5)[:, None], ints(2, 7)[:, None, None, :]
    reach, shift = ints(2)[:, None, None, None], ints(3)[:, None, None]
    expected = near(ROW, COLUMN, start=start, stop=stop, reach=reach, shift=shift)
    np.testing.assert_array_equal(everywhere(mask), expected)


@pytest.mark.parametrize("limit", [2, np.int32(2), np.asarray(2), jnp.int32(2)], ids=type)
def test_predicate_takes_numbers_by_name(limit: Any) -> None:
    mask = masks.Predicate(
        lambda row, column, limit: column < row + limit, scalars={"limit": limit}
    )
    np.testing.assert_array_equal(everywhere(mask)[0, 0], COLUMN < ROW + 2)


def test_predicate_refuses_captured_arrays() -> None:
    def captures(row: Any, column: Any) -> Any:
        return column < row + OFFSETS[0]

    hint = r"captures captures an array \(int32\[5\]\).*Pass it as an operand: rows=, columns="
    with pytest.raises(ValueError, match=hint):
        masks.Predicate(captures).aligned(DIMS)


def test_predicate_refuses_captured_tracers() -> None:
    @jax.jit
    def traced(offset: Any) -> Any:
        return everywhere(masks.Predicate(lambda row, column: column < row + offset))

    with pytest.raises(ValueError, match=r"captures an array.*Pass it as an operand"):
        traced(3)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda row, column: (column < row).any(), "is not elementwise"),
        (lambda row, column: (column < row)[:1], "is not elementwise"),
        (lambda row, column: column - row, r"returns int32\[2,3\] for a tile; wanted bool"),
        (lambda row, column: True, "is not elementwise"),
    ],
    ids=["scalar", "shape", "dtype", "constant"],
)
def test_predicate_refuses_what_is_not_elementwise(fn: Callable[..., Any], why: str) -> None:
    with pytest.raises(TypeError, match=r"Predicate\(fn=…\) " + why):
        masks.Predicate(fn).aligned(DIMS)


def test_tile_verdict_decides_what_is_visited() -> None:
    """Called with ends exclusive; a verdict that lies shows that no other is asked."""
    seen = []

    def diagonal(row_begin: Any, row_end: Any, column_begin: Any, column_end: Any) -> Any:
        ends = row_begin, row_end, column_begin, column_end
        if not isinstance(row_begin, jax.core.Tracer):  # it is tried on an abstract grid first
            seen.append([np.ravel(x).tolist() for x in ends])
        return jnp.where(row_begin == column_begin, masks.FULL, masks.EMPTY)

    mask = masks.Predicate(below, tile_verdict=diagonal).aligned(Dims((), 1, 7, 9))
    walk = masks.schedule(mask, masks.Blocks(7, 4), masks.Blocks(9, 4), "rows")
    assert seen == [[[0, 4], [4, 7], [0, 4, 8], [4, 8, 9]]]
    assert np.asarray(walk.count).tolist() == [[[1, 1]]]
    steps = walk.step(jnp.int32(0))
    assert np.asarray(steps.tile).tolist() == [[[0, 1]]]
    assert np.asarray(steps.full).all()


def test_predicate_without_a_verdict_visits_every_tile() -> None:
    mask = masks.Predicate(below).aligned(Dims((), 1, 7, 9))
    walk = masks.schedule(mask, masks.Blocks(7, 4), masks.Blocks(9, 4), "rows")
    assert np.asarray(walk.count).tolist() == [[[3, 3]]]
    assert not any(np.asarray(walk.step(jnp.int32(index)).full).any() for index in range(3))


def test_a_mask_reaches_the_result_from_within_a_loop() -> None:
    """The offset of a decoding step, carried: hashing a tracer would raise."""
    query, key = np.ones((1, 1, 1, 4), np.float32), np.ones((1, 6, 1, 4), np.float32)
    value = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)

    def step(mask: Mask, _: None) -> Any:
        out = flashjax.dot_product_attention(query, key, value, mask=mask)
        return jax.tree.map(lambda x: x + 1, mask), out[0, 0, 0, 0]

    run = functools.partial(jax.lax.scan, step, length=6)
    _, out = jax.jit(run)(masks.Causal(jnp.int32(0)))
    np.testing.assert_allclose(out, np.arange(6) / 2, rtol=1e-6)
