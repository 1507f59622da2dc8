"""The backward: one pass over row blocks for dQ, one over column blocks for dK and dV.

FlashAttention-2 (arXiv:2307.08691, Alg. 2) recomputes P from Q, K and LSE and adds dQ by atomics.
Two passes cost seven products a tile and not five, but every sum has one order: the same call
gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.sums import Sum, in_structure, summed, sums
from flashjax.kernels.tile import Tile, seen
from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.bias import bias_gradient
from flashjax.kernels.triton.config import BackwardConfig, ForwardConfig
from flashjax.kernels.triton.matrix import Matrix, Parts, Rows, product, weighted
from flashjax.kernels.triton.tile import Scorer
from flashjax.kernels.triton.walk import Walker, guarded
from flashjax.masks import Blocks
from flashjax.spec import Aval, Operands, Spec
from flashjax.varying import varying_axes


class Given(NamedTuple):
    """What the backward is made from."""

    operands: Operands
    lse: jax.Array
    delta: jax.Array
    d_out: jax.Array


def backward(spec: Spec, config: BackwardConfig, given: Given, *, interpret: bool) -> Operands:
    """Gradients of ``spec.wanted`` but sinks, in their operands' dtypes."""
    found: dict[str, Any] = dict.fromkeys(("query", "key", "value"))
    extra: dict[tuple[str, int], jax.Array] = {}
    rows, columns = sums(spec, "rows"), sums(spec, "columns")
    if "query" in spec.wanted or rows:
        found["query"], *vectors = query_gradient(
            spec, config.query, given, rows, interpret=interpret
        )
        extra |= {(x.name, x.leaf): summed(v, x) for x, v in zip(rows, vectors, strict=True)}
    if spec.wanted & {"key", "value"} or columns:
        found["key"], found["value"], *vectors = key_gradient(
            spec, config, given, columns, interpret=interpret
        )
        extra |= {(x.name, x.leaf): summed(v, x) for x, v in zip(columns, vectors, strict=True)}
    for x in sums(spec, "tile"):
        extra[x.name, x.leaf] = bias_gradient(spec, config.query, *given, interpret=interpret)
    found = {name: grad if name in spec.wanted else None for name, grad in found.items()}
    return Operands(**{**found, **in_structure(spec, extra)})


def query_gradient(
    spec: Spec, config: ForwardConfig, given: Given, extra: list[Sum], *, interpret: bool
) -> list[jax.Array]:
    """dQ, and for each of `extra` its sums along rows (B, N, T), float32."""
    operands = given.operands
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    scorer = Scorer(spec, operands, interpret=interpret)
    precision = scorer.precision
    walker = Walker(spec, operands.mask, rows, columns, "rows")
    group = spec.group

    def place(_: Any, n: Any, b: Any) -> tuple[Any, Any]:
        return b, n

    query, d_out = Matrix(operands.query, place), Matrix(given.d_out, place)
    key = Matrix(operands.key, lambda _, n, b: (b, n // group))
    value = Matrix(operands.value, lambda _, n, b: (b, n // group))
    lse, delta = Rows(given.lse, place), Rows(given.delta, place)
    vector = Rows(Aval(spec.lse.shape, jnp.float32), place)
    own, path = scorer.blocks(), walker.blocks()

    def kernel(position: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest = refs
        operand_refs, rest = rest[: len(own)], rest[len(own) :]
        walk_refs, (dq_ref, *sum_refs) = rest[: len(path)], rest[len(path) :]
        block = walker.block(position[0])
        start = block * rows.size
        reader = scorer.at(operand_refs)
        q, do = query.load(q_ref, start, rows), d_out.load(do_ref, start, rows)
        row_lse, row_delta = lse.load(lse_ref, start, rows), delta.load(delta_ref, start, rows)

        def take(masked: bool, guard: bool) -> Any:
            def body(j: jax.Array, carry: Any) -> Any:
                dq, vectors = carry
                tile = Tile(start, j * columns.size, rows.size, columns.size)
                k = key.load(k_ref, tile.column, columns, masked)
                v = value.load(v_ref, tile.column, columns, masked)
                scored = reader.score(product(q, k, precision), tile, masked)
                d_p = product(do, v, precision)
                pulled = reader.back(scored, row_lse, row_delta, d_p, tile)
                if guard:
                    k = k.only(seen(scored, tile.row_axis))
                vectors = tuple(
                    v + x.of(scored, pulled).sum(tile.column_axis)
                    for v, x in zip(vectors, extra, strict=True)
                )
                return dq + weighted(pulled.products, k, precision), vectors

            return body

        zeros = tuple(jnp.zeros(rows.size, jnp.float32) for _ in extra)
        carry = (Parts.zeros(rows.size, spec.head_dim), zeros)

        def walk(guard: bool) -> Any:
            return walker.run(walk_refs, 0, block, take, carry, guard)

        dq, vectors = guarded(walk, lambda found: found[0], scorer.guards_columns)
        query.store(dq_ref, start, rows, scorer.scaled(dq))
        for ref, found in zip(sum_refs, vectors, strict=True):
            vector.store(ref, start, rows, found)

    out = Matrix(Aval(operands.query.shape, spec.dtype), place)
    return tl.launch(
        kernel,
        "flashjax_backward_query",
        tl.Grid(rows.count, spec.heads, spec.batch),
        [x.block for x in (query, key, value, d_out, lse, delta)] + own + path,
        [out.block] + [vector.block] * len(extra),
        warps=config.warps,
        stages=config.stages,
        axes=varying_axes(operands.query),
        interpret=interpret,
    )


def key_gradient(
    spec: Spec, config: ForwardConfig, given: Given, extra: list[Sum], *, interpret: bool
) -> list[jax.Array]:
    """dK, dV, and for each of `extra` its sums along columns (B, N, S), float32.

    Tiles are computed transposed, so that Pᵀ and dSᵀ enter their products from registers. A
    program takes the query heads of its key head one after another.
    """
    operands = given.operands
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    scorer = Scorer(spec, operands, interpret=interpret)
    precision = scorer.precision
    walker = Walker(spec, operands.mask, rows, columns, "columns")
    group = spec.group

    def place(_: Any, k: Any, b: Any) -> tuple[Any, Any]:
        return b, k

    query, d_out = Matrix(operands.query, place, group), Matrix(given.d_out, place, group)
    key, value = Matrix(operands.key, place), Matrix(operands.value, place)
    lse, delta = Rows(given.lse, place, group), Rows(given.delta, place, group)
    vector = Rows(Aval((spec.batch, spec.heads, spec.columns), jnp.float32), place, group)
    own, path = scorer.blocks(group), walker.blocks(group)

    def kernel(position: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest = refs
        operand_refs, rest = rest[: len(own)], rest[len(own) :]
        walk_refs, (dk_ref, dv_ref, *sum_refs) = rest[: len(path)], rest[len(path) :]
        block = walker.block(position[0])
        start = block * columns.size
        k, v = key.load(k_ref, start, columns), value.load(v_ref, start, columns)

        def head(g: Any, carry: Any, guard: bool) -> Any:
            reader, at = scorer.at(operand_refs, (0, g)), (0, g)

            def take(masked: bool, guard: bool) -> Any:
                def body(i: jax.Array, carry: Any) -> Any:
                    dk, dv, vectors = carry
                    tile = Tile(i * rows.size, start, rows.size, columns.size, transposed=True)
                    q = query.load(q_ref, tile.row, rows, masked, at)
                    do = d_out.load(do_ref, tile.row, rows, masked, at)
                    row_lse = lse.load(lse_ref, tile.row, rows, masked, at)
                    row_delta = delta.load(delta_ref, tile.row, rows, masked, at)
                    scored = reader.score(product(k, q, precision), tile, masked)
                    d_p = product(v, do, precision)
                    pulled = reader.back(scored, row_lse, row_delta, d_p, tile)
                    if guard:
                        kept = seen(scored, tile.column_axis)
                        do, q = do.only(kept), q.only(kept)
                    dv = dv + weighted(pulled.weights, do, precision)
                    dk = dk + weighted(pulled.products, q, precision)
                    vectors = tuple(
                        v + x.of(scored, pulled).sum(tile.row_axis)
                        for v, x in zip(vectors, extra, strict=True)
                    )
                    return dk, dv, vectors

                return body

            zeros = tuple(jnp.zeros(columns.size, jnp.float32) for _ in extra)
            *carry, vectors = walker.run(walk_refs, g, block, take, (*carry, zeros), guard)
            for ref, found in zip(sum_refs, vectors, strict=True):
                vector.store(ref, start, columns, found, at)
            return tuple(carry)

        carry = tuple(Parts.zeros(columns.size, dim) for dim in (spec.head_dim, spec.value_dim))

        def walk(guard: bool) -> Any:
            body = functools.partial(head, guard=guard)
            if group == 1:
                return body(0, carry)
            return lax.fori_loop(jnp.int32(0), jnp.int32(group), body, carry)

        dk, dv = guarded(walk, tuple, scorer.guards_rows)
        key.store(dk_ref, start, columns, scorer.scaled(dk))
        value.store(dv_ref, start, columns, dv)

    outs = [Matrix(Aval(x.shape, x.dtype), place) for x in (operands.key, operands.value)]
    return tl.launch(
        kernel,
        "flashjax_backward_key",
        tl.Grid(columns.count, spec.key_heads, spec.batch),
        [x.block for x in (query, key, value, d_out, lse, delta)] + own + path,
        [x.block for x in outs] + [vector.block] * len(extra),
        warps=config.warps,
        stages=config.stages,
        axes=varying_axes(operands.query),
        interpret=interpret,
    )
