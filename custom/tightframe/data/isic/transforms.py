"""FLamby's image transforms for Fed-ISIC2019, in plain torch.

FLamby (owkin/FLamby, ``fed_isic2019/dataset.py``) composes albumentations: RandomScale(0.07),
Rotate(50), RandomBrightnessContrast(0.15, 0.1), Flip(0.5), Affine(shear=0.1), RandomCrop,
CoarseDropout(1..8 holes of 16 x 16), Normalize; each but the crop with probability one half.
Here the geometric ones are one affine map and one interpolation, sizes scale with the crop,
brightness and contrast are not rounded to 8 bits in between, the number of holes is drawn for
each record, and the image is mirrored beyond its edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from tightframe.data.isic import FULL_SIZE, shorter_side

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""ImageNet's mean and standard deviation of red, green and blue in [0, 1]."""

_MEAN = torch.tensor(MEAN).view(3, 1, 1)
_STD = torch.tensor(STD).view(3, 1, 1)
_SCALE = 1.0 / (255.0 * _STD)
_SHIFT = -_MEAN / _STD


@dataclass(frozen=True)
class Ranges:
    """The ranges of the training transforms; if all are zero, only the random crop is left.

    Attributes:
        scale: zoom factor 1 +- scale.
        rotate: degrees to either side.
        shear: degrees along each axis, as albumentations reads ``shear=0.1``.
        flip: probability of a horizontal, a vertical or both flips.
        brightness: added, as part of the full range.
        contrast: factor 1 +- contrast.
        holes: most holes of coarse dropout, which cuts at least one; 0 switches it off.
        hole: side of a hole in pixels of FLamby's 200-pixel crop.
        chance: probability of each transform except the flip.
    """

    scale: float = 0.07
    rotate: float = 50.0
    shear: float = 0.1
    flip: float = 0.5
    brightness: float = 0.15
    contrast: float = 0.1
    holes: int = 8
    hole: int = 16
    chance: float = 0.5


FLAMBY = Ranges()
_DRAWS = 15


def resize_shorter(image: torch.Tensor, side: int) -> torch.Tensor:
    """Resize so that the shorter side is ``side`` pixels, antialiased; unchanged if it is already.

    Args:
        image: uint8 (3, H, W).
        side: pixels.

    Returns:
        uint8 (3, h, w) with min(h, w) == side and the aspect kept to a pixel.
    """
    height, width = image.shape[-2:]
    shorter = min(height, width)
    if shorter == side:
        return image
    target = [round(height * side / shorter), round(width * side / shorter)]
    floats = functional.interpolate(
        image[None].float(), size=target, mode="bilinear", align_corners=False, antialias=True
    )
    return floats[0].round_().clamp_(0, 255).to(torch.uint8)


def evaluation(image: torch.Tensor, size: int) -> torch.Tensor:
    """Apply FLamby's test transform: centre crop and normalisation.

    Args:
        image: uint8 (3, H, W).
        size: side of the crop in pixels; the image is first resized so that its shorter side is
            ``size * 224 / 200``, which is FLamby's proportion.

    Returns:
        float32 (3, size, size), normalised with ImageNet's mean and standard deviation.
    """
    image = resize_shorter(image, shorter_side(size))
    top, left = ((extent - size) // 2 for extent in image.shape[-2:])
    return image[:, top : top + size, left : left + size].float().mul_(_SCALE).add_(_SHIFT)


def training(
    image: torch.Tensor, size: int, generator: torch.Generator, ranges: Ranges = FLAMBY
) -> torch.Tensor:
    """Apply FLamby's training transforms.

    Args:
        image: uint8 (3, H, W).
        size: side of the crop in pixels; see ``evaluation``.
        generator: the only source of randomness; a fixed number of draws is taken first, so that the
            draws of a transform do not depend on whether another one is applied.

    Returns:
        float32 (3, size, size), normalised.
    """
    image = resize_shorter(image, shorter_side(size))
    draws = torch.rand(_DRAWS, generator=generator, dtype=torch.float64).tolist()
    view = _warped(image, size, draws, ranges)
    if draws[7] < ranges.chance and (ranges.brightness or ranges.contrast):
        factor = 1.0 + ranges.contrast * (2.0 * draws[8] - 1.0)
        offset = 255.0 * ranges.brightness * (2.0 * draws[9] - 1.0)
        view = view.mul_(factor).add_(offset).clamp_(0.0, 255.0)
    if draws[10] < ranges.chance and ranges.holes:
        _cut_holes(view, size, 1 + int(draws[11] * ranges.holes), generator, ranges)
    return view.mul_(_SCALE).add_(_SHIFT)


def _warped(image: torch.Tensor, size: int, draws: list[float], ranges: Ranges) -> torch.Tensor:
    """Zoom, rotate, flip, shear and crop in one interpolation: float32 (3, size, size) in [0, 255]."""
    height, width = image.shape[-2:]
    on = [draw < ranges.chance for draw in draws[:3]]
    signed = [2.0 * draw - 1.0 for draw in draws[3:7]]
    factor = 1.0 + ranges.scale * signed[0] if on[0] else 1.0
    angle = math.radians(ranges.rotate * signed[1]) if on[1] else 0.0
    shear_x, shear_y = (math.tan(math.radians(ranges.shear * part)) if on[2] else 0.0 for part in signed[2:])
    # One draw decides the flip: below `flip` it is, in equal parts, horizontal, vertical or both.
    kind = int(3.0 * draws[12] / ranges.flip) if draws[12] < ranges.flip else -1
    flip_x, flip_y = (-1.0 if kind in (0, 2) else 1.0), (-1.0 if kind in (1, 2) else 1.0)
    matrix = _inverse(factor, angle, (shear_x, shear_y), (flip_x, flip_y))
    # The crop is at whole pixels of the zoomed image; the map needs the distance between the two centres.
    zoomed = (round(width * factor), round(height * factor))
    corner = [int(draw * (extent - size + 1)) for draw, extent in zip(draws[13:15], zoomed, strict=True)]
    if matrix == ((1.0, 0.0), (0.0, 1.0)):
        return image[:, corner[1] : corner[1] + size, corner[0] : corner[0] + size].float()
    offset = [low + size / 2 - extent / 2 for low, extent in zip(corner, zoomed, strict=True)]
    theta = torch.tensor(
        [
            [
                row[0] * size / extent,
                row[1] * size / extent,
                2.0 * (row[0] * offset[0] + row[1] * offset[1]) / extent,
            ]
            for row, extent in zip(matrix, (width, height), strict=True)
        ]
    )
    grid = functional.affine_grid(theta[None], [1, 3, size, size], align_corners=False)
    return functional.grid_sample(image[None].float(), grid, "bilinear", "reflection", align_corners=False)[0]


def _inverse(
    factor: float, angle: float, shear: tuple[float, float], flip: tuple[float, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the 2 x 2 map from the crop back to the image: shear, flip, rotate by ``angle``, shrink."""
    cosine, sine = math.cos(angle) / factor, math.sin(angle) / factor
    turned = ((cosine * flip[0], -sine * flip[1]), (sine * flip[0], cosine * flip[1]))
    first, second = ((row[0] + row[1] * shear[1], row[0] * shear[0] + row[1]) for row in turned)
    return first, second


def _cut_holes(view: torch.Tensor, size: int, holes: int, generator: torch.Generator, ranges: Ranges) -> None:
    """Set square holes of the image (3, size, size) to black, in place; they may overlap."""
    side = max(1, round(ranges.hole * size / FULL_SIZE))
    for top, left in torch.randint(size - side + 1, (holes, 2), generator=generator).tolist():
        view[:, top : top + side, left : left + side] = 0.0
