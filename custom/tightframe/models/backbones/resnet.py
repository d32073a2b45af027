"""ResNet18 and ResNet20 for 32 x 32 images, the networks of FedMR's and FedETF's CIFAR experiments.

Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016. ResNet20 is that of section 4.2:
feature width 64; with ten classes 269,722 parameters with the paper's identity shortcuts (0.27 million),
272,474 with projections, which the experiments of FedETF have. ResNet18 is the network for ImageNet with one
3 x 3 convolution in place of the 7 x 7 stem and its pooling: feature width 512, 11.17 million parameters with
ten classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import Norm, initialise_convolutions, normalisation

WIDTHS_18, BLOCKS_18 = (64, 128, 256, 512), 2
WIDTHS_20, BLOCKS_20 = (16, 32, 64), 3
"""Channels of the stages, and blocks of each."""

Shortcut = Literal["projection", "identity"]


class ResNet18Options(Options):
    """FedMR's network, of 512 features.

    Attributes:
        norm: ``batch``, or ``group`` of eight groups.
        bn_momentum: weight of the newest batch in BatchNorm's running statistics.
        dropout: of the head's input.
    """

    norm: Norm = "batch"
    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class ResNet20Options(ResNet18Options):
    """FedETF's network, of 64 features.

    Attributes:
        shortcut: of blocks that change the shape: ``projection`` is a 1 x 1 convolution with
            normalisation (the paper's option B), ``identity`` takes every second pixel and zeros for the
            new channels (option A, without parameters).
    """

    shortcut: Shortcut = "projection"


class PaddedIdentity(nn.Module):
    """The paper's option A: every second pixel, and zeros for the new channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, channels + new_channels, H / 2, W / 2) of (B, channels, H, W)."""
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: relu(shortcut(x) + residual(x)); stride 2 on a new width."""

    def __init__(self, channels: int, width: int, options: ResNet18Options, shortcut: Shortcut) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        norm, momentum = options.norm, options.bn_momentum
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            normalisation(norm, width, momentum),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            normalisation(norm, width, momentum),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != width and shortcut == "identity":
            self.shortcut = PaddedIdentity(width - channels)
        elif channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), normalisation(norm, width, momentum)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, width, H / stride, W / stride) of (B, channels, H, W)."""
        return torch.relu(self.shortcut(x) + self.residual(x))


def build_18(options: ResNet18Options, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained ResNet18; features are the 512 pooled activations, which are not negative.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("resnet18", input_shape, 8)
    backbone = _backbone(channels, WIDTHS_18, BLOCKS_18, options)
    return Classifier(backbone, WIDTHS_18[-1], num_classes, options.dropout)


def build_20(options: ResNet20Options, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained ResNet20; features are the 64 pooled activations, which are not negative.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("resnet20", input_shape, 8)
    backbone = _backbone(channels, WIDTHS_20, BLOCKS_20, options, options.shortcut)
    return Classifier(backbone, WIDTHS_20[-1], num_classes, options.dropout)


def _backbone(
    channels: int,
    widths: tuple[int, ...],
    blocks: int,
    options: ResNet18Options,
    shortcut: Shortcut = "projection",
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
        normalisation(options.norm, widths[0], options.bn_momentum),
        nn.ReLU(),
    ]
    channels = widths[0]
    for width in widths:
        for _ in range(blocks):
            layers.append(BasicBlock(channels, width, options, shortcut))
            channels = width
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    initialise_convolutions(backbone)
    return backbone


RESNET18 = BackboneSpec(name="resnet18", title="ResNet18 (32 x 32)", options=ResNet18Options, build=build_18)
RESNET20 = BackboneSpec(name="resnet20", title="ResNet20 (32 x 32)", options=ResNet20Options, build=build_20)
