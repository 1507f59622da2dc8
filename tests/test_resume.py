"""Checkpoints: a broken run goes on to the bit, and another run's are never taken for its own."""

import csv
import dataclasses
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from lm.checkpoint import Checkpoints, Progress
from lm.config import PRESETS, InputError
from lm.metrics import Row
from lm.packing import Batch, PackedRows
from lm.step import TrainState
from tests.test_train_lm import SMALL as SHORT
from train_lm import main

SMALL = dataclasses.replace(
    SHORT,
    steps=20,
    log_every=2,
    evaluate_every=8,
    checkpoint_every=4,
    final_evaluation_rows=2,
    implementation="reference",  # compiles fastest
)
# A run that dies by its own hand, in a process of its own, when it asks for the batch of a step.
KILLED = """
import os, signal, sys
from lm.config import PRESETS
from lm.packing import PackedRows
from tests.test_resume import SMALL
from train_lm import main

whole = PackedRows.train_batch

def train_batch(self, step, size, seed):
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, step, size, seed)

PackedRows.train_batch = train_batch
PRESETS["tiny"] = SMALL
main(sys.argv[2:])
"""


@pytest.fixture(scope="module", autouse=True)
def small_and_quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small runs that share what they compile in this process: it is nearly all of their time."""
    options = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: jax.config.values[name] for name in options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", SMALL)
        # tests/test_train_lm.py has the sample; here it would be compiled again for each run.
        patch.setattr("lm.train.print_sample", lambda *_: print("prompt, from no model"))
        _configure(options)
        yield
    _configure(before)


def _configure(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX looks at its cache's directory once.
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background jobs inherit an ignored SIGINT; runs here are interrupted by one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"line {i} of a small text\n" * (i + 1))
    return folder


def flags_for(texts: Path, out: Path) -> list[str]:
    return ["--data", str(texts), "--out", str(out), "--no-progress"]


class Run:
    """A run to its end, or to the step at which it is interrupted: its batches and its metrics."""

    def __init__(
        self,
        texts: Path,
        out: Path,
        *flags: str,
        stop: int | None = None,
        signalled: int | None = None,
    ) -> None:
        self.batches: dict[int, Batch] = {}
        whole = PackedRows.train_batch

        def train_batch(rows: PackedRows, step: int, size: int, seed: int) -> Batch:
            if step == stop:
                raise KeyboardInterrupt
            if step == signalled:
                signal.raise_signal(signal.SIGINT)
            self.batches[step] = whole(rows, step, size, seed)
            return self.batches[step]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedRows, "train_batch", train_batch)
            self.status = main([*flags_for(texts, out), *flags])
        with (out / "metrics.csv").open(newline="") as file:
            self.losses = [
                (row["step"], row["tokens"], row["train_loss"], row["validation_loss"])
                for row in csv.DictReader(file)
            ]


@pytest.fixture(scope="module")
def unbroken(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(texts, tmp_path_factory.mktemp("unbroken"))


def test_a_killed_run_goes_on_to_the_bit(
    unbroken: Run, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The checkpoint of step 4 is complete when that of step 8 is begun; that one may be half done.
    step = random.SystemRandom().randrange(8, SMALL.steps)
    paths = [str(Path(__file__).parents[1] / part) for part in ("", "examples")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(step), *flags_for(texts, tmp_path)],
        env=environment,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    capfd.readouterr()
    resumed = Run(texts, tmp_path)
    begin = min(resumed.batches)
    told = f"{tmp_path} holds a run that reached step {begin} of 20: going on from there\n"
    assert told in capfd.readouterr().out
    assert 4 <= begin <= step
    assert resumed.losses == unbroken.losses, f"killed at step {step}"
    for later in range(begin, SMALL.steps):
        jax.tree.map(np.testing.assert_array_equal, resumed.batches[later], unbroken.batches[later])


def test_restart_discards_a_run_and_the_seed_alone_decides_the_next(
    unbroken: Run, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Run(texts, tmp_path, stop=7)
    assert broken.status == 130
    assert broken.losses == unbroken.losses[:3]
    capsys.readouterr()
    assert main([*flags_for(texts, tmp_path), "--seed", "1", "--steps", "4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"train_lm: --out {tmp_path} holds a run that reached step 4 of 20 with other settings: "
        "--steps 20, --seed 0; give these to go on with it, --restart to discard it, or another "
        "--out\n"
    )
    other = Run(texts, tmp_path, "--seed", "1", "--steps", "4", "--restart")
    assert "reached step 4 of 20: starting anew\n" in capsys.readouterr().out
    assert [loss[0] for loss in other.losses] == ["2", "4"]
    assert other.losses[0][2] != unbroken.losses[0][2]
    again = Run(texts, tmp_path, "--seed", "1", "--steps", "4")
    assert "reached step 4 of 4: starting anew\n" in capsys.readouterr().out
    assert again.losses == other.losses


def test_an_interrupted_run_keeps_the_steps_to_the_next_row(
    unbroken: Run, texts: Path, tmp_path: Path
) -> None:
    broken = Run(texts, tmp_path, signalled=8)
    assert (broken.status, max(broken.batches)) == (130, 9)
    assert (tmp_path / "checkpoints" / "10").is_dir()
    resumed = Run(texts, tmp_path)
    assert min(resumed.batches) == 10
    assert resumed.losses == unbroken.losses


def test_a_run_that_ended_before_its_sample_goes_on_to_it(
    unbroken: Run, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.train.print_sample", interrupted)
        assert Run(texts, tmp_path).status == 130
    verdict = re.findall(r"^validation loss .*", capsys.readouterr().out, re.MULTILINE)[-1]
    resumed = Run(texts, tmp_path)
    printed = capsys.readouterr().out
    assert "reached step 20 of 20: going on from there\n" in printed
    assert f"{verdict}\nprompt, from" in printed
    assert resumed.batches == {}
    assert resumed.losses == unbroken.losses
    with Checkpoints(tmp_path, {}, restart=False) as checkpoints:
        assert (
            checkpoints.note == f"{tmp_path} holds a run that reached step 20 of 20: starting anew"
        )


SETTINGS = {"preset": "tiny", "steps": 20, "layers": 1, "checkpoint_every": 4, "text": "0123"}


def start() -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), {"w": jnp.arange(4.0)}, (jnp.ones((2, 2)),))


def row_of(step: int) -> Row:
    return Row(step, 10 * step, 0.1 + 0.2, None, 1.0, 2.0, None, 3.0, step / 3)


@pytest.fixture
def checkpoints_of_8(tmp_path: Path) -> Path:
    """An `out` with the checkpoints of a run that reached step 8, its state counted up."""
    count = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with Checkpoints(tmp_path, SETTINGS, restart=False) as checkpoints:
        assert checkpoints.step is None
        state, rows = checkpoints.begin(start)
        for step in range(1, 9):
            # The buffers of a state that is being written are given away to the next.
            state = count(state)
            rows.append(row_of(step))
            if step % 2 == 0:
                checkpoints.save(Progress(state, rows))
    return tmp_path


def test_a_checkpoint_holds_its_own_step_and_the_last_two_are_kept(checkpoints_of_8: Path) -> None:
    with Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints:
        assert checkpoints.step == 8
        progress = checkpoints.begin(start)
    wanted = jax.tree.map(lambda x: x + 8, start())
    chex.assert_trees_all_equal(progress.state, wanted, strict=True)
    assert progress.rows == [row_of(step) for step in range(1, 9)]
    kept = {path.name for path in (checkpoints_of_8 / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"6", "8"}


def test_a_half_written_checkpoint_is_passed_over_and_written_again(checkpoints_of_8: Path) -> None:
    whole = checkpoints_of_8 / "checkpoints" / "8"
    half = whole.rename(whole.with_name("8.orbax-checkpoint-tmp"))
    next(half.rglob("manifest.ocdbt")).unlink()
    with Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints:
        assert checkpoints.step == 6
        progress = checkpoints.begin(start)
        rows = [*progress.rows, row_of(7), row_of(8)]
        checkpoints.save(Progress(progress.state, rows))
    with Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints:
        assert checkpoints.step == 8
        assert checkpoints.begin(start).rows == rows


# Tensorstore's threads drop futures of errors that were told already.
told_already = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@told_already
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: shutil.rmtree(path / "state"),
        lambda path: shutil.rmtree(path / "rows"),
        lambda path: (path / "rows" / "metadata").write_text("[]"),
        lambda path: cut(path / "rows" / "metadata"),
        lambda path: cut(path / "state" / "manifest.ocdbt"),
        lambda path: cut(next((path / "state" / "d").iterdir())),
    ],
    ids=["no state", "no rows", "empty rows", "cut rows", "cut manifest", "cut state"],
)
def test_a_damaged_checkpoint_costs_its_own_steps_alone(
    damage: Callable[[Path], Any], checkpoints_of_8: Path
) -> None:
    path = checkpoints_of_8 / "checkpoints"
    damage(path / "8")
    with Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints:
        progress = checkpoints.begin(start)
        assert (progress.step, checkpoints.step) == (6, 6)
        note = "cannot read the checkpoint of step 8: going on from step 6"
        assert checkpoints.note == f"{checkpoints_of_8}: {note}"
        checkpoints.save(Progress(progress.state, [*progress.rows, row_of(8)]))
    for step in ("6", "8"):
        damage(path / step)
    with (
        Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints,
        pytest.raises(InputError, match=f"no checkpoint in {path} can be read .*--restart"),
    ):
        checkpoints.begin(start)
    assert {entry.name for entry in path.iterdir() if entry.is_dir()} == {"6", "8"}


@told_already
def test_a_write_that_fails_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = np.random.default_rng(0).random(100_000)
    state = TrainState(jnp.zeros((), jnp.int32), array, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, SETTINGS, restart=False) as checkpoints:
        checkpoints.begin(start)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            checkpoints.save(Progress(state, [row_of(1)]))
            with pytest.raises(InputError) as raised:
                checkpoints.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"--out {tmp_path}: cannot write there (File too large); mend that or name another --out"
    assert str(raised.value) == said
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 30}, ": --steps 20; give these"),
        ({"layers": 2}, ": layers 1; give these"),
        ({"text": "4567"}, ": --data of other text; give these"),
        ({"preset": "long", "layers": 9}, ": --preset tiny; give these"),
        ({"new": 1}, "made by another version of this script; give --restart"),
        ({"checkpoint_every": 5}, None),
    ],
    ids=str,
)
def test_only_a_run_of_the_same_settings_goes_on(
    changed: dict[str, Any], said: str | None, checkpoints_of_8: Path
) -> None:
    def open_it() -> int | None:
        with Checkpoints(checkpoints_of_8, SETTINGS | changed, restart=False) as checkpoints:
            return checkpoints.step

    if said is None:
        assert open_it() == 8
    else:
        with pytest.raises(InputError, match=said):
            open_it()
        with Checkpoints(checkpoints_of_8, SETTINGS, restart=False) as checkpoints:
            assert checkpoints.step == 8


@pytest.mark.parametrize("text", [None, "{", "{}", "[]"])
def test_checkpoints_of_unknown_settings_are_not_touched(
    text: str | None, checkpoints_of_8: Path
) -> None:
    path = checkpoints_of_8 / "checkpoints" / "config.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for restart in (False, True):
        with pytest.raises(InputError, match=r"config\.json cannot be read"):
            Checkpoints(checkpoints_of_8, SETTINGS, restart=restart)
    assert (checkpoints_of_8 / "checkpoints" / "8").is_dir()
