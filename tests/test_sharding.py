"""Semantics 9: sharded calls add no collective, broadcast operands one all-reduce each."""

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flashjax

COLLECTIVES = ("all-reduce", "all-gather", "collective-permute", "all-to-all", "reduce-scatter")
B, T, N, H = 4, 40, 8, 16
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@pytest.fixture(autouse=True)
def _four_devices() -> None:
    assert jax.device_count() == 4, "conftest asks for four CPU devices"


def collectives(compiled: Any) -> dict[str, int]:
    """How many collectives a compiled program holds; a combined one counts its parts."""
    counts = {}
    for name in COLLECTIVES:
        found = re.findall(rf"= (\(?[^=]*?) {name}(?:-start)?\(", compiled.as_text())
        parts = sum(max(1, len(re.findall(r"\w+\[", shapes))) for shapes in found)
        if parts:
            counts[name] = parts
    return counts


def mesh_of(kind: Any) -> Any:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def inputs(key_heads: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"query": (B, T, N, H), "key": (B, T, key_heads, H), "value": (B, T, key_heads, H)}
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Operands with a gradient, and the rest.
    "plain": ({}, {"is_causal": True}),
    "broadcast": (
        {"bias": jax.random.normal(jax.random.key(5), (1, N, T, T)), "sinks": jnp.arange(N) / 3.0},
        {},
    ),
    "masked": (
        {},
        {
            "segment_ids": np.sort(np.random.default_rng(0).integers(-1, 3, (B, T))),
            "dropout_rate": 0.2,
            "dropout_key": jax.random.key(3),
        },
    ),
    "scored": (
        {},
        {"score_mod": flashjax.scores.Alibi(), "mask": flashjax.masks.Chunked(16)},
    ),
}


def program(extra: str, implementation: str | None = None) -> Any:
    """Output and every gradient, as a function of a dict of operands."""
    _, rest = EXTRAS[extra]

    def run(operands: dict[str, Any]) -> Any:
        def call(operands: dict[str, Any]) -> Any:
            return flashjax.dot_product_attention(**operands, **rest, implementation=implementation)

        out, pull = jax.vjp(call, operands)
        return out, pull(jnp.cos(out))[0]

    return run


def placed(mesh: Any, operands: dict[str, Any], key_heads: int) -> dict[str, Any]:
    heads = "model" if key_heads % 2 == 0 else None
    specs = {
        "query": P("data", None, "model"),
        "key": P("data", None, heads),
        "value": P("data", None, heads),
    }
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in operands.items()
    }


def assert_equal_values(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        # Shards add up a broadcast operand's gradient in another order, in float32.
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-20 * max(1.0, np.abs(b).max()))


@KINDS
@pytest.mark.parametrize(
    ("extra", "key_heads", "reductions"),
    [
        ("plain", 8, 0),
        ("plain", 2, 0),
        ("masked", 4, 0),
        ("scored", 8, 0),
        ("broadcast", 8, 2),  # bias and sinks
        ("plain", 1, 2),  # K and V, whose one head two shards share
    ],
)
def test_batch_and_heads_split_without_collectives(
    kind: Any, extra: str, key_heads: int, reductions: int
) -> None:
    operands = {**inputs(key_heads), **EXTRAS[extra][0]}
    run = program(extra)
    compiled = jax.jit(run).lower(placed(mesh_of(kind), operands, key_heads)).compile()
    found = compiled(placed(mesh_of(kind), operands, key_heads))
    assert collectives(compiled) == ({"all-reduce": reductions} if reductions else {})
    assert_equal_values(found, jax.jit(run)(operands))
    assert tuple(found[0].sharding.spec)[:3] == ("data", None, "model")


@pytest.mark.parametrize("heads", [(12, 6), (12, 3)])
def test_key_heads_that_the_shards_do_not_divide(heads: tuple[int, int]) -> None:
    """Four shards of 3 query heads: on one, key heads 0, 0, 1; with K = 3, one key head each."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AUTO,))
    keys = jax.random.split(jax.random.key(1), 3)
    query = jax.random.normal(keys[0], (1, T, heads[0], H))
    key, value = (jax.random.normal(k, (1, T, heads[1], H)) for k in keys[1:])
    operands = {"query": query, "key": key, "value": value}
    sharded = {
        **operands,
        "query": jax.device_put(query, NamedSharding(mesh, P(None, None, "model"))),
    }
    run = jax.jit(program("plain"))
    assert_equal_values(run(sharded), run(operands))


def test_shardings_given_to_jit_only() -> None:
    """Arrays that carry no mesh while tracing get one from in_shardings."""
    mesh, operands = mesh_of(AUTO), inputs(8)
    place = {name: NamedSharding(mesh, P("data", None, "model")) for name in operands}
    run = program("plain")
    compiled = jax.jit(run, in_shardings=(place,)).lower(operands).compile()
    assert collectives(compiled) == {}
    assert_equal_values(compiled(jax.device_put(operands, place)), jax.jit(run)(operands))


def test_constraint_inside_jit() -> None:
    mesh, operands = mesh_of(AUTO), inputs(8)
    place = NamedSharding(mesh, P("data", None, "model"))

    def run(operands: dict[str, Any]) -> Any:
        constrained = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), operands)
        return program("plain")(constrained)

    compiled = jax.jit(run).lower(placed(mesh, operands, 8)).compile()
    assert collectives(compiled) == {}


def test_a_split_sequence_is_gathered_on_an_auto_mesh_and_refused_on_an_explicit_one() -> None:
    operands = inputs(8)
    for kind in (AUTO, EXPLICIT):
        place = NamedSharding(mesh_of(kind), P(None, "data", "model"))
        split = {name: jax.device_put(x, place) for name, x in operands.items()}
        run = jax.jit(program("plain"))
        if kind is AUTO:
            assert_equal_values(run(split), run(operands))
        else:
            with pytest.raises(ValueError, match=r"query is sharded .* over its sequence axis"):
                run(split)


@pytest.mark.parametrize("inner", ["xla", "reference"])
def test_inside_shard_map_with_varying_axes_checked(inner: str) -> None:
    operands = {**inputs(4), **EXTRAS["broadcast"][0]}
    specs = {
        **{name: P("data", None, "model") for name in ("query", "key", "value")},
        "bias": P(None, "model"),
        "sinks": P("model"),
    }
    run = program("broadcast", inner)
    sharded = jax.jit(
        jax.shard_map(
            run, mesh=mesh_of(AUTO), in_specs=(specs,), out_specs=(P("data", None, "model"), specs)
        )
    )
    compiled = sharded.lower(operands).compile()
    assert collectives(compiled) == {"all-reduce": 2}
    assert_equal_values(compiled(operands), jax.jit(run)(operands))


def test_a_bias_split_where_the_query_is_not() -> None:
    operands = {**inputs(4), "bias": EXTRAS["broadcast"][0]["bias"]}
    place = {"bias": P(None, "model"), **{n: P("data") for n in ("query", "key", "value")}}
    mesh = mesh_of(EXPLICIT)
    split = {n: jax.device_put(x, NamedSharding(mesh, place[n])) for n, x in operands.items()}
    run = jax.jit(program("plain"))
    assert_equal_values(run(split), run(operands))


def test_explicit_mesh_in_context_and_vmap() -> None:
    mesh, operands = mesh_of(EXPLICIT), inputs(8)
    with jax.set_mesh(mesh):
        place = P("data", None, "model")
        sharded = {n: jax.device_put(x, NamedSharding(mesh, place)) for n, x in operands.items()}
        found = jax.jit(program("plain"))(sharded)
        mapped = jax.jit(jax.vmap(program("plain")))(jax.tree.map(lambda x: x[None], sharded))
    wanted = jax.jit(program("plain"))(operands)
    assert_equal_values(found, wanted)
    assert_equal_values(jax.tree.map(lambda x: x[0], mapped), wanted)


CACHED = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import flashjax

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((4, 8, 2, 8)), NamedSharding(mesh, P("data")))
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)

    def loss(q):
        return flashjax.dot_product_attention(q, q, q, is_causal=True).sum()

    jax.jit(jax.grad(loss)).lower(x).compile()
    print("hits", len(hits))
    """
)


def test_a_second_process_hits_the_compilation_cache(tmp_path: Any) -> None:
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CACHED],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        hits.append(int(done.stdout.split()[-1]))
    assert hits == [0, 1]
