"""Tiles in shared memory, as TMA writes them and as products read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from flashjax.kernels.hopper.config import TOGETHER, held_head_dim


def held(x: jax.Array) -> jax.Array:
    """An array with as many head dims as kernels want in memory."""
    more = held_head_dim(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, more)]) if more else x


@dataclasses.dataclass(frozen=True)
class Buffer:
    """`count` tiles of `rows` × `dim`, each in one part or in parts of so many dims.

    If ragged, in parts a swizzle wide.

    A part that is one swizzle wide has the same bytes in eights of rows as row after row: then TMA
    goes row by row, and clips what lies past the end.
    """

    count: int
    rows: int
    dim: int
    wide: int  # elements of a swizzle
    dtype: Any
    ragged: bool
    interpreted: bool
    part: int | None = None

    @property
    def widths(self) -> list[int]:
        width = self.wide if self.ragged else self.part or self.dim
        return [width] * (self.dim // width)

    @property
    def _two_views(self) -> bool:
        return self.ragged and not self.interpreted

    def scratch(self) -> Any:
        shape = self.count, len(self.widths), self.rows, self.widths[0]
        # JAX's types call both abstract.
        swizzle = plgpu.SwizzleTransform(self.wide * self.dtype.itemsize)  # type: ignore[abstract]
        tiling = plgpu.TilingTransform((TOGETHER, self.wide))  # type: ignore[abstract]
        tiled = plgpu.SMEM(shape, self.dtype, transforms=(tiling, swizzle))
        if not self._two_views:
            return tiled
        return plgpu.RefUnion(plgpu.SMEM(shape, self.dtype, transforms=(swizzle,)), tiled)

    def of(self, ref: Any) -> Tiles:
        copied, read = ref if self._two_views else (ref, ref)
        return Tiles(self, copied, read)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The memory of a buffer."""

    buffer: Buffer
    copied: Any
    read: Any

    def parts(self, i: Any, rows: Any = slice(None)) -> list[Any]:
        """Tile `i` as products read it."""
        return [self.read.at[i, part, rows] for part in range(len(self.buffer.widths))]

    def parts_of(self, i: Any, begin: int, size: int) -> list[Any]:
        """Of :meth:`parts`, the dims from `begin` on, `size` of them."""
        width = self.buffer.widths[0]
        if size >= width:
            return self.parts(i)[begin // width : (begin + size) // width]
        return [self.read.at[i, begin // width, :, pl.ds(begin % width, size)]]

    def copies(self, i: Any, dims: Any, rows: Any = slice(None)) -> list[tuple[Any, Any]]:
        """(dims, part of tile `i` that they are copied to or from)."""
        begin, wide = dims.start, self.buffer.widths[0]
        return [
            (pl.ds(begin + part * wide, wide), self.copied.at[i, part, rows])
            for part in range(len(self.buffer.widths))
        ]
