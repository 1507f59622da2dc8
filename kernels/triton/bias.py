"""The gradient of a bias that has rows and columns, in the bias's own shape.

A program takes one tile of one of the bias's own batch members and heads, and adds up dS over the
call's members and heads that the bias is broadcast to: no T × S array beside the gradient itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.tile import Tile, exists
from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.config import ForwardConfig
from flashjax.kernels.triton.matrix import Matrix, Rows, product
from flashjax.kernels.triton.tile import Scorer
from flashjax.masks import EMPTY, Blocks
from flashjax.spec import Aval, Operands, Spec
from flashjax.varying import varying_axes


def bias_gradient(
    spec: Spec,
    config: ForwardConfig,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """dBias (B|1, N|1, T, S), in the bias's dtype."""
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    scorer = Scorer(spec, operands, interpret=interpret)
    precision = scorer.precision
    own_batch, own_heads = operands.bias.shape[:2]
    # How many of the call's members and heads a program adds up.
    batches, heads = spec.batch // own_batch, spec.heads // own_heads
    seen: list[tl.Block] = []
    if operands.mask is not None:
        verdict = operands.mask.verdict(rows, columns)
        verdict = verdict.reshape((1,) * (4 - verdict.ndim) + verdict.shape)
        verdict = jnp.broadcast_to(verdict, (*verdict.shape[:2], rows.count, columns.count))
        seen = [tl.broadcast_block(verdict, heads, batches)]

    def of_query(_: Any, n: Any, b: Any) -> tuple[Any, Any]:
        return b, n

    def of_key(_: Any, n: Any, b: Any) -> tuple[Any, Any]:
        return b, 0

    query, d_output = (Matrix(x, of_query, heads, batches) for x in (operands.query, d_out))
    key, value = (
        Matrix(x, of_key, spec.key_heads, batches) for x in (operands.key, operands.value)
    )
    row_lse, row_delta = (Rows(x, of_query, heads, batches) for x in (lse, delta))
    own = scorer.blocks(heads, batches)

    def kernel(position: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest = refs
        operand_refs, (*seen_refs, d_bias_ref) = rest[: len(own)], rest[len(own) :]
        count = jnp.int32(columns.count)
        i, j = lax.div(position[0], count), lax.rem(position[0], count)
        first_head = position[1] * heads
        tile = Tile(i * rows.size, j * columns.size, rows.size, columns.size)

        def one(index: Any, total: jax.Array) -> jax.Array:
            b, n = lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))
            at = (b, n)
            k_at = (b, lax.div(first_head + n, jnp.int32(spec.group)))

            def add(total: jax.Array) -> jax.Array:
                reader = scorer.at(operand_refs, at)
                q = query.load(q_ref, tile.row, rows, at=at)
                do = d_output.load(do_ref, tile.row, rows, at=at)
                k = key.load(k_ref, tile.column, columns, at=k_at)
                v = value.load(v_ref, tile.column, columns, at=k_at)
                scored = reader.score(product(q, k, precision), tile, masked=True)
                pulled = reader.back(
                    scored,
                    row_lse.load(lse_ref, tile.row, rows, at=at),
                    row_delta.load(delta_ref, tile.row, rows, at=at),
                    product(do, v, precision),
                    tile,
                )
                return total + pulled.raw

            if not seen:
                return add(total)
            (block,) = seen
            lead = tuple(x if s != 1 else 0 for x, s in zip(at, block.array.shape, strict=False))
            visited = tl.load(seen_refs[0], (*lead, i, j)) != EMPTY
            return lax.cond(visited, add, lambda total: total, total)

        start = jnp.zeros((rows.size, columns.size), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), jnp.int32(batches * heads), one, start)
        index = (0, 0, tl.span(tile.row, rows.size), tl.span(tile.column, columns.size))
        tl.store(d_bias_ref, index, total, exists(spec, tile))

    bias = Aval(operands.bias.shape, operands.bias.dtype)
    blocks = [x.block for x in (query, key, value, d_output, row_lse, row_delta)]
    (found,) = tl.launch(
        kernel,
        "flashjax_backward_bias",
        tl.Grid(rows.count * columns.count, own_heads, own_batch),
        [*blocks, *own, *seen],
        [tl.broadcast_block(bias, 1, 1)],
        warps=config.warps,
        stages=1,
        axes=varying_axes(operands.query),
        interpret=interpret,
    )
    return found
