"""keep says what the term means, verdict promises no more than that, and &, |, ~ obey logic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashjax.masks import FULL
from tests.laws.answers import Answers, hold_meaning
from tests.laws.strategies import (
    COMPOSITIONS,
    TERMS,
    Drawn,
    compositions,
    drawn_masks,
    grids,
    pairs_of,
    term,
)

NAMES = (*TERMS, *COMPOSITIONS)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(st.data())
def test_keep_and_verdict_agree_with_the_definition(name: str, data: st.DataObject) -> None:
    drawn = data.draw(term(name))
    hold_meaning(Answers(drawn), drawn)


@settings(max_examples=50)
@given(pairs_of(compositions))
def test_and_is_the_minimum_or_the_maximum_not_the_reversal(pair: tuple[Drawn, Drawn]) -> None:
    a, b = pair
    of_a, of_b = Answers(a).verdict, Answers(b).verdict
    np.testing.assert_array_equal(Answers(a & b).verdict, np.minimum(of_a, of_b))
    np.testing.assert_array_equal(Answers(a | b).verdict, np.maximum(of_a, of_b))
    np.testing.assert_array_equal(Answers(~a).verdict, FULL - of_a)


@settings(max_examples=50)
@given(pairs_of(compositions))
def test_de_morgan(pair: tuple[Drawn, Drawn]) -> None:
    a, b = pair
    for left, right in ((~(a & b), ~a | ~b), (~(a | b), ~a & ~b)):
        one, other = Answers(left), Answers(right)
        np.testing.assert_array_equal(one.keep, other.keep)
        np.testing.assert_array_equal(one.verdict, other.verdict)


@settings(max_examples=50)
@given(drawn_masks())
def test_two_negations_cancel(drawn: Drawn) -> None:
    once, thrice = Answers(drawn), Answers(~~drawn)
    np.testing.assert_array_equal(once.keep, thrice.keep)
    np.testing.assert_array_equal(once.verdict, thrice.verdict)


@settings(max_examples=50)
@given(grids().flatmap(lambda grid: st.tuples(*[compositions(grid)] * 3)))
def test_order_and_grouping_do_not_matter(three: tuple[Drawn, Drawn, Drawn]) -> None:
    a, b, c = three
    for left, right in (((a & b) & c, c & (b & a)), ((a | b) | c, c | (b | a))):
        one, other = Answers(left), Answers(right)
        np.testing.assert_array_equal(one.keep, other.keep)
        np.testing.assert_array_equal(one.verdict, other.verdict)
