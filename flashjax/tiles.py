"""Operands cut into tiles, for implementations in plain jnp.

Heads are split as (K, G), so that the G query heads of one key head are rows of one product.
Tiles of the logits have shape (B, K, G, rows, columns); every operand's tile broadcasts to that.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.masks import Blocks
from flashjax.spec import Operands, Spec
from flashjax.structure import At, Blocked, is_blocked

X = TypeVar("X")


class Group(NamedTuple):
    """One part of a call with a tile schedule of its own; None stands for all members or heads."""

    batch: Any
    head: Any

    @staticmethod
    def of(index: Any, n_batch: int, n_heads: int) -> Group:
        """The index-th of n_batch × n_heads groups, heads running fastest."""
        return Group(
            index // n_heads if n_batch > 1 else None, index % n_heads if n_heads > 1 else None
        )


def row_blocks(x: jax.Array, rows: Blocks, key_heads: int) -> jax.Array:
    """(B, T, N, D) -> (row blocks, B, K, G, block rows, D), zeros below the last row."""
    b, _, n, d = x.shape
    x = jnp.pad(x, [(0, 0), (0, rows.padded - rows.length), (0, 0), (0, 0)])
    x = x.reshape(b, rows.count, rows.size, key_heads, n // key_heads, d)
    return x.transpose(1, 0, 3, 4, 2, 5)


def from_row_blocks(x: jax.Array, rows: Blocks) -> jax.Array:
    """The inverse of :func:`row_blocks`."""
    _, b, k, g, _, d = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(b, rows.padded, k * g, d)
    return x[:, : rows.length]


def transposed_rows(blocks: jax.Array) -> jax.Array:
    """Row blocks (…, B, K, G, rows, D) as (…, B, K, D, G, rows): what a product contracts last."""
    return jnp.moveaxis(blocks, -1, -3)


def column_blocks(x: jax.Array, columns: Blocks) -> jax.Array:
    """(B, S, K, D) -> (column blocks, B, K, block columns, D), zeros beyond the last column."""
    return row_blocks(x, columns, x.shape[2])[:, :, :, 0]


def from_column_blocks(x: jax.Array, columns: Blocks) -> jax.Array:
    return from_row_blocks(x[:, :, :, None], columns)


def row_vector_blocks(x: jax.Array, rows: Blocks, key_heads: int) -> jax.Array:
    """(B, N, T) -> (row blocks, B, K, G, block rows)."""
    return row_blocks(x.swapaxes(1, 2)[..., None], rows, key_heads)[..., 0]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How to read, and add to, the rank-4 operands of a call tile by tile."""

    spec: Spec
    rows: Blocks
    columns: Blocks

    @property
    def ragged(self) -> bool:
        return self.rows.padded != self.rows.length or self.columns.padded != self.columns.length

    def padded(self, x: jax.Array) -> jax.Array:
        """A rank-4 operand with its T and S filled up with zeros to whole tiles."""
        pad = [(0, 0), (0, 0)] + [
            (0, axis.padded - axis.length if self._spans(size, axis) else 0)
            for size, axis in zip(x.shape[2:], (self.rows, self.columns), strict=True)
        ]
        return jnp.pad(x, pad) if any(after for _, after in pad) else x

    def cropped(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x[:, :, : shape[2], : shape[3]]

    @staticmethod
    def _spans(size: int, axis: Blocks) -> bool:
        return size == axis.length and size != 1

    def _corner(self, x: jax.Array, i: Any, j: Any) -> tuple[list[Any], list[int]]:
        """Start and size of tile (i, j) in a padded operand."""
        spans = [x.shape[2] != 1, x.shape[3] != 1]
        start = _indices(
            0,
            0,
            i * self.rows.size if spans[0] else 0,
            j * self.columns.size if spans[1] else 0,
        )
        size = [
            *x.shape[:2],
            self.rows.size if spans[0] else 1,
            self.columns.size if spans[1] else 1,
        ]
        return start, size

    def load(self, x: jax.Array | Blocked, i: Any, j: Any) -> jax.Array:
        """The tile (i, j) of a padded operand, (B|1, K|1, G|1, rows|1, columns|1)."""
        if isinstance(x, Blocked):
            at = self.positions(i, j)
            limits = x.values.shape[2] - 1, x.values.shape[3] - 1
            tile = x.values[
                :,
                :,
                jnp.minimum(at.row // x.block_rows, limits[0]),
                jnp.minimum(at.column // x.block_columns, limits[1]),
            ]
        else:
            tile = lax.dynamic_slice(x, *self._corner(x, i, j))
        return self._split_heads(tile)

    def _split_heads(self, tile: jax.Array) -> jax.Array:
        heads = (1, 1) if tile.shape[1] == 1 else (self.spec.key_heads, self.spec.group)
        return tile.reshape(tile.shape[0], *heads, *tile.shape[2:])

    def load_tree(self, tree: X, i: Any, j: Any) -> X:
        return jax.tree.map(lambda x: self.load(x, i, j), tree, is_leaf=is_blocked)

    def add(self, total: jax.Array, tile: jax.Array, i: Any, j: Any) -> jax.Array:
        """Adds a gradient tile (B, K, G, rows, columns) to its operand's padded gradient."""
        start, size = self._corner(total, i, j)
        tile = tile.reshape(tile.shape[0], -1, *tile.shape[3:])
        summed = [axis for axis in range(4) if size[axis] == 1 and tile.shape[axis] != 1]
        tile = tile.sum(summed, keepdims=True) if summed else tile
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + tile, start)

    def positions(self, i: Any, j: Any) -> At:
        """Row and column of each element of tile (i, j), as (rows, columns)."""
        shape = (self.rows.size, self.columns.size)
        return At(
            i * self.rows.size + lax.broadcasted_iota(jnp.int32, shape, 0),
            j * self.columns.size + lax.broadcasted_iota(jnp.int32, shape, 1),
        )


def member[X](operands: X, group: Group, heads_per_key: int) -> X:
    """The part of canonical operands (or rank-4 trees) that belongs to one group."""
    if isinstance(operands, Operands):
        rest = dataclasses.replace(operands, query=None, key=None, value=None)
        rest = jax.tree.map(lambda x: _take(x, group.batch, 0, group.head, 1), rest)
        key_head = _key_head(group.head, heads_per_key)
        return dataclasses.replace(
            rest,
            query=_take(operands.query, group.batch, 0, group.head, 2),
            key=_take(operands.key, group.batch, 0, key_head, 2),
            value=_take(operands.value, group.batch, 0, key_head, 2),
        )
    return jax.tree.map(lambda x: _take(x, group.batch, 0, group.head, 1), operands)


def add_member(total: Operands, part: Operands, group: Group, heads_per_key: int) -> Operands:
    """Adds one group's gradients into the whole call's."""
    key_head = _key_head(group.head, heads_per_key)

    def add(name: str, whole: Any, piece: Any) -> Any:
        axis = 2 if name in ("query", "key", "value") else 1
        head = key_head if name in ("key", "value") else group.head

        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            start = [0] * x.ndim
            start[0] = group.batch if y.shape[0] < x.shape[0] else 0
            start[axis] = head if y.shape[axis] < x.shape[axis] else 0
            where = _indices(*start)
            return lax.dynamic_update_slice(x, lax.dynamic_slice(x, where, y.shape) + y, where)

        return jax.tree.map(one, whole, piece)

    names = [field.name for field in dataclasses.fields(total)]
    return Operands(**{n: add(n, getattr(total, n), getattr(part, n)) for n in names})


def _indices(*index: Any) -> list[jax.Array]:
    """One dtype for all: in x64 mode a Python int would be int64 beside int32."""
    return [jnp.asarray(x, jnp.int32) for x in index]


def _key_head(head: Any, heads_per_key: int) -> Any:
    return None if head is None else head // heads_per_key


def _take(x: jax.Array, batch: Any, batch_axis: int, head: Any, head_axis: int) -> jax.Array:
    for index, axis in ((batch, batch_axis), (head, head_axis)):
        if index is not None and x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, index, 1, axis)
    return x
