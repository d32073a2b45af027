"""One silo's records of eICU: from a prepared folder, or from the tables themselves. Torch-free at import."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import Progress
from tightframe.data.eicu import EicuOptions, EicuSite, Window, vocabulary_sha256
from tightframe.data.eicu.folds import (
    Folds,
    HospitalSplit,
    Place,
    of_hospitals,
    of_region,
    silo_folds,
    split_hospitals,
)
from tightframe.data.eicu.matrix import (
    MANIFEST,
    StayMatrix,
    aligned,
    matrix_name,
    read_manifest,
    read_matrix,
    read_vocabulary,
    vocabulary_name,
)
from tightframe.data.eicu.tables import TABLES, read_tables
from tightframe.errors import DataError
from tightframe.files import file_sha256
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class EicuData:
    """One silo's stays; see ``SiloData``.

    Args:
        matrix: of all hospitals, or of the silo's.
        folds: the silo's rows.
        source: one line for reports.
        synthetic: whether the stays are generated.
        verify: called first by ``check``; raises if the files differ from what was written.
        patients: patient of each row of the matrix; by default ``matrix.patient``.
        hospitals: the site's own, independent of a job's selection of stays; None for generated stays.
    """

    def __init__(
        self,
        matrix: StayMatrix,
        folds: Folds,
        *,
        source: str,
        synthetic: bool,
        verify: Callable[[], None] | None = None,
        patients: NDArray[np.int64] | None = None,
        hospitals: Collection[int] | None = None,
    ) -> None:
        self._hospitals = hospitals
        self.matrix = matrix
        self.folds = folds
        self.source = source
        self.synthetic = synthetic
        self._verify = verify
        self._patients = matrix.patient.astype(np.int64) if patients is None else patients

    def rows(self, fold: Fold) -> NDArray[np.int64]:
        """Return the rows of the matrix in a fold, in record order."""
        rows: dict[str, NDArray[np.int64]] = {
            "train": self.folds.train,
            "validation": self.folds.validation,
            "test": self.folds.test,
        }
        return rows[fold]

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return self.matrix.label[self.rows(fold)].astype(np.int64)

    def distinct_labels(self) -> NDArray[np.int64]:
        """Return the labels of the training fold's stays without repetitions."""
        return self.matrix.label[np.unique(self.rows("train"))].astype(np.int64)

    def record_ids(self, fold: Fold) -> list[str]:
        """Return ``patienthealthsystemstayid`` of each stay of a fold, in record order."""
        return [str(stay) for stay in self.matrix.stay[self.rows(fold)].tolist()]

    def groups(self, fold: Fold) -> NDArray[np.int64]:
        """Return the patient of each stay of a fold, in record order, (n,); below 0 without `uniquepid`."""
        return self._patients[self.rows(fold)]

    def contents(self) -> Iterable[bytes] | None:
        """Yield number, hospital and outcome of each of the site's stays: a job decides which drugs count."""
        if self._hospitals is None:
            return None
        own = np.flatnonzero(np.isin(self.matrix.hospital, sorted(self._hospitals)))
        columns = np.stack([self.matrix.stay, self.matrix.hospital, self.matrix.label], axis=1)
        return (stay.astype("<i8").tobytes() for stay in columns[own])

    def check(self, progress: Progress | None = None) -> None:
        """Verify the files; their contents were checked when they were opened.

        Raises:
            DataError: TF-206 if a prepared file has changed.
        """
        if self._verify is not None:
            self._verify()
        if progress and self.folds.left_out:
            progress(
                f"left {self.folds.left_out} stays out of the test fold: their patients also have a stay in "
                "a training hospital"
            )

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 (D,) of zeros and ones, and int label; no transforms."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.batch_records import BatchRecords

        return BatchRecords(self.labels(fold), partial(_read, self.matrix, self.rows(fold)))


def _read(matrix: StayMatrix, rows: NDArray[np.int64], indices: Sequence[int]) -> NDArray[np.float32]:
    return matrix.dense(rows[list(indices)].tolist())


def open_site(site: EicuSite, options: EicuOptions) -> EicuData:
    """Open the records of a configured site, with all checks that are possible before training.

    Raises:
        DataError: TF-203 to TF-209 for missing or damaged files, a vocabulary that is not the job's, an
            unknown hospital, or an empty fold.
    """
    matrix, verify = _open_matrix(site, options)
    split = split_hospitals(matrix.sizes(), options.train_hospitals)
    place = _place(site, options, split, matrix)
    folds = silo_folds(matrix.stays, split, place, options)
    return EicuData(
        matrix,
        folds,
        source=f"eICU stays ({options.window}), {_named(site)}",
        synthetic=False,
        verify=verify,
        hospitals=_hospitals(site, matrix),
    )


def _hospitals(site: EicuSite, matrix: StayMatrix) -> Collection[int]:
    if site.hospitals is not None:
        return site.hospitals
    return [hospital for hospital, region in matrix.regions().items() if region == site.region]


def _open_matrix(site: EicuSite, options: EicuOptions) -> tuple[StayMatrix, Callable[[], None] | None]:
    """Return the matrix of the job's window and vocabulary, and a function that verifies its files."""
    root, window = site.root, options.window
    if not root.is_dir():
        raise DataError(
            f"Expected prepared eICU matrices or tables in {root}, but there is no such folder: correct "
            "`root`, and check that this process may read it."
        )
    verify: Callable[[], None] | None = None
    if (root / MANIFEST).is_file():
        matrix = read_matrix(_prepared(root, window))
        verify = partial(_verify, root, window)
        path = site.vocabulary or root / vocabulary_name(window)
        codes = read_vocabulary(path)
    elif any((root / f"{table}{end}").is_file() for table in TABLES for end in (".csv", ".csv.gz")):
        matrix = read_tables(root, (window,)).matrices[window]
        path = site.vocabulary or root
        codes = read_vocabulary(path) if site.vocabulary else tuple(matrix.hicl.tolist())
    else:
        raise DataError(
            f"Expected {MANIFEST} (of prepared matrices) or the tables {', '.join(TABLES)} in {root}, but "
            "found neither: run `tightframe data prepare eicu`, or correct `root`.",
            code="TF-205",
        )
    _check_vocabulary(codes, path, options)
    return aligned(matrix, codes), verify


def _prepared(root: Path, window: Window) -> Path:
    """Return the path of a window's matrix, if the manifest lists it."""
    prepared = sorted(read_manifest(root).windows)
    if window not in prepared:
        raise DataError(
            f"Expected a prepared matrix of the window {window} in {root}, but there is only {prepared}: "
            "prepare the tables for this window as well, or change the job's `window`.",
            code="TF-205",
        )
    return root / matrix_name(window)


def _verify(root: Path, window: Window) -> None:
    """Compare a window's files with the manifest."""
    for name, digest in read_manifest(root).windows[window].outputs.items():
        if not (root / name).is_file() or file_sha256(root / name) != digest:
            raise DataError(
                f"Expected {root / name} as it was prepared (SHA-256 {digest}), but it is missing or has "
                "changed: prepare the tables again with `tightframe data prepare eicu`.",
                code="TF-206",
            )


def _check_vocabulary(codes: tuple[int, ...], path: Path, options: EicuOptions) -> None:
    """Refuse a vocabulary that is not the job's: a column must be the same drug at all silos."""
    digest = vocabulary_sha256(codes)
    if len(codes) != options.drugs:
        raise DataError(
            f"Expected {options.drugs} drugs, the job's `drugs`, but the vocabulary of {path} has "
            f"{len(codes)} (SHA-256 {digest}): set `vocabulary` in the site's entry to the federation's "
            f"vocabulary, or export the job with `drugs` {len(codes)}.",
            code="TF-209",
        )
    if options.vocabulary not in (None, digest):
        raise DataError(
            f"Expected the drug vocabulary to have the SHA-256 {options.vocabulary} of the job, but that of "
            f"{path} has {digest}: set `vocabulary` in the site's entry to the federation's vocabulary.",
            code="TF-209",
        )


def _place(site: EicuSite, options: EicuOptions, split: HospitalSplit, matrix: StayMatrix) -> Place:
    """Return the hospitals of the site, if its entry fits the job's kind of silo."""
    if options.silos == "regions" and site.region is not None:
        return of_region(split, matrix.regions(), site.region)
    if options.silos == "hospitals" and site.hospitals is not None:
        return of_hospitals(split, site.hospitals)
    wanted = "region" if options.silos == "regions" else "hospitals"
    raise DataError(
        f"Expected `{wanted}` in the site's entry for eicu, because the job's silos are {options.silos}, but "
        f"got {_named(site)}: correct the entry, or the job's `silos`.",
        code="TF-208",
    )


def _named(site: EicuSite) -> str:
    if site.region is not None:
        return f"region {site.region}"
    hospitals = site.hospitals or ()
    return f"hospital{'s' if len(hospitals) > 1 else ''} {', '.join(map(str, hospitals))}"
