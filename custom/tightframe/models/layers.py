"""Layers shared by several backbones: normalisation, parts of a basic block, He's initialisation."""

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


def residual_branch(channels: int, width: int, stride: int, norm: Norm, momentum: float) -> nn.Sequential:
    """Build a basic block's two normalised 3 x 3 convolutions, without its last ReLU (He et al., 2016)."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
        normalisation(norm, width, momentum),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        normalisation(norm, width, momentum),
    )


def projection_shortcut(channels: int, width: int, stride: int, norm: Norm, momentum: float) -> nn.Sequential:
    """Build the shortcut of a basic block that changes the shape: a normalised 1 x 1 convolution."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 1, stride, bias=False), normalisation(norm, width, momentum)
    )


def initialise_convolutions(model: nn.Module) -> None:
    """Initialise every convolution with He's normal distribution by fan-out, and biases with zero.

    Source: He et al., Delving Deep into Rectifiers, ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
