"""``python -m flashjax doctor``: check this machine."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flashjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, devices, which implementation each gets and why, a self-test"
    )
    parser.parse_args()
    from flashjax.doctor import report

    return report()


if __name__ == "__main__":
    sys.exit(main())
