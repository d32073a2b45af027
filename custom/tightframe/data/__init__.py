"""The data sets that a job may name.

``DATASETS`` lists ours by name; each is imported when it is named, because every task of a silo looks
one up, and each light module costs it time. An installed package adds to the list through the
entry-point group ``tightframe.datasets``, each entry being a ``DatasetSpec``. Torch-free at import.
"""

from __future__ import annotations

from tightframe.data.base import DatasetSpec, SiloData
from tightframe.registry import Listed, find

ENTRY_POINTS = "tightframe.datasets"

_IMAGE_SETS = (
    *("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn"),
    *("color_mnist", "rotated_cifar10"),
)

DATASETS: list[Listed[DatasetSpec]] = [
    Listed("fed_isic2019", "tightframe.data.isic"),
    Listed("eicu", "tightframe.data.eicu"),
    Listed("fed_heart_disease", "tightframe.data.heart"),
    *(Listed[DatasetSpec](name, "tightframe.data.image_sets") for name in _IMAGE_SETS),
]


def get(name: str) -> DatasetSpec:
    """The data set of that name.

    Raises:
        JobError: naming the known ones.
    """
    return find(DATASETS, name, group=ENTRY_POINTS, kind=DatasetSpec, what="a data set")


__all__ = ["DATASETS", "ENTRY_POINTS", "DatasetSpec", "SiloData", "get"]
