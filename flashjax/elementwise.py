"""Checks of the functions that users bring for masks and scores, on an abstract tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from flashjax.structure import (
    POSITION_LIMIT,
    Dims,
    Place,
    Structure,
    clipped,
    describe,
    moved,
    replace,
)


class UserFunction(Structure):
    """What a structure with a user's function shares: its named arrays, and where its rows and
    columns lie. The fields themselves stand in the structures."""

    rows: Any
    columns: Any
    scalars: Any
    heads: Any
    row_offset: Any
    column_offset: Any

    def _named(self) -> dict[str, Any]:
        return {**self.rows, **self.columns, **self.scalars, **self.heads}

    def placed(self, place: Place) -> Self:
        return replace(
            super().placed(place),
            row_offset=moved(self.row_offset, place.row),
            column_offset=moved(self.column_offset, place.column),
        )

    def aligned(self, dims: Dims) -> Self:
        new = super().aligned(dims)
        return replace(
            new,
            row_offset=clipped(new.row_offset, -POSITION_LIMIT, POSITION_LIMIT),
            column_offset=clipped(new.column_offset, -POSITION_LIMIT, POSITION_LIMIT),
        )


# A tile that no transposition maps to itself: what is not elementwise shows in its shapes.
_TRIAL = (2, 3)
_ACROSS = ("cum", "reduce_", "arg", "sort", "rev", "dot_general", "conv_", "gather", "scatter")


def trial(dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract tile on which a user's function is tried."""
    return jax.ShapeDtypeStruct(_TRIAL, dtype)


def check_function(
    where: str, fn: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> jax.ShapeDtypeStruct:
    """Tries a user's elementwise function on an abstract tile; returns what it gives.

    Refuses functions that fail, capture arrays, or look beyond one element.
    """
    tiles = {name: trial(jnp.result_type(x)) for name, x in named.items()}
    try:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args, **tiles)
    except Exception as error:
        positions = "row, column" if len(args) == 2 else "score, row, column, batch, head"
        raise TypeError(
            f"{where} failed on a tile: {type(error).__name__}: {error}\nIt is called as "
            f"fn({', '.join([positions, *tiles])}), the names by keyword, and must be elementwise "
            "jnp: jnp.where instead of if."
        ) from error
    for const in closed.consts:
        if isinstance(const, jax.core.Tracer) or getattr(const, "ndim", 0) > 0:
            raise ValueError(
                f"{where}: {describe(fn)} captures an array ({describe(const)}); a kernel cannot "
                "see it. Pass it as an operand: rows=, columns=, scalars= or heads={name: array}, "
                "and take it as a keyword argument of the function."
            )
    across = _looks_across(closed.jaxpr)
    stacks = (across or "").startswith(("stack", "concatenate"))
    if across is not None or getattr(out, "shape", None) != _TRIAL:
        raise TypeError(
            f"{where} is not elementwise: on a tile of shape {_TRIAL} it "
            + (f"uses {across}" if across else f"returns {describe(out)}")
            + (" (jnp.select stacks its cases: write jnp.where in jnp.where)" if stacks else "")
            + ". It sees one tile at a time, of any size; compute each element from its own "
            "row, column and operands."
        )
    return out


def check_tile_verdict(where: str, fn: Callable[..., Any]) -> None:
    """Tries a user's verdict on an abstract grid of 2 × 3 tiles."""
    ends = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1), (2, 1), (1, 3), (1, 3))]
    try:
        out = jax.eval_shape(lambda *ends: jnp.asarray(fn(*ends)), *ends)
    except Exception as error:
        raise TypeError(
            f"{where} failed on 2 × 3 tiles: {type(error).__name__}: {error}\nIt is called as "
            "fn(row_begin, row_end, column_begin, column_end) on arrays and must be elementwise "
            "jnp: jnp.where instead of if."
        ) from error
    if not jnp.issubdtype(out.dtype, jnp.integer):
        raise TypeError(
            f"{where} returns dtype {out.dtype}; wanted masks.EMPTY, masks.PARTIAL or masks.FULL, "
            "which are integers."
        )


def _looks_across(jaxpr: Any) -> str | None:
    """The first primitive that mixes elements, or None."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(_ACROSS) and name != "reduce_precision":
            return str(name)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found = _looks_across(inner) if hasattr(inner, "eqns") else None
            if found is not None:
                return found
        shapes = {getattr(v.aval, "shape", ()) for v in equation.outvars}
        if not shapes <= {(), _TRIAL}:
            return f"{name} of shape {max(shapes)}"
    return None


def check_named(self: Structure, *groups: str) -> None:
    """Each group is a dict of arrays that a user's function takes by keyword; no name twice."""
    seen: dict[str, str] = {}
    for group in groups:
        named = getattr(self, group)
        if not isinstance(named, dict):
            raise TypeError(
                f"{type(self).__name__}({group}=…) is a {type(named).__name__}; wanted a dict of "
                "named arrays."
            )
        for name in named:
            if name in seen:
                raise ValueError(
                    f"{type(self).__name__} has {name!r} in {seen[name]}= and in {group}=; wanted "
                    "each name once. Rename one."
                )
            seen[name] = group
