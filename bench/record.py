"""What a run found, as values that go to JSON and come back."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FORMAT = "flashjax bench 1"
RESULTS = Path(__file__).resolve().parent / "results"
# "deterministic" is the backward with deterministic_backward=True: this library's alone.
DIRECTIONS = ("forward", "backward", "deterministic", "both")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One contender, workload and direction. `note` says why there is no time, or what to know.

    Speeds are of the visited elements' FLOPs and of the bytes that have to move; `memory` is what
    the call takes beside its arguments, in bytes, `temporary` what of it is no result, `peak` the
    most that JAX had allocated on the device, operands and all, or None where something before it
    in the process had more; `errors` are those of `Truth.errors`.
    """

    workload: str
    contender: str
    ours: bool
    direction: str
    note: str | None = None
    seconds: float | None = None
    batches: tuple[float, ...] = ()
    unrolled: int = 1
    tflops: float | None = None
    gbs: float | None = None
    memory: int | None = None
    temporary: int | None = None
    peak: int | None = None
    compile_seconds: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Record:
    """All cells of a group, and on what they were measured."""

    group: str
    machine: dict[str, Any]
    calibration: dict[str, Any]
    contenders: dict[str, str]
    missing: dict[str, str]
    workloads: dict[str, dict[str, Any]]
    cells: list[Cell] = dataclasses.field(default_factory=list)

    def find(self, workload: str, contender: str, direction: str) -> Cell | None:
        wanted = (workload, contender, direction)
        return next((c for c in self.cells if key_of(c) == wanted), None)

    def best_peer(self, workload: str, direction: str) -> Cell | None:
        """The fastest that is not ours."""
        cells = [c for c in self.cells if (c.workload, c.direction) == (workload, direction)]
        return fastest(c for c in cells if not c.ours)

    def ratio(self, cell: Cell) -> float | None:
        """Its speed in units of the best peer's; of a deterministic backward, in units of the same
        contender's in any order."""
        if cell.direction == "deterministic":
            best = self.find(cell.workload, cell.contender, "backward")
        else:
            best = self.best_peer(cell.workload, cell.direction)
        if best is None or best.seconds is None or cell.seconds is None:
            return None
        return best.seconds / cell.seconds

    def seconds(self, workload: str, contender: str, directions: Sequence[str]) -> float | None:
        """Of these directions one after the other; None where one has no time."""
        cells = [self.find(workload, contender, d) for d in directions]
        times = [c.seconds for c in cells if c is not None and c.seconds is not None]
        return sum(times) if len(times) == len(directions) else None

    def lead(self, workload: str, contender: str, directions: Sequence[str]) -> float | None:
        """Its speed over these directions in units of the peer's that is quickest over them."""
        peers = {c.contender for c in self.cells if not c.ours}
        times = [self.seconds(workload, peer, directions) for peer in peers]
        best = min((t for t in times if t is not None), default=None)
        own = self.seconds(workload, contender, directions)
        return None if best is None or own is None else best / own

    def after(self, before: Record, anew: Sequence[str]) -> Record:
        """This run's record with what an earlier one found of workloads that are not done `anew`.
        Each workload is of one run, whose date and matrix product it holds."""
        kept = {name: w for name, w in before.workloads.items() if name not in anew}
        return dataclasses.replace(
            self,
            contenders=before.contenders | self.contenders,
            missing={n: r for n, r in self.missing.items() if n not in before.contenders},
            workloads=kept,
            cells=[c for c in before.cells if c.workload in kept],
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        path.write_text(text + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        found = json.loads(path.read_text())
        if found.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no result of this bench; wanted format {FORMAT!r}.")
        cells = [Cell(**c | {"batches": tuple(c["batches"])}) for c in found.pop("cells")]
        return cls(cells=cells, **found)


def key_of(cell: Cell) -> tuple[str, str, str]:
    return cell.workload, cell.contender, cell.direction


def mean_ratio(ratios: Iterable[float | None]) -> float | None:
    """Their geometric mean; None where there is none of one."""
    known = [x for x in ratios if x is not None]
    return math.exp(statistics.fmean(map(math.log, known))) if known else None


def fastest(cells: Iterable[Cell]) -> Cell | None:
    timed = [c for c in cells if c.seconds is not None]
    return min(timed, key=lambda c: c.seconds or 0.0, default=None)


def records(folder: Path = RESULTS) -> list[Record]:
    """All whole groups' results in a folder, by name; results of a part (`--only`) are not."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.stem.endswith("-only") or FORMAT not in path.read_text():
            continue
        found.append(Record.load(path))
    return found
