"""Small CNNs of the papers' benchmarks.

``small_cnn``: three blocks of convolution, normalisation, ReLU and pooling, then global average pooling.
GroupNorm replaces BatchNorm: it has no running statistics that silos would have to average, does not
mix the records of a batch, and can be used with DP-SGD.

``conv2cifar``: FedNH's CIFAR experiments. Source: Dai et al., Tackling Data Heterogeneity in Federated
Learning with Class Prototypes, AAAI 2023 ("Conv2Cifar"): conv5x5-64, pool, conv5x5-64, pool, 384, 192, and a
head without bias. Feature width 192; 797,952 parameters with ten classes, 32 x 32 images and three channels.

``fedilc_cnn``: FedILC's Rotated-CIFAR10 experiments, for 16 x 16 images. Source: Zhu et al., FedILC: Weighted
Geometric Mean and Invariant Gradient Covariance for Federated Learning on Non-IID Data, 2022: convolutions
3-64-128-128 with GroupNorm(8) after each ReLU, a linear layer 128-128 and the classifier. Kernels of 3 x 3,
pooling by two after each block, the mean over the remaining pixels and a ReLU after the linear layer are our
choice, because the paper's text does not specify them. Feature width 128; 241,674 parameters with ten
classes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier, DropoutLinear
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


def build_small_cnn(options: SmallCnnOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
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
    name="small_cnn",
    title="small CNN with group normalisation",
    options=SmallCnnOptions,
    build=build_small_cnn,
)


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


def build_conv2cifar(options: Conv2CifarOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
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
    name="conv2cifar", title="Conv2Cifar (FedNH)", options=Conv2CifarOptions, build=build_conv2cifar
)


FEDILC_WIDTHS = (64, 128, 128)
FEDILC_FEATURES = 128


class FedIlcCnnOptions(Options):
    """FedILC's network for Rotated-CIFAR10, of 128 features.

    Attributes:
        dropout: of the head's input.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)


def build_fedilc_cnn(options: FedIlcCnnOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained CNN; features come after a ReLU.

    Raises:
        ValueError: if the input is not an image of at least 8 x 8 pixels.
    """
    channels = image_channels("fedilc_cnn", input_shape, 2 ** len(FEDILC_WIDTHS))
    layers: list[nn.Module] = []
    for width in FEDILC_WIDTHS:
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.GroupNorm(GROUPS, width),
            nn.MaxPool2d(2),
        ]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, FEDILC_FEATURES), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), FEDILC_FEATURES, num_classes, options.dropout)


FEDILC_CNN = BackboneSpec(
    name="fedilc_cnn", title="FedILC's CNN (16 x 16)", options=FedIlcCnnOptions, build=build_fedilc_cnn
)
