"""The contract of pictures: what every silo's picture is, whatever its files look like. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tightframe.data.contract import Bound, Column, Contract, Text
from tightframe.options import StrictModel

Share = Annotated[float, Field(ge=0, le=1)]
Plane = Literal["horizontal", "vertical"]
MOST_SIDES = {2: 1024, 3: 256}
"""Dimensions -> most pixels along a side."""


class Window(StrictModel):
    """The range of a grey picture's values: ``low`` and below is black, ``high`` and above white.

    Attributes:
        low, high: in the values of the file: of DICOM after rescaling (Hounsfield units), of NIfTI after its
            scaling, of others as they are stored.
    """

    low: Bound
    high: Bound

    @model_validator(mode="after")
    def _is_a_range(self) -> Window:
        if not self.low < self.high:
            raise ValueError("Expected `low` below `high`")
        return self


class Augment(StrictModel):
    """Random transforms of training records, drawn for each epoch; by default Fed-ISIC2019's ranges.

    All are in the plane of the last two axes, the same for all slices of a volume. None of them may change
    what the class is: no flips where left and right matter.

    Attributes:
        flips: axes along which a picture is mirrored, each with probability one half.
        rotate: degrees to either side.
        scale: zoom factor 1 +- scale.
        shift: of a side, to either side.
        brightness: added, of the whole range.
        contrast: factor 1 +- contrast.
        chance: probability of each transform but the flips.
    """

    flips: Annotated[tuple[Plane, ...], Field(strict=False)] = ("horizontal", "vertical")
    rotate: float = Field(default=50.0, ge=0, le=180)
    scale: float = Field(default=0.07, ge=0, le=0.5)
    shift: float = Field(default=0.05, ge=0, le=0.5)
    brightness: Share = 0.15
    contrast: Share = 0.1
    chance: Share = 0.5


class Picture(StrictModel):
    """The picture of a record: 8 bits for each pixel and channel, then ``(x / 255 - mean) / std``.

    Attributes:
        column: of the file's path, under the site's ``root``.
        size: (height, width) in pixels, or of a volume (depth, height, width).
        colour: ``rgb`` or ``gray``; a picture of the other kind breaks the contract. Volumes are grey.
        fit: how a larger picture becomes one of this size: ``exact``: it breaks the contract; ``crop``:
            scaled until it covers the size, its middle is kept; ``pad``: scaled until it is inside, black
            around; ``stretch``: scaled along each axis. A picture that is smaller along any axis breaks the
            contract; of ``pad``, one that is smaller along all.
        window: of grey pictures; None takes all values that the file's bits can hold, of DICOM the file's own
            window if it has one. Volumes need one.
        mean, std: for each channel, of pixels in [0, 1]; one half by default, which gives [-1, 1].
        modality: the only one that DICOM files may have, such as ``DX``; None for any.
        augment: of training records; None for none.
    """

    column: Text
    size: Annotated[tuple[int, ...], Field(strict=False, min_length=2, max_length=3)]
    colour: Literal["rgb", "gray"]
    fit: Literal["exact", "crop", "pad", "stretch"] = "crop"
    window: Window | None = None
    mean: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    std: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    modality: Text | None = None
    augment: Augment | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Picture:
        most = MOST_SIDES[self.dimensions]
        problems = []
        if not all(8 <= side <= most for side in self.size):
            problems.append(f"sides of 8 to {most} pixels in `size`")
        if self.colour == "rgb" and (self.window is not None or self.dimensions == 3):
            problems.append("`gray` as `colour` of a volume, and where there is a `window`")
        if self.dimensions == 3 and self.window is None:
            problems.append("a `window` of a volume, whose files do not have the range of their values")
        if self.dimensions == 3 and self.modality is not None:
            problems.append("no `modality` of a volume, because NIfTI files have none")
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != self.channels:
                problems.append(f"{self.channels} values in `{key}`")
        if self.std is not None and not all(1e-3 <= value <= 1e3 for value in self.std):
            problems.append("values of 0.001 to 1000 in `std`")
        if self.mean is not None and not all(abs(value) <= 1e3 for value in self.mean):
            problems.append("values of -1000 to 1000 in `mean`")
        if problems:
            raise ValueError(f"Expected {'; '.join(problems)}")
        return self

    @property
    def dimensions(self) -> int:
        """Number of axes of space: 2 or 3."""
        return len(self.size)

    @property
    def channels(self) -> int:
        """Number of values of a pixel."""
        return 3 if self.colour == "rgb" else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a record: (channels, height, width) or (1, depth, height, width)."""
        return (self.channels, *self.size)

    @property
    def formula(self) -> str:
        """How the model's values are made from a pixel x of 8 bits, channel by channel.

        >>> Picture(column="file", size=(8, 8), colour="gray").formula
        '(x / 255 - 0.5) / 0.5'
        """
        half = (0.5,) * self.channels
        mean, std = self.mean or half, self.std or half
        formulas = [f"(x / 255 - {of:g}) / {by:g}" for of, by in zip(mean, std, strict=True)]
        return formulas[0] if len(set(formulas)) == 1 else f"by channel: {'; '.join(formulas)}"


class PictureContract(Contract):
    """Contract of pictures: a picture and its label; all else as in a table's contract.

    Attributes:
        picture: from which the model learns.
    """

    columns: Annotated[tuple[Column, ...], Field(strict=False, max_length=0)] = ()
    picture: Picture

    @model_validator(mode="after")
    def _has_its_own_column(self) -> PictureContract:
        if self.picture.column in super().wanted:
            raise ValueError(f"Expected one role for the column {self.picture.column!r}")
        return self

    @property
    def wanted(self) -> tuple[str, ...]:
        """Every column that a site must have, by its name in the contract."""
        return (self.picture.column, *super().wanted)
