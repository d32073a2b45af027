"""Stay x drug matrices and drug vocabularies, as files and in memory. Torch-free.

A prepared folder holds, for each window, ``eicu_<window>.npz`` and ``vocabulary_<window>.json``,
and an ``eicu_manifest.json`` with the SHA-256 of the tables and of these files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tightframe.data.eicu import MOST_DRUGS, REGIONS, Window, vocabulary_sha256
from tightframe.data.eicu.folds import Stays
from tightframe.data.unpacked import check_zip
from tightframe.errors import DataError
from tightframe.options import StrictModel

FORMAT: Literal[2] = 2
"""Format of the prepared files. Format 1 does not mark stays without a patient id, so a job that protects
patients would take each for a patient of its own."""
MANIFEST = "eicu_manifest.json"


_DTYPES: Mapping[str, Any] = {
    "indptr": np.int64,
    "indices": np.int32,
    "label": np.uint8,
    "hospital": np.int32,
    "region": "<U9",
    "stay": np.int64,
    "patient": np.int32,
    "hicl": np.int32,
}


def matrix_name(window: Window) -> str:
    """Return the file name of a window's matrix in a prepared folder."""
    return f"eicu_{window}.npz"


def vocabulary_name(window: Window) -> str:
    """Return the file name of a window's drug vocabulary in a prepared folder."""
    return f"vocabulary_{window}.json"


@dataclass(frozen=True)
class StayMatrix:
    """The drugs given in each of n stays, a sparse n x D matrix in compressed rows, and the stays' columns.

    Attributes:
        indptr: row i's columns are ``indices[indptr[i]:indptr[i + 1]]``, int64 (n + 1,).
        indices: columns, ascending within a row, int32.
        label: 1 where the patient died in hospital, uint8 (n,).
        hospital: ids, int32 (n,).
        region: of ``REGIONS``, text (n,).
        stay: ids of the hospital stays, int64 (n,).
        patient: number of the patient, without meaning outside this table, int32 (n,); negative, and unique
            to the stay, if the table does not name the patient.
        hicl: code of each column's drug, ascending, int32 (D,).
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    label: NDArray[np.uint8]
    hospital: NDArray[np.int32]
    region: NDArray[np.str_]
    stay: NDArray[np.int64]
    patient: NDArray[np.int32]
    hicl: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.label)

    @property
    def stays(self) -> Stays:
        """The stays' columns other than the drugs."""
        label, hospital, stay, patient = (
            item.astype(np.int64) for item in (self.label, self.hospital, self.stay, self.patient)
        )
        return Stays(label, hospital, stay, patient)

    def sizes(self) -> dict[int, int]:
        """Return the number of stays by hospital id."""
        ids, counts = np.unique(self.hospital, return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))

    def regions(self) -> dict[int, str]:
        """Return the region by hospital id."""
        return dict(zip(self.hospital.tolist(), self.region.tolist(), strict=True))

    def dense(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return these stays as dense rows: 1 for each drug given, otherwise 0, float32 (B, D)."""
        values = np.zeros((len(rows), len(self.hicl)), dtype=np.float32)
        for place, row in enumerate(rows):
            values[place, self.indices[self.indptr[row] : self.indptr[row + 1]]] = 1.0
        return values

    def counts(self) -> dict[str, int]:
        """Return summary counts of the matrix: stays, drugs, deaths, hospitals, drugs given."""
        return {
            "stays": len(self),
            "drugs": len(self.hicl),
            "deaths": int(self.label.sum()),
            "hospitals": len(self.sizes()),
            "given": len(self.indices),
        }


def compressed(
    row: NDArray[np.int64], column: NDArray[np.int64], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return ``indptr`` and ``indices`` of distinct pairs (row, column), given in any order.

    Args:
        row: of each pair, int64 (m,).
        column: of each pair, int64 (m,).
        rows: number of rows n.
    """
    order = np.lexsort((column, row))
    indptr = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=indptr[1:])
    return indptr, column[order].astype(np.int32)


def aligned(matrix: StayMatrix, codes: Sequence[int]) -> StayMatrix:
    """Return the same stays with the columns of another vocabulary.

    A drug that is not in the vocabulary is dropped; one that is not in the table is a column of zeros.

    Args:
        matrix: of any vocabulary.
        codes: HICL codes, ascending, (D,).
    """
    target = np.asarray(codes, dtype=np.int32)
    if np.array_equal(target, matrix.hicl):
        return matrix
    place = np.searchsorted(target, matrix.hicl)
    known = target[np.minimum(place, len(target) - 1)] == matrix.hicl
    kept = known[matrix.indices]
    row = np.repeat(np.arange(len(matrix)), np.diff(matrix.indptr))[kept]
    indptr, indices = compressed(row, place[matrix.indices[kept]].astype(np.int64), len(matrix))
    return replace(matrix, indptr=indptr, indices=indices, hicl=target)


def matrix_bytes(matrix: StayMatrix) -> bytes:
    """Encode a matrix in NumPy's compressed ``npz`` format; equal matrices give equal bytes."""
    stream = io.BytesIO()
    arrays = {name: getattr(matrix, name).astype(dtype) for name, dtype in _DTYPES.items()}
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def read_matrix(path: Path) -> StayMatrix:
    """Read a matrix in the format of ``matrix_bytes``.

    Raises:
        DataError: TF-206 if it is missing, damaged, or not such a matrix.
    """
    remedy = "prepare the tables again with `tightframe data prepare eicu`."
    try:
        check_zip(path)
        with np.load(path, allow_pickle=False) as stored:
            # NumPy returns a member that is not an array as bytes.
            arrays: dict[str, Any] = {name: np.asarray(stored[name]) for name in _DTYPES}
        wrong = [
            f"{name} is {array.dtype} of {array.ndim} axes"
            for name, array in arrays.items()
            if array.dtype != np.dtype(_DTYPES[name]) or array.ndim != 1
        ]
        matrix = StayMatrix(**arrays)
        problem = ", ".join(wrong) or _inconsistent(matrix)
    except Exception as error:  # a foreign file can make the parsers of zip, npy and text raise anything
        raise DataError(
            f"Expected a prepared matrix at {path}, but it cannot be read: {type(error).__name__}: {error}; "
            f"{remedy}",
            code="TF-206",
        ) from None
    if problem:
        raise DataError(
            f"Expected a prepared matrix at {path}, but it is inconsistent ({problem}): {remedy}",
            code="TF-206",
        )
    return matrix


def _inconsistent(matrix: StayMatrix) -> str:
    """Describe the first inconsistency of a matrix; empty if there is none."""
    n, drugs = len(matrix), len(matrix.hicl)
    lengths = {len(item) for item in (matrix.hospital, matrix.region, matrix.stay, matrix.patient)}
    if n == 0 or lengths != {n} or len(matrix.indptr) != n + 1:
        return f"{n} labels, but columns of {sorted(lengths)} stays"
    if not 1 <= drugs <= MOST_DRUGS or np.any(np.diff(matrix.hicl) <= 0):
        return f"{drugs} drug codes that are not 1 to {MOST_DRUGS}, ascending"
    steps = np.diff(matrix.indptr)
    if matrix.indptr[0] != 0 or np.any(steps < 0) or matrix.indptr[-1] != len(matrix.indices):
        return "rows that do not cover the drugs given"
    if len(matrix.indices) and not 0 <= matrix.indices.min() <= matrix.indices.max() < drugs:
        return f"columns outside of 0..{drugs - 1}"
    if matrix.label.max() > 1 or not set(matrix.region.tolist()) <= set(REGIONS):
        return "unknown labels or regions"
    if len(np.unique(matrix.stay)) != n:
        return "a stay that occurs twice"
    return ""


def vocabulary_bytes(codes: Sequence[int]) -> bytes:
    """Encode a drug vocabulary as a file: HICL codes in column order, and their fingerprint."""
    return json.dumps({"hicl": list(codes), "sha256": vocabulary_sha256(codes)}).encode() + b"\n"


def read_vocabulary(path: Path) -> tuple[int, ...]:
    """Read the HICL codes of a drug vocabulary, in column order.

    Raises:
        DataError: TF-204 if it is missing or malformed, or if its fingerprint is wrong.
    """
    form = 'expected {"hicl": [4, 11, ...], "sha256": "..."}, as `tightframe data prepare eicu` writes it.'
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        codes = tuple(values["hicl"])
        stated = values["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"The drug vocabulary {path} cannot be read ({error!r}); {form}", code="TF-204"
        ) from None
    valid = all(type(code) is int and 0 <= code < 2**31 for code in codes)
    if not valid or not codes or any(a >= b for a, b in pairwise(codes)):
        raise DataError(
            f"The drug vocabulary {path} has codes that are not integers in ascending order; {form}",
            code="TF-204",
        )
    if stated != vocabulary_sha256(codes):
        raise DataError(
            f"Expected the drug vocabulary {path} to have the SHA-256 that it states, {stated}, but got "
            f"{vocabulary_sha256(codes)}: it was changed or truncated; fetch it again.",
            code="TF-204",
        )
    return codes


class TableFile(StrictModel):
    """An input table of a matrix."""

    file: str
    sha256: str


class PreparedWindow(StrictModel):
    """One window's entry in the manifest.

    Attributes:
        inputs: the three tables.
        outputs: SHA-256 of the window's files, by name.
        counts: of ``StayMatrix.counts``.
        rows: number of rows of the tables, by kind.
        vocabulary: SHA-256 of the drug vocabulary.
    """

    inputs: dict[str, TableFile]
    outputs: dict[str, str]
    counts: dict[str, int]
    rows: dict[str, int]
    vocabulary: str


class Manifest(StrictModel):
    """The manifest of a prepared folder."""

    format: Literal[2] = FORMAT
    windows: dict[Window, PreparedWindow] = {}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder; an empty one if there is none.

    Raises:
        DataError: TF-206 if it is not such a manifest, or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return Manifest()
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"Expected {path} to be the manifest of prepared eICU matrices (format {FORMAT}), but it is not: "
            f"{error}; prepare the tables into another folder, or remove this file and prepare them again.",
            code="TF-206",
        ) from None
