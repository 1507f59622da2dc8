"""Blocks of q, k, v and their like in a kernel, cut along the head dim into powers of two.

A head dim of 96 is a part of 64 and one of 32; a product over it is the sum of two, and what it
produces comes in two parts. All of a block's rows and dims that do not exist read as 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.triton import language as tl
from flashjax.masks import Blocks


@jax.tree_util.register_pytree_node_class
class Parts:
    """A (positions, head dim) block as arrays (positions, power of two)."""

    def __init__(self, arrays: tuple[jax.Array, ...]) -> None:
        self.arrays = arrays

    @staticmethod
    def zeros(positions: int, dim: int) -> Parts:
        return Parts(tuple(jnp.zeros((positions, part), jnp.float32) for part in tl.parts_of(dim)))

    def only(self, positions: jax.Array) -> Parts:
        """The block with 0 in every other position."""
        return self.map(lambda x: jnp.where(_along(positions, x), x, jnp.zeros((), x.dtype)))

    def times(self, factor: jax.Array) -> Parts:
        return self.map(lambda x: x * _along(factor, x))

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Parts:
        return Parts(tuple(map(fn, self.arrays)))

    def __add__(self, other: Parts) -> Parts:
        return Parts(tuple(a + b for a, b in zip(self.arrays, other.arrays, strict=True)))

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: tuple[jax.Array, ...]) -> Parts:
        return cls(tuple(arrays))


def _along(vector: jax.Array, x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, x.shape, (0,))


def product(a: Parts, b: Parts, precision: Any) -> jax.Array:
    """a · bᵀ over the head dim, float32 (positions of a, positions of b)."""
    terms = [tl.dot(x, y.T, precision) for x, y in zip(a.arrays, b.arrays, strict=True)]
    return functools.reduce(jnp.add, terms)


def weighted(weights: jax.Array, x: Parts, precision: Any) -> Parts:
    """weights · x, float32; the weights are rounded to the dtype of `x`."""
    return x.map(lambda part: tl.dot(weights.astype(part.dtype), part, precision))


def scaled_sum(acc: Parts, alpha: jax.Array, p: jax.Array, v: Parts, precision: Any) -> Parts:
    return acc.times(alpha) + weighted(p, v, precision)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A (B, positions, heads, D) array in a kernel.

    A program sees one batch member and one head of it, or `batches` and `heads` of them, counted
    from its block's first. ``place`` gives the block's batch and head from the grid position.
    """

    array: Any
    place: Callable[[Any, Any, Any], tuple[Any, Any]]
    heads: int | None = None
    batches: int | None = None

    @property
    def dim(self) -> int:
        return int(self.array.shape[3])

    @property
    def block(self) -> tl.Block:
        width = sum(tl.parts_of(self.dim))

        def index(x: Any, y: Any, z: Any) -> tuple[Any, ...]:
            batch, head = self.place(x, y, z)
            return batch, 0, head, 0

        return tl.Block(self.array, (self.batches, self.array.shape[1], self.heads, width), index)

    def load(
        self, ref: Any, start: Any, blocks: Blocks, ragged: bool = True, at: Any = (0, 0)
    ) -> Parts:
        """The block of positions from `start` on; `ragged`: some may not exist.

        `at` is batch and head, counted within what the program sees.
        """
        indices = self._parts(start, blocks, ragged, at)
        return Parts(tuple(tl.load(ref, index, mask) for index, mask in indices))

    def store(self, ref: Any, start: Any, blocks: Blocks, values: Parts, at: Any = (0, 0)) -> None:
        indices = self._parts(start, blocks, True, at)
        for (index, mask), value in zip(indices, values.arrays, strict=True):
            tl.store(ref, index, value, mask)

    def _parts(self, start: Any, blocks: Blocks, ragged: bool, at: Any) -> list[Any]:
        """Index and mask of each part."""
        batch = () if self.batches is None else (at[0],)
        head = () if self.heads is None else (at[1],)
        found, first = [], 0
        for part in tl.parts_of(self.dim):
            shape = (blocks.size, part)
            masks = []
            if ragged and blocks.padded != blocks.length:
                masks.append(start + lax.broadcasted_iota(jnp.int32, shape, 0) < blocks.length)
            if first + part > self.dim:
                masks.append(first + lax.broadcasted_iota(jnp.int32, shape, 1) < self.dim)
            mask = functools.reduce(jnp.logical_and, masks) if masks else None
            index = (*batch, tl.span(start, blocks.size), *head, tl.span(first, part))
            found.append((index, mask))
            first += part
        return found


@dataclasses.dataclass(frozen=True)
class Rows:
    """A (B, N, positions) array in a kernel, seen as a :class:`Matrix` is."""

    array: Any
    place: Callable[[Any, Any, Any], tuple[Any, Any]]
    heads: int | None = None
    batches: int | None = None

    @property
    def block(self) -> tl.Block:
        return tl.Block(
            self.array,
            (self.batches, self.heads, self.array.shape[2]),
            lambda x, y, z: (*self.place(x, y, z), 0),
        )

    def load(
        self, ref: Any, start: Any, blocks: Blocks, ragged: bool = True, at: Any = (0, 0)
    ) -> jax.Array:
        return tl.load(ref, self._index(start, blocks, at), self._mask(start, blocks, ragged))

    def store(
        self, ref: Any, start: Any, blocks: Blocks, values: jax.Array, at: Any = (0, 0)
    ) -> None:
        index = self._index(start, blocks, at)
        tl.store(ref, index, values, self._mask(start, blocks, True))

    def _index(self, start: Any, blocks: Blocks, at: Any) -> tuple[Any, ...]:
        batch = () if self.batches is None else (at[0],)
        head = () if self.heads is None else (at[1],)
        return (*batch, *head, tl.span(start, blocks.size))

    @staticmethod
    def _mask(start: Any, blocks: Blocks, ragged: bool) -> jax.Array | None:
        if not ragged or blocks.padded == blocks.length:
            return None
        return start + lax.iota(jnp.int32, blocks.size) < blocks.length
