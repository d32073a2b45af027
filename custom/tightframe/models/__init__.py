"""Backbones: a plain list, and an entry point for those of other packages.

A third-party package offers a backbone by an entry point of the group ``tightframe.backbones``
whose object is a ``BackboneSpec``; only the one that a job names is imported.
"""

from __future__ import annotations

from tightframe.models.base import BackboneSpec
from tightframe.models.efficientnet import EFFICIENTNET_B0
from tightframe.models.heads import Classifier, feature_width
from tightframe.models.resnet18 import RESNET18
from tightframe.models.small_cnn import SMALL_CNN
from tightframe.registry import find

ENTRY_POINTS = "tightframe.backbones"

BACKBONES: list[BackboneSpec] = [SMALL_CNN, EFFICIENTNET_B0, RESNET18]


def get(name: str) -> BackboneSpec:
    """The backbone that a job calls ``name``.

    Raises:
        JobError: if there is none, listing the known names, or if an entry point is no backbone.
    """
    return find(BACKBONES, name, group=ENTRY_POINTS, kind=BackboneSpec, what="a backbone")


__all__ = ["BACKBONES", "BackboneSpec", "Classifier", "feature_width", "get"]
