"""``python -m bench.report``: fills the tables of docs/performance.md from bench/results.

What stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` is replaced. NAME is a
group of flashjax/cases.py, `machine`, `training`, or `picture:FILE`, a picture of docs/pictures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench.record import DIRECTIONS, RESULTS, Record, mean_ratio, records
from bench.table import memory, number, speed, worst
from flashjax.cases import Workload

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- bench:(\S+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.DOTALL)
UNMEASURED = "Not measured yet.\n"
PASS = {
    "forward": "forward",
    "backward": "backward",
    "deterministic": "deterministic backward",
    "both": "forward + backward",
}
TRAINING = "train-step.json"
# Groups whose point is memory.
PLANNED = ("memory", "million", "grouped")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    flags = parser.parse_args(argv)
    if not flags.page.is_file():
        parser.error(f"--page: no file {flags.page}")
    text = flags.page.read_text()
    flags.page.write_text(filled(text, flags.results, flags.page.parent))
    print(f"wrote {flags.page}")


def filled(text: str, results: Path, docs: Path) -> str:
    """The page with today's results."""
    # A CPU's results try the bench, they say nothing of the kernels.
    found = [r for r in records(results) if r.machine["platform"] != "cpu"]

    def section(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        return begin + (made(name, found, results, docs) or UNMEASURED) + end

    return MARKED.sub(section, text)


def made(name: str, found: Sequence[Record], results: Path, docs: Path) -> str:
    """One section's Markdown; empty where there is no result."""
    if name.startswith("picture:"):
        picture = docs / "pictures" / name.partition(":")[2]
        what = picture.stem.replace("-", " ")
        return f"![{what}](pictures/{picture.name})\n" if picture.exists() else ""
    if name == "training":
        path = results / TRAINING
        return training_table(json.loads(path.read_text())) if path.exists() else ""
    if name == "machine":
        return "".join(machine_line(r) for r in found)
    return "\n".join(group_tables(r) for r in found if r.group == name)


def machine_line(record: Record) -> str:
    machine, calibration = record.machine, record.calibration
    versions = machine["versions"]
    missing = "".join(f"; {n}: {reason}" for n, reason in record.missing.items())
    clocks = ", ".join(f"{k} {v}" for k, v in calibration["clocks"].items())
    return (
        f"- `{record.group}`: {machine['device']}, driver {machine['driver']}, {machine['date']}, "
        f"commit {machine['commit']}; {calibration['matmul']} product "
        f"{calibration['matmul_tflops']:.0f} TFLOP/s, copy {calibration['copy_gbs']:.0f} GB/s"
        f"{'; ' + clocks if clocks else ''}; "
        f"{', '.join(f'{n} {v}' for n, v in versions.items())}{missing}\n"
    )


def group_tables(record: Record) -> str:
    """A table a pass, workloads down and contenders across, then ratios, memory and errors."""
    names = [n for n in record.contenders if any(c.contender == n for c in record.cells)]
    parts = []
    for direction in DIRECTIONS:
        if any(c.direction == direction and c.seconds for c in record.cells):
            parts.append(speed_table(record, names, direction))
    parts += [ratio_table(record, name) for name in names]
    parts += [
        memory_table(record, names),
        plan_table(record),
        error_table(record, names),
        notes(record),
    ]
    return "\n".join(part for part in parts if part)


def speed_table(record: Record, names: Sequence[str], direction: str) -> str:
    ordered = direction == "deterministic"
    if ordered:
        names = [n for n in names if any(record.find(w, n, direction) for w in record.workloads)]
    rows = []
    for workload in record.workloads:
        best = record.best_peer(workload, direction)
        cells = [workload, record.workloads[workload]["title"]]
        for name in names:
            cell = record.find(workload, name, direction)
            text = speed(cell)
            if cell is not None and cell.seconds is not None:
                if cell.ours and (ratio := record.ratio(cell)) is not None:
                    text += f" ({ratio:.2f}×)"
                if cell is best:
                    text = f"**{text}**"
            cells.append(text)
        rows.append(cells)
    other = "the backward in any order" if ordered else "the best peer (bold)"
    head = f"{PASS[direction].capitalize()}, TFLOP/s; in brackets the ratio to {other}."
    return f"{head}\n\n{markdown(['workload', 'call', *names], rows)}"


def ratio_table(record: Record, name: str) -> str:
    """What the targets ask of one of this library's implementations, with geometric means."""
    passes = ("forward", "backward")
    cells = {(w, d): record.find(w, name, d) for w in record.workloads for d in DIRECTIONS}
    columns: list[list[float | None]] = [
        [None if c is None else record.ratio(c) for (_, d), c in cells.items() if d == direction]
        for direction in (*passes, "deterministic")
    ]
    columns.append([record.lead(w, name, passes) for w in record.workloads])
    ours = any(c is not None and c.ours for c in cells.values())
    # With one pass alone the table of its speeds says it all.
    if not ours or not any(x is not None for column in columns[2:] for x in column):
        return ""
    rows = [
        [workload, *(number(column[i], ".2f") for column in columns)]
        for i, workload in enumerate(record.workloads)
    ]
    rows.append(["geometric mean", *(number(mean_ratio(column), ".3f") for column in columns)])
    head = (
        f"Speed of {name}: of each pass and of both, one after the other, in units of the best "
        "peer's; of the deterministic backward in units of the one in any order."
    )
    labels = ["workload", "forward", "backward", "deterministic ÷ backward", "forward + backward"]
    return f"{head}\n\n{markdown(labels, rows)}"


def memory_table(record: Record, names: Sequence[str]) -> str:
    def of(workload: str, name: str) -> str:
        cells = [record.find(workload, name, d) for d in DIRECTIONS]
        return number(memory([c for c in cells if c is not None]), ",.0f")

    rows = [[w, *(of(w, name) for name in names)] for w in record.workloads]
    return f"Peak memory beside the operands, MiB.\n\n{markdown(['workload', *names], rows)}"


def plan_table(record: Record) -> str:
    """Temporary arrays of both passes beside the size of those that must not be among them."""
    rows = []
    for cell in record.cells:
        if not cell.ours or cell.direction != "both" or cell.temporary is None:
            continue
        w = Workload(**{f.name: record.workloads[cell.workload][f.name] for f in fields(Workload)})
        size = jnp.dtype(w.dtype).itemsize
        sizes = (
            cell.temporary,
            4 * math.prod(w.query_shape),
            size * w.batch * w.heads * w.columns * (w.head_dim + w.value_dim),
            size * w.batch * w.heads * w.rows * w.columns,
        )
        shown = [number(x / 2**20, ",.0f") for x in sizes]
        peak = None if cell.peak is None else cell.peak / 2**30
        rows.append([cell.workload, cell.contender, *shown, number(peak, ".1f")])
    if record.group not in PLANNED or not rows:
        return ""
    head = (
        "Forward + backward: the temporary arrays that XLA plans, beside what sums of dQ in "
        "float32 take, and what K and V of N heads and scores of T × S would take, MiB; the most "
        "that was allocated on the device, operands included, GiB."
    )
    labels = ["workload", "", "temporary", "dQ", "K, V of N heads", "T × S", "peak GiB"]
    return f"{head}\n\n{markdown(labels, rows)}"


def error_table(record: Record, names: Sequence[str]) -> str:
    def of(workload: str, name: str) -> str:
        cells = [record.find(workload, name, d) for d in DIRECTIONS]
        found = [c for c in cells if c is not None]
        pair = worst(found, "out"), worst(found, "dq", "dk", "dv")
        return " / ".join(number(x, ".1e") for x in pair)

    if not any(c.errors for c in record.cells):
        return ""
    rows = [[w, *(of(w, name) for name in names)] for w in record.workloads]
    head = (
        "Largest error against float64 on sampled rows and columns, as a share of the largest "
        "right value: output / gradients."
    )
    return f"{head}\n\n{markdown(['workload', *names], rows)}"


def notes(record: Record) -> str:
    """Why cells are empty."""
    lines = dict.fromkeys(
        f"- {c.contender}, {c.workload}: {c.note}" for c in record.cells if c.note
    )
    return "Not done:\n\n" + "\n".join(lines) + "\n" if lines else ""


def training_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        numbers = [
            "–" if row.get(name) is None else f"{row[name]:{form}}"
            for name, form in (
                ("tokens_per_second", ",.0f"),
                ("tflops", ".0f"),
                ("memory_gib", ".1f"),
                ("loss", ".3f"),
            )
        ]
        rows.append([row["preset"], row["text"], row["attention"], *numbers, row.get("note") or ""])
    names = ["preset", "rows", "attention", "tokens/s", "TFLOP/s", "peak GiB", "loss", "note"]
    machine = found["machine"]
    return f"{machine['device']}, {machine['date']}.\n\n{markdown(names, rows)}"


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
