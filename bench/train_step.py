"""``python -m bench.train_step``: whole training steps of the example, by who computes attention.

The same model, optimiser and rows each time; only the function that its layers call is another.
Rows are timed twice: *packed*, with documents side by side as in training, which jax.nn takes as a
dense (B, 1, T, T) mask, and *causal*, one document a row, which needs no mask array of anyone.
JSON goes to bench/results/train-step.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from tqdm import tqdm

import flashjax.layer
from bench import machine
from bench.peers.jax_functions import GIB, MOST_SCORES
from bench.record import RESULTS
from bench.run import reason_of
from flashjax.bind import Arguments
from lm.config import PRESETS, Config
from lm.cost import Work, model_flops, planned_memory, work_of
from lm.packing import Batch
from lm.step import make_program
from lm.train import read_data

FORMAT = "flashjax train step 1"
TEXTS = ("packed", "causal")
WARM_UP = 3
# After so many seconds of steps a device is warm.
WARM_SECONDS = 5.0
# Batches that wait on the device; a run cycles through them.
BATCHES = 4


def main(argv: Sequence[str] | None = None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    ours = ["flashjax-mosaic", "flashjax-triton"] if on_gpu else ["flashjax-xla"]
    parser = argparse.ArgumentParser(prog="python -m bench.train_step", description=__doc__)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="gpt2-small-1k")
    parser.add_argument("--steps", type=int, default=20, help="timed ones")
    parser.add_argument("--batch", type=int, help="rows, in place of the preset's")
    parser.add_argument("--length", type=int, help="tokens a row, in place of the preset's")
    parser.add_argument(
        "--attention",
        type=lambda text: text.split(","),
        default=[*ours, "jax.nn-xla", *(["jax.nn-cudnn"] if on_gpu else [])],
        help="flashjax-IMPLEMENTATION, jax.nn-xla, jax.nn-cudnn; comma-separated",
    )
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=list(TEXTS), help=", ".join(TEXTS)
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "train-step.json")
    flags = parser.parse_args(argv)
    config = PRESETS[flags.preset].override(batch=flags.batch, length=flags.length)
    text = read_data(config, None, Path("runs"))
    print(f"data: {text.description}")
    packed = [text.train.train_batch(i, config.rows_per_step, config.seed) for i in range(BATCHES)]
    rows = time_all(config, packed, flags.attention, flags.rows, flags.steps)
    save(flags.out, flags.preset, rows)
    print(f"written to {flags.out}")


def time_all(
    config: Config,
    packed: Sequence[Batch],
    attentions: Sequence[str],
    texts: Sequence[str],
    steps: int,
) -> list[dict[str, Any]]:
    """A row for each attention and kind of rows; what fails says why in its note."""
    rows = []
    todo = [(text, attention) for text in texts for attention in attentions]
    print(f"{'':28}{'tokens/s':>12}{'TFLOP/s':>9}{'GiB':>8}{'loss':>8}{'compile s':>11}")
    for text, attention in tqdm(todo, file=sys.stderr, disable=None, leave=False):
        batches = packed if text == "packed" else [unpacked(batch) for batch in packed]
        row = {"preset": config.preset, "text": text, "attention": attention}
        row |= {"batch": config.rows_per_step, "length": config.length}
        try:
            refuse_many_scores(config, attention)
            row |= time_steps(config, batches, attention, text, steps)
        except Exception as error:
            row["note"] = reason_of(error)
        rows.append(row)
        tqdm.write(line(row), file=sys.stdout)
        sys.stdout.flush()
        jax.clear_caches()
        gc.collect()
    return rows


def line(row: dict[str, Any]) -> str:
    name = f"{row['text']:8}{row['attention']:20}"
    if "tokens_per_second" not in row:
        return f"{name}  {row['note']}"
    return (
        f"{name}{row['tokens_per_second']:>12,.0f}{row['tflops']:>9.3g}{row['memory_gib']:>8.2f}"
        f"{row['loss']:>8.3f}{row['compile_seconds']:>11.1f}"
    )


def unpacked(batch: Batch) -> Batch:
    """The same tokens, each row as one document without padding."""
    shape = batch.inputs.shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return batch._replace(segment_ids=np.zeros(shape, np.int32), positions=positions.copy())


def time_steps(
    config: Config, batches: Sequence[Batch], attention: str, text: str, steps: int
) -> dict[str, Any]:
    """Tokens a second over `steps` steps after a few to warm up, from one state on."""
    program = make_program(config)
    with attends_by(attention, text):
        begin = time.perf_counter()
        shapes = jax.eval_shape(program.start)
        train = jax.jit(program.train, donate_argnums=0).lower(shapes, batches[0]).compile()
        compile_seconds = time.perf_counter() - begin
    state = jax.jit(program.start)()
    on_device = [jax.device_put(batch) for batch in batches]
    begin = time.perf_counter()
    for i in range(WARM_UP):
        state, sums = train(state, on_device[i % len(on_device)])
        jax.block_until_ready(sums)
        if time.perf_counter() - begin > WARM_SECONDS:
            break
    work = sum((work_of(batches[i % len(batches)]) for i in range(steps)), start=Work(0, 0))
    begin = time.perf_counter()
    for i in range(steps):
        state, sums = train(state, on_device[i % len(on_device)])
    jax.block_until_ready((state, sums))
    seconds = time.perf_counter() - begin
    return {
        "steps": steps,
        "seconds": seconds,
        "tokens_per_second": work.tokens / seconds,
        "tflops": model_flops(config, state.params, work) / seconds / 1e12,
        "memory_gib": planned_memory(train) / 2**30,
        "loss": float(sums.nats) / max(int(sums.bytes), 1),
        "compile_seconds": compile_seconds,
    }


def refuse_many_scores(config: Config, attention: str) -> None:
    """XLA would first try products out on such arrays, for minutes."""
    scores = 4 * config.batch * config.heads * config.length**2
    if attention == "jax.nn-xla" and scores > MOST_SCORES:
        raise NotImplementedError(f"a layer's scores would take {scores / GIB:.0f} GiB")


@contextlib.contextmanager
def attends_by(attention: str, text: str) -> Iterator[None]:
    """While the model is traced, its layers call this attention."""
    family, _, implementation = attention.partition("-")
    if family == "flashjax":
        replacement = _ours(implementation, text)
    elif family == "jax.nn":
        replacement = _jax_nn(implementation, text)
    else:
        raise ValueError(f"attention {attention!r} is unknown; give flashjax-… or jax.nn-…")
    with mock.patch.object(flashjax.layer, "call", replacement):
        yield


def _ours(implementation: str, text: str) -> Callable[..., Any]:
    original = flashjax.layer.call

    def call(q: Any, k: Any, v: Any, arguments: Arguments, *_: Any) -> jax.Array:
        if text == "causal":
            arguments = dataclasses.replace(arguments, segment_ids=None)
        found: jax.Array = original(q, k, v, arguments, implementation)
        return found

    return call


def _jax_nn(implementation: str, text: str) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, arguments: Arguments, *_: Any) -> jax.Array:
        mask = None
        if text == "packed":
            ids: Any = arguments.segment_ids
            mask = ((ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None])[:, None]
        function: Any = jax.nn.dot_product_attention
        out = function(q, k, v, mask=mask, is_causal=True, implementation=implementation)
        if mask is not None:
            # Where ours gives 0, a row that sees nothing, jax.nn gives the mean of V.
            out = jnp.where((ids >= 0)[:, :, None, None], out, 0)
        return checkpoint_name(out, "flashjax_out")

    return call


def save(path: Path, preset: str, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of other presets stay."""
    kept: list[dict[str, Any]] = []
    if path.exists():
        kept = [r for r in json.loads(path.read_text())["rows"] if r["preset"] != preset]
    whole = {"format": FORMAT, "machine": machine.describe(), "rows": [*kept, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
