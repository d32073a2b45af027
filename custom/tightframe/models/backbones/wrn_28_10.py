"""WideResNet-28-10 for 32 x 32 images, the network of FedMR's CIFAR-100 experiments.

Source: Zagoruyko and Komodakis, Wide Residual Networks, BMVC 2016. Feature width 640. With 100 classes
it has 36,536,884 parameters as published (36.5 million). FedMR reports 36.565 million, which is the size of
the state (parameters, BatchNorm's statistics and step counters) of the network with biases in all
convolutions, 36,564,957. So biases are the default here, and ``conv_bias=false`` is the original.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import Norm, initialise_convolutions, normalisation

BASE_WIDTH = 16
STAGES = 3
BLOCKS = 4  # depth 28: 3 stages of 4 blocks of two convolutions, the stem, and by convention 3 more


class WideResNetOptions(Options):
    """FedMR's network for CIFAR-100; without ``conv_bias`` the original one.

    Attributes:
        widen_factor: factor of the channels of a plain ResNet; 10 in the network of this name, less for a
            smaller one. The feature width is 64 times this.
        block_dropout: between the two convolutions of each block.
        conv_bias: whether convolutions have biases.
        norm: ``batch``, or ``group`` of eight groups.
        bn_momentum: weight of the newest batch in BatchNorm's running statistics.
        dropout: of the head's input.
    """

    widen_factor: int = Field(default=10, ge=1, le=32)
    block_dropout: float = Field(default=0.3, ge=0, lt=1)
    conv_bias: bool = True
    norm: Norm = "batch"
    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class WideBlock(nn.Module):
    """A residual block with normalisation and ReLU before each convolution.

    If the shape changes, the shortcut projects the input after the first ReLU.
    """

    def __init__(self, channels: int, width: int, stride: int, options: WideResNetOptions) -> None:
        super().__init__()
        bias = options.conv_bias
        self.preactivation = nn.Sequential(
            normalisation(options.norm, channels, options.bn_momentum), nn.ReLU()
        )
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=bias),
            normalisation(options.norm, width, options.bn_momentum),
            nn.ReLU(),
            nn.Dropout(options.block_dropout),
            nn.Conv2d(width, width, 3, padding=1, bias=bias),
        )
        self.projection: nn.Module | None = None
        if stride != 1 or channels != width:
            self.projection = nn.Conv2d(channels, width, 1, stride, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (B, width, H / stride, W / stride) of (B, channels, H, W)."""
        activated = self.preactivation(x)
        shortcut = x if self.projection is None else self.projection(activated)
        activations: torch.Tensor = shortcut + self.residual(activated)
        return activations


def build(options: WideResNetOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained WideResNet of depth 28; features are the pooled activations, which are not negative.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("wrn_28_10", input_shape, 8)
    layers: list[nn.Module] = [nn.Conv2d(channels, BASE_WIDTH, 3, padding=1, bias=options.conv_bias)]
    channels = BASE_WIDTH
    for stage in range(STAGES):
        width = BASE_WIDTH * 2**stage * options.widen_factor
        for block in range(BLOCKS):
            layers.append(WideBlock(channels, width, 2 if stage and not block else 1, options))
            channels = width
    layers += [normalisation(options.norm, channels, options.bn_momentum), nn.ReLU()]
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    initialise_convolutions(backbone)
    return Classifier(backbone, channels, num_classes, options.dropout)


WRN_28_10 = BackboneSpec(
    name="wrn_28_10", title="WideResNet-28-10 (32 x 32)", options=WideResNetOptions, build=build
)
