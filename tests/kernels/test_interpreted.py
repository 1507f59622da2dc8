"""The Triton kernels in Pallas's interpreter: small siblings of what runs on a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flashjax import plan
from tests.features import build
from tests.inputs import (
    BF16,
    F16,
    F32,
    INTERPRETED,
    Shape,
    check,
    interpreted,
    run,
    same_bits,
    small_tiles,
    step_of,
)
from tests.test_features import ALONE, made, with_hidden

# Among them every kind of mask and of operand, each head dim's form (one power of two, two,
# a part of one), grouped heads, ragged ends, and each pass of the backward.
TOGETHER: dict[str, tuple[tuple[str, ...], Shape, Any]] = {
    "causal, two parts of a head dim": (("is_causal",), Shape(1, 48, 48, 2, 1, 24, 40), BF16),
    "documents": (
        ("segments", "is_causal", "dropout", "score_mod"), Shape(2, 50, 50, 2, 2, 12, 8), F32,
    ),
    "arrays": (
        ("lengths", "boolean_per_head", "causal_offset_per_batch", "bias (N,1,S)", "traced_scale"),
        Shape(2, 34, 53, 4, 2, 16, 16), F32,
    ),
    "two ranges": (
        ("sink_tokens_and_window", "bias (1,N,T,S)", "sinks"), Shape(2, 40, 70, 2, 1, 16, 8), F16,
    ),
    "lists": (
        ("block_sparse", "intervals", "alibi", "soft_cap"), Shape(1, 66, 75, 2, 2, 8, 8), F32,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(plan.BACKENDS, INTERPRETED, interpreted)
    yield
    plan.plan.cache_clear()


@pytest.mark.parametrize("name", TOGETHER)
def test_features_together_over_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 16, 32)
    names, shape, dtype = TOGETHER[name]
    check(INTERPRETED, build(shape, names, dtype))


def test_what_is_hidden_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits with NaN in rows and columns that take no part."""
    small_tiles(monkeypatch, 16, 32)
    # Of the first member 18 rows and 15 columns take part: tiles are cut in both directions.
    clean = build(Shape(2, 34, 40, 2, 1, 16, 16), ("lengths",), seed=1)
    step = step_of(INTERPRETED, clean)
    expected = run(INTERPRETED, clean, step)
    clean.judge.hold(expected)
    for name, x in run(INTERPRETED, with_hidden(clean, np.nan), step).items():
        assert same_bits(x, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *ALONE])
def test_feature_over_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 16, 32)
    shape = "square tiles" if name == "segments" else "tiles"
    check(INTERPRETED, made(shape, () if name == "plain" else (name,)))
