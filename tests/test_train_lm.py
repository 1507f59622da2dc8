"""The training script: a short run end to end, its one-line errors, and the model it trains."""

import csv
import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from lm.checkpoint import Checkpoints, Progress
from lm.config import PRESETS, REMATS, Config, InputError
from lm.cost import (
    Work,
    device_memory,
    matrix_parameters,
    model_flops,
    peak_flops,
    peak_memory,
    work_of,
)
from lm.guard import locked
from lm.metrics import Row
from lm.model import LanguageModel, graph_of
from lm.packing import VOCABULARY, Batch, pack
from lm.report import printable_lines, progress_bar
from lm.step import LossSum, TrainState, loss_sum, make_program, summed_gradients
from lm.train import Compiled, train_steps
from tests.test_remat import FORWARD, products
from train_lm import main

SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"
SMALL = dataclasses.replace(
    PRESETS["tiny"],
    length=64,
    batch=2,
    steps=3,
    layers=1,
    width=32,
    heads=2,
    kv_heads=1,
    mlp_width=48,
    log_every=2,
    evaluate_every=2,
    evaluation_rows=2,
    final_evaluation_rows=4,
    prompt=8,
    sample=12,
)


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    return SMALL


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"line {i} of a small text\n" * (i + 1))
    return folder


@pytest.mark.usefixtures("small_preset")
def test_a_short_run_leaves_its_numbers_and_its_plot(
    tmp_path: Path,
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "new" / "run"
    (texts / "empty.txt").touch()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["--data", str(texts), "--out", str(out), "--profile"]) == 0
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "3"]
    assert list(rows[0]) == list(Row._fields)
    # A CPU's peak FLOP/s are in no table.
    assert {row.pop("utilisation") for row in rows} == {""}
    assert all(float(value) > 0 for row in rows for value in row.values())
    assert 0 < int(rows[-1]["tokens"]) <= 3 * SMALL.tokens_per_step
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    verdict = re.search(r"^validation loss .* >= order-1 entropy ", printed.out, re.MULTILINE)
    assert verdict
    *_, sample = printed.out[verdict.end() :].partition("\nsample:\n")
    assert all(line.startswith(("  | ", "  (empty)")) for line in sample.splitlines())
    assert sample.replace("\n", "").replace("\t", "").isprintable()
    assert "; 1 files passed over (empty or no UTF-8 text)\n" in printed.out
    assert "flashjax attention: " in printed.out
    assert re.search(r"tokens/s, [0-9.]+ GFLOP/s, [0-9.]+ GB", printed.err)
    trace = re.search(r"wrote a trace of steps 2 to 3 below (\S+):", printed.out)
    assert trace
    assert list(Path(trace[1]).rglob("perfetto_trace.json.gz"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "enormous"], "--preset: invalid choice: 'enormous'"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--steps", "0"], "--steps is 0; give 1 or more"),
        (["--batch", "-1"], "--batch is -1; give 1 or more"),
        (["--accumulate", "0"], "--accumulate is 0; give 1 or more"),
        (["--checkpoint-every", "0"], "--checkpoint-every is 0; give 1 or more"),
        (["--remat", "all"], "--remat: invalid choice: 'all'"),
        (["--length", "8"], "--length is 8; give 16 or more"),
        (["--length", "9999", "--data", "{tmp}/text"], "give --length 1141 or less, or more text"),
        (["--learning-rate", "nan"], "--learning-rate is nan"),
        (["--implementation", "fast"], "--implementation: invalid choice: 'fast'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--data", "{tmp}/missing"], "missing: no such file or directory"),
        (["--data", "{tmp}/*.txt"], "the glob matches no file"),
        (["--data", "{tmp}/empty"], "the directory holds no files"),
        (["--data", "{tmp}/binary"], "none of its 1 files is non-empty UTF-8 text"),
        (["--data", "{tmp}/text", "--out", "{tmp}/binary"], "cannot write there"),
        (["--data", "{tmp}/short"], "one text of 5 bytes"),
        (["--data", "{tmp}/few"], "the train split has 5 tokens, less than the shortest row of 16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_told_in_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\x00\x01")
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "few").mkdir()
    for name in ("a", "bc"):
        (tmp_path / "few" / name).write_text(name * 2)
    (tmp_path / "text").write_bytes(b"long enough\n" * 100)
    given = ["--out", str(tmp_path / "out"), *(flag.format(tmp=tmp_path) for flag in flags)]
    assert main(given) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("train_lm: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


@pytest.mark.usefixtures("small_preset")
def test_an_implementation_that_cannot_do_the_call_is_told_in_one_line(
    tmp_path: Path,
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("segment_ids: not on this\nmachine; use 'xla'")

    monkeypatch.setattr("flashjax.explain", refuse)
    flags = ["--data", str(texts), "--out", str(tmp_path / "out"), "--implementation", "xla"]
    assert main(flags) == 2
    wanted = "train_lm: --implementation xla: segment_ids: not on this machine; use 'xla'\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.usefixtures("small_preset")
def test_a_step_that_does_not_fit_is_told_in_one_line_and_costs_no_earlier_run(
    tmp_path: Path,
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lm.train.device_memory", lambda device: 10_000)
    with Checkpoints(tmp_path, {"steps": 1}, restart=False) as checkpoints:
        state, _ = checkpoints.begin(lambda: TrainState(jnp.zeros(()), None, None))
        checkpoints.save(Progress(state, [Row(1, 1, 1.0, None, 1.0, 1.0, None, 1.0, 1.0)]))
        checkpoints.finish()
    assert main(["--data", str(texts), "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "starting anew" not in printed.out
    assert printed.err == (
        "train_lm: a step takes 0.0 GB, more than the 0.0 GB there are; lower --batch (it is 2) "
        "and raise --accumulate as much, or set --remat attention (it is none), or lower --length "
        "(it is 64)\n"
    )
    assert (tmp_path / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", ["(empty)"]),
        (b"one\r\n\n\ttwo\n", ["| one", "| ", "| \ttwo"]),
        (b"\0 \x1b[2J \xff \x0b \xc2\x85", ["| \\x00 \\x1b[2J \ufffd \\x0b \\x85"]),
    ],
)
def test_a_sample_cannot_command_the_terminal(text: bytes, lines: list[str]) -> None:
    assert printable_lines(text) == lines


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress_bar(SMALL, 0, True) as bar:
            assert bar.disable != terminal


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InputError, match="another run is at work"):
        locked(tmp_path).__enter__()
    with locked(tmp_path):
        pass


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    rows = pack([b"a text"], SMALL.length)
    lost = LossSum(jnp.array(jnp.nan), jnp.array(1))
    compiled = Compiled(train=lambda state, batch: (state, lost), evaluate=lambda *_: lost)
    state = TrainState(jnp.zeros((), jnp.int32), None, None)
    with pytest.raises(InputError, match="loss is nan by step 2; lower --learning-rate"):
        train_steps(SMALL, rows, state, compiled, range(2))


def test_the_script_ends_with_status_2_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "enormous"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("train_lm: ")
    assert done.stderr.count("\n") == 1


Logits = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def fresh_model(config: Config) -> Logits:
    """Inputs, segment ids and positions of one row to its logits."""

    @jax.jit
    def logits(inputs: Array, segment_ids: Array, positions: Array) -> Array:
        return LanguageModel(config, nnx.Rngs(0))(inputs, segment_ids, positions)[0]

    return lambda *operands: np.asarray(logits(*operands))


@pytest.fixture(scope="module")
def small_model() -> Logits:
    return fresh_model(SMALL)


def test_logits_do_not_depend_on_what_is_packed_beside_a_document(
    small_model: Logits,
) -> None:
    text, other = b"some text of this length", b"and some other text"
    count = len(text) + 1

    def logits(*documents: bytes) -> np.ndarray:
        batch = pack(documents, SMALL.length).batch([0])
        assert batch.segment_ids.max() == len(documents) - 1
        return small_model(batch.inputs, batch.segment_ids, batch.positions)

    together = logits(text, other)
    beside_another = logits(text, other[::-1])
    np.testing.assert_array_equal(together[:count], beside_another[:count])
    np.testing.assert_allclose(together[:count], logits(text)[:count], rtol=1e-5, atol=1e-5)
    assert not np.allclose(together[count : count + 9], beside_another[count : count + 9])


def test_logits_do_not_depend_on_later_tokens_but_do_on_earlier_ones(
    small_model: Logits,
) -> None:
    batch = pack([bytes(range(80))], SMALL.length).batch([0])
    changed = batch.inputs.copy()
    changed[0, 32] += 1
    before = small_model(batch.inputs, batch.segment_ids, batch.positions)
    after = small_model(changed, batch.segment_ids, batch.positions)
    np.testing.assert_array_equal(before[:32], after[:32])
    assert (np.abs(before - after).max(axis=-1)[32:36] > 1e-5).all()


def test_padding_counts_for_nothing_in_the_loss() -> None:
    batch = pack([b"a text"], 16).batch([0, -1])
    logits = jnp.zeros((2, 16, VOCABULARY)).at[:, 7:].set(jnp.inf)
    total = loss_sum(logits, jax.tree.map(jnp.asarray, batch))
    assert float(total.nats) == pytest.approx(7 * math.log(VOCABULARY), rel=1e-6)
    assert int(total.bytes) == 6


def test_training_lowers_the_loss_and_goes_on_from_a_state_to_the_bit() -> None:
    config = dataclasses.replace(SMALL, steps=30, learning_rate=1e-2)
    rows = pack([b"abcdefghijklmnopqrstuvwxyz" * 4] * 2, config.length)
    program = make_program(config)
    compiled = Compiled(jax.jit(program.train), jax.jit(program.evaluate))
    start = jax.jit(program.start)()
    _, first = train_steps(config, rows, start, compiled, range(1))
    middle, _ = train_steps(config, rows, start, compiled, range(20))
    resumed, last = train_steps(config, rows, middle, compiled, range(20, 30))
    unbroken, _ = train_steps(config, rows, start, compiled, range(30))
    assert first.loss == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert last.loss < first.loss / 2
    assert resumed.step == config.steps
    jax.tree.map(np.testing.assert_array_equal, resumed, unbroken)


def test_bfloat16_layers_stay_near_float32_ones(small_model: Logits) -> None:
    batch = pack([b"a text of some length, packed", b"with another"], SMALL.length).batch([0])
    operands = (batch.inputs, batch.segment_ids, batch.positions)
    exact = small_model(*operands)
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    rounded = fresh_model(half)(*operands)
    assert rounded.dtype == np.float32
    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def gradients(config: Config, batch: Batch) -> tuple[Any, LossSum, int]:
    """Of the parameters that the seed gives, and the products of their jaxpr."""
    program = make_program(config)
    params = jax.jit(program.start)().params

    def of(params: Any, batch: Batch) -> tuple[Any, LossSum]:
        return summed_gradients(program.evaluate, params, batch, config.accumulate)

    traced = jax.jit(of).trace(params, batch)
    return *traced.lower().compile()(params, batch), products(traced.jaxpr.jaxpr)


def assert_near(found: Any, wanted: Any) -> None:
    """Each gradient within float32 rounding of its own largest entry."""

    def check(a: Array, b: Array) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    jax.tree.map(check, found, wanted)


def test_decoding_gives_the_logits_of_the_whole_text() -> None:
    """Two layers of which each has a cache of its own; a prompt, then a token at a time."""
    config = dataclasses.replace(SMALL, layers=2)
    params = jax.jit(make_program(config).start)().params
    model = nnx.merge(graph_of(config), params)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 12))
    wanted = model(tokens, np.zeros((2, 12), np.int32), np.broadcast_to(np.arange(12), (2, 12)))
    model.init_cache(2, 16)
    step = nnx.jit(lambda model, tokens: model.decode(tokens))
    parts = [(0, 9), *((t, t + 1) for t in range(9, 12))]
    found = jnp.concatenate([step(model, tokens[:, a:b]) for a, b in parts], axis=1)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


PACKED = pack([b"a few documents, of sizes that differ: %d" % i * i for i in range(1, 9)], 64)


def test_micro_batches_sum_to_the_whole_batch() -> None:
    batch = PACKED.train_batch(0, 4, seed=0)
    plain = dataclasses.replace(SMALL, batch=4, implementation="reference")
    whole, total, _ = gradients(plain, batch)
    parts, summed, _ = gradients(dataclasses.replace(plain, batch=1, accumulate=4), batch)
    assert (batch.segment_ids == -1).sum(axis=1).std() > 0
    assert int(summed.bytes) == int(total.bytes)
    assert float(summed.nats) == pytest.approx(float(total.nats), rel=1e-6)
    assert_near(parts, whole)


def test_remat_changes_no_gradient_and_attentions_names_spare_its_forward() -> None:
    batch = PACKED.train_batch(0, 2, seed=0)
    found = {
        remat: gradients(dataclasses.replace(SMALL, remat=remat, implementation="xla"), batch)
        for remat in REMATS
    }
    for remat in ("attention", "block"):
        assert_near(found[remat][0], found["none"][0])
    counts = {remat: count for remat, (_, _, count) in found.items()}
    # The MLP's second matrix alone has a result that the block's backward does not read.
    kernels = [path for path, _ in jax.tree.leaves_with_path(found["none"][0]["blocks"])]
    again = sum("kernel" in jax.tree_util.keystr(path) for path in kernels) - 1
    assert counts["attention"] == counts["none"] + again
    assert counts["block"] == counts["attention"] + FORWARD


def test_model_flops_count_each_matrix_and_each_visible_pair() -> None:
    batch = pack([b"abc", b"defghi"], 16).batch([0, -1])
    work = work_of(batch)
    # BEGIN is an input, so the documents are 4 and 7 inputs.
    assert work == Work(tokens=11, pairs=4 * 5 // 2 + 7 * 8 // 2)
    params = jax.eval_shape(make_program(SMALL).start).params
    width, kv_width, mlp, vocabulary = 32, 16, 48, VOCABULARY
    matrices = width * (2 * width + 2 * kv_width + 3 * mlp) + width * vocabulary
    assert matrix_parameters(params) == matrices
    assert model_flops(SMALL, params, work) == 6 * matrices * 11 + 12 * 2 * 16 * work.pairs


def test_a_gpus_share_of_its_peak_and_its_memory_are_told() -> None:
    stats = {"peak_bytes_in_use": 5, "bytes_limit": 7}
    gpu: Any = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: stats)
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    assert peak_flops(half, gpu) == 989e12
    assert peak_flops(SMALL, gpu) is None
    assert (peak_memory(gpu), device_memory(gpu)) == (5, 7)
    cpu = jax.devices("cpu")[0]
    assert peak_flops(half, cpu) is None
    assert 1e8 < peak_memory(cpu) < device_memory(cpu)
    row = Row(1, 2, 3.0, None, 4000.4, 5.04, 0.4567, 6.789, 7.0)
    assert row.speed() == "4000 tokens/s, 45.7% of peak FLOP/s, 6.79 GB"
    assert row._replace(utilisation=None).speed() == "4000 tokens/s, 5.0 TFLOP/s, 6.79 GB"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_consistent(name: str) -> None:
    config = PRESETS[name].checked()
    assert config.preset == name
    assert config.heads % config.kv_heads == 0
    assert config.width == config.heads * config.head_dim
    assert config.evaluate_every % config.log_every == 0
    assert config.checkpoint_every % config.log_every == 0
    jax.eval_shape(make_program(config).start)
