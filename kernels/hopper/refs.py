"""What the parts of the kernel share: the call as it is traced, and the memory it works in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from flashjax.kernels.hopper.config import ForwardConfig, held_head_dim, padded_head_dim
from flashjax.kernels.hopper.items import Items
from flashjax.kernels.hopper.tile import Scorer
from flashjax.kernels.hopper.walk import Walker
from flashjax.spec import Spec


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
    q: Any
    k: Any
    v: Any
    o: Any
    l: Any  # rows' LSE
    seen: Any  # of each consumer: 1 for a column that one of its rows sees
    q_bar: Barriers
    k_bar: Barriers
    v_bar: Barriers
    done: Any  # all consumers are through with the tiles in shared memory
    again: Any  # a consumer's own loads


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
        query, key, value, *rest = refs
        parts: list[Any] = []
        for owner in (self.scorer, self.walker, self.items):
            n = len(owner.arrays)
            parts.append(rest[:n])
            rest = rest[n:]
        every: list[Any] = [query, key, value, *parts, *rest]
        return Refs(*every)

    @property
    def head_dims(self) -> Any:
        return _all_of(self.spec.head_dim)

    @property
    def value_dims(self) -> Any:
        return _all_of(self.spec.value_dim)

    @property
    def ahead(self) -> bool:
        """Whether an item begins before the one before it ends."""
        return self.config.ahead and self.items.shared

    def buffer(self, i: Any) -> Any:
        """Where the i-th item's queries lie."""
        return lax.rem(i, jnp.int32(self.config.queries))

    def columns(self, tile: Any) -> Any:
        return pl.ds(tile * self.config.columns, self.config.columns)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.config.stages))


def _all_of(dim: int) -> Any:
    """A head dim as the tiles have it: TMA reads 0 past the end, and writes nothing there."""
    padded = padded_head_dim(dim)
    # Pallas takes a slice past the end where the start is not known.
    begin = 0 if held_head_dim(dim) == padded else lax.axis_index("program") * 0
    return pl.ds(begin, padded)
