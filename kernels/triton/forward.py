"""The forward kernel: FlashAttention-2's (arXiv:2307.08691, Alg. 1), a program a row block.

Each program keeps its rows' queries, walks the tiles of its schedule, PARTIAL ones first, and
divides once at the end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flashjax.kernels import softmax
from flashjax.kernels.tile import Tile, seen
from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.config import ForwardConfig
from flashjax.kernels.triton.matrix import Matrix, Parts, Rows, product, scaled_sum
from flashjax.kernels.triton.tile import Scorer
from flashjax.kernels.triton.walk import Walker, guarded
from flashjax.masks import Blocks
from flashjax.spec import Operands, Spec
from flashjax.varying import varying_axes


def forward(
    spec: Spec, config: ForwardConfig, operands: Operands, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T)."""
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    scorer = Scorer(spec, operands, interpret=interpret)
    precision = scorer.precision
    walker = Walker(spec, operands.mask, rows, columns, "rows")
    group = spec.group

    query = Matrix(operands.query, lambda _, n, b: (b, n))
    key = Matrix(operands.key, lambda _, n, b: (b, n // group))
    value = Matrix(operands.value, lambda _, n, b: (b, n // group))
    out = Matrix(spec.out, lambda _, n, b: (b, n))
    lse = Rows(spec.lse, lambda _, n, b: (b, n))
    own = scorer.blocks()
    path = walker.blocks()

    def kernel(position: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, *rest = refs
        operand_refs, walk_refs = rest[: len(own)], rest[len(own) : -2]
        out_ref, lse_ref = rest[-2:]
        block = walker.block(position[0])
        reader = scorer.at(operand_refs)
        q = query.load(q_ref, block * rows.size, rows)

        def take(masked: bool, guard: bool) -> Any:
            def body(j: jax.Array, carry: Any) -> Any:
                running, acc = carry
                tile = Tile(block * rows.size, j * columns.size, rows.size, columns.size)
                k = key.load(k_ref, tile.column, columns, masked)
                v = value.load(v_ref, tile.column, columns, masked)
                scored = reader.score(product(q, k, precision), tile, masked)
                if guard:
                    v = v.only(seen(scored, tile.row_axis))
                running, alpha, p = scorer.exponents.update(running, scored.scores)
                (p,) = reader.drop(tile, p)
                return running, scaled_sum(acc, alpha, p, v, precision)

            return body

        carry = (
            softmax.start((rows.size,), jnp.dtype(jnp.float32)),
            Parts.zeros(rows.size, spec.value_dim),
        )

        def walk(guard: bool) -> Any:
            return walker.run(walk_refs, 0, block, take, carry, guard)

        (m, l), acc = guarded(walk, lambda found: found[1], scorer.guards_columns)
        sink = None
        if operands.sinks is not None:
            tile = Tile(0, 0, rows.size, columns.size)
            sink = reader.load("sinks", tile).astype(jnp.float32)
        factor, lse_rows = scorer.exponents.finish(softmax.Running(m, l), sink)
        out.store(out_ref, block * rows.size, rows, acc.times(factor))
        lse.store(lse_ref, block * rows.size, rows, lse_rows)

    found = tl.launch(
        kernel,
        "flashjax_forward",
        tl.Grid(rows.count, spec.heads, spec.batch),
        [query.block, key.block, value.block, *own, *path],
        [out.block, lse.block],
        warps=config.warps,
        stages=config.stages,
        axes=varying_axes(operands.query),
        interpret=interpret,
    )
    return found[0], found[1]
