"""The CNN of FedILC's Rotated-CIFAR10 experiments, for 16 x 16 images.

Source: Zhu et al., FedILC: Weighted Geometric Mean and Invariant Gradient Covariance for Federated
Learning on Non-IID Data, 2022: convolutions 3-64-128-128 with GroupNorm(8) after each ReLU, a linear
layer 128-128 and the classifier. Kernels of 3 x 3, pooling by two after each block, the mean over the
remaining pixels and a ReLU after the linear layer are our choice, because the paper's text does not
specify them. Feature width 128; 241,674 parameters with ten classes.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import GROUPS

WIDTHS = (64, 128, 128)
FEATURE_WIDTH = 128


class FedIlcCnnOptions(Options):
    """FedILC's network for Rotated-CIFAR10, of 128 features.

    Attributes:
        dropout: of the head's input.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)


def build(options: FedIlcCnnOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained CNN; features come after a ReLU.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("fedilc_cnn", input_shape, 2 ** len(WIDTHS))
    layers: list[nn.Module] = []
    for width in WIDTHS:
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.GroupNorm(GROUPS, width),
            nn.MaxPool2d(2),
        ]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, FEATURE_WIDTH), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), FEATURE_WIDTH, num_classes, options.dropout)


FEDILC_CNN = BackboneSpec(
    name="fedilc_cnn", title="FedILC's CNN (16 x 16)", options=FedIlcCnnOptions, build=build
)
