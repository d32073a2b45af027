"""The data sets that a job may name.

``DATASETS`` is a plain list; an installed package adds to it through the entry-point group
``tightframe.datasets``, each entry being a ``DatasetSpec``. Torch-free at import.
"""

from __future__ import annotations

from typing import Any

from tightframe.data import eicu, heart_options
from tightframe.data.base import DatasetSpec, SiloData
from tightframe.data.isic import CLASS_NAMES, NUM_CENTERS, IsicOptions, IsicSite
from tightframe.registry import deferred, find

ENTRY_POINTS = "tightframe.datasets"


def _image_shape(options: Any) -> tuple[int, ...]:
    return (3, options.image_size, options.image_size)


DATASETS: list[DatasetSpec] = [
    DatasetSpec(
        name="fed_isic2019",
        title="Fed-ISIC2019",
        class_names=CLASS_NAMES,
        options=IsicOptions,
        site=IsicSite,
        input_shape=_image_shape,
        open=deferred("tightframe.data.isic_folder", "open_folder"),
        twin=deferred("tightframe.data.twin", "open_twin"),
        num_centers=NUM_CENTERS,
    ),
    DatasetSpec(
        name="eicu",
        title="eICU",
        class_names=eicu.CLASS_NAMES,
        options=eicu.EicuOptions,
        site=eicu.EicuSite,
        input_shape=lambda options: (options.drugs,),
        open=deferred("tightframe.data.eicu_silo", "open_site"),
        twin=deferred("tightframe.data.eicu_twin", "open_twin"),
        num_centers=len(eicu.REGIONS),
    ),
    DatasetSpec(
        name="fed_heart_disease",
        title="Fed-Heart-Disease",
        class_names=heart_options.CLASS_NAMES,
        options=heart_options.HeartOptions,
        site=heart_options.HeartSite,
        input_shape=lambda options: (len(heart_options.FEATURES),),
        open=deferred("tightframe.data.heart_disease", "open_site"),
        twin=deferred("tightframe.data.heart_twin", "open_twin"),
        num_centers=heart_options.NUM_CENTERS,
    ),
]


def get(name: str) -> DatasetSpec:
    """The data set of that name.

    Raises:
        JobError: naming the known ones.
    """
    return find(DATASETS, name, group=ENTRY_POINTS, kind=DatasetSpec, what="a data set")


__all__ = ["DATASETS", "ENTRY_POINTS", "DatasetSpec", "SiloData", "get"]
