"""Pictures for a model of Fed-ISIC2019: the evaluation's transform, and the preparation of originals."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np

from tightframe.data.forms import PictureForm, Pixels
from tightframe.data.isic import IsicOptions


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
    with Image.open(io.BytesIO(stream.getvalue())) as again:
        made: Pixels = np.asarray(again.convert("RGB"), dtype=np.uint8)
    return made
