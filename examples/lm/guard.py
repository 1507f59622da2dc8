"""What a run guards against: another run in the same directory, and an interrupt midway."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from lm.config import LOCK, InputError
from lm.metrics import writing

try:
    import fcntl
except ImportError:  # Windows has other locks.
    fcntl = None  # type: ignore[assignment]

NOTICE = b"\ninterrupted: ends with a checkpoint at the next logged step; again to end at once\n"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds `out` for this run alone; the operating system lets go when the process dies."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("wb")
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"--out {out}: another run is at work there; wait for its end or name another --out"
            ) from error
        except OSError:
            pass  # Some network file systems know no locks.
        yield


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Says whether SIGINT came, which does nothing else the first time; the second ends at once.

    Between two rows the state's buffers are given away from step to step, and a checkpoint there
    would shift the later rows: so an interrupt waits for the row's end.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # print() may be what was interrupted, and cannot be entered twice.
        os.write(2, NOTICE)

    main = threading.current_thread() is threading.main_thread()
    # Whoever else handles or ignores SIGINT knows why.
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
