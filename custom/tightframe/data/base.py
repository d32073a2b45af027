"""What a data set is to the rest of Tightframe.

A job *names* a data set and may ask for options (image size); the *site* says where its records
lie and which centre it is. Importable without torch: enrolment checks records and counts labels
in processes that must start fast, so torch is imported only where records are read for training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from tightframe.errors import DataError
from tightframe.phases import Fold

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch.utils.data import Dataset

Progress = Callable[[str], None]
PROGRESS_SECONDS = 5.0
_FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
AnyPath = TypeVar("AnyPath", str, Path)
Item = TypeVar("Item")


class SiloData(Protocol):
    """One silo's records in three folds: train, validation (never trained on), test.

    Three methods are optional: ``distinct_labels``, see ``own_labels``; ``groups``, see
    ``data.patients.record_patients``; ``record_shape(fold)``, so that ``check_form`` need not read one.
    """

    @property
    def source(self) -> str:
        """One line for reports, for example ``synthetic twin of Fed-ISIC2019, centre 3``."""

    @property
    def synthetic(self) -> bool:
        """True for generated records, which are never called real."""

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Labels of a fold in record order, (n,), without reading the records themselves."""

    def check(self, progress: Progress | None = None) -> None:
        """Read every record once.

        Raises:
            DataError: naming the kind of problem, with counts and the first names; nothing is
                lost and nothing has been trained.
        """

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """A map-style torch data set of (float32 tensor of the input shape, int label).

        With ``augment_seed`` the training transforms run, and record i's randomness depends on
        (augment_seed, i) only, so that loader workers and batch order do not change it.
        """


@dataclass(frozen=True)
class DatasetSpec:
    """A registry entry.

    Attributes:
        name: what a job calls it.
        title: how people call it.
        class_names: the classes in label order.
        options: what a job may ask (frozen pydantic model), such as ``image_size``.
        site: what a site's ``local/tightframe.json`` says about its records.
        input_shape: shape of one record under given options.
        open: the records of a configured site.
        twin: the generated stand-in for silo ``centre``; None if the set has none.
        num_centers: natural silos.
        choosing: options that choose which of a silo's records take part. Two jobs that differ in them
            over the same silos would tell the difference, so a site must accept another value than the
            default by name.
        no_patients: why nobody can say whose each record is; empty where the records may say it. A job that
            hides patients is refused for this reason.
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

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)


def with_progress(items: Sequence[Item], progress: Progress | None, told: str) -> Iterator[Item]:
    """The same items, telling now and then how many are done.

    Args:
        items: of a long piece of work.
        progress: gets a line at most every five seconds; None tells nothing.
        told: the line, with ``{done}`` and ``{total}``.
    """
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if progress and time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            progress(told.format(done=done, total=len(items)))


def absolute(path: AnyPath) -> AnyPath:
    """Refuse a path that depends on where a process runs: the engine runs them in folders of its own.

    Raises:
        ValueError: which pydantic, whose validator this is, puts beside the key.
    """
    if not Path(path).is_absolute():
        raise ValueError(f"Expected an absolute path, but got '{path}'")
    return path


SitePath = Annotated[Path, Field(strict=False), AfterValidator(absolute)]
"""A path in a site's configuration."""


def own_labels(data: SiloData) -> NDArray[np.int64]:
    """Labels of the training fold's records, each once, (n,).

    A data set that repeats records in training (oversampling) says so by ``distinct_labels``: what is
    made public of a silo, and the rules of how many records there must be, are about these.
    """
    distinct = getattr(data, "distinct_labels", None)
    labels: NDArray[np.int64] = data.labels("train") if distinct is None else distinct()
    return labels


def check_form(data: SiloData, spec: DatasetSpec, options: BaseModel) -> None:
    """Hold records against what a job's model takes: their shape, and labels of its classes.

    Torch-free, unless an extension's data set does not tell the shape of its records: then the first one of
    each fold is read.

    Args:
        data: of one silo.
        spec: of the data set that the job names.
        options: of the job.

    Raises:
        DataError: TF-212 for another shape or type of value, TF-213 for labels that are none of the classes,
            or not one a record.
    """
    expected = tuple(spec.input_shape(options))
    for fold in _FOLDS:
        where = f"{data.source}, {fold} fold"
        labels = np.asarray(data.labels(fold))
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"Expected one whole number a record as the labels of {where}, but got {labels.dtype} of "
                f"shape {labels.shape}.",
                code="TF-213",
            )
        strange = np.flatnonzero((labels < 0) | (labels >= spec.num_classes))
        if len(strange):
            raise DataError(
                f"Expected labels 0 to {spec.num_classes - 1} ({', '.join(spec.class_names)}) in {where}, "
                f"but record {strange[0]} has {labels[strange[0]]} ({len(strange)} of {len(labels)} are none "
                "of them).",
                code="TF-213",
            )
        if len(labels):
            _check_shape(data, fold, len(labels), expected, where)


def _check_shape(data: SiloData, fold: Fold, count: int, expected: tuple[int, ...], where: str) -> None:
    tell = getattr(data, "record_shape", None)
    told = "float32"
    if tell is not None:
        shape = tuple(tell(fold))
    elif type(data).__module__.startswith("tightframe."):
        return  # ours are made to the data set's own shape
    else:
        records: Any = data.records(fold)
        if len(records) != count:
            raise DataError(
                f"Expected one label a record in {where}, but got {count} for {len(records)}.", code="TF-213"
            )
        first = records[0][0]
        shape, told = tuple(first.shape), str(first.dtype).removeprefix("torch.")
    if shape != expected or told != "float32":
        raise DataError(
            f"Expected each record of {where} as float32 of shape {expected}, which the job's model takes, "
            f"but got {told} of shape {shape}: prepare the records so, or ask the lead for a job with "
            "another shape.",
            code="TF-212",
        )


def class_counts(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Records of each class, (C,) int64."""
    return np.bincount(labels, minlength=num_classes).astype(np.int64)


def count_table(counts: Mapping[str, int]) -> str:
    """``MEL 20, NV 2977, ...`` for messages."""
    return ", ".join(f"{name} {number}" for name, number in counts.items())
