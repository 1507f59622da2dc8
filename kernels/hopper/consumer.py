"""A consumer warpgroup: it takes each item of the program."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.again import guarded
from flashjax.kernels.hopper.config import REGISTERS
from flashjax.kernels.hopper.items import Following, Place
from flashjax.kernels.hopper.refs import Call, Refs
from flashjax.kernels.hopper.rows import Pending, Rows, Sums, accumulators


def consume(call: Call, refs: Refs, warpgroup: Any) -> None:
    """Takes each item of the program."""
    config = call.config
    if config.consumers in REGISTERS:
        plgpu.set_max_registers(REGISTERS[config.consumers][0], action="increase")

    def run(*out_acc: Any) -> None:
        if call.ahead:
            _overlapping(call, refs, warpgroup, out_acc)
        else:
            _one_by_one(call, refs, warpgroup, out_acc)

    pl.run_scoped(run, *accumulators(call))
    if refs.end is not None:  # what others still send here must find it here
        plgpu.barrier_arrive(refs.end)
        plgpu.barrier_wait(refs.end)
    plgpu.wait_smem_to_gmem(0)


def _one_by_one(call: Call, refs: Refs, warpgroup: Any, out_acc: Any) -> None:
    def item(i: Any, place: Place, _: Any, before: Any) -> Any:
        rows = Rows(call, refs, warpgroup, place, i, before)
        rows.await_query()
        q = rows.query()
        m, l, p = rows.steps(q, out_acc, rows.first(q))
        sums = Sums(rows.last(out_acc, Pending(m, l, p)), m, l)
        rows.finish(guarded(rows, q, sums))
        return before + rows.walk.count

    call.items.each(refs.items, item, lambda _: jnp.int32(0))


def _overlapping(call: Call, refs: Refs, warpgroup: Any, out_acc: Any) -> None:
    """Scores the first tile of an item while the last one of the item before meets V."""

    def enter(place: Place) -> Any:
        rows = Rows(call, refs, warpgroup, place, jnp.int32(0), jnp.int32(0))
        rows.await_query()
        return jnp.int32(0), rows.first(rows.query()).rounded(call.spec.dtype)

    def item(i: Any, place: Place, following: Following, carry: Any) -> Any:
        before, pending = carry
        rows = Rows(call, refs, warpgroup, place, i, before)
        m, l, p = rows.steps(rows.query(), out_acc, pending)
        after = before + rows.walk.count

        def more() -> Any:
            later = Rows(call, refs, warpgroup, following.place, i + 1, after)
            return rows.hand_over(later, out_acc, Pending(m, l, p))

        def end() -> Any:
            return rows.last(out_acc, Pending(m, l, p)), Pending(m, l, p)

        out, pending = lax.cond(following.exists, more, end)
        rows.finish(Sums(out, m, l))
        return after, pending

    call.items.each(refs.items, item, enter)
