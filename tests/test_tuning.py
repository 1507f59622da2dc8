"""Tuning: tables are looked up by kind and size, never trusted, and made by measuring."""

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flashjax
from flashjax import __main__, bind, cases, chunked, plan, tuning
from flashjax.backend import Config, Device
from flashjax.bind import Arguments
from flashjax.masks import Causal
from flashjax.scores import Alibi
from flashjax.spec import Spec
from flashjax.tuning import command, table
from flashjax.tuning.measure import Measurement, Pass, entries, measure, passes, timer, winner
from flashjax.tuning.table import DEFAULT, SHIPPED, USERS, Kind, Size

KIND = "Test GPU 1"
GPU = Device("cuda", KIND, "9.0")


@dataclasses.dataclass(frozen=True)
class Pair(Config):
    """A backward of two passes, as the Triton kernels' is."""

    query: Config


FORWARD = (Config(128, 64), Config(64, 64), Config(64, 32))
BACKWARD = (
    Pair(64, 64, Config(128, 32)),
    Pair(32, 64, Config(128, 32)),
    Pair(32, 32, Config(64, 32)),
)


def spec_of(t: int = 4096, s: int | None = None, *, b: int = 1, n: int = 8, **rest: Any) -> Spec:
    key_heads, h = rest.pop("key_heads", n), rest.pop("h", 64)
    dtype = rest.pop("dtype", jnp.bfloat16)
    q = jax.ShapeDtypeStruct((b, t, n, h), dtype)
    k = jax.ShapeDtypeStruct((b, s or t, key_heads, h), dtype)
    found: list[Spec] = []
    jax.eval_shape(lambda *x: found.append(bind.bind(*x, Arguments(**rest)).spec), q, k, k)
    return found[0]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Paths of the user's and of the shipped table, none of which exists."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "shipped_path", lambda kind: tmp_path / table.file_name(kind))
    table.tables.cache_clear()
    plan.plan.cache_clear()
    users = table.users_path(KIND)
    assert users is not None
    yield users, tmp_path / "test_gpu_1.json"
    table.tables.cache_clear()
    plan.plan.cache_clear()


def kind_of(spec: Spec, direction: Any = "forward") -> Kind:
    offered = FORWARD if direction == "forward" else BACKWARD
    return Kind.of("triton", direction, spec, offered[0])


def store(path: Path, config: Config, spec: Spec, direction: Any = "forward") -> None:
    kind = kind_of(spec, direction)
    table.write_entries(path, KIND, {kind: {Size.of(spec): dataclasses.asdict(config)}})
    table.tables.cache_clear()


def forward_of(spec: Spec) -> tuple[Config, str]:
    return tuning.chosen("triton", spec, GPU, "forward", FORWARD)


def test_without_a_table_the_first_offered_is_taken_in_silence(places: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forward_of(spec_of()) == (FORWARD[0], DEFAULT)


def test_a_stored_configuration_is_taken(places: Any) -> None:
    store(places[0], FORWARD[1], spec_of())
    assert forward_of(spec_of()) == (FORWARD[1], USERS)


def test_the_users_table_goes_before_the_shipped_one(places: Any) -> None:
    store(places[1], FORWARD[2], spec_of())
    assert forward_of(spec_of()) == (FORWARD[2], SHIPPED)
    store(places[0], FORWARD[1], spec_of())
    assert forward_of(spec_of()) == (FORWARD[1], USERS)


def test_what_the_users_table_lacks_the_shipped_one_may_have(places: Any) -> None:
    store(places[0], FORWARD[1], spec_of(h=128))
    store(places[1], FORWARD[2], spec_of())
    assert forward_of(spec_of()) == (FORWARD[2], SHIPPED)


@pytest.mark.parametrize(
    ("n", "power"), [(0, 0), (1, 0), (2, 1), (90, 6), (91, 7), (181, 7), (182, 8), (4096, 12)]
)
def test_a_bucket_is_the_nearest_power_of_two(n: int, power: int) -> None:
    assert table.bucket(n) == power


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"t": 3001}, True),
        ({"t": 5500}, True),
        ({"t": 16384}, True),
        ({"t": 1024}, True),
        ({"t": 32768}, False),
        ({"t": 512}, False),
        ({"t": 4096, "s": 32768}, False),
        ({"n": 32}, True),
        ({"b": 2, "n": 64}, False),
    ],
)
def test_near_sizes_share_an_entry(places: Any, sizes: Any, found: bool) -> None:
    store(places[0], FORWARD[1], spec_of())
    assert (forward_of(spec_of(**sizes))[1] == USERS) is found


def test_the_nearest_entry_wins(places: Any) -> None:
    kind = kind_of(spec_of())
    near = {1024: FORWARD[1], 4096: FORWARD[2]}
    rows = {Size.of(spec_of(t)): dataclasses.asdict(config) for t, config in near.items()}
    table.write_entries(places[0], KIND, {kind: rows})
    assert forward_of(spec_of(1200))[0] == FORWARD[1]
    assert forward_of(spec_of(3500))[0] == FORWARD[2]
    assert forward_of(spec_of(16384))[0] == FORWARD[2]


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": jnp.float16},
    "head dim": {"h": 128},
    "ranges": {"is_causal": True},
    "score": {"score_mod": Alibi()},
    "group": {"key_heads": 2},
}


@pytest.mark.parametrize("other", OTHER_KINDS)
def test_another_kind_of_call_has_an_entry_of_its_own(places: Any, other: str) -> None:
    store(places[0], FORWARD[1], spec_of())
    assert forward_of(spec_of(**OTHER_KINDS[other])) == (FORWARD[0], DEFAULT)


def test_backend_direction_and_device_tell_entries_apart(places: Any) -> None:
    store(places[0], FORWARD[1], spec_of())
    other = Device("cuda", "Test GPU 2", "9.0")
    for backend, direction, device in (
        ("mosaic", "forward", GPU),
        ("triton", "backward", GPU),
        ("triton", "forward", other),
    ):
        found = tuning.chosen(backend, spec_of(), device, direction, FORWARD)  # type: ignore[arg-type]
        assert found == (FORWARD[0], DEFAULT)


def test_precision_counts_for_float32_alone() -> None:
    def precision(**arguments: Any) -> str:
        return kind_of(spec_of(**arguments)).precision

    assert precision(dtype=jnp.float32) == "HIGHEST"
    assert precision(dtype=jnp.float32, precision="default") == "DEFAULT"
    assert precision(precision="highest") == precision() == ""


def test_a_schedule_of_lists_is_one_of_its_own() -> None:
    dense = jax.ShapeDtypeStruct((1, 1, 512, 512), jnp.bool_)
    kinds = [
        kind_of(spec_of(512, **rest)).schedule for rest in ({}, {"mask": Causal()}, {"mask": dense})
    ]
    assert kinds == ["none", "ranges", "lists"]


def test_an_entry_is_for_calls_that_are_offered_the_same_first(places: Any) -> None:
    store(places[0], FORWARD[1], spec_of())
    for offered, wanted in ((FORWARD, FORWARD[1]), (FORWARD[::-1], FORWARD[-1])):
        assert tuning.chosen("triton", spec_of(), GPU, "forward", offered)[0] == wanted


def test_a_configuration_no_longer_offered_is_passed_over(places: Any) -> None:
    store(places[0], Config(256, 256), spec_of())
    assert forward_of(spec_of()) == (FORWARD[0], DEFAULT)
    store(places[0], Pair(64, 64, Config(1, 1)), spec_of(), "backward")
    found = tuning.chosen("triton", spec_of(), GPU, "backward", BACKWARD)
    assert found == (BACKWARD[0], DEFAULT)


def test_a_backward_pairs_passes_of_two_offered(places: Any) -> None:
    pair = Pair(64, 64, Config(64, 32))
    assert pair not in BACKWARD
    store(places[0], pair, spec_of(), "backward")
    assert tuning.chosen("triton", spec_of(), GPU, "backward", BACKWARD) == (pair, USERS)


THIS = {"format": table.FORMAT, "device": KIND}
DAMAGED = {
    "no JSON": "{",
    "a list": "[]",
    "no entries": json.dumps(THIS),
    "another device": json.dumps(THIS | {"device": "Test GPU 2", "entries": []}),
    "another format": json.dumps(THIS | {"format": table.FORMAT + 1, "entries": []}),
    "an entry without fields": json.dumps(THIS | {"entries": [{}]}),
    "an entry that is none": json.dumps(THIS | {"entries": [3]}),
    "a null": "null",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_warning_that_names_it(places: Any, text: str) -> None:
    users, shipped = places
    users.parent.mkdir(parents=True)
    users.write_text(text)
    store(shipped, FORWARD[1], spec_of())
    with pytest.warns(UserWarning, match=r"ignores its tuning table .*test_gpu_1\.json") as seen:
        found = [forward_of(spec_of()) for _ in range(2)]
    assert found == [(FORWARD[1], SHIPPED)] * 2
    assert len(seen) == 1


def test_the_table_is_read_once_at_first_use(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    read = table.read_entries
    monkeypatch.setattr(table, "read_entries", lambda p, k: asked.append(p) or read(p, k))
    for _ in range(3):
        forward_of(spec_of())
    assert asked == list(places)


def test_writing_and_reading_give_back_the_entries(places: Any) -> None:
    kinds = [kind_of(spec_of(h=h), d) for d in ("forward", "backward") for h in (64, 128)]
    made = {
        kind: {Size(t, t, 3): dataclasses.asdict(BACKWARD[0]) for t in (10, 12)} for kind in kinds
    }
    table.write_entries(places[0], KIND, made)
    assert table.read_entries(places[0], KIND) == made
    table.write_entries(places[0], KIND, {})
    assert table.read_entries(places[0], KIND) == {}
    assert [p.name for p in places[0].parent.iterdir()] == [places[0].name]


def test_the_shipped_tables_can_be_read() -> None:
    shipped = sorted(Path(table.__file__).parent.glob("*.json"))
    assert shipped
    for path in shipped:
        kind = json.loads(path.read_text())["device"]
        assert table.shipped_path(kind) == path
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.read_entries(path, kind)


@dataclasses.dataclass
class Fake:
    """A kernel whose tile sizes only say how long it takes."""

    name: str = "triton"
    platform: str | None = "cuda"

    def unsupported(self, spec: Spec, device: Device, *, backward: bool = False) -> str | None:
        return "it takes no sinks" if spec.shapes.sinks is not None else None

    def configs(self, spec: Spec, device: Device, *, backward: bool = False) -> tuple[Config, ...]:
        return BACKWARD if backward else FORWARD

    def forward(self, spec: Spec, config: Config, operands: Any) -> Any:
        return jnp.zeros(spec.out.shape, spec.dtype), jnp.zeros(spec.lse.shape, spec.lse.dtype)

    def backward(self, spec: Spec, config: Config, *given: Any) -> Any:
        if isinstance(config, Pair) and config == BACKWARD[1] and "key" in spec.wanted:
            raise RuntimeError("this one does\nnot compile")
        return given[0]


def in_turn(*seconds: float) -> Any:
    """A timer that calls nothing and gives these times, one a program."""
    waiting = iter(seconds)
    return lambda call: next(waiting)


def test_plan_and_explain_say_where_tile_sizes_are_from(
    places: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BACKENDS", {"triton": Fake})
    store(places[0], FORWARD[2], spec_of())
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    found = str(flashjax.explain(q, q, q, device=GPU))
    assert "forward: triton, tiles of 64 × 32 (rows × columns), tuned on this machine" in found
    assert "backward: triton, tiles of 64 × 64 (rows × columns), default" in found


def test_passes_of_a_backward_are_told_apart() -> None:
    found = list(passes(Fake(), spec_of(), GPU))
    assert [(str(p), p.wanted, len(p.configs)) for p in found] == [
        ("forward", frozenset(), 3),
        ("backward query", {"query"}, 2),
        ("backward", {"key", "value"}, 3),
    ]
    whole = list(passes(chunked.BACKEND, spec_of(), GPU))[-1]
    assert whole.wanted == {"query", "key", "value"}


def test_measuring_finds_the_best_of_each_pass() -> None:
    tiny = cases.BY_NAME["tiny-causal"]
    # Three forwards, two for dQ, two for dK and dV: a third does not compile.
    found = list(measure(tiny, Fake(), GPU, in_turn(3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0)))
    assert [one.seconds for one in found] == [(3, 1, 2), (5, 4), (6, math.inf, 7)]
    assert found[2].failures == ("32 × 64: this one does not compile",)
    made = entries(found)
    assert [list(sizes.values()) for sizes in made.values()] == [
        [{"rows": 64, "columns": 64}],
        [{"rows": 64, "columns": 64, "query": {"rows": 64, "columns": 32}}],
    ]


def of_forward(*seconds: float) -> Measurement:
    spec = spec_of()
    part = Pass("forward", "", FORWARD)
    return Measurement("w", kind_of(spec), Size.of(spec), part, seconds)


@pytest.mark.parametrize(
    ("seconds", "index"),
    [
        ([(1.0, 0.99, 1.2)], 0),  # within the noise
        ([(1.0, 0.97, 1.2)], 1),
        ([(1.0, 0.5, 0.6), (1.0, 1.0, 0.6)], 2),  # it loses least over both
        ([(math.inf, 2.0, 3.0)], 1),
        ([(1.0, 0.2, 0.9), (1.0, math.inf, 0.9)], 2),
    ],
)
def test_the_winner_is_quickest_over_all_that_share_an_entry(
    seconds: list[tuple[float, ...]], index: int
) -> None:
    found = winner(of_forward(*one) for one in seconds)
    assert found == table.plain(FORWARD[index])


def test_there_is_no_winner_where_nothing_ran() -> None:
    found = of_forward(math.inf, math.inf, math.inf)
    assert winner([found]) is None
    assert entries([found]) == {}


def test_a_time_is_the_median_of_batches_that_are_long_enough() -> None:
    now, took = 0.0, iter([9.0, 0.01, *[0.01] * 3, *[0.02] * 10, *[0.03] * 100])

    def call() -> None:
        nonlocal now
        now += next(took)

    # The first call is not counted; batches grow from one call of 10 ms.
    timed = timer(batch_seconds=0.1, batches=3, clock=lambda: now)
    assert 0.02 <= timed(call) <= 0.03


def options(*words: str) -> Any:
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_tune_stores_what_the_plan_then_takes(
    places: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = cases.BY_NAME["tiny-causal"]
    monkeypatch.setitem(cases.GROUPS, "targets", (tiny, cases.BY_NAME["sinks"]))
    monkeypatch.setattr(cases.Workload, "operands", _small(cases.Workload.operands))
    timed = in_turn(3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0)
    assert command.tune(options("--quick"), {"triton": Fake}, GPU, timed) == 0
    printed = capsys.readouterr()
    assert "sinks: not for triton: it takes no sinks" in printed.out
    for cells in (
        ("tiny-causal", "forward", "128 × 64", "3000.000", "64 × 64", "1000.000", "3.00 ×"),
        ("tiny-causal", "backward query", "128 × 32", "64 × 32", "1.25 ×"),
        ("failed", "32 × 64: this one does not compile"),
        ("3 passes measured", str(places[0])),
    ):
        assert any(all(cell in line for cell in cells) for line in printed.out.splitlines()), cells
    spec = spec_of(128, n=2, h=16, dtype=jnp.float32, is_causal=True)
    assert forward_of(spec) == (FORWARD[1], USERS)


def _small(operands: Any) -> Any:
    """Full-size workloads that are refused need no arrays of full size."""

    def made(workload: cases.Workload, seed: int = 0) -> Any:
        return operands(dataclasses.replace(workload, batch=1, rows=8, columns=8), seed)

    return lambda w, seed=0: operands(w, seed) if w.rows <= 128 else made(w, seed)


def test_tune_keeps_what_the_table_had(places: Any, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "table.json"
    store(path, FORWARD[2], spec_of())
    timed = in_turn(*range(1, 8))
    words = ("--only", "tiny-causal", "--write", str(path))
    assert command.tune(options(*words), {"triton": Fake}, GPU, timed) == 0
    assert not places[0].exists()
    kept = table.read_entries(path, KIND)
    assert len(kept) == 3
    assert kept[kind_of(spec_of())]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "tiny-causal", "--group", "tiny"), "--only names workloads and --group"),
        (("--write", "."), "--write . is a folder"),
    ],
)
def test_what_tune_cannot_do_it_says_before_it_measures(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.tune(options(*words), {"triton": Fake}, GPU, in_turn()) == 1
    assert said in capsys.readouterr().out


def test_groups_are_those_asked_for() -> None:
    assert [w.name for w in command.workloads(options("--only", "alibi", "alibi"))] == ["alibi"]
    assert command.workloads(options("--group", "tiny")) == list(cases.TINY)
    assert command.workloads(options("--quick")) == list(cases.TARGETS)
    every = command.workloads(options())
    assert len(every) > len(cases.TARGETS) + len(cases.VARIANTS)
    assert "h128-4k-causal" in {w.name for w in every}
    assert "length-h128-4k" not in {w.name for w in every}  # the same call


def test_the_command_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashjax", "tune", "--quick"])
    assert __main__.main() == 1
    assert "no kernel to tune" in capsys.readouterr().out
