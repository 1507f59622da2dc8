"""Measures a backend's configurations on the present device, pass by pass.

A backward's passes are timed apart, so that the best of each make a pair. Where several workloads
share an entry, the configuration that loses least over all of them wins.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from flashjax.backend import Backend, Config, Device
from flashjax.bind import Arguments, bind
from flashjax.cases import Workload
from flashjax.spec import Spec
from flashjax.tuning.table import Direction, Entries, Kind, Size, plain

# What a configuration must gain over the first that is offered: below lies what two runs differ by.
MARGIN = 0.02
GRADIENTS = frozenset({"query", "key", "value"})
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# Seconds a call of a compiled program.
Timer = Callable[[Callable[[], Any]], float]


def timer(
    batch_seconds: float = 0.1,
    batches: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Timer:
    """The median of batches of back-to-back calls, each as long as this or longer."""

    def run(call: Callable[[], Any], calls: int) -> float:
        begin, last = clock(), None
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        return clock() - begin

    def timed(call: Callable[[], Any]) -> float:
        run(call, 1)
        calls = 1
        while (elapsed := run(call, calls)) < batch_seconds:
            wanted = 1.2 * calls * batch_seconds / max(elapsed, 1e-9)
            calls = math.ceil(min(max(wanted, calls + 1), 100 * calls))
        return statistics.median(run(call, calls) / calls for _ in range(batches))

    return timed


class Pass(NamedTuple):
    """A part of one direction with tile sizes of its own.

    `name` is the field of the direction's configuration that holds them, empty where they are that
    configuration's own (`flashjax.backend.Config`). `configs` are whole, first offered first, no
    two alike in this pass.
    """

    direction: Direction
    name: str
    configs: tuple[Config, ...]

    def __str__(self) -> str:
        return f"{self.direction} {self.name}".rstrip()

    def part(self, config: Config) -> Config:
        found: Config = getattr(config, self.name) if self.name else config
        return found

    def sizes(self, config: Config) -> dict[str, Any]:
        return plain(self.part(config))

    @property
    def wanted(self) -> frozenset[str]:
        """The gradients that this pass alone makes."""
        if self.direction == "forward":
            return frozenset()
        if self.name:
            return frozenset({self.name})
        return GRADIENTS - frozenset(_nested(self.configs[0]))


def passes(backend: Backend, spec: Spec, device: Device) -> Iterator[Pass]:
    for direction in DIRECTIONS:
        offered = backend.configs(spec, device, backward=direction == "backward")
        if not offered:
            continue
        for name in (*_nested(offered[0]), ""):
            of = Pass(direction, name, offered)
            once: dict[Any, Config] = {}
            for config in offered:
                whole = config
                if name:
                    changed: Any = {name: of.part(config)}
                    whole = dataclasses.replace(offered[0], **changed)
                once.setdefault(tuple(of.sizes(config).items()), whole)
            yield of._replace(configs=tuple(once.values()))


def _nested(config: Config) -> list[str]:
    values = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return [name for name, x in values if isinstance(x, Config)]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds a call of one pass of a workload, beside ``part.configs``; inf where it failed."""

    workload: str
    kind: Kind
    size: Size
    part: Pass
    seconds: tuple[float, ...]
    failures: tuple[str, ...] = ()


def measure(
    workload: Workload, backend: Backend, device: Device, timed: Timer
) -> Iterator[Measurement]:
    """All passes of a workload. Programs compile side by side, and run one by one.

    Raises:
      NotImplementedError: the backend cannot do the workload.
    """
    q, k, v, d_out = workload.operands()
    spec, operands, _ = bind(q, k, v, Arguments(**workload.arguments()))
    reason = backend.unsupported(spec, device)
    if reason is not None:
        raise NotImplementedError(reason)
    parts = list(passes(backend, spec, device))
    first = parts[0].configs[0]
    out, lse = jax.jit(lambda x: backend.forward(spec, first, x))(operands)
    delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1).swapaxes(1, 2)

    def compiled(part: Pass, config: Config) -> Callable[[], Any]:
        its = dataclasses.replace(spec, wanted=part.wanted)
        if part.direction == "forward":
            forward = jax.jit(lambda x: backend.forward(its, config, x)).lower(operands).compile()
            return lambda: forward(operands)
        given = (operands, lse, delta, d_out)
        backward = jax.jit(lambda *x: backend.backward(its, config, *x)).lower(*given).compile()
        return lambda: backward(*given)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = [[pool.submit(compiled, part, c) for c in part.configs] for part in parts]
    for part, waiting in zip(parts, programs, strict=True):
        seconds, failures = [], []
        for config, program in zip(part.configs, waiting, strict=True):
            try:
                seconds.append(timed(program.result()))
            except Exception as error:  # one that this device cannot run must not end the others
                seconds.append(math.inf)
                failures.append(f"{part.part(config)}: {' '.join(str(error).split())}")
        kind = Kind.of(backend.name, part.direction, spec, part.configs[0])
        yield Measurement(workload.name, kind, Size.of(spec), part, tuple(seconds), tuple(failures))


def winner(same: Iterable[Measurement]) -> dict[str, Any] | None:
    """The sizes that win one pass over all workloads of one entry; None where all failed.

    The first offered stays where nothing is quicker than it by the margin.
    """
    cost: dict[Any, list[float]] = {}
    for found in same:
        for config, seconds in zip(found.part.configs, found.seconds, strict=True):
            cost.setdefault(tuple(found.part.sizes(config).items()), []).append(math.log(seconds))
    count = max(map(len, cost.values()))
    means = {sizes: sum(logs) / count for sizes, logs in cost.items() if len(logs) == count}
    first, best = next(iter(means)), min(means, key=lambda sizes: means[sizes])
    if means[best] == math.inf:
        return None
    return dict(best if means[best] < means[first] + math.log(1 - MARGIN) else first)


def entries(found: Iterable[Measurement]) -> Entries:
    """The table that measurements make: an entry where every pass has a winner."""
    groups: dict[tuple[Kind, Size], dict[str, list[Measurement]]] = {}
    for one in found:
        groups.setdefault((one.kind, one.size), {}).setdefault(one.part.name, []).append(one)
    made: Entries = {}
    for (kind, size), of_pass in groups.items():
        winners = {name: winner(same) for name, same in of_pass.items()}
        if all(winners.values()):
            nested = {name: sizes for name, sizes in winners.items() if name}
            made.setdefault(kind, {})[size] = {**(winners[""] or {}), **nested}
    return made
