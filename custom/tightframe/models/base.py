"""The interface between backbones and the rest of Tightframe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import nn

from tightframe.options import StrictModel


class Options(StrictModel):
    """Base of backbone options: frozen, unknown keys refused, no silent coercion."""


@dataclass(frozen=True)
class BackboneSpec:
    """A registry entry.

    Attributes:
        options: pydantic model (frozen) of a job's options.
        build: (options, input_shape, num_classes) -> an untrained model with
            ``features(x) -> (B, d)``, ``head`` and ``forward = head(features)``.
        frozen: whether nothing but the head trains in any job, because the features are a function that the
            options fix.
        logits_only: whether its models return logits (B, C) and have neither ``features`` nor ``head``; then
            they fit only methods that need no more (``phases.Method.network``).
    """

    name: str
    title: str
    options: type[BaseModel]
    build: Callable[[Any, tuple[int, ...], int], nn.Module]
    frozen: bool = False
    logits_only: bool = False


def image_channels(name: str, input_shape: tuple[int, ...], smallest: int) -> int:
    """Return the channels of an image shape (channels, height, width).

    Raises:
        ValueError: if the shape is not that of an image, or a side is below ``smallest`` pixels.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ValueError(
            f"Expected {name} to get images (channels, height, width) of at least {smallest} x {smallest} "
            f"pixels, but got the shape {input_shape}."
        )
    return input_shape[0]
