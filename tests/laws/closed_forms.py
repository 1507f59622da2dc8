"""Masks of which the schedule is promised to be exact: nothing visited or masked in vain."""

import numpy as np
from hypothesis import strategies as st

from flashjax import masks
from tests.laws.strategies import (
    SIZES,
    Draw,
    Drawn,
    Grid,
    causal,
    chunked,
    generators,
    lengths,
    meaning,
    pairs_of,
    prefix,
    rank4,
    scalars,
    segment_ids,
    window,
)


@st.composite
def sorted_segments(draw: Draw, grid: Grid) -> Drawn:
    """Packed documents: ascending, the same ids on both sides, padding at the ends only."""
    r = draw(generators())
    b = draw(st.sampled_from([(), grid.batch]))
    if grid.rows == grid.columns:
        query = key = segment_ids(r, (*b, grid.rows), "ascending")
    else:
        ids = np.arange(r.integers(1, min(grid.rows, grid.columns, 6) + 1))
        query, key = (
            np.sort(np.concatenate([ids, r.choice(ids, length - len(ids))]))
            for length in (grid.rows, grid.columns)
        )
    q, k = rank4(grid, query, "rows"), rank4(grid, key, "columns")
    term = masks.Segments(query.astype(np.int32), key.astype(np.int32))
    return meaning(grid, term, (q == k) & (q >= 0))


def closed_forms(grid: Grid) -> st.SearchStrategy[Drawn]:
    """The terms whose closed form misses nothing and visits nothing in vain."""
    makers = (causal, window, lengths, prefix, chunked, sorted_segments)
    return st.one_of([make(grid) for make in makers])


@st.composite
def exact_conjunctions(draw: Draw, grid: Grid) -> Drawn:
    """Ands in which a tile that meets every part holds an element of the whole.

    Not so for any two: rows that a length cuts off may be the only ones that a causal part sees.
    """
    row, column = grid.positions

    def diagonal(offset: int = 0) -> Drawn:
        return meaning(grid, masks.Causal(offset), column <= row + offset)

    def causal_window() -> Drawn:
        offset = draw(st.integers(-10, 10))
        reach = draw(st.integers(max(0, -offset), 40))
        return diagonal(offset) & meaning(grid, masks.Window(reach, None), column >= row - reach)

    def causal_chunks() -> Drawn:
        size = draw(st.integers(1, 40))
        return diagonal() & meaning(grid, masks.Chunked(size), row // size == column // size)

    def causal_documents() -> Drawn:
        same_ids = grid._replace(columns=grid.rows)
        documents = draw(sorted_segments(same_ids))
        row, column = same_ids.positions
        return meaning(same_ids, masks.Causal(), column <= row) & documents

    def causal_cut() -> Drawn:
        length, wide = draw(scalars(grid, SIZES))
        term = draw(st.sampled_from([masks.Prefix(length), masks.Lengths(None, length)]))
        return draw(causal(grid)) & meaning(grid, term, (column < wide) & (row >= 0))

    makers = [causal_window, causal_chunks, causal_documents, causal_cut]
    return draw(st.sampled_from(makers))()


def negations(grid: Grid) -> st.SearchStrategy[Drawn]:
    return closed_forms(grid).map(lambda drawn: ~drawn)


def conjunctions(grid: Grid) -> st.SearchStrategy[Drawn]:
    return pairs_of(closed_forms, grid).map(lambda pair: pair[0] & pair[1])


def disjunctions(grid: Grid) -> st.SearchStrategy[Drawn]:
    return pairs_of(closed_forms, grid).map(lambda pair: pair[0] | pair[1])
