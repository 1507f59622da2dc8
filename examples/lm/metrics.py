"""What a run leaves behind: `metrics.csv`, a row per logged step, and `loss.png`."""

import csv
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from lm.config import InputError
from lm.entropy import Entropy

CSV_NAME = "metrics.csv"
PLOT_NAME = "loss.png"


class Row(NamedTuple):
    """Losses in nats per byte. `validation_loss` is None where it was not measured; `train_loss`
    and `tokens_per_second` are over the steps since the row before; `time` is in seconds."""

    step: int
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float
    time: float


class Metrics:
    """Writes rows as they come, so that a run which dies keeps what it had; a context manager."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows: list[Row] = []
        try:
            out.mkdir(parents=True, exist_ok=True)
            # A row is a line: an interrupted run must not lose those still in a buffer.
            self._file = (out / CSV_NAME).open("w", buffering=1, newline="", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"--out {out}: cannot write there ({error.strerror}); name another directory"
            ) from error
        self._writer = csv.writer(self._file)
        self._writer.writerow(Row._fields)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        validation = "" if row.validation_loss is None else f"{row.validation_loss:.5f}"
        self._writer.writerow(
            [
                row.step,
                row.tokens,
                f"{row.train_loss:.5f}",
                validation,
                f"{row.tokens_per_second:.1f}",
                f"{row.time:.2f}",
            ]
        )

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def plot(self, entropy: Entropy) -> None:
        """Draws the rows so far."""
        if self.rows:
            _plot(self.rows, entropy).savefig(self.out / PLOT_NAME, dpi=120)


def _plot(rows: list[Row], entropy: Entropy) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row.tokens for row in rows], [row.train_loss for row in rows], label="train")
    measured = [
        (row.tokens, row.validation_loss) for row in rows if row.validation_loss is not None
    ]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", label="validation")
    for order, (value, style) in enumerate(zip(entropy, (":", "--"), strict=True)):
        axes.axhline(value, color="grey", linestyle=style, label=f"order-{order} byte entropy")
    axes.set(xlabel="tokens", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
