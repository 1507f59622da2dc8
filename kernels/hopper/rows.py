"""The 64 rows of an item that one warpgroup has: their scores, softmax and output."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels import softmax
from flashjax.kernels.hopper.config import CLUSTER, ROWS
from flashjax.kernels.hopper.items import Place
from flashjax.kernels.hopper.layouts import ROW, TILE
from flashjax.kernels.hopper.refs import Call, Refs
from flashjax.kernels.hopper.tile import Staged
from flashjax.kernels.hopper.vote import any_of_warp
from flashjax.kernels.hopper.walk import Walk
from flashjax.kernels.tile import Reader, Scored, Tile

# A maximum moves only where it grew by more than this power of 2: until then exponentials stay
# below 2⁸ and O needs no rescaling (FlashAttention-4).
SLACK = 8.0
# Weights are rounded to float16 after dropout has divided them: powers of 2 that it holds.
FLOAT16_POWERS = 15.0


class Sums(NamedTuple):
    """Of the tiles so far: O in the parts that V has, the maxima in units of log₂, and sums of
    weights, (64, 8) of them.
    """

    out: tuple[jax.Array, ...]
    m: jax.Array
    l: jax.Array


class Pending(NamedTuple):
    """After a tile: maxima and sums as in `Sums`, and its weights, which have yet to meet V."""

    m: jax.Array
    l: jax.Array
    p: jax.Array

    def rounded(self, dtype: Any) -> Pending:
        return self._replace(p=self.p.astype(dtype))


class Weighed(NamedTuple):
    """A tile's exponentials under the maxima `m`, and what those make of earlier sums."""

    m: jax.Array
    alpha: jax.Array
    p: jax.Array
    total: jax.Array


class Rows:
    """The 64 rows of one item that are this warpgroup's."""

    def __init__(
        self, call: Call, refs: Refs, warpgroup: Any, place: Place, i: Any, before: Any
    ) -> None:
        """`i` counts the program's items, `before` the steps of those before this one."""
        self.call, self.refs, self.warpgroup, self.place = call, refs, warpgroup, place
        self.before, self.buffer = before, call.buffer(i)
        self.mine = pl.ds(warpgroup * ROWS, ROWS)
        self.first_row = call.first_row(place.block) + warpgroup * ROWS
        self.walk: Walk = call.walk(refs, place)
        own = list(refs.own)
        for leaf, tiles in refs.staged.items():
            own[leaf] = Staged(tiles.parts(warpgroup))
        self.reader: Reader = call.scorer.at(own, (place.batch, place.head))

    @property
    def slack(self) -> float:
        spec = self.call.spec
        if spec.dtype != jnp.float16:
            return SLACK
        return max(0.0, min(SLACK, FLOAT16_POWERS + math.log2(1 - spec.dropout_rate)))

    def query(self) -> list[Any]:
        """What the products take as Q."""
        q = self.refs.q.parts(self.buffer, self.mine)
        if self.call.config.query_in_registers:
            q = [plgpu.load(part, layout=TILE) for part in q]
            plgpu.commit_smem()  # TMA may write there next
            self.free_query()
        return q

    def await_query(self) -> None:
        plgpu.barrier_wait(self.refs.q_bar.full.at[self.buffer])

    def free_query(self) -> None:
        """Lets later queries come, unless O has yet to leave through their memory."""
        if self.call.items.shared and self.refs.o is not None:
            plgpu.barrier_arrive(self.refs.q_bar.empty.at[self.buffer])

    def slot(self, t: Any) -> Any:
        return self.call.slot(self.before + t)

    def tile(self, t: Any) -> Tile:
        columns = self.call.config.columns
        return Tile(self.first_row, self.walk.tile(t) * columns, ROWS, columns)

    def score(self, products: jax.Array, tile: Tile, masked: bool) -> Scored:
        barriers, own = self.refs.own_bar, self.warpgroup
        if barriers is not None:
            plgpu.barrier_wait(barriers.full.at[own])
        scored = self.reader.score(products, tile, masked)
        if barriers is not None:
            plgpu.commit_smem()  # TMA writes there next
            plgpu.barrier_arrive(barriers.empty.at[own])
        return scored

    @property
    def interpreted(self) -> bool:
        return self.call.interpret is not None

    def weigh(self, scored: Scored, tile: Tile, m_before: jax.Array | None = None) -> Weighed:
        """With `m_before` None, of a first tile."""
        exponents, scores = self.call.scorer.exponents, scored.scores
        slack = self.slack * exponents.doubling
        if m_before is None:
            m_before, largest = self.none(), exponents.maxima(scores)
        else:
            largest = self._largest(scores, m_before)
        goal = largest
        if self.call.spec.dtype != jnp.float16:  # whose small weights would be 0
            # From 0 on a maximum is quicker to compare with. Whole powers of 2 above the largest
            # score, its weight rounds to itself: a row of one column gets that one's very values.
            powers = (largest * (-1 / exponents.doubling)).astype(jnp.int32) + 1
            raised = largest + powers.astype(jnp.float32) * exponents.doubling
            goal = jnp.where((largest < 0) & (largest > -slack), raised, largest)
        m = jnp.where(largest - m_before > slack, goal, m_before)
        # A row that has seen nothing: any finite number in place of −inf.
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        p = exponents.weights(scores, spread(shift, scores.shape))
        total = partial_sums(p)
        (p,) = self.reader.drop(tile, p)
        return Weighed(m, exponents.decay(m_before, shift), p, total)

    def _largest(self, scores: jax.Array, m_before: jax.Array) -> jax.Array:
        """The largest score of each row and `m_before`, in units of maxima.

        The bits of floats from 0 on are in order as integers, those of negative ones below them:
        where no maximum is negative the bits will do, of which Hopper compares three at a time.
        """
        exponents = self.call.scorer.exponents

        def by_bits(scores: jax.Array) -> jax.Array:
            largest = lax.bitcast_convert_type(scores, jnp.int32).max(-1)
            return exponents.of_maximum(lax.bitcast_convert_type(largest, jnp.float32))

        negative = any_of_warp(m_before < 0, interpreted=self.interpreted)
        return jnp.maximum(m_before, lax.cond(negative, exponents.maxima, by_bits, scores))

    def none(self) -> jax.Array:
        return plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)

    def zeros(self, *shape: int) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)

    def products(self, with_acc: Any) -> jax.Array:
        shape = (ROWS, self.call.config.columns)
        found: jax.Array = pl.run_scoped(with_acc, plgpu.ACC(shape, jnp.float32))
        return found

    def first(self, q: Any) -> Pending:
        """The first tile's weights."""
        start = self.slot(jnp.int32(0))
        plgpu.barrier_wait(self.refs.k_bar.full.at[start])

        return self._first_of(self.scores_of(q, start))

    def scores_of(self, q: Any, slot: Any) -> jax.Array:
        """Q·Kᵀ of the keys in a slot."""

        def products(acc: Any) -> jax.Array:
            self._meet_keys(acc, q, slot)
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        return self.products(products)

    def _meet_keys(self, acc: Any, q: Any, slot: Any) -> None:
        for rows, columns in zip(q, self.refs.k.parts(slot), strict=True):
            plgpu.wgmma(acc, rows, columns.transpose((1, 0)))

    def meet_values(self, out_acc: Any, p: jax.Array, slot: Any) -> None:
        for acc, values in zip(out_acc, self.refs.v.parts(slot), strict=True):
            plgpu.wgmma(acc, p, values)

    def clear(self, out_acc: Any) -> None:
        for acc in out_acc:
            acc[...] = self.zeros(*acc.shape)

    def _first_of(self, products: jax.Array) -> Pending:
        plgpu.barrier_arrive(self.refs.k_bar.empty.at[self.slot(jnp.int32(0))])
        tile = self.tile(jnp.int32(0))
        scored = self.score(products, tile, self.call.walker.masks_first)
        m, _, p, total = lax.optimization_barrier(self.weigh(scored, tile))
        self._await_key(jnp.int32(1))
        return Pending(m, total, p)

    def _await_key(self, t: Any) -> None:
        """Waits for a step's keys before the products in flight are waited for.

        It keeps the compiler from waiting for P·V before the exponentials.
        """

        @pl.when(t < self.walk.count)
        def _() -> None:
            plgpu.barrier_wait(self.refs.k_bar.full.at[self.slot(t)])

    def steps(self, q: Any, out_acc: Any, pending: Pending) -> Pending:
        """From the first tile's weights to the last one's; `out_acc` has O of those before it."""
        refs, dtype = self.refs, self.call.spec.dtype
        self.clear(out_acc)

        def step(t: Any, carry: Pending, masked: bool) -> Pending:
            m_before, l, p = carry
            here, last = self.slot(t), self.slot(t - 1)

            found = self._both_products(q, here, out_acc, p, last)
            plgpu.barrier_arrive(refs.k_bar.empty.at[here])
            tile = self.tile(t)
            weighed = self.weigh(self.score(found, tile, masked), tile, m_before)
            m, alpha, p, total = lax.optimization_barrier(weighed)
            self._await_key(t + 1)
            out = self._out(out_acc, last)
            p = p.astype(dtype)

            def rescaled(out: Any, l: jax.Array) -> Any:
                return tuple(scaled(x, alpha) for x in out), scaled(l, alpha)

            moved = any_of_warp(m != m_before, interpreted=self.interpreted)
            out, l = lax.cond(moved, rescaled, lambda out, l: (out, l), out, l)
            for acc, x in zip(out_acc, out, strict=True):
                acc[...] = x
            return Pending(m, l + total, p)

        carry = pending.rounded(dtype)
        for masked, begin, end in self.walk.loops():
            carry = lax.fori_loop(begin, end, functools.partial(step, masked=masked), carry)
        if not self.call.config.query_in_registers:
            self.free_query()
        return carry

    def last(self, out_acc: Any, pending: Pending) -> tuple[jax.Array, ...]:
        """O, with the last tile's P·V."""
        last = self.slot(self.walk.count - 1)
        plgpu.barrier_wait(self.refs.v_bar.full.at[last])
        self.meet_values(out_acc, pending.p, last)
        return self._out(out_acc, last)

    def hand_over(
        self, following: Rows, out_acc: Any, pending: Pending
    ) -> tuple[tuple[jax.Array, ...], Pending]:
        """The same, while the first tile of the following item is scored."""
        last, start = self.slot(self.walk.count - 1), following.slot(jnp.int32(0))
        following.await_query()
        plgpu.barrier_wait(self.refs.k_bar.full.at[start])
        found = following._first_of(
            self._both_products(following.query(), start, out_acc, pending.p, last)
        )
        return self._out(out_acc, last), found.rounded(self.call.spec.dtype)

    def _both_products(self, q: Any, here: Any, out_acc: Any, p: jax.Array, last: Any) -> jax.Array:
        """Q·Kᵀ of the keys in slot `here`, with P·V of the values in slot `last` left in flight."""
        refs = self.refs

        def products(acc: Any) -> jax.Array:
            self._meet_keys(acc, q, here)
            plgpu.barrier_wait(refs.v_bar.full.at[last])
            self.meet_values(out_acc, p, last)
            return plgpu.wgmma_accumulator_load(acc, wait_n=len(out_acc))

        return self.products(products)

    def _out(self, out_acc: Any, last: Any) -> tuple[jax.Array, ...]:
        """O, once the values in slot `last` have entered it."""
        out = tuple(plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in out_acc)
        plgpu.barrier_arrive(self.refs.v_bar.empty.at[last])
        return out

    def finish(self, sums: Sums) -> None:
        """Divides, and sends output and LSE on their way."""
        call, refs, piece = self.call, self.refs, self.place.piece
        factor, lse = self._divided(sums)
        separate = refs.o is not None
        if call.items.shared and separate:  # the item before is out
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = tuple(scaled(x, factor) for x in sums.out)
        self._put(out)
        refs.l.at[self.mine][...] = lse
        plgpu.commit_smem()
        if piece is None:
            self._send_whole()
        else:
            pl.when(piece.number < 0)(self._send_whole)
            pl.when(piece.number >= 0)(functools.partial(self._send_part, piece.number, out))
        if call.items.shared and not separate:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.q_bar.empty.at[self.buffer])

    def _divided(self, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """The factor of O, and LSE."""
        sink = None
        if self.call.spec.shapes.sinks is not None:
            whole = Tile(self.first_row, 0, ROWS, self.call.config.columns)
            sink = self.reader.load("sinks", whole).astype(jnp.float32)
            if self.place.piece is not None:  # it counts once
                first = self.place.piece.begin == 0
                sink = lax.select(first, sink, jnp.float32(-jnp.inf))
        running = softmax.Running(sums.m, sums.l.sum(axis=1))
        return self.call.scorer.exponents.finish(running, sink)

    @property
    def _outgoing(self) -> tuple[Any, Any]:
        """The memory that O leaves through, and the number of its tile."""
        return (self.refs.q, self.buffer) if self.refs.o is None else (self.refs.o, 0)

    def _put(self, out: tuple[jax.Array, ...]) -> None:
        tiles, i = self._outgoing
        for part, x in zip(tiles.parts(i, self.mine), out, strict=True):
            part[...] = x.astype(self.call.spec.dtype)

    def _send(self, to: Any) -> None:
        """What has been put there to (64, dim) of global memory, made by ``to(dims)``."""
        tiles, i = self._outgoing
        for dims, part in tiles.copies(i, self.call.value_dims, self.mine):
            plgpu.copy_smem_to_gmem(part, to(dims))

    def _send_whole(self) -> None:
        refs, (_, head, batch, _) = self.refs, self.place
        rows = pl.ds(self.first_row, ROWS)
        self._send(lambda dims: refs.out.at[batch, rows, head, dims])
        plgpu.copy_smem_to_gmem(refs.l.at[self.mine], refs.lse.at[batch, head, rows])

    def _send_part(self, number: Any, out: tuple[jax.Array, ...]) -> None:
        """O as its rounded value and what that leaves of it, LSE."""
        parts, together, own = self.refs.parts, self.call.items.together, self.call.walker.own
        assert parts is not None
        if together > 1:
            number = number * together + lax.axis_index(CLUSTER)
        rows = pl.ds(self.first_row - self.place.block * own.size, ROWS)
        self._send(lambda dims: parts.out.at[number, 0, rows, dims])
        plgpu.copy_smem_to_gmem(self.refs.l.at[self.mine], parts.lse.at[number, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._put(tuple(rest_of(x, self.call.spec.dtype) for x in out))
        plgpu.commit_smem()
        self._send(lambda dims: parts.out.at[number, 1, rows, dims])


def rest_of(x: jax.Array, dtype: Any) -> jax.Array:
    """What rounding leaves of `x`; of what is or becomes infinite nothing."""
    rounded = x.astype(dtype).astype(jnp.float32)
    return jnp.where(jnp.abs(rounded) < jnp.inf, x - rounded, 0.0)


def accumulators(call: Call) -> list[Any]:
    """For O, in the parts that V has."""
    _, _, v, _ = call.buffers
    return [plgpu.ACC((ROWS, wide), jnp.float32) for wide in v.widths]


def scaled(x: jax.Array, row: jax.Array) -> jax.Array:
    return x * spread(row, x.shape)


def spread(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(row, shape, (0,))


def partial_sums(p: jax.Array) -> jax.Array:
    """(64, 8): what of a row's sum each thread can add up alone."""
    return functools.reduce(jnp.add, (p[:, i : i + 8] for i in range(0, p.shape[1], 8)))
