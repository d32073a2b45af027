"""Scattering features: wavelet moduli, for pictures without a pretrained network.

Of each channel's paths (``models.scattering``) either their ``moments``: mean and standard deviation over
space, compressed by ``sign(x) log(1 + 300 |x|)``, each record centred; for textures, wherever they are. Or
their ``maps``: each path less its mean over space, over its root mean square; for shapes and where they are,
without what all pictures have in common, on which a record's length would be spent under privacy. Each record
is scaled to one length, and by default a random projection has a fixed width. Nothing of it depends on other
records.

Sources: Bruna and Mallat, Invariant Scattering Convolution Networks, PAMI 2013; Tramer and Boneh,
Differentially Private Learning Needs Better Features (or Much More Data), ICLR 2021, who train linear models
on such features under differential privacy. The opponent colours are those of van de Sande et al., Evaluating
Color Descriptors for Object and Scene Recognition, PAMI 2010, equation 1.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.scattering import MAX_SCALE, paths, scattering2d
from tightframe.models.scattering_products import ScatteringProducts

COMPRESSION = 300.0
GUARD = 1e-12
NOISE_COUNT, NOISE_SIDE, NOISE_SEED = 32, 32, 20240229
FAINT = 1e-3
"""Root mean square of a path that counts as little: pictures have values about 1."""
OPPONENT = (
    (1 / math.sqrt(2), -1 / math.sqrt(2), 0.0),
    (1 / math.sqrt(6), 1 / math.sqrt(6), -2 / math.sqrt(6)),
    (1 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)),
)
"""Red against green, yellow against blue, and the intensity, as rows over (red, green, blue)."""


class ScatteringOptions(Options):
    """No parameters: wavelet moduli over scales and angles, their logarithm, and a random projection.

    Attributes:
        J: scales; the largest wavelet covers about 2^J pixels.
        L: angles.
        keep: of each path: ``moments`` takes mean and deviation over space; ``maps`` where they are, relative
            to each one's size (for digits and other shapes, and under privacy).
        reference: ``noise`` takes the mean features of public pictures of noise from a record's: most of what
            the moments of all pictures have in common, on which its length would be spent under privacy.
        colours: ``rgb`` takes the channels as they are; ``opponent`` turns three into opponent colours.
        length: of a record's features, before the projection. Closed forms shorten them to 1; a head that is
            trained by gradients learns faster from longer ones, ``fedsgd`` from 8.
        width: of the random projection, the feature width; None leaves it out.
        seed: of the projection, which is public.
        dropout: of the head's input.
    """

    J: int = Field(default=4, ge=1, le=MAX_SCALE)
    L: int = Field(default=8, ge=1, le=32)
    keep: Literal["moments", "maps"] = "moments"
    reference: Literal["none", "noise"] = "none"
    colours: Literal["rgb", "opponent"] = "opponent"
    length: float = Field(default=1.0, gt=0, le=1000)
    width: int | None = Field(default=256, ge=1, le=65536)
    seed: int = Field(default=0, ge=0, lt=2**31)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class ScatteringFeatures(nn.Module):
    """The features of pictures; without parameters, and nothing of it is part of the model's state.

    Args:
        input_shape: of a picture, (C, H, W).
        options: of the backbone; opponent colours need three channels.
    """

    colours: torch.Tensor | None
    reference: torch.Tensor | None
    projection: torch.Tensor | None

    def __init__(self, input_shape: tuple[int, ...], options: ScatteringOptions) -> None:
        super().__init__()
        channels, height, side = input_shape
        self.scales, self.angles = options.J, options.L
        self.keep, self.length = options.keep, options.length
        self.sides = (height, side)
        self.products: nn.Module | None = None
        colours = torch.tensor(OPPONENT) if options.colours == "opponent" and channels == 3 else None
        self.register_buffer("colours", colours, persistent=False)
        of_path = 2 if options.keep == "moments" else (height >> options.J) * (side >> options.J)
        whole = of_path * channels * paths(options.J, options.L)
        projection = None
        if options.width is not None:
            stream = torch.Generator().manual_seed(options.seed)
            projection = torch.randn(options.width, whole, generator=stream, dtype=torch.float64)
            projection = projection.div(math.sqrt(options.width)).float()
        self.register_buffer("projection", projection, persistent=False)
        self.register_buffer("reference", None, persistent=False)
        if options.reference == "noise":
            noise = _noise_features(channels, options.J, options.L, options.colours)
            self.reference = noise.float()  # a tensor of this model's own
        self.feature_width = whole if options.width is None else options.width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features (B, d) of pictures (B, C, H, W)."""
        unit = _unit(self._whole(x))
        if self.reference is not None:
            unit = _unit(unit - self.reference.to(unit.dtype))
        if self.length != 1:
            unit = unit * self.length
        return unit if self.projection is None else nn.functional.linear(unit, self.projection.to(unit.dtype))

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is kept of all paths, (B, w), of any length."""
        if self.colours is not None:
            x = torch.einsum("oc,bchw->bohw", self.colours.to(x.dtype), x)
        channels = x.flatten(0, 1)
        if self.products is None:
            maps = scattering2d(channels.contiguous(), self.scales, self.angles).flatten(2)
        else:
            maps = self.products(channels).flatten(2)
        wide = x.shape[1] * maps.shape[1]
        return (
            self._moments(maps, wide)
            if self.keep == "moments"
            else _relative(maps).reshape(-1, wide * maps.shape[2])
        )

    def prepare_export(self) -> None:
        """Compute from here on what other programs can hold: the same to rounding, and slower."""
        self.products = ScatteringProducts(*self.sides, self.scales, self.angles)

    @staticmethod
    def _moments(maps: torch.Tensor, wide: int) -> torch.Tensor:
        moments = torch.cat([maps.mean(2), maps.std(2, correction=0)], dim=1).reshape(-1, 2 * wide)
        compressed = moments.sign() * torch.log1p(COMPRESSION * moments.abs())
        return compressed - compressed.mean(1, keepdim=True)


def _unit(features: torch.Tensor) -> torch.Tensor:
    return features / torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp_min(GUARD)


@cache
def _noise_features(
    channels: int,
    J: int,  # noqa: N803
    L: int,  # noqa: N803
    colours: Literal["rgb", "opponent"],
) -> torch.Tensor:
    """Return the mean features of pictures of noise, float64, computed once: a run builds many models."""
    side = max(NOISE_SIDE, 2 << J)
    options = ScatteringOptions(J=J, L=L, colours=colours, width=None)
    whole = ScatteringFeatures((channels, side, side), options)._whole(noise_pictures(channels, side))
    return _unit(whole.mean(0))


def noise_pictures(channels: int, side: int) -> torch.Tensor:
    """Return public pictures (B, C, side, side), the same in every job: noise with the spectrum of pictures.

    Their amplitudes fall with the frequency to the power 1.5, channels are alike but for a part, and each has
    an offset.
    """
    stream = torch.Generator().manual_seed(NOISE_SEED)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    white = 1.5 * drawn(NOISE_COUNT, 1, side, side) + 0.7 * drawn(NOISE_COUNT, channels, side, side)
    axis = torch.fft.fftfreq(side, dtype=torch.float64)
    frequency = (axis[:, None] ** 2 + axis**2).sqrt().clamp_min(1 / side)
    pictures = torch.fft.ifft2(torch.fft.fft2(white) / frequency**1.5).real
    pictures = pictures / pictures.flatten(1).std(1)[:, None, None, None]
    return pictures + 0.5 * drawn(NOISE_COUNT, channels, 1, 1)


def _relative(maps: torch.Tensor) -> torch.Tensor:
    """Return paths (B, K, P) less their mean over space, over their root mean square."""
    size = maps.square().mean(2, keepdim=True).sqrt()
    return (maps - maps.mean(2, keepdim=True)) / (size + FAINT)


def build(options: ScatteringOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a head on scattering features.

    Raises:
        ValueError: if the input is not an image of at least 2^J x 2^J pixels.
    """
    image_channels("scattering", input_shape, 2**options.J)
    if options.reference == "noise" and options.keep == "maps":
        raise ValueError(
            "Expected `reference` none with `keep` maps, which have nothing in common with noise."
        )
    backbone = ScatteringFeatures(input_shape, options)
    return Classifier(backbone, backbone.feature_width, num_classes, options.dropout)


SCATTERING = BackboneSpec(
    name="scattering", title="scattering transform", options=ScatteringOptions, build=build, frozen=True
)
