"""Calls to time: a JAX function or a torch one, compiled, with its memory and its results."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from bench.timing import waited
from flashjax.cases import Workload

# Calls that JAX hands over without waiting for the first of them: fewer than its limit.
FREE_CALLS = 8


class JaxProgram:
    """A function compiled for its arguments.

    `memory` is what XLA plans beside the arguments: temporary arrays and results, in bytes;
    `temporary` is the former alone. With `make`, `arguments` are shapes, and `make()` gives the
    arrays when they are needed: a program that waits for its turn holds no memory.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        make: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._function = function
        self._shapes, self._make = tuple(arguments), make
        self._arrays: tuple[Any, ...] | None = None if make else self._shapes
        begin = time.perf_counter()
        self._compiled = jax.jit(function).lower(*self._shapes).compile()
        self.compile_seconds = time.perf_counter() - begin
        plan = self._compiled.memory_analysis()
        self.memory: int | None = None
        self.temporary: int | None = None
        if plan is not None:
            self.temporary = plan.temp_size_in_bytes
            self.memory = plan.temp_size_in_bytes + plan.output_size_in_bytes

    @property
    def _arguments(self) -> tuple[Any, ...]:
        if self._arrays is None:
            assert self._make is not None
            self._arrays = tuple(jax.block_until_ready(self._make()))
        return self._arrays

    def result(self) -> Any:
        return self._compiled(*self._arguments)

    def run(self, calls: int) -> float:
        compiled, arguments = self._compiled, self._arguments
        return waited(lambda: compiled(*arguments), jax.block_until_ready)(calls)

    def dispatch_seconds(self) -> float:
        device = next(iter(jax.tree.leaves(self._arguments)[0].devices()))
        if device.platform == "cpu":
            # It runs a call while it hands it over; the device is the host.
            return 0.0
        jax.block_until_ready(self.result())
        begin = time.perf_counter()
        kept = [self.result() for _ in range(FREE_CALLS)]
        seconds = time.perf_counter() - begin
        jax.block_until_ready(kept)
        return seconds / FREE_CALLS

    def unrolled(self, copies: int) -> JaxProgram:
        return JaxProgram(chained(self._function, copies), self._arguments)


def chained(function: Callable[..., Any], copies: int) -> Callable[..., Any]:
    """`copies` calls, each of whose arguments wait for the result before.

    All results are returned: what nobody needs, or what is equal, XLA would leave out.
    """

    def several(*arguments: Any) -> list[Any]:
        found: list[Any] = []
        for _ in range(copies):
            if found:
                arguments, found[-1] = lax.optimization_barrier((arguments, found[-1]))
            found.append(function(*arguments))
        return found

    return several


@dataclass(frozen=True)
class Inputs:
    """A workload's arrays on the device, the same for all contenders."""

    workload: Workload
    q: Any
    k: Any
    v: Any
    d_out: Any
    arguments: dict[str, Any]

    @classmethod
    def of(cls, workload: Workload) -> Inputs:
        arrays = jax.block_until_ready((*workload.operands(), workload.arguments()))
        return cls(workload, *arrays)


# f(q, k, v, arrays) -> out; `arrays` are those that the call takes besides, by name.
Attention = Callable[[Any, Any, Any, dict[str, Any]], Any]


def jax_forward(f: Attention, inputs: Inputs, arrays: dict[str, Any]) -> JaxProgram:
    """The output. `arrays` travel as arguments: constants would be compiled into the program."""
    return JaxProgram(f, (inputs.q, inputs.k, inputs.v, arrays))


def _pulled(f: Attention, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    return jax.vjp(lambda q, k, v: f(q, k, v, arrays), q, k, v)


def jax_backward(f: Attention, inputs: Inputs, arrays: dict[str, Any]) -> JaxProgram:
    """dq, dk, dv from what the forward keeps for it: `jax.vjp`'s pull-back is a pytree, so that
    one program returns it and another takes it."""
    operands = (inputs.q, inputs.k, inputs.v, arrays)
    lowered = jax.jit(functools.partial(_pulled, f)).lower(*operands)
    forward = lowered.compile()
    # The structure of what this very program returns: a second trace's would be another.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info[1])
    return JaxProgram(
        lambda pull, d_out: pull(d_out),
        (shapes, inputs.d_out),
        lambda: (forward(*operands)[1], inputs.d_out),
    )


def jax_gradient(f: Attention, inputs: Inputs, arrays: dict[str, Any]) -> JaxProgram:
    """Both passes: the output too, without which XLA could leave out its product."""

    def both(q: Any, k: Any, v: Any, arrays: dict[str, Any], d_out: Any) -> Any:
        out, pull = _pulled(f, q, k, v, arrays)
        return out, pull(d_out)

    return JaxProgram(both, (inputs.q, inputs.k, inputs.v, arrays, inputs.d_out))


class TorchProgram:
    """A torch call, timed by CUDA events (by the wall clock where torch has no GPU).

    `compile_seconds` is the first call's time less the second's; `memory` is what one call adds to
    what is allocated before it.
    """

    temporary: int | None = None  # no plan tells
    # How many launches a stream surely queues behind a kernel that spins.
    QUEUED = 128

    def __init__(self, torch: Any, call: Callable[[], Any]) -> None:
        self._torch = torch
        self._cuda: Any = torch.cuda if torch.cuda.is_available() else None
        self._call = call
        self._spin_cycles = 0
        first, second = self.run(1), self.run(1)
        self.compile_seconds = max(first - second, 0.0)
        self.memory: int | None = None
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            before = self._cuda.memory_allocated()
            kept = call()
            self._cuda.synchronize()
            self.memory = self._cuda.max_memory_allocated() - before
            del kept

    def result(self) -> Any:
        return self._call()

    def run(self, calls: int) -> float:
        if self._cuda is None:
            return waited(self._call, lambda _: None)(calls)
        if not self._spin_cycles:
            return self._events(calls)
        # A kernel that spins lets the host get ahead, as far as the stream's queue is deep.
        parts, rest = divmod(calls, self.QUEUED)
        sizes = [self.QUEUED] * parts + ([rest] if rest else [])
        return sum(self._events(size) for size in sizes)

    def _events(self, calls: int) -> float:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if self._spin_cycles:
            self._cuda._sleep(self._spin_cycles * calls)
        begin.record()
        for _ in range(calls):
            self._call()
        end.record()
        self._cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def dispatch_seconds(self) -> float:
        if self._cuda is None:
            return 0.0
        self._cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(FREE_CALLS):
            self._call()
        seconds = time.perf_counter() - begin
        self._cuda.synchronize()
        return seconds / FREE_CALLS

    def unrolled(self, copies: int) -> TorchProgram | None:
        """The calls in a CUDA graph, `copies` of them. Those that cannot be captured come behind
        spinning kernels, timed by events, so that only the calls count: meanwhile the device draws
        little power, and the calls then find higher clocks than in a row without end."""
        if self._cuda is None:
            return None
        graph = self._captured(copies)
        if graph is not None:
            return TorchProgram(self._torch, graph.replay)
        if not hasattr(self._cuda, "_sleep"):
            return None
        # 2 GHz is above these GPUs' clocks: the spin outlasts the host's work.
        cycles = int(1.5 * self.dispatch_seconds() * 2e9)
        call = self._call

        def several() -> Any:
            out = None
            for _ in range(copies):
                out = call()
            return out

        found = TorchProgram(self._torch, several)
        found.QUEUED = max(1, self.QUEUED // copies)
        found._spin_cycles = cycles * copies
        return found

    def _captured(self, copies: int) -> Any:
        """A CUDA graph of so many calls, if it does what they do."""
        if not hasattr(self._cuda, "CUDAGraph"):
            return None
        graph, stream, out = self._cuda.CUDAGraph(), self._cuda.current_stream(), None
        try:
            with self._cuda.graph(graph):
                for _ in range(copies):
                    out = self._call()
        except RuntimeError:  # what the call does a graph cannot hold
            self._cuda.set_stream(stream)  # torch leaves its own behind
            return None
        # What a call launches on a stream of its own is not in the graph.
        results = jax.tree.leaves(out)
        with self._torch.no_grad():
            for x in results:
                x.fill_(math.nan)
            graph.replay()
            return graph if all(bool(x.isfinite().all()) for x in results) else None


def as_float64(x: Any, index: Any) -> np.ndarray[Any, Any]:
    """A part of a JAX or torch array."""
    part = x[index]
    if hasattr(part, "detach"):
        return np.asarray(part.detach().double().cpu().numpy())
    return np.asarray(part).astype(np.float64)
