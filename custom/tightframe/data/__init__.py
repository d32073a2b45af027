"""The data sets that a job may name.

``DATASETS`` lists the built-in ones by name. Each is imported only when it is looked up, because every
task of a silo does so and imports take time. An installed package adds its own through the entry-point
group ``tightframe.datasets``; each entry is a ``DatasetSpec``. Torch-free at import.
"""

from __future__ import annotations

from tightframe import registry
from tightframe.data.base import DatasetSpec, SiloData
from tightframe.registry import Listed, find

ENTRY_POINTS = registry.DATASETS

_IMAGE_SETS = (
    *("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn"),
    *("color_mnist", "rotated_cifar10"),
)

DATASETS: list[Listed[DatasetSpec]] = [
    Listed("fed_isic2019", "tightframe.data.isic"),
    Listed("eicu", "tightframe.data.eicu"),
    Listed("fed_heart_disease", "tightframe.data.heart"),
    Listed("table", "tightframe.data.table"),
    Listed("images", "tightframe.data.images"),
    *(Listed[DatasetSpec](name, "tightframe.data.image_sets") for name in _IMAGE_SETS),
]


def get(name: str) -> DatasetSpec:
    """Return the data set of a name.

    Raises:
        JobError: if there is none, listing the known names.
    """
    return find(DATASETS, name, group=ENTRY_POINTS, kind=DatasetSpec, what="a data set")


__all__ = ["DATASETS", "ENTRY_POINTS", "DatasetSpec", "SiloData", "get"]
