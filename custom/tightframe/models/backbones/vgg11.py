"""VGG11 without normalisation for 32 x 32 images, the network of FedRS's and FedAvg_ETF's experiments.

Source: Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR
2015, configuration A; here the fully connected layers have 512 units, as in FedRepo for 32 x 32 images.
Feature width 512; 9,750,922 parameters with ten classes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier
from tightframe.models.layers import initialise_convolutions

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))

Width = Annotated[int, Field(ge=1, le=8192)]


class Vgg11Options(Options):
    """FedAvg_ETF's network.

    Attributes:
        hidden: widths of the fully connected layers before the head; the last one is the feature
            width. Without these layers the features are the 512 of the last convolution.
        hidden_dropout: between fully connected layers; part of the backbone, whatever the head.
        dropout: of the head's input.
    """

    hidden: Annotated[tuple[Width, ...], Field(strict=False, max_length=4)] = (512, 512)
    hidden_dropout: float = Field(default=0.5, ge=0, lt=1)
    dropout: float = Field(default=0.5, ge=0, lt=1)


def build(options: Vgg11Options, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained VGG11; features come after a ReLU.

    The activations of larger images are averaged after the last pooling.

    Raises:
        ValueError: if the input is not an image of at least 32 x 32 pixels.
    """
    channels = image_channels("vgg11", input_shape, 32)
    layers: list[nn.Module] = []
    for widths in STAGES:
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(1)]
    for place, width in enumerate(options.hidden):
        if place:
            layers.append(nn.Dropout(options.hidden_dropout))
        layers += [nn.Linear(channels, width), nn.ReLU()]
        channels = width
    backbone = nn.Sequential(*layers)
    initialise_convolutions(backbone)
    for module in backbone:
        # Without normalisation, torch's smaller default weights stall training for hundreds of steps.
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return Classifier(backbone, channels, num_classes, options.dropout)


VGG11 = BackboneSpec(
    name="vgg11", title="VGG11 without normalisation (32 x 32)", options=Vgg11Options, build=build
)
