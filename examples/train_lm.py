"""Train a byte-level language model on packed documents.

    python examples/train_lm.py --preset tiny
    python examples/train_lm.py --preset tiny --data 'books/**/*.txt' --steps 1000 --out runs/books
    python examples/train_lm.py --preset long-32k --data ~/src --out runs/src

Without `--data` the text is the source of the running Python's standard library. The loss curve,
its numbers and checkpoints are left in `--out`; at the end the model writes a sample. The same
command goes on with an unfinished run, as if nothing had broken it, and starts a finished one anew.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lm.config import (
    DOCUMENTS,
    DTYPES,
    FLAGS,
    IMPLEMENTATIONS,
    PRESETS,
    REMATS,
    InputError,
)

BAD_INPUT = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    result = OneLineParser(prog="train_lm", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = result.add_argument
    add("--preset", choices=tuple(PRESETS), default="tiny", help="the run's sizes; default: tiny")
    add("--data", metavar="PATH|GLOB", help="a file, a directory or a glob of text files")
    add(
        "--documents",
        choices=DOCUMENTS,
        help="what makes a document: each file, or each directory's files joined to one long one",
    )
    add("--out", type=Path, metavar="DIR", help="metrics and checkpoints; default: runs/PRESET")
    add("--restart", action="store_true", help="discard the unfinished run in --out")
    add("--steps", type=int, help="updates of the parameters, which set the schedule's length too")
    add("--batch", type=int, help="rows that go through the model at once")
    add("--accumulate", type=int, help="batches whose gradients are summed to one step")
    add("--length", type=int, help="tokens a row")
    add("--learning-rate", type=float, help="its peak")
    add("--seed", type=int, help="of the parameters and of the order of the rows")
    add("--dtype", choices=DTYPES, help="the layers compute in it; parameters stay float32")
    add(
        "--remat",
        choices=REMATS,
        help="what the backward computes again to save memory: nothing, each block but its "
        "attention, or each block",
    )
    add("--implementation", choices=IMPLEMENTATIONS, help="of attention; default: the best here")
    add("--checkpoint-every", type=int, metavar="STEPS", help="steps from checkpoint to checkpoint")
    add("--profile", action="store_true", help="write a trace of a few steps to OUT/profile")
    add(
        "--no-progress", action="store_true", help="no progress bar, as where stderr is no terminal"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        config = PRESETS[flags.preset].override(**{name: getattr(flags, name) for name in FLAGS})
        # JAX and matplotlib take seconds to import; a bad flag or --help need not wait for them.
        from lm.train import run

        out = flags.out or Path("runs") / config.preset
        run(
            config,
            flags.data,
            out,
            progress=not flags.no_progress,
            restart=flags.restart,
            profile=flags.profile,
        )
    except InputError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(
            "train_lm: interrupted; the same command goes on from the last checkpoint in --out",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def not_of_a_closed_loop(told: "sys.UnraisableHookArgs") -> None:
    """Where a checkpoint cannot be written, Tensorstore's threads find Orbax's event loop closed:
    a traceback for each array, of no use beside the error itself."""
    if str(told.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    sys.unraisablehook = not_of_a_closed_loop
    # Lines come as they are made, also into a file or a pipe, and whatever its encoding.
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    sys.exit(main())
