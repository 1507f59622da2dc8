"""One call said twice, to flashjax and to the oracle, and the run that compares the two.

A `Case` is what a test is about. `check(implementation, case)` runs it forward and backward, with
respect to everything that has a gradient, under jit, and holds every row to the bound.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import flashjax
import flashjax.backend
import flashjax.chunked
import flashjax.plan
from flashjax.kernels.hopper import backend as hopper_backend
from flashjax.kernels.hopper import config as hopper_config
from flashjax.kernels.hopper.backward_config import BackwardConfig as HopperBackward
from flashjax.kernels.triton import Triton
from flashjax.kernels.triton import backend as triton_backend
from flashjax.kernels.triton.config import BackwardConfig, ForwardConfig
from tests import bound
from tests.oracle import Array

# Those of ANYWHERE take every call; another skips what it refuses, and the skip carries its reason.
# pytest's --implementation NAME puts any other in their place.
ANYWHERE = ("reference", "xla")
CHOSEN = os.environ.get("FLASHJAX_TEST_IMPLEMENTATION")
IMPLEMENTATIONS = (CHOSEN,) if CHOSEN else ANYWHERE
# The Triton kernels in Pallas's interpreter, on any machine.
INTERPRETED = "triton interpreted"


def interpreted() -> Triton:
    return Triton(interpret=True, name=INTERPRETED)


if CHOSEN == INTERPRETED:
    flashjax.plan.BACKENDS[INTERPRETED] = interpreted

BF16, F16, F32, F64 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, float))
# Of tests that are not about a dtype. The Mosaic kernels take 16 bits alone.
USUAL = BF16 if CHOSEN == "mosaic" else F32


class Shape(NamedTuple):
    """jax.nn's letters; V is Hv."""

    B: int = 2
    T: int = 37
    S: int = 53
    N: int = 4
    K: int = 2
    H: int = 16
    V: int = 8

    @property
    def logits(self) -> tuple[int, int, int, int]:
        return self.B, self.N, self.T, self.S


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """`arguments` go to flashjax, `options` to the oracle; `operands` have gradients.

    The operands named bias, scale and sinks go to both sides under their names; any other is an
    array of the score modifier that `score_mod` builds from them.
    """

    query: Array
    key: Array
    value: Array
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operands: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    score_mod: Callable[[Mapping[str, Any]], Any] | None = None
    seed: int = 0

    @property
    def shape(self) -> Shape:
        batch, rows, heads, width = self.query.shape
        columns, key_heads, value_width = self.value.shape[1:]
        return Shape(batch, rows, columns, heads, key_heads, width, value_width)

    @functools.cached_property
    def cotangents(self) -> tuple[Array, Array]:
        """Of out and LSE."""
        r, s = np.random.default_rng([self.seed, 99]), self.shape
        d_out = r.normal(size=(s.B, s.T, s.N, s.V)).astype(self.query.dtype)
        wide = F64 if self.query.dtype == F64 else F32
        return d_out, r.normal(size=(s.B, s.T, s.N)).astype(wide)

    @functools.cached_property
    def judge(self) -> bound.Judge:
        options = dict(self.options)
        options |= {n: x for n, x in self.operands.items() if n in ("bias", "scale", "sinks")}
        d_out, d_lse = self.cotangents
        return bound.Judge.of(self.query, self.key, self.value, d_out, d_lse, **options)


def qkv(shape: Shape, dtype: Any = USUAL, seed: int = 0) -> tuple[Array, Array, Array]:
    """Standard normal query, key and value."""
    r = np.random.default_rng(seed)
    s = shape
    sizes = ((s.B, s.T, s.N, s.H), (s.B, s.S, s.K, s.H), (s.B, s.S, s.K, s.V))
    query, key, value = (r.normal(size=size).astype(dtype) for size in sizes)
    return query, key, value


BASE = Shape()


def case(shape: Shape = BASE, dtype: Any = USUAL, seed: int = 0, **fields: Any) -> Case:
    """A case on fresh normal inputs; `fields` as `Case`'s."""
    return Case(*qkv(shape, dtype, seed), seed=seed, **fields)


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit for calls that run once: LLVM's optimiser takes half of the time to compile."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    compiled: Callable[..., Any] = jax.jit(fn, compiler_options=quick)
    return compiled


def pulled(fn: Callable[..., Any], inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    """``fn(*inputs)`` and the cotangents of the inputs, under jit."""

    def both(inputs: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(fn, *inputs)
        return results, pull(cotangents)

    results, grads = jit(both)(inputs, cotangents)
    return results, grads


@contextlib.contextmanager
def skipping_refusals(implementation: Any) -> Iterator[None]:
    """Where a kernel refuses a call, the test is skipped and says why."""
    try:
        yield
    except NotImplementedError as reason:
        if implementation in ANYWHERE:
            raise
        pytest.skip(f"{implementation}: {reason}")


def attention(implementation: Any, **arguments: Any) -> Callable[..., Any]:
    """flashjax with out and LSE, as a function of query, key and value."""
    fixed = {"implementation": implementation, "return_residual": True, **arguments}

    def call(query: Any, key: Any, value: Any, **more: Any) -> Any:
        with skipping_refusals(implementation):
            return flashjax.dot_product_attention(query, key, value, **fixed, **more)

    return call


def attend(
    implementation: Any, case: Case, query: Any, key: Any, value: Any, operands: Any, arrays: Any
) -> tuple[jax.Array, jax.Array]:
    """flashjax on the case, with `arrays` in the places of the arrays among its arguments."""
    out, lse = attention(implementation, **said(case, operands, arrays))(query, key, value)
    return out, lse


def said(case: Case, operands: Any, arrays: Any) -> dict[str, Any]:
    """What the case passes beside query, key and value."""
    named = {n: x for n, x in operands.items() if n in ("bias", "scale", "sinks")}
    if case.score_mod is not None:
        named["score_mod"] = case.score_mod(operands)
    return named | _with_arrays(case.arguments, arrays)


def arrays_of(arguments: Mapping[str, Any]) -> list[Any]:
    """The arrays among the arguments: a test passes them through jit, as a user's step does."""
    return [x for x in jax.tree.leaves(arguments) if _is_array(x)]


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, jax.Array))


def _with_arrays(arguments: Mapping[str, Any], arrays: Any) -> Any:
    leaves, tree = jax.tree.flatten(dict(arguments))
    given = iter(arrays)
    return jax.tree.unflatten(tree, [next(given) if _is_array(x) else x for x in leaves])


def step_of(implementation: Any, case: Case) -> Callable[..., Any]:
    """(inputs, arrays, cotangents) -> ((out, lse), gradients), for cases alike but in values."""

    def both(inputs: Any, arrays: Any, cotangents: Any) -> Any:
        def attention(query: Any, key: Any, value: Any, operands: Any) -> Any:
            return attend(implementation, case, query, key, value, operands, arrays)

        results, pull = jax.vjp(attention, *inputs)
        return results, pull(cotangents)

    return jit(both)


def run(
    implementation: Any, case: Case, step: Callable[..., Any] | None = None
) -> dict[str, Array]:
    """out, lse and all gradients, each checked to have its operand's shape and dtype."""
    step = step or step_of(implementation, case)
    inputs = (case.query, case.key, case.value, dict(case.operands))
    with jax.enable_x64(case.query.dtype == F64):
        (out, lse), grads = step(inputs, arrays_of(case.arguments), case.cotangents)
        *matrices, operands = jax.tree.map(np.asarray, grads)
    results = {"out": np.asarray(out), "lse": np.asarray(lse)}
    results |= dict(zip(("query", "key", "value"), matrices, strict=True))
    for name, array in operands.items():
        given = np.asarray(case.operands[name])
        assert (array.shape, array.dtype) == (given.shape, given.dtype), name
        results[name] = array.reshape(case.judge.reference[name].shape)
    for name in ("out", "query", "key", "value"):
        assert results[name].dtype == case.query.dtype, name
    assert results["lse"].dtype == case.cotangents[1].dtype
    return results


def check(implementation: Any, case: Case) -> dict[str, Array]:
    """Holds the case's results to the oracle's bound, and returns them."""
    results = run(implementation, case)
    case.judge.hold(results)
    return results


@functools.cache
def dropout_pattern(
    seed: int, shape: Shape, rate: float, implementation: Any = "reference"
) -> Array:
    """Which weights stay, (B, N, T, S), read off the public function: scores 0, values one-hot."""
    width = 256
    kept = []
    for begin in range(0, shape.S, width):
        one_hot = np.eye(shape.S, dtype=np.float32)[:, begin : begin + width]
        value = np.broadcast_to(one_hot[None, :, None], (shape.B, shape.S, 1, one_hot.shape[1]))
        drop = attention(implementation, dropout_rate=rate, dropout_key=jax.random.key(seed))
        query = np.zeros((shape.B, shape.T, shape.N, 1), np.float32)
        out, _ = drop(query, np.zeros((shape.B, shape.S, 1, 1), np.float32), value)
        kept.append(np.asarray(out) > 0)
    return np.concatenate(kept, axis=-1).transpose(0, 2, 1, 3)


def poisoned(array: Array, where: Any, value: float = np.nan) -> Array:
    """A copy with `value` at `where`."""
    changed = array.copy()
    changed[where] = value
    return changed


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def small_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """Makes the implementations take tiles of about this size, so that small inputs have many.

    Compiled calls remember the tiles that they were made with: use shapes that no other test has.
    """
    monkeypatch.setattr(flashjax.chunked, "CONFIGS", (flashjax.backend.Config(rows, columns),))
    # The kernels take powers of two from 16 on; the two passes' tiles differ.
    forward, query = ForwardConfig(16, 32, 4, 1), ForwardConfig(32, 16, 4, 1)
    backward = BackwardConfig(16, 32, 4, 2, query)
    hopper = hopper_config.ForwardConfig(128, 64, 2, False, 0)
    fused = HopperBackward(64, 128, 2)
    monkeypatch.setattr(hopper_backend, "forward_configs", lambda *_: (hopper,))
    monkeypatch.setattr(hopper_backend, "backward_configs", lambda *_: (fused,))
    monkeypatch.setattr(triton_backend, "forward_configs", lambda *_: (forward,))
    monkeypatch.setattr(triton_backend, "backward_configs", lambda *_: (backward,))
