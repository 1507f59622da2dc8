"""The patterns of FlashMask (arXiv:2410.01359, Fig. 1) said in Intervals, against loops in words.

Every column has a list of the rows that see it; `sees(row, column)` says the same element by
element. Sequences are packed as [document, document, …], or [question, answer, answer, …].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashjax import masks
from flashjax.masks import Mask
from tests.laws.answers import Answers, hold_schedules, truth_along
from tests.laws.strategies import AXES, Array, Drawn, Grid

PARTS = (11, 23, 5, 21)
LENGTH = sum(PARTS)
GRID = Grid((), 1, LENGTH, LENGTH, 8, 16)
POSITION = np.arange(LENGTH)
STARTS = np.repeat(np.cumsum((0, *PARTS[:-1])), PARTS)
ENDS = np.repeat(np.cumsum(PARTS), PARTS)
PART = np.repeat(np.arange(len(PARTS)), PARTS)
LAST = np.full(LENGTH, LENGTH)
WIDTH, GLOBAL, PREFIX = 7, 3, 4
# Rows from which on a column is evicted from the cache.
EVICTED = POSITION + np.random.default_rng(0).integers(1, 30, LENGTH)

SEEN = POSITION % 5 != 0

Pattern = tuple[Mask, Callable[[int, int], Any]]


def intervals(begin: Any, end: Any) -> Mask:
    return masks.Intervals(np.asarray(begin, np.int32), np.asarray(end, np.int32))


PATTERNS: dict[str, Pattern] = {
    "causal": (intervals(POSITION, LAST), lambda i, j: j <= i),
    "sliding window": (
        intervals(POSITION, POSITION + WIDTH),
        lambda i, j: i - WIDTH < j <= i,
    ),
    "document": (intervals(STARTS, ENDS), lambda i, j: PART[i] == PART[j]),
    "causal document": (
        intervals(STARTS, ENDS) & masks.Causal(),
        lambda i, j: PART[i] == PART[j] and j <= i,
    ),
    "causal document in one term": (
        intervals(POSITION, ENDS),
        lambda i, j: PART[i] == PART[j] and j <= i,
    ),
    "prefix": (
        intervals(np.where(POSITION < PREFIX, 0, POSITION), LAST),
        lambda i, j: j < PREFIX or j <= i,
    ),
    "prefix in each document": (
        intervals(np.where(POSITION - STARTS < PREFIX, STARTS, POSITION), ENDS),
        lambda i, j: PART[i] == PART[j] and (j - STARTS[j] < PREFIX or j <= i),
    ),
    "shared question with several answers": (
        intervals(POSITION, np.where(PART == 0, LENGTH, ENDS)),
        lambda i, j: j <= i and PART[j] in (0, PART[i]),
    ),
    "global and sliding window": (
        intervals(POSITION, np.where(POSITION < GLOBAL, LENGTH, POSITION + WIDTH))
        | intervals(0 * LAST, 0 * LAST + GLOBAL),
        lambda i, j: i < GLOBAL or (j <= i and (j < GLOBAL or i - j < WIDTH)),
    ),
    "random eviction": (intervals(POSITION, EVICTED), lambda i, j: j <= i < EVICTED[j]),
    "hidden rows": (
        ~intervals(POSITION + 9, POSITION + 20) & masks.Causal(),
        lambda i, j: j <= i and not j + 9 <= i < j + 20,
    ),
    "columns that nobody sees": (
        intervals(POSITION * SEEN, (POSITION + WIDTH) * SEEN),
        lambda i, j: i - WIDTH < j <= i and SEEN[j],
    ),
}
# Where the rows that see a block of columns leave no gap, no tile is visited in vain.
WITHOUT_GAPS = (
    "causal",
    "sliding window",
    "document",
    "causal document in one term",
    "prefix",
    "columns that nobody sees",
)


def by_loop(sees: Callable[[int, int], Any]) -> Array:
    return np.asarray([[bool(sees(i, j)) for j in range(LENGTH)] for i in range(LENGTH)])


def drawn(name: str) -> Drawn:
    mask, sees = PATTERNS[name]
    return Drawn(GRID, mask, np.broadcast_to(by_loop(sees), GRID.logits))


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_means_what_the_words_say(name: str) -> None:
    pattern = drawn(name)
    answers = Answers(pattern)
    np.testing.assert_array_equal(answers.keep, pattern.dense)
    hold_schedules(answers, pattern)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", WITHOUT_GAPS)
def test_pattern_visits_what_it_needs(name: str, axis: Any) -> None:
    pattern = drawn(name)
    walk = Answers(pattern).walk(axis)
    some, full = truth_along(axis, pattern)
    np.testing.assert_array_equal(walk.visits == 1, some)
    np.testing.assert_array_equal(walk.marked_full, full)
