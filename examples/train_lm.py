"""Train a byte-level language model on packed documents.

    python examples/train_lm.py --preset tiny
    python examples/train_lm.py --preset tiny --data 'books/**/*.txt' --steps 1000 --out runs/books

Without `--data` the text is the source of the running Python's standard library. The loss curve
and its numbers are left in `--out`, over what an earlier run left there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lm.config import DTYPES, IMPLEMENTATIONS, PRESETS, InputError

BAD_INPUT = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    result = OneLineParser(prog="train_lm", description=__doc__.splitlines()[0], allow_abbrev=False)
    result.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    result.add_argument("--data", metavar="PATH|GLOB", help="a file, a directory or a glob")
    result.add_argument("--out", type=Path, metavar="DIR", help="default: runs/PRESET")
    result.add_argument("--steps", type=int)
    result.add_argument("--batch", type=int, help="rows a step")
    result.add_argument("--length", type=int, help="tokens a row")
    result.add_argument("--learning-rate", type=float, help="its peak")
    result.add_argument("--seed", type=int, help="of the parameters and of the order of the rows")
    result.add_argument("--dtype", choices=DTYPES, help="the layers compute in it")
    result.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, help="of attention; default: the best here"
    )
    result.add_argument("--no-progress", action="store_true", help="no progress bar")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        config = PRESETS[flags.preset].override(
            steps=flags.steps,
            batch=flags.batch,
            length=flags.length,
            learning_rate=flags.learning_rate,
            seed=flags.seed,
            dtype=flags.dtype,
            implementation=flags.implementation,
        )
        # JAX and matplotlib take seconds to import; a bad flag or --help need not wait for them.
        from lm.train import run

        out = flags.out or Path("runs") / config.preset
        run(config, flags.data, out, progress=not flags.no_progress)
    except InputError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("train_lm: interrupted; what was measured so far is in --out", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    # Lines come as they are made, also into a file or a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
