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
    attention,
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


def test_grouped_heads_take_no_memory_of_all_heads(implementation: Any) -> None:
    """Few rows see many columns: K and V of N heads, or scores, would be most of the memory."""
    if implementation == "reference":
        pytest.skip("dense")
    shape = Shape(1, 256, 16384, 64, 8, 128, 128)
    query = jax.ShapeDtypeStruct((shape.B, shape.T, shape.N, shape.H), BF16)
    key = jax.ShapeDtypeStruct((shape.B, shape.S, shape.K, shape.H), BF16)

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(attention(implementation, return_residual=False), q, k, v)
        return out, pull(d_out)

    plan = jax.jit(both).lower(query, key, key, query).compile().memory_analysis()
    assert plan is not None
    scores = 2 * shape.N * shape.T * shape.S
    assert scores == 2 * 2 * key.size * shape.N // shape.K  # K and V of N heads
    # The chunked path keeps sums of dK and dV in float32, twice.
    assert plan.temp_size_in_bytes < (scores if implementation == "xla" else scores // 4)


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
