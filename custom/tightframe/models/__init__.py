"""Backbones: a plain list, and an entry point for those of other packages.

A third-party package offers a backbone by an entry point of the group ``tightframe.backbones``
whose object is a ``BackboneSpec``; only the one that a job names is imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from tightframe.errors import JobError
from tightframe.models.base import BackboneSpec
from tightframe.models.efficientnet import EFFICIENTNET_B0
from tightframe.models.heads import Classifier, feature_width
from tightframe.models.resnet18 import RESNET18
from tightframe.models.small_cnn import SMALL_CNN

ENTRY_POINTS = "tightframe.backbones"

BACKBONES: list[BackboneSpec] = [SMALL_CNN, EFFICIENTNET_B0, RESNET18]


def get(name: str) -> BackboneSpec:
    """The backbone that a job calls ``name``.

    Raises:
        JobError: if there is none, listing the known names, or if an entry point is no backbone.
    """
    for spec in BACKBONES:
        if spec.name == name:
            return spec
    offered = entry_points(group=ENTRY_POINTS)
    for entry in offered:
        if entry.name == name:
            spec = entry.load()
            if not isinstance(spec, BackboneSpec):
                raise JobError([f"Expected {entry.value!r} to be a BackboneSpec, but got {spec!r}"])
            return spec
    known = sorted({spec.name for spec in BACKBONES} | {entry.name for entry in offered})
    raise JobError([f"Expected a backbone of {known}, but got {name!r}"])


__all__ = ["BACKBONES", "BackboneSpec", "Classifier", "feature_width", "get"]
