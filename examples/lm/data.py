"""Real text as byte documents: where it comes from, and which documents train or validate.

A document is the bytes of one text file. By default the documents are the source files of the
running Python's standard library, which every machine has.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config import InputError

VALIDATION_SHARE = 0.05
# A lone document is cut in two; below this a part would be too short to say anything.
LONE_DOCUMENT_BYTES = 1000


class Split(NamedTuple):
    """Documents by the side they are on; no document is on both."""

    train: list[bytes]
    validation: list[bytes]


def load_documents(data: str | None) -> list[bytes]:
    """The text files that `--data` names (the standard library's when None), in sorted order.

    `data` is a file, a directory (every file below it) or a glob. Files that are empty or are not
    UTF-8 text are passed over; it is an InputError if none is left.
    """
    paths = _standard_library() if data is None else _paths(data)
    documents = []
    for path in paths:
        text = _read(path)
        if text:
            documents.append(text)
    if not documents:
        raise InputError(
            f"--data {data or 'standard library'}: none of its {len(paths)} files is non-empty "
            "UTF-8 text; give a text file, a directory of them or a glob"
        )
    return documents


def split_documents(documents: Sequence[bytes]) -> Split:
    """Each document to the side that a hash of its own bytes picks.

    So the split is the same on every machine and for every seed, does not move when other
    documents come or go, and equal copies of one file cannot sit on both sides. Were a side to
    stay empty, the document of the smallest or largest hash moves there; a lone document is cut.
    """
    if len(set(documents)) == 1:
        return _cut_lone(documents[0])
    hashes = [_unit_hash(document) for document in documents]
    threshold = VALIDATION_SHARE
    if min(hashes) >= threshold:
        threshold = np.nextafter(min(hashes), 1.0)
    elif max(hashes) < threshold:
        threshold = max(hashes)
    split = Split([], [])
    for document, unit in zip(documents, hashes, strict=True):
        (split.validation if unit < threshold else split.train).append(document)
    return split


def _unit_hash(document: bytes) -> float:
    digest = hashlib.blake2b(document, digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _cut_lone(document: bytes) -> Split:
    if len(document) < LONE_DOCUMENT_BYTES:
        raise InputError(
            f"--data holds one document of {len(document)} bytes; give two or more documents, or "
            f"one of {LONE_DOCUMENT_BYTES} bytes or more, which is cut in two"
        )
    at = len(document) - int(len(document) * VALIDATION_SHARE)
    return Split([document[:at]], [document[at:]])


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
