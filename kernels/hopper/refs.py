"""What the parts of the kernel share: the call as it is traced, and the memory it works in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.buffers import Buffer, Tiles
from flashjax.kernels.hopper.config import (
    CLUSTER,
    ROWS,
    TOGETHER,
    ForwardConfig,
    apart,
    held_head_dim,
    padded_head_dim,
    ragged,
    staged,
    swizzle_elements,
)
from flashjax.kernels.hopper.items import Items, Place
from flashjax.kernels.hopper.tile import Leaf, Scorer
from flashjax.kernels.hopper.walk import Walk, Walker
from flashjax.spec import Spec

Copies = list[tuple[Any, Any]]


class Parts(NamedTuple):
    """Of the parts of items that are cut: O in two numbers, which add up to it, and LSE."""

    out: Any
    lse: Any


class Barriers(NamedTuple):
    """Of a buffer: its load has come, and its consumers have read it."""

    full: Any
    empty: Any


class Refs(NamedTuple):
    """Global memory, shared memory and barriers of one program."""

    query: Any
    key: Any
    value: Any
    own: Any  # the scorer's operands
    path: Any  # the walker's
    items: Any  # the items'
    out: Any
    lse: Any
    parts: Parts | None  # of the items that are cut
    q: Tiles
    k: Tiles
    v: Tiles
    o: Tiles | None
    staged: dict[int, Tiles]  # by their place in `own`
    l: Any  # rows' LSE
    seen: Any  # of each consumer: 1 for a column that one of its rows sees
    q_bar: Barriers
    k_bar: Barriers
    v_bar: Barriers
    own_bar: Barriers | None  # of each consumer's staged operands
    done: Any  # all consumers are through with the tiles in shared memory
    again: Any  # a consumer's own loads
    turn: Any  # a consumer is through with walking again
    end: Any  # all programs of a cluster are through


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as its kernel is traced."""

    spec: Spec
    config: ForwardConfig
    scorer: Scorer
    walker: Walker
    items: Items
    interpret: Any

    def refs(self, refs: tuple[Any, ...]) -> Refs:
        every: list[Any]
        query, key, value, *rest = refs
        parts: list[Any] = []
        for owner in (self.scorer, self.walker, self.items):
            n = len(owner.arrays)
            parts.append(rest[:n])
            rest = rest[n:]
        out, lse, *rest = rest
        cut = None
        if self.items.parts:
            cut, rest = Parts(*rest[:2]), rest[2:]
        buffers, staged, *rest = rest
        tiles = [b and b.of(ref) for b, ref in zip(self.buffers, buffers, strict=True)]
        operands = {i: b.of(ref) for (i, b), ref in zip(self.staged.items(), staged, strict=True)}
        every = [query, key, value, *parts, out, lse, cut, *tiles, operands, *rest]
        return Refs(*every)

    @property
    def buffers(self) -> tuple[Buffer, Buffer, Buffer, Buffer | None]:
        """Of q, k, v and o."""
        spec, config = self.spec, self.config
        head, value = padded_head_dim(spec.head_dim), padded_head_dim(spec.value_dim)
        ways = jnp.dtype(spec.dtype), ragged(spec), self.interpret is not None
        q = Buffer(config.queries, config.rows, head, swizzle_elements(head), *ways)
        k = dataclasses.replace(q, count=config.stages, rows=config.columns)
        # A product over columns takes whole swizzled tiles of them.
        wide = swizzle_elements(value, config.columns)
        v = dataclasses.replace(k, dim=value, wide=wide)
        o = Buffer(1, config.rows, value, swizzle_elements(value), *ways)
        return q, k, v, o if apart(spec, config) else None

    @property
    def staged(self) -> dict[int, Buffer]:
        """Of operands of rows × columns, by their place in the scorer: a tile for each consumer."""
        config, spec, found = self.config, self.spec, {}
        for i, itemsize in staged(spec, config).items():
            wide = swizzle_elements(config.columns, itemsize=itemsize)
            split = spec.rows % TOGETHER != 0 or spec.columns % wide != 0
            ways = self.scorer.arrays[i].dtype, split, self.interpret is not None
            found[i] = Buffer(config.consumers, ROWS, config.columns, wide, *ways)
        return found

    @property
    def head_dims(self) -> Any:
        return all_of(self.spec.head_dim)

    @property
    def value_dims(self) -> Any:
        return all_of(self.spec.value_dim)

    @property
    def paired(self) -> bool:
        """Whether two programs take an item together."""
        return self.config.cluster > 1

    @property
    def ahead(self) -> bool:
        """Whether an item begins before the one before it ends."""
        return self.config.ahead and self.items.shared

    def buffer(self, i: Any) -> Any:
        """Where the i-th item's queries lie."""
        return lax.rem(i, jnp.int32(self.config.queries))

    def walk(self, refs: Refs, place: Place) -> Walk:
        """The tiles of an item, or of the part of it that a program has."""
        whole = self.walker.at(refs.path, (place.batch, place.head), place.block)
        piece = place.piece
        return whole if piece is None else whole.part(piece.begin, piece.count)

    def first_row(self, block: Any) -> Any:
        """Of this program's part of a block of rows."""
        first = block * self.walker.own.size
        if self.walker.own.size == self.config.rows:
            return first
        return first + lax.axis_index(CLUSTER) * self.config.rows

    def columns(self, tile: Any) -> Any:
        return pl.ds(tile * self.config.columns, self.config.columns)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.config.stages))

    def copies(self, refs: Refs, place: Place, tile: Any, slot: Any) -> tuple[Copies, Copies]:
        """What brings a tile of keys and one of values into a slot: from where and to where."""
        head, batch = place.head, place.batch
        at = (batch, self.columns(tile), lax.div(head, jnp.int32(self.spec.group)))
        keys, values = refs.k.copies(slot, self.head_dims), refs.v.copies(slot, self.value_dims)
        return (
            [(refs.key.at[*at, dims], part) for dims, part in keys],
            [(refs.value.at[*at, dims], part) for dims, part in values],
        )

    def own_copies(self, refs: Refs, place: Place, tile: Any, consumer: Any) -> Copies:
        """The same for a consumer's staged operands."""
        rows = pl.ds(self.first_row(place.block) + consumer * ROWS, ROWS)
        found = []
        for i, tiles in refs.staged.items():
            leaf = self.scorer.leaves[i]
            assert isinstance(leaf, Leaf)
            lead = leaf.lead((place.batch, place.head))
            for columns, part in tiles.copies(consumer, self.columns(tile)):
                found.append((refs.own[i].at[*lead, rows, columns], part))
        return found


def all_of(dim: int) -> Any:
    """A head dim as the tiles have it: TMA reads 0 past the end, and writes nothing there."""
    padded = padded_head_dim(dim)
    # Pallas takes a slice past the end where the start is not known.
    begin = 0 if held_head_dim(dim) == padded else lax.axis_index("program") * 0
    return pl.ds(begin, padded)
