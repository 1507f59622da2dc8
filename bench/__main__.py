"""The command ``python -m bench``."""

import os
import sys

# Before JAX starts: torch's peers need memory in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from bench.run import main

if __name__ == "__main__":
    sys.exit(main())
