"""Cases 16 to 27 of cases.md. Case 19's counts of collectives stand in tests/test_sharding.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flashjax
import flashjax.linen
from flashjax import masks
from tests import oracle
from tests.features import build, grid
from tests.inputs import (
    BF16,
    F32,
    IMPLEMENTATIONS,
    USUAL,
    Shape,
    attention,
    case,
    check,
    dropout_pattern,
    jit,
    pulled,
    qkv,
    run,
    same_bits,
    skipping_refusals,
    small_tiles,
    step_of,
)

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each
@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, None, None, 0), (0, 0, 0, None)], ids=str)
def test_case_16_vmap_over_segment_ids_equals_the_loop(
    mapped: tuple[Any, ...], implementation: Any
) -> None:
    shape = Shape(3, 10, 10, 2, 1, 8, 8)
    ids = np.sort(np.random.default_rng(16).integers(0, 3, (3, 10)), axis=1)
    ids[:, 8:] = -1
    inputs = [
        x if axis == 0 else x[0]
        for x, axis in zip((*qkv(shape, USUAL, 16), ids), mapped, strict=True)
    ]

    def loss(query: Any, key: Any, value: Any, ids: Any) -> Any:
        out, lse = attention(implementation, segment_ids=ids)(query, key, value)
        return (out * out).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), out

    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    together = jit(jax.vmap(step, in_axes=mapped))(*inputs)
    alone = jit(step)
    for index in range(3):
        one = (x[index] if axis == 0 else x for x, axis in zip(inputs, mapped, strict=True))
        for found, expected in zip(
            jax.tree.leaves(together), jax.tree.leaves(alone(*one)), strict=True
        ):
            np.testing.assert_allclose(found[index], expected, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_case_17_masks_made_inside_loops(dtype: Any, implementation: Any) -> None:
    shape = Shape(1, 6, 6, 1, 1, 8, 8)
    query, key, value = qkv(shape, dtype, 17)
    row, column = grid(shape)

    def attend(step: Any) -> Any:
        ids = (jnp.arange(6) >= step)[None].astype(jnp.int32)
        mask = masks.Causal(offset=step) & (masks.Segments(ids) | masks.Prefix(step))
        return attention(implementation, mask=mask)(query, key, value)[0]

    def keep(step: int) -> Any:
        same = (row >= step) == (column >= step)
        return (column <= row + step) & (same | (column < step))

    _, scanned = jit(lambda: jax.lax.scan(lambda c, i: (c, attend(i)), 0, jnp.arange(4)))()

    def put(carry: Any) -> Any:
        return carry[0] + 1, carry[1].at[carry[0]].set(attend(carry[0]))

    start = 0, jnp.full(scanned.shape, jnp.nan, dtype)
    looped = jit(lambda: jax.lax.while_loop(lambda c: c[0] < 4, put, start))()[1]
    for i in range(4):
        judge = case(shape, dtype, 17, options={"keep": keep(i)}).judge
        for found in (scanned, looped):
            judge.hold({"out": np.asarray(found[i])})


@each
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_case_18_dropout_keeps_the_mean(dtype: Any, implementation: Any) -> None:
    shape, rate, seeds = Shape(1, 4, 24, 2, 1, 8, 8), 0.1, 400
    query, key, value = qkv(shape, dtype, 18)

    def dropped(seed: Any) -> Any:
        drop = attention(implementation, dropout_rate=rate, dropout_key=jax.random.key(seed))
        return drop(query, key, value)

    outs, lses = jit(jax.vmap(dropped))(jnp.arange(seeds))
    out, lse = oracle.attention(query, key, value)
    found = np.asarray(outs, np.float64)
    sigma = found.std(0) / np.sqrt(seeds)
    rounding = {F32: 1e-6, BF16: 2**-8 * np.abs(out).max()}[dtype]
    assert (np.abs(found.mean(0) - out) < 5 * sigma + rounding).all()
    np.testing.assert_allclose(lses, np.broadcast_to(lse, lses.shape), atol=1e-5)


def test_case_18_dropout_has_one_pattern_in_all_implementations() -> None:
    shape = Shape(1, 128, 512, 2, 1, 1, 1)
    pattern = dropout_pattern(18, shape, 0.1)
    share = pattern.mean()
    assert abs(share - 0.9) < 5 * np.sqrt(0.09 / pattern.size)
    for implementation in IMPLEMENTATIONS:
        np.testing.assert_array_equal(dropout_pattern(18, shape, 0.1, implementation), pattern)


@each
@pytest.mark.parametrize("inside", ["jit", "shard_map"])
def test_case_19_sharded_batch_and_heads_need_no_collective(
    inside: str, implementation: Any
) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices, simulated or real")
    shape = Shape(2, 16, 16, 4, 2, 8, 8)
    row, column = grid(shape)
    made = case(shape, USUAL, 19, options={"keep": column <= row})
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place, rows = P("data", None, "model", None), P("data", None, "model")
    attend = attention(implementation, is_causal=True)

    def constrained(*inputs: Any) -> Any:
        inputs = tuple(
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, place)) for x in inputs
        )
        return attend(*inputs)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=place, out_specs=(place, rows))

    def both(inputs: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(constrained if inside == "jit" else mapped, *inputs)
        return results, pull(cotangents)

    inputs = [
        jax.device_put(x, NamedSharding(mesh, place)) for x in (made.query, made.key, made.value)
    ]
    cotangents = tuple(
        jax.device_put(x, NamedSharding(mesh, p))
        for x, p in zip(made.cotangents, (place, rows), strict=True)
    )
    compiled = jax.jit(both).lower(inputs, cotangents).compile()
    text = compiled.as_text() or ""
    assert "fusion" in text or "dot" in text
    for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert name not in text, name
    (out, lse), grads = compiled(inputs, cotangents)
    names = ("out", "lse", "query", "key", "value")
    judged = dict(zip(names, map(np.asarray, (out, lse, *grads)), strict=True))
    made.judge.hold(judged)


@each
def test_case_20_gradient_of_a_checkpoint(implementation: Any) -> None:
    shape = Shape(3, 16, 17, 5, 5, 19, 19)
    keep = np.random.default_rng(20).random((3, 1, 1, 17)) > 0.4
    made = case(shape, USUAL, 20, options={"keep": keep})
    attend = jax.checkpoint(attention(implementation, mask=keep))
    results, grads = pulled(attend, (made.query, made.key, made.value), made.cotangents)
    names = ("out", "lse", "query", "key", "value")
    made.judge.hold(dict(zip(names, map(np.asarray, (*results, *grads)), strict=True)))


@pytest.mark.parametrize("capability", ["7.5", "8.6", "8.9", "12.0"])
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 256), (F32, 128)], ids=str)
def test_case_21_a_device_without_a_fitting_kernel_takes_the_next(
    dtype: Any, width: int, capability: str
) -> None:
    x = jax.ShapeDtypeStruct((1, 256, 4, width), dtype)
    device = flashjax.Device("cuda", "NVIDIA", capability)
    explained = flashjax.explain(x, x, x, is_causal=True, device=device)
    assert explained.implementation in ("triton", "xla")
    if explained.implementation == "xla":
        reasons = dict(explained.refused)
        assert {"mosaic", "triton"} <= set(reasons)
        assert all(reasons.values())


@each
def test_case_22_one_query_row_sees_all_written_keys(implementation: Any) -> None:
    shape = Shape(2, 1, 40, 4, 2, 8, 8)
    written = np.array([7, 33], np.int32)
    keep = np.arange(40) < written[:, None, None, None]
    arguments = {"key_value_seq_lengths": written}
    made = case(shape, USUAL, 22, arguments=arguments, options={"keep": keep})
    check(implementation, made)


@each
def test_case_22_linen_decodes_as_it_attends(implementation: Any) -> None:
    attend = functools.partial(
        flashjax.linen.attention_fn, is_causal=True, implementation=implementation
    )
    # On a GPU the layer's own products round to TF32 by default, other rows with other products.
    make = functools.partial(
        linen.MultiHeadDotProductAttention, num_heads=2, attention_fn=attend, precision="highest"
    )
    x = np.random.default_rng(22).normal(size=(2, 6, 8)).astype(np.float32)
    layer, decoder = make(), make(decode=True)
    with skipping_refusals(implementation):
        variables = decoder.init(jax.random.key(0), x)
        whole = layer.apply({"params": variables["params"]}, x)
    params, cache = variables["params"], variables["cache"]

    @jit
    def step(cache: Any, row: Any) -> Any:
        out, updated = decoder.apply({"params": params, "cache": cache}, row, mutable=["cache"])
        return out, updated["cache"]

    outs = []
    for t in range(6):
        out, cache = step(cache, x[:, t : t + 1])
        outs.append(out[:, 0])
    np.testing.assert_allclose(np.stack(outs, 1), np.asarray(whole), atol=2e-6)


@each
def test_case_23_the_same_bits_twice(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 24, 40)
    made = build(Shape(2, 61, 90, 4, 2, 8, 8), ("prefix", "sinks", "deterministic"))
    step = step_of(implementation, made)
    first, second = run(implementation, made, step), run(implementation, made, step)
    again = run(implementation, made)  # compiled anew
    made.judge.hold(first)
    for name, x in first.items():
        assert same_bits(x, second[name]), name
        assert same_bits(x, again[name]), name


@each
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [(2, 1, 0), (2, 64, 0), (2, 128, 0), (2, 0, 5), (0, 4, 5)]
)
def test_case_24_nothing_to_see_or_to_ask(
    batch: int, rows: int, columns: int, sinks: bool, implementation: Any
) -> None:
    shape = Shape(batch, rows, columns, 2, 1, 8, 4)
    made = build(shape, ("sinks",) if sinks else ())
    results = check(implementation, made)
    assert results["out"].shape == (batch, rows, 2, 4)
    if columns == 0:
        assert (results["out"] == 0).all()
        expected = made.operands["sinks"] if sinks else -np.inf
        assert (results["lse"] == expected).all()


@each
def test_case_25_merge_of_parts_some_of_them_empty(implementation: Any) -> None:
    shape = Shape(2, 5, 12, 2, 1, 8, 8)
    keep = np.ones((2, 1, 5, 12), bool)
    keep[:, :, :, 4:9] = False  # the second part sees nothing
    keep[0, :, 2] = False  # a row that no part sees
    made = case(shape, F32, 25, options={"keep": keep})

    def merged(query: Any, key: Any, value: Any) -> Any:
        return flashjax.merge(
            [
                attention(implementation, mask=keep[..., cut])(query, key[:, cut], value[:, cut])
                for cut in (slice(0, 4), slice(4, 9), slice(9, 9), slice(9, 12))
            ]
        )

    results, grads = pulled(merged, (made.query, made.key, made.value), made.cotangents)
    names = ("out", "lse", "query", "key", "value")
    judged = dict(zip(names, map(np.asarray, (*results, *grads)), strict=True))
    for name, x in judged.items():
        assert not np.isnan(x).any(), name
        expected = made.judge.reference[name]
        np.testing.assert_allclose(x, expected.astype(np.float32), atol=2e-6, err_msg=name)
    empty = attention(implementation, mask=np.zeros((1, 1, 1, 1), bool))
    inputs = (made.query, made.key, made.value)
    (out, lse), grads = pulled(
        lambda *x: flashjax.merge([empty(*x), empty(*x)]), inputs, made.cotangents
    )
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()
    assert all((np.asarray(grad) == 0).all() for grad in grads)


@each
@pytest.mark.parametrize("by", ["lengths", "segments"])
def test_case_26_batch_members_of_length_0(
    by: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, 16, 32)
    shape = Shape(3, 70, 70, 2, 1, 8, 8)
    lengths = np.array([37, 0, 70])
    real = np.arange(70) < lengths[:, None]
    if by == "lengths":
        arguments = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    else:
        arguments = {"segment_ids": np.where(real, 3, -1)}
    keep = (real[:, :, None] & real[:, None, :])[:, None]
    made = case(shape, USUAL, 26, arguments=arguments, options={"keep": keep})
    results = check(implementation, made)
    for name in ("out", "query", "key", "value"):
        assert (results[name][~real] == 0).all(), name
    assert (results["lse"][~real] == -np.inf).all()


@each
def test_case_27_errors_name_the_argument(implementation: Any) -> None:
    query, key, value = qkv(Shape(1, 4, 6, 4, 2, 8, 8), F32)
    attend = attention(implementation)
    with pytest.raises(TypeError, match=r"key has dtype float32 and query bfloat16"):
        attend(query.astype(BF16), key, value)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 1, 1, 4, 6\); wanted .*rank <= 4"):
        attend(query, key, value, mask=np.ones((1, 1, 1, 4, 6), bool))
    with pytest.raises(ValueError, match=r"query has 4 heads and key 3; wanted N a multiple of K"):
        attend(query, key.repeat(2, 2)[:, :, :3], value.repeat(2, 2)[:, :, :3])
    with pytest.raises(TypeError, match=r"mask has dtype int32; wanted bool"):
        attend(query, key, value, mask=np.ones((4, 6), np.int32))
