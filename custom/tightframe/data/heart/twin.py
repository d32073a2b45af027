"""The synthetic twin of Fed-Heart-Disease: generated records with the real counts.

Each centre, fold and class has as many records as in the real set. Features have the real units and
ranges, with differences between classes and centres (no cholesterol in Switzerland, as in the real
set). It is frozen (``TWIN_VERSION``, and a test that hashes it), and supports no claim about a method.
Torch-free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.data.heart import (
    CENTER_NAMES,
    FEATURES,
    NUM_CENTERS,
    TEST_COUNTS,
    TRAIN_COUNTS,
    HeartOptions,
)
from tightframe.data.heart.silo import HeartData
from tightframe.data.twin_render import Uniforms

TWIN_VERSION = 1

# By centre: mean age, cholesterol, highest heart rate; shares of raised restecg 1 and 2.
_CENTERS = (
    (53.0, 245.0, 158.0, 0.01, 0.49),
    (46.0, 250.0, 148.0, 0.18, 0.03),
    (55.0, 0.0, 128.0, 0.26, 0.08),
    (58.0, 180.0, 130.0, 0.44, 0.14),
)
# By class: shares of men, raised sugar and exercise angina; chest pain up to 2, 3, 4; means' shifts of
# age, pressure, cholesterol and heart rate; mean depression of ST.
_CLASSES = (
    (0.60, 0.10, 0.16, (0.12, 0.42, 0.74), (-2.0, -1.5, -6.0, 9.0), 0.5),
    (0.84, 0.18, 0.55, (0.06, 0.14, 0.30), (2.0, 2.0, 8.0, -8.0), 1.5),
)


def record(name: str, center: int, label: int) -> NDArray[np.float32]:
    """Draw one record from its name: values in the order of ``FEATURES``, float32 (13,)."""
    uniforms = Uniforms(name)
    age, cholesterol, rate, raised, high = _CENTERS[center]
    men, sugar, angina, pain, shifts, depression = _CLASSES[label]
    # Sums of four uniforms, of mean 0 and variance 1: nearly normal, and bounded.
    spread = (uniforms(5, 4).sum(axis=1) - 2.0) * 1.732
    yes = uniforms(5)
    level = int(np.searchsorted(pain, yes[3], side="right")) + 1
    values = (
        max(28.0, age + shifts[0] + 8.5 * spread[0]),
        float(yes[0] < men),
        max(80.0, 131.0 + shifts[1] + 17.0 * spread[1]),
        0.0 if cholesterol == 0 else max(100.0, cholesterol + shifts[2] + 50.0 * spread[2]),
        float(yes[1] < sugar),
        max(60.0, rate + shifts[3] + 21.0 * spread[3]),
        float(yes[2] < angina),
        max(0.0, depression + spread[4]),
        *(float(level == other) for other in (2, 3, 4)),
        float(yes[4] < raised),
        float(raised <= yes[4] < raised + high),
    )
    integers = [FEATURES.index(column) for column in ("age", "trestbps", "chol", "thalach")]
    features = np.array(values)
    features[integers] = np.floor(features[integers] + 0.5)
    features[7] = np.floor(features[7] * 10.0 + 0.5) / 10.0
    return features.astype(np.float32)


def open_twin(silo: int, options: HeartOptions) -> HeartData:
    """Open the twin of silo ``silo`` of a job's roster: centre ``silo % 4``.

    Silo 4 is a second copy of centre 0, with records of its own.
    """
    if silo < 0:
        raise ValueError(f"Expected `silo` to be at least 0, but got {silo}.")
    copy, center = divmod(silo, NUM_CENTERS)
    keys = [
        (f"heart-twin{TWIN_VERSION}-{copy}-{center}-{fold}-{label}-{index:03d}", fold, label)
        for fold, counts in (("train", TRAIN_COUNTS), ("test", TEST_COUNTS))
        for label, count in enumerate(counts[center])
        for index in range(count)
    ]
    suffix = f" (copy {copy + 1})" if copy else ""
    return HeartData(
        np.stack([record(name, center, label) for name, _, label in keys]),
        np.array([label for _, _, label in keys], dtype=np.int64),
        np.array([fold == "test" for _, fold, _ in keys]),
        [name for name, _, _ in keys],
        source=f"synthetic twin of Fed-Heart-Disease, centre {center} ({CENTER_NAMES[center]}){suffix}",
        synthetic=True,
    )
