"""A run from its data to its verdict: read, pack, compile, train, measure."""

import contextlib
import dataclasses
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import flashjax
from lm.checkpoint import Checkpoints, Progress
from lm.config import CSV_NAME, LEAST_LENGTH, PLOT_NAME, PROFILE, REMATS, Config, InputError
from lm.cost import (
    Work,
    device_memory,
    model_flops,
    peak_flops,
    peak_memory,
    planned_memory,
    work_of,
)
from lm.data import load_files, make_documents, split_files
from lm.entropy import Entropy, byte_entropy
from lm.guard import deferred_interrupt, locked
from lm.metrics import Metrics, Row
from lm.packing import Batch, PackedRows, pack
from lm.report import print_sample, print_verdict, progress_bar, show
from lm.step import LossSum, Program, TrainState, make_program


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


@dataclass(frozen=True)
class Record:
    """Where a run leaves what it did; `trace` is the directory of its profile, if one is wanted.
    `interrupted` says whether it should end at the next row."""

    metrics: Metrics
    checkpoints: Checkpoints
    bar: tqdm
    trace: Path | None
    interrupted: Callable[[], bool]


def run(
    config: Config,
    data: str | None,
    out: Path,
    *,
    progress: bool,
    restart: bool = False,
    profile: bool = False,
) -> TrainState:
    """Trains, or goes on with what `out` holds of this run; leaves metrics and checkpoints in
    `out`, prints as it goes, returns the last state."""
    text = read_data(config, data, out)
    attention = describe_attention(config)
    settings = dataclasses.asdict(config) | {"text": fingerprint(text)}
    program = make_program(config)
    # Opened last: a mistake must not cost the user what the run before left.
    with locked(out), Checkpoints(out, settings, restart=restart) as checkpoints:
        print(f"data: {text.description}")
        print(attention)
        compiled = compile_program(config, program, text.train)
        begun = checkpoints.begin(program.start)
        if checkpoints.note:
            print(checkpoints.note)
        with (
            Metrics(out, begun.rows) as metrics,
            progress_bar(config, begun.step, progress) as bar,
            deferred_interrupt() as interrupted,
        ):
            trace = out / PROFILE if profile else None
            record = Record(metrics, checkpoints, bar, trace, interrupted)
            try:
                state, loss = train_loop(config, text, begun.state, compiled, record)
            finally:
                metrics.plot(text.entropy)
        print(f"wrote {out / CSV_NAME} and {out / PLOT_NAME}")
        print_verdict(loss, text.entropy)
        print_sample(config, state, text.validation)
        checkpoints.finish()
    return state


def read_data(config: Config, data: str | None, out: Path) -> Data:
    found = load_files(data, out)
    split = split_files(found.files)
    train, validation = (make_documents(files, config.documents) for files in split)
    available = sum(len(document) + 1 for document in train)
    if available < LEAST_LENGTH:
        raise InputError(
            f"--data: the train split has {available} tokens, less than the shortest row of "
            f"{LEAST_LENGTH}; give more text"
        )
    if config.length > available:
        raise InputError(
            f"--length {config.length} is more than all of the train split's {available} tokens; "
            f"give --length {available} or less, or more text as --data"
        )
    rows = pack(train, config.length), pack(validation, config.length)
    sides = [
        f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.2f} MB in {len(packed)} rows"
        for documents, packed in zip((train, validation), rows, strict=True)
    ]
    source = data or f"standard library of Python {platform.python_version()}"
    description = f"{source}: train {sides[0]}; validation {sides[1]}; {config.length} tokens a row"
    if found.passed_over:
        description += f"; {found.passed_over} files passed over (empty or no UTF-8 text)"
    return Data(*rows, byte_entropy(rows[0].tokens), description)


def fingerprint(text: Data) -> str:
    """Of both sides' tokens, in order."""
    digest = hashlib.blake2b(text.train.tokens.tobytes(), digest_size=8)
    digest.update(text.validation.tokens.tobytes())
    return digest.hexdigest()


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


def compile_program(config: Config, program: Program, rows: PackedRows) -> Compiled:
    """The program for this run's shapes; an InputError if the device's memory cannot hold it."""
    begin = time.perf_counter()
    state = jax.eval_shape(program.start)
    whole, part = (rows.batch([-1] * size) for size in (config.rows_per_step, config.batch))
    train = jax.jit(program.train, donate_argnums=0).lower(state, whole).compile()
    evaluate = jax.jit(program.evaluate).lower(state.params, part).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    seconds = time.perf_counter() - begin
    needed, memory = planned_memory(train), device_memory(jax.devices()[0])
    print(
        f"model: {parameters / 1e6:.2f} M parameters; compiled in {seconds:.1f} s; "
        f"a step takes {needed / 1e9:.2f} of {memory / 1e9:.1f} GB"
    )
    if needed > memory:
        raise InputError(
            f"a step takes {needed / 1e9:.1f} GB, more than the {memory / 1e9:.1f} GB there are; "
            + ", or ".join(remedies(config))
        )
    return Compiled(train, evaluate)


def remedies(config: Config) -> list[str]:
    """What lessens the memory that a step takes, the cheapest first."""
    less = []
    if config.batch > 1:
        less.append(f"lower --batch (it is {config.batch}) and raise --accumulate as much")
    at = REMATS.index(config.remat)
    if at + 1 < len(REMATS):
        less.append(f"set --remat {REMATS[at + 1]} (it is {config.remat})")
    return [*less, f"lower --length (it is {config.length})"]


def train_loop(
    config: Config, text: Data, state: TrainState, compiled: Compiled, record: Record
) -> tuple[TrainState, float]:
    """Runs the steps that the record's metrics do not hold yet.

    A validation loss is measured on `evaluation_rows` rows on the way, and on
    `final_evaluation_rows` after the last step, which is the one returned.
    """
    rows = record.metrics.rows
    begin = time.perf_counter() - (rows[-1].time if rows else 0.0)
    for steps in intervals(config, rows[-1].step if rows else 0):
        with traced(config, steps, record):
            state, interval = train_steps(config, text.train, state, compiled, steps)
        validation_loss = None
        if due(config.evaluate_every, steps, config):
            final = steps.stop == config.steps
            count = config.final_evaluation_rows if final else config.evaluation_rows
            batches = text.validation.evaluation_batches(count, config.batch)
            validation_loss = mean_loss([compiled.evaluate(state.params, b) for b in batches])
        row = Row(
            step=steps.stop,
            tokens=interval.work.tokens + (rows[-1].tokens if rows else 0),
            train_loss=interval.loss,
            validation_loss=validation_loss,
            time=time.perf_counter() - begin,
            **speeds(config, state.params, interval),
        )
        record.metrics.add(row)
        stop = record.interrupted()
        if stop or due(config.checkpoint_every, steps, config):
            record.checkpoints.save(Progress(state, rows))
        show(record.bar, row, len(steps))
        if stop:
            raise KeyboardInterrupt
    loss = rows[-1].validation_loss
    assert loss is not None
    return state, loss


def intervals(config: Config, begin: int) -> Iterator[range]:
    """The steps from one row of the metrics to the next."""
    for first in range(begin, config.steps, config.log_every):
        yield range(first, min(first + config.log_every, config.steps))


def due(every: int, steps: range, config: Config) -> bool:
    """Whether what is done `every` steps, and after the last, is done after these."""
    return steps.stop == config.steps or steps.stop % every < len(steps)


class Interval(NamedTuple):
    """Some steps taken together: real work, wall-clock seconds, nats per byte."""

    work: Work
    seconds: float
    loss: float


def train_steps(
    config: Config, rows: PackedRows, state: TrainState, compiled: Compiled, steps: range
) -> tuple[TrainState, Interval]:
    begin = time.perf_counter()
    work, sums = Work(0, 0), []
    for step in steps:
        batch = rows.train_batch(step, config.rows_per_step, config.seed)
        state, step_sums = compiled.train(state, batch)
        work += work_of(batch)
        sums.append(step_sums)
    # Reading a loss waits for its step; only here, so that the next batch is made meanwhile.
    loss = mean_loss(sums)
    if not math.isfinite(loss):
        raise InputError(
            f"the loss is {loss} by step {steps.stop}; "
            f"lower --learning-rate (it is {config.learning_rate})"
        )
    return state, Interval(work, time.perf_counter() - begin, loss)


def speeds(config: Config, params: Any, interval: Interval) -> dict[str, Any]:
    """The fields of a row that say how fast, and in what memory."""
    device = jax.devices()[0]
    flops_per_second = model_flops(config, params, interval.work) / interval.seconds
    peak = peak_flops(config, device)
    return {
        "tokens_per_second": interval.work.tokens / interval.seconds,
        "model_tflops_per_second": flops_per_second / 1e12,
        "utilisation": None if peak is None else flops_per_second / peak,
        "peak_memory_gb": peak_memory(device) / 1e9,
    }


@contextlib.contextmanager
def traced(config: Config, steps: range, record: Record) -> Iterator[None]:
    """Profiles these steps if the record wants it and they are this start's second interval (its
    only one in a short run): the first is not typical, since memory is still being claimed."""
    done = steps.start - (record.checkpoints.step or 0)
    second = done == config.log_every
    only = done == 0 and steps.stop == config.steps
    if record.trace is None or not (second or only):
        yield
        return
    with jax.profiler.trace(record.trace, create_perfetto_trace=True):
        yield
    record.bar.write(
        f"wrote a trace of steps {steps.start} to {steps.stop} below {record.trace}: open its "
        f"perfetto_trace.json.gz at https://ui.perfetto.dev, or `pip install xprof` and run "
        f"`xprof {record.trace}`"
    )


def mean_loss(sums: Sequence[LossSum]) -> float:
    """Nats per byte over several batches."""
    nats = sum(float(part.nats) for part in sums)
    return nats / max(sum(int(part.bytes) for part in sums), 1)
