"""``python -m bench.plots``: draws what bench/results holds of GPUs into docs/pictures."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from bench.record import RESULTS, Cell, Record, records

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SPEED, RATIOS, MEMORY = "speed.png", "ratios.png", "memory.png"
# One colour a contender, in every picture; ours is drawn thicker.
COLOURS = {
    "flashjax mosaic": "#c0392b",
    "flashjax triton": "#e67e22",
    "flashjax xla": "#f1c40f",
    "jax.nn xla": "#7f8c8d",
    "jax.nn cudnn": "#27ae60",
    "tokamax mosaic": "#2980b9",
    "tokamax triton": "#85c1e9",
    "FlashAttention-3": "#8e44ad",
    "FlashAttention-4": "#4a235a",
    "torch sdpa": "#16a085",
}
PASSES = {"forward": "forward", "backward": "backward"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PICTURES)
    flags = parser.parse_args(argv)
    drawn = draw(records(flags.results), flags.out)
    print("\n".join(f"wrote {path}" for path in drawn) or f"no results in {flags.results}")


def draw(found: Sequence[Record], out: Path) -> list[Path]:
    """Each picture for which there are results."""
    out.mkdir(parents=True, exist_ok=True)
    speed = [r for r in found if r.group == "lengths"] or [r for r in found if r.group == "targets"]
    ratio = [r for r in found if r.group == "targets"]
    memory = [r for r in found if r.group in ("memory", "million")]
    drawn = []
    for name, make, chosen in (
        (SPEED, speed_by_length, speed),
        (RATIOS, ratio_bars, ratio),
        (MEMORY, memory_by_length, memory),
    ):
        figure = make(chosen) if chosen else None
        if figure is not None:
            figure.savefig(out / name, dpi=90, metadata={"Software": None})
            plt.close(figure)
            drawn.append(out / name)
    return drawn


def contenders_of(found: Iterable[Record]) -> list[str]:
    """All that have a time, in the order of COLOURS, unknown ones last."""
    names = {c.contender for r in found for c in r.cells if c.seconds is not None}
    known = list(COLOURS)
    return sorted(names, key=lambda n: (known.index(n) if n in known else len(known), n))


def style(contender: str) -> dict[str, Any]:
    ours = contender.startswith("flashjax")
    return {"color": COLOURS.get(contender), "linewidth": 2.5 if ours else 1.2}


def where(found: Sequence[Record]) -> str:
    machine, calibration = found[0].machine, found[0].calibration
    return (
        f"{machine['device']}, {machine['date'][:10]}; bf16 product "
        f"{calibration['matmul_tflops']:.0f} TFLOP/s"
    )


def speed_by_length(found: Sequence[Record]) -> Any:
    """TFLOP/s against T = S: a row of panels a pass, a column a head dim; causal workloads of as
    many key heads as query heads."""
    shapes = {n: w for r in found for n, w in r.workloads.items() if plain(w)}
    dims = sorted({w["head_dim"] for w in shapes.values()})
    if not dims:
        return None
    figure, axes = plt.subplots(
        2, len(dims), figsize=(3.6 * len(dims) + 1.2, 6), squeeze=False, layout="constrained"
    )
    for row, direction in enumerate(PASSES):
        for column, dim in enumerate(dims):
            axis = axes[row][column]
            for contender in contenders_of(found):
                cells = timed(found, contender, direction)
                points = sorted(
                    (shapes[c.workload]["rows"], c.tflops)
                    for c in cells
                    if c.workload in shapes and shapes[c.workload]["head_dim"] == dim
                )
                if points:
                    x, y = zip(*points, strict=True)
                    axis.plot(x, y, marker="o", markersize=3, label=contender, **style(contender))
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{direction}, H {dim}", fontsize=9)
            axis.grid(alpha=0.3)
            axis.set_xlabel("T = S")
        axes[row][0].set_ylabel("TFLOP/s")
    legend(figure, axes, f"causal, bf16; {where(found)}")
    return figure


def plain(workload: dict[str, Any]) -> bool:
    return (
        workload["mask"] == "causal"
        and workload["heads"] == workload["key_heads"]
        and workload["dtype"] == "bfloat16"
    )


def timed(found: Iterable[Record], contender: str, direction: str) -> list[Cell]:
    """One a workload, of the newest record that has it."""
    cells = {
        c.workload: c
        for r in sorted(found, key=date)
        for c in r.cells
        if (c.contender, c.direction) == (contender, direction) and c.seconds is not None
    }
    return list(cells.values())


def ratio_bars(found: Sequence[Record]) -> Any:
    """Every contender's speed in units of the best peer's, a group of bars a workload.

    Each pass is of the newest record that has it beside a peer.
    """
    newest = {d: r for r in sorted(found, key=date) for d in PASSES if has_peers(r, d)}
    if not newest:
        return None
    contenders = contenders_of(newest.values())
    most = max(len(r.workloads) for r in newest.values())
    figure, axes = plt.subplots(
        len(newest), 1, figsize=(1.1 * most + 2.5, 6), squeeze=False, layout="constrained"
    )
    width = 0.85 / len(contenders)
    passes = [(d, newest[d]) for d in PASSES if d in newest]
    for (axis,), (direction, record) in zip(axes, passes, strict=True):
        names = list(record.workloads)
        for place, contender in enumerate(contenders):
            leads = [record.lead(name, contender, [direction]) for name in names]
            x = [i + (place - (len(contenders) - 1) / 2) * width for i in range(len(names))]
            heights = [lead or 0.0 for lead in leads]
            axis.bar(x, heights, width, label=contender, color=COLOURS.get(contender))
            cells = [record.find(name, contender, "deterministic") for name in names]
            shares = [0.0 if c is None else record.ratio(c) or 0.0 for c in cells]
            if direction == "backward" and any(shares):
                heights = [h * share for h, share in zip(heights, shares, strict=True)]
                label, drawn = f"{contender}, deterministic", {"fill": False, "hatch": "////"}
                axis.bar(x, heights, width, label=label, linewidth=0.5, **drawn)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=20, ha="right")
        axis.set_title(f"{direction}: speed ÷ best peer's; {where([record])}", fontsize=9)
        axis.grid(alpha=0.3, axis="y")
    legend(figure, axes, "")
    return figure


def date(record: Record) -> str:
    found: str = record.machine["date"]
    return found


def has_peers(record: Record, direction: str) -> bool:
    return any(record.best_peer(name, direction) for name in record.workloads)


def memory_by_length(found: Sequence[Record]) -> Any:
    """What forward and backward take beside q, k, v and dO, against T = S."""
    rows = {n: w["rows"] for r in found for n, w in r.workloads.items()}
    figure, axes = plt.subplots(1, 1, figsize=(6, 4.5), squeeze=False, layout="constrained")
    axis = axes[0][0]
    for contender in contenders_of(found):
        cells = [c for c in timed(found, contender, "both") if c.memory]
        points = sorted((rows[c.workload], (c.memory or 0) / 2**30) for c in cells)
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, marker="o", markersize=3, label=contender, **style(contender))
    if not axis.lines:
        plt.close(figure)
        return None
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("T = S")
    axis.set_ylabel("GiB")
    axis.grid(alpha=0.3)
    legend(figure, axes, f"forward + backward, N 8, H 128, causal\n{where(found)}")
    return figure


def legend(figure: Any, axes: Any, title: str) -> None:
    """One for all panels."""
    seen: dict[str, Any] = {}
    for axis in (a for row in axes for a in row):
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    figure.legend(list(seen.values()), list(seen), loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=9)


if __name__ == "__main__":
    main()
