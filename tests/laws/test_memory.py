"""A schedule with a closed form costs O(T + S) memory: no T × S array, and none of all tiles."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from flashjax import masks
from flashjax.masks import Blocks, Mask, Ranges, schedule
from flashjax.structure import Dims
from tests.laws.strategies import AXES, Axis

TOKENS, TILE = 2**20, 128
# An int32 for every row and column, and no more: a byte for each tile would be eight times that.
LIMIT = 4 * (TOKENS + TOKENS)
assert (TOKENS // TILE) ** 2 == 8 * LIMIT

SCALAR = jax.ShapeDtypeStruct((), jnp.int32)
VECTOR = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)

CLOSED = {
    "Causal": masks.Causal(),
    "Causal, traced offset": masks.Causal(SCALAR),
    "Window": masks.Window(4096, 0),
    "Lengths": masks.Lengths(SCALAR, SCALAR),
    "Prefix": masks.Prefix(SCALAR),
    "Chunked": masks.Chunked(8192),
    "Segments": masks.Segments(VECTOR),
    "Intervals": masks.Intervals(VECTOR, VECTOR),
}
CAUSAL = masks.Causal()
COMPOSED = {f"{name} and causal": term & CAUSAL for name, term in CLOSED.items()} | {
    "documents in intervals": CLOSED["Segments"] & CLOSED["Intervals"] & CAUSAL,
    "sinks and window": (masks.Prefix(4) | masks.Window(4096, 0)) & CAUSAL,
    "prefix LM in documents": (CLOSED["Prefix"] | CAUSAL) & CLOSED["Segments"],
    "hidden intervals": ~CLOSED["Intervals"],
    "everything": masks.Lengths(),
}


def arrays_in(jaxpr: Any) -> Iterator[Any]:
    """The abstract values of all variables, those of inner programs included."""
    yield from (v.aval for v in (*jaxpr.invars, *jaxpr.constvars))
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from arrays_in(inner)


def largest(mask: Mask, axis: Axis) -> tuple[int, Any]:
    """Bytes of the largest array that making the schedule takes, and the schedule."""

    def make(mask: Mask) -> Any:
        aligned = mask.aligned(Dims((1,), 1, TOKENS, TOKENS))
        return schedule(aligned, Blocks(TOKENS, TILE), Blocks(TOKENS, TILE), axis)

    closed, walk = jax.make_jaxpr(make, return_shape=True)(mask)
    sizes = [array.size * array.dtype.itemsize for array in arrays_in(closed.jaxpr)]
    return max(sizes), walk


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", CLOSED | COMPOSED)
def test_a_million_tokens_take_memory_of_a_million(name: str, axis: Axis) -> None:
    size, walk = largest((CLOSED | COMPOSED)[name], axis)
    assert isinstance(walk, Ranges)
    assert size <= LIMIT


def test_the_measure_sees_what_verdicts_take() -> None:
    """Three ranges are too many for the closed form, and a verdict of each tile is made."""
    size, _ = largest(masks.Prefix(4) | masks.Window(9, 0) | masks.Chunked(64), "rows")
    assert size > LIMIT
