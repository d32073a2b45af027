"""Pictures for a model of one of the papers' image sets: of the set's own size, normalised as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tightframe.data.forms import PictureForm, Pixels


def form(name: str, shape: tuple[int, int, int], options: Any) -> PictureForm:
    """Return how records are made of pictures.

    Args:
        shape: of a record, (channels, height, width), with 1 or 3 channels.
        options: of the job; they change no transform.
    """
    channels, height, width = shape
    return PictureForm(
        channels=3 if channels == 3 else 1,
        transform=partial(_record, name),
        said=f"{'RGB' if channels == 3 else 'grey'} pictures of {width} x {height} pixels",
        size=(height, width),
    )


def _record(name: str, pixels: Pixels) -> Any:
    from tightframe.data.image_sets.pixels import PixelBatches
    from tightframe.data.image_sets.readers import ImageSet
    from tightframe.data.image_sets.silos import NORMALISED

    mean, std = NORMALISED[name]
    images = ImageSet(pixels.transpose(2, 0, 1)[None].copy(), np.zeros(1, np.int64))
    return PixelBatches(images, mean=mean, std=std)([0])[0]
