"""cases.md at its full shapes, on a GPU: run whole, some heads held to the bound."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks
from flashjax.backend import Device
from flashjax.bind import Arguments, bind
from flashjax.kernels.triton import BACKEND
from flashjax.kernels.triton import backend as triton_backend
from flashjax.plan import current_device
from tests import oracle
from tests.features import build, grid
from tests.inputs import (
    BF16,
    F16,
    F32,
    IMPLEMENTATIONS,
    Case,
    Shape,
    attention,
    case,
    check,
    pulled,
    qkv,
    run,
    same_bits,
    step_of,
)
from tests.oracle import Array
from tests.test_features import with_hidden

pytestmark = pytest.mark.gpu
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
Keep = Callable[[int], Array]  # (T, S) of one batch member


def check_some(
    implementation: Any, made: Case, keep: Keep, members: Mapping[int, int] | None = None
) -> None:
    """Runs the whole case; judges the query heads of one key head of one or two batch members."""
    shape = made.shape
    attend = attention(implementation, **made.arguments)
    inputs = (made.query, made.key, made.value)
    (out, lse), grads = pulled(attend, inputs, made.cotangents)
    group = shape.N // shape.K
    for b, k in (members or {0: 0, shape.B - 1: shape.K - 1}).items():
        heads, one = slice(k * group, (k + 1) * group), slice(b, b + 1)
        part = Case(
            made.query[one, :, heads],
            made.key[one, :, k : k + 1],
            made.value[one, :, k : k + 1],
            options={"keep": keep(b)[None, None]},
        )
        part.__dict__["cotangents"] = tuple(x[one, :, heads] for x in made.cotangents)
        found = {"out": out[one, :, heads], "lse": lse[one, :, heads]}
        found["query"] = grads[0][one, :, heads]
        found |= {n: g[one, :, k : k + 1] for n, g in zip(("key", "value"), grads[1:], strict=True)}
        part.judge.hold({name: np.asarray(x) for name, x in found.items()})


@each
def test_case_01_left_window(implementation: Any) -> None:
    shape = Shape(2, 2048, 2048, 8, 8, 64, 64)
    row, column = grid(shape)
    made = case(shape, BF16, 1, arguments={"local_window_size": (300, 0)})
    check_some(implementation, made, lambda b: (column <= row) & (column >= row - 300))


@each
@pytest.mark.parametrize("right", [31, 0])
def test_case_02_right_windows(right: int, implementation: Any) -> None:
    shape = Shape(32, 2048, 2080, 8, 8, 64, 64)
    row, column = grid(shape)
    made = case(shape, BF16, 2, arguments={"local_window_size": (0, right)})
    check_some(implementation, made, lambda b: (column >= row) & (column <= row + right))


@each
@pytest.mark.parametrize("heads", [(32, 8), (8, 8)], ids=str)
def test_cases_03_and_04_documents(heads: tuple[int, int], implementation: Any) -> None:
    shape = Shape(2, 2048, 2048, *heads, 128, 128)
    r = np.random.default_rng(3)
    ids = np.sort(r.integers(0, 5, (shape.B, shape.T)), axis=1).astype(np.int32)
    row, column = grid(shape)
    made = case(shape, BF16, 3, arguments={"segment_ids": ids, "is_causal": True})
    check_some(implementation, made, lambda b: (ids[b][:, None] == ids[b]) & (column <= row))


@each
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_case_05_both_causal_conventions(align: Any, implementation: Any) -> None:
    shape = Shape(8, 512, 2048, 8, 8, 64, 64)
    row, column = grid(shape)
    shift = 0 if align == "top_left" else shape.S - shape.T
    made = case(shape, F16, 5, arguments={"mask": masks.Causal(align=align)})
    check_some(implementation, made, lambda b: column <= row + shift)


@each
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [
        (192, 192, 16), (577, 577, 59), (1500, 1500, 72), (127, 131, 80), (257, 509, 96),
        (1023, 1023, 111), (1, 1500, 128), (1500, 7, 192), (1023, 577, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_case_06_odd_lengths_and_head_dims(
    causal: bool, rows: int, columns: int, width: int, implementation: Any
) -> None:
    shape = Shape(1, rows, columns, 8, 4, width, width)
    row, column = grid(shape)
    made = case(shape, BF16, 6, arguments={"is_causal": causal})
    check_some(implementation, made, lambda b: (column <= row) | (not causal), {0: 3})


@each
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("dtype", "width"), [(BF16, 64), (BF16, 128), (BF16, 256), (F16, 96), (F32, 64), (F32, 128)]
)
def test_case_07_every_configuration_offered(
    dtype: Any, width: int, causal: bool, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation != "triton":
        pytest.skip("the configurations of the Triton kernels")
    rows = 300 + 2 * width + causal  # shapes that no other test has: plans are remembered
    shape = Shape(1, rows, 333, 2, 1, width, width)
    made = build(shape, ("is_causal",) if causal else (), dtype)
    spec = bind(made.query, made.key, made.value, Arguments(is_causal=causal)).spec
    device = current_device()
    forward, backward = (BACKEND.configs(spec, device, backward=b) for b in (False, True))
    assert forward
    assert backward
    for i in range(max(len(forward), len(backward))):
        one, other = forward[i % len(forward)], backward[i % len(backward)]
        monkeypatch.setattr(triton_backend, "forward_configs", lambda *_, c=one: (c,))
        monkeypatch.setattr(triton_backend, "backward_configs", lambda *_, c=other: (c,))
        flashjax.plan.plan.cache_clear()
        jax.clear_caches()
        check(implementation, made)


@each
@pytest.mark.parametrize("width", [64, 128])
def test_case_08_float32_errs_at_most_twice_as_much_as_jax(width: int, implementation: Any) -> None:
    inputs = qkv(Shape(1, 1024, 1024, 2, 2, width, width), F32, 8)
    exact = oracle.attention(*inputs)[0]
    ours = attention(implementation, precision="highest")(*inputs)[0]
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(*inputs, implementation="xla")
    errors = [np.abs(np.asarray(x, np.float64) - exact).max() for x in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], errors


@each
@pytest.mark.parametrize("mask", ["prefix", "is_causal"])
def test_case_23_the_same_bits_under_load(mask: str, implementation: Any) -> None:
    """Of programs that have an item each, and of some that share them out."""
    made = build(Shape(4, 1024, 1100, 8, 2, 64, 64), (mask, "sinks", "deterministic"), BF16)
    step = step_of(implementation, made)
    arguments = (made.query, made.key, made.value, dict(made.operands))
    arrays = jax.tree.leaves(made.arguments)
    arrays = [x for x in arrays if isinstance(x, (np.ndarray, jax.Array))]
    first = step(arguments, arrays, made.cotangents)
    for _ in range(100):
        again = step(arguments, arrays, made.cotangents)
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert same_bits(x, y)


@each
def test_arrays_of_more_than_two_to_the_31_elements(implementation: Any) -> None:
    """The last rows of a window are those of a call on the last rows alone."""
    if implementation in ("reference", "xla"):
        pytest.skip("reference: 2²⁰ × 2²⁰ scores; xla: 48 GiB of float32 sums, beside other tests")
    length, tail = 2**20 + 128, 2048
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, (1, length, 8, 256), jnp.bfloat16) for k in keys]
    attend = attention(implementation, local_window_size=(100, 0))

    def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
        return out, *pull(d_out)

    whole = [x[:, -1024:] for x in jax.jit(gradients)(*arrays)]
    part = [x[:, -1024:] for x in jax.jit(gradients)(*(x[:, -tail:] for x in arrays))]
    for x, y in zip(whole, part, strict=True):
        # Tiles begin elsewhere: two orders of the same sums, rounded to bf16.
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=2**-6)


def test_no_launch_fails_where_shared_memory_is_small() -> None:
    """Case 21: head dim 256, and float32 at 128, on 99 KiB: a configuration, or another way."""
    for capability in ("8.6", "8.9", "12.0"):
        device = Device("cuda", "NVIDIA", capability)
        for width, dtype in ((256, jnp.bfloat16), (128, jnp.float32), (256, jnp.float32)):
            x = jax.ShapeDtypeStruct((1, 512, 2, width), dtype)
            found = flashjax.explain(x, x, x, is_causal=True, device=device)
            assert found.implementation in ("triton", "xla")


@each
def test_more_members_than_a_grid_dimension_holds(implementation: Any) -> None:
    """As windows of images or examples under vmap come: 70000 of them."""
    shape = Shape(70_000, 16, 16, 1, 1, 16, 16)
    made = case(shape, BF16, 3, arguments={"is_causal": True})
    row, column = grid(shape)
    check_some(implementation, made, lambda b: column <= row)


@each
def test_hidden_nan_changes_nothing_beside_full_tiles(implementation: Any) -> None:
    """To the bit in the kernels, which then walk a block's tiles a second time."""
    for names in (("segments",), ("segments", "alibi", "traced_scale")):
        clean = build(Shape(2, 1000, 1100, 4, 2, 64, 64), names, BF16, seed=5)
        step = step_of(implementation, clean)
        expected = run(implementation, clean, step)
        clean.judge.hold(expected)
        for name, x in run(implementation, with_hidden(clean, np.nan), step).items():
            assert implementation != "triton" or same_bits(x, expected[name]), name
            assert same_bits(np.isnan(x), np.isnan(expected[name])), name
