"""Two convolutions and two fully connected layers, the CNN of FedNH's CIFAR experiments.

Source: Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023
("Conv2Cifar"): conv5x5-64, pool, conv5x5-64, pool, 384, 192, and a head without bias. Feature width
192; 797,952 parameters with ten classes, 32 x 32 images and three channels.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier, DropoutLinear

CHANNELS = 64
HIDDEN, FEATURE_WIDTH = 384, 192
SMALLEST = 16  # a smaller image has no pixel left after both convolutions and poolings


class Conv2CifarOptions(Options):
    """FedNH's network for 32 x 32, of 192 features.

    Attributes:
        head_bias: whether the head has a bias; FedNH compares all methods without one.
        dropout: of the head's input.
    """

    head_bias: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)


def build(options: Conv2CifarOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained Conv2Cifar; features come after a ReLU.

    Raises:
        ValueError: if the input is not an image of at least 16 x 16 pixels.
    """
    channels = image_channels("conv2cifar", input_shape, SMALLEST)
    height, width = (_after(_after(size)) for size in input_shape[1:])
    backbone = nn.Sequential(
        nn.Conv2d(channels, CHANNELS, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, CHANNELS, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(1),
        nn.Linear(CHANNELS * height * width, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, FEATURE_WIDTH),
        nn.ReLU(),
    )
    head = DropoutLinear(FEATURE_WIDTH, num_classes, options.dropout, bias=options.head_bias)
    return Classifier(backbone, FEATURE_WIDTH, num_classes, head=head)


def _after(pixels: int) -> int:
    """Return the pixels of one axis after a 5 x 5 convolution without padding, and pooling by two."""
    return (pixels - 4) // 2


CONV2CIFAR = BackboneSpec(
    name="conv2cifar", title="Conv2Cifar (FedNH)", options=Conv2CifarOptions, build=build
)
