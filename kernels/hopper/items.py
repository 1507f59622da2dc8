"""Which block of which head a program works on, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.kernels.hopper.config import CLUSTER
from flashjax.kernels.hopper.walk import Walker
from flashjax.spec import Spec

# What an item costs beside its tiles, in tiles: its queries' way in, its output's way out.
OVERHEAD = 1.0


class Place(NamedTuple):
    """Block, head and batch member of an item."""

    block: Any
    head: Any
    batch: Any


class Following(NamedTuple):
    """The item after one, where there is one."""

    place: Place
    exists: Any


class Items:
    """The items of a call: `heads` heads beside one another, their last blocks first.

    Under Causal the longest walks thus come first, and neighbours share keys and values in L2.
    Where the host can tell how long each walk is, `programs` programs share the items out so that
    all end together: the longest first, each to the program with the least so far (Graham, 1969).
    With `together`, an item is of so many heads, and so many programs count as one. The items of
    blocks of columns are of key heads, and their first blocks come first.
    """

    def __init__(
        self, spec: Spec, walker: Walker, programs: int, heads: int, together: int = 1
    ) -> None:
        self._walker, self._together = walker, together
        self._all_heads = spec.heads if walker.axis == "rows" else spec.key_heads
        self.blocks, self.heads = walker.own.count, heads // together
        self.count = self.blocks * self._all_heads * spec.batch // together
        lengths = walker.lengths if programs else None
        self.shared = lengths is not None and self.count > programs
        self.programs = programs if self.shared else self.count
        self.arrays: list[jax.Array] = []
        if self.shared:
            assert lengths is not None
            self.arrays = [jnp.asarray(self._shared_out(lengths))]

    def _shared_out(self, lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(programs, 1 + most items + 1) int32: how many, and which."""
        item = np.arange(self.count)
        costs = lengths[self.blocks - 1 - item % (self.blocks * self.heads) // self.heads]
        taken: list[list[int]] = [[] for _ in range(self.programs)]
        loads = [(0.0, program) for program in range(self.programs)]
        for i, cost in enumerate(costs):
            load, program = heapq.heappop(loads)
            taken[program].append(i)
            heapq.heappush(loads, (load + float(cost) + OVERHEAD, program))
        table = np.zeros((self.programs, max(map(len, taken)) + 2), np.int32)
        for row, own in zip(table, taken, strict=True):
            row[0], row[1 : 1 + len(own)] = len(own), own
        return table

    def place(self, item: Any) -> Place:
        section = jnp.int32(self.blocks * self.heads)
        inner = lax.rem(item, section)
        heads = jnp.int32(self.heads)
        member = lax.div(item, section) * heads + lax.rem(inner, heads)
        block = self._walker.block(lax.div(inner, heads))
        n = jnp.int32(self._all_heads // self._together)
        head = lax.rem(member, n)
        if self._together > 1:
            head = head * self._together + lax.axis_index(CLUSTER)
        return Place(block, head, lax.div(member, n))

    def each(
        self,
        refs: Any,
        body: Callable[[Any, Place, Following, Any], Any],
        enter: Callable[[Place], Any],
    ) -> Any:
        """``body(i, place, following, carry)`` for each of this program's items, i counting them.

        The carry begins as ``enter(place)`` of the first.
        """
        program = lax.axis_index("program")
        if not self.shared:
            place = self.place(program)
            return body(jnp.int32(0), place, Following(place, False), enter(place))
        (table,) = refs
        count, first = table[program, 0], table[program, 1]

        def one(i: Any, c: Any) -> Any:
            item, carry = c
            later = table[program, i + 2]  # its way here is long
            following = Following(self.place(later), i + 1 < count)
            return later, body(i, self.place(item), following, carry)

        start = (first, enter(self.place(first)))
        return lax.fori_loop(jnp.int32(0), count, one, start)[1]
