"""Which program takes which items, and which walks are cut so that all programs end together."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

Costs = np.ndarray[Any, Any]

# What an item costs beside its tiles, in tiles: its queries' way in, its output's way out.
OVERHEAD = 1.0
# Cutting has to end a call so many tiles earlier: the parts' merge takes time too.
WORTH = 12.0
LEAST = 4  # tiles of a part
# With more items a program the last round is less than a hundredth.
MOST_ROUNDS = 64


class Part(NamedTuple):
    """Of an item's walk: so many tiles, from the `begin`-th on."""

    item: int
    begin: int
    tiles: int


class Shares(NamedTuple):
    """By program its items; those past the last item are numbers of parts."""

    taken: list[list[int]]
    parts: list[Part]


def shared_out(tiles: Costs, programs: int, *, gain: float = 0.0) -> Shares:
    """Shares of items that walk over so many tiles each; the costly ones should come first.

    Each item goes to the program with the least so far (Graham, 1969). Where it is worth it, those
    that would end late are cut, to fill up all programs alike; `gain` is the share of the time that
    this has to save.
    """
    taken, loads = _whole(tiles, programs, np.inf)
    level = OVERHEAD + float(tiles.sum() + OVERHEAD * len(tiles)) / programs
    late = max(load for load, _ in loads) - level
    if late <= max(WORTH, gain * level) or len(tiles) > MOST_ROUNDS * programs:
        return Shares(taken, [])
    while True:
        found = _filled(tiles, programs, level)
        if found is not None:
            return found
        level += 1


def _whole(
    tiles: Costs, programs: int, level: float
) -> tuple[list[list[int]], list[tuple[float, int]]]:
    """The first items, up to one that lets a program's load exceed the level; the loads."""
    taken: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0.0, program) for program in range(programs)]
    for i, cost in enumerate(tiles):
        load, program = loads[0]
        load += float(cost) + OVERHEAD
        if load > level:
            break
        taken[program].append(i)
        heapq.heapreplace(loads, (load, program))
    return taken, loads


def _filled(tiles: Costs, programs: int, level: float) -> Shares | None:
    """All programs filled up to the level with parts; None if that does not take all items."""
    taken, loads = _whole(tiles, programs, level)
    parts: list[Part] = []
    item = sum(map(len, taken))
    begin = 0
    for load, program in sorted(loads):
        room = int(level - load - OVERHEAD)
        while room >= LEAST and item < len(tiles):
            rest = int(tiles[item]) - begin
            count = min(room, rest)
            if 0 < rest - count < LEAST:  # the next part would be too short
                count = max(rest - LEAST, 0)
            if count < min(LEAST, rest):
                break
            whole = begin == 0 and count == rest
            taken[program].append(item if whole else len(tiles) + len(parts))
            if not whole:
                parts.append(Part(item, begin, count))
            begin += count
            room -= count + int(np.ceil(OVERHEAD))
            if begin == tiles[item]:
                item, begin = item + 1, 0
    return Shares([own for own in taken if own], parts) if item == len(tiles) else None
