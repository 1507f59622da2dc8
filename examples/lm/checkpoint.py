"""Checkpoints of a run in OUT/checkpoints, and whether the run that is asked for goes on from one.

A checkpoint holds the whole state and the metrics so far, and batches are a function of the step:
so it is all that an unbroken run would know at that step. Orbax writes each into a directory of
another name and renames it when complete, so a run killed on the way leaves the one before it.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from lm.config import FLAGS, InputError, flag_name
from lm.metrics import Row, cannot_write
from lm.step import TrainState

DIRECTORY = "checkpoints"
SETTINGS = "config.json"
KEPT = 2
# They change when something is written, and nothing of what is computed.
FREE_SETTINGS = ("checkpoint_every",)


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
    same settings, `step` says where it stands and `begin` goes on from there; a finished run, and
    with `restart` any, is started anew. An unfinished run of other settings is an InputError.
    `note` is the line that tells the user. Nothing is discarded before `begin`.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], *, restart: bool) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        try:
            # Orbax takes absolute paths only.
            directory = (out / DIRECTORY).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(directory, options=options)
        except OSError as error:
            raise cannot_write(out, error) from error
        self._settings = dict(settings)
        self._settings_file = directory / SETTINGS
        self.step: int | None = self._manager.latest_step()
        self.note: str | None = None
        if self.step is not None:
            self._judge(out, restart)

    def _judge(self, out: Path, restart: bool) -> None:
        stored = self._read_settings(out)
        run = f"{out} holds a run that reached step {self.step} of {stored['steps']}"
        if restart or self.step == stored["steps"]:
            self.step, self.note = None, f"{run}: starting anew"
        elif differing := _differing(stored, self._settings):
            raise InputError(
                f"--out {run} with other settings: {differing}; give these to go on with it, "
                "--restart to discard it, or another --out"
            )
        else:
            self.note = f"{run}: going on from there"

    def _read_settings(self, out: Path) -> dict[str, Any]:
        try:
            return json.loads(self._settings_file.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                f"--out {out}: its {DIRECTORY}/{SETTINGS} cannot be read, so its checkpoints may "
                f"be anyone's; remove {self._settings_file.parent} or name another directory"
            ) from error

    def begin(self, start: Callable[[], TrainState]) -> Progress:
        """The latest checkpoint, or what `start` makes, a state of the same structure."""
        if self.step is None:
            for step in self._manager.all_steps():
                self._manager.delete(step)
            _replace(self._settings_file, json.dumps(self._settings, indent=2) + "\n")
            return Progress(jax.jit(start)(), [])
        sharding = SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(start),
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(wanted), rows=ocp.args.JsonRestore()
        )
        found = self._manager.restore(self.step, args=items)
        return Progress(found.state, [Row(*values) for values in found.rows])

    def save(self, progress: Progress) -> None:
        """Returns when the state is copied; it is written while the run goes on."""
        # A copy, since the run adds to its list meanwhile.
        rows = [list(row) for row in progress.rows]
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(progress.state), rows=ocp.args.JsonSave(rows)
        )
        self._manager.save(progress.step, args=items)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
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


def _replace(path: Path, text: str) -> None:
    """Writes the file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
