"""One silo's records of a table, checked against the contract; see ``SiloData``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import FOLDS, Progress
from tightframe.data.contract import Contract
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.encoding import Encoded, Finding, check_mapping, encode, rows_in_words
from tightframe.data.table.sources.rows import read, row_contents
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset

SALT = "tightframe-fold-v1"


class TableData:
    """Records in memory; see ``SiloData``.

    Args:
        features: float32 (n, D).
        labels: int64, classes (n,) or findings (n, K).
        folds: index of each record's fold in ``FOLDS``, (n,).
        patients: of each record; None if unknown.
        source: one line for reports.
        synthetic: whether the records are generated.
        aside: description of the rows left out.
        missing: True where a record has no value of a column, (n, K); None if every one has.
        survival: as of ``Encoded``, (n, 2).
        contents: returns ``contents()``; None of generated records.
    """

    def __init__(
        self,
        features: NDArray[np.float32],
        labels: NDArray[np.int64],
        folds: NDArray[np.int64],
        records: list[str],
        patients: list[str] | None,
        *,
        source: str,
        synthetic: bool = False,
        aside: Sequence[Finding] = (),
        missing: NDArray[np.bool_] | None = None,
        survival: NDArray[np.float64] | None = None,
        contents: Callable[[], Iterable[bytes]] | None = None,
    ) -> None:
        self.survival = survival
        self._contents = contents
        self.source = source
        self.synthetic = synthetic
        self.aside = tuple(aside)
        self._features = features
        self._labels = labels
        self._records = records
        self._patients = patients
        self._missing = missing
        self._numbers = None if patients is None else np.unique(patients, return_inverse=True)[1]
        self._rows: dict[Fold, NDArray[np.int64]] = {
            fold: np.flatnonzero(folds == place) for place, fold in enumerate(FOLDS)
        }

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,), or findings, (n, K)."""
        return self._labels[self._rows[fold]]

    def features(self, fold: Fold) -> NDArray[np.float32]:
        """Return the values of a fold's records, (n, D)."""
        return self._features[self._rows[fold]]

    def everything(self) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return values (n, D), labels (n,) and missing values (n, K) of the records of all folds."""
        return self._features, self._labels, self._missing

    def named(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the names of all records, and a number for each one's patient: a unique one if unknown."""
        numbers = np.arange(len(self._records)) if self._numbers is None else self._numbers
        return self._records, numbers

    def record_shape(self, fold: Fold) -> tuple[int, ...]:
        """Return the shape of one record."""
        return tuple(self._features.shape[1:])

    def record_ids(self, fold: Fold) -> list[str]:
        """Return the names of a fold's records; without a column for them, a hash of their values."""
        return [self._records[row] for row in self._rows[fold]]

    def patient_ids(self, fold: Fold) -> list[str] | None:
        """Return the patient of each record of a fold; None if the contract names none."""
        return None if self._patients is None else [self._patients[row] for row in self._rows[fold]]

    def groups(self, fold: Fold) -> NDArray[Any] | None:
        """Return a number for the patient of each record of a fold, (n,); None if they are unknown."""
        return None if self._numbers is None else self._numbers[self._rows[fold]]

    def contents(self) -> Iterable[bytes] | None:
        """Read the site's own rows, or picture files, once more; None of generated records."""
        return None if self._contents is None else self._contents()

    def check(self, progress: Progress | None = None) -> None:
        """Report the rows set aside when the table was opened, which also checked it."""
        for finding in self.aside:
            if progress is not None:
                progress(f"set aside: {finding}")

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 (D,), and int label or findings (K,); no transforms."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.batch_records import BatchRecords

        return BatchRecords(self.labels(fold), partial(_read, self.features(fold)))


def _read(features: NDArray[np.float32], indices: Sequence[int]) -> NDArray[np.float32]:
    chosen: NDArray[np.float32] = features[list(indices)]
    return chosen


def open_site(site: TableSite, options: TableOptions) -> TableData:
    """Open the records of a configured site.

    Raises:
        DataError: as ``read`` if the table cannot be read, TF-215 if records break the contract and the
            site refuses them, TF-216 for a patient in two folds, TF-208 for an empty fold, TF-218 if the
            site's entry does not fit the contract.
    """
    contract = options.contract
    check_mapping(contract, site)
    encoded = encode(read(contract, site), contract, site)
    refuse_broken(encoded, site)
    return divided(encoded, contract, partial(TableData, contents=partial(row_contents, site)))


def refuse_broken(encoded: Encoded, site: TableSite) -> None:
    """Refuse rows that break the contract, unless the site sets them aside.

    Raises:
        DataError: TF-215, listing every finding.
    """
    if encoded.findings and site.invalid == "refuse":
        listed = "".join(f"\n  - {finding}" for finding in encoded.findings)
        raise DataError(
            f"Expected every row of {encoded.where} to keep the job's contract, but{listed}\nCorrect rows, "
            "map codes and units in the site's entry, or leave such rows out (`invalid`: `set_aside`).",
            code="TF-215",
        )


def divided(
    encoded: Encoded,
    contract: Contract,
    make: Callable[..., TableData] | None = None,
    *,
    in_folds: bool = True,
) -> TableData:
    """Return the rows that keep the contract, in folds.

    Args:
        make: constructor of the result; ``TableData`` by default.
        in_folds: False to leave all in the training fold, where folds do not matter.

    Raises:
        DataError: TF-216, TF-208.
    """
    kept = np.flatnonzero(~encoded.broken)
    features, labels = encoded.features[kept], encoded.labels[kept]
    patients = None if encoded.patients is None else [encoded.patients[row] for row in kept]
    contents = content_names(features, labels)
    records = _unique(contents) if encoded.records is None else [encoded.records[row] for row in kept]
    keys = patients or (contents if encoded.records is None else records)
    if not in_folds:
        folds = np.zeros(len(kept), dtype=np.int64)
    elif encoded.folds is None:
        folds = np.array([fold_of(key, contract.shares) for key in keys], dtype=np.int64)
    else:
        folds = encoded.folds[kept]
        if patients is not None:
            _check_patients(patients, folds, encoded.numbers[kept], encoded.where)
        if contract.fold is not None and contract.fold.validation is not None:
            folds = _with_validation(folds, labels, keys, contract.fold.validation, encoded.where)
    if in_folds and not len(encoded.numbers) and not encoded.findings:
        raise DataError(
            f"Expected {encoded.where} to have records of the train fold, but it has a header and no rows.",
            code="TF-208",
        )
    for place, fold in enumerate(FOLDS):
        if in_folds and fold != "validation" and not np.any(folds == place):
            aside = f" ({len(encoded.findings)} rules set rows aside)" if encoded.findings else ""
            raise DataError(
                f"Expected {encoded.where} to have records of the {fold} fold, but none of its {len(kept)} "
                f"records is{aside}: it takes more records, or a `fold` column.",
                code="TF-208",
            )
    source = f"{contract.title}, {encoded.where}"
    hold = make or TableData
    return hold(
        features,
        labels,
        folds,
        records,
        patients,
        source=source,
        aside=encoded.findings,
        missing=encoded.missing[kept],
        survival=None if encoded.survival is None else encoded.survival[kept],
    )


def fold_of(key: str, shares: Sequence[float]) -> int:
    """Return the index in ``FOLDS`` of a patient, by a hash that is the same at every silo and in every run.

    ``h / 2^64`` with the first eight bytes h of SHA-256 of the salt and the key is compared with the shares.

    >>> [fold_of(str(patient), (0.7, 0.15, 0.15)) for patient in range(8)]
    [0, 0, 0, 2, 0, 0, 0, 1]
    """
    digest = hashlib.sha256(f"{SALT}/{key}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return 0 if share < shares[0] else 1 if share < shares[0] + shares[1] else 2


def content_names(features: NDArray[np.float32], labels: NDArray[np.int64]) -> list[str]:
    """Return a name for each record from its values and label: the same for equal values everywhere."""
    return [
        hashlib.sha256(row.astype("<f4").tobytes() + label.astype("<u4").tobytes()).hexdigest()[:24]
        for row, label in zip(features, labels, strict=True)
    ]


def _unique(names: list[str]) -> list[str]:
    """Return unique names: further records of the same values get a number."""
    uses: dict[str, int] = {}
    unique = []
    for name in names:
        uses[name] = uses.get(name, 0) + 1
        unique.append(name if uses[name] == 1 else f"{name}-{uses[name]}")
    return unique


def _with_validation(
    folds: NDArray[np.int64], labels: NDArray[np.int64], keys: Sequence[str], share: float, where: str
) -> NDArray[np.int64]:
    if np.any(folds == 1):
        raise DataError(
            f"Expected {where} to have no validation fold, because the contract takes it from the training "
            "fold (`fold.validation`), but it has one: ask the lead for a contract without that share.",
            code="TF-218",
        )
    train = np.flatnonzero(folds == 0)
    # Records with several findings are stratified by their number of findings: there are too many
    # combinations.
    strata = labels[train] if labels.ndim == 1 else (labels[train] == 1).sum(axis=1)
    held_out = validation_mask(strata, [keys[int(row)] for row in train], share)
    divided_folds = folds.copy()
    divided_folds[train[held_out]] = 1
    return divided_folds


def _check_patients(
    patients: Sequence[str], folds: NDArray[np.int64], numbers: NDArray[np.int64], where: str
) -> None:
    first: dict[str, int] = {}
    wrong = [
        int(number)
        for patient, fold, number in zip(patients, folds.tolist(), numbers, strict=True)
        if first.setdefault(patient, fold) != fold
    ]
    if wrong:
        raise DataError(
            f"Expected all records of a patient in one fold of {where}, but {rows_in_words(wrong)} are in "
            "another one than an earlier record of their patient: a model would be tested on patients that "
            "it knows. Correct the fold column.",
            code="TF-216",
        )
