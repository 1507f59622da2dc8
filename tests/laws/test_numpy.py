"""JAX computes what the laws computed with numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from flashjax.masks import schedule
from flashjax.masks.schedule import tiles
from tests.laws.answers import Answers, keep
from tests.laws.strategies import AXES, Array, Drawn, drawn_masks


def assert_same(from_jax: Any, expected: Array) -> None:
    np.testing.assert_array_equal(np.broadcast_to(from_jax, expected.shape), expected)


# Each example is a program of its own to compile.
@settings(max_examples=8)
@given(drawn_masks())
def test_jax_gives_the_same_answers(drawn: Drawn) -> None:
    grid = drawn.grid
    rows, columns = grid.row_blocks, grid.column_blocks

    @jax.jit
    def in_jax(mask: Any) -> Any:
        mask = mask.aligned(grid.dims)
        walks = [schedule(mask, rows, columns, axis) for axis in AXES]
        counts = [tiles(w, *grid.along(axis)) for axis, w in zip(AXES, walks, strict=True)]
        return keep(mask, grid.dims), mask.verdict(rows, columns), walks, counts

    kept, verdict, walks, counts = in_jax(drawn.mask)
    answers = Answers(drawn)
    assert kept.dtype == bool
    assert verdict.dtype == jnp.int8
    assert_same(kept, answers.keep)
    assert_same(verdict, answers.verdict)
    for axis, walk, counted in zip(AXES, walks, counts, strict=True):
        expected = answers.walk(axis)
        assert type(walk) is expected.form
        assert {x.dtype for x in jax.tree.leaves(walk)} == {jnp.dtype(jnp.int32)}
        assert_same(walk.count, expected.count)
        # Per batch member and head on average, as `explain` prints it.
        mean = [expected.count.mean((0, 1)).sum(), expected.marked_full.mean((0, 1)).sum()]
        np.testing.assert_allclose(counted, mean, rtol=1e-6)
