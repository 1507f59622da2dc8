"""The bench tells the truth: its counts, its reference, its tables, and what it says of peers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax.layer
from bench import machine, plots, report, run, table, train_step
from bench.peers import PEERS, Contender, Missing
from bench.peers.base import load
from bench.peers.jax_functions import FlashAttention3, JaxNn
from bench.programs import Inputs
from bench.record import Cell, Record, mean_ratio, records
from bench.timing import QUICK
from flashjax.bind import Arguments
from flashjax.cases import BY_NAME, GROUPS, Workload
from lm.config import PRESETS
from lm.packing import Batch


def small(mask, **rest):
    # B 2, T = S 96, N 4, K 2, H 8, Hv 16
    return Workload(mask, 2, 96, 96, 4, 2, 8, 16, mask, dtype="float32", **rest)


SMALL = [
    small("full", bias=True),
    small("window", extent=10, sinks=True),
    small("packed", extent=20, alibi=True),
    small("prefix", extent=30, soft_cap=2.0),
    small("causal"),
]


@pytest.mark.parametrize("w", SMALL, ids=lambda w: w.name)
def test_flops_count_the_elements_that_are_visible(w):
    seen = w.visible(np.arange(w.rows), np.arange(w.columns)).sum()
    if w.mask == "packed":
        ids = w.segment_ids()
        same = (ids[:, :, None] == ids[:, None, :]) & np.tri(w.rows, dtype=bool)
        seen = same.sum() / w.batch
    if w.mask == "causal":  # half of all, as published figures count
        seen = w.rows * w.columns / 2
    assert w.elements() == seen * w.batch
    assert w.flops() == 2 * w.elements() * w.heads * (w.head_dim + w.value_dim)
    assert w.flops("backward") == 2.5 * w.flops()
    assert w.flops("both") == 3.5 * w.flops()


def test_traffic_counts_each_array_once():
    w = SMALL[0]
    sizes = [np.prod(s) for s in (w.query_shape, w.key_shape, w.value_shape, w.out_shape)]
    assert w.traffic() == 4 * (sum(sizes) + w.heads * w.rows * w.columns)
    assert BY_NAME["h128-4k-causal"].memory_bound is False
    assert dataclasses.replace(w, bias=False, rows=1).memory_bound


def test_documents_fill_their_rows():
    w = BY_NAME["packed-2k-32k"]
    (lengths,) = w.document_lengths()
    assert lengths.sum() == w.rows
    assert lengths.min() > 0
    assert 1000 < lengths.mean() < 4000


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("w", SMALL[:-1], ids=lambda w: w.name)
def test_the_float64_sample_agrees_with_the_reference(w):
    inputs = Inputs.of(w)
    right = run.sample(inputs)
    assert right.dk is not None

    def attend(q, k, v):
        return flashjax.dot_product_attention(
            q, k, v, **inputs.arguments, implementation="reference", precision="highest"
        )

    out, pull = jax.vjp(attend, inputs.q, inputs.k, inputs.v)
    errors = right.errors(out, pull(inputs.d_out))
    assert errors.keys() >= {"out", "dq", "dk", "dv", "dk relative"}
    assert max(errors.values()) < 1e-5
    wrong = right.errors(out.at[0, right.rows[0], right.heads[1], 0].add(1))
    assert wrong["out"] > 0.5


def test_names_are_unique_and_the_targets_are_all_there():
    assert len(BY_NAME) == sum(map(len, GROUPS.values()))
    assert len(GROUPS["targets"]) == 10
    assert {"targets", "variants", "precision", "memory", "million", "grouped"} <= GROUPS.keys()
    gqa = BY_NAME["h128-8k-causal-gqa"]
    assert (gqa.batch, gqa.heads, gqa.key_heads) == (2, 32, 8)
    # 4·B·N·T·S·H, halved.
    assert gqa.flops() == 4 * 2 * 32 * 8192**2 * 128 / 2


def record_of(*cells):
    w = BY_NAME["tiny-causal"]
    return Record(
        "targets",
        {"device": "NVIDIA H200", "platform": "gpu", "driver": "1", "date": "2026-11-29T00:00"}
        | {"commit": "abc", "versions": {"jax": "0"}},
        {"matmul": "bfloat16 8192³", "matmul_tflops": 700.0, "copy_gbs": 4300.0, "clocks": {}},
        {"flashjax triton": "1", "fast": "2", "slow": "3"},
        {"gone": "no module"},
        {w.name: dataclasses.asdict(w) | {"title": run.title(w), "dtype": "bfloat16"}},
        list(cells),
    )


def cell(contender, seconds, ours=False, direction="forward", **rest):
    speed = None if seconds is None else 1 / seconds
    return Cell("tiny-causal", contender, ours, direction, seconds=seconds, tflops=speed, **rest)


FOUND = record_of(
    cell("flashjax triton", 0.5, ours=True, errors={"out relative": 1e-3}, memory=2**20),
    cell("fast", 1.0, batches=(1.0, 1.1)),
    cell("slow", 2.0),
    cell("fast", 0.1, direction="both", memory=2**21),
    cell("slow", None, direction="both", note="out of memory"),
)


def test_results_survive_json(tmp_path):
    FOUND.save(tmp_path / "nvidia-h200-targets.json")
    FOUND.save(tmp_path / "nvidia-h200-targets-only.json")
    (tmp_path / "other.json").write_text("{}")
    assert records(tmp_path) == [FOUND]


def test_an_earlier_runs_other_workloads_are_kept():
    w = BY_NAME["tiny-packed"]
    other = dataclasses.replace(cell("old", 3.0), workload=w.name)
    before = dataclasses.replace(
        FOUND, workloads=FOUND.workloads | {w.name: {}}, cells=[*FOUND.cells, other]
    )
    merged = dataclasses.replace(FOUND, contenders={"new": "4"}).after(before, ["tiny-causal"])
    assert merged.cells == [other]
    assert list(merged.workloads) == [w.name]
    assert merged.contenders == FOUND.contenders | {"new": "4"}


def test_ratios_are_to_the_best_peer():
    ours = FOUND.find("tiny-causal", "flashjax triton", "forward")
    assert FOUND.best_peer("tiny-causal", "forward").contender == "fast"
    assert FOUND.ratio(ours) == 2.0
    text = table.line(FOUND, "tiny-causal", "flashjax triton", ("forward", "both"))
    assert "2.00" in text
    assert "1.0e-03" in text
    assert len(text) == len(table.header(("forward", "both")))
    assert "[out of memory]" in table.line(FOUND, "tiny-causal", "slow", ("forward", "both"))


PASSES = record_of(
    cell("flashjax triton", 0.5, ours=True),
    cell("fast", 1.0),
    cell("slow", 0.4),
    cell("flashjax triton", 2.0, ours=True, direction="backward"),
    cell("flashjax triton", 2.5, ours=True, direction="deterministic"),
    cell("fast", 2.0, direction="backward"),
    cell("slow", 3.0, direction="backward"),
)


def test_both_passes_are_held_against_one_peer():
    """Neither against the forward of one and the backward of another."""
    assert PASSES.lead("tiny-causal", "flashjax triton", ["forward"]) == 0.8
    assert PASSES.lead("tiny-causal", "flashjax triton", ["forward", "backward"]) == 3 / 2.5
    assert PASSES.lead("tiny-causal", "flashjax triton", ["both"]) is None
    assert mean_ratio([0.5, None, 2.0]) == pytest.approx(1)
    assert mean_ratio([None]) is None


def test_a_deterministic_backward_is_held_against_our_own():
    ordered = PASSES.find("tiny-causal", "flashjax triton", "deterministic")
    assert PASSES.ratio(ordered) == 0.8
    directions = ("backward", "deterministic")
    assert "0.80" in table.line(PASSES, "tiny-causal", "flashjax triton", directions)
    assert len(table.line(PASSES, "tiny-causal", "fast", directions)) == len(
        table.header(directions)
    )
    text = report.group_tables(PASSES)
    row = "| 0.80 | 1.00 | 0.80 | 1.20 |"
    assert f"| tiny-causal {row}" in text
    assert "| geometric mean | 0.800 | 1.000 | 0.800 | 1.200 |" in text
    assert "ratio to the backward in any order.\n\n| workload | call | flashjax triton |\n" in text
    assert "geometric mean" not in report.group_tables(FOUND)


def test_the_page_is_filled_between_its_markers(tmp_path):
    FOUND.save(tmp_path / "results" / "a.json")
    page = report.PAGE.read_text()
    once = report.filled(page, tmp_path / "results", tmp_path)
    assert "2 (2.00×)" in once
    assert "**1**" in once
    assert "- slow, tiny-causal: out of memory" in once
    assert "gone: no module" in once
    assert report.filled(once, tmp_path / "results", tmp_path) == once
    marked = set(report.MARKED.findall(page))
    assert {name for _, name, _, _ in marked} >= {"targets", "variants", "precision", "training"}


def test_planned_memory_is_shown_beside_what_must_not_be_in_it():
    w = BY_NAME["grouped-1k-32k"]
    assert run.title(w).startswith("B 1, T 1024, S 32768, N 64, K 8")
    assert w.elements() == 1024 * 32768
    one = cell("flashjax xla", 1.0, ours=True, direction="both", temporary=2**25, peak=2**30)
    found = dataclasses.replace(
        record_of(dataclasses.replace(one, workload=w.name), cell("fast", 1.0, direction="both")),
        group="grouped",
        workloads={w.name: dataclasses.asdict(w) | {"title": run.title(w)}},
    )
    row = "| grouped-1k-32k | flashjax xla | 32 | 32 | 1,024 | 4,096 | 1.0 |"
    assert row in report.plan_table(found)
    assert not report.plan_table(FOUND)


def test_pictures_are_drawn(tmp_path):
    drawn = plots.draw([PASSES, dataclasses.replace(FOUND, group="memory")], tmp_path)
    assert [path.name for path in drawn] == [plots.SPEED, plots.RATIOS, plots.MEMORY]
    assert all(0 < path.stat().st_size < 200_000 for path in drawn)


def test_pictures_show_the_newest_run_of_a_workload():
    later = dataclasses.replace(
        record_of(cell("fast", 0.25)), machine=FOUND.machine | {"date": "2999-01-01"}
    )
    for found in ([FOUND, later], [later, FOUND]):
        assert [c.seconds for c in plots.timed(found, "fast", "forward")] == [0.25]
        assert [c.seconds for c in plots.timed(found, "slow", "forward")] == [2.0]


class Fake(JaxNn):
    """jax.nn's, but it refuses or fails as it is told."""

    def __init__(self, name, error=None, refuses=None, missing=None):
        super().__init__("xla")
        self.name, self.error, self.refuses, self.missing = name, error, refuses, missing

    def version(self):
        return load(self.missing) if self.missing else "fake"

    def unsupported(self, workload):
        return self.refuses

    def backward(self, inputs):
        raise self.error


@pytest.mark.parametrize("name", ["fa3", "fa4", "torch", "tokamax-mosaic"])
def test_a_peer_that_is_missing_gives_a_reason(name, monkeypatch):
    def gone(module):
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr("importlib.import_module", gone)
    found, missing = run.present([PEERS[name]()])
    assert not found
    assert "No module named" in next(iter(missing.values()))


def test_what_a_peer_cannot_do_is_a_line_and_no_crash():
    inputs, shop = Inputs.of(BY_NAME["tiny-causal"]), run.Workshop(1)

    def notes(contender: Contender):
        return [c.note for c in run.cells_of(contender, inputs, ("backward",), QUICK, None, shop)]

    assert notes(Fake("refuses", refuses="takes no float32")) == ["takes no float32"]
    assert notes(Fake("fails", ZeroDivisionError("by zero"))) == [
        "backward: ZeroDivisionError: by zero"
    ]
    memory = RuntimeError("RESOURCE_EXHAUSTED: 12 GiB")
    assert notes(Fake("big", memory)) == ["backward: out of memory"]
    ours = NotImplementedError(
        "implementation='triton' cannot do this call: it needs a GPU. Pass None."
    )
    assert notes(Fake("ours", ours)) == ["it needs a GPU"]


def test_a_lost_device_ends_the_run(monkeypatch):
    def lost(x):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(jax, "block_until_ready", lost)
    with pytest.raises(run.DeviceLostError, match="ILLEGAL_ADDRESS"):
        run.check_device(ValueError())


def test_what_a_package_holds_is_known_before_it_is_tried():
    h64, packed = BY_NAME["h64-4k-full"], BY_NAME["packed-2k-32k"]
    assert FlashAttention3().unsupported(h64) == "the wheel holds H 128 only"
    assert FlashAttention3().unsupported(packed) is None
    assert JaxNn("xla").unsupported(BY_NAME["memory-128k"]) == "its scores would take 512 GiB"
    assert JaxNn("cudnn").unsupported(BY_NAME["sinks"]) == "has no sinks"
    assert PEERS["torch"]().unsupported(packed) == "has no packed mask but as a T × S array"


@pytest.fixture
def keeps_caches(monkeypatch):
    """What other tests have compiled stays."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.mark.usefixtures("quick_compiles", "keeps_caches")
def test_the_bench_runs_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "smi", lambda: {"driver_version": "1.2"})
    words = ["--quick", "--only", "tiny-packed", "--peers", "jax.nn-xla,jax.nn-cudnn"]
    words += ["--directions", "deterministic,both", "--out", str(tmp_path)]
    words += ["--compile-threads", "2"]
    assert run.main(words) == 0
    shown = capsys.readouterr().out
    assert "jax.nn cudnn: missing (needs an NVIDIA GPU)" in shown
    (path,) = tmp_path.glob("*-tiny-only.json")
    found = Record.load(path)
    assert {(c.contender, c.direction) for c in found.cells if c.seconds} == {
        ("flashjax xla", "deterministic"), ("flashjax xla", "both"), ("jax.nn xla", "both"),
    }  # fmt: skip
    assert len(found.cells) == 3
    assert all(c.errors["dk relative"] < 1e-5 for c in found.cells)
    assert all(0 < c.temporary < c.memory for c in found.cells)
    assert {c.peak for c in found.cells} == {None}  # a CPU keeps no count
    assert found.calibration["matmul_tflops"] > 0
    assert found.machine["versions"]["jax"] == jax.__version__


@pytest.mark.usefixtures("quick_compiles")
def test_jax_nns_attention_computes_what_ours_does_in_a_model():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 24, 2, 8)) for i in range(3))
    ids = jnp.asarray(np.repeat([[0, 1, -1]], [10, 9, 5], axis=1))
    arguments = Arguments(segment_ids=ids, is_causal=True)
    found = {}
    for attention in ("flashjax-reference", "jax.nn-xla"):
        for text in train_step.TEXTS:
            with train_step.attends_by(attention, text):
                found[attention, text] = flashjax.layer.call(q, k, v, arguments, None)
    for text in train_step.TEXTS:
        ours, theirs = (found[a, text] for a in ("flashjax-reference", "jax.nn-xla"))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert not np.allclose(found["jax.nn-xla", "packed"], found["jax.nn-xla", "causal"], atol=1e-2)


@pytest.mark.usefixtures("quick_compiles", "keeps_caches")
def test_training_steps_are_timed(tmp_path):
    small = {"length": 32, "batch": 1, "layers": 1, "width": 32, "heads": 2, "kv_heads": 2}
    config = dataclasses.replace(PRESETS["tiny"], **small, mlp_width=32)
    tokens = np.arange(32, dtype=np.int32)[None]
    batch = Batch(tokens, tokens, np.zeros_like(tokens), tokens)
    attentions = ["jax.nn-xla", "nonsense"]
    rows = train_step.time_all(config, [batch], attentions, ["causal"], steps=1)
    assert rows[0]["tokens_per_second"] > 0
    assert rows[0]["memory_gib"] > 0
    assert "unknown" in rows[1]["note"]
    assert {"gpt2-small-1k", "long-32k", "long-128k"} <= PRESETS.keys()
    large = train_step.time_all(PRESETS["long-32k"], [batch], attentions[:1], ["packed"], steps=1)
    assert "scores would take 128 GiB" in large[0]["note"]
    path = tmp_path / "train-step.json"
    for preset in ("tiny", "other", "tiny"):
        train_step.save(path, preset, [row | {"preset": preset} for row in rows])
    whole = json.loads(path.read_text())
    assert [row["preset"] for row in whole["rows"]] == ["other"] * 2 + ["tiny"] * 2
    assert report.training_table(whole).count("\n| ") == 5


def test_a_missing_module_is_named():
    with pytest.raises(Missing, match="no_such_module: ModuleNotFoundError"):
        load("no_such_module")
