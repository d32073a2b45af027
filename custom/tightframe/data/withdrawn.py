"""Records that a site withdraws from an ended run: its file, and the records that stay. Torch-free.

The file is the site's own (``withdrawn`` in its configuration) and never leaves it. A line names one record,
or all records of a patient at this site; empty lines and lines that begin with ``#`` are ignored::

    record,ISIC_0012345
    patient,4711

Records have the names that their data set gives them (``record_ids``): ISIC's images theirs, eICU's stays
``patienthealthsystemstayid``, heart's the centre and the place among complete records (``cleveland-0``).
Without names, as in arrays, a record is named by fold and place: ``train-0``. Patients are named where the
data set knows their names (``patient_ids``), as arrays with ``patient_FOLD`` do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import FOLDS, Progress, SiloData, class_counts, own_patients
from tightframe.errors import DataError
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset

WRONG = "TF-214"
KINDS = ("record", "patient")
_SHOWN = 5


@dataclass(frozen=True)
class Named:
    """Records and patients that a site's file names.

    Attributes:
        source: of the file, for messages.
    """

    records: frozenset[str] = frozenset()
    patients: frozenset[str] = frozenset()
    source: str = "no file"


def read_file(path: Path | None) -> Named:
    """Read a site's file; without one nothing is withdrawn.

    Raises:
        DataError: TF-214 if it cannot be read, or a line is neither ``record,NAME`` nor ``patient,NAME``.
    """
    if path is None:
        return Named()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Expected to read the withdrawn records of this site in {path}, but got: {error}: correct "
            "`withdrawn` in its configuration, or leave it out if nothing is withdrawn.",
            code=WRONG,
        ) from None
    named: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        kind, _, name = (part.strip() for part in text.partition(","))
        if kind not in KINDS or not name:
            raise DataError(
                f"Expected `record,NAME` or `patient,NAME` in line {number} of {path}, but got another form.",
                code=WRONG,
            )
        named[kind].add(name)
    return Named(frozenset(named["record"]), frozenset(named["patient"]), str(path))


def record_ids(data: SiloData, fold: Fold) -> Sequence[str]:
    """Return the name of each record of a fold, in record order."""
    own = getattr(data, "record_ids", None)
    return own(fold) if own is not None else [f"{fold}-{place}" for place in range(len(data.labels(fold)))]


def find(data: SiloData, named: Named, gone: Collection[str] = ()) -> frozenset[str]:
    """Return the names of the records that a file names.

    Args:
        data: records of the site.
        named: by its file.
        gone: names of records withdrawn before, which may be missing by now.

    Raises:
        DataError: TF-214 for names that the records do not have, or patients that they do not name.
    """
    ids = {fold: np.asarray(record_ids(data, fold), dtype=str) for fold in FOLDS}
    known = {name for names in ids.values() for name in names.tolist()}
    chosen, unknown = set(named.records & known), set(named.records - known - set(gone))
    if named.patients:
        patients = _patients(data, named)
        patient_names = {name for names in patients.values() for name in names.tolist()}
        unknown |= named.patients - patient_names
        wanted = sorted(named.patients)
        chosen |= {name for fold in FOLDS for name in ids[fold][np.isin(patients[fold], wanted)].tolist()}
    if unknown:
        shown = ", ".join(sorted(unknown)[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise DataError(
            f"Expected {named.source} to name records of {data.source}, but {len(unknown)} are unknown "
            f"({shown}): correct the names. Nothing has left this site.",
            code=WRONG,
        )
    return frozenset(chosen)


def patients_of(
    data: SiloData, fold: Fold, names: Collection[str], num_classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count a fold's patients by class: with records of these names, with any, and with others, (C,)."""
    pairs = np.stack([own_patients(data, fold), data.labels(fold)])
    named = np.isin(np.asarray(record_ids(data, fold), dtype=str), sorted(names))
    labels = (np.unique(item, axis=1)[1] for item in (pairs[:, named], pairs, pairs[:, ~named]))
    withdrawn, every, others = (class_counts(item, num_classes) for item in labels)
    return withdrawn, every, others


def _patients(data: SiloData, named: Named) -> Mapping[Fold, NDArray[np.str_]]:
    own = getattr(data, "patient_ids", None)
    patients = None if own is None else {fold: own(fold) for fold in FOLDS}
    if patients is None or any(names is None for names in patients.values()):
        raise DataError(
            f"Expected {named.source} to name records, because {data.source} does not know its patients by "
            "name, but it names patients: name each of their records.",
            code=WRONG,
        )
    return {fold: np.asarray(names, dtype=str) for fold, names in patients.items()}


class Remaining:
    """A silo's records without withdrawn ones; see ``SiloData``. Folds and order do not change.

    Args:
        data: all records.
        without: names of those that are left out.
    """

    def __init__(self, data: SiloData, without: Collection[str]) -> None:
        self._data = data
        names = sorted(without)
        self._places = {
            fold: np.flatnonzero(~np.isin(np.asarray(record_ids(data, fold), dtype=str), names))
            for fold in FOLDS
        }
        if (shape := getattr(data, "record_shape", None)) is not None:
            self.record_shape = shape

    @property
    def source(self) -> str:
        """One line for reports."""
        return self._data.source

    @property
    def synthetic(self) -> bool:
        """Return True if the records are generated."""
        return self._data.synthetic

    def places(self, fold: Fold) -> NDArray[np.int64]:
        """Return the places of a fold's remaining records among all of the fold."""
        return self._places[fold].astype(np.int64)

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return self._data.labels(fold)[self._places[fold]]

    def record_ids(self, fold: Fold) -> Sequence[str]:
        """Return the names of a fold's records, in record order."""
        names: list[str] = np.asarray(record_ids(self._data, fold), dtype=str)[self._places[fold]].tolist()
        return names

    def groups(self, fold: Fold) -> NDArray[Any] | None:
        """Return the patient of each record of a fold, as the data set gives it."""
        return self._given("groups", fold)

    def same_patient(self, fold: Fold) -> NDArray[Any] | None:
        """Return which records of a fold are surely of one patient, as the data set gives it."""
        return self._given("same_patient", fold)

    def _given(self, method: str, fold: Fold) -> NDArray[Any] | None:
        own = getattr(self._data, method, None)
        groups = None if own is None else own(fold)
        return None if groups is None else np.asarray(groups)[self._places[fold]]

    def contents(self) -> Iterable[bytes] | None:
        """Return the content of all records, withdrawn ones too."""
        own = getattr(self._data, "contents", None)
        return None if own is None else own()

    def check(self, progress: Progress | None = None) -> None:
        """Read every record once, withdrawn ones too: they are needed for their sums."""
        self._data.check(progress)

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's remaining records, with the values and augmentation that they have among all."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from torch.utils.data import Subset

        return Subset(self._data.records(fold, augment_seed=augment_seed), self._places[fold].tolist())
