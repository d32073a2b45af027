"""The interface between data sets and the rest of Tightframe.

A job *names* a data set and may set options (image size); the *site* names the location of its
records and its centre. Importable without torch: enrolment checks records and counts labels in
processes that must start fast, so torch is imported only where records are read for training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from tightframe.data.forms import RecordForm
from tightframe.errors import DataError
from tightframe.phases import UNKNOWN, Fold

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch.utils.data import Dataset

Progress = Callable[[str], None]
PROGRESS_SECONDS = 5.0
FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
AnyPath = TypeVar("AnyPath", str, Path)
Item = TypeVar("Item")


class SiloData(Protocol):
    """One silo's records in three folds: train, validation (never trained on), test.

    Six methods are optional: ``distinct_labels``, see ``own_labels``; ``groups``, see
    ``record_patients``; ``record_shape(fold)``, so that ``check_form`` need not read one;
    ``record_ids(fold)`` and ``patient_ids(fold)``, the names by which the site knows each record and its
    patient (``data.withdrawn``); ``contents()``, the bytes of each of the site's own records, independent of
    any job, or None for generated ones (``data.content``).
    """

    @property
    def source(self) -> str:
        """One line for reports, for example ``synthetic twin of Fed-ISIC2019, centre 3``."""

    @property
    def synthetic(self) -> bool:
        """True for generated records; reports never present them as real."""

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, without reading the records themselves.

        Classes (n,); or of a set with ``DatasetSpec.multi_label`` findings (n, K): 1, 0 or ``UNKNOWN``.
        """

    def check(self, progress: Progress | None = None) -> None:
        """Read every record once, before anything trains.

        Raises:
            DataError: naming the kind of problem, with counts and the first names.
        """

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return a map-style torch data set of (float32 tensor of the input shape, int label).

        With ``augment_seed`` the training transforms are applied. The randomness of record i depends on
        (augment_seed, i) only, so that loader workers and batch order do not change it.
        """


@dataclass(frozen=True)
class DatasetSpec:
    """A registry entry.

    Attributes:
        class_names: the classes in label order.
        options: pydantic model (frozen) of a job's options, such as ``image_size``.
        site: pydantic model (frozen) of a site's entry in ``local/tightframe.json``.
        input_shape: options -> shape of one record.
        open: (site entry, options) -> the records of a configured site.
        twin: (index of the silo in the roster, options) -> its generated twin; None if the set has none.
        num_centers: number of natural silos.
        choosing: options that select which of a silo's records take part. Two jobs over the same silos that
            differ in them would disclose the difference, so a site must accept any other value than the
            default by name.
        no_patients: why the patient of a record cannot be known; empty if the records may name it. A job that
            protects patients is refused for this reason.
        form: options -> conversion of a picture or a row of a table to a record, for use of a trained model;
            None without one.
        augments: whether ``records`` differ from one ``augment_seed`` to another.
        columns: options -> numbers of each column of a table in a record's inputs; None where each is one.
        multi_label: whether a record has several findings, named by ``class_names``, in place of one class.
        by_options: (this, options) -> this with the title, classes and ``no_patients`` of a job's options;
            None if they are the same for all jobs. Use ``of``.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    options: type[BaseModel]
    site: type[BaseModel]
    input_shape: Callable[[Any], tuple[int, ...]]
    open: Callable[[Any, Any], SiloData]
    twin: Callable[[int, Any], SiloData] | None
    num_centers: int
    choosing: tuple[str, ...] = ()
    no_patients: str = ""
    form: Callable[[Any], RecordForm] | None = None
    augments: bool = False
    columns: Callable[[Any], tuple[int, ...]] | None = None
    multi_label: bool = False
    by_options: Callable[[DatasetSpec, Any], DatasetSpec] | None = None

    def of(self, options: Any) -> DatasetSpec:
        """Return this data set with a job's validated options applied."""
        return self if self.by_options is None else self.by_options(self, options)

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)


def with_progress(items: Sequence[Item], progress: Progress | None, line: str) -> Iterator[Item]:
    """Yield the items and report progress from time to time.

    Args:
        items: the items of a long piece of work.
        progress: receives a line at most every five seconds; None reports nothing.
        line: the format of the line, with ``{done}`` and ``{total}``.
    """
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if progress and time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            progress(line.format(done=done, total=len(items)))


def absolute(path: AnyPath) -> AnyPath:
    """Refuse a relative path, because the engine runs processes in folders of its own.

    Raises:
        ValueError: for pydantic, which reports it with the key.
    """
    if not Path(path).is_absolute():
        raise ValueError(f"Expected an absolute path, but got '{path}'")
    return path


SitePath = Annotated[Path, Field(strict=False), AfterValidator(absolute)]
"""A path in a site's configuration."""


def own_labels(data: SiloData) -> NDArray[np.int64]:
    """Return the labels of the training fold's distinct records, (n,).

    A data set that repeats records in training (oversampling) has a method ``distinct_labels``. Public
    counts of a silo, and the rules for the least number of records, refer to distinct records.
    """
    distinct = getattr(data, "distinct_labels", None)
    labels: NDArray[np.int64] = data.labels("train") if distinct is None else distinct()
    return labels


def distinct_records(data: SiloData) -> NDArray[np.int64]:
    """Return a number from 0 for each record of the training fold, (n,): copies have the same."""
    count, ids = len(data.labels("train")), getattr(data, "record_ids", None)
    if ids is None or len(own_labels(data)) == count:
        return np.arange(count)
    return np.unique(np.asarray(ids("train")), return_inverse=True)[1].astype(np.int64)


def check_form(data: SiloData, spec: DatasetSpec, options: BaseModel) -> None:
    """Check that the shape and the labels of the records fit a job's model.

    Torch-free, unless an extension's data set has no ``record_shape``: then the first record of each fold is
    read.

    Args:
        spec: of the data set that the job names.

    Raises:
        DataError: TF-212 for another shape or type of value, TF-213 for labels that are not among the
            classes, or not one for each record.
    """
    expected = tuple(spec.input_shape(options))
    for fold in FOLDS:
        where = f"{data.source}, {fold} fold"
        labels = np.asarray(data.labels(fold))
        label_shape = (spec.num_classes,) if spec.multi_label else ()
        if labels.shape[1:] != label_shape or not labels.ndim or not np.issubdtype(labels.dtype, np.integer):
            wanted = f"{spec.num_classes} integers" if spec.multi_label else "one integer label"
            raise DataError(
                f"Expected {wanted} for each record of {where}, but got {labels.dtype} of shape "
                f"{labels.shape}.",
                code="TF-213",
            )
        if spec.multi_label:
            if not np.isin(labels, (0, 1, UNKNOWN)).all():
                raise DataError(
                    f"Expected findings of 1, 0 or {UNKNOWN} (unknown) in {where}, but got others.",
                    code="TF-213",
                )
            if len(labels):
                _check_shape(data, fold, len(labels), expected, where)
            continue
        invalid = np.flatnonzero((labels < 0) | (labels >= spec.num_classes))
        if len(invalid):
            raise DataError(
                f"Expected labels 0 to {spec.num_classes - 1} ({', '.join(spec.class_names)}) in {where}, "
                f"but record {invalid[0]} has {labels[invalid[0]]} ({len(invalid)} of {len(labels)} labels "
                "are invalid).",
                code="TF-213",
            )
        if len(labels):
            _check_shape(data, fold, len(labels), expected, where)


def _check_shape(data: SiloData, fold: Fold, count: int, expected: tuple[int, ...], where: str) -> None:
    record_shape = getattr(data, "record_shape", None)
    dtype = "float32"
    if record_shape is not None:
        shape = tuple(record_shape(fold))
    elif type(data).__module__.startswith("tightframe."):
        return  # our own data sets always produce the spec's shape
    else:
        records: Any = data.records(fold)
        if len(records) != count:
            raise DataError(
                f"Expected one label for each record in {where}, but got {count} for {len(records)}.",
                code="TF-213",
            )
        first = records[0][0]
        shape, dtype = tuple(first.shape), str(first.dtype).removeprefix("torch.")
    if shape != expected or dtype != "float32":
        raise DataError(
            f"Expected each record of {where} as float32 of shape {expected}, which the job's model takes, "
            f"but got {dtype} of shape {shape}: prepare the records in that shape, or ask the lead for a job "
            "with another one.",
            code="TF-212",
        )


def finding_counts(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the records with each finding and those without it, (K, 2) int64.

    Both are cells: where nearly all records have a finding, the few without it are as identifying as the few
    with a rare one.

    Args:
        labels: 1 where a record has a finding, 0 where it has not, (n, K).
    """
    return np.stack([(labels == there).sum(axis=0, dtype=np.int64) for there in (1, 0)], axis=1)


def unknown_counts(labels: NDArray[np.int64], names: Sequence[str]) -> dict[str, int]:
    """Return finding -> number of records in which it is unknown; for classes, (n,), an empty mapping."""
    if labels.ndim != 2:
        return {}
    return dict(zip(names, (labels == UNKNOWN).sum(axis=0).tolist(), strict=True))


def class_counts(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Count the records of each class, or with each finding, (C,) int64."""
    if labels.ndim == 2:
        return finding_counts(labels)[:, 0]
    return np.bincount(labels, minlength=num_classes).astype(np.int64)


def count_table(counts: Mapping[str, int]) -> str:
    """Format counts for messages: ``MEL 20, NV 2977, ...``."""
    return ", ".join(f"{name} {number}" for name, number in counts.items())


def record_patients(data: SiloData, fold: Fold) -> NDArray[np.int64]:
    """Return the patient of each record of a fold, in record order, (n,) int64, for a job that protects them.

    Unknown patients are refused and not guessed: if each record counted as a patient of its own, the
    guarantee for patients would be that for single records only.

    A data set whose source knows patients has a method ``groups(fold)``, which returns them as integers
    (n,), or None. The numbers have no meaning outside the silo, and are the same in all folds. A negative
    number means that the patient is unknown; records with the same negative number are not one patient.

    Raises:
        DataError: TF-210 if the patient of any record is unknown; TF-206 if ``groups`` does not return one
            integer for each record.
    """
    patients = _given(data, fold, "groups")
    if unknown := int((patients < 0).sum()):
        reason = f"{unknown} of the {len(patients)} records of its {fold} fold have none (below 0)"
        raise patients_unknown(data.source, reason)
    return patients


def _given(data: SiloData, fold: Fold, method: str) -> NDArray[np.int64]:
    groups = getattr(data, method, None)
    given = None if groups is None else groups(fold)
    if given is None:
        raise patients_unknown(data.source, "its source does not name patients")
    patients, count = np.asarray(given), len(data.labels(fold))
    if patients.shape != (count,) or not np.issubdtype(patients.dtype, np.integer):
        raise DataError(
            f"Expected `{method}` of {data.source} to give one integer for each record of the {fold} fold, "
            f"but got {patients.dtype} of shape {patients.shape} for {count} records: correct the data set.",
            code="TF-206",
        )
    return patients.astype(np.int64)


def own_patients(data: SiloData, fold: Fold = "train") -> NDArray[np.int64]:
    """Return a number from 0 for the patient of each record of a fold, (n,).

    A record of an unknown patient has its own number, shared by all its copies, see ``own_labels``: otherwise
    one such stay made each of another patient's stays, and each copy of a repeated one, a patient.

    A data set that does not know patients, but which records are surely of one, has a method
    ``same_patient(fold)`` in the form of ``groups``. It serves minimum counts only: two of its groups may be
    one patient, whom noise for groups would not protect (``record_patients``).
    """
    records = distinct_records(data) if fold == "train" else np.arange(len(data.labels(fold)))
    owners = np.full(len(records), -1)
    for method in ("same_patient", "groups"):
        if hasattr(data, method):
            with suppress(DataError):
                owners = _given(data, fold, method)
    unknown = owners < 0
    owners[unknown] = owners.max(initial=-1) + 1 + records[unknown]
    return np.unique(owners, return_inverse=True)[1].astype(np.int64)


def class_patients(
    data: SiloData, labels: NDArray[np.int64], num_classes: int, fold: Fold = "train"
) -> NDArray[np.int64]:
    """Count patients with a fold's records of each class, or in the fewer of a finding's cells, (C,) int64.

    Args:
        labels: of these records, as the silo reports them.
    """
    owners = own_patients(data, fold)
    if labels.ndim == 1:
        return class_counts(np.unique(np.stack([owners, labels]), axis=1)[1], num_classes)
    cells = [[len(np.unique(owners[values == there])) for there in (1, 0)] for values in labels.T]
    return np.array(cells, dtype=np.int64).min(axis=1)


def patients_unknown(source: str, reason: str) -> DataError:
    """Return the error for records whose patients are unknown."""
    return DataError(
        f"Expected to know the patient of each record of {source}, because the job protects patients, but "
        f'{reason}: use `"neighbours": "record"` in the job\'s `privacy`, or records whose patients are '
        "known.",
        code="TF-210",
    )


def in_steps(labels: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Return findings whose number of unknown values is a multiple of ``step``: known ones become unknown.

    The number of unknown values follows from exact counts: all records less the known ones. So a silo counts
    them in steps, because a cell that is too small must not be disclosed. Known values that count as unknown
    are spread evenly over the records, so that no kind of record is lost.

    Args:
        labels: 1, 0 or ``UNKNOWN``, (n, K).
        step: least disclosed number of unknown values of a finding.

    >>> in_steps(np.array([[1, 1], [0, 1], [1, -1], [0, 1]]), 2).tolist()
    [[1, 1], [0, -1], [1, -1], [0, 1]]
    """
    stepped = labels.copy()
    for place in range(stepped.shape[1]):
        known = np.flatnonzero(stepped[:, place] != UNKNOWN)
        more = min(-(len(stepped) - len(known)) % step, len(known))
        stepped[known[(2 * np.arange(more) + 1) * len(known) // max(1, 2 * more)], place] = UNKNOWN
    return stepped


def too_few(labels: NDArray[np.int64], owners: NDArray[np.int64], least: int) -> list[int]:
    """Return the places of findings whose values are known of fewer than ``least`` patients.

    Args:
        labels: (n, K).
        owners: number of each record's patient, (n,).

    >>> findings = np.array([[1, -1], [0, 1], [0, 0]])
    >>> too_few(findings, np.array([0, 1, 2]), 3), too_few(findings, np.array([0, 1, 1]), 2)
    ([1], [1])
    """
    known = (labels != UNKNOWN).T
    return [place for place, of in enumerate(known) if len(np.unique(owners[of])) < least]
