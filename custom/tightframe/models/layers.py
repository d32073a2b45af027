"""Layers shared by several backbones: normalisation, He's initialisation."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

Norm: TypeAlias = Literal["batch", "group"]
"""``batch`` as in the papers; ``group`` if records must not mix (DP-SGD) or batches are tiny."""

GROUPS = 8


def normalisation(kind: Norm, width: int, momentum: float) -> nn.Module:
    """Build BatchNorm, or GroupNorm of eight groups, over ``width`` channels.

    Args:
        kind: ``batch`` or ``group``.
        width: channels, for ``group`` a multiple of eight.
        momentum: weight of the newest batch in BatchNorm's running statistics.

    Raises:
        ValueError: if ``kind`` is ``group`` and eight groups do not divide the channels.
    """
    if kind == "batch":
        return nn.BatchNorm2d(width, momentum=momentum)
    if width % GROUPS:
        raise ValueError(
            f"Expected a multiple of {GROUPS} channels for group normalisation, but got {width}."
        )
    return nn.GroupNorm(GROUPS, width)


def initialise_convolutions(model: nn.Module) -> None:
    """Initialise every convolution with He's normal distribution by fan-out, and biases with zero.

    Source: He et al., Delving Deep into Rectifiers, ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
