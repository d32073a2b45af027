"""ResNet18 in its variant for 32 x 32 images, the network of FedMR's CIFAR experiments.

Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016; the variant replaces
the 7 x 7 stem and its pooling by one 3 x 3 convolution. Feature width 512, 11.17 million
parameters with ten classes.
"""

from __future__ import annotations

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

STAGE_WIDTHS = (64, 128, 256, 512)


class ResNet18Options(Options):
    """Options of ``resnet18``.

    Attributes:
        norm: ``batch``, or ``group`` of eight groups.
        bn_momentum: weight of the newest batch in BatchNorm's running statistics.
        dropout: of the head's input.
    """

    norm: Norm = "batch"
    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: relu(shortcut(x) + residual(x))."""

    def __init__(self, channels: int, width: int, stride: int, options: ResNet18Options) -> None:
        super().__init__()
        self.residual = residual_branch(channels, width, stride, options.norm, options.bn_momentum)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = projection_shortcut(channels, width, stride, options.norm, options.bn_momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, width, H / stride, W / stride) of (B, channels, H, W)."""
        return torch.relu(self.shortcut(x) + self.residual(x))


def build(options: ResNet18Options, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained ResNet18; features are the 512 pooled activations.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("resnet18", input_shape, 8)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, STAGE_WIDTHS[0], 3, padding=1, bias=False),
        normalisation(options.norm, STAGE_WIDTHS[0], options.bn_momentum),
        nn.ReLU(),
    ]
    channels = STAGE_WIDTHS[0]
    for stage, width in enumerate(STAGE_WIDTHS):
        layers += [
            BasicBlock(channels, width, 1 if stage == 0 else 2, options),
            BasicBlock(width, width, 1, options),
        ]
        channels = width
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    initialise_convolutions(backbone)
    return Classifier(backbone, channels, num_classes, options.dropout)


RESNET18 = BackboneSpec(name="resnet18", title="ResNet18 (32 x 32)", options=ResNet18Options, build=build)
