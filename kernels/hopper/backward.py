"""The backward kernel for Hopper: five products a tile, in one pass over blocks of columns.

A program keeps a block of columns while blocks of rows stream by. Tiles are computed transposed, so
that Pᵀ and dSᵀ enter dV and dK from registers; dS also goes through shared memory for dQ, which is
added up in float32 in global memory (FlashAttention-3, arXiv:2407.08608).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper import adds
from flashjax.kernels.hopper.backward_config import (
    CONSUMERS,
    BackwardConfig,
    key_heads_beside,
)
from flashjax.kernels.hopper.backward_refs import Call, Refs
from flashjax.kernels.hopper.buffers import Tiles, held
from flashjax.kernels.hopper.columns import Columns, consume
from flashjax.kernels.hopper.config import (
    REGISTERS,
    ROWS,
    held_head_dim,
)
from flashjax.kernels.hopper.dims import Dims
from flashjax.kernels.hopper.items import Items, Place
from flashjax.kernels.hopper.order import Order
from flashjax.kernels.hopper.refs import Barriers, Copies
from flashjax.kernels.hopper.tile import Scorer
from flashjax.kernels.hopper.walk import Walker
from flashjax.kernels.sums import in_structure, summed
from flashjax.masks import Blocks
from flashjax.spec import Operands, Spec


class Given(NamedTuple):
    """What the backward is made from, as the kernel takes it."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    d_out: jax.Array
    shift: jax.Array  # (B, N, T padded)
    delta: jax.Array


def backward(
    spec: Spec,
    config: BackwardConfig,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    interpret: Any = None,
) -> Operands:
    """Gradients of ``spec.wanted`` but sinks, in their operands' dtypes."""
    rows, columns = Blocks(spec.rows, config.rows), Blocks(spec.columns, config.columns)
    walker = Walker(spec, operands.mask, rows, columns, "columns")
    scorer = Scorer(
        spec,
        operands,
        rows,
        columns,
        staged=False,
        transposed=True,
        room=False,
        interpreted=interpret is not None,
    )
    items = Items(spec, walker, 0, key_heads_beside(spec))
    order = Order(spec, walker) if spec.deterministic_backward else None
    call = Call(spec, config, scorer, walker, items, order, interpret)
    given = _given(call, operands, lse, delta, d_out)
    sums, d_key, d_value, *vectors = _run(call, given, adds.start(call))
    d_query = adds.finish(call, sums)
    found = Operands(
        query=d_query[..., : spec.head_dim],
        key=d_key[..., : spec.head_dim],
        value=d_value[..., : spec.value_dim],
        **in_structure(
            spec,
            {
                (x.name, x.leaf): summed(vector[..., : spec.columns], x)
                for x, vector in zip(call.sums, vectors, strict=True)
            },
        ),
    )
    unwanted = {"query", "key", "value"} - spec.wanted
    return dataclasses.replace(found, **dict.fromkeys(unwanted))


def _given(
    call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, d_out: jax.Array
) -> Given:
    """Without the NaN and inf of rows that see nothing and of columns that no row sees."""
    spec, scorer = call.spec, call.scorer
    query, key = operands.query, operands.key
    # What is seen and infinite, yet has a weight, made LSE NaN; without one it stays far from 0.
    if scorer.guards_rows:
        nothing = -jnp.inf if operands.sinks is None else operands.sinks[..., 0]
        unseeing = (lse == nothing).swapaxes(1, 2)[..., None]
        query = jnp.where(unseeing, jnp.nan_to_num(query), query)
        d_out = jnp.where(unseeing & ~jnp.isfinite(d_out), jnp.zeros_like(d_out), d_out)
    if scorer.guards_columns:
        key = jnp.nan_to_num(key)

    def padded(x: jax.Array) -> jax.Array:
        more = call.walker.other.padded - spec.rows
        return jnp.pad(x, [(0, 0)] * 2 + [(0, more)]) if more else x

    shift, unit = scorer.exponents.shift(lse), scorer.exponents.unit
    if call.folds:
        assert unit is not None
        shift, delta = shift * (-1 / unit), -delta
    value = held(operands.value)
    return Given(held(query), held(key), value, held(d_out), padded(shift), padded(delta))


def _run(call: Call, given: Given, sums: jax.Array) -> tuple[jax.Array, ...]:
    """dQ in float32, of heads before rows and before scaling, dK, dV and the sums along rows."""
    spec = call.spec

    def kernel(*refs: Any) -> None:
        found = call.refs(refs)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == CONSUMERS)(functools.partial(produce, call, found))
        # The consumers' code differs in what they do of dQ.
        kind = Dims if call.config.by_dims else Columns
        for i in range(CONSUMERS):
            pl.when(warpgroup == i)(functools.partial(consume, kind, call, found, i))

    outs = [
        jax.ShapeDtypeStruct((*x.shape[:-1], held_head_dim(x.shape[-1])), spec.dtype)
        for x in (spec.shapes.key, spec.shapes.value)
    ]
    # A vector's copy does not end where the array does.
    along_rows = spec.batch, spec.heads, call.walker.own.padded
    outs += [jax.ShapeDtypeStruct(along_rows, jnp.dtype(jnp.float32)) for _ in call.sums]
    run = plgpu.kernel(
        kernel,
        out_type=outs,
        scratch_types=scratch(call),
        grid=(call.items.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        # Sums along rows: each warp is by itself.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=call.interpret,
        kernel_name="flashjax_backward",
    )

    def body(state: Any) -> None:
        d_query, counters, *refs = state
        for ref, found in zip(refs, run(*inputs, d_query, *counters), strict=True):
            ref[...] = found

    # Written whole: XLA never makes these zeros.
    order = call.order
    inputs = (*given, *call.scorer.arrays, *call.walker.arrays, *(order.arrays if order else []))
    zeros = [jnp.zeros(x.shape, x.dtype) for x in outs]
    counters = [] if order is None else [order.counters(CONSUMERS)]
    start: Any = sums, counters, *zeros
    d_query, _, *rest = pl.run_state(body)(start)
    return d_query, *rest


def scratch(call: Call) -> list[Any]:
    """Shared memory and barriers, in the order of the fields of `Refs`."""
    config, buffers = call.config, call.buffers

    def pair(stages: int, loads: int) -> Barriers:
        full = plgpu.Barrier(num_barriers=stages, num_arrivals=loads)
        return Barriers(full, plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS))

    vector = plgpu.SMEM((config.stages, config.rows), jnp.float32)
    return [
        [buffer and buffer.scratch() for buffer in buffers],
        vector,
        vector,
        plgpu.SMEM((CONSUMERS, len(call.sums), ROWS), jnp.float32) if call.sums else None,
        plgpu.Barrier(num_arrivals=len(buffers.k.widths) + len(buffers.v.widths)),
        pair(config.stages, len(buffers.q.widths) + 2),
        pair(config.stages, len(buffers.do.widths)),
        plgpu.Barrier(num_arrivals=CONSUMERS),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]


def produce(call: Call, refs: Refs) -> None:
    """Loads K and V of the block, and blocks of rows as slots become free."""
    config, tiles = call.config, refs.tiles
    plgpu.set_max_registers(REGISTERS[CONSUMERS][1], action="decrease")

    def load(copies: Copies, barrier: Any) -> None:
        for there, here in copies:
            plgpu.copy_gmem_to_smem(there, here, barrier)

    def load_tile(ref: Any, at: Any, tile: Tiles, slot: Any, dims: Any, barrier: Any) -> None:
        load([(ref.at[*at, own], part) for own, part in tile.copies(slot, dims)], barrier)

    def item(_i: Any, place: Place, _following: Any, _: Any) -> Any:
        block, key_head, batch, _ = place
        at = (batch, call.columns(block), key_head)
        load_tile(refs.key, at, tiles.k, 0, call.head_dims, refs.block_bar)
        load_tile(refs.value, at, tiles.v, 0, call.value_dims, refs.block_bar)

        def head(n: Any, before: Any) -> Any:
            walk = call.walk(refs, (batch, n), block)

            @pl.loop(0, walk.total)
            def _(t: Any) -> None:
                step = before + t
                slot, rows = call.slot(step), call.rows(walk.tile(t))
                at, full = (batch, rows, n), refs.q_bar.full.at[slot]

                def await_slot(barriers: Barriers) -> None:
                    @pl.when(step >= config.stages)
                    def _() -> None:
                        plgpu.barrier_wait(barriers.empty.at[slot])

                await_slot(refs.q_bar)
                load_tile(refs.query, at, tiles.q, slot, call.head_dims, full)
                vectors = ((refs.shift, refs.row_shift), (refs.delta, refs.row_delta))
                load([(x.at[batch, n, rows], here.at[slot]) for x, here in vectors], full)
                await_slot(refs.do_bar)
                full = refs.do_bar.full.at[slot]
                load_tile(refs.d_out, at, tiles.do, slot, call.value_dims, full)

            return before + walk.total

        return call.each_head(key_head, head, jnp.int32(0))

    steps = call.items.each([], item, lambda _: jnp.int32(0))
    if call.interpret is not None:
        _observe(call, refs, steps)


def _observe(call: Call, refs: Refs, steps: Any) -> None:
    """JAX's interpreter wants a thread that waits on a barrier to see all of its completions."""
    config = call.config
    for bar in (refs.q_bar, refs.do_bar):
        for slot in range(config.stages):

            @pl.when(slot < steps)
            def _(empty: Any = bar.empty, slot: int = slot) -> None:
                plgpu.barrier_wait(empty.at[slot])
