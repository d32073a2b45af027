"""Real records of Fed-Heart-Disease at a site: UCI's ``processed.<centre>.data``.

FLamby is not needed. Values are raw: FLamby standardises each centre by its own moments; here the
model standardises by the pooled moments of the training folds. Torch-free until ``records`` is called.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import FOLDS
from tightframe.data.heart import (
    CENTER_NAMES,
    TEST_COUNTS,
    TEST_ROWS,
    TRAIN_COUNTS,
    HeartOptions,
    HeartSite,
)
from tightframe.data.table.silo import TableData
from tightframe.data.table.sources.rows import row_content
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError
from tightframe.phases import Fold

_COLUMNS = 14
_USED = (*range(10), 13)
"""Values of a line: age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, and the status."""
_SEX, _CP, _FBS, _RESTECG, _EXANG, _STATUS = 1, 2, 5, 6, 8, 10
_LEVELS: Mapping[int, tuple[int, ...]] = {
    **{column: (0, 1) for column in (_SEX, _FBS, _EXANG)},
    **{_CP: (1, 2, 3, 4), _RESTECG: (0, 1, 2), _STATUS: (0, 1, 2, 3, 4)},
}
_NUMBERS = (0, 1, 3, 4, 5, 7, 8, 9)

Table = NDArray[np.float32]


def read_center(path: Path) -> tuple[Table, NDArray[np.int64]]:
    """Read one centre's file.

    A record is dropped if a value that is used is unknown (``?``). The unused slope, ca and thal may be
    unknown.

    Args:
        path: comma-separated lines of 14 values, without a header.

    Returns:
        Features in the order of ``FEATURES``, float32 (n, 13), and labels (n,): 1 for a status of 1 to 4.

    Raises:
        DataError: TF-205 if there is no such file, TF-206 if it cannot be read, TF-204 if a line is
            malformed, TF-207 for a level that a categorical column does not have.
    """
    rows: list[list[float]] = []
    for number, line in _lines(path):
        if len(line) != _COLUMNS:
            raise DataError(
                f"Expected {_COLUMNS} values in line {number} of {path}, but got {len(line)}: fetch UCI's "
                "processed file again (the unprocessed one has 76).",
                code="TF-204",
            )
        used = [line[column].strip() for column in _USED]
        if "?" in used:
            continue
        rows.append([_number(path, number, text) for text in used])
        for column, levels in _LEVELS.items():
            if rows[-1][column] not in levels:
                raise DataError(
                    f"Expected one of {levels} as value {_USED[column] + 1} of line {number} of {path}, but "
                    f"got {line[_USED[column]]!r}: fetch UCI's processed file again.",
                    code="TF-207",
                )
    table = np.array(rows, dtype=np.float64).reshape(-1, len(_USED))
    encoded = [table[:, column] for column in _NUMBERS]
    encoded += [table[:, column] == level for column in (_CP, _RESTECG) for level in _LEVELS[column][1:]]
    return np.stack(encoded, axis=1).astype(np.float32), (table[:, _STATUS] > 0).astype(np.int64)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            return [(number, line) for number, line in enumerate(csv.reader(stream), start=1) if line]
    except FileNotFoundError:
        raise DataError(
            f"Expected {path}, but there is no such file: set `root` to the folder of UCI's "
            "processed.*.data.",
            code="TF-205",
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"Expected to read {path}, but got: {error}: fetch it again.", code="TF-206"
        ) from None


def _number(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise DataError(
            f"Expected a number or ? in line {number} of {path}, but got {text!r}: fetch it again.",
            code="TF-204",
        )
    return value


class HeartData(TableData):
    """One centre's records; see ``SiloData``. Each is a patient of its own.

    Args:
        features: raw, float32 (n, 13).
        labels: int64 (n,).
        tested: True for records of the test fold, bool (n,).
        names: unique name of each record, by which the validation fold is chosen.
        source: one line for reports.
        synthetic: whether the records are generated.
        path: the centre's file; None of generated records.
    """

    def __init__(
        self,
        features: Table,
        labels: NDArray[np.int64],
        tested: NDArray[np.bool_],
        names: list[str],
        *,
        source: str,
        synthetic: bool,
        path: Path | None = None,
    ) -> None:
        train = np.flatnonzero(~tested)
        folds = np.where(tested, FOLDS.index("test"), FOLDS.index("train"))
        held_out = validation_mask(labels[train], [names[row] for row in train])
        folds[train[held_out]] = FOLDS.index("validation")
        contents = None if path is None else partial(_contents, path)
        super().__init__(
            features, labels, folds, names, names, source=source, synthetic=synthetic, contents=contents
        )

    def rows(self, fold: Fold) -> NDArray[np.int64]:
        """Return the indices of a fold's records among the centre's, in record order."""
        return self._rows[fold]

    def groups(self, fold: Fold) -> NDArray[np.int64]:
        """Return the patient of each record: according to UCI each record is a different patient."""
        return self._rows[fold]


def _contents(path: Path) -> Iterable[bytes]:
    """Yield each line of the file, as a table's row, left out or not."""
    return (row_content([cell.strip() for cell in line]) for _, line in _lines(path))


def open_site(site: HeartSite, options: HeartOptions) -> HeartData:
    """Open the records of a configured site.

    Raises:
        DataError: TF-203 without the folder, as ``read_center``, and TF-208 if the centre does not have
            the 303, 261, 46 or 130 records that FLamby's split is defined for.
    """
    name = CENTER_NAMES[site.center]
    if not site.root.is_dir():
        raise DataError(
            f"Expected the files processed.*.data in {site.root}, but there is no such folder: correct "
            "`root`, and check that this process may read it."
        )
    path = site.root / f"processed.{name}.data"
    features, labels = read_center(path)
    tested = np.array([TEST_ROWS[site.center] >> row & 1 for row in range(len(labels))], dtype=np.bool_)
    counts = tuple(tuple(np.bincount(labels[part], minlength=2).tolist()) for part in (~tested, tested))
    expected = (TRAIN_COUNTS[site.center], TEST_COUNTS[site.center])
    if counts != expected:
        raise DataError(
            f"Expected {expected[0]} training and {expected[1]} test records (without, with disease) of "
            f"{name}, but {path} gives {counts[0]} and {counts[1]}: FLamby's split is defined for UCI's own "
            "file, in its order; fetch it again.",
            code="TF-208",
        )
    names = [f"{name}-{row}" for row in range(len(labels))]
    source = f"Fed-Heart-Disease records, centre {site.center} ({name})"
    return HeartData(features, labels, tested, names, source=source, synthetic=False, path=path)
