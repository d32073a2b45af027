"""Pictures as a model gets them: normalised, in training transformed; and those of a file, for inference.

Imports torch only where tensors are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.forms import PictureForm, Pixels
from tightframe.data.images.contract import Augment, Picture
from tightframe.phases import stream_seed

if TYPE_CHECKING:
    import torch

NIFTI = (".nii", ".nii.gz")
_DRAWS = 12


class Views:
    """Reads batches of records, for ``BatchRecords``.

    Args:
        pixels: uint8 (n, channels, *size).
        rows: of the fold, in record order.
        augment_seed: None for the view of the evaluation; else record i of the fold is transformed by draws
            from (augment_seed, i) only, if the contract has transforms.
    """

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        rows: NDArray[np.int64],
        picture: Picture,
        augment_seed: int | None = None,
    ) -> None:
        self._pixels, self._rows, self._picture = pixels, rows, picture
        self._seed = augment_seed

    def __call__(self, indices: Sequence[int]) -> torch.Tensor:
        """Return records, float32 (B, channels, *size)."""
        import torch

        values = torch.from_numpy(self._pixels[self._rows[list(indices)]]).float().div_(255)
        augment = self._picture.augment
        if self._seed is not None and augment is not None:
            streams = [torch.Generator().manual_seed(stream_seed(self._seed, index)) for index in indices]
            draws = [torch.rand(_DRAWS, generator=one, dtype=torch.float64).tolist() for one in streams]
            values = transformed(values, draws, augment)
        return normalised(values, self._picture)


def normalised(values: torch.Tensor, picture: Picture) -> torch.Tensor:
    """Return ``(x - mean) / std`` of each channel, of values in [0, 1], (B, channels, *size)."""
    import torch

    shape = (picture.channels, *(1 for _ in picture.size))
    mean = torch.tensor(picture.mean or (0.5,) * picture.channels).view(shape)
    std = torch.tensor(picture.std or (0.5,) * picture.channels).view(shape)
    return (values - mean) / std


def transformed(values: torch.Tensor, draws: Sequence[Sequence[float]], augment: Augment) -> torch.Tensor:
    """Return pictures zoomed, rotated, shifted, mirrored and with other light, in one interpolation.

    Args:
        values: in [0, 1], (B, channels, H, W) or (B, 1, D, H, W), whose slices are all moved alike.
        draws: twelve numbers in [0, 1) for each.

    Returns:
        The same shape, in [0, 1]; beyond its edge a picture is mirrored.
    """
    import torch
    from torch.nn import functional

    shape = values.shape
    flat = values.flatten(1, -3)  # the slices of a volume as channels
    height, width = shape[-2:]
    thetas = [_map(draw, augment, height / width) for draw in draws]
    grid = functional.affine_grid(torch.tensor(thetas), list(flat.shape), align_corners=False)
    moved = functional.grid_sample(flat, grid, "bilinear", "reflection", align_corners=False)
    unmoved = torch.tensor([theta == _UNMOVED for theta in thetas])
    moved[unmoved] = flat[unmoved]
    light = [draw[8] < augment.chance for draw in draws]
    sized = (len(draws), *(1 for _ in flat.shape[1:]))
    factor = [
        1 + augment.contrast * (2 * d[9] - 1) if on else 1.0 for d, on in zip(draws, light, strict=True)
    ]
    offset = [augment.brightness * (2 * d[10] - 1) if on else 0.0 for d, on in zip(draws, light, strict=True)]
    moved = moved * torch.tensor(factor).view(sized) + torch.tensor(offset).view(sized)
    return moved.clamp_(0, 1).view(shape)


_UNMOVED = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def _map(draw: Sequence[float], augment: Augment, aspect: float) -> list[list[float]]:
    """Return the map from the result's normalised coordinates to the picture's; aspect is height : width."""
    signed = [2 * value - 1 for value in draw[4:8]]
    factor = 1 / (1 + augment.scale * signed[0]) if draw[0] < augment.chance else 1.0
    angle = math.radians(augment.rotate * signed[1]) if draw[1] < augment.chance else 0.0
    # A shift of a side is 2 in normalised coordinates.
    right, down = (2 * augment.shift * part if draw[2] < augment.chance else 0.0 for part in signed[2:])
    flip_x = -1.0 if "horizontal" in augment.flips and draw[3] < 0.5 else 1.0
    flip_y = -1.0 if "vertical" in augment.flips and draw[11] < 0.5 else 1.0
    cosine, sine = factor * math.cos(angle), factor * math.sin(angle)
    return [
        [cosine * flip_x, -sine * flip_y * aspect, right],
        [sine * flip_x / aspect, cosine * flip_y, down],
    ]


def form(options: Any) -> PictureForm:
    """Return how records are made of files in a job: as in training, without its transforms."""
    picture: Picture = options.contract.picture
    kind = "RGB" if picture.colour == "rgb" else "grey"
    size = " x ".join(map(str, reversed(picture.size)))
    what = "volumes (NIfTI)" if picture.dimensions == 3 else "pictures"
    fits = f"of {size} pixels" if picture.fit == "exact" else f"that become {size} pixels ({picture.fit})"
    return PictureForm(
        channels=3 if picture.channels == 3 else 1,
        transform=partial(_record, picture),
        said=f"{kind} {what} {fits}, as the contract has them ({options.contract.title})",
        read=partial(_read, picture),
        endings=NIFTI if picture.dimensions == 3 else (),
    )


def _read(picture: Picture, path: Path) -> Pixels:
    from tightframe.data.images.files import read_one

    return read_one(path, picture)


def _record(picture: Picture, pixels: Pixels) -> Any:
    import torch

    values = torch.from_numpy(np.array(np.moveaxis(pixels, -1, 0), order="C")).float().div_(255)
    return normalised(values, picture)
