"""What kernels read of a schedule: the same tiles, PARTIAL ones apart from FULL ones."""

import importlib
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashjax.kernels.visits import count_of, tile_at, visits
from flashjax.masks import Lists, schedule
from flashjax.masks.schedule import hides
from tests.laws.answers import _Numpy, numpy_for_jax
from tests.laws.strategies import AXES, COMPOSITIONS, TERMS, Axis, Drawn, drawn_masks, term

VISITS = importlib.import_module("flashjax.kernels.visits")


def read(found: Any, block: int) -> tuple[list[int], list[int]]:
    """One block's PARTIAL and FULL tiles, of batch member 0 and head 0, read as a kernel does."""
    ranges = found.ranges[0, 0, block if found.ranges.shape[2] > 1 else 0]
    pairs = [(int(begin), int(end)) for begin, end in ranges]
    parts = []
    for part in (pairs[: found.partial], pairs[found.partial :]):
        tiles = [int(tile_at(part, i)) for i in range(count_of(part))] if part else []
        if found.tiles is not None:
            row = found.tiles[0, 0, block if found.tiles.shape[2] > 1 else 0]
            tiles = [int(row[i]) for i in tiles]
        parts.append(tiles)
    return parts[0], parts[1]


def stepped(walk: Any, block: int) -> tuple[set[int], set[int]]:
    """The same by `Schedule.step`, one tile after another."""
    at = importlib.import_module("flashjax.masks.schedule").at(walk, block)
    steps = [at.step(i) for i in range(int(at.count[0, 0]))]
    tiles = [(int(s.tile[0, 0]), bool(s.full[0, 0])) for s in steps]
    return {t for t, full in tiles if not full}, {t for t, full in tiles if full}


def hold(drawn: Drawn, axis: Axis) -> None:
    grid = drawn.grid
    with numpy_for_jax(), mock.patch.object(VISITS, "jnp", _Numpy()):
        mask = jax.tree.map(np.asarray, drawn.mask.aligned(grid.dims))
        walk = schedule(mask, grid.row_blocks, grid.column_blocks, axis)
        parted, masked = visits(walk), visits(walk, masked=True)
        for block in range(grid.along(axis)[0].count):
            partial, full = stepped(walk, block)
            found = read(parted, block)
            assert [len(x) for x in found] == [len(partial), len(full)]
            assert (set(found[0]), set(found[1])) == (partial, full)
            everything, none = read(masked, block)
            assert (sorted(everything), none) == (sorted(partial | full), [])


@pytest.mark.parametrize("name", [*TERMS, *COMPOSITIONS])
@settings(max_examples=15)
@given(st.data())
def test_kernels_visit_what_the_schedule_says(name: str, data: st.DataObject) -> None:
    drawn = data.draw(term(name))
    for axis in AXES:
        hold(drawn, axis)


def test_lists_are_parted_too() -> None:
    walk = Lists(np.array([[[3]]]), np.array([[[[1, 4, 7, 2]]]]))  # tiles 0 FULL, 2, 3 FULL
    with mock.patch.object(VISITS, "jnp", _Numpy()):
        assert read(visits(walk), 0) == ([2], [0, 3])


@settings(max_examples=60)
@given(drawn_masks())
def test_what_is_said_to_hide_nothing_hides_nothing(drawn: Drawn) -> None:
    """`hides` may be wrong in one direction alone: it may say True."""
    grid = drawn.grid
    with numpy_for_jax():
        mask = jax.tree.map(np.asarray, drawn.mask.aligned(grid.dims))
        rows, columns = hides(mask, grid.rows, grid.columns)
    assert rows or drawn.dense.any(-1).all()
    assert columns or drawn.dense.any(-2).all()


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda m: m.Causal(), (8, 8), (False, False)),
        (lambda m: m.Causal(), (5, 8), (False, True)),
        (lambda m: m.Causal(offset=-1), (8, 8), (True, True)),
        (lambda m: m.Causal(align="bottom_right"), (5, 8), (False, False)),
        (lambda m: m.Window(2, 0) & m.Causal(), (8, 8), (False, False)),
        (lambda m: m.Window(1, 1), (4, 9), (False, True)),
    ],
)
def test_hides_is_exact_for_causal_and_windows(make: Any, shape: Any, expected: Any) -> None:
    from flashjax import masks
    from flashjax.structure import Dims

    mask = make(masks).aligned(Dims((), 1, *shape))
    assert hides(mask, *shape) == expected
