"""The inputs as features, for tables: what trains is a linear model.

With ``standardise`` the inputs are first standardised by pooled moments of the training folds, which the
statistics phase sums before round 1.
"""

from __future__ import annotations

import math

from pydantic import Field
from torch import nn

from tightframe.models.backbones.mlp import classifier_of
from tightframe.models.base import BackboneSpec, Options


class IdentityOptions(Options):
    """No encoder: the inputs are the features.

    Attributes:
        standardise: whether the inputs are standardised by pooled moments of the training folds.
        dropout: of the head's input.
    """

    standardise: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)


def build(options: IdentityOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a head on flattened inputs of any shape.

    Raises:
        ValueError: if a record has no values.
    """
    width = math.prod(input_shape)
    if not input_shape or width < 1:
        raise ValueError(
            f"Expected identity to get records with at least one value, but got shape {input_shape}."
        )
    return classifier_of(
        nn.Flatten(1), width, input_shape, num_classes, options.dropout, standardise=options.standardise
    )


IDENTITY = BackboneSpec(
    name="identity", title="inputs as features", options=IdentityOptions, build=build, frozen=True
)
