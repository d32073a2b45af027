"""Facts of Fed-ISIC2019: its classes, its exact counts, the options of a job and the entry of a site.

Counts are those of FLamby's ``train_test_split`` (owkin/FLamby, commit edacf54). Torch-free.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.data.forms import PictureForm, Pixels
from tightframe.options import StrictModel
from tightframe.registry import deferred

CLASS_NAMES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
"""Melanoma, naevus, basal cell carcinoma, actinic keratosis, benign keratosis,
dermatofibroma, vascular lesion, squamous cell carcinoma; in label order."""

NUM_CENTERS = 6

HAM_CENTERS = (1, 2, 3, 5)
"""The centres whose images are from HAM10000, whose metadata name the lesion of each image."""

CENTER_NAMES = ("BCN", "HAM vidir_molemax", "HAM vidir_modern", "HAM rosendahl", "MSK", "HAM vienna_dias")

TRAIN_COUNTS: tuple[tuple[int, ...], ...] = (
    (2279, 3363, 2245, 606, 923, 97, 87, 330),
    (20, 2977, 2, 0, 96, 23, 45, 0),
    (533, 1470, 174, 20, 379, 40, 64, 11),
    (276, 649, 223, 86, 406, 20, 3, 144),
    (166, 349, 0, 0, 140, 0, 0, 0),
    (58, 276, 5, 0, 6, 4, 2, 0),
)
"""Images of the training fold, by centre and class."""

TEST_COUNTS: tuple[tuple[int, ...], ...] = (
    (578, 843, 564, 131, 215, 27, 24, 101),
    (4, 743, 0, 0, 28, 7, 9, 0),
    (147, 362, 37, 1, 96, 11, 18, 0),
    (66, 154, 73, 23, 84, 10, 0, 42),
    (49, 66, 0, 0, 49, 0, 0, 0),
    (9, 74, 0, 0, 4, 0, 1, 0),
)
"""Images of the test fold, by centre and class."""

FULL_SIZE = 200
"""Side of FLamby's crop, in pixels."""

FULL_SHORTER_SIDE = 224
"""Shorter side of FLamby's preprocessed images, in pixels."""


class IsicOptions(StrictModel):
    """A job's options for Fed-ISIC2019.

    Attributes:
        image_size: side of the square that the model sees, in pixels; FLamby's is 200.
    """

    image_size: int = Field(default=FULL_SIZE, ge=16, le=512)


class IsicSite(StrictModel):
    """A site's entry for its records of Fed-ISIC2019.

    Attributes:
        root: the folder that holds ``ISIC_2019_Training_Input_preprocessed``.
        split: FLamby's split file; by default ``<root>/train_test_split``.
        center: 0 BCN, 1 HAM vidir_molemax, 2 HAM vidir_modern, 3 HAM rosendahl, 4 MSK, 5 HAM vienna_dias.
        lesions: FLamby's ``HAM10000_metadata`` (columns ``lesion_id``, ``image_id``): keeps the
            images of a lesion together when the validation fold is chosen, and counts them as one patient's
            where few patients are too few. It must know every image of the centre; centres 0 and 4 have no
            lesion ids.
        leakage_free_test: drop from the test fold the images whose lesion has an image in the
            training fold of any centre (696 of 7,470 HAM lesions are in both); needs ``lesions``.
    """

    root: SitePath
    split: SitePath | None = None
    center: int = Field(ge=0, lt=NUM_CENTERS)
    lesions: SitePath | None = None
    leakage_free_test: bool = False


def shorter_side(size: int) -> int:
    """Return the shorter side, in pixels, of images that are cropped to ``size``: FLamby's 224 : 200.

    >>> shorter_side(200), shorter_side(48)
    (224, 54)
    """
    return round(FULL_SHORTER_SIDE * size / FULL_SIZE)


def form(options: IsicOptions) -> PictureForm:
    """Return how records are made of pictures in a job."""
    return PictureForm(
        channels=3,
        transform=partial(_record, options.image_size),
        said="dermoscopic pictures, prepared as `tightframe data prepare isic2019` does",
        originals=_prepared,
    )


def _record(size: int, pixels: Pixels) -> Any:
    import torch

    from tightframe.data.isic import transforms

    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
    return transforms.evaluation(image, size)


def _prepared(pixels: Pixels) -> Pixels:
    """Prepare an original as the training records were: shorter side 224, colour constancy, JPEG."""
    from PIL import Image

    from tightframe.data.isic.prepare import QUALITY, preprocess

    image, _ = preprocess(Image.fromarray(pixels))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=QUALITY)
    with Image.open(io.BytesIO(stream.getvalue())) as stored:
        prepared: Pixels = np.asarray(stored.convert("RGB"), dtype=np.uint8)
    return prepared


SPECS = {
    "fed_isic2019": DatasetSpec(
        name="fed_isic2019",
        title="Fed-ISIC2019",
        class_names=CLASS_NAMES,
        options=IsicOptions,
        site=IsicSite,
        input_shape=lambda options: (3, options.image_size, options.image_size),
        open=deferred("tightframe.data.isic.folder", "FolderData"),
        twin=deferred("tightframe.data.isic.twin", "open_twin"),
        num_centers=NUM_CENTERS,
        no_patients="its metadata name images, and lesions for HAM10000, but no patients",
        form=form,
        augments=True,
    ),
}
