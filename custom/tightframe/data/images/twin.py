"""The synthetic twin of a contract of pictures: noisy gratings whose direction and width encode the label.

The contract alone decides them, so that all silos have one task. No claim about any data can be made on it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tightframe.data.contract import MultiLabel
from tightframe.data.images import ImagesOptions
from tightframe.data.images.contract import Picture
from tightframe.data.images.silo import ImageData
from tightframe.data.table.silo import fold_of
from tightframe.data.table.twin import PREVALENCE

RECORDS = 120


def open_twin(silo: int, options: ImagesOptions) -> ImageData:
    """Return the twin of a silo: 120 records, each of a patient of its own."""
    contract = options.contract
    seed = int(contract.sha256()[:16], 16)
    random = np.random.Generator(np.random.PCG64([seed, silo]))
    classes = len(contract.label.titles)
    if isinstance(contract.label, MultiLabel):
        labels = (random.random((RECORDS, classes)) < PREVALENCE).astype(np.int64)
        shown = [np.flatnonzero(row).tolist() for row in labels]
    else:
        labels = random.integers(0, classes, RECORDS)
        shown = [[int(label)] for label in labels]
    pixels = np.stack([_picture(contract.picture, of_one, classes, random) for of_one in shown])
    keys = [f"{silo}-{row}" for row in range(RECORDS)]
    return ImageData(
        pixels,
        labels.astype(np.int64),
        np.array([fold_of(key, contract.shares) for key in keys], dtype=np.int64),
        keys,
        keys if contract.patient else None,
        picture=contract.picture,
        source=f"synthetic twin of {contract.title}, silo {silo}",
        synthetic=True,
    )


def _picture(
    picture: Picture, labels: list[int], classes: int, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Return pixels (channels, *size): stripes of each label across the last two axes, at random places."""
    height, width = picture.size[-2:]
    down, right = np.mgrid[0:height, 0:width] / min(height, width)
    stripes = np.zeros((height, width))
    for label in labels:
        angle = math.pi * label / classes
        waves = 3 + label % 3
        phase = 2 * math.pi * random.random()
        stripes += np.sin(2 * math.pi * waves * (right * math.cos(angle) + down * math.sin(angle)) + phase)
    noise = random.normal(0, 0.5, picture.shape)
    pixels: NDArray[np.uint8] = np.rint(np.clip(128 + 50 * (stripes + noise), 0, 255)).astype(np.uint8)
    return pixels
