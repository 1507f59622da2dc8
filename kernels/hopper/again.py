"""A second, slow walk of an item whose sums came out NaN.

What no row sees may be NaN or inf, and 0 · NaN is NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.config import ROWS, guards
from flashjax.kernels.hopper.layouts import ROW, TILE
from flashjax.kernels.hopper.refs import Copies
from flashjax.kernels.hopper.rows import Rows, Sums, accumulators, scaled, spread
from flashjax.kernels.hopper.vote import any_of_warpgroup
from flashjax.kernels.tile import seen


def guarded(rows: Rows, q: Any, sums: Sums) -> Sums:
    """The sums, found once more if they came out NaN."""
    call, refs, own = rows.call, rows.refs, rows.warpgroup
    if not guards(call.spec):
        return sums
    plgpu.barrier_arrive(refs.done)
    totals = functools.reduce(jnp.add, (part.sum(axis=1) for part in sums.out))
    spoilt = any_of_warpgroup(totals != totals, interpreted=call.interpret is not None)

    def again(_: Sums) -> Sums:
        # Then this consumer may have a slot for itself.
        plgpu.barrier_wait(refs.done)
        # Reductions along columns go through memory that all warpgroups share: one after another.
        for other in range(call.config.consumers - 1):
            turn = refs.turn.at[other]
            pl.when(own > other)(functools.partial(plgpu.barrier_wait, turn))
        return Sums(*pl.run_scoped(run, *accumulators(call)))

    def run(*out_acc: Any) -> Sums:
        return _walk(rows, q, out_acc)

    found: Sums = lax.cond(spoilt, again, lambda sums: sums, sums)
    plgpu.barrier_arrive(refs.turn.at[own])
    return found


def _walk(rows: Rows, q: Any, out_acc: Any) -> Sums:
    """All tiles as masked ones, in the same order, with 0 for the values that no row sees."""
    call, refs, own = rows.call, rows.refs, rows.warpgroup
    rows.clear(out_acc)
    plgpu.commit_smem()  # what was read from there is read before TMA writes there

    def load(copies: Copies) -> None:
        for there, here in copies:
            plgpu.copy_gmem_to_smem(there, here, refs.again.at[own])
            plgpu.barrier_wait(refs.again.at[own])

    def step(t: Any, carry: Any) -> Any:
        m_before, l = carry
        tile = rows.tile(t)
        keys, values = call.copies(refs, rows.place, rows.walk.tile(t), own)
        load([*keys, *call.own_copies(refs, rows.place, rows.walk.tile(t), own)])
        scored = rows.reader.score(rows.scores_of(q, own), tile, True)
        refs.seen.at[own][...] = jnp.where(seen(scored, 0), 1.0, 0.0)
        weighed = rows.weigh(scored, tile, m_before)
        load(values)
        _clean(rows, tile.columns)
        plgpu.commit_smem()
        for acc in out_acc:
            acc[...] = scaled(acc[...], weighed.alpha)
        rows.meet_values(out_acc, weighed.p.astype(call.spec.dtype), own)
        for acc in out_acc:
            plgpu.wgmma_accumulator_load(acc, wait_n=0)
        return weighed.m, scaled(l, weighed.alpha) + weighed.total

    carry = (rows.none(), rows.zeros(ROWS, 8))
    m, l = lax.fori_loop(jnp.int32(0), rows.walk.count, step, carry)
    return Sums(tuple(acc[...] for acc in out_acc), m, l)


def _clean(rows: Rows, columns: int) -> None:
    """Sets to 0 the values of columns that no row of this warpgroup's sees."""
    v, own = rows.refs.v, rows.warpgroup
    wide = v.buffer.wide  # a part at a time: registers are few
    for i in range(0, columns, ROWS):
        some = plgpu.load(rows.refs.seen.at[own, pl.ds(i, ROWS)], layout=ROW) > 0
        for part in v.parts(own, pl.ds(i, ROWS)):
            for j in range(0, part.shape[1], wide):
                some_dims = part.at[:, pl.ds(j, wide)]
                values = plgpu.load(some_dims, layout=TILE)
                kept = jnp.where(spread(some, values.shape), values, jnp.zeros_like(values))
                some_dims[...] = kept
