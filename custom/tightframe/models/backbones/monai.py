"""Networks of MONAI for pictures and volumes: DenseNet, ResNet, SE-ResNet, ViT and EfficientNet.

A record's shape decides: (channels, height, width) gives the two-dimensional network, (channels, depth,
height, width) the three-dimensional one. Features are what the network's own last linear layer would get, so
that weights of MONAI's networks load under ``backbone.`` and their names there, but for that layer.

Sources: Huang et al., Densely Connected Convolutional Networks, CVPR 2017; He et al., Deep Residual Learning
for Image Recognition, CVPR 2016; Hu et al., Squeeze-and-Excitation Networks, CVPR 2018; Dosovitskiy et al.,
An Image is Worth 16x16 Words, ICLR 2021; Tan and Le, EfficientNet, ICML 2019. MONAI is imported only when a
network is built: the import takes seconds.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe.models.base import BackboneSpec, Options
from tightframe.models.heads import Classifier

Network = Literal[
    "DenseNet121",
    "DenseNet169",
    "DenseNet201",
    "DenseNet264",
    "ResNet10",
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "SEResNet50",
    "SEResNet101",
    "SEResNet152",
    "ViT",
    "EfficientNet-b0",
    "EfficientNet-b1",
    "EfficientNet-b2",
    "EfficientNet-b3",
    "EfficientNet-b4",
]
SMALLEST = 32


class MonaiOptions(Options):
    """One of MONAI's for images, or for volumes (channels, depth, height, width).

    Attributes:
        network: DenseNet121/169/201/264, ResNet10/18/34/50/101/152, SEResNet50/101/152, EfficientNet-b0 to
            -b4, or ViT, which needs ``tightframe[vit]``.
        bn_momentum: weight of the newest batch in BatchNorm's running statistics (torch's convention).
        dropout: of the head's input.
        patch_size, hidden_size, mlp_dim, num_layers, num_heads: of ``ViT``; ViT-B/16 by default.
    """

    network: Network = "DenseNet121"
    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    patch_size: int = Field(default=16, ge=1, le=256)
    hidden_size: int = Field(default=768, ge=1, le=4096)
    mlp_dim: int = Field(default=3072, ge=1, le=16384)
    num_layers: int = Field(default=12, ge=1, le=48)
    num_heads: int = Field(default=12, ge=1, le=64)

    @model_validator(mode="after")
    def _heads_divide(self) -> MonaiOptions:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"Expected `num_heads` to divide `hidden_size` {self.hidden_size}, but got {self.num_heads}"
            )
        return self


def build(options: MonaiOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained network; features are the input of the network's last linear layer.

    No weights are downloaded; ``models.pretrained`` loads them from a file.

    Raises:
        ValueError: if the input is neither an image nor a volume with sides of at least 32, or for ``ViT``
            a side is no multiple of the patches.
    """
    dimensions = len(input_shape) - 1
    if dimensions not in (2, 3) or min(input_shape[1:]) < SMALLEST:
        raise ValueError(
            f"Expected monai to get images (channels, height, width) or volumes (channels, depth, height, "
            f"width) with sides of at least {SMALLEST}, but got the shape {input_shape}."
        )
    backbone, width = _network(options, input_shape, dimensions)
    for module in backbone.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = options.bn_momentum
    return Classifier(backbone, width, num_classes, options.dropout)


def _network(options: MonaiOptions, shape: tuple[int, ...], dimensions: int) -> tuple[nn.Module, int]:
    """Return the network without its last linear layer, and the width of what that would get."""
    from monai.networks import nets

    name, channels = options.network, shape[0]
    if name == "ViT":
        return _vision_transformer(options, shape, dimensions)
    network: Any
    if name.startswith("EfficientNet"):
        network = nets.EfficientNetBN(
            name.lower(), pretrained=False, spatial_dims=dimensions, in_channels=channels
        )
        network.add_module("_dropout", nn.Identity())  # the head has a dropout of its own
        return _without(network, "_fc")
    if name.startswith("ResNet"):
        make = getattr(nets, name.lower())
        return _without(make(spatial_dims=dimensions, n_input_channels=channels), "fc")
    if name.startswith("SEResNet"):
        network = getattr(nets, name)(spatial_dims=dimensions, in_channels=channels)
        return _without(network, "last_linear")
    network = getattr(nets, name)(spatial_dims=dimensions, in_channels=channels, out_channels=2)
    return _without(network, "class_layers.out")


def _without(network: nn.Module, last: str) -> tuple[nn.Module, int]:
    """Take a network's last linear layer away; return the network and the layer's input width."""
    parent, _, name = last.rpartition(".")
    owner = network.get_submodule(parent)
    width = int(getattr(owner, name).in_features)
    owner.add_module(name, nn.Identity())
    return network, width


def _vision_transformer(
    options: MonaiOptions, shape: tuple[int, ...], dimensions: int
) -> tuple[nn.Module, int]:
    from monai.networks.nets import ViT

    if find_spec("einops") is None:
        raise ValueError(
            "Expected the package einops, which MONAI's ViT needs, but it is not installed: pip install "
            "'tightframe[vit]'."
        )
    if any(side % options.patch_size for side in shape[1:]):
        raise ValueError(
            f"Expected sides that are multiples of `patch_size` {options.patch_size}, but got the shape "
            f"{shape}."
        )

    class ClassToken(ViT):
        """MONAI's network returns each layer's output beside the class token; a subclass keeps its names."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            token: torch.Tensor = super().forward(x)[0]
            return token

    network = ClassToken(
        in_channels=shape[0],
        img_size=shape[1:],
        patch_size=options.patch_size,
        hidden_size=options.hidden_size,
        mlp_dim=options.mlp_dim,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        classification=True,
        spatial_dims=dimensions,
    )
    network.add_module("classification_head", nn.Identity())
    return network, options.hidden_size


MONAI = BackboneSpec(name="monai", title="network of MONAI", options=MonaiOptions, build=build)
