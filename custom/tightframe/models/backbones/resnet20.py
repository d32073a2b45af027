"""ResNet20 for 32 x 32 images, the network of FedETF's CIFAR experiments.

Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2. Feature width
64; with ten classes 269,722 parameters with the paper's identity shortcuts (0.27 million), 272,474
with projections, which the experiments of FedETF have.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import (
    Norm,
    initialise_convolutions,
    normalisation,
    projection_shortcut,
    residual_branch,
)

STAGE_WIDTHS = (16, 32, 64)
BLOCKS = 3

Shortcut = Literal["projection", "identity"]


class ResNet20Options(Options):
    """Options of ``resnet20``.

    Attributes:
        shortcut: of blocks that change the shape: ``projection`` is a 1 x 1 convolution with
            normalisation (the paper's option B), ``identity`` takes every second pixel and zeros for the
            new channels (option A, without parameters).
        norm: ``batch``, or ``group`` of eight groups.
        bn_momentum: weight of the newest batch in BatchNorm's running statistics.
        dropout: of the head's input.
    """

    shortcut: Shortcut = "projection"
    norm: Norm = "batch"
    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class PaddedIdentity(nn.Module):
    """The paper's option A: every second pixel, and zeros for the new channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, channels + new_channels, H / 2, W / 2) of (B, channels, H, W)."""
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: relu(shortcut(x) + residual(x)); stride 2 on a new width."""

    def __init__(self, channels: int, width: int, options: ResNet20Options) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.residual = residual_branch(channels, width, stride, options.norm, options.bn_momentum)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width and options.shortcut == "identity":
            self.shortcut = PaddedIdentity(width - channels)
        elif channels != width:
            self.shortcut = projection_shortcut(channels, width, stride, options.norm, options.bn_momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, width, H / stride, W / stride) of (B, channels, H, W)."""
        return torch.relu(self.shortcut(x) + self.residual(x))


def build(options: ResNet20Options, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained ResNet20; features are the 64 pooled activations, which are not negative.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("resnet20", input_shape, 8)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, STAGE_WIDTHS[0], 3, padding=1, bias=False),
        normalisation(options.norm, STAGE_WIDTHS[0], options.bn_momentum),
        nn.ReLU(),
    ]
    channels = STAGE_WIDTHS[0]
    for width in STAGE_WIDTHS:
        for _ in range(BLOCKS):
            layers.append(Block(channels, width, options))
            channels = width
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    initialise_convolutions(backbone)
    return Classifier(backbone, channels, num_classes, options.dropout)


RESNET20 = BackboneSpec(name="resnet20", title="ResNet20 (32 x 32)", options=ResNet20Options, build=build)
