"""The schedule visits every tile that holds something, once, in order, and marks FULL what is."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashjax.masks import Lists, Ranges, bounds
from tests.laws.answers import Answers, Walk, hold_schedules, truth_along
from tests.laws.closed_forms import (
    closed_forms,
    conjunctions,
    disjunctions,
    exact_conjunctions,
    negations,
)
from tests.laws.strategies import AXES, COMPOSITIONS, TERMS, Axis, Drawn, drawn_masks, grids, term


@pytest.mark.parametrize("name", [*TERMS, *COMPOSITIONS])
@settings(max_examples=50)
@given(st.data())
def test_every_tile_that_holds_something_is_visited_once(name: str, data: st.DataObject) -> None:
    drawn = data.draw(term(name))
    hold_schedules(Answers(drawn), drawn)


@pytest.mark.parametrize("name", ["Segments", "Intervals"])
@settings(max_examples=50)
@given(st.data())
def test_where_comparing_all_takes_too_much_memory_ranges_are_searched(
    name: str, data: st.DataObject
) -> None:
    drawn = data.draw(term(name))
    with mock.patch.object(bounds, "HULL_LIMIT", 0):
        hold_schedules(Answers(drawn), drawn)


@settings(max_examples=50)
@given(drawn_masks())
def test_both_axes_visit_the_same_tiles(drawn: Drawn) -> None:
    """Those of lists; the hulls of ranges differ by axis where ids or intervals are unsorted."""
    answers = Answers(drawn)
    rows, columns = answers.walk("rows", "lists"), answers.walk("columns", "lists")
    assert rows.form is columns.form is Lists
    np.testing.assert_array_equal(rows.visits, columns.visits.swapaxes(-1, -2))


def visited(axis: Axis, walk: Walk, drawn: Drawn) -> None:
    some, _ = truth_along(axis, drawn)
    np.testing.assert_array_equal(walk.visits == 1, some, f"axis={axis}: visited")


def full(axis: Axis, walk: Walk, drawn: Drawn) -> None:
    _, may_be_full = truth_along(axis, drawn)
    np.testing.assert_array_equal(walk.marked_full, may_be_full, f"axis={axis}: FULL")


def both(axis: Axis, walk: Walk, drawn: Drawn) -> None:
    visited(axis, walk, drawn)
    full(axis, walk, drawn)


EXACT = {
    "terms": (closed_forms, both),
    "their negations": (negations, both),
    "conjunctions": (exact_conjunctions, both),
    # Two parts may meet a tile in different elements; but FULL in both is FULL.
    "any conjunctions": (conjunctions, full),
    # Two parts may fill a tile together; but what either sees has to be visited.
    "any disjunctions": (disjunctions, visited),
}


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=60)
@given(st.data())
def test_closed_forms_visit_and_mark_exactly(kind: str, data: st.DataObject) -> None:
    draws, matches = EXACT[kind]
    drawn = data.draw(grids().flatmap(draws))
    for axis in AXES:
        walk = Answers(drawn).walk(axis)
        assert walk.form is Ranges
        matches(axis, walk, drawn)
