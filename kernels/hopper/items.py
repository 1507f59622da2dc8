"""Which block of which head a program works on, and in which order."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.kernels.hopper.config import CLUSTER
from flashjax.kernels.hopper.shares import Part, shared_out
from flashjax.kernels.hopper.walk import Walker
from flashjax.spec import Spec


class Piece(NamedTuple):
    """What of an item's walk a program takes: tiles from `begin` on, `count` at most.

    `number` counts the parts of all that are cut; it is negative for an item that is whole.
    """

    number: Any
    begin: Any
    count: Any


class Place(NamedTuple):
    """Block, head and batch member of an item; no piece where no item of the call is cut."""

    block: Any
    head: Any
    batch: Any
    piece: Piece | None = None


class Following(NamedTuple):
    """The item after one, where there is one."""

    place: Place
    exists: Any


class Items:
    """The items of a call: `heads` heads beside one another, their last blocks first.

    Under Causal the longest walks thus come first, and neighbours share keys and values in L2.
    Where the host can tell how long each walk is, `programs` programs share the items out so that
    all end together; `gain` is as in `shares`. With `together`, an item is of so many heads, and so
    many programs count as one. The items of blocks of columns are of key heads, and their first
    blocks come first.
    """

    def __init__(
        self,
        spec: Spec,
        walker: Walker,
        programs: int,
        heads: int,
        together: int = 1,
        *,
        gain: float = 0.0,
    ) -> None:
        self._walker, self.together = walker, together
        self._all_heads = spec.heads if walker.axis == "rows" else spec.key_heads
        self.blocks, self.heads = walker.own.count, heads // together
        self.count = self.blocks * self._all_heads * spec.batch // together
        self.parts: list[Part] = []
        self.arrays: list[jax.Array] = []
        self.shared, self.programs = False, self.count
        if programs and walker.lengths is not None:
            blocks, _, _ = self.places(np.arange(self.count))
            tiles = np.maximum(walker.lengths, 1)[blocks]
            taken, self.parts = shared_out(tiles, programs, gain=gain)
            self.shared = self.count > programs or bool(self.parts)
        if self.shared:
            self.programs = len(taken)
            self.arrays = [jnp.asarray(_table(taken))]
        if self.parts:
            self.arrays.append(jnp.asarray(np.array(self.parts, np.int32)))

    def places(self, item: Any) -> tuple[Any, Any, Any]:
        """Block, first head and batch member of numpy's integers."""
        return self._place(item, operator.floordiv, operator.mod)

    def _place(
        self, item: Any, div: Callable[..., Any], rem: Callable[..., Any]
    ) -> tuple[Any, Any, Any]:
        section, heads = np.int32(self.blocks * self.heads), np.int32(self.heads)
        n = np.int32(self._all_heads // self.together)
        inner = rem(item, section)
        member = div(item, section) * heads + rem(inner, heads)
        block = self._walker.block(div(inner, heads))
        return block, rem(member, n) * np.int32(self.together), div(member, n)

    def place(self, refs: Any, i: Any) -> Place:
        """Of an item, or of one of the parts that count on from the last item."""
        piece = None
        if self.parts:
            _, parts = refs
            number = i - jnp.int32(self.count)
            item, begin, count = (parts[lax.max(number, jnp.int32(0)), k] for k in range(3))
            cut, whole = number >= 0, jnp.int32(np.iinfo(np.int32).max)
            i = lax.select(cut, item, i)
            begin = lax.select(cut, begin, jnp.int32(0))
            piece = Piece(number, begin, lax.select(cut, count, whole))
        block, head, batch = self._place(i, lax.div, lax.rem)
        if self.together > 1:
            head = head + lax.axis_index(CLUSTER)
        return Place(block, head, batch, piece)

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
            place = self.place(refs, program)
            return body(jnp.int32(0), place, Following(place, False), enter(place))
        table = refs[0]
        count, first = table[program, 0], table[program, 1]

        def one(i: Any, c: Any) -> Any:
            item, carry = c
            later = table[program, i + 2]  # its way here is long
            following = Following(self.place(refs, later), i + 1 < count)
            return later, body(i, self.place(refs, item), following, carry)

        start = (first, enter(self.place(refs, first)))
        return lax.fori_loop(jnp.int32(0), count, one, start)[1]


def _table(taken: list[list[int]]) -> np.ndarray[Any, Any]:
    """(programs, 1 + most items + 1) int32: how many, and which."""
    table = np.zeros((len(taken), max(map(len, taken)) + 2), np.int32)
    for row, own in zip(table, taken, strict=True):
        row[0], row[1 : 1 + len(own)] = len(own), own
    return table
