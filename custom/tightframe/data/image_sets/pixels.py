"""Normalisation and augmentation of small images in memory. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tightframe.data.image_sets.readers import ImageSet
from tightframe.phases import stream_seed

PADDING = 4
"""Black pixels around an image before it is cropped back to its size."""


class PixelBatches:
    """Reads batches of normalised images, float32 (B, channels, height, width), for ``BatchRecords``.

    Args:
        mean: of pixels in [0, 1]; it is subtracted.
        std: of pixels in [0, 1]; the difference is divided by it.
        augment_seed: None gives the images unchanged; otherwise image i is shifted by up to 4 pixels
            and possibly mirrored, by draws from (augment_seed, i) only.
    """

    def __init__(self, images: ImageSet, *, mean: float, std: float, augment_seed: int | None = None) -> None:
        self._pixels = torch.from_numpy(images.images)
        self._scale = 1.0 / (images.white * std)
        self._shift = -mean / std
        self._augment_seed = augment_seed

    def __call__(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the images of these indices, normalised."""
        pixels = self._pixels[list(indices)]
        if self._augment_seed is not None:
            pixels = _shifted(pixels, [stream_seed(self._augment_seed, index) for index in indices])
        return pixels.float().mul_(self._scale).add_(self._shift)


def _shifted(pixels: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
    """Crop images at random with 4 pixels of padding, and mirror each with probability one half.

    Args:
        pixels: uint8 (B, channels, height, width).
        draws: a 63-bit random number for each image.
    """
    height, width = pixels.shape[-2:]
    padded = functional.pad(pixels, (PADDING,) * 4)
    places = 2 * PADDING + 1
    views = torch.empty_like(pixels)
    for number, draw in enumerate(draws):
        draw, top = divmod(draw, places)
        draw, left = divmod(draw, places)
        view = padded[number, :, top : top + height, left : left + width]
        views[number] = view.flip(-1) if draw % 2 else view
    return views
