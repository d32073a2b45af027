"""Fully connected networks, for tables and for FedILC's small images; ``identity`` has the head alone.

Sources: Zhu et al., FedILC: Weighted Geometric Mean and Invariant Gradient Covariance for Federated
Learning on Non-IID Data, 2022, for the sizes: Color-MNIST 392-390-390-1 is ``widths=[390, 390],
single_logit=true`` on 2 x 14 x 14 images; eICU 1399-1024-1024-512-1 is ``widths=[1024, 1024, 512],
single_logit=true, last_activation=false``. Glorot and Bengio, Understanding the Difficulty of Training
Deep Feedforward Neural Networks, AISTATS 2010, for the initialisation ("Xavier").
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from tightframe.models.base import BackboneSpec, Options
from tightframe.models.heads import Classifier, DropoutLinear, SingleLogit

# A column is constant if its pooled standard deviation is at most this share of its absolute mean, or of 1
# if that is larger: a smaller deviation is the rounding error of its sums.
CONSTANT = 1e-5

Width = Annotated[int, Field(ge=1, le=65536)]


class MlpOptions(Options):
    """Fully connected; without ``widths`` a logistic regression.

    Attributes:
        widths: of the hidden layers; the last one is the feature width. Without hidden layers the features
            are the inputs, and the network is a logistic regression.
        last_activation: whether a ReLU follows the last hidden layer too.
        single_logit: for two classes, a head with one output.
        standardise: whether the inputs are standardised by pooled moments of the training folds (with uniform
            weights each silo's count alike).
        dropout: of the head's input.
    """

    widths: Annotated[tuple[Width, ...], Field(strict=False, max_length=8)] = (64,)
    last_activation: bool = True
    single_logit: bool = False
    standardise: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Standardise(nn.Module):
    """``(x - mean) / std`` along the first axis of a record, by frozen parameters.

    The parameters are part of the model, broadcast and saved with it, and set once from moments over all
    silos. A column that is constant over the training records of all silos is only centred: otherwise the
    first record with another value would become infinite.

    Args:
        width: size D of the first axis: a table's columns, an image's channels.

    >>> layer = Standardise(2)
    >>> _ = layer.load_state_dict({"mean": torch.tensor([1.0, 5.0]), "std": torch.tensor([2.0, 0.0])})
    >>> layer(torch.tensor([[5.0, 6.0]])).tolist()
    [[2.0, 1.0]]
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.std = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardise inputs (B, D, ...)."""
        constant = self.std <= CONSTANT * self.mean.abs().clamp_min(1)
        scale = torch.where(constant, torch.ones_like(self.std), self.std)
        shape = (-1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(shape)) / scale.view(shape)


class StandardisedClassifier(Classifier):
    """A classifier that standardises its inputs; ``standardise.mean`` and ``.std`` are its tensors.

    Args:
        width: size D of the first axis of a record.
        backbone: maps standardised inputs to features (B, d).
        feature_width: d.
        head: maps features to logits (B, C).
    """

    def __init__(
        self, width: int, backbone: nn.Module, feature_width: int, num_classes: int, *, head: nn.Module
    ) -> None:
        super().__init__(backbone, feature_width, num_classes, head=head)
        self.standardise = Standardise(width)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the penultimate features (B, d) of inputs (B, D, ...)."""
        return super().features(self.standardise(x))


def classifier_of(
    backbone: nn.Module,
    width: int,
    input_shape: tuple[int, ...],
    num_classes: int,
    dropout: float,
    *,
    standardise: bool,
) -> Classifier:
    """Put a linear head on a backbone (B, ...) -> (B, width), whose inputs may be standardised."""
    head = DropoutLinear(width, num_classes, dropout)
    if standardise:
        return StandardisedClassifier(input_shape[0], backbone, width, num_classes, head=head)
    return Classifier(backbone, width, num_classes, head=head)


def number_of_values(name: str, input_shape: tuple[int, ...]) -> int:
    """Return the values of a record of any shape.

    Raises:
        ValueError: if it has none.
    """
    width = math.prod(input_shape)
    if not input_shape or width < 1:
        raise ValueError(
            f"Expected {name} to get records with at least one value, but got shape {input_shape}."
        )
    return width


def build(options: MlpOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build an untrained network on flattened inputs of any shape: Xavier's uniform weights, zero biases.

    Raises:
        ValueError: if a record has no values, or ``single_logit`` is set for other than two classes.
    """
    width = number_of_values("mlp", input_shape)
    if options.single_logit and num_classes != 2:
        raise ValueError(f"Expected two classes with `single_logit`, but got {num_classes}.")
    layers: list[nn.Module] = [nn.Flatten(1)]
    for place, hidden in enumerate(options.widths, start=1):
        layers.append(nn.Linear(width, hidden))
        if options.last_activation or place < len(options.widths):
            layers.append(nn.ReLU())
        width = hidden
    backbone = nn.Sequential(*layers)
    head = (
        SingleLogit(width, options.dropout)
        if options.single_logit
        else DropoutLinear(width, num_classes, options.dropout)
    )
    for module in (*backbone, head):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    if options.standardise:
        return StandardisedClassifier(input_shape[0], backbone, width, num_classes, head=head)
    return Classifier(backbone, width, num_classes, head=head)


MLP = BackboneSpec(name="mlp", title="fully connected network", options=MlpOptions, build=build)


class IdentityOptions(Options):
    """No encoder: the inputs are the features.

    Attributes:
        standardise: whether the inputs are standardised by pooled moments of the training folds.
        dropout: of the head's input.
    """

    standardise: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)


def build_identity(options: IdentityOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a head on flattened inputs of any shape.

    Raises:
        ValueError: if a record has no values.
    """
    width = number_of_values("identity", input_shape)
    return classifier_of(
        nn.Flatten(1), width, input_shape, num_classes, options.dropout, standardise=options.standardise
    )


IDENTITY = BackboneSpec(
    name="identity", title="inputs as features", options=IdentityOptions, build=build_identity, frozen=True
)
