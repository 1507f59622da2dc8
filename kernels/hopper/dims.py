"""Both consumers have 64 columns: half of the rows of P and dS, half of the head dims of the rest.

Above 128 head dims no consumer's registers hold dK and dV of columns of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from flashjax.kernels.hopper.backward_refs import HALF
from flashjax.kernels.hopper.buffers import Tiles
from flashjax.kernels.hopper.columns import Columns, Step, Vectors
from flashjax.kernels.hopper.config import ROWS
from flashjax.kernels.tile import Reader


class Dims(Columns):
    """The half of an item that is this consumer's."""

    def part(self) -> tuple[Any, Any]:
        return pl.ds(0, ROWS), pl.ds(self.consumer * HALF, HALF)

    def widths(self) -> tuple[list[int], list[int]]:
        tiles = self.refs.tiles
        k, v = tiles.k.parts_of(0, *self.share.dims), tiles.v.parts_of(0, *self.share.values)
        return [x.shape[1] for x in k], [x.shape[1] for x in v]

    def share_scores(self, count: Any, ds: jax.Array, p: jax.Array | None = None) -> None:
        """Makes a step's dSᵀ and Pᵀ known to both consumers, and waits for the other's part.

        Two tiles of each: who comes here again is through with what it made of the step before.
        """
        self.scores(count).at[:, self.rows][...] = ds
        if p is not None:
            self.weights(count).at[:, self.rows][...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.ds_bar)
        plgpu.barrier_wait(self.refs.ds_bar)

    def await_scores(self) -> None:
        """Its own step has."""

    def step(self, here: Step, reader: Reader, dk_acc: Any, dv_acc: Any) -> Vectors:
        refs, call, share = self.refs, self.call, self.share
        slot = call.slot(here.count)
        q, do = refs.tiles.q, refs.tiles.do
        mine = q.parts(slot, self.rows), do.parts(slot, self.rows)
        p, ds, sums = self.weigh(here, reader, *mine)
        self.share_scores(here.count, ds, p)
        for own, scores, parts in (
            (dv_acc, self.weights(here.count), do.parts_of(slot, *share.values)),
            (dk_acc, self.scores(here.count), q.parts_of(slot, *share.dims)),
        ):
            for acc, part in zip(own, parts, strict=True):
                plgpu.wgmma(acc, scores, part)
        plgpu.wgmma_wait(len(dk_acc))
        plgpu.barrier_arrive(refs.do_bar.empty.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.q_bar.empty.at[slot])
        return sums

    def leaving(self, tiles: Tiles, dims: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
        share = self.share.dims if tiles is self.refs.tiles.k else self.share.values
        (begin, size), width = share, tiles.buffer.widths[0]
        own = slice(begin // width, (begin + size) // width)
        return tiles.parts(0)[own], tiles.copies(0, dims)[own]
