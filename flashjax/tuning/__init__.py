"""Which of a backend's configurations a call takes: tables of what was measured, and measuring.

`table` reads, looks up and writes; `measure` makes the entries (``python -m flashjax tune``).
"""

from flashjax.tuning.table import DEFAULT, chosen

__all__ = ["DEFAULT", "chosen"]
