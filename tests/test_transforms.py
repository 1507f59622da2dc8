"""Attention under JAX's transformations: the same values as without them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import chunked, masks, scores
from tests.features import build, pairwise
from tests.inputs import (
    F32,
    F64,
    IMPLEMENTATIONS,
    Case,
    Shape,
    arrays_of,
    attend,
    attention,
    case,
    jit,
    qkv,
    run,
    small_tiles,
)

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SHAPE = Shape(2, 6, 7, 2, 1, 4, 4)
KEY = jax.random.key(1)


def close(found: Any, expected: Any) -> None:
    """Equal up to the order of sums: the values are of order 1."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def inputs() -> dict[str, Any]:
    """One example of everything that can be mapped."""
    r = np.random.default_rng(0)
    query, key, value = qkv(SHAPE, F32)
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias": r.normal(size=(2, 1, 7)).astype(np.float32),
        "mask": r.random((6, 7)) > 0.3,
        "segment_ids": (np.arange(12).reshape(2, 6) // 5, np.arange(14).reshape(2, 7) // 5),
        "scale": np.float32(0.4) * np.ones((), np.float32),
        "sinks": r.normal(size=2).astype(np.float32),
        "dropout_key": KEY,
        "slopes": r.uniform(0.1, 0.4, 2).astype(np.float32),
        "key_value_seq_lengths": np.array([5, 7], np.int32),
    }


FLOATS = ("query", "key", "value", "bias", "scale", "sinks", "slopes")


def stacked(name: str, x: Any, size: int) -> Any:
    """`size` different values of one input."""
    if name == "dropout_key":
        return jax.random.split(x, size)
    if name in FLOATS:
        steps = np.linspace(0.7, 1.3, size, dtype=np.float32)
        return np.stack([x * step for step in steps])
    if name == "mask":
        return np.stack([np.roll(x, i, axis=-1) for i in range(size)])
    if name == "segment_ids":
        return tuple(np.stack([np.roll(ids, i, axis=-1) for i in range(size)]) for ids in x)
    return np.stack([np.maximum(x - i, 0) for i in range(size)])


def at(x: Any, index: int) -> Any:
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


def tilted(score: Any, row: Any, column: Any, batch: Any, head: Any, *, slope: Any) -> Any:
    """A modifier to which batch and head numbers matter, which vmap must not shift."""
    distance = (row - column).astype(score.dtype)
    return score - slope * distance * (1 + batch).astype(score.dtype) + 0.1 * (head == 1)


def call(implementation: Any, given: dict[str, Any]) -> Any:
    given = dict(given)
    if "slopes" in given:
        given["score_mod"] = scores.ScoreMod(tilted, heads={"slope": given.pop("slopes")})
    if "dropout_key" in given:
        given["dropout_rate"] = 0.3
    matrices = [given.pop(name) for name in ("query", "key", "value")]
    return attention(implementation, **given)(*matrices)


def loss(implementation: Any, floats: dict[str, Any], rest: dict[str, Any]) -> Any:
    out, lse = call(implementation, floats | rest)
    return (out * out).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()


def step_of(implementation: Any, given: dict[str, Any]) -> Any:
    """Loss and gradients with respect to every float input."""
    floats = {n: x for n, x in given.items() if n in FLOATS}
    rest = {n: x for n, x in given.items() if n not in FLOATS}
    return jax.value_and_grad(functools.partial(loss, implementation))(floats, rest)


def subsets() -> list[tuple[str, ...]]:
    """Any two inputs are, in some row, both mapped, both not, and each mapped without the other."""
    names = tuple(inputs())
    rows = pairwise({name: ("", name) for name in names})
    drawn = [tuple(n for n in row.values() if n) for row in rows]
    return [names, ("query", "key", "value"), *(row for row in drawn if row)]


@each
@pytest.mark.parametrize("mapped", subsets(), ids="+".join)
def test_vmap_with_gradients_equals_the_loop(mapped: tuple[str, ...], implementation: Any) -> None:
    given, size = inputs(), 2
    many = {n: stacked(n, x, size) if n in mapped else x for n, x in given.items()}
    axes = {n: 0 if n in mapped else None for n in given}
    together = jit(jax.vmap(functools.partial(step_of, implementation), (axes,)))(many)
    one_by_one = alone(implementation)
    for index in range(size):
        example = {n: at(x, index) if n in mapped else x for n, x in many.items()}
        close(jax.tree.map(lambda x, i=index: x[i], together), one_by_one(example))


@functools.cache
def alone(implementation: Any) -> Any:
    return jit(functools.partial(step_of, implementation))


@each
@pytest.mark.parametrize("axes", [(1, 0, 2, 0), (-1, None, 1, None)], ids=str)
def test_vmap_over_other_axes(axes: tuple[Any, ...], implementation: Any) -> None:
    r = np.random.default_rng(3)
    query, key, value = qkv(SHAPE, F32, 3)
    each_of = [np.stack([x, x * 0.5, -x]) for x in (query, key, value)]
    each_of.append(r.random((3, 6, 7)) > 0.4)
    given = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(each_of, axes, strict=True)
    ]

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return attention(implementation, mask=mask)(query, key, value)

    together = jit(jax.vmap(attend, in_axes=axes, out_axes=1))(*given)
    for index in range(3):
        expected = jit(attend)(
            *(x[0] if a is None else x[index] for x, a in zip(each_of, axes, strict=True))
        )
        close(jax.tree.map(lambda x, i=index: x[:, i], together), expected)


@each
def test_vmap_of_vmap_and_grad_outside_vmap(implementation: Any) -> None:
    query, key, value = qkv(SHAPE, F32, 4)
    queries = np.stack([np.stack([query, -query]), np.stack([query * 2, query + 1])])
    keeps = np.random.default_rng(4).random((2, 6, 7)) > 0.3

    def one(query: Any, keep: Any, value: Any) -> Any:
        return attention(implementation, mask=keep)(query, key, value)

    nested = jax.vmap(jax.vmap(one, (0, None, None)), (0, 0, None))
    outs, lses = jit(nested)(queries, keeps, value)

    def total(value: Any) -> Any:
        return (nested(queries, keeps, value)[0] ** 2).sum()

    summed = jit(jax.grad(total))(value)
    expected = np.zeros_like(value)
    single = jit(
        lambda q, m: (one(q, m, value), jax.grad(lambda v: (one(q, m, v)[0] ** 2).sum())(value))
    )
    for i, j in itertools.product(range(2), range(2)):
        (out, lse), grad = single(queries[i, j], keeps[i])
        close((outs[i, j], lses[i, j]), (out, lse))
        expected += np.asarray(grad)
    close(summed, expected)


@each
def test_vmap_over_many_tiles(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members whose masks differ, so that each has a schedule of its own."""
    small_tiles(monkeypatch, 8, 16)
    shape = Shape(1, 45, 61, 2, 1, 4, 4)
    query, key, value = (x[0] for x in qkv(shape, F32, 5))
    lengths = np.array([61, 0, 17], np.int32)

    def step(length: Any, window: Any) -> Any:
        mask = masks.Causal(offset=window) & masks.Prefix(length)

        def total(*x: Any) -> Any:
            out, lse = attention(implementation, mask=mask)(*x)
            return (out * out).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(query, key, value)

    together = jit(jax.vmap(step))(lengths, np.array([0, 3, -20], np.int32))
    for index, window in enumerate((0, 3, -20)):
        expected = jit(step)(lengths[index], np.int32(window))
        close(jax.tree.map(lambda x, i=index: x[i], together), expected)


@each
def test_scan_carries_gradients(implementation: Any) -> None:
    query, key, value = qkv(Shape(1, 5, 5, 1, 1, 4, 4), F32, 6)
    attend = attention(implementation, is_causal=True)

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x + attend(x, key, value)[0], None), x, None, 3)[0].sum()

    def unrolled(x: Any) -> Any:
        for _ in range(3):
            x = x + attend(x, key, value)[0]
        return x.sum()

    close(jit(jax.value_and_grad(scanned))(query), jit(jax.value_and_grad(unrolled))(query))


@each
def test_while_loop_with_arrays_in_its_carry(implementation: Any) -> None:
    query, key, value = qkv(Shape(1, 5, 5, 1, 1, 4, 4), F32, 7)

    def attend(x: Any, mask: Any) -> Any:
        return attention(implementation, mask=mask)(x, key, value)[0]

    def body(carry: Any) -> Any:
        i, x, mask = carry
        return i + 1, attend(x, mask), masks.Causal(offset=mask.offset + 1)

    start = (0, query, masks.Causal(offset=jnp.int32(-1)))
    looped = jit(lambda: jax.lax.while_loop(lambda c: c[0] < 3, body, start)[1])()
    x = query
    for i in range(3):
        x = attend(x, masks.Causal(offset=i - 1))
    close(looped, x)


POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("flashjax_out", "flashjax_lse"),
    "one name": jax.checkpoint_policies.save_only_these_names("flashjax_out"),
}


@each
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_policies_give_the_same_gradients(policy: str, implementation: Any) -> None:
    made = remat_case()
    keywords: dict[str, Any] = {} if policy == "none" else {"policy": POLICIES[policy]}

    def attended(query: Any, key: Any, value: Any, operands: Any, arrays: Any) -> Any:
        return attend(implementation, made, query, key, value, operands, arrays)

    def both(inputs: Any, arrays: Any, cotangents: Any) -> Any:
        rematerialised = jax.checkpoint(attended, **keywords)
        results, pull = jax.vjp(lambda *x: rematerialised(*x, arrays), *inputs)
        return results, pull(cotangents)

    made.judge.hold(run(implementation, made, jit(both)))


@functools.cache
def remat_case() -> Case:
    return build(Shape(1, 9, 11, 2, 1, 4, 4), ("lengths", "alibi", "sinks", "bias (1,N,T,S)"))


def test_only_perturbed_operands_get_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant bias costs no array of T × S: the backward is not asked for its gradient."""
    asked = []
    backward = chunked.Chunked.backward

    def recorded(self: Any, spec: Any, *rest: Any) -> Any:
        asked.append(set(spec.wanted))
        return backward(self, spec, *rest)

    monkeypatch.setattr(chunked.Chunked, "backward", recorded)
    query, key, value = qkv(Shape(1, 23, 39, 2, 1, 4, 4), F32, 8)  # a shape not yet traced
    bias = np.zeros((1, 2, 23, 39), np.float32)

    def loss(query: Any, value: Any, bias: Any, scale: Any, slopes: Any) -> Any:
        arguments = {"bias": bias, "scale": scale, "score_mod": scores.Alibi(slopes)}
        return attention("xla", **arguments)(query, key, value)[0].sum()

    given = (query, value, bias, np.full((), 0.5, "f"), np.ones(2, "f"))
    names = ("query", "value", "bias", "scale", "score")
    for argnums in ((0,), (2,), (1, 3), (4,), (0, 1, 2, 3, 4)):
        asked.clear()
        jax.make_jaxpr(jax.grad(loss, argnums))(*given)
        assert asked
        assert all(wanted == {names[i] for i in argnums} for wanted in asked), asked


@each
def test_integer_and_boolean_operands_have_no_gradient(implementation: Any) -> None:
    query, key, value = qkv(SHAPE)

    def loss(query: Any, mask: Any, lengths: Any) -> Any:
        attend = attention(implementation, mask=mask, key_value_seq_lengths=lengths)
        return attend(query, key, value)[0].sum()

    given = (query, np.ones((6, 7), bool), np.array([5, 7], np.int32))
    grads = jax.grad(loss, (0, 1, 2), allow_int=True)(*given)
    assert grads[1].dtype == grads[2].dtype == jax.dtypes.float0


@each
def test_gradient_through_the_lse_alone(implementation: Any) -> None:
    made = case(Shape(1, 5, 6, 2, 1, 4, 4), F32, 9)
    inputs = (made.query, made.key, made.value)
    grads = jit(jax.grad(lambda *x: attention(implementation)(*x)[1].sum(), (0, 1, 2)))(*inputs)
    with jax.default_matmul_precision("highest"):  # a GPU's default rounds to TF32
        weights = jax.nn.softmax(
            jnp.einsum("btnh,bsh->bnts", made.query, made.key[:, :, 0]) / 2, axis=-1
        )
        close(grads[0], jnp.einsum("bnts,bsh->btnh", weights, made.key[:, :, 0]) / 2)
        close(grads[1][:, :, 0], jnp.einsum("bnts,btnh->bsh", weights, made.query) / 2)
    assert (np.asarray(grads[2]) == 0).all()


@each
def test_x64_mode_takes_every_dtype(implementation: Any) -> None:
    """Positions, ids and lengths of int64, scales of float64, next to float32 inputs."""
    made = build(Shape(1, 9, 11, 2, 1, 4, 4), ("is_causal", "lengths", "segments", "score_mod"))
    args = (made.query, made.key, made.value)
    narrow = arrays_of(made.arguments)

    def attended(arrays: Any, operands: Any) -> Any:
        return attend(implementation, made, *args, operands, arrays)

    expected = jit(attended)(narrow, dict(made.operands))
    with jax.enable_x64(True):
        found = jit(attended)([x.astype(np.int64) for x in narrow], dict(made.operands))
        assert [x.dtype for x in found] == [np.float32] * 2
        close(found, expected)
        out = attention(implementation, scale=np.asarray(0.3))(*args)[0]
        assert out.dtype == np.float32
        double = attention(implementation)(*(x.astype(F64) for x in args))
        assert [x.dtype for x in double] == [np.float64] * 2


def test_lowers_ahead_of_time_for_a_gpu_that_is_not_there() -> None:
    shape = Shape(1, 256, 256, 2, 1, 64, 64)
    args = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv(shape)]

    def step(*x: Any) -> Any:
        return jax.grad(lambda *x: attention(None, is_causal=True)(*x)[0].sum(), (0, 1, 2))(*x)

    for platform in ("cuda", "cpu"):
        lowered = jax.jit(step).trace(*args).lower(lowering_platforms=(platform,))
        assert "func.func public @main" in lowered.as_text()


@each
def test_compiles_ahead_of_time(implementation: Any) -> None:
    query, key, value = qkv(SHAPE)
    attend = jax.jit(attention(implementation, is_causal=True))
    compiled = attend.lower(query, key, value).compile()
    close(compiled(query, key, value), attend(query, key, value))


@each
def test_eager_calls_and_numpy_inputs_equal_jit(implementation: Any) -> None:
    given = inputs()
    close(call(implementation, given), jit(functools.partial(call, implementation))(given))


@each
def test_mask_terms_pass_through_jit_without_recompiling(implementation: Any) -> None:
    query, key, value = qkv(SHAPE)
    traced = 0

    @jax.jit
    def attend(mask: Any) -> Any:
        nonlocal traced
        traced += 1
        return attention(implementation, mask=mask)(query, key, value)[0]

    outs = [
        attend(masks.Prefix(jnp.int32(n)) & masks.Lengths(key=jnp.array([5, 6]))) for n in (2, 4)
    ]
    assert traced == 1
    assert np.abs(np.asarray(outs[0] - outs[1])).max() > 1e-3
