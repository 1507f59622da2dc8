"""The forward kernel for Hopper: a producer warpgroup loads tiles, consumer warpgroups multiply.

Each consumer has 64 query rows. In a step it issues Q·Kᵀ of one tile and P·V of the tile before it,
and takes the softmax of the one while the other runs (FlashAttention-3, arXiv:2407.08608).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.buffers import held
from flashjax.kernels.hopper.config import (
    CLUSTER,
    REGISTERS,
    ForwardConfig,
    gain_of_parts,
    guards,
    heads_beside,
    heads_together,
    held_head_dim,
    reduction_scratch,
    staged,
)
from flashjax.kernels.hopper.consumer import consume
from flashjax.kernels.hopper.items import Items, Place
from flashjax.kernels.hopper.parts import merged, part_types
from flashjax.kernels.hopper.refs import Barriers, Call, Copies, Refs
from flashjax.kernels.hopper.tile import Scorer
from flashjax.kernels.hopper.walk import Walker
from flashjax.masks import Blocks
from flashjax.spec import Operands, Spec


def forward(
    spec: Spec, config: ForwardConfig, operands: Operands, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Hv) and LSE (B, N, T)."""
    whole = not config.programs and config.cluster == 1
    assert whole or not guards(spec), "a second walk wants a program, and its memory, to itself"
    assert not (config.ahead and config.query_in_registers), "Q is read twice where items overlap"
    together = heads_together(spec, config)
    same = together == 1 or not jax.tree.leaves(spec.shapes.mask)
    assert same, "heads that share keys and values walk over the same tiles"
    rows = Blocks(spec.rows, config.rows * config.cluster // together)
    columns = Blocks(spec.columns, config.columns)
    walker = Walker(spec, operands.mask, rows, columns)
    call = Call(
        spec,
        config,
        Scorer(
            spec,
            operands,
            rows,
            columns,
            staged=bool(staged(spec, config)),
            transposed=False,
            room=config.consumers < 3,
            interpreted=interpret is not None,
        ),
        walker,
        Items(
            spec,
            walker,
            config.programs // config.cluster,
            heads_beside(spec),
            together,
            gain=gain_of_parts(spec, config),
        ),
        interpret,
    )

    def kernel(*refs: Any) -> None:
        found = call.refs(refs)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == config.consumers)(lambda: produce(call, found))
        pl.when(warpgroup < config.consumers)(lambda: consume(call, found, warpgroup))

    out, lse, *parts = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((*spec.out.shape[:-1], held_head_dim(spec.value_dim)), spec.dtype),
            # A vector's copy does not end where the array does.
            jax.ShapeDtypeStruct((spec.batch, spec.heads, rows.padded), jnp.dtype(jnp.float32)),
            *part_types(call),
        ],
        scratch_types=scratch(call),
        grid=(call.items.programs,),
        grid_names=("program",),
        cluster=(config.cluster,) if call.paired else (),
        cluster_names=(CLUSTER,) if call.paired else (),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_scratch(spec)
        ),
        interpret=interpret,
        kernel_name="flashjax_forward",
    )(
        held(operands.query),
        held(operands.key),
        held(operands.value),
        *call.scorer.arrays,
        *walker.arrays,
        *call.items.arrays,
    )
    out, lse = out[..., : spec.value_dim], lse[..., : spec.rows]
    return merged(call, out, lse, *parts) if parts else (out, lse)


def scratch(call: Call) -> list[Any]:
    """Shared memory and barriers, in the order of the fields of `Refs`."""
    spec, config = call.spec, call.config
    consumers = config.consumers

    def of_all(**counts: Any) -> Any:
        return plgpu.ClusterBarrier(collective_axes=(CLUSTER,), **counts)

    def pair(
        number: int, loads: int, readers: int = consumers, empty: Any = plgpu.Barrier
    ) -> Barriers:
        full = plgpu.Barrier(num_barriers=number, num_arrivals=loads)
        return Barriers(full, empty(num_barriers=number, num_arrivals=readers))

    shared = of_all if call.paired else plgpu.Barrier
    q, k, v, _ = call.buffers
    parts = sum(len(x.widths) for x in call.staged.values())
    return [
        [buffer and buffer.scratch() for buffer in call.buffers],
        [buffer.scratch() for buffer in call.staged.values()],
        plgpu.SMEM((config.rows,), jnp.float32),
        plgpu.SMEM((consumers, config.columns), jnp.float32) if guards(spec) else None,
        pair(q.count, len(q.widths)),
        pair(k.count, len(k.widths), empty=shared),
        pair(v.count, len(v.widths), empty=shared),
        pair(consumers, parts, 1) if parts else None,
        plgpu.Barrier(num_arrivals=consumers),
        *(plgpu.Barrier(num_barriers=consumers) for _ in range(2)),
        of_all(num_arrivals=consumers) if call.paired else None,
    ]


def produce(call: Call, refs: Refs) -> None:
    """Loads the queries of each item, and its tiles of keys and values as slots become free."""
    config = call.config
    together = CLUSTER if call.paired else None
    if config.consumers in REGISTERS:
        plgpu.set_max_registers(REGISTERS[config.consumers][1], action="decrease")

    def load(copies: Copies, barriers: Barriers, slot: Any, used: Any, axes: Any = None) -> None:
        pl.when(used)(lambda: plgpu.barrier_wait(barriers.empty.at[slot]))
        for there, here in copies:
            plgpu.copy_gmem_to_smem(there, here, barriers.full.at[slot], collective_axes=axes)

    def item(i: Any, place: Place, _following: Any, carry: Any) -> Any:
        before = carry[1]
        walk = call.walk(refs, place)
        buffer = call.buffer(i)
        if call.items.shared:
            pl.when(i >= config.queries)(lambda: plgpu.barrier_wait(refs.q_bar.empty.at[buffer]))
        rows = pl.ds(call.first_row(place.block), config.rows)
        for dims, part in refs.q.copies(buffer, call.head_dims):
            plgpu.copy_gmem_to_smem(
                refs.query.at[place.batch, rows, place.head, dims], part, refs.q_bar.full.at[buffer]
            )

        @pl.loop(0, walk.count)
        def _(t: Any) -> None:
            step = before + t
            slot = call.slot(step)
            tile = walk.tile(t)
            keys, values = call.copies(refs, place, tile, slot)
            load(keys, refs.k_bar, slot, step >= config.stages, together)
            if refs.own_bar is not None:
                for consumer in range(config.consumers):
                    own = call.own_copies(refs, place, tile, consumer)
                    load(own, refs.own_bar, consumer, step >= 1)
            load(values, refs.v_bar, slot, step >= config.stages, together)

        return i + 1, before + walk.count

    start = jnp.int32(0), jnp.int32(0)
    items, steps = call.items.each(refs.items, item, lambda _: start)
    if call.interpret is not None:
        _observe(call, refs, items, steps)


def _observe(call: Call, refs: Refs, items: Any, steps: Any) -> None:
    """JAX's interpreter wants a thread that waits on a barrier to see all of its completions."""
    config = call.config
    for empty, used, count in (
        (refs.q_bar.empty, items if call.items.shared else 0, config.queries),
        (refs.k_bar.empty, steps, config.stages),
        (refs.v_bar.empty, steps, config.stages),
        (refs.own_bar and refs.own_bar.empty, steps * config.consumers, config.consumers),
    ):
        if empty is None:
            continue
        for slot in range(count):

            @pl.when(slot < used)
            def _(empty: Any = empty, slot: int = slot) -> None:
                plgpu.barrier_wait(empty.at[slot])
