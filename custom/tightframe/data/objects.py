"""Records that a caller passes as objects: arrays or a torch data set for each silo.

They are not a registered data set: only the process that has them can run such a job. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS, DatasetSpec, SiloData
from tightframe.data.contract import SHARES
from tightframe.errors import DataError
from tightframe.options import StrictModel
from tightframe.phases import UNKNOWN, Fold

Arrays = tuple[NDArray[np.float32], NDArray[Any]]


def is_opened(silo: Any) -> bool:
    """Check whether a silo's records are opened ones (``SiloData``) rather than arrays or a data set."""
    return all(callable(getattr(silo, name, None)) for name in ("labels", "check", "records"))


def from_objects(
    silos: Mapping[str, Any],
    name: str,
    *,
    class_names: Sequence[str] | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> tuple[DatasetSpec, dict[str, SiloData]]:
    """Make a data set of the records that a caller passes for each silo.

    Args:
        silos: name -> ``(X, y)`` with values (n, ...) and labels (n,), or findings (n, K); or a map-style
            torch data set of (record, label), whose items are read once; or a mapping of the folds ``train``,
            ``test`` and, if wanted, ``validation`` to one of these. Anything but a mapping is split 70:15:15
            by a hash of each record's values and label, the same at every silo and in every run.
        name: of the data set in the job.
        class_names: in label order; by default the numbers of the labels that silos have.
        input_shape: of one record; by default that of the first silo.

    Raises:
        DataError: TF-206 for values that are not finite as float32, TF-208 for a training or test fold
            without records, TF-212 for values of another kind or shape, TF-213 for labels that do not fit.
    """
    by_site = {site: _folds(records, site) for site, records in sorted(silos.items())}
    shape, whose = input_shape, "the data set"
    for site, folds in by_site.items():
        for fold, (values, _) in folds.items():
            if shape is None:
                shape, whose = values.shape[1:], site
            if values.shape[1:] != shape:
                raise DataError(
                    f"Expected records of shape {shape}, as {whose} has them, in the {fold} fold of {site}, "
                    f"but got {values.shape[1:]}: all silos train one model, so bring them into one shape.",
                    code="TF-212",
                )
    several = _findings(by_site)
    if class_names is not None:
        classes = tuple(class_names)
    else:
        classes = _numbered(by_site) if several is None else tuple(map(str, range(several)))
    if several is None:
        _check_labels(by_site, len(classes))
    elif several != len(classes):
        raise DataError(
            f"Expected {len(classes)} findings of each record, as there are names, but got {several}.",
            code="TF-213",
        )
    opened: dict[str, SiloData] = {}
    for site, folds in by_site.items():
        data = ArrayData(
            {fold: (values, labels.astype(np.int64)) for fold, (values, labels) in folds.items()},
            source=f"records of {site}, handed over as objects",
            num_classes=len(classes),
            findings=several is not None,
        )
        data.check()
        opened[site] = data
    record_shape = shape or ()

    def nowhere(*_: Any) -> SiloData:
        raise DataError("Expected records handed over in the process that has them.", code="TF-203")

    spec = DatasetSpec(
        name=name,
        title="records handed over as objects of the process (no registered data set)",
        class_names=classes,
        options=StrictModel,
        site=StrictModel,
        input_shape=lambda options: record_shape,
        open=nowhere,
        twin=None,
        num_centers=len(opened),
        multi_label=several is not None,
        no_patients="records handed over as objects do not name them",
    )
    return spec, opened


def _findings(silos: Mapping[str, Mapping[Fold, Arrays]]) -> int | None:
    """Return the number of findings of each record; None where each has one class.

    Raises:
        DataError: TF-213 if silos differ in it.
    """
    shapes = {labels.shape[1:]: site for site, folds in silos.items() for _, labels in folds.values()}
    if len(shapes) > 1:
        raise DataError(
            f"Expected labels of one form at all silos, but {' and '.join(sorted(set(shapes.values())))} "
            "have other numbers of findings for a record than other folds or silos.",
            code="TF-213",
        )
    (shape,) = shapes or {(): ""}
    return shape[0] if shape else None


def _folds(records: Any, site: str) -> dict[Fold, Arrays]:
    if not isinstance(records, Mapping):
        return _split(*_arrays(records, site))
    if not {"train", "test"} <= set(records) <= set(FOLDS):
        raise DataError(
            f"Expected the folds train, test and, if you like, validation of {site}, but got "
            f"{sorted(map(str, records))}.",
            code="TF-208",
        )
    folds: dict[Fold, Arrays] = {
        fold: _arrays(records[fold], f"the {fold} fold of {site}") for fold in FOLDS if fold in records
    }
    values, labels = folds["train"]
    folds.setdefault("validation", (values[:0], labels[:0]))
    return folds


def _split(values: NDArray[np.float32], labels: NDArray[Any]) -> dict[Fold, Arrays]:
    from tightframe.data.table.silo import content_names, fold_of

    names = content_names(values, labels)
    places = np.array([fold_of(record, SHARES) for record in names], dtype=np.int64)
    return {fold: (values[places == place], labels[places == place]) for place, fold in enumerate(FOLDS)}


def _arrays(records: Any, where: str) -> Arrays:
    """Return values (n, ...) as float32 and integer labels (n,), or findings (n, K)."""
    if not (isinstance(records, tuple | list) and len(records) == 2):
        records = _read(records, where)
    values, labels = (_array(item, where) for item in records)
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise DataError(
            f"Expected numbers of shape (records, ...) as the values of {where}, but got {values.dtype} of "
            f"shape {values.shape}.",
            code="TF-212",
        )
    if labels.dtype.kind not in "biu" or labels.ndim not in (1, 2) or len(labels) != len(values):
        raise DataError(
            f"Expected one integer label, or a row of findings, for each of the {len(values)} records of "
            f"{where}, but got {labels.dtype} of shape {labels.shape}.",
            code="TF-213",
        )
    if labels.ndim == 2 and labels.shape[1] < 2:
        raise DataError(
            f"Expected one label a record, or a row of two findings or more, in {where}, but got labels of "
            f"shape {labels.shape}: pass classes as a flat array (`y.ravel()`).",
            code="TF-213",
        )
    if labels.ndim == 2 and not np.isin(labels, (0, 1, UNKNOWN)).all():
        raise DataError(
            f"Expected findings of 1, 0 or {UNKNOWN} (unknown) in {where}, but got others.", code="TF-213"
        )
    if (
        labels.ndim == 1
        and labels.dtype.kind != "b"
        and len(labels)
        and (labels.min() < 0 or labels.max() > 2**31 - 1)
    ):
        raise DataError(
            f"Expected labels that count from 0 in {where}, but got {labels.min()} to {labels.max()}.",
            code="TF-213",
        )
    with np.errstate(over="ignore"):  # values that become infinite are refused
        return values.astype(np.float32), labels.astype(np.int64)


def _array(item: Any, where: str) -> NDArray[Any]:
    if hasattr(item, "detach"):  # a torch tensor, on any device, of types that NumPy lacks
        item = item.detach().cpu()
        item = (item.float() if item.is_floating_point() else item).numpy()
    try:
        return np.asarray(item)
    except ValueError:
        raise DataError(
            f"Expected the records of {where} in one shape, but they differ in length.", code="TF-212"
        ) from None


def _read(records: Any, where: str) -> tuple[Any, Any]:
    """Read all items of a map-style data set."""
    if not (hasattr(records, "__getitem__") and hasattr(records, "__len__")) or hasattr(records, "dtype"):
        raise DataError(
            f"Expected {where} to be (X, y), a mapping of folds or a map-style torch data set, but got "
            f"{type(records).__name__}.",
            code="TF-212",
        )
    values: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    for place in range(len(records)):
        item = records[place]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise DataError(
                f"Expected item {place} of {where} to be a pair of a record and its label, but got "
                f"{type(item).__name__}.",
                code="TF-213",
            )
        value, label = (_array(part, where) for part in item)
        if values and value.shape != values[0].shape:
            raise DataError(
                f"Expected records of shape {values[0].shape}, as the first, in {where}, but record {place} "
                f"has {value.shape}.",
                code="TF-212",
            )
        values.append(value)
        labels.append(label)
    if not values:
        raise DataError(f"Expected {where} to have records, but got none.", code="TF-208")
    if len({label.shape for label in labels}) > 1 or labels[0].ndim > 1:
        raise DataError(
            f"Expected one integer label, or as many findings, for each record of {where}.", code="TF-213"
        )
    return np.stack(values), np.stack(labels)


def _numbered(silos: Mapping[str, Mapping[Fold, Arrays]]) -> tuple[str, ...]:
    """Return the numbers of all labels, which must be 0 to C - 1, as names of classes."""
    labels = sorted(
        {int(label) for folds in silos.values() for _, y in folds.values() for label in np.unique(y)}
    )
    if len(labels) < 2 or labels != list(range(len(labels))):
        shown = ", ".join(map(str, labels[:10])) + (", ..." if len(labels) > 10 else "")
        raise DataError(
            f"Expected labels 0, 1, ... of two classes or more, each with a record somewhere, but got "
            f"{shown}: number them so, or give `class_names` with those that no silo has.",
            code="TF-213",
        )
    return tuple(map(str, labels))


def _check_labels(silos: Mapping[str, Mapping[Fold, Arrays]], num_classes: int) -> None:
    for site, folds in silos.items():
        for fold, (_, labels) in folds.items():
            if len(wrong := np.flatnonzero(labels >= num_classes)):
                raise DataError(
                    f"Expected labels 0 to {num_classes - 1} in the {fold} fold of {site}, but record "
                    f"{wrong[0]} has {labels[wrong[0]]} ({len(wrong)} of {len(labels)} labels are invalid).",
                    code="TF-213",
                )
