"""What masks refuse: every message names the argument, what came and what was wanted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax.masks
from flashjax.structure import Dims

# The type checker would refuse as well.
masks: Any = flashjax.masks

DIMS = Dims((2,), 3, 5, 7)
IDS = np.zeros(5, np.int32)
FLOATS = np.zeros(7, np.float32)
BOOLS = np.ones((5, 7), bool)


def fn(row: Any, column: Any) -> Any:
    return column < row


# What is wrong, the exception, and what its message has to say.
Refusal = tuple[Callable[[], Any], type[Exception], str]

WHEN_MADE: dict[str, Refusal] = {
    "Causal offset 1.5": (
        lambda: masks.Causal(1.5),
        TypeError,
        r"Causal\(offset=…\) is 1.5; wanted an integer or an integer array",
    ),
    "Causal offset float32": (
        lambda: masks.Causal(jnp.float32(1)),
        TypeError,
        r"Causal\(offset=…\) has dtype float32; wanted an integer dtype",
    ),
    "Causal offset str": (
        lambda: masks.Causal("left"),
        TypeError,
        r"Causal\(offset=…\) is a str; wanted a number or an array",
    ),
    "Causal offset None": (lambda: masks.Causal(None), TypeError, r"Causal\(offset=…\) is None"),
    "Causal align": (
        lambda: masks.Causal(align="left"),
        ValueError,
        r"Causal\(align=…\) is 'left'; wanted 'top_left' or 'bottom_right'",
    ),
    "Window left −1": (
        lambda: masks.Window(-1, 0),
        ValueError,
        r"Window\(left=…\) is -1; wanted 0 or more, or None",
    ),
    "Window right 1.0": (
        lambda: masks.Window(0, 1.0),
        TypeError,
        r"Window\(right=…\) is 1.0; wanted a Python int or None",
    ),
    "Window right array": (
        lambda: masks.Window(0, jnp.int32(2)),
        TypeError,
        r"Window\(right=…\) is .*; wanted a Python int or None.*masks.Predicate with scalars=",
    ),
    "Window offset": (
        lambda: masks.Window(0, 0, 0.5),
        TypeError,
        r"Window\(offset=…\) is 0.5; wanted an integer",
    ),
    "Lengths key float": (
        lambda: masks.Lengths(key=FLOATS[:2]),
        TypeError,
        r"Lengths\(key=…\) has dtype float32; wanted an integer dtype. Cast it",
    ),
    "Lengths query bool": (
        lambda: masks.Lengths(np.asarray([True, False])),
        TypeError,
        r"Lengths\(query=…\) has dtype bool; wanted an integer dtype",
    ),
    "Prefix None": (lambda: masks.Prefix(None), TypeError, r"Prefix\(length=…\) is None"),
    "Prefix float": (lambda: masks.Prefix(0.5), TypeError, r"Prefix\(length=…\) is 0.5"),
    "Chunked 0": (
        lambda: masks.Chunked(0),
        ValueError,
        r"Chunked\(size=…\) is 0; wanted a Python int >= 1",
    ),
    "Chunked 2.5": (lambda: masks.Chunked(2.5), ValueError, r"Chunked\(size=…\) is 2.5; wanted a"),
    "Segments None": (
        lambda: masks.Segments(None),
        TypeError,
        r"Segments\(query=…\) is None; wanted an integer array",
    ),
    "Segments number": (lambda: masks.Segments(3), TypeError, r"Segments\(query=…\) is 3"),
    "Segments key number": (lambda: masks.Segments(IDS, 3), TypeError, r"Segments\(key=…\) is 3"),
    "Segments float": (
        lambda: masks.Segments(FLOATS),
        TypeError,
        r"Segments\(query=…\) has dtype float32; wanted an integer dtype",
    ),
    "Segments uint32": (
        lambda: masks.Segments(IDS, np.zeros(7, np.uint32)),
        TypeError,
        r"Segments\(key=…\) has dtype uint32, where padding cannot be negative.*Cast the ids",
    ),
    "Intervals float": (
        lambda: masks.Intervals(FLOATS, FLOATS),
        TypeError,
        r"Intervals\(begin=…\) has dtype float32; wanted an integer dtype",
    ),
    "Intervals None": (
        lambda: masks.Intervals(IDS, None),
        TypeError,
        r"Intervals\(end=…\) is None",
    ),
    "Dense float32": (
        lambda: masks.Dense(BOOLS.astype(np.float32)),
        TypeError,
        r"mask has dtype float32; wanted bool.*mask.astype\(bool\).*as bias",
    ),
    "Dense number": (lambda: masks.Dense(1), TypeError, r"Dense\(values=…\) is 1; wanted an array"),
    "BlockSparse int8": (
        lambda: masks.BlockSparse(BOOLS.astype(np.int8)),
        TypeError,
        r"BlockSparse\(blocks=…\) has dtype int8; wanted bool",
    ),
    "BlockSparse size": (
        lambda: masks.BlockSparse(BOOLS, block_columns=0),
        ValueError,
        r"BlockSparse\(block_columns=…\) is 0; wanted a Python int >= 1",
    ),
    "Predicate fn": (
        lambda: masks.Predicate(BOOLS),
        TypeError,
        r"(?s)Predicate\(fn=…\) is .*; wanted a function",
    ),
    "Predicate rows": (
        lambda: masks.Predicate(fn, rows=IDS),
        TypeError,
        r"Predicate\(rows=…\) is a ndarray; wanted a dict of named arrays",
    ),
    "Predicate scalars": (
        lambda: masks.Predicate(fn, scalars={"limit": "3"}),
        TypeError,
        r"Predicate\(scalars=…\)\['limit'\] is a str; wanted a number or an array",
    ),
    "Predicate one name twice": (
        lambda: masks.Predicate(fn, rows={"x": IDS}, columns={"x": np.zeros(7, np.int32)}),
        ValueError,
        r"Predicate.*'?x'?",
    ),
    "Predicate verdict": (
        lambda: masks.Predicate(fn, tile_verdict=3),
        TypeError,
        r"Predicate\(tile_verdict=…\) is 3; wanted a function",
    ),
}

WHEN_BOUND: dict[str, Refusal] = {
    "Predicate verdict with an if": (
        lambda: masks.Predicate(fn, tile_verdict=lambda a, b, c, d: 1 if a < c else 0),
        TypeError,
        r"Predicate\(tile_verdict=…\) failed on 2 × 3 tiles: (?s:.*)jnp.where instead of if",
    ),
    "Predicate verdict of floats": (
        lambda: masks.Predicate(fn, tile_verdict=lambda a, b, c, d: 0.5 * (a < c)),
        TypeError,
        r"Predicate\(tile_verdict=…\) returns dtype float32; wanted masks.EMPTY",
    ),
    "Causal offset": (
        lambda: masks.Causal(np.zeros(3, np.int32)),
        ValueError,
        r"Causal.offset has shape \(3,\); wanted \(\) or \(2,\) or \(2, 3\)",
    ),
    "Window offset": (
        lambda: masks.Window(1, 1, np.zeros((2, 2), np.int32)),
        ValueError,
        r"Window.offset has shape \(2, 2\); wanted \(\) or \(2,\) or \(2, 3\)",
    ),
    "Lengths key": (
        lambda: masks.Lengths(None, np.zeros(5, np.int32)),
        ValueError,
        r"Lengths.key has shape \(5,\); wanted",
    ),
    "Prefix length": (
        lambda: masks.Prefix(np.zeros(3, np.int32)),
        ValueError,
        r"Prefix.length has shape \(3,\); wanted",
    ),
    "Segments query": (
        lambda: masks.Segments(np.zeros((3, 5), np.int32), np.zeros(7, np.int32)),
        ValueError,
        r"Segments.query has shape \(3, 5\); wanted \(5,\) or \(2, 5\) or \(2, 3, 5\)",
    ),
    "Segments key": (
        lambda: masks.Segments(IDS, IDS),
        ValueError,
        r"Segments.key has shape \(5,\); wanted \(7,\) or \(2, 7\) or \(2, 3, 7\)",
    ),
    "Segments without key": (
        lambda: masks.Segments(IDS),
        ValueError,
        r"Segments\(key=…\) is None with T = 5 and S = 7; wanted the key/value side's ids too",
    ),
    "Intervals end": (
        lambda: masks.Intervals(np.zeros(7, np.int32), IDS),
        ValueError,
        r"Intervals.end has shape \(5,\); wanted \(7,\) or",
    ),
    "Dense": (
        lambda: masks.Dense(BOOLS.T),
        ValueError,
        r"Dense.values has shape \(7, 5\); wanted .*broadcasts to \(2, 3, 5, 7\)",
    ),
    "Dense of rank 5": (
        lambda: masks.Dense(BOOLS[None, None, None]),
        ValueError,
        r"Dense.values has shape \(1, 1, 1, 5, 7\); wanted a shape of rank <= 4",
    ),
    "BlockSparse": (
        lambda: masks.BlockSparse(np.ones((2, 2), bool), 4, 3),
        ValueError,
        r"BlockSparse.blocks has shape \(2, 2\); wanted \(…, 2, 3\) for T = 5, S = 7 in blocks of",
    ),
    "Predicate heads": (
        lambda: masks.Predicate(fn, heads={"slope": np.zeros(2, np.int32)}),
        ValueError,
        r"Predicate.heads\['slope'\] has shape \(2,\); wanted \(3,\) \(one value per query head\)",
    ),
    "Predicate rows": (
        lambda: masks.Predicate(fn, rows={"tag": np.zeros(7, np.int32)}),
        ValueError,
        r"Predicate.rows\['tag'\] has shape \(7,\); wanted \(5,\)",
    ),
}


@pytest.mark.parametrize("what", WHEN_MADE)
def test_refused_when_made(what: str) -> None:
    make, error, message = WHEN_MADE[what]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("what", WHEN_BOUND)
def test_refused_when_the_logits_are_known(what: str) -> None:
    make, error, message = WHEN_BOUND[what]
    mask = make() & masks.Causal()
    with pytest.raises(error, match=message):
        mask.aligned(DIMS)


def test_refused_under_jit_alike() -> None:
    """At trace time, with tracers in the arrays' places."""

    @jax.jit
    def made(length: Any) -> Any:
        return masks.Lengths(key=length).aligned(DIMS)

    with pytest.raises(TypeError, match=r"Lengths\(key=…\) has dtype float32"):
        made(FLOATS[:2])
    with pytest.raises(ValueError, match=r"Lengths.key has shape \(5,\)"):
        made(IDS)
