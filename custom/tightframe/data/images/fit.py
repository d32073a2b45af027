"""Pictures and volumes of any size in a contract's. Torch-free.

Scaling is linear with a triangle as wide as a pixel of the result, so that what is made smaller is averaged:
Pillow's BILINEAR for pictures, and the same along each axis for volumes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.data.images.contract import Picture
from tightframe.data.images.files import Pixels, UnfitError


def fitted(pixels: Pixels, picture: Picture) -> Pixels:
    """Return a record's pixels, (channels, *size), from those of a file, (*sides, channels).

    Raises:
        UnfitError: for a size that the contract refuses.
    """
    sides, size = pixels.shape[:-1], picture.size
    if picture.fit == "exact" and sides != size:
        raise UnfitError("another size than the contract's")
    ratios = [want / have for want, have in zip(size, sides, strict=True)]
    smaller = min(ratios) > 1 if picture.fit == "pad" else max(ratios) > 1
    if smaller:
        raise UnfitError("fewer pixels than the contract's size")
    if sides != size:
        target = size
        if picture.fit != "stretch":
            factor = max(ratios) if picture.fit == "crop" else min(ratios)
            target = tuple(max(1, round(side * factor)) for side in sides)
        pixels = _placed(_scaled(pixels, target), size)
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def _placed(pixels: Pixels, size: tuple[int, ...]) -> Pixels:
    """Return the middle of the size along each axis, black where there is nothing."""
    made = np.zeros((*size, pixels.shape[-1]), np.uint8)
    source, target = [], []
    for want, have in zip(size, pixels.shape[:-1], strict=True):
        count = min(want, have)
        source.append(slice((have - count) // 2, (have - count) // 2 + count))
        target.append(slice((want - count) // 2, (want - count) // 2 + count))
    made[tuple(target)] = pixels[tuple(source)]
    return made


def _scaled(pixels: Pixels, size: tuple[int, ...]) -> Pixels:
    if pixels.shape[:-1] == size:
        return pixels
    if len(size) == 2:
        from PIL import Image

        height, width = size
        shown = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        made = np.asarray(shown.resize((width, height), Image.Resampling.BILINEAR), np.uint8)
        return made.reshape(height, width, -1)
    values = pixels[..., 0].astype(np.float32)
    for axis, side in enumerate(size):
        if values.shape[axis] != side:
            values = np.moveaxis(
                np.tensordot(_triangles(values.shape[axis], side), values, (1, axis)), 0, axis
            )
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)[..., None]


def _triangles(have: int, want: int) -> NDArray[np.float32]:
    """Return the weights of one axis, (want, have), rows summing to 1."""
    ratio = have / want
    width = max(ratio, 1.0)
    centres = (np.arange(want) + 0.5) * ratio - 0.5
    weights = np.clip(1 - np.abs(np.arange(have) - centres[:, None]) / width, 0, None)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
