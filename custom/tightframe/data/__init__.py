"""The data sets that a job may name.

``DATASETS`` is a plain list; an installed package adds to it through the entry-point group
``tightframe.datasets``, each entry being a ``DatasetSpec``. Torch-free at import.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tightframe.data.base import DatasetSpec, SiloData
from tightframe.data.isic import CLASS_NAMES, NUM_CENTERS, IsicOptions
from tightframe.data.isic_folder import IsicSite, open_folder
from tightframe.data.twin import open_twin
from tightframe.errors import JobError

ENTRY_POINTS = "tightframe.datasets"


def _image_shape(options: Any) -> tuple[int, ...]:
    return (3, options.image_size, options.image_size)


def extended(own: Iterable[DatasetSpec], found: Iterable[EntryPoint]) -> list[DatasetSpec]:
    """Our own data sets, then those of installed packages.

    Raises:
        TypeError: if an entry point is not a ``DatasetSpec``.
        ValueError: if two data sets have one name.
    """
    specs = list(own)
    for entry in found:
        spec = entry.load()
        if not isinstance(spec, DatasetSpec):
            raise TypeError(
                f"Expected entry point `{entry.value}` to be a DatasetSpec, but got {type(spec)}."
            )
        if any(spec.name == other.name for other in specs):
            raise ValueError(
                f"Expected data sets to have different names, but `{entry.value}` is {spec.name} again."
            )
        specs.append(spec)
    return specs


DATASETS: list[DatasetSpec] = extended(
    [
        DatasetSpec(
            name="fed_isic2019",
            title="Fed-ISIC2019",
            class_names=CLASS_NAMES,
            options=IsicOptions,
            site=IsicSite,
            input_shape=_image_shape,
            open=open_folder,
            twin=open_twin,
            num_centers=NUM_CENTERS,
        ),
    ],
    entry_points(group=ENTRY_POINTS),
)


def get(name: str) -> DatasetSpec:
    """The data set of that name.

    Raises:
        JobError: naming the known ones.
    """
    for spec in DATASETS:
        if spec.name == name:
            return spec
    known = ", ".join(spec.name for spec in DATASETS)
    raise JobError([f"Expected a data set of {known}, but got {name!r}"])


__all__ = ["DATASETS", "ENTRY_POINTS", "DatasetSpec", "SiloData", "extended", "get"]
