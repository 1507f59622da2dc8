"""The 64 columns of a block that one warpgroup has: their dK and dV, and its share of dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from flashjax.kernels.hopper import adds
from flashjax.kernels.hopper.backward_config import CONSUMERS, SCORES, sent
from flashjax.kernels.hopper.backward_refs import Call, Refs
from flashjax.kernels.hopper.buffers import Tiles
from flashjax.kernels.hopper.config import REGISTERS, ROWS
from flashjax.kernels.hopper.items import Place
from flashjax.kernels.hopper.layouts import COLUMN, ROW, SCALAR, TILE
from flashjax.kernels.hopper.order import await_turn, pass_turn
from flashjax.kernels.tile import Reader, Tile


def consume(kind: type[Columns], call: Call, refs: Refs, consumer: int) -> None:
    """Takes each item of the program."""
    plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")

    def item(_i: Any, place: Place, _following: Any, _: Any) -> Any:
        own = kind(call, refs, consumer, place)
        wides = own.widths()
        accumulators = [plgpu.ACC((ROWS, wide), jnp.float32) for x in wides for wide in x]

        def run(*acc: Any) -> None:
            count = len(wides[0])
            own.run(acc[:count], acc[count:])

        pl.run_scoped(run, *accumulators)
        return jnp.int32(0)

    call.items.each([], item, lambda _: jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


class Rows(NamedTuple):
    """One block of rows of one query head."""

    block: Any
    head: Any
    turn: Any = None  # at its dQ; negative for the 0 of no block


class Step(NamedTuple):
    """What is taken in at once."""

    count: Any  # of the item's steps before it
    rows: Rows
    last: Rows  # of the step before
    masked: Any  # a bool where the host knows
    await_next: Callable[[], None]  # for the next step's queries


# Of each operand without rows: a tile's values summed along rows.
Vectors = tuple[jax.Array, ...]


class Columns:
    """The columns of one item that are this consumer's."""

    def __init__(self, call: Call, refs: Refs, consumer: int, place: Place) -> None:
        self.call, self.refs, self.place, self.consumer = call, refs, place, consumer
        self.share = call.share(consumer)
        self.mine, self.rows = self.part()
        self.first = place.block * call.config.columns + self.mine.start

    def part(self) -> tuple[Any, Any]:
        """Columns and rows of a tile whose P and dS are this consumer's."""
        return pl.ds(self.consumer * ROWS, ROWS), pl.ds(0, self.call.config.rows)

    def widths(self) -> tuple[list[int], list[int]]:
        """Of the accumulators of dK and of dV."""
        return self.call.buffers.k.widths, self.call.buffers.v.widths

    def run(self, dk_acc: Any, dv_acc: Any) -> None:
        call, refs = self.call, self.refs
        block, key_head, batch, _ = self.place
        for acc in (*dk_acc, *dv_acc):
            acc[...] = plgpu.layout_cast(jnp.zeros(acc.shape, jnp.float32), TILE)
        plgpu.barrier_wait(refs.block_bar)
        # What the first step finds of the one before: it adds 0 to its own rows.
        none = plgpu.layout_cast(jnp.zeros((ROWS, self.rows.size), call.spec.dtype), TILE)
        self.share_scores(jnp.int32(-1), none)

        def head(n: Any, carry: Any) -> Any:
            before, last = carry
            walk = call.walk(refs, (batch, n), block)
            reader = call.scorer.at(refs.own, (batch, n))

            def await_query(t: Any) -> None:
                @pl.when(t < walk.total)
                def _() -> None:
                    plgpu.barrier_wait(refs.q_bar.full.at[call.slot(before + t)])

            def step(t: Any, carry: Any, masked: Any) -> Any:
                last, sums = carry
                masked = masked(t) if callable(masked) else masked
                tile = walk.tile(t, masked if isinstance(masked, bool) else None)
                rows = Rows(tile, n, self.turn(n, tile))
                here = Step(before + t, rows, last, masked, lambda: await_query(t + 1))
                found = self.step(here, reader, dk_acc, dv_acc)
                return rows, tuple(a + b for a, b in zip(sums, found, strict=True))

            await_query(jnp.int32(0))
            nought = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW) if call.sums else None
            carried: Any = last, (nought,) * len(call.sums)
            # Two loops take registers for the addresses of both.
            for masked, begin, end in walk.one_loop() if call.folds else walk.all_loops():
                body = functools.partial(step, masked=masked)
                carried = lax.fori_loop(begin, end, body, carried)
            last, sums = carried
            self.send_sums(n, sums)
            return before + walk.total, last

        first = call.first_head(key_head)
        start = Rows(
            call.walk(refs, (batch, first), block).tile(jnp.int32(0)),
            first,
            None if call.order is None else jnp.int32(-1),
        )
        count, last = call.each_head(key_head, head, (jnp.int32(0), start))
        self.add_query(count - 1, last, lambda: None, pending=0)
        self.count(last)
        self.finish(dk_acc, dv_acc)

    def held(self, tiles: Tiles) -> Any:
        """The columns' K or V."""
        return tiles.parts(moving(), self.mine)

    def scores(self, count: Any) -> Any:
        """The block's dSᵀ of a step."""
        return self._shared(self.refs.tiles.ds, count)

    def weights(self, count: Any) -> Any:
        """The same of Pᵀ, where consumers share it."""
        return self._shared(self.refs.tiles.p, count)

    def _shared(self, tiles: Tiles, count: Any) -> Any:
        (found,) = tiles.parts(lax.rem(count + jnp.int32(SCORES), jnp.int32(SCORES)))
        return found

    def share_scores(self, count: Any, ds: jax.Array) -> None:
        """Makes a step's dSᵀ known to both consumers."""
        self.scores(count).at[self.mine][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.ds_bar)

    def await_scores(self) -> None:
        """Of the step before."""
        plgpu.barrier_wait(self.refs.ds_bar)

    def step(self, here: Step, reader: Reader, dk_acc: Any, dv_acc: Any) -> Vectors:
        """Takes in one block of rows, and adds up dQ of the one before.

        Thus no consumer waits for the other's part of dS.
        """
        refs, slot = self.refs, self.call.slot(here.count)
        q, do = refs.tiles.q.parts(slot), refs.tiles.do.parts(slot)
        p, ds, sums = self.weigh(here, reader, q, do)
        for acc, part in zip(dv_acc, do, strict=True):
            plgpu.wgmma(acc, p, part)
        self.share_scores(here.count, ds)
        for acc, part in zip(dk_acc, q, strict=True):
            plgpu.wgmma(acc, ds, part)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.q_bar.empty.at[slot])
        plgpu.barrier_arrive(refs.do_bar.empty.at[slot])
        return sums

    def weigh(
        self, here: Step, reader: Reader, q: Any, do: Any
    ) -> tuple[jax.Array, jax.Array, Vectors]:
        """Pᵀ and dSᵀ, rounded, and the tile's part of the sums along rows."""
        refs, config, folds = self.refs, self.call.config, self.call.folds
        slot, dtype = self.call.slot(here.count), self.call.spec.dtype
        row, rows = here.rows.block * config.rows + self.rows.start, self.rows.size
        block = config.rows, config.columns
        tile = Tile(row, self.first, rows, ROWS, transposed=True, block=block)

        def vector(ref: Any) -> jax.Array:
            found: jax.Array = plgpu.load(ref.at[slot, self.rows], layout=COLUMN)
            return found

        def with_scores(s_acc: Any) -> Any:
            if folds:
                s_acc[...] = tile.of_rows(vector(refs.row_shift))
            issue = functools.partial(meet, s_acc, self.held(refs.tiles.k), q)
            self.add_query(here.count - 1, here.last, issue, pending=len(q))
            plgpu.barrier_wait(refs.do_bar.full.at[slot])
            # Its registers are those of dQ, which is on its way by now.
            return pl.run_scoped(functools.partial(with_both, s_acc), products)

        def with_both(s_acc: Any, dp_acc: Any) -> Any:
            if folds:
                dp_acc[...] = tile.of_rows(vector(refs.row_delta))
            meet(dp_acc, self.held(refs.tiles.v), do)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(do))
            told = isinstance(here.masked, bool)
            scored = reader.score(s, tile, told and here.masked)
            if not told:
                scores = lax.cond(
                    here.masked, lambda s: reader.score(s, tile, True).scores, same, s
                )
                scored = scored._replace(scores=scores)
            p = reader.weights(scored, None if folds else vector(refs.row_shift), tile)
            p = lax.optimization_barrier(p)
            # It also keeps the compiler from waiting for dP before the exponentials.
            here.await_next()
            self.count(here.last)
            d_p = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            # 0 tells what is hidden, and takes no registers.
            if not told:
                d_p = lax.cond(here.masked, lambda d_p: jnp.where(p != 0, d_p, 0.0), same, d_p)
            elif here.masked:
                scored = scored._replace(keep=p != 0)
            delta = None if folds else vector(refs.row_delta)
            pulled = reader.gradients(scored, p, delta, d_p, tile)
            # A gradient that is the same everywhere would have no layout.
            values = (plgpu.layout_cast(x.of(scored, pulled), TILE) for x in self.call.sums)
            sums = tuple(x.sum(tile.row_axis) for x in values)
            return pulled.weights.astype(dtype), pulled.products.astype(dtype), sums

        products = plgpu.ACC(tile.shape, jnp.float32)
        found: tuple[jax.Array, jax.Array, Vectors] = pl.run_scoped(with_scores, products)
        return found

    def add_query(self, count: Any, of: Rows, then: Callable[[], None], pending: int) -> None:
        """Adds this consumer's share of a step's dS · K to the sums in global memory.

        `then` issues other products: so many, which are left `pending`.
        """
        self.await_scores()
        first, size = self.share.dims
        at_once = sent(size)
        for begin in range(first, first + size, at_once):
            last = begin + at_once == first + size
            after = (then, pending) if last else (lambda: None, 0)
            found = self.query_part(count, (begin, at_once), *after)
            self.send(found, of, begin, wait=begin == first)

    def query_part(
        self, count: Any, dims: tuple[int, int], then: Callable[[], None], pending: int
    ) -> list[jax.Array]:
        """Some head dims of it, in the parts of K."""
        ds, rows = self.scores(count), self.share.rows
        keys = self.refs.tiles.k.parts_of(moving(), *dims)

        def products(*acc: Any) -> list[jax.Array]:
            for part, own in zip(keys, acc, strict=True):
                plgpu.wgmma(own, ds.at[:, pl.ds(*rows)].transpose((1, 0)), part)
            then()
            return [plgpu.wgmma_accumulator_load(own, wait_n=pending) for own in acc]

        accumulators = [plgpu.ACC((ROWS, part.shape[1]), jnp.float32) for part in keys]
        found: list[jax.Array] = pl.run_scoped(products, *accumulators)
        return found

    def send(self, found: list[jax.Array], of: Rows, first: int, *, wait: bool) -> None:
        """Adds the dims from `first` on; with `wait`, when it is its turn."""
        if wait and of.turn is not None:
            await_turn(self.counter(of), of.turn)
        slab = of.block * (self.call.config.rows // ROWS) + self.share.rows[0] // ROWS
        at = self.place.batch, of.head, slab
        for part in found:
            adds.add_tile(self.refs.d_query, at, first, part)
            first += part.shape[1]

    def send_sums(self, head: Any, sums: Vectors) -> None:
        """Those of one query head."""
        if not sums:
            return
        refs, columns = self.refs, pl.ds(self.first, ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the head before is out
        for i, x in enumerate(sums):
            refs.own_sums.at[self.consumer, i][...] = x
        plgpu.commit_smem()
        for i, there in enumerate(refs.sums):
            own = refs.own_sums.at[self.consumer, i]
            plgpu.copy_smem_to_gmem(own, there.at[self.place.batch, head, columns])

    def turn(self, head: Any, rows: Any) -> Any:
        """At dQ of a block of rows; None where any order will do."""
        order, (block, _, batch, _) = self.call.order, self.place
        return None if order is None else order.turn(self.refs.turns, (batch, head), block, rows)

    def counter(self, of: Rows) -> Any:
        """Of this consumer's additions to dQ of a block of rows, by all programs."""
        order, at = self.call.order, (self.place.batch, of.head)
        assert order is not None
        return self.refs.done_adds.at[order.counter(at, of.block, self.consumer, CONSUMERS)]

    def count(self, of: Rows) -> None:
        """Lets the next program add, after `send`."""
        if of.turn is not None:
            pass_turn(self.counter(of), lax.select(of.turn < 0, jnp.int32(0), jnp.int32(1)))

    def finish(self, dk_acc: Any, dv_acc: Any) -> None:
        """Sends dK and dV on their way through the memory of K and V."""
        call, refs = self.call, self.refs
        _, key_head, batch, _ = self.place
        scale = call.spec.scale if call.scorer.folded else None
        dk, dv = (
            [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in own] for own in (dk_acc, dv_acc)
        )
        plgpu.barrier_arrive(refs.done)
        plgpu.barrier_wait(refs.done)
        columns = pl.ds(self.first, ROWS)
        for found, tiles, there, dims, factor in (
            (dk, refs.tiles.k, refs.d_key, call.head_dims, scale),
            (dv, refs.tiles.v, refs.d_value, call.value_dims, None),
        ):
            parts, copies = self.leaving(tiles, dims)
            for x, part in zip(found, parts, strict=True):
                part[...] = (x if factor is None else x * factor).astype(call.spec.dtype)
            plgpu.commit_smem()
            for own, part in copies:
                plgpu.copy_smem_to_gmem(part, there.at[batch, columns, key_head, own])

    def leaving(self, tiles: Tiles, dims: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """This consumer's part of the memory of K or V, and its copies to global memory."""
        return tiles.parts(0, self.mine), tiles.copies(0, dims, self.mine)


def same(x: jax.Array) -> jax.Array:
    return x


def meet(acc: Any, own: Any, streamed: Any) -> None:
    """Adds the products of the columns' K or V with the rows' Q or dO."""
    for a, b in zip(own, streamed, strict=True):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))


def moving() -> Any:
    """0, which the compiler cannot tell.

    Where it can tell that a tile's place never changes, it keeps descriptors of all its parts in
    registers, and spills them.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)

    @plgpu.inline_mgpu(return_type=scalar)
    def zero(_: Any) -> Any:
        integer = ir.IntegerType.get_signless(32)
        found = llvm.inline_asm(integer, [], "mov.b32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return zero()
