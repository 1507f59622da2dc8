"""What `import flashjax` costs beyond `import jax`: the median of five fresh processes each."""

import statistics
import subprocess
import sys

RUNS = 5
TIMED = """\
import time
begin = time.perf_counter()
import jax
middle = time.perf_counter()
import flashjax
print(middle - begin, time.perf_counter() - middle)
"""


def main() -> None:
    runs = []
    for _ in range(RUNS):
        printed = subprocess.check_output([sys.executable, "-c", TIMED], text=True)
        runs.append([float(seconds) for seconds in printed.split()])
    for_jax, for_flashjax = (statistics.median(seconds) for seconds in zip(*runs, strict=True))
    print(f"import jax                      {for_jax:.3f} s")
    print(f"import flashjax, jax imported   {for_flashjax:.3f} s (wanted: under 0.3 s)")


if __name__ == "__main__":
    main()
