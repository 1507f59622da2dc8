"""The language model's data: documents, their split, the packer, the entropies."""

import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import InputError
from lm.data import VALIDATION_SHARE, TextFile, load_files, make_documents, split_files
from lm.entropy import byte_entropy
from lm.packing import BEGIN, END, PADDING_SEGMENT, Batch, PackedRows, pack


def all_rows(rows: PackedRows) -> Batch:
    return rows.batch(range(len(rows)))


def segments(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of every segment of every row."""
    found = []
    for inputs, targets, ids in zip(batch.inputs, batch.targets, batch.segment_ids, strict=True):
        for segment in range(ids.max() + 1):
            here = ids == segment
            found.append((inputs[here].tolist(), targets[here].tolist()))
    return found


def reassemble(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of every document, its pieces joined: a later piece's first input is the
    last target of the piece before it, and the pieces before the last fill a row each."""
    begun = [piece for piece in segments(batch) if piece[0][0] == BEGIN]
    later = [piece for piece in segments(batch) if piece[0][0] != BEGIN]
    documents = []
    for inputs, targets in begun:
        while targets[-1] != END:
            at = next(i for i, piece in enumerate(later) if piece[0][0] == targets[-1])
            more_inputs, more_targets = later.pop(at)
            inputs, targets = inputs + more_inputs, targets + more_targets
        documents.append((inputs, targets))
    assert not later
    return documents


def numbered_documents(sizes: list[int]) -> list[bytes]:
    """Documents in which no two bytes are equal, so that a piece tells where it came from."""
    assert sum(sizes) <= 256
    ends = np.cumsum(sizes)
    return [bytes(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(sizes=SIZES, length=st.integers(1, 40))
@settings(deadline=None)
def test_every_byte_is_an_input_once_and_a_target_once_in_order(
    sizes: list[int], length: int
) -> None:
    documents = numbered_documents(sizes)
    packed = reassemble(all_rows(pack(documents, length)))
    wanted = [([BEGIN, *text], [*text, END]) for text in documents]
    assert sorted(packed) == sorted(wanted)


@given(sizes=SIZES, length=st.integers(1, 40))
@settings(deadline=None)
def test_segments_and_positions_count_up_and_padding_comes_last(
    sizes: list[int], length: int
) -> None:
    batch = all_rows(pack(numbered_documents(sizes), length))
    for ids, positions in zip(batch.segment_ids, batch.positions, strict=True):
        real = ids[ids != PADDING_SEGMENT]
        assert (ids[: real.size] == real).all()
        assert set(np.diff(real, prepend=-1).tolist()) <= {0, 1}
        counted = [np.arange((real == segment).sum()) for segment in range(real.max() + 1)]
        assert (positions[: real.size] == np.concatenate(counted)).all()


def test_targets_are_the_next_inputs_and_never_another_documents() -> None:
    batch = all_rows(pack(numbered_documents([5, 3, 90, 7, 40]), 32))
    same_segment = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    real = batch.segment_ids[:, :-1] != PADDING_SEGMENT
    expected = batch.inputs[:, 1:][same_segment & real]
    assert (batch.targets[:, :-1][same_segment & real] == expected).all()
    assert BEGIN not in batch.targets
    assert END not in batch.inputs


def test_short_documents_are_not_cut_and_long_ones_only_at_row_ends() -> None:
    rows = pack(numbered_documents([31, 15, 15, 100]), 32)
    sizes = sorted(len(inputs) for inputs, _ in segments(all_rows(rows)))
    # 100 bytes are 101 inputs: three whole rows and 5 over; each other document is whole.
    assert sizes == [5, 16, 16, 32, 32, 32, 32]
    assert len(rows) == 6
    assert rows.fill == pytest.approx((101 + 32 + 16 + 16) / (6 * 32))


def test_rows_of_one_epoch_are_each_seen_once_and_depend_on_seed_and_step_alone() -> None:
    rows = pack([bytes([i]) * 15 for i in range(12)], 16)
    assert len(rows) == 12
    seen = [rows.train_batch(step, 4, seed=7).targets[:, 0].tolist() for step in range(6)]
    first, second = np.ravel(seen[:3]).tolist(), np.ravel(seen[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    again = pack([bytes([i]) * 15 for i in range(12)], 16)
    assert again.train_batch(5, 4, seed=7).targets[:, 0].tolist() == seen[5]
    assert again.train_batch(5, 4, seed=8).targets[:, 0].tolist() != seen[5]


def test_a_batch_larger_than_the_data_goes_on_into_the_next_epoch() -> None:
    rows = pack([bytes([i]) * 15 for i in range(3)], 16)
    firsts = rows.train_batch(0, 6, seed=0).targets[:, 0].tolist()
    assert sorted(firsts) == [0, 0, 1, 1, 2, 2]


def test_evaluation_batches_are_filled_up_with_padding() -> None:
    rows = pack([bytes([i]) * 15 for i in range(5)], 16)
    first, second = rows.evaluation_batches(rows=100, size=3)
    firsts = np.concatenate([first.targets[:, 0], second.targets[:2, 0]])
    assert sorted(firsts.tolist()) == list(range(5))
    assert (second.segment_ids[2] == PADDING_SEGMENT).all()
    assert not second.targets[2].any()


def numbered_files(numbers: range) -> list[TextFile]:
    return [TextFile(f"{i}.txt", b"text %d" % i) for i in numbers]


def test_split_puts_each_file_on_one_side_whatever_the_others_are() -> None:
    files = numbered_files(range(4000))
    split = split_files(files)
    assert sorted(split.train + split.validation) == sorted(files)
    assert 0.8 < len(split.validation) / (4000 * VALIDATION_SHARE) < 1.2
    fewer = split_files(files[::2])
    assert set(fewer.validation) == set(split.validation) & set(files[::2])


def test_equal_files_are_on_the_same_side() -> None:
    split = split_files(
        [file._replace(name=copy) for copy in "ab" for file in numbered_files(range(200))]
    )
    assert not {file.text for file in split.train} & {file.text for file in split.validation}


@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_sides_have_files_however_few_there_are(count: int) -> None:
    for first in range(40):
        split = split_files(numbered_files(range(first, first + count)))
        assert split.train
        assert split.validation


def test_a_lone_file_is_cut_in_two() -> None:
    text = bytes(range(256)) * 10
    (train,), (validation,) = split_files([TextFile("a", text)])
    assert train.text + validation.text == text
    with pytest.raises(InputError, match="one text of 9 bytes"):
        split_files([TextFile("a", b"too short")])


def test_a_directorys_own_files_make_one_document() -> None:
    files = [TextFile("a.py", b"1"), TextFile("b/c.py", b"2\n"), TextFile("d.py", b"3")]
    assert make_documents(files, "file") == [b"1", b"2\n", b"3"]
    assert make_documents(files, "directory") == [
        b"==> a.py <==\n1\n==> d.py <==\n3\n",
        b"==> b/c.py <==\n2\n\n",
    ]


def test_the_standard_library_is_read_by_default() -> None:
    files, _ = load_files(None)
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in ["argparse.py", "json/decoder.py"]:
        assert TextFile(name, (stdlib / name).read_bytes()) in files
    assert all(file.text for file in files)


def test_what_was_installed_into_the_standard_library_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name in ["z.py", "json/a.py", "site-packages/b.py", "dist-packages/c/d.py", "notes.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert [file.name for file in load_files(None).files] == ["json/a.py", "z.py"]


def test_files_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("zwölf".encode())
    (tmp_path / "a.txt").write_bytes(b"eins")
    (tmp_path / "latin.txt").write_bytes("zwölf".encode("latin-1"))
    (tmp_path / "binary.bin").write_bytes(b"\x00\x01")
    (tmp_path / "empty.txt").write_bytes(b"")
    both = [TextFile("a.txt", b"eins"), TextFile("b.txt", "zwölf".encode())]
    assert load_files(str(tmp_path)) == (both, 3)
    assert load_files(str(tmp_path / "*.txt")) == (both, 2)
    assert load_files(str(tmp_path / "a.txt")) == (both[:1], 0)


@pytest.mark.parametrize("data", [".", "**", "{tmp}"])
def test_what_the_run_itself_writes_is_no_text(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("runs/tiny")
    (out / "checkpoints").mkdir(parents=True)
    for name in ("a.txt", out / "metrics.csv", out / "log", out / "checkpoints" / "config.json"):
        Path(name).write_text("text")
    wanted = [TextFile("a.txt", b"text")]
    assert load_files(data.format(tmp=tmp_path), out) == (wanted, 0)
    # Where all lies in OUT, only what is known to be the run's is.
    (out / "metrics.csv").rename("metrics.csv")
    assert load_files("a.txt", Path()) == (wanted, 0)
    assert [file.name for file in load_files(".", Path()).files] == [
        "a.txt",
        "runs/tiny/checkpoints/config.json",
        "runs/tiny/log",
    ]


def test_a_file_name_may_be_any_bytes() -> None:
    files = [TextFile(os.fsdecode(b"\xff.txt"), b"1")]
    assert make_documents(files, "directory") == [b"==> \xff.txt <==\n1\n"]


def test_entropy_of_a_hand_made_example() -> None:
    # Four a and two b. The pairs within documents are aa, ab, ab: after an a, one a and two b.
    entropy = byte_entropy(pack([b"aab", b"ab", b"a"], 16).tokens)
    assert entropy.order0 == pytest.approx(-(4 / 6) * math.log(4 / 6) - (2 / 6) * math.log(2 / 6))
    assert entropy.order1 == pytest.approx(-(1 / 3) * math.log(1 / 3) - (2 / 3) * math.log(2 / 3))


def test_entropy_does_not_depend_on_how_the_counting_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = pack([b"the quick brown fox jumps over the lazy dog"] * 3, 16).tokens
    whole = byte_entropy(tokens)
    monkeypatch.setattr("lm.entropy.TOKENS_AT_ONCE", 7)
    assert byte_entropy(tokens) == whole
    assert whole.order1 < whole.order0 < math.log(256)
