"""Real text as byte documents: where it comes from, and which documents train or validate.

By default the text is the source of the running Python's standard library, which every machine has.
A file is on one side as a whole. A document is then the bytes of one file, or, for long contexts,
those of all of a directory's files that are on that side.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config import WRITTEN, InputError

VALIDATION_SHARE = 0.05
# A lone file is cut in two; below this a part would be too short to say anything.
LONE_FILE_BYTES = 1000


class TextFile(NamedTuple):
    """`name` is its path below what `--data` names, with slashes: the same on every machine."""

    name: str
    text: bytes


class Split(NamedTuple):
    """Files by the side they are on; no file is on both."""

    train: list[TextFile]
    validation: list[TextFile]


class Found(NamedTuple):
    """The text files, and how many others there were."""

    files: list[TextFile]
    passed_over: int


def load_files(data: str | None, out: Path | None = None) -> Found:
    """The text files that `--data` names (the standard library's when None), in sorted order.

    `data` is a file, a directory (every file below it) or a glob. Files that are empty or are not
    UTF-8 text are passed over; it is an InputError if none is left. What lies in `out` is the run's
    own and no text, even if it lies in `data`.
    """
    paths = _standard_library() if data is None else _paths(data)
    if out is not None:
        paths = _without(out.resolve(), paths)
    parents = [str(path.parent) for path in paths]
    root = os.path.commonpath(parents) if parents else ""
    files = []
    for path in paths:
        text = _read(path)
        if text:
            files.append(TextFile(Path(os.path.relpath(path, root)).as_posix(), text))
    if not files:
        raise InputError(
            f"--data {data or 'standard library'}: none of its {len(paths)} files is non-empty "
            "UTF-8 text; give a text file, a directory of them or a glob"
        )
    return Found(files, len(paths) - len(files))


def make_documents(files: Sequence[TextFile], kind: str) -> list[bytes]:
    """The documents that `--documents` asks for: "file", each file's text; "directory", the texts
    of each directory's own files end to end, each under a line with its name."""
    if kind == "file":
        return [file.text for file in files]
    directories: dict[str, list[bytes]] = {}
    for file in files:
        # As `head` and `tail` announce the files that they print.
        entry = b"==> %b <==\n%b\n" % (os.fsencode(file.name), file.text)
        directories.setdefault(os.path.dirname(file.name), []).append(entry)
    return [b"".join(entries) for entries in directories.values()]


def split_files(files: Sequence[TextFile]) -> Split:
    """Each file to the side that a hash of its own bytes picks.

    So the split is the same on every machine and for every seed, does not move when other files
    come or go or are joined to documents, and equal copies of one file cannot sit on both sides.
    Were a side to stay empty, the file of the smallest or largest hash moves there; a lone file is
    cut.
    """
    if len({file.text for file in files}) == 1:
        return _cut_lone(files[0])
    hashes = [_unit_hash(file.text) for file in files]
    threshold = VALIDATION_SHARE
    if min(hashes) >= threshold:
        threshold = np.nextafter(min(hashes), 1.0)
    elif max(hashes) < threshold:
        threshold = max(hashes)
    split = Split([], [])
    for file, unit in zip(files, hashes, strict=True):
        (split.validation if unit < threshold else split.train).append(file)
    return split


def _unit_hash(text: bytes) -> float:
    digest = hashlib.blake2b(text, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _cut_lone(file: TextFile) -> Split:
    size = len(file.text)
    if size < LONE_FILE_BYTES:
        raise InputError(
            f"--data holds one text of {size} bytes; give two or more files, or one of "
            f"{LONE_FILE_BYTES} bytes or more, which is cut in two"
        )
    at = size - int(size * VALIDATION_SHARE)
    return Split(
        [file._replace(text=file.text[:at])],
        [file._replace(text=file.text[at:])],
    )


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # site-packages and Debian's dist-packages lie inside; they differ from machine to machine.
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "dist-packages"} & set(path.parts)
    ]


def _paths(data: str) -> list[Path]:
    path = Path(data).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(entry for entry in path.rglob("*") if entry.is_file())
        if not found:
            raise InputError(f"--data {data}: the directory holds no files")
        return found
    if glob.has_magic(data):
        matches = glob.glob(os.path.expanduser(data), recursive=True)
        found = sorted(Path(match) for match in matches if os.path.isfile(match))
        if not found:
            raise InputError(f"--data {data}: the glob matches no file (was it quoted?)")
        return found
    if path.exists():
        raise InputError(f"--data {data}: neither a regular file nor a directory")
    raise InputError(f"--data {data}: no such file or directory")


def _without(out: Path, paths: list[Path]) -> list[Path]:
    """The paths outside of `out`; where all are inside, those that no run writes."""
    inside = {path: path.resolve() for path in paths}
    inside = {path: whole for path, whole in inside.items() if whole.is_relative_to(out)}
    if len(inside) < len(paths):
        return [path for path in paths if path not in inside]
    return [path for path in paths if inside[path].relative_to(out).parts[0] not in WRITTEN]


def _read(path: Path) -> bytes:
    """The file's bytes if they are text, else nothing."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"--data: cannot read {path}: {error.strerror}") from error
    if b"\0" in content:
        return b""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return b""
    return content
