"""MONAI's EfficientNet-b0, the network of FLamby's Fed-ISIC2019 benchmark.

Source: Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks,
ICML 2019. MONAI is imported only when a network is built: the import takes seconds, and jobs with
other backbones do not need it.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options, image_channels
from tightframe.models.heads import Classifier

FEATURE_WIDTH = 1280


class EfficientNetOptions(Options):
    """MONAI's, of 1,280 features: FLamby's network for Fed-ISIC2019.

    Attributes:
        bn_momentum: weight of the newest batch in BatchNorm's running statistics (torch's
            convention). With MONAI's 0.01 they lag for hundreds of steps, more than a round has.
        dropout: of the head's input.
    """

    bn_momentum: float = Field(default=0.1, gt=0, le=1)
    dropout: float = Field(default=0.2, ge=0, lt=1)


def build(options: EfficientNetOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained EfficientNet-b0; features are the 1280 pooled activations.

    No weights are downloaded; ``models.pretrained`` loads them from a file.

    Raises:
        ValueError: if the input is not an image of at least 32 x 32 pixels.
    """
    from monai.networks.nets.efficientnet import EfficientNetBN

    channels = image_channels("efficientnet_b0", input_shape, 32)
    backbone = EfficientNetBN(
        "efficientnet-b0",
        pretrained=False,
        spatial_dims=2,
        in_channels=channels,
        num_classes=num_classes,
        norm=("batch", {"eps": 1e-3, "momentum": options.bn_momentum}),
    )
    # The classifier and its dropout belong to the head; the rest ends in the pooled features.
    backbone.add_module("_dropout", nn.Identity())
    backbone.add_module("_fc", nn.Identity())
    return Classifier(backbone, FEATURE_WIDTH, num_classes, options.dropout)


EFFICIENTNET_B0 = BackboneSpec(
    name="efficientnet_b0", title="EfficientNet-b0 (MONAI)", options=EfficientNetOptions, build=build
)
