"""What a run prints: its progress, its verdict, a sample of what the model writes."""

import sys

import numpy as np
from tqdm import tqdm

from lm.config import Config
from lm.entropy import Entropy
from lm.generate import generate
from lm.metrics import Row
from lm.packing import END, PackedRows
from lm.step import TrainState


def print_verdict(loss: float, entropy: Entropy) -> None:
    sign = "<" if loss < entropy.order1 else ">="
    print(f"validation loss: {loss:.3f} nats/byte")
    print(
        f"train split's byte entropy: order 0 {entropy.order0:.3f}, "
        f"order 1 {entropy.order1:.3f} nats/byte"
    )
    print(f"validation loss {loss:.2f} {sign} order-1 entropy {entropy.order1:.2f} nats/byte")


def print_sample(config: Config, state: TrainState, rows: PackedRows) -> None:
    """How the model goes on with the first text that it was not trained on."""
    ends = np.flatnonzero(rows.tokens == END)
    prompt, sample = generate(
        config, state.params, rows.tokens[: min(config.prompt, ends[0])], config.sample
    )
    for name, text in (("prompt, from the validation split", prompt), ("sample", sample)):
        print(f"{name}:")
        print("\n".join(f"  {line}" for line in printable_lines(text)))


def printable_lines(text: bytes) -> list[str]:
    """Each after a bar. What would command a terminal is escaped: a model writes any bytes."""
    whole = text.decode("utf-8", errors="replace").replace("\r\n", "\n").removesuffix("\n")
    if not whole:
        return ["(empty)"]
    return [f"| {''.join(map(_escaped, line))}" for line in whole.split("\n")]


def _escaped(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return character.encode("unicode_escape").decode("ascii")


def progress_bar(config: Config, begin: int, shown: bool) -> tqdm:
    """No bar in a log file, where it could not overwrite itself."""
    return tqdm(
        total=config.steps,
        initial=begin,
        unit="step",
        desc=config.preset,
        disable=not (shown and sys.stderr.isatty()),
        mininterval=0.2,
    )


def show(bar: tqdm, row: Row, steps: int) -> None:
    bar.set_postfix_str(f"loss {row.train_loss:.3f}, {row.speed()}", refresh=False)
    bar.update(steps)
    if row.validation_loss is not None:
        bar.write(
            f"step {row.step}: loss {row.train_loss:.3f}, validation {row.validation_loss:.3f} "
            f"nats/byte, {row.speed()}, {row.time:.0f} s"
        )
