"""Images as torch data sets, with a bounded cache of decoded pixels. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tightframe.data.isic import shorter_side, transforms
from tightframe.phases import stream_seed

CACHE_BYTES = 256 * 2**20


class ImageCache:
    """A cache of decoded images by name, for one process and up to a number of bytes.

    A small fold at 48 pixels fits completely, and then an epoch decodes nothing. At the limit nothing more
    is added and nothing is dropped: an epoch visits every image once, so with eviction of the oldest
    every look-up would miss.

    Args:
        limit: most bytes of pixels kept.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self.used = 0
        self._images: dict[str, torch.Tensor] = {}

    def get(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the image of a name, made on first use: uint8 (3, H, W), read-only by convention."""
        image = self._images.get(name)
        if image is None:
            image = make()
            if self.used + image.nbytes <= self.limit:
                self._images[name] = image
                self.used += image.nbytes
        return image

    def __getstate__(self) -> dict[str, object]:
        """Return an empty cache's state, so that a worker process does not get a copy of the images."""
        return {"limit": self.limit, "used": 0, "_images": {}}


class ImageRecords(Dataset[tuple[torch.Tensor, int]]):
    """Map-style data set of (float32 (3, size, size), int label).

    Args:
        names: of the records, unique in the cache.
        labels: int64 (n,).
        read: i -> RGB pixels of record i, uint8 (H, W, 3).
        size: side of the square that the model sees, in pixels.
        cache: shared by the folds of a silo.
        augment_seed: None gives the evaluation view; otherwise record i is transformed with
            randomness from (augment_seed, i) only.
    """

    def __init__(
        self,
        names: Sequence[str],
        labels: NDArray[np.int64],
        read: Callable[[int], NDArray[np.uint8]],
        size: int,
        cache: ImageCache,
        augment_seed: int | None = None,
    ) -> None:
        if len(names) != len(labels):
            raise ValueError(f"Expected one label for each record, but got {len(labels)} for {len(names)}.")
        self.names = tuple(names)
        self.labels = labels
        self.size = size
        self.augment_seed = augment_seed
        self._read = read
        self._cache = cache

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int) -> torch.Tensor:
        """Return the pixels of a record before cropping: uint8 (3, H, W), shorter side as for ``size``."""

        def make() -> torch.Tensor:
            pixels = torch.from_numpy(self._read(index).copy()).permute(2, 0, 1).contiguous()
            return transforms.resize_shorter(pixels, shorter_side(self.size))

        return self._cache.get(self.names[index], make)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, but got {index}.")
        pixels = self.image(index)
        label = int(self.labels[index])
        if self.augment_seed is None:
            return transforms.evaluation(pixels, self.size), label
        generator = torch.Generator().manual_seed(stream_seed(self.augment_seed, index))
        return transforms.training(pixels, self.size, generator), label
