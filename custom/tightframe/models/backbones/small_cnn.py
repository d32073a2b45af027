"""The small CNN of the papers' benchmarks, with group normalisation.

Three blocks of convolution, normalisation, ReLU and pooling, then global average pooling.
GroupNorm replaces BatchNorm: it has no running statistics that silos would have to average, does not
mix the records of a batch, and can be used with DP-SGD.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import GROUPS


class SmallCnnOptions(Options):
    """Blocks with GroupNorm: widths are multiples of 8.

    Attributes:
        widths: channels of each block; the last one is the feature width.
        dropout: of the head's input.
    """

    widths: Annotated[tuple[int, ...], Field(strict=False, min_length=1, max_length=6)] = (32, 64, 128)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @field_validator("widths")
    @classmethod
    def _grouped(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < GROUPS or width % GROUPS for width in widths):
            raise ValueError(f"Expected positive multiples of {GROUPS}, but got {list(widths)}")
        return widths


def _block(channels: int, width: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]


def build(options: SmallCnnOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained small CNN; features come after a ReLU.

    Raises:
        ValueError: if the input is not an image large enough to be halved by every block.
    """
    channels = image_channels("small_cnn", input_shape, 2 ** len(options.widths))
    layers: list[nn.Module] = []
    for width in options.widths:
        layers += _block(channels, width)
        channels = width
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    return Classifier(backbone, channels, num_classes, options.dropout)


SMALL_CNN = BackboneSpec(
    name="small_cnn", title="small CNN with group normalisation", options=SmallCnnOptions, build=build
)
