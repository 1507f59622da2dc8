"""Cases 1 to 15 of cases.md: inputs on which attention libraries failed their users.

Shapes are shrunk where what the case is about survives.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flashjax
import flashjax.linen
import flashjax.nnx
from flashjax import chunked, masks
from flashjax.bind import Arguments, bind
from tests import oracle
from tests.bound import Judge
from tests.features import Part, bias, build, grid
from tests.inputs import (
    BF16,
    F16,
    F32,
    F64,
    IMPLEMENTATIONS,
    USUAL,
    Case,
    Shape,
    attention,
    case,
    check,
    jit,
    pulled,
    qkv,
    same_bits,
    skipping_refusals,
)

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each
@pytest.mark.parametrize("left", [0, 5])
def test_case_01_left_window_shows_no_later_column(left: int, implementation: Any) -> None:
    shape = Shape(1, 40, 40, 2, 2, 16, 16)
    row, column = grid(shape)
    keep = (column <= row) & (column >= row - left)
    arguments = {"local_window_size": (left, 0), "is_causal": False}
    check(implementation, case(shape, BF16, 1, arguments=arguments, options={"keep": keep}))


@each
def test_case_02_right_windows_of_31_and_0_differ(implementation: Any) -> None:
    shape = Shape(2, 64, 72, 2, 2, 16, 16)
    row, column = grid(shape)
    outs = []
    for right in (31, 0):
        keep = (column >= row) & (column <= row + right)
        arguments = {"local_window_size": (0, right)}
        made = case(shape, USUAL, 2, arguments=arguments, options={"keep": keep})
        outs.append(check(implementation, made)["out"])
    assert np.abs(outs[0] - outs[1]).max(-1).min() > 1e-3
    value = made.value[:, : shape.T]  # with (0, 0) a row sees its own column alone
    # Three TF32 products keep 22 of a float32's 24 bits.
    np.testing.assert_allclose(outs[1], value, rtol=2**-22, atol=0)


def packed(shape: Shape, dtype: Any, segments: int, seed: int) -> Case:
    """Causal attention over documents packed into rows."""
    r = np.random.default_rng(seed)
    ids = np.sort(r.integers(0, segments, (shape.B, shape.T)), axis=1).astype(np.int32)
    ids[:, :2], ids[:, -2:] = 0, segments - 1
    row, column = grid(shape)
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (column <= row)
    arguments = {"segment_ids": ids, "is_causal": True}
    return case(shape, dtype, seed, arguments=arguments, options={"keep": keep})


@each
@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_case_03_grouped_heads_see_their_own_segment(
    dtype: Any, segments: int, implementation: Any
) -> None:
    check(implementation, packed(Shape(2, 48, 48, 8, 2, 16, 16), dtype, segments, 3))


@each
def test_case_04_gradients_do_not_cross_segments(implementation: Any) -> None:
    made = packed(Shape(2, 48, 48, 2, 2, 16, 16), BF16, 2, 4)
    check(implementation, made)
    ids = made.arguments["segment_ids"]
    attend = attention(implementation, **made.arguments)
    d_out, d_lse = (x.copy() for x in made.cotangents)
    d_out[ids == 0], d_lse[ids == 0] = 0, 0
    _, grads = pulled(attend, (made.query, made.key, made.value), (d_out, d_lse))
    for grad in grads:
        assert (np.asarray(grad)[ids == 0] == 0).all()
        assert (np.asarray(grad)[ids == 1] != 0).any()


@each
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_case_05_both_causal_conventions_where_lengths_differ(
    align: Any, implementation: Any
) -> None:
    shape = Shape(2, 24, 96, 2, 2, 16, 16)
    row, column = grid(shape)
    shift = 0 if align == "top_left" else shape.S - shape.T
    arguments: dict[str, Any] = {"mask": masks.Causal(align=align)}
    if align == "top_left":
        arguments = {"is_causal": True}
    made = case(shape, F16, 5, arguments=arguments, options={"keep": column <= row + shift})
    check(implementation, made)


@each
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [
        (192, 192, 16),
        (127, 131, 59),
        (131, 127, 72),
        (257, 67, 80),
        (71, 509, 96),
        (577, 37, 111),
        (33, 1023, 16),
        (11, 1500, 16),
        (1500, 11, 16),
    ],
)
def test_case_06_odd_lengths_and_head_dims(
    rows: int, columns: int, width: int, implementation: Any
) -> None:
    check(implementation, case(Shape(1, rows, columns, 1, 1, width, width), BF16, 6))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", range(len(chunked.CONFIGS)))
def test_case_07_every_tile_configuration(index: int, causal: bool) -> None:
    shape = Shape(1, 270, 530, 2, 1, 8, 8)
    made = seven(shape, causal)
    bound = bind(made.query, made.key, made.value, Arguments(is_causal=causal))
    spec = bound.spec
    wanted = frozenset(("query", "key", "value"))
    device = flashjax.Device("cpu")
    configs = (
        chunked.BACKEND.configs(spec, device),
        chunked.BACKEND.configs(spec, device, backward=True),
    )

    @jit
    def both(operands: Any, d_out: Any, d_lse: Any) -> Any:
        backend = chunked.BACKEND
        out, lse = backend.forward(spec, configs[0][index], operands)
        delta = (out * d_out).sum(-1).swapaxes(1, 2) - d_lse.swapaxes(1, 2)
        asked = spec.__class__(**(vars(spec) | {"wanted": wanted}))
        return out, lse, backend.backward(asked, configs[1][index], operands, lse, delta, d_out)

    out, lse, grads = both(bound.operands, *made.cotangents)
    results = {"out": out, "lse": lse.swapaxes(1, 2)}
    results |= {name: getattr(grads, name) for name in wanted}
    made.judge.hold({name: np.asarray(x) for name, x in results.items()})


@functools.cache
def seven(shape: Shape, causal: bool) -> Case:
    row, column = grid(shape)
    return case(shape, USUAL, 7, options={"keep": column <= row if causal else None})


@each
@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, None], ids=str)
def test_case_08_float32_errs_as_float32(precision: Any, implementation: Any) -> None:
    # tests/test_bound.py shows that the bound refuses TF32's products.
    check(implementation, eight(precision))


@functools.cache
def eight(precision: Any) -> Case:
    return case(Shape(1, 40, 200, 2, 1, 64, 64), F32, 8, arguments={"precision": precision})


@each
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_case_09_x64_with_nan_and_infinity_checks(dtype: Any, implementation: Any) -> None:
    shape = Shape(1, 20, 24, 2, 1, 8, 8)
    row, column = grid(shape)
    options = {"keep": column <= row}
    made = case(shape, dtype, 9, arguments={"is_causal": True}, options=options)
    inputs = (made.query, made.key, made.value)

    def out_alone(*inputs: Any) -> Any:
        return attention(implementation, is_causal=True)(*inputs)[0]

    with jax.enable_x64(True), jax.debug_nans(True):
        results, grads = pulled(attention(implementation, is_causal=True), inputs, made.cotangents)
        with jax.debug_infs(True):
            out, _ = pulled(out_alone, inputs, made.cotangents[0])
    names = ("out", "lse", "query", "key", "value")
    judged = dict(zip(names, map(np.asarray, (*results, *grads)), strict=True))
    assert [judged[name].dtype for name in names[2:]] == [dtype] * 3
    made.judge.hold(judged)
    assert same_bits(out, judged["out"])


@each
def test_case_10_rows_and_batch_members_that_see_nothing(implementation: Any) -> None:
    shape = Shape(2, 3, 3, 2, 1, 8, 8)
    keep = np.ones((2, 1, 3, 3), bool)
    keep[0, :, 1] = False
    keep[1] = False
    results = check(
        implementation, case(shape, USUAL, 10, arguments={"mask": keep}, options={"keep": keep})
    )
    for index in ((0, 1), (1,)):
        assert (results["out"][index] == 0).all()
        assert (results["lse"][index] == -np.inf).all()
        assert (results["query"][index] == 0).all()
    assert (results["key"][1] == 0).all()
    assert (results["value"][1] == 0).all()


@each
def test_case_11_flax_masks_of_zeros_and_ones(implementation: Any) -> None:
    shape = Shape(2, 12, 12, 2, 2, 8, 8)
    row, column = grid(shape)
    made = case(shape, USUAL, 11, options={"keep": column <= row})
    inputs = (made.query, made.key, made.value)
    mask = linen.make_causal_mask(np.ones((2, 12)))
    assert mask.dtype == np.float32
    for adapter in (flashjax.linen.attention_fn, flashjax.nnx.attention_fn):
        attend = functools.partial(adapter, mask=mask, implementation=implementation)
        with skipping_refusals(implementation):
            out, grads = pulled(attend, inputs, made.cotangents[0])
        judge = Judge.of(*inputs, made.cotangents[0], 0 * made.cotangents[1], **made.options)
        named = dict(zip(("out", "query", "key", "value"), (out, *grads), strict=True))
        judge.hold({name: np.asarray(x) for name, x in named.items()})
    with pytest.raises(TypeError, match=r"mask has dtype float32; wanted bool"):
        flashjax.dot_product_attention(*inputs, mask=mask, implementation=implementation)


@each
@pytest.mark.parametrize("dims", ["B11S", "11TS", "B1T1", "1N11", "TS"])
def test_case_12_masks_broadcast_as_in_numpy(dims: str, implementation: Any) -> None:
    shape = Shape(2, 7, 9, 4, 2, 8, 8)
    size = tuple(1 if d == "1" else getattr(shape, d) for d in dims)
    keep = np.random.default_rng(12).random(size) > 0.4
    check(implementation, case(shape, USUAL, 12, arguments={"mask": keep}, options={"keep": keep}))


@each
@pytest.mark.parametrize("dims", ["BNTS", "1NTS", "B11S", "11T1", "float32 BNTS", "bfloat16 1NTS"])
def test_case_13_biases_and_their_gradients(dims: str, implementation: Any) -> None:
    *low, dims = dims.split()
    made = build(Shape(2, 11, 13, 4, 2, 8, 8), (), BF16 if low else USUAL, 13)
    part: Part = bias(*dims)(made.shape, np.random.default_rng(13))
    dtype = BF16 if low == ["bfloat16"] else F32
    operands = {"bias": part.operands["bias"].astype(dtype)}
    check(implementation, Case(made.query, made.key, made.value, operands=operands))


@each
def test_case_14_jacrev_in_fp16(implementation: Any) -> None:
    shape = Shape(1, 3, 4, 2, 1, 4, 2)
    inputs = qkv(shape, F16, 14)
    found = jit(jax.jacrev(lambda *x: attention(implementation)(*x)[0], argnums=(0, 1, 2)))(*inputs)
    for index in np.ndindex(1, 3, 2, 2):
        d_out = np.zeros((1, 3, 2, 2), F16)
        d_out[index] = 1
        judge = Judge.of(*inputs, d_out, np.zeros((1, 3, 2), F32))
        rows = (np.asarray(x)[index] for x in found)
        judge.hold(dict(zip(("query", "key", "value"), rows, strict=True)))


def test_case_15_higher_and_forward_derivatives_through_reference() -> None:
    made = case(Shape(1, 3, 4, 1, 1, 2, 2), F64, 15)
    inputs = (made.query, made.key, made.value)
    tangents = tuple(x[::-1] * 0.5 for x in inputs)

    def loss(query: Any, key: Any, value: Any) -> Any:
        out, lse = attention("reference", is_causal=True)(query, key, value)
        return (out**2).sum() + jnp.sin(lse).sum()

    def truth(query: Any, key: Any, value: Any) -> Any:
        out, lse = oracle.attention(query, key, value, keep=np.tri(3, 4, dtype=bool))
        return (out**2).sum() + np.sin(lse).sum()

    def nudged(step: float, tangents: Any) -> Any:
        return truth(*(x + np.longdouble(step) * t for x, t in zip(inputs, tangents, strict=True)))

    h = 1e-5
    with jax.enable_x64(True):
        _, slope = jit(lambda *x: jax.jvp(loss, x[:3], x[3:]))(*inputs, *tangents)
        hessian = jit(jax.hessian(loss, argnums=(0, 1, 2)))(*inputs)
        again = jax.grad(lambda x: jax.grad(loss)(x, *inputs[1:])[0, 2, 0, 1])
        twice = jit(again)(inputs[0])
        slope, hessian, twice = jax.tree.map(np.asarray, (slope, hessian, twice))
    assert abs(slope - (nudged(h, tangents) - nudged(-h, tangents)) / (2 * h)) < 1e-8
    curvature = sum(
        np.tensordot(np.tensordot(t, block, t.ndim), u, u.ndim)
        for t, row in zip(tangents, hessian, strict=True)
        for u, block in zip(tangents, row, strict=True)
    )
    second = (nudged(h, tangents) - 2 * nudged(0, tangents) + nudged(-h, tangents)) / h**2
    assert abs(curvature - second) < 1e-6 * abs(second) + 1e-5
    np.testing.assert_allclose(twice, hessian[0][0][0, 2, 0, 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", [x for x in IMPLEMENTATIONS if x != "reference"])
def test_case_15_tiled_implementations_refuse_them(implementation: Any) -> None:
    query, key, value = qkv(Shape(1, 4, 4, 1, 1, 4, 4), USUAL, 15)
    attention(implementation)(query, key, value)  # the call itself may be refused

    def loss(query: Any) -> Any:
        attend = functools.partial(flashjax.dot_product_attention, implementation=implementation)
        return attend(query, key, value).sum()

    for derivative in (
        jax.hessian(loss),
        jax.grad(lambda x: jax.grad(loss)(x).sum()),
        lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=r"implementation='reference'"):
            derivative(query)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (query,), (query,))
