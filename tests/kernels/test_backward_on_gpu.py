"""Both passes at head dim 128 and beyond, on a GPU: lengths, large scores, the same bits again."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.features import build, far_from_0
from tests.inputs import (
    BF16,
    IMPLEMENTATIONS,
    Case,
    Shape,
    arrays_of,
    check,
    run,
    same_bits,
    step_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("implementation", IMPLEMENTATIONS)]
CAUSAL = pytest.mark.parametrize("names", [(), ("is_causal",)], ids=["full", "causal"])


@CAUSAL
@pytest.mark.parametrize("length", [1, 2, 5, 17, 113, 577, 1023])
def test_any_length(length: int, names: tuple[str, ...], implementation: Any) -> None:
    heads = 2 if length < 1000 else 1
    check(implementation, build(Shape(1, length, length, heads, 1, 128, 128), names, BF16))


@CAUSAL
def test_rows_among_thousands(names: tuple[str, ...], implementation: Any) -> None:
    """One row of 32 has a gradient: float64 has to do with these alone, and with all columns."""
    made = build(Shape(1, 4224, 4224, 1, 1, 128, 128), names, BF16)
    rows = np.arange(0, 4224, 32) + np.random.default_rng(0).integers(0, 32, 132)
    rest = np.delete(np.arange(4224), rows)
    d_out, d_lse = (x.copy() for x in made.cotangents)
    d_out[:, rest], d_lse[:, rest] = 0, 0
    keep = made.options.get("keep")
    options = {} if keep is None else {"keep": keep[:, :, rows]}
    part = Case(made.query[:, rows], made.key, made.value, options=options)
    part.__dict__["cotangents"] = d_out[:, rows], d_lse[:, rows]
    made.__dict__["cotangents"] = d_out, d_lse
    found = run(implementation, made)
    assert (found["query"][:, rest] == 0).all()
    part.judge.hold(found | {name: found[name][:, rows] for name in ("out", "lse", "query")})


@pytest.mark.parametrize(
    "names",
    [(), ("is_causal",), ("bottom_right",), ("bottom_right", "deterministic"), ("lengths",)],
    ids="+".join,
)
@pytest.mark.parametrize(("rows", "columns"), [(300, 1000), (1000, 300)])
def test_rows_and_columns_differ(
    rows: int, columns: int, names: tuple[str, ...], implementation: Any
) -> None:
    """1000 rows of a causal mask to the bottom right begin with 700 that see nothing; of lengths,
    a whole batch member does."""
    members = 2 if "lengths" in names else 1
    check(implementation, build(Shape(members, rows, columns, 2, 1, 128, 128), names, BF16))


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_scores_far_from_0(width: int, deterministic: bool, implementation: Any) -> None:
    arguments = {"deterministic_backward": True} if deterministic else {}
    check(implementation, far_from_0(Shape(1, 400, 600, 1, 1, width, width), BF16, **arguments))


@pytest.mark.parametrize("names", [(), ("is_causal",), ("segments", "is_causal")], ids="+".join)
@pytest.mark.parametrize("width", [128, 256])
def test_the_same_bits_twenty_times(
    width: int, names: tuple[str, ...], implementation: Any
) -> None:
    """Many blocks of columns add to each row."""
    made = build(Shape(2, 1500, 1500, 8, 4, width, width), (*names, "deterministic"), BF16)
    step = step_of(implementation, made)
    inputs = made.query, made.key, made.value, dict(made.operands)
    arrays = arrays_of(made.arguments)
    first, *others = (step(inputs, arrays, made.cotangents) for _ in range(21))
    for again in others:
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert same_bits(x, y)
