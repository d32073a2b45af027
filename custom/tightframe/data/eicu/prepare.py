"""Prepare eICU matrices from the published tables once, so that runs start fast.

``tightframe data prepare eicu`` calls this. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightframe.data.base import Progress, count_table
from tightframe.data.eicu import WINDOWS, Window, vocabulary_sha256
from tightframe.data.eicu.matrix import (
    MANIFEST,
    Manifest,
    PreparedWindow,
    StayMatrix,
    TableFile,
    matrix_bytes,
    matrix_name,
    read_manifest,
    vocabulary_bytes,
    vocabulary_name,
)
from tightframe.data.eicu.tables import locate, read_tables
from tightframe.data.manifest import sha256, write_whole
from tightframe.errors import DataError
from tightframe.files import file_sha256

CHECKSUMS = "SHA256SUMS.txt"
"""PhysioNet's list of checksums, used if it is next to the tables."""

DEMO_INPUTS = {
    "hospital": "4ed356f9c4e7c8ce80e89241697e94b77f21c2f325cd6ad126794b1e92805ef4",
    "medication": "480a251570a27932110452f66f248061f712c306663c274f78f90875648cb720",
    "patient": "15e1eb52169828e3cfff3b67132a087298de4d0365bbb31bb294f6043bffd474",
}
"""SHA-256 of the demo's tables, version 2.0.1, as PhysioNet compresses them."""

DEMO_COUNTS: Mapping[Window, Mapping[str, int]] = {
    "48h": {"stays": 1555, "drugs": 920, "deaths": 136, "hospitals": 144},
    "stay": {"stays": 1558, "drugs": 1012, "deaths": 136, "hospitals": 144},
}
"""Counts of the matrices that the demo's tables give."""


@dataclass(frozen=True)
class Prepared:
    """The result for one window.

    Attributes:
        window: 48h or stay.
        made: False if it had already been prepared from the same tables and is unchanged.
        counts: stays, drugs, deaths, hospitals, drugs given; and rows of the tables by kind.
        vocabulary: SHA-256 of the drug vocabulary, for a job's ``vocabulary``.
    """

    window: Window
    made: bool
    counts: Mapping[str, int]
    vocabulary: str


def prepare(
    tables_folder: Path,
    output: Path,
    *,
    window: Window | Literal["both"] = "both",
    progress: Progress | None = None,
) -> tuple[Prepared, ...]:
    """Write matrix, vocabulary and manifest for one window or both.

    An existing window is kept if it was made from these tables, by SHA-256, and its own files are
    unchanged; so an interrupted run continues where it stopped. Every file is written whole or not at all.

    Args:
        tables_folder: folder of the tables patient, hospital and medication.
        output: the prepared folder; created if it does not exist.
        window: the window to prepare, or both.
        progress: receives a line for each step, and from time to time in between.

    Returns:
        The results, by window.

    Raises:
        DataError: as ``read_tables``; TF-206 if a table differs from PhysioNet's list of checksums, or if
            the manifest in the output is not one of prepared matrices; TF-203 if the output cannot be
            written.
    """
    report = progress or (lambda text: None)
    windows: tuple[Window, ...] = WINDOWS if window == "both" else (window,)
    inputs = _inputs(tables_folder, report)
    entries = dict(read_manifest(output).windows)
    kept = {name for name in windows if name in entries and _is_done(output, entries[name], inputs)}
    for name in sorted(kept):
        report(f"{name}: already prepared from these tables, and verified")
    pending = tuple(name for name in windows if name not in kept)
    if pending:
        tables = read_tables(tables_folder, pending, progress)
        for name, matrix in tables.matrices.items():
            _check_demo(name, inputs, matrix)
            entries[name] = _write(output, name, matrix, inputs, tables.counts)
            done = Manifest(windows={item: entries[item] for item in WINDOWS if item in entries})
            _keep(output / MANIFEST, done.model_dump_json(indent=2).encode() + b"\n")
            report(f"{name}: {count_table(matrix.counts())}")
    return tuple(
        Prepared(name, name in pending, entries[name].counts | entries[name].rows, entries[name].vocabulary)
        for name in windows
    )


def _inputs(folder: Path, report: Progress) -> dict[str, TableFile]:
    """Return the file name and SHA-256 of each table, checked against PhysioNet's list if there is one."""
    stated = _checksums(folder / CHECKSUMS)
    inputs: dict[str, TableFile] = {}
    for table, path in locate(folder).items():
        report(f"reading {path.name}")
        try:
            digest = file_sha256(path)
        except OSError as error:
            raise DataError(f"Expected to read {path}, but got: {error}.", code="TF-206") from None
        if stated.get(path.name, digest) != digest:
            raise DataError(
                f"Expected {path} to have its SHA-256 in {CHECKSUMS}, {stated[path.name]}, but got {digest}: "
                "it is truncated or of another release; download it again.",
                code="TF-206",
            )
        inputs[table] = TableFile(file=path.name, sha256=digest)
    return inputs


def _checksums(path: Path) -> dict[str, str]:
    """Read SHA-256 by file name, from lines of ``<digest> <name>``; empty if there is no such file."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})[ *]+(\S+)\s*$", text, re.MULTILINE)}


def _is_done(output: Path, entry: PreparedWindow, inputs: Mapping[str, TableFile]) -> bool:
    """Return True if a window's files were made from these tables and are unchanged."""
    return entry.inputs == inputs and all(
        (output / name).is_file() and file_sha256(output / name) == digest
        for name, digest in entry.outputs.items()
    )


def _check_demo(window: Window, inputs: Mapping[str, TableFile], matrix: StayMatrix) -> None:
    """Refuse a matrix of the demo's tables with other counts than the demo's: a fault of this program."""
    if {table: item.sha256 for table, item in inputs.items()} != DEMO_INPUTS:
        return
    counts = matrix.counts()
    expected = dict(DEMO_COUNTS[window])
    actual = {name: counts[name] for name in expected}
    if actual != expected:
        raise DataError(
            f"Expected {count_table(expected)} from the eICU demo 2.0.1 ({window}), but got "
            f"{count_table(actual)}: report this, with the versions of Python and NumPy.",
            code="TF-206",
        )


def _write(
    output: Path,
    window: Window,
    matrix: StayMatrix,
    inputs: Mapping[str, TableFile],
    rows: Mapping[str, int],
) -> PreparedWindow:
    """Write a window's files and return its entry for the manifest."""
    codes = matrix.hicl.tolist()
    files = {matrix_name(window): matrix_bytes(matrix), vocabulary_name(window): vocabulary_bytes(codes)}
    for name, content in files.items():
        _keep(output / name, content)
    return PreparedWindow(
        inputs=dict(inputs),
        outputs={name: sha256(content) for name, content in files.items()},
        counts=matrix.counts(),
        rows=dict(rows),
        vocabulary=vocabulary_sha256(codes),
    )


def _keep(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        DataError: TF-203 if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise DataError(f"Expected to be able to write {path}, but got: {error}.") from None
