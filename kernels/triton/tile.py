"""How a Triton kernel reads the operands beside q, k and v."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels import tile
from flashjax.kernels.tile import Tile, exists, inside
from flashjax.kernels.triton import language as tl
from flashjax.kernels.triton.matrix import Parts
from flashjax.kernels.triton.replay import TRITON, TRITON_16_BIT
from flashjax.spec import Operands, Spec
from flashjax.structure import Blocked


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The shape of one rank-4 operand and how its values lie on a tile."""

    shape: tuple[int, ...]
    block: tuple[int, int] | None = None  # of `Blocked` values

    def load(self, ref: Any, at: Any, tile: Tile, spec: Spec) -> jax.Array:
        """The tile's values of batch member and head `at`; a scalar, or a full tile."""
        lead = tuple(i if size != 1 else 0 for i, size in zip(at, self.shape[:2], strict=True))
        if self.block is not None:
            row, column = tile.positions()
            last_row, last_column = self.shape[2] - 1, self.shape[3] - 1
            return tl.load(
                ref,
                (
                    *lead,
                    jnp.minimum(lax.div(row, jnp.int32(self.block[0])), last_row),
                    jnp.minimum(lax.div(column, jnp.int32(self.block[1])), last_column),
                ),
            )
        of_rows, of_columns = self.shape[2] != 1, self.shape[3] != 1
        rows, columns = tl.span(tile.row, tile.rows), tl.span(tile.column, tile.columns)
        in_rows, in_columns = inside(spec, tile)
        if not of_rows and not of_columns:
            return tl.load(ref, (*lead, 0, 0))
        if not of_columns:
            return tile.of_rows(tl.load(ref, (*lead, rows, 0), in_rows))
        if not of_rows:
            return tile.of_columns(tl.load(ref, (*lead, 0, columns), in_columns))
        mask = exists(spec, tile._replace(transposed=False))
        values = tl.load(ref, (*lead, rows, columns), mask)
        return values.T if tile.transposed else values


def _leaf(x: Any) -> tuple[jax.Array, Leaf]:
    if isinstance(x, Blocked):
        return tl.addressable(x.values), Leaf(x.values.shape, (x.block_rows, x.block_columns))
    return tl.addressable(x), Leaf(x.shape)


class Scorer(tile.Scorer):
    """A call's operands as inputs of Triton kernels."""

    def __init__(self, spec: Spec, operands: Operands, *, interpret: bool) -> None:
        narrow = jnp.dtype(spec.dtype).itemsize == 2
        lowering = TRITON_16_BIT if narrow else TRITON
        super().__init__(spec, operands, _leaf, lowering, tl.exp2_of(interpret=interpret))
        self.precision = tl.precision_of(spec.dtype, spec.precision, interpret=interpret)

    def blocks(self, heads: int = 1, batches: int = 1) -> list[tl.Block]:
        """The operands as a kernel's inputs, for programs of that many heads and members each."""
        return [tl.broadcast_block(x, heads, batches) for x in self.arrays]

    def scaled(self, gradient: Parts) -> Parts:
        """dQ or dK, with the scale that the unit holds."""
        if not self.folded:
            return gradient
        factor = jnp.float32(self.spec.scale)
        return gradient.map(lambda x: x * factor)
