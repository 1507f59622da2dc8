"""The table that grows while the bench runs, and its cells' words."""

from __future__ import annotations

from bench.record import DIRECTIONS, Cell, Record

HEADS = {"forward": "fwd", "backward": "bwd", "deterministic": "det", "both": "fwd+bwd"}
NAME, NUMBER = 17, 11


def header(directions: tuple[str, ...]) -> str:
    columns = [f"{'':{NAME}}"]
    for direction in directions:
        columns += [
            f"{HEADS[direction] + ' ms':>{NUMBER}}",
            f"{'TFLOP/s':>{NUMBER}}",
            f"{'÷ bwd' if direction == 'deterministic' else '÷ best':>9}",
        ]
    columns += [f"{'MiB':>9}", f"{'error':>9}", f"{'dq dk dv':>9}", f"{'compile s':>10}"]
    return "".join(columns)


def line(record: Record, workload: str, contender: str, directions: tuple[str, ...]) -> str:
    """One contender's row; a row without any time is its reason."""
    cells = [record.find(workload, contender, d) for d in directions]
    found = [c for c in cells if c is not None]
    notes = list(dict.fromkeys(c.note for c in found if c.note))
    if not any(c.seconds for c in found):
        return f"{contender:{NAME}}  {notes[0] if notes else 'not run'}"
    columns = [f"{contender:{NAME}}"]
    for cell in cells:
        columns += [
            f"{milliseconds(cell):>{NUMBER}}",
            f"{speed(cell):>{NUMBER}}",
            f"{number(None if cell is None else record.ratio(cell), '.2f'):>9}",
        ]
    columns += [
        f"{number(memory(found), '.0f'):>9}",
        f"{number(worst(found, 'out'), '.1e'):>9}",
        f"{number(worst(found, 'dq', 'dk', 'dv'), '.1e'):>9}",
        f"{number(max(c.compile_seconds or 0.0 for c in found), '.1f'):>10}",
    ]
    return "".join(columns) + "".join(f"  [{note}]" for note in notes)


def number(x: float | None, form: str) -> str:
    return "–" if x is None else f"{x:{form}}"


def milliseconds(cell: Cell | None) -> str:
    return "–" if cell is None or cell.seconds is None else f"{1e3 * cell.seconds:.4g}"


def speed(cell: Cell | None) -> str:
    """TFLOP/s, or GB/s where moving bytes is what takes the time."""
    if cell is None or cell.seconds is None:
        return "–"
    if cell.gbs is not None:
        return f"{cell.gbs:.0f} GB/s"
    assert cell.tflops is not None
    return f"{cell.tflops:.0f}" if cell.tflops >= 10 else f"{cell.tflops:.3g}"


def memory(cells: list[Cell]) -> float | None:
    """MiB of the cell that takes most: of both passes, where they were measured."""
    found = [c.memory for c in cells if c.memory is not None]
    return max(found) / 2**20 if found else None


def worst(cells: list[Cell], *names: str) -> float | None:
    """The largest relative error of these results."""
    found = [c.errors.get(f"{name} relative") for c in cells for name in names]
    return max((x for x in found if x is not None), default=None)


def title(record: Record, workload: str) -> str:
    return f"{workload}: {record.workloads[workload]['title']}"


__all__ = ["DIRECTIONS", "header", "line", "title"]
