"""Measures a backend's configurations on the present device, pass by pass.

A backward's passes are timed apart, so that the best of each make a pair. Where several workloads
share an entry, the configuration that loses least over all of them wins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from flashjax.backend import Backend, Config, Device
from flashjax.bind import Arguments, bind
from flashjax.cases import Workload
from flashjax.spec import Operands, Spec
from flashjax.tuning.table import Direction, Entries, Kind, Size, plain

# What a configuration must gain over the first that is offered; below it lies the clock's noise.
MARGIN = 0.02
GRADIENTS = frozenset({"query", "key", "value"})


class Rule(NamedTuple):
    """`batches` batches of back-to-back calls, each as long as this or longer."""

    batch_seconds: float = 0.1
    batches: int = 3


QUICK = Rule(0.02, 3)


def seconds_a_call(
    call: Callable[[], Any], rule: Rule, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median of the batches' means; the device is waited for once a batch."""

    def run(calls: int) -> float:
        begin, last = clock(), None
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        return clock() - begin

    run(1)
    calls = 1
    while (elapsed := run(calls)) < rule.batch_seconds:
        wanted = 1.2 * calls * rule.batch_seconds / max(elapsed, 1e-9)
        calls = math.ceil(min(max(wanted, calls + 1), 100 * calls))
    return statistics.median(run(calls) / calls for _ in range(rule.batches))


class Pass(NamedTuple):
    """A part of one direction that has tile sizes of its own; `name` is a field of the
    direction's configuration, or empty for that configuration's own pass."""

    direction: Direction
    name: str
    configs: tuple[Config, ...]

    def __str__(self) -> str:
        return f"{self.direction} {self.name}".rstrip()


def passes(backend: Backend, spec: Spec, device: Device) -> Iterator[Pass]:
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        offered = backend.configs(spec, device, backward=direction == "backward")
        for name in (*_nested(offered[0]), ""):
            mine = [getattr(c, name) if name else c for c in offered]
            # Pairs repeat a pass: each is measured once.
            once = {tuple(plain(c).items()): c for c in reversed(mine)}
            configs = [c for c in dict.fromkeys(mine) if c in once.values()]
            yield Pass(direction, name, tuple(configs))


def _nested(config: Config) -> list[str]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return [name for name, x in values.items() if isinstance(x, Config)]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One pass of one workload: seconds a call by configuration, the first offered first."""

    workload: str
    backend: str
    spec: Spec
    part: Pass
    seconds: dict[Config, float]
    failed: dict[Config, str]


class Subject:
    """A workload on the present device, and a backend to run it with."""

    def __init__(self, workload: Workload, backend: Backend) -> None:
        q, k, v, self._d_out = workload.operands()
        bound = bind(q, k, v, Arguments(**workload.arguments()))
        self.spec = bound.spec
        self._operands: Operands = bound.operands
        self._backend = backend

    @functools.cached_property
    def _saved(self) -> tuple[jax.Array, jax.Array]:
        """LSE and Δ."""
        # Whatever the configuration, they are the same but for rounding.
        config = self._backend.configs(self.spec, Device(""))[0]
        out, lse = jax.jit(functools.partial(self._backend.forward, self.spec, config))(
            self._operands
        )
        products = out.astype(lse.dtype) * self._d_out.astype(lse.dtype)
        return lse, products.sum(-1).swapaxes(1, 2)

    def program(self, part: Pass, config: Config, nested: Sequence[str]) -> Callable[[], Any]:
        raise NotImplementedError
