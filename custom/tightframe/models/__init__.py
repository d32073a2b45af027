"""Backbones: the list of our own, and the entry point for those of other packages.

Another package adds a backbone by an entry point of the group ``tightframe.backbones``, whose object is
a ``BackboneSpec``; it is imported only if a job names it.
"""

from __future__ import annotations

from tightframe import registry
from tightframe.models.backbones.efficientnet import EFFICIENTNET_B0
from tightframe.models.backbones.mlp import IDENTITY, MLP
from tightframe.models.backbones.monai import MONAI
from tightframe.models.backbones.random_features import RANDOM_FEATURES
from tightframe.models.backbones.resnet import RESNET18, RESNET20
from tightframe.models.backbones.scattering import SCATTERING
from tightframe.models.backbones.small_cnns import CONV2CIFAR, FEDILC_CNN, SMALL_CNN
from tightframe.models.backbones.vgg11 import VGG11
from tightframe.models.backbones.wrn_28_10 import WRN_28_10
from tightframe.models.base import BackboneSpec
from tightframe.models.frozen import freeze, is_frozen
from tightframe.models.heads import Classifier, feature_width
from tightframe.registry import find

ENTRY_POINTS = registry.BACKBONES

BACKBONES: list[BackboneSpec] = [
    SMALL_CNN,
    EFFICIENTNET_B0,
    RESNET18,
    RESNET20,
    WRN_28_10,
    VGG11,
    CONV2CIFAR,
    FEDILC_CNN,
    MLP,
    MONAI,
    IDENTITY,
    RANDOM_FEATURES,
    SCATTERING,
]


def get(name: str) -> BackboneSpec:
    """Return the backbone of a name.

    Raises:
        JobError: if there is none, listing the known names, or if an entry point is not a backbone.
    """
    return find(BACKBONES, name, group=ENTRY_POINTS, kind=BackboneSpec, what="a backbone")


__all__ = ["BACKBONES", "BackboneSpec", "Classifier", "feature_width", "freeze", "get", "is_frozen"]
