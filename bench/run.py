"""``python -m bench``: this library and its peers on named workloads, side by side in one process.

A table grows on stdout, JSON goes to bench/results/<device>-<group>.json after each workload.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from tqdm import tqdm

from bench import machine, table
from bench.peers import PEERS, Contender, Flashjax, Missing, Program
from bench.programs import Inputs
from bench.record import DIRECTIONS, RESULTS, Cell, Record, mean_ratio
from bench.timing import QUICK, Rule, measured
from bench.truth import Operands, Truth, truth
from flashjax.cases import GROUPS, Workload

T = TypeVar("T")


class DeviceLostError(Exception):
    """A call left the GPU unusable for this process."""


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse(argv)
    rule = QUICK if flags.quick else Rule()
    contenders, missing = present(
        [*map(Flashjax, flags.implementations), *(PEERS[name]() for name in flags.peers)]
    )
    described = machine.describe()
    print(f"{described['device']}, JAX {jax.__version__}, {described['date']}")
    for contender, reason in missing.items():
        print(f"{contender}: missing ({reason})")
    sizes = {"size": 512, "copied": 2**22} if flags.quick else {}
    calibration = machine.calibrate(rule, **sizes)
    print(
        f"{calibration['matmul']} product: {calibration['matmul_tflops']:.4g} TFLOP/s; "
        f"copy: {calibration['copy_gbs']:.4g} GB/s; clocks {calibration['clocks'] or 'unknown'}"
    )
    for group in flags.group:
        chosen = [w for w in GROUPS[group] if not flags.only or w.name in flags.only]
        if not chosen:
            continue
        versions = {c.name: c.version() for c in contenders}
        record = Record(group, described, calibration, versions, missing, {})
        part = "-only" if flags.only and not flags.merge else ""
        path = flags.out / f"{machine.slug(described['device'])}-{group}{part}.json"
        if flags.merge and path.exists():
            record = record.after(Record.load(path), [w.name for w in chosen])
        try:
            run_group(record, chosen, contenders, flags, rule, path)
        except DeviceLostError as error:
            print(f"stopped: {error}; {path} holds what came before", flush=True)
            return 1
        print(f"\nwritten to {path}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [w.name for group in GROUPS.values() for w in group]

    def some_of(known: Iterable[str], every: Iterable[str]) -> Any:
        every = list(every)

        def parsed(text: str) -> list[str]:
            found = {"all": every, "none": []}.get(text, text.split(","))
            for name in found:
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f"{name!r} is unknown; give all, none or some of {', '.join(known)}"
                    )
            return list(found)

        return parsed

    parser.add_argument(
        "--group",
        type=some_of(list(GROUPS), GROUPS),
        help=f"comma-separated: {', '.join(GROUPS)}; by default those of --only, else targets",
    )
    parser.add_argument("--only", type=some_of(names, names), help="names of workloads")
    parser.add_argument(
        "--peers", type=some_of(list(PEERS), PEERS), default=list(PEERS), help=", ".join(PEERS)
    )
    implementations = ["triton", "mosaic", "xla", "reference"]
    parser.add_argument(
        "--implementations",
        type=some_of(implementations, implementations),
        default=["mosaic", "triton"] if on_gpu else ["xla"],
        help="this library's",
    )
    parser.add_argument(
        "--directions",
        type=some_of(DIRECTIONS, DIRECTIONS),
        default=list(DIRECTIONS),
        help=", ".join(DIRECTIONS),
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="short batches, for a try")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="keep the file's other workloads, and write to the group's file with --only too",
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="start no workload after these seconds"
    )
    parser.add_argument(
        "--compile-threads",
        type=int,
        default=6 if on_gpu else 1,
        help="1: no compile time is lengthened by its neighbours",
    )
    parser.add_argument("--no-errors", action="store_true", help="no float64 reference")
    flags = parser.parse_args(argv)
    flags.deadline = time.perf_counter() + flags.limit
    if flags.group is None and flags.only:
        flags.group = [g for g, ws in GROUPS.items() if any(w.name in flags.only for w in ws)]
    elif flags.group is None:
        flags.group = ["targets"] if on_gpu else ["tiny"]
    return flags


def present(wanted: Sequence[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """Those that load, and why the others do not."""
    found: list[Contender] = []
    missing: dict[str, str] = {}
    for contender in wanted:
        try:
            contender.version()
            found.append(contender)
        except Missing as error:
            missing[contender.name] = str(error)
        except Exception as error:
            missing[contender.name] = reason_of(error)
    return found, missing


def title(w: Workload) -> str:
    heads = f"N {w.heads}, K {w.key_heads}" if w.heads != w.key_heads else f"N {w.heads}"
    dims = f"H {w.head_dim}" + (f", Hv {w.value_dim}" if w.value_dim != w.head_dim else "")
    extent = f" {w.extent}" if w.extent else ""
    lengths = f"T = S {w.rows}" if w.rows == w.columns else f"T {w.rows}, S {w.columns}"
    words = [f"B {w.batch}", lengths, heads, dims, w.mask + extent]
    words += [f for f in w.features if f != w.mask]
    return ", ".join([*words, w.dtype])


def run_group(
    record: Record,
    workloads: Sequence[Workload],
    contenders: Sequence[Contender],
    flags: argparse.Namespace,
    rule: Rule,
    path: Path,
) -> None:
    directions = tuple(flags.directions)
    total = len(workloads) * sum(len(taken(c, directions)) for c in contenders)
    with tqdm(total=total, file=sys.stderr, disable=None, unit="cell", leave=False) as bar:

        def show(text: str) -> None:
            bar.write(text, file=sys.stdout)
            sys.stdout.flush()

        show("\n" + table.header(directions))
        for workload in workloads:
            if time.perf_counter() > flags.deadline:
                show(f"{workload.name}: not begun, {flags.limit:.0f} s are over")
                continue
            bar.set_description(workload.name)
            record.workloads[workload.name] = dataclasses.asdict(workload) | {
                "title": title(workload),
                "date": record.machine["date"],
                "matmul_tflops": record.calibration["matmul_tflops"],
            }
            show(table.title(record, workload.name))
            try:
                for cell in run_workload(workload, contenders, flags, rule):
                    record.cells.append(cell)
                    bar.update()
            except DeviceLostError:
                raise
            except Exception as error:
                show(f"stopped here: {reason_of(error)}")
            # Ratios are known only now.
            for contender in contenders:
                show(table.line(record, workload.name, contender.name, directions))
            record.save(path)
            jax.clear_caches()
            gc.collect()
        for contender in contenders:
            passes = ("forward", "backward")
            leads = [record.lead(name, contender.name, passes) for name in record.workloads]
            if contender.ours and (mean := mean_ratio(leads)) is not None:
                show(
                    f"\n{contender.name}: {mean:.3f} × the best peer's speed over forward and "
                    f"backward, geometric mean of {len(leads) - leads.count(None)} workloads"
                )


def run_workload(
    workload: Workload, contenders: Sequence[Contender], flags: argparse.Namespace, rule: Rule
) -> Iterable[Cell]:
    inputs = Inputs.of(workload)
    with Workshop(flags.compile_threads) as shop:
        sampled = None if flags.no_errors else shop.do(functools.partial(sample, inputs))
        shop.compile_ahead(contenders, inputs, flags.directions)
        right = None if sampled is None else sampled()
        for contender in contenders:
            yield from cells_of(contender, inputs, flags.directions, rule, right, shop)
            gc.collect()
            contender.release()


def sample(inputs: Inputs) -> Truth:
    extra = {name: inputs.arguments.get(name) for name in ("bias", "sinks")}
    operands = Operands(inputs.q, inputs.k, inputs.v, inputs.d_out, **extra)
    return truth(inputs.workload, operands)


class Workshop:
    """Compiles a workload's programs side by side, before any is timed; with one thread, each when
    its turn comes."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._made: dict[tuple[str, str], Future[Program]] = {}

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def do(self, work: Callable[[], T]) -> Callable[[], T]:
        """Starts some work; calling what is returned waits for its result."""
        return self._pool.submit(work).result if self._pool is not None else work

    def compile_ahead(
        self, contenders: Sequence[Contender], inputs: Inputs, directions: Sequence[str]
    ) -> None:
        if self._pool is None:
            return
        for contender in contenders:
            if contender.compiles_ahead and contender.unsupported(inputs.workload) is None:
                for direction in taken(contender, directions):
                    made = self._pool.submit(make_program, contender, inputs, direction)
                    self._made[contender.name, direction] = made
        # What is timed must not share the host with a compiler.
        wait(self._made.values())

    def program(self, contender: Contender, inputs: Inputs, direction: str) -> Program:
        made = self._made.pop((contender.name, direction), None)
        return make_program(contender, inputs, direction) if made is None else made.result()


def taken(contender: Contender, directions: Sequence[str]) -> list[str]:
    """Those that it is asked for: no peer is for a deterministic backward."""
    return [d for d in directions if contender.ours or d != "deterministic"]


def make_program(contender: Contender, inputs: Inputs, direction: str) -> Program:
    make = {
        "forward": contender.forward,
        "backward": contender.backward,
        "deterministic": contender.deterministic,
        "both": contender.gradient,
    }[direction]
    return make(inputs)


def cells_of(
    contender: Contender,
    inputs: Inputs,
    directions: Sequence[str],
    rule: Rule,
    right: Truth | None,
    shop: Workshop,
) -> Iterable[Cell]:
    """A cell for each direction; what fails in one is its note, what is refused is in all."""
    workload = inputs.workload
    refused = contender.unsupported(workload)
    for direction in taken(contender, directions):
        empty = Cell(workload.name, contender.name, contender.ours, direction)
        if refused is not None:
            yield dataclasses.replace(empty, note=refused)
            continue
        try:
            program = functools.partial(shop.program, contender, inputs, direction)
            yield measured_cell(empty, workload, program(), rule, right)
        except NotImplementedError as error:
            refused = reason_of(error) if direction == "forward" else None
            yield dataclasses.replace(empty, note=reason_of(error))
        except Exception as error:
            yield dataclasses.replace(empty, note=f"{direction}: {reason_of(error)}")
            check_device(error)
        gc.collect()


def measured_cell(
    empty: Cell, workload: Workload, program: Program, rule: Rule, right: Truth | None
) -> Cell:
    before = machine.peak_memory()
    errors = {} if right is None else errors_of(right, program, empty.direction)
    direction: Any = "backward" if empty.direction == "deterministic" else empty.direction
    timing = measured(program, rule)
    peak = machine.peak_memory()
    gbs = None
    if workload.memory_bound and jax.default_backend() == "gpu":
        gbs = workload.traffic(direction) / timing.seconds / 1e9
    return dataclasses.replace(
        empty,
        seconds=timing.seconds,
        batches=timing.batches,
        unrolled=timing.unrolled,
        tflops=workload.flops(direction) / timing.seconds / 1e12,
        gbs=gbs,
        memory=program.memory,
        temporary=program.temporary,
        peak=peak if peak > before else None,
        compile_seconds=program.compile_seconds,
        errors=errors,
    )


def errors_of(right: Truth, program: Program, direction: str) -> dict[str, float]:
    found = program.result()
    if direction == "forward":
        return right.errors(out=found)
    return right.errors(gradients=found[1] if direction == "both" else found)


def reason_of(error: BaseException) -> str:
    """One short line."""
    text = " ".join(str(error).split())
    inside = re.search(r"cannot do this call: (.*?)(?:\. Pass |$)", text)
    if inside:
        return inside[1][:160]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return f"{type(error).__name__}: {text}"[:160]


def check_device(error: BaseException) -> None:
    """Raises DeviceLostError where no call works any more: a CUDA fault stays with the process."""
    try:
        jax.block_until_ready(jnp.arange(8) + 1)
    except Exception as second:
        raise DeviceLostError(f"the device no longer works: {reason_of(second)}") from error
