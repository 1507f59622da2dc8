"""A placed mask means on its part of the sequence what the mask means there on the whole."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashjax import masks
from flashjax.structure import Place, replace
from tests.laws.answers import Answers, hold_meaning
from tests.laws.strategies import TERMS, Draw, Drawn, Grid, composed, grids, meaning

PLACEABLE = {name: make for name, make in TERMS.items() if name != "BlockSparse"}
# Offsets are clipped here (structure.POSITION_LIMIT), also after a place was added to them.
FAR = 2**28


def is_near(mask: Any) -> bool:
    """No chunk is counted from an offset that clipping changes."""
    if isinstance(mask, masks.Chunked):
        return bool((np.abs(np.asarray(mask.offset, np.int64)) < FAR).all())
    return all(is_near(part) for part in getattr(mask, "parts", ()))


def compositions(grid: Grid) -> st.SearchStrategy[Drawn]:
    return composed(st.one_of([make(grid) for make in PLACEABLE.values()]))


def with_rows(mask: Any, rows: slice) -> Any:
    """The mask with the row arrays of a call on these rows, which its user would pass."""
    if isinstance(mask, masks.Segments) and mask.key is None:
        mask = replace(mask, key=mask.query)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(mask):
        value, kind = getattr(mask, field.name), field.metadata.get("kind")
        if "nested" in field.metadata:
            changed[field.name] = tuple(with_rows(part, rows) for part in value)
        elif kind == "row":
            named = isinstance(value, dict)
            cut = {n: x[..., rows] for n, x in value.items()} if named else value[..., rows]
            changed[field.name] = cut
        elif kind == "tile" and value.shape[-2] != 1:
            changed[field.name] = value[..., rows, :]
    return replace(mask, **changed)


@st.composite
def parts(draw: Draw, name: str) -> Drawn:
    """A mask on a part of its square; the part may begin before the first column, or end late."""
    whole = draw(grids(square=True).flatmap(PLACEABLE.get(name, compositions)))
    assume(is_near(whole.mask))
    grid, size = whole.grid, whole.grid.rows
    row = draw(st.integers(0, size - 1))
    rows = slice(row, draw(st.integers(row + 1, size)))
    column = draw(st.integers(-9, size - 1))
    end = draw(st.integers(column + 1, size + 9))
    part = grid._replace(rows=rows.stop - row, columns=end - column)
    begin: tuple[Any, Any] = (row, column)
    # From a known column 0 on, arrays must have the call's columns: nothing is cut in silence.
    if (column == 0 and end != size) or draw(st.booleans()):
        begin = (jnp.int32(row), jnp.int32(column))
    mask = with_rows(whole.mask, rows).placed(Place(*begin, part.columns))
    # What lies outside the sequence is the caller's to hide.
    mask = mask & ~masks.Prefix(max(-column, 0)) & masks.Lengths(key=max(size - column, 0))
    inside = [(0, 0)] * 3 + [(9, 9)]
    dense = np.pad(whole.dense[:, :, rows], inside)[..., 9 + column : 9 + end]
    return meaning(part, mask, dense)


@pytest.mark.parametrize("name", [*PLACEABLE, "composition"])
@settings(max_examples=10)
@given(st.data())
def test_a_part_means_what_the_whole_means_there(name: str, data: st.DataObject) -> None:
    drawn = data.draw(parts(name))
    hold_meaning(Answers(drawn), drawn)


def test_block_sparse_says_why_it_cannot() -> None:
    mask = masks.BlockSparse(np.ones((2, 2), bool))
    with pytest.raises(NotImplementedError, match=r"BlockSparse.*bool array instead"):
        mask.placed(Place(0, 5, 10))


def test_segments_want_both_sides() -> None:
    with pytest.raises(ValueError, match=r"Segments\(key=…\) is None while decoding"):
        masks.Segments(np.zeros(4, np.int32)).placed(Place(0, 5, 10))
