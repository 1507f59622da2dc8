"""``python -m flashjax doctor | tune``: check this machine; tune the kernels for it."""

from __future__ import annotations

import argparse
import sys

from flashjax import plan
from flashjax.tuning import command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flashjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, devices, which implementation each gets and why, a self-test"
    )
    tuner = commands.add_parser(
        "tune", help="measure the kernels' tile sizes on this machine's GPU and store the quickest"
    )
    command.add_arguments(tuner)
    options = parser.parse_args()
    if options.command == "doctor":
        from flashjax.doctor import report

        return report()
    device = plan.current_device()
    kernels = {
        name: load
        for name, load in plan.BACKENDS.items()
        if plan.PLATFORMS.get(name) == device.platform
    }
    return command.tune(options, kernels, device)


if __name__ == "__main__":
    sys.exit(main())
