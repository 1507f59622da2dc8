"""What the parts of the backward share: the call as it is traced, and the memory it works in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.backward_config import CONSUMERS, SCORES, BackwardConfig
from flashjax.kernels.hopper.buffers import Buffer
from flashjax.kernels.hopper.config import ROWS, padded_head_dim, ragged, swizzle_elements
from flashjax.kernels.hopper.items import Items
from flashjax.kernels.hopper.order import Order
from flashjax.kernels.hopper.refs import Barriers, all_of
from flashjax.kernels.hopper.tile import Scorer
from flashjax.kernels.hopper.walk import Walk, Walker
from flashjax.kernels.sums import Sum, all_sums
from flashjax.spec import Spec

HALF = 32  # of the 64 rows of a tile: they are whole swizzled tiles of P and dS


class Buffers(NamedTuple):
    """Tiles in shared memory: K and V of the block, Q and dO of stages, dS of columns × rows.

    And P, where it does not stay in registers.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    p: Any


class Refs(NamedTuple):
    """Global memory, shared memory and barriers of one program."""

    query: Any
    key: Any
    value: Any
    d_out: Any
    shift: Any  # what the rows' exponents subtract; where it folds, what products begin at
    delta: Any
    own: Any  # the scorer's operands
    path: Any  # the walker's
    turns: Any  # the order's
    d_query: Any  # sums in float32, of heads before rows
    done_adds: Any  # of each row block and consumer; None where any order will do
    d_key: Any
    d_value: Any
    sums: Any  # of the operands without rows, along rows
    tiles: Buffers
    row_shift: Any  # of stages
    row_delta: Any
    own_sums: Any  # of each consumer and operand: on their way out; None where there are none
    block_bar: Any  # K and V have come
    q_bar: Barriers  # of Q and its rows' vectors
    do_bar: Barriers
    ds_bar: Any  # both consumers' part of dS is there
    done: Any  # both are through with K


class Share(NamedTuple):
    """Which rows and which head dims of a block's dQ a consumer makes: begin and size.

    Where that is by head dims, `values` are its part of those of V.
    """

    rows: tuple[int, int]
    dims: tuple[int, int]
    values: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as its kernel is traced."""

    spec: Spec
    config: BackwardConfig
    scorer: Scorer
    walker: Walker
    items: Items
    order: Order | None  # of the additions to dQ
    interpret: Any

    def refs(self, refs: tuple[Any, ...]) -> Refs:
        every: list[Any]
        rest, parts = list(refs[6:]), []
        for owner in (self.scorer, self.walker, self.order):
            n = 0 if owner is None else len(owner.arrays)
            parts.append(rest[:n])
            rest = rest[n:]
        d_query, *rest = rest
        done_adds, rest = (None, rest) if self.order is None else (rest[0], rest[1:])
        d_key, d_value, *rest = rest
        sums, (memory, *rest) = rest[: len(self.sums)], rest[len(self.sums) :]
        tiles = Buffers(*(b and b.of(ref) for b, ref in zip(self.buffers, memory, strict=True)))
        every = [*refs[:6], *parts, d_query, done_adds, d_key, d_value, sums, tiles, *rest]
        return Refs(*every)

    @property
    def buffers(self) -> Buffers:
        spec, config = self.spec, self.config
        head, value = padded_head_dim(spec.head_dim), padded_head_dim(spec.value_dim)
        wide, wide_value = swizzle_elements(head), swizzle_elements(value)
        if config.by_dims:
            wide = wide_value = HALF
        elif self.halves_dims and wide == head:
            wide //= 2  # each half is made of whole swizzled tiles
        ways = jnp.dtype(spec.dtype), ragged(spec), self.interpret is not None
        k = Buffer(1, config.columns, head, wide, *ways)
        v = Buffer(1, config.columns, value, wide_value, *ways)
        if config.by_dims:  # a consumer's share is in parts of its own
            shares = (_halves(x.dim, x.wide) for x in (k, v))
            k, v = (
                dataclasses.replace(x, part=math.gcd(*(size for _, size in own)))
                for x, own in zip((k, v), shares, strict=True)
            )
        q = dataclasses.replace(k, count=config.stages, rows=config.rows)
        do = dataclasses.replace(v, count=config.stages, rows=config.rows)
        # Both sides of a product, as dS · K, have one swizzle.
        ds = dataclasses.replace(k, count=SCORES, dim=config.rows, ragged=False, part=None)
        return Buffers(k, v, q, do, ds, ds if config.by_dims else None)

    @property
    def sums(self) -> list[Sum]:
        """What is summed along rows for the gradients of operands that have none."""
        return all_sums(self.spec)

    @property
    def halves_dims(self) -> bool:
        """Whether the consumers share out dQ by head dims, not by rows."""
        return self.config.rows == ROWS

    def share(self, consumer: int) -> Share:
        buffers = self.buffers
        dims, values = (_halves(x.dim, x.wide)[consumer] for x in (buffers.k, buffers.v))
        if not self.halves_dims:
            return Share((consumer * ROWS, ROWS), (0, buffers.k.dim), values)
        return Share((0, self.config.rows), dims, values)

    @property
    def folds(self) -> bool:
        """Whether products begin at −shift and −Δ: where nothing comes between them and exponents.

        Their instructions are then spared, and the registers of both vectors.
        """
        return self.scorer.folded and not self.spec.dropout_rate

    @property
    def head_dims(self) -> Any:
        return all_of(self.spec.head_dim)

    @property
    def value_dims(self) -> Any:
        return all_of(self.spec.value_dim)

    def walk(self, refs: Refs, at: Any, block: Any) -> Walk:
        """Of a block of columns of batch member and head `at`.

        In one order, blocks of columns that begin together must not all wait for the first: from
        the last row on, each is one step behind the one before it, and those that see other rows
        meet theirs in turn.
        """
        found = self.walker.at(refs.path, at, block)
        return found if self.order is None else found.descending()

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.config.stages))

    def rows(self, tile: Any) -> Any:
        return pl.ds(tile * self.config.rows, self.config.rows)

    def columns(self, block: Any) -> Any:
        return pl.ds(block * self.config.columns, self.config.columns)

    def first_head(self, key_head: Any) -> Any:
        """Of the query heads of a key head."""
        return key_head if self.spec.group == 1 else key_head * jnp.int32(self.spec.group)

    def each_head(self, key_head: Any, body: Any, carry: Any) -> Any:
        """``body(head, carry)`` gives the carry; over the query heads of a key head."""
        group, first = self.spec.group, self.first_head(key_head)
        if group == 1:
            return body(key_head, carry)
        return lax.fori_loop(
            jnp.int32(0), jnp.int32(group), lambda g, carry: body(first + g, carry), carry
        )


def _halves(dim: int, wide: int) -> list[tuple[int, int]]:
    """Begin and size of each consumer's dims, in whole swizzled tiles."""
    first = -(-dim // CONSUMERS // wide) * wide
    return [(0, first), (first, dim - first)]
