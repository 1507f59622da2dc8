"""Checkpoints of a run in OUT/checkpoints, and whether the run that is asked for goes on from one.

A checkpoint holds the whole state and the metrics so far, and batches are a function of the step:
so it is all that an unbroken run would know at that step. Orbax writes each into a directory of
another name and renames it when complete, so a run killed on the way leaves the one before it.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from lm.config import CHECKPOINTS, FLAGS, InputError, flag_name
from lm.metrics import Row, cannot_write, writing
from lm.step import TrainState

SETTINGS = "config.json"
KEPT = 2
# They change when something is written, and nothing of what is computed.
FREE_SETTINGS = ("checkpoint_every",)
FINISHED = "finished"
# What Orbax and Row raise of files that are missing, cut short or not what they should be.
DAMAGE = (OSError, ValueError, KeyError, TypeError)

# Orbax logs a traceback from each of its threads and futures; what went wrong is told once, by us.
for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)


class Progress(NamedTuple):
    """Where a run stands: its state, and a row for each logged step before."""

    state: TrainState
    rows: list[Row]

    @property
    def step(self) -> int:
        return self.rows[-1].step if self.rows else 0


class Checkpoints:
    """The checkpoints in `out` of the run with these settings; a context manager.

    `settings` is all that decides what the run computes. If `out` holds an unfinished run of the
    same settings, `step` says where it stands and `begin` goes on from there, or from an earlier
    checkpoint if that one is damaged; a run that reached `finish`, and with `restart` any, is
    started anew. An unfinished run of other settings is an InputError. `note`, whole after `begin`,
    is the line that tells the user. Nothing is discarded before `begin`.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], *, restart: bool) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        with writing(out):
            # Orbax takes absolute paths only.
            directory = (out / CHECKPOINTS).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(directory, options=options)
        self._out = out
        self._settings = dict(settings)
        self._settings_file = directory / SETTINGS
        self.step: int | None = self._manager.latest_step()
        self.note: str | None = None
        if self.step is not None:
            self._judge(restart)

    def _judge(self, restart: bool) -> None:
        stored = self._read_settings()
        finished = stored.pop(FINISHED, False)
        run = f"{self._out} holds a run that reached step {self.step} of {stored['steps']}"
        if restart or finished:
            self.step, self.note = None, f"{run}: starting anew"
        elif stored.keys() != self._settings.keys():
            raise InputError(
                f"--out {run}, made by another version of this script; give --restart to discard "
                "it, or another --out"
            )
        elif differing := _differing(stored, self._settings):
            raise InputError(
                f"--out {run} with other settings: {differing}; give these to go on with it, "
                "--restart to discard it, or another --out"
            )
        else:
            self.note = f"{run}: going on from there"

    def _read_settings(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._settings_file.read_text())
            if not isinstance(stored, dict) or "steps" not in stored:
                raise ValueError("not a run's settings")
            return stored
        except (OSError, ValueError) as error:
            raise InputError(
                f"--out {self._out}: its {CHECKPOINTS}/{SETTINGS} cannot be read, so its "
                f"checkpoints may be anyone's; remove {self._settings_file.parent} or name another "
                "directory"
            ) from error

    def begin(self, start: Callable[[], TrainState]) -> Progress:
        """The latest whole checkpoint, or what `start` makes, a state of the same structure."""
        if self.step is None:
            with writing(self._out):
                for step in self._manager.all_steps():
                    self._manager.delete(step)
            self._write_settings(finished=False)
            return Progress(jax.jit(start)(), [])
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                progress = self._restored(step, start)
            except DAMAGE as error:
                damaged.append(step)
                cause = _first_line(error)
            else:
                self._pass_over(damaged, step)
                return progress
        raise InputError(
            f"--out {self._out}: no checkpoint in {self._settings_file.parent} can be read "
            f"({cause}); give --restart to discard them, or another --out"
        )

    def _pass_over(self, damaged: list[int], step: int) -> None:
        """The run comes to the damaged steps again; Orbax would not write one that is there."""
        if damaged:
            names = ", ".join(map(str, damaged))
            self.note = f"{self._out}: cannot read the checkpoint of step {names}: going on from "
            self.note += f"step {step}"
            with writing(self._out):
                for later in damaged:
                    self._manager.delete(later)
        self.step = step

    def _restored(self, step: int, start: Callable[[], TrainState]) -> Progress:
        sharding = SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(start),
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(wanted), rows=ocp.args.JsonRestore()
        )
        found = self._manager.restore(step, args=items)
        progress = Progress(found.state, [Row(*values) for values in found.rows])
        if progress.step != step:
            raise ValueError(f"its rows end at step {progress.step}")
        return progress

    def save(self, progress: Progress) -> None:
        """Returns when the state is copied; it is written while the run goes on."""
        # A copy, since the run adds to its list meanwhile.
        rows = [list(row) for row in progress.rows]
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(progress.state), rows=ocp.args.JsonSave(rows)
        )
        with self._saving():
            self._manager.save(progress.step, args=items)

    def finish(self) -> None:
        """Records that the run has told all that it had to tell."""
        with self._saving():
            self._manager.wait_until_finished()
        self._write_settings(finished=True)

    def _write_settings(self, *, finished: bool) -> None:
        text = json.dumps(self._settings | {FINISHED: finished}, indent=2) + "\n"
        with writing(self._out):
            _replace(self._settings_file, text)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Makes a failed write, which Orbax tells at its next call, an InputError."""
        try:
            yield
        # Tensorstore, which writes the arrays, raises ValueError of what the disk refuses.
        except (OSError, ValueError) as error:
            raise cannot_write(self._out, _first_line(error)) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._saving():
            self._manager.close()


def _differing(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The stored values of the settings that are others now, named as the user gives them."""
    names = [
        name
        for name in dict.fromkeys([*settings, *stored])
        if name not in FREE_SETTINGS and stored.get(name) != settings.get(name)
    ]
    # Another preset differs in most of its values; its name says it all.
    shown = ["preset"] if "preset" in names else names
    return ", ".join(_told(name, stored.get(name)) for name in shown)


def _told(name: str, value: Any) -> str:
    if name == "text":
        return "--data of other text"
    return f"{flag_name(name) if name in FLAGS else name} {value}"


def _first_line(error: Exception) -> str:
    """Of an error's text, or only what the operating system says in it."""
    told = re.search(r": ([^:]+) \[os_error_code=", str(error))
    return told[1] if told else (str(error).splitlines() or [type(error).__name__])[0]


def _replace(path: Path, text: str) -> None:
    """Writes the file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
