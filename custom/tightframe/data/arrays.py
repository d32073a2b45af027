"""Records in memory as arrays, the usual case for a data set of one's own.

Torch-free until ``records`` is called.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import FOLDS, Progress
from tightframe.data.columns import Row
from tightframe.data.looks import Pictured, channels_last, waves_of
from tightframe.data.unpacked import check_zip
from tightframe.errors import DataError
from tightframe.phases import UNKNOWN, Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class ArrayData:
    """One silo's records as arrays; see ``SiloData``. No training transforms.

    Args:
        folds: values (n, ...) and labels (n,) of each of the three folds.
        source: one line for reports.
        num_classes: C; labels are 0..C-1.
        findings: labels are findings (n, C) in place of classes: 1, 0 or ``UNKNOWN``.
        synthetic: whether the records are generated.
        patients: patient of each record, integers (n,) for each fold, the same for a patient in all folds and
            negative if unknown; None if no patient is known.
    """

    def __init__(
        self,
        folds: Mapping[Fold, tuple[NDArray[Any], NDArray[Any]]],
        *,
        source: str,
        num_classes: int,
        findings: bool = False,
        synthetic: bool = False,
        patients: Mapping[Fold, NDArray[Any]] | None = None,
    ) -> None:
        self.source = source
        self.synthetic = synthetic
        self._num_classes = num_classes
        self._each = (num_classes,) if findings else ()
        self._folds = {fold: folds[fold] for fold in FOLDS}
        self._patients = None if patients is None else {fold: patients[fold] for fold in FOLDS}

    @classmethod
    def read(cls, path: Path, *, source: str, num_classes: int) -> ArrayData:
        """Read a NumPy file (``.npz``) with ``x_FOLD`` (n, ...) and ``y_FOLD`` (n,) for each fold.

        ``patient_FOLD`` (n,), for all folds or none, is the patient of each record.

        Raises:
            DataError: TF-205 if there is no such file, TF-206 if it lacks an array or cannot be read.
        """
        try:
            check_zip(path)
            with np.load(path, allow_pickle=False) as stored:
                folds = {fold: (stored[f"x_{fold}"], stored[f"y_{fold}"]) for fold in FOLDS}
                has_patients = any(f"patient_{fold}" in stored for fold in FOLDS)
                patients = {fold: stored[f"patient_{fold}"] for fold in FOLDS} if has_patients else None
        except FileNotFoundError:
            raise DataError(f"Expected {source} at {path}, but there is no file.", code="TF-205") from None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            MemoryError,
            zipfile.BadZipFile,
        ) as error:
            raise DataError(
                f"Expected {path} to be a NumPy file with x_FOLD and y_FOLD for each of {list(FOLDS)}, and "
                f"patient_FOLD for all of them or none, but got {type(error).__name__}: write it again with "
                "numpy.savez.",
                code="TF-206",
            ) from None
        return cls(folds, source=source, num_classes=num_classes, patients=patients)

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return self._folds[fold][1].astype(np.int64)

    def record_shape(self, fold: Fold) -> tuple[int, ...]:
        """Return the shape of one record of a fold."""
        return tuple(self._folds[fold][0].shape[1:])

    def groups(self, fold: Fold) -> NDArray[Any] | None:
        """Return the patient of each record of a fold, (n,), as given; None if patients are not known."""
        # Not cast to integers here: 1.2 and 1.7 would become one patient before they are checked.
        return None if self._patients is None else self._patients[fold]

    def patient_ids(self, fold: Fold) -> list[str] | None:
        """Return the patient of each record of a fold as text; None if patients are not known."""
        return None if self._patients is None else [str(item) for item in self._patients[fold].tolist()]

    def contents(self) -> Iterator[bytes]:
        """Yield the values and label of each record."""
        for values, labels in self._folds.values():
            for value, label in zip(values, labels, strict=False):
                content = value.astype("<f4").tobytes() + label.astype("<i8").tobytes()
                rows = values.ndim == 2
                if rows:
                    yield Row.of(content, [*value.tolist(), *label.ravel().tolist()])
                else:
                    yield Pictured.of(content, waves_of(channels_last(value)))

    def check(self, progress: Progress | None = None) -> None:
        """Check every value and label.

        Raises:
            DataError: TF-206 for lengths that differ and values that are not finite numbers, TF-207 for
                unknown classes, TF-208 for a training or test fold without records.
        """
        for fold, (values, labels) in self._folds.items():
            if values.ndim < 1 or labels.shape != (len(values), *self._each):
                shapes = f"{labels.shape} (y_{fold}) for {values.shape} (x_{fold})"
                raise self._error(fold, f"one label for each record, but got {shapes}", "TF-206")
            if not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
                raise self._error(fold, f"numbers, but x_{fold} is {values.dtype}", "TF-206")
            finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
            if not finite.all():
                first = f"finite numbers, but record {np.argmin(finite)} of x_{fold} has others"
                raise self._error(fold, f"{first} ({np.count_nonzero(~finite)} records)", "TF-206")
            if not np.issubdtype(labels.dtype, np.integer):
                raise self._error(fold, f"integer labels, but y_{fold} is {labels.dtype}", "TF-207")
            least, most = (UNKNOWN, 1) if self._each else (0, self._num_classes - 1)
            wrong = (labels < least) | (labels > most)
            invalid = np.flatnonzero(wrong.any(axis=1) if self._each else wrong)
            if len(invalid):
                first = f"labels {least}..{most}, but record {invalid[0]} of y_{fold} has"
                raise self._error(fold, f"{first} {labels[invalid[0]]} ({len(invalid)} records)", "TF-207")
            self._check_patients(fold, len(labels))
            if fold != "validation" and not len(labels):
                raise self._error(fold, "records, but got none", "TF-208")

    def _check_patients(self, fold: Fold, count: int) -> None:
        if self._patients is None:
            return
        patients = self._patients[fold]
        if patients.shape != (count,) or not np.issubdtype(patients.dtype, np.integer):
            raise self._error(
                fold,
                f"one integer for each record as its patient, but got {patients.dtype} of shape "
                f"{patients.shape} for {count}",
                "TF-206",
            )

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 of the values' shape, and int label."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.batch_records import BatchRecords

        return BatchRecords(self.labels(fold), partial(_read, self._folds[fold][0]))

    def _error(self, fold: Fold, expected: str, code: str) -> DataError:
        return DataError(f"Expected {self.source} in the {fold} fold to have {expected}.", code=code)


def _read(values: NDArray[Any], indices: Sequence[int]) -> NDArray[np.float32]:
    chosen: NDArray[np.float32] = values[list(indices)].astype(np.float32)
    return chosen
