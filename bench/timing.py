"""How a call is timed: batches of back-to-back calls, the median of their means.

The device is given call after call and waited for once, at the end of a batch, so that it never
idles between two calls while the host prepares the next. That holds where preparing a call is
quicker than the call; `measured` finds out, and where it is not, times programs that hold several
calls each (`Program.unrolled`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# Calls in one program, where dispatching one call would take as long as the call.
UNROLLED = 8
# How much longer than asked a batch is made, since a warm device is quicker.
MARGIN = 1.2
MOST_BATCHES = 30


@dataclass(frozen=True)
class Rule:
    """`batches` batches of `batch_seconds` or more. One call of `long_seconds` is a batch, and the
    only one: it drowns what varies between calls."""

    batch_seconds: float = 0.1
    batches: int = 3
    long_seconds: float = 1.5


QUICK = Rule(batch_seconds=0.005, batches=3, long_seconds=0.05)


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median, and each batch's mean; `calls` is the number in a batch."""

    seconds: float
    batches: tuple[float, ...]
    calls: int
    unrolled: int = 1


class Program(Protocol):
    """Something to time."""

    def run(self, calls: int) -> float:
        """The seconds that so many back-to-back calls take."""
        ...

    def dispatch_seconds(self) -> float:
        """What handing one call to an idle device costs the host."""
        ...

    def unrolled(self, copies: int) -> Program | None:
        """The same call so many times in one dispatch; None where that cannot be had."""
        ...


def waited(
    call: Callable[[], Any],
    wait: Callable[[Any], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[int], float]:
    """The `run` of an asynchronous `call`: waits for the last result only."""

    def run(calls: int) -> float:
        begin = clock()
        out = None
        for _ in range(calls):
            out = call()
        wait(out)
        return clock() - begin

    return run


def measure(run: Callable[[int], float], rule: Rule) -> Timing:
    """Times `run` by the rule. Batches that turn out too short, and the first that is long enough,
    only warm the device up."""
    first = run(1)
    # What a first call costs besides is nothing to one that takes several seconds.
    elapsed, calls = first if first >= 4 * rule.long_seconds else run(1), 1
    if elapsed >= rule.long_seconds:
        return Timing(elapsed, (elapsed,), 1)
    found: list[float] = []
    warm = elapsed >= rule.batch_seconds
    for _ in range(MOST_BATCHES):
        elapsed = run(calls)
        if elapsed >= rule.batch_seconds:
            found += [elapsed / calls] if warm else []
            warm = True
        else:
            found.clear()
            grown = MARGIN * calls * rule.batch_seconds / max(elapsed, 1e-9)
            calls = math.ceil(min(max(grown, calls + 1), 100 * calls))
        if len(found) == rule.batches:
            break
    if not found:
        raise RuntimeError(
            f"{calls} calls took {elapsed:.3g} s: no batch reached {rule.batch_seconds} s; "
            "lower Rule.batch_seconds"
        )
    return Timing(statistics.median(found), tuple(found), calls)


def measured(program: Program, rule: Rule) -> Timing:
    """Times a program, unrolled where its dispatch would be what is timed."""
    found = measure(program.run, rule)
    if found.seconds >= rule.long_seconds or program.dispatch_seconds() < 0.5 * found.seconds:
        return found
    several = program.unrolled(UNROLLED)
    if several is None:
        return found
    many = measure(several.run, rule)
    batches = tuple(seconds / UNROLLED for seconds in many.batches)
    return Timing(many.seconds / UNROLLED, batches, many.calls, UNROLLED)
