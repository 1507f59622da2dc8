"""A run from its data to its verdict: read, pack, compile, train, measure."""

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import flashjax
from lm.config import Config, InputError
from lm.data import load_documents, split_documents
from lm.entropy import Entropy, byte_entropy
from lm.metrics import CSV_NAME, PLOT_NAME, Metrics, Row
from lm.packing import PADDING_SEGMENT, Batch, PackedRows, pack
from lm.step import LossSum, TrainState, make_program


class Data(NamedTuple):
    train: PackedRows
    validation: PackedRows
    entropy: Entropy
    description: str


@dataclass(frozen=True)
class Compiled:
    """The run's functions, compiled for its shapes before the clock starts."""

    train: Callable[[TrainState, Batch], tuple[TrainState, LossSum]]
    evaluate: Callable[[Any, Batch], LossSum]


def run(config: Config, data: str | None, out: Path, *, progress: bool) -> float:
    """Trains, leaves the metrics in `out`, prints as it goes; returns the validation loss."""
    text = read_data(data, config.length)
    attention = describe_attention(config)
    # Opened last: a mistake must not cost the user the metrics of the run before.
    with Metrics(out) as metrics:
        print(f"data: {text.description}")
        print(attention)
        state, compiled = compile_program(config, text.train)
        try:
            with progress_bar(config, progress) as bar:
                loss = train_loop(config, text, state, compiled, metrics, bar)
        finally:
            metrics.plot(text.entropy)
    print(f"wrote {out / CSV_NAME} and {out / PLOT_NAME}")
    print_verdict(loss, text.entropy)
    return loss


def read_data(data: str | None, length: int) -> Data:
    split = split_documents(load_documents(data))
    train, validation = pack(split.train, length), pack(split.validation, length)
    sides = [
        f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.2f} MB in {len(rows)} rows"
        for documents, rows in [(split.train, train), (split.validation, validation)]
    ]
    source = data or f"standard library of Python {platform.python_version()}"
    description = f"{source}: train {sides[0]}; validation {sides[1]}; {length} tokens a row"
    return Data(train, validation, byte_entropy(train.tokens), description)


def describe_attention(config: Config) -> str:
    """What flashjax.explain says first of this run's calls; an InputError if it refuses them."""

    def operand(heads: int) -> jax.ShapeDtypeStruct:
        shape = (config.batch, config.length, heads, config.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))

    key = operand(config.kv_heads)
    segment_ids = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
    try:
        explanation = flashjax.explain(
            operand(config.heads),
            key,
            key,
            is_causal=True,
            segment_ids=segment_ids,
            implementation=config.implementation,
        )
    except NotImplementedError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--implementation {config.implementation}: {reason}") from error
    return str(explanation).splitlines()[0]


def compile_program(config: Config, rows: PackedRows) -> tuple[TrainState, Compiled]:
    program = make_program(config)
    begin = time.perf_counter()
    state = jax.jit(program.start)()
    example = rows.train_batch(0, config.batch, config.seed)
    train = jax.jit(program.train, donate_argnums=0).lower(state, example).compile()
    evaluate = jax.jit(program.evaluate).lower(state.params, example).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    seconds = time.perf_counter() - begin
    print(f"model: {parameters / 1e6:.2f} M parameters; compiled in {seconds:.1f} s")
    return state, Compiled(train, evaluate)


def train_loop(
    config: Config,
    text: Data,
    state: TrainState,
    compiled: Compiled,
    metrics: Metrics,
    bar: tqdm,
) -> float:
    """Runs every step. A validation loss is measured on `evaluation_rows` rows on the way, and on
    `final_evaluation_rows` after the last step, which is the one returned."""
    begin = time.perf_counter()
    tokens, validation_loss = 0, None
    for first in range(0, config.steps, config.log_every):
        last = min(first + config.log_every, config.steps)
        state, interval = train_steps(config, text.train, state, compiled, range(first, last))
        tokens += interval.tokens
        validation_loss = None
        if last == config.steps or last % config.evaluate_every < last - first:
            final = last == config.steps
            rows = config.final_evaluation_rows if final else config.evaluation_rows
            batches = text.validation.evaluation_batches(rows, config.batch)
            validation_loss = mean_loss([compiled.evaluate(state.params, b) for b in batches])
        seconds = time.perf_counter() - begin
        speed = interval.tokens / interval.seconds
        metrics.add(Row(last, tokens, interval.loss, validation_loss, speed, seconds))
        bar.set_postfix_str(f"loss {interval.loss:.3f}, {speed:.0f} tokens/s", refresh=False)
        bar.update(last - first)
        if validation_loss is not None:
            bar.write(
                f"step {last}: loss {interval.loss:.3f}, validation {validation_loss:.3f} "
                f"nats/byte, {speed:.0f} tokens/s, {seconds:.0f} s"
            )
    assert validation_loss is not None
    return validation_loss


class Interval(NamedTuple):
    """Some steps taken together: real tokens, wall-clock seconds, nats per byte."""

    tokens: int
    seconds: float
    loss: float


def train_steps(
    config: Config, rows: PackedRows, state: TrainState, compiled: Compiled, steps: range
) -> tuple[TrainState, Interval]:
    begin = time.perf_counter()
    tokens, sums = 0, []
    for step in steps:
        batch = rows.train_batch(step, config.batch, config.seed)
        state, step_sums = compiled.train(state, batch)
        tokens += int((batch.segment_ids != PADDING_SEGMENT).sum())
        sums.append(step_sums)
    # Reading a loss waits for its step; only here, so that the next batch is made meanwhile.
    loss = mean_loss(sums)
    if not math.isfinite(loss):
        raise InputError(
            f"the loss is {loss} by step {steps.stop}; "
            f"lower --learning-rate (it is {config.learning_rate})"
        )
    return state, Interval(tokens, time.perf_counter() - begin, loss)


def mean_loss(sums: Sequence[LossSum]) -> float:
    """Nats per byte over several batches."""
    nats = sum(float(part.nats) for part in sums)
    return nats / max(sum(int(part.bytes) for part in sums), 1)


def print_verdict(loss: float, entropy: Entropy) -> None:
    sign = "<" if loss < entropy.order1 else ">="
    print(f"validation loss: {loss:.3f} nats/byte")
    print(
        f"train split's byte entropy: order 0 {entropy.order0:.3f}, "
        f"order 1 {entropy.order1:.3f} nats/byte"
    )
    print(f"validation loss {loss:.2f} {sign} order-1 entropy {entropy.order1:.2f} nats/byte")


def progress_bar(config: Config, shown: bool) -> tqdm:
    # In a log file, where the bar cannot overwrite itself, it is drawn seldom.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=config.steps, unit="step", desc=config.preset, disable=not shown, mininterval=interval
    )
