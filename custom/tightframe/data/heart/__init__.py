"""Facts of Fed-Heart-Disease: its centres, features and exact split, a site's entry, and rows for a model.

The UCI Heart Disease records of four centres (Janosi et al. 1988, doi 10.24432/C52P4X), cleaned,
encoded and split as FLamby's ``fed_heart_disease`` (owkin/FLamby, commit edacf54) does. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.data.forms import TableForm, named_columns, numbers
from tightframe.options import StrictModel
from tightframe.registry import deferred

CLASS_NAMES = ("no disease", "disease")
"""Disease of the coronary arteries (angiographic status 0, or 1 to 4), in label order."""

CENTER_NAMES = ("cleveland", "hungarian", "switzerland", "va")
NUM_CENTERS = 4

FEATURES = (
    *("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"),
    *("cp_2", "cp_3", "cp_4", "restecg_1", "restecg_2"),
)
"""Columns of a record in FLamby's order: numeric values, then one column for each level but the first of
``cp`` (chest pain, 1 to 4) and ``restecg`` (0 to 2). ``slope``, ``ca`` and ``thal`` are not used."""

TRAIN_COUNTS: tuple[tuple[int, int], ...] = ((108, 91), (107, 65), (0, 30), (19, 66))
"""Records of the training fold, by centre and class."""

TEST_COUNTS: tuple[tuple[int, int], ...] = ((56, 48), (56, 33), (1, 15), (10, 35))
"""Records of the test fold, by centre and class."""

TEST_ROWS: tuple[int, ...] = (
    0x27D73800471F06489219A5A80E2150180C29358003E1081203A0ADC05123B9A3CD0405012020,
    0xC5D08940188205C96F4481212C8228B198961C9008AB00E11342B821D3E210088,
    0x301315C61E0,
    0x1A2E5C0061120DA1D7040A6DA24001262,
)
"""FLamby's test fold: bit i is set if record i of the centre, in the order of its file without the dropped
records, is a test record. (scikit-learn's ``train_test_split`` of 66 % with random state 43, stratified
except for Switzerland, which has one record without the disease.)"""


class HeartOptions(StrictModel):
    """A job's options for Fed-Heart-Disease: there are none."""


class HeartSite(StrictModel):
    """A site's entry for its records of Fed-Heart-Disease.

    Attributes:
        root: the folder that holds ``processed.<centre>.data``.
        center: 0 Cleveland, 1 Hungary, 2 Switzerland, 3 Long Beach VA.
    """

    root: SitePath
    center: int = Field(ge=0, lt=NUM_CENTERS)


NUMBERS = frozenset({"age", "trestbps", "chol", "thalach", "oldpeak"})
YES_OR_NO = frozenset({0.0, 1.0})


def form(options: HeartOptions) -> TableForm:
    """Return how records are made of rows."""
    return TableForm(
        choose=partial(named_columns, FEATURES),
        encode=_encode,
        said=f"the columns {', '.join(FEATURES)} (cp_2 to cp_4 and restecg_1, restecg_2 are 1 at that level)",
        values=FEATURES,
    )


def _encode(columns: Sequence[str], values: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
    features, problems = numbers(columns, values, lambda name: None if name in NUMBERS else YES_OR_NO)
    for name in ("cp_", "restecg_"):
        if sum(value for column, value in zip(columns, features, strict=True) if column.startswith(name)) > 1:
            problems.append(f"Expected at most one 1 in the columns {name}*, but there are more")
    return features, problems


SPECS = {
    "fed_heart_disease": DatasetSpec(
        name="fed_heart_disease",
        title="Fed-Heart-Disease",
        class_names=CLASS_NAMES,
        options=HeartOptions,
        site=HeartSite,
        input_shape=lambda options: (len(FEATURES),),
        open=deferred("tightframe.data.heart.silo", "open_site"),
        twin=deferred("tightframe.data.heart.twin", "open_twin"),
        num_centers=NUM_CENTERS,
        columns=lambda options: (*[1] * 8, 3, 2),
        form=form,
    ),
}
