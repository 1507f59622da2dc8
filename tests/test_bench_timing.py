"""What the bench times is the device's work: on fake clocks, and a kernel of known cost."""

import contextlib
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.programs import JaxProgram, TorchProgram, chained
from bench.timing import UNROLLED, Rule, measure, measured, waited

RULE = Rule(batch_seconds=0.1, batches=3, long_seconds=1.5)


class Device:
    """`seconds(n)` for the nth call, and what was asked of it."""

    def __init__(self, seconds):
        self.seconds, self.done, self.asked = seconds, 0, []

    def run(self, calls):
        self.asked.append(calls)
        self.done += calls
        return calls * self.seconds(self.done)


def test_a_kernel_of_known_cost_on_a_fake_clock():
    device = Device(lambda n: 137e-6)
    found = measure(device.run, RULE)
    assert found.seconds == pytest.approx(137e-6)
    assert len(found.batches) == RULE.batches
    assert found.calls * 137e-6 >= RULE.batch_seconds
    assert device.asked[-3:] == [found.calls] * 3


def test_a_kernel_of_known_cost_on_the_real_clock():
    found = measure(waited(lambda: time.sleep(1e-3), lambda _: None), Rule(0.02, 3))
    assert 1e-3 <= found.seconds < 3e-3


def test_a_device_that_warms_up_is_timed_warm():
    device = Device(lambda n: 1e-3 if n < 100 else 4e-4)
    found = measure(device.run, RULE)
    assert found.seconds == pytest.approx(4e-4)
    assert found.calls * 4e-4 >= RULE.batch_seconds


def test_the_median_is_not_moved_by_one_slow_batch():
    device = Device(lambda n: 1e-3)
    slow = iter([1, 1, 1, 1, 1, 5, 1])
    found = measure(lambda calls: device.run(calls) * next(slow), RULE)
    assert max(found.batches) == pytest.approx(5e-3)
    assert found.seconds == pytest.approx(1e-3)


def test_a_long_call_is_timed_once():
    for seconds, asked in ((2.0, [1, 1]), (30.0, [1])):
        device = Device(lambda n, seconds=seconds: seconds)
        assert measure(device.run, RULE).batches == (seconds,)
        assert device.asked == asked


def test_a_clock_that_stands_still_is_named():
    with pytest.raises(RuntimeError, match="no batch reached"):
        measure(lambda calls: 0.0, RULE)


def test_a_batch_waits_once():
    calls, waits = [], []
    assert waited(lambda: calls.append(1), waits.append)(7) > 0
    assert (len(calls), len(waits)) == (7, 1)


class DispatchBound:
    """20 µs of work that cost 50 µs to hand over, `copies` at a time."""

    def __init__(self, copies=1):
        self.copies = copies

    def run(self, calls):
        return calls * max(50e-6, self.copies * 20e-6)

    def dispatch_seconds(self):
        return 50e-6

    def unrolled(self, copies):
        return DispatchBound(copies)


def test_what_is_timed_is_not_dispatch():
    found = measured(DispatchBound(), RULE)
    assert found.unrolled == UNROLLED
    assert found.seconds == pytest.approx(20e-6)
    assert len(found.batches) == RULE.batches


def test_chained_calls_are_all_done():
    x, y = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
    program = JaxProgram(jnp.dot, (x, y)).unrolled(3)
    text = jax.jit(chained(jnp.dot, 3)).lower(x, y).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") == 3
    for found in program.result():
        np.testing.assert_allclose(found, x @ y, rtol=1e-6)
    assert program.memory > 0


class FakeCuda:
    """torch.cuda with a clock: a call takes 20 µs on the device and 50 µs to launch."""

    def __init__(self):
        self.host = self.device = 0.0
        self.spun = 0

    def is_available(self):
        return True

    def launch(self, seconds, cost=50e-6):
        self.host += cost
        self.device = max(self.device, self.host) + seconds

    def Event(self, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", max(self.device, self.host))
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event

    def _sleep(self, cycles):
        self.spun += 1
        self.launch(cycles / 1.5e9)

    def synchronize(self):
        self.host = self.device = max(self.host, self.device)

    def reset_peak_memory_stats(self):
        pass

    def memory_allocated(self):
        return 100

    def max_memory_allocated(self):
        return 350


def test_torch_is_timed_by_the_device_also_where_launching_takes_longer(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr("bench.programs.time.perf_counter", lambda: cuda.host)
    program = TorchProgram(SimpleNamespace(cuda=cuda), lambda: cuda.launch(20e-6))
    assert program.memory == 250
    assert measure(program.run, RULE).seconds == pytest.approx(50e-6, rel=0.05)
    found = measured(program, RULE)
    assert cuda.spun > 0
    assert found.seconds == pytest.approx(20e-6, rel=0.05)


class Graph:
    """Replays what was called while it was captured, or nothing, at 1 µs a launch."""

    def __init__(self, cuda, holds):
        self.cuda, self.holds, self.captured, self.result = cuda, holds, 0, None

    def replay(self):
        self.cuda.launch(self.captured * 20e-6, cost=1e-6)
        if self.holds:
            self.result.data[:] = 1


class Result:
    def __init__(self):
        self.data = np.ones(3)

    def fill_(self, x):
        self.data[:] = x

    def isfinite(self):
        return np.isfinite(self.data)


@pytest.mark.parametrize("holds", [True, False, None])
def test_torch_calls_come_in_a_graph_if_it_holds_them(monkeypatch, holds):
    """With None a graph cannot hold such a call, and torch stays on the graph's stream."""
    cuda = FakeCuda()
    monkeypatch.setattr("bench.programs.time.perf_counter", lambda: cuda.host)
    graph, within, result = Graph(cuda, holds), [], Result()
    graph.result = result

    @contextlib.contextmanager
    def capture(_):
        within.append(True)
        cuda.stream = "graph's"
        yield
        within.clear()
        if holds is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.stream = "usual"

    def call():
        if within:
            graph.captured += 1
        else:
            cuda.launch(20e-6)
        return result

    cuda.CUDAGraph, cuda.graph, cuda.stream = lambda: graph, capture, "usual"
    cuda.current_stream = lambda: cuda.stream
    cuda.set_stream = lambda stream: setattr(cuda, "stream", stream)
    program = TorchProgram(SimpleNamespace(cuda=cuda, no_grad=contextlib.nullcontext), call)
    found = measured(program, RULE)
    assert (cuda.spun == 0) == bool(holds)
    assert cuda.stream == "usual"
    assert found.seconds == pytest.approx(20e-6, rel=0.05)
