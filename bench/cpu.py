"""What the chunked path ("xla") does on CPU: ``python -m bench.cpu`` prints three tables.

1. Against jax.nn's XLA path, B 1, N 4, H 64, float32, causal, T = S = 4096: time and memory.
2. Temporary memory of forward + backward at T = S = 8k, 16k, 32k, from the compiled program.
3. Time with a window of 256 at T = S = 4k, 8k, 16k, forward and backward.

Times are medians of interleaved calls, one of each side in turn, so that a busy machine slows
both. JSON goes to ``bench/results/cpu.json``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import flashjax

HEADS, HEAD_DIM = 4, 64
Attention = Callable[..., jax.Array]
Table = list[dict[str, Any]]


def inputs(length: int) -> list[jax.Array]:
    """q, k, v and an output gradient, (1, length, HEADS, HEAD_DIM), float32, normal."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, length, HEADS, HEAD_DIM)) for key in keys]


def programs(attention: Attention, length: int) -> dict[str, Any]:
    """The compiled forward, and forward + backward."""
    q, k, v, d_out = inputs(length)

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(attention, q, k, v)[1](d_out)

    return {
        "forward": jax.jit(attention).lower(q, k, v).compile(),
        "gradient": jax.jit(gradient).lower(q, k, v, d_out).compile(),
    }


def timed(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each call, taken in turns."""
    for call in calls:
        jax.block_until_ready(call())
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def temporary_mib(program: Any) -> float:
    return float(program.memory_analysis().temp_size_in_bytes) / 2**20


def ours(**arguments: Any) -> Attention:
    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flashjax.dot_product_attention(q, k, v, implementation="xla", **arguments)

    return call


def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def against_jax_nn(length: int, repeats: int) -> Table:
    sides = {"jax.nn": programs(theirs, length), "flashjax": programs(ours(is_causal=True), length)}
    args = {"forward": inputs(length)[:3], "gradient": inputs(length)}
    rows: Table = []
    for name in ("forward", "gradient"):
        calls = [functools.partial(sides[s][name], *args[name]) for s in sides]
        seconds = timed(calls, repeats)
        memory = [temporary_mib(sides[s][name]) for s in sides]
        rows.append(
            {
                "pass": name,
                "jax.nn s": seconds[0],
                "flashjax s": seconds[1],
                "times faster": seconds[0] / seconds[1],
                "jax.nn MiB": memory[0],
                "flashjax MiB": memory[1],
                "times less": memory[0] / memory[1],
            }
        )
    return rows


def memory_by_length(lengths: Sequence[int]) -> Table:
    rows: Table = []
    for length in lengths:
        found = temporary_mib(programs(ours(is_causal=True), length)["gradient"])
        rows.append(
            {"T = S": length, "temporary MiB": found, "bytes a position": found * 2**20 / length}
        )
    return rows


def window_by_length(lengths: Sequence[int], repeats: int) -> Table:
    rows: Table = []
    for length in lengths:
        made = programs(ours(local_window_size=(256, 0)), length)
        args = inputs(length)
        forward, gradient = timed(
            [
                functools.partial(made["forward"], *args[:3]),
                functools.partial(made["gradient"], *args),
            ],
            repeats,
        )
        rows.append(
            {
                "T = S": length,
                "forward s": forward,
                "gradient s": gradient,
                "forward µs a row": 1e6 * forward / length,
                "gradient µs a row": 1e6 * gradient / length,
            }
        )
    return rows


def show(title: str, rows: Table) -> None:
    """A Markdown table."""
    print(f"\n{title}\n")
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        cells = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=4096, help="T = S of the first table")
    parser.add_argument("--repeats", type=int, default=7, help="calls that a median is taken of")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results/cpu.json"))
    flags = parser.parse_args()
    shape = f"B 1, N {HEADS}, H {HEAD_DIM}, float32"
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "flashjax": flashjax.__version__,
        "shape": shape,
    }
    jax.config.update("jax_platforms", "cpu")
    results["jax_nn"] = against_jax_nn(flags.length, flags.repeats)
    show(f"Against jax.nn (XLA), {shape}, causal, T = S = {flags.length}", results["jax_nn"])
    results["memory"] = memory_by_length([8192, 16384, 32768])
    show(f"Forward + backward, {shape}, causal", results["memory"])
    results["window"] = window_by_length([4096, 8192, 16384], flags.repeats)
    show(f"Window (256, 0), {shape}", results["window"])
    flags.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {flags.out}")


if __name__ == "__main__":
    main()
