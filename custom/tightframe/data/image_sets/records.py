"""Small images in memory as a torch data set. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from tightframe.data.image_sets.readers import ImageSet
from tightframe.phases import stream_seed

PADDING = 4
"""Black pixels around an image before it is cropped back to its size."""


class PixelRecords(Dataset[tuple[torch.Tensor, int]]):
    """Map-style data set of (float32 (channels, height, width), int label).

    A whole batch is normalised at once (``__getitems__``), which for small images takes little more time
    than copying them.

    Args:
        images: the pixels.
        mean: of pixels in [0, 1]; it is subtracted.
        std: of pixels in [0, 1]; the difference is divided by it.
        augment_seed: None gives the images unchanged; otherwise image i is shifted by up to 4 pixels
            and possibly mirrored, by draws from (augment_seed, i) only.
    """

    def __init__(self, images: ImageSet, *, mean: float, std: float, augment_seed: int | None = None) -> None:
        self._pixels = torch.from_numpy(images.images)
        self._labels: list[int] = images.labels.tolist()
        self._scale = 1.0 / (images.white * std)
        self._shift = -mean / std
        self.augment_seed = augment_seed

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, but got {index}.")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Return the records of a batch; torch's loader calls this instead of ``__getitem__``."""
        pixels = self._pixels[list(indices)]
        if self.augment_seed is not None:
            pixels = _shifted(pixels, [stream_seed(self.augment_seed, index) for index in indices])
        floats = pixels.float().mul_(self._scale).add_(self._shift)
        return list(zip(floats.unbind(0), (self._labels[index] for index in indices), strict=True))


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
