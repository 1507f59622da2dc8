"""What a run leaves behind: `metrics.csv`, a row per logged step, and `loss.png`."""

import contextlib
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from lm.config import CSV_NAME, PLOT_NAME, InputError
from lm.entropy import Entropy


class Row(NamedTuple):
    """Losses in nats per byte; what is None was not measured. `train_loss` and the speeds are over
    the steps since the row before. `utilisation` is the share of the device's peak FLOP/s, where
    that is known. Memory is the most in use so far, in 10⁹ bytes; `time` is in seconds, without the
    time between a break and its resumption."""

    step: int
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float
    model_tflops_per_second: float
    utilisation: float | None
    peak_memory_gb: float
    time: float

    def speed(self) -> str:
        if self.utilisation is not None:
            share = f"{self.utilisation:.1%} of peak FLOP/s"
        elif self.model_tflops_per_second >= 1:
            share = f"{self.model_tflops_per_second:.1f} TFLOP/s"
        else:
            share = f"{self.model_tflops_per_second * 1e3:.1f} GFLOP/s"
        return f"{self.tokens_per_second:.0f} tokens/s, {share}, {self.peak_memory_gb:.2f} GB"


class Metrics:
    """Writes rows as they come, so that a run which dies keeps what it had; a context manager.

    The file begins with `rows`, those of the run that this one goes on from.
    """

    def __init__(self, out: Path, rows: Sequence[Row] = ()) -> None:
        self.out = out
        self.rows: list[Row] = []
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            # A row is a line: an interrupted run must not lose those still in a buffer.
            self._file = (out / CSV_NAME).open("w", buffering=1, newline="", encoding="utf-8")
            self._writer = csv.writer(self._file)
            self._writer.writerow(Row._fields)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        rounded = row._replace(
            tokens_per_second=round(row.tokens_per_second, 1),
            model_tflops_per_second=float(f"{row.model_tflops_per_second:.4g}"),
            utilisation=None if row.utilisation is None else round(row.utilisation, 4),
            peak_memory_gb=round(row.peak_memory_gb, 3),
            time=round(row.time, 2),
        )
        # Losses stay whole: a resumed run's are those of an unbroken one to the bit.
        with writing(self.out):
            self._writer.writerow(rounded)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        with writing(self.out):
            self._file.close()

    def plot(self, entropy: Entropy) -> None:
        """Draws the rows so far."""
        if self.rows:
            with writing(self.out):
                _plot(self.rows, entropy).savefig(self.out / PLOT_NAME, dpi=120)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Makes a failure to write in `out` an InputError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(out, error.strerror or str(error)) from error


def cannot_write(out: Path, cause: str) -> InputError:
    return InputError(f"--out {out}: cannot write there ({cause}); mend that or name another --out")


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
