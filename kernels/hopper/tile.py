"""How a Hopper kernel reads the operands beside q, k and v: from global memory into registers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.kernels import tile
from flashjax.kernels.hopper.cap import capped, expands
from flashjax.kernels.hopper.config import is_matrix
from flashjax.kernels.hopper.layouts import TILE, VECTORS
from flashjax.kernels.hopper.replay import MOSAIC
from flashjax.kernels.tile import Tile, cap_of
from flashjax.masks import Blocks
from flashjax.scores import Score
from flashjax.spec import Operands, Spec
from flashjax.structure import At, Blocked


class Staged(NamedTuple):
    """An operand whose tile is in shared memory, in parts that lie beside one another."""

    parts: list[Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The shape of one rank-4 operand, its vectors as long as the tiles reach."""

    shape: tuple[int, ...]
    boolean: bool  # held as an integer
    block: tuple[int, int] | None = None  # of `Blocked` values; tiles lie within one

    def lead(self, at: Any) -> tuple[Any, ...]:
        """Its own batch member and head."""
        return tuple(
            i if size != 1 else jnp.int32(0) for i, size in zip(at, self.shape[:2], strict=True)
        )

    def load(self, ref: Any, at: Any, tile: Tile, spec: Spec) -> jax.Array:
        """The tile's values of batch member and head `at`; a scalar, or a full tile."""
        found = self._load(ref, at, tile)
        return found.astype(jnp.int32) != 0 if self.boolean else found

    def _load(self, ref: Any, at: Any, tile: Tile) -> jax.Array:
        if isinstance(ref, Staged):
            parts = [plgpu.load(part, layout=TILE) for part in ref.parts]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)
        lead = self.lead(at)
        if self.block is not None:
            starts = zip((tile.row, tile.column), self.block, self.shape[2:], strict=True)
            # A tile may hang over the last row.
            row, column = (
                lax.min(lax.div(start, jnp.int32(size)), jnp.int32(count - 1))
                for start, size, count in starts
            )
            return jnp.full(tile.shape, ref[*lead, row, column])
        of_rows, of_columns = self.shape[2] != 1, self.shape[3] != 1
        rows, columns = pl.ds(tile.row, tile.rows), pl.ds(tile.column, tile.columns)
        if of_rows and of_columns:
            both = (columns, rows) if tile.transposed else (rows, columns)
            found: jax.Array = plgpu.load(ref.at[*lead, *both], layout=TILE, optimized=False)
            return found
        if of_rows:
            layout = VECTORS[tile.row_axis]
            vector = plgpu.load(ref.at[*lead, rows, 0], layout=layout, optimized=False)
            return tile.of_rows(vector)
        if of_columns:
            layout = VECTORS[tile.column_axis]
            vector = plgpu.load(ref.at[*lead, 0, columns], layout=layout, optimized=False)
            return tile.of_columns(vector)
        scalar: jax.Array = ref[*lead, 0, 0]
        return scalar


def exp2(x: jax.Array, unit: float, shift: jax.Array | None) -> jax.Array:
    """2^(x · unit − shift): the compiler makes it one multiply-add and ``ex2.approx``."""
    return jnp.exp2(x * unit) if shift is None else jnp.exp2(x * unit - shift)


class Scorer(tile.Scorer):
    """The operands of a call whose tiles are of `rows` and `columns`.

    With `staged`, those of rows × columns come through shared memory; `transposed` tiles want them
    swapped: a load takes pairs along its second axis. With `room` there are registers for two ways
    to cap.
    """

    def __init__(
        self,
        spec: Spec,
        operands: Operands,
        rows: Blocks,
        columns: Blocks,
        *,
        staged: bool,
        transposed: bool,
        room: bool,
        interpreted: bool,
    ) -> None:
        self._room, self._interpreted = room, interpreted

        def leaf(x: Any) -> tuple[jax.Array, Leaf]:
            if isinstance(x, Blocked):
                values, block = x.values, (x.block_rows, x.block_columns)
                boolean = values.dtype == jnp.bool_
                values = values.astype(jnp.int32) if boolean else values
                return values, Leaf(values.shape, boolean, block)
            boolean = x.dtype == jnp.bool_
            x = x.astype(jnp.int8) if boolean else x
            if staged and is_matrix(x):
                # TMA wants its rows in whole 16 bytes.
                after = [0, -x.shape[3] % (16 // x.dtype.itemsize)]
            else:
                # A load in registers has no mask: what it may reach past the end is there, hidden.
                after = [
                    blocks.padded - blocks.length if size != 1 else 0
                    for size, blocks in zip(x.shape[2:], (rows, columns), strict=True)
                ]
            pads = [(0, 0), (0, 0), *((0, more) for more in after)]
            padded = jnp.pad(x, pads) if any(after) else x
            found = Leaf(padded.shape, boolean)
            return padded.swapaxes(2, 3) if transposed and is_matrix(x) else padded, found

        super().__init__(spec, operands, leaf, MOSAIC, exp2)

    def modified(
        self, score: Score, at: At, raw: jax.Array, products: jax.Array, scale: Any
    ) -> jax.Array:
        exact = functools.partial(super().modified, score, at)
        cap, static = cap_of(score), isinstance(scale, float) and self.spec.shapes.bias is None
        if not (static and self._room and expands(cap, scale)):
            return exact(raw, products, scale)

        def outright(products: jax.Array) -> jax.Array:
            return exact(products * scale, products, scale)

        return capped(products, scale, cap, outright, interpreted=self._interpreted)
