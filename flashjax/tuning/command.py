"""``python -m flashjax tune``: measures on this machine's GPU, prints, and stores the winners."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashjax import cases
from flashjax.backend import Backend, Device
from flashjax.cases import Workload
from flashjax.tuning.measure import Measurement, Timer, entries, measure, timer
from flashjax.tuning.table import Entries, merged, read_entries, users_path, write_entries

# The other groups measure what is large, or are for tests.
GROUPS = ("targets", "variants", "precision", "lengths")
QUICK_GROUPS = ("targets",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group",
        nargs="+",
        choices=cases.GROUPS,
        metavar="GROUP",
        help=f"workloads of flashjax/cases.py (default: {' '.join(GROUPS)})",
    )
    parser.add_argument(
        "--only", nargs="+", choices=cases.BY_NAME, metavar="NAME", help="these workloads alone"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"shorter batches; without --group, {' '.join(QUICK_GROUPS)} alone",
    )
    parser.add_argument(
        "--write", type=Path, metavar="PATH", help="store there, not in this user's cache"
    )


def workloads(options: argparse.Namespace) -> list[Workload]:
    if options.only:
        return [cases.BY_NAME[name] for name in dict.fromkeys(options.only)]
    groups = options.group or (QUICK_GROUPS if options.quick else GROUPS)
    # The same call has another name in another group.
    once: dict[Workload, Workload] = {}
    for workload in (w for name in groups for w in cases.GROUPS[name]):
        once.setdefault(dataclasses.replace(workload, name=""), workload)
    return list(once.values())


def tune(
    options: argparse.Namespace,
    backends: Mapping[str, Callable[[], Backend]],
    device: Device,
    timed: Timer | None = None,
) -> int:
    """Returns the exit code: 1 where there is nothing to tune or nowhere to store it."""
    if not backends:
        print(
            f"flashjax tune: this device, {device}, has no kernel to tune. Run it on a machine "
            "with an NVIDIA GPU, where `python -m flashjax doctor` names it."
        )
        return 1
    if options.only and options.group:
        print("flashjax tune: --only names workloads and --group groups; give one of them.")
        return 1
    path = options.write or users_path(device.kind)
    if path is None:
        print("flashjax tune: this user has no home folder. Set XDG_CACHE_HOME, or give --write.")
        return 1
    if path.is_dir():
        print(f"flashjax tune: --write {path} is a folder; give the path of a JSON file.")
        return 1
    timed = timed or (timer(batch_seconds=0.02) if options.quick else timer())
    old, found = read_entries(path, device.kind), list[Measurement]()
    begin = time.perf_counter()
    print(f"flashjax tune: {device}")
    todo = [(name, workload) for name in backends for workload in workloads(options)]
    with _progress(len(todo)) as advance:
        for name, workload in todo:
            advance(f"{name} {workload.name}")
            try:
                found += measure(workload, backends[name](), device, timed)
            except NotImplementedError as reason:
                print(f"{workload.name}: not for {name}: {reason}")
            # Stored as it goes: an interrupted run keeps what it has measured.
            write_entries(path, device.kind, merged(old, entries(found)))
    report(found)
    minutes = (time.perf_counter() - begin) / 60
    print(f"\n{len(found)} passes measured in {minutes:.1f} minutes; stored in {path}")
    return 0


def report(found: Sequence[Measurement]) -> None:
    """A row a pass: the first configuration offered, the one that the table holds now, the gain."""
    made = entries(found)
    header = ("workload", "pass", "before", "ms", "after", "ms", "gain")
    rows = [(one.workload, str(one.part), *_compared(one, made)) for one in found]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print()
    for row in [header, tuple("-" * width for width in widths), *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    for one in found:
        for failure in one.failures:
            print(f"{one.workload}, {one.part}, failed: {failure}")


def _compared(one: Measurement, made: Entries) -> tuple[str, ...]:
    configs, seconds = one.part.configs, one.seconds
    before = (_sizes(one, 0), f"{1e3 * seconds[0]:.3f}")
    entry = made.get(one.kind, {}).get(one.size)
    if entry is None:
        return (*before, "none ran", "", "")
    sizes = entry[one.part.name] if one.part.name else entry
    after = next(i for i, c in enumerate(configs) if one.part.sizes(c).items() <= sizes.items())
    gain = seconds[0] / seconds[after]
    return (*before, _sizes(one, after), f"{1e3 * seconds[after]:.3f}", f"{gain:.2f} ×")


def _sizes(one: Measurement, index: int) -> str:
    # A whole configuration names its other passes after a semicolon.
    return str(one.part.part(one.part.configs[index])).partition(";")[0]


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar where tqdm is installed, else a line a workload; on stderr."""
    try:
        tqdm: Any = importlib.import_module("tqdm")
    except ImportError:
        count = iter(range(1, total + 1))
        yield lambda name: print(f"{next(count)}/{total} {name}", file=sys.stderr, flush=True)
        return
    with tqdm.tqdm(total=total, unit="workload", file=sys.stderr) as bar:
        begun = False

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(begun)
            begun = True
            bar.set_description(name)

        yield advance
        bar.update(1)
