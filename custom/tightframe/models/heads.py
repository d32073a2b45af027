"""The classifier that every method builds on: ``features(x) -> (B, d)`` and a linear ``head``."""

from __future__ import annotations

import torch
from torch import nn


class DropoutLinear(nn.Linear):
    """A linear layer that drops entries of its input while training.

    Dropout is part of the head, so that methods that use the features (prototypes, correlations) get them
    without dropout, and the parameters have the names of a plain ``nn.Linear``.

    Args:
        in_features: feature width d.
        out_features: number of classes C.
        dropout: probability with which an input entry is set to zero.
        bias: whether logits have a bias.
    """

    def __init__(
        self, in_features: int, out_features: int, dropout: float = 0.0, *, bias: bool = True
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.dropout = dropout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of features (B, d)."""
        if self.dropout > 0:
            input = nn.functional.dropout(input, self.dropout, self.training)
        return super().forward(input)


class SingleLogit(DropoutLinear):
    """A head for two classes with one output: z = w . x + b, returned as the logits ``[0, z]``.

    Their softmax cross-entropy is the binary cross-entropy of z, ``log(1 + e^z) - y z``, so losses and
    metrics for (B, C) logits work unchanged. The parameters are those of ``nn.Linear(d, 1)``: a weight
    (1, d) and a bias (1,).

    Args:
        in_features: feature width d.
        dropout: probability with which an input entry is set to zero while training.

    >>> head = SingleLogit(2)
    >>> _ = head.load_state_dict({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])})
    >>> head(torch.tensor([[1.0, 1.0]])).tolist()
    [[0.0, 3.5]]
    """

    def __init__(self, in_features: int, dropout: float = 0.0) -> None:
        super().__init__(in_features, 1, dropout)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, 2) of features (B, d)."""
        single = super().forward(input)
        return torch.cat([torch.zeros_like(single), single], dim=1)


class UnitBallLinear(nn.Linear):
    """A linear layer of features brought into the unit ball: ``W h / max(1, |h|) + b``.

    Its parameters have the names and shapes of a plain ``nn.Linear``.

    >>> head = UnitBallLinear(2, 1)
    >>> _ = head.load_state_dict({"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.tensor([0.5])})
    >>> head(torch.tensor([[0.5, 0.0], [4.0, 0.0]])).flatten().tolist()
    [1.0, 1.5]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of features (B, d)."""
        norms = torch.linalg.vector_norm(input, dim=1, keepdim=True)
        return super().forward(input / norms.clamp_min(1))


class Classifier(nn.Module):
    """A backbone and a linear head: ``forward(x) = head(features(x))``.

    Args:
        backbone: maps inputs (B, ...) to features (B, d).
        num_classes: number of classes C.
        dropout: of the head's input, while training.
        head: maps features to logits; ``DropoutLinear(feature_width, num_classes, dropout)`` by default.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_width: int,
        num_classes: int,
        dropout: float = 0.0,
        *,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.feature_width = feature_width
        self.backbone = backbone
        self.head = DropoutLinear(feature_width, num_classes, dropout) if head is None else head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the penultimate features (B, d) of inputs (B, ...)."""
        features: torch.Tensor = self.backbone(x)
        return features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of inputs (B, ...)."""
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def gives_features(model: nn.Module) -> bool:
    """Return whether a network has ``features`` and ``head``, or is one that returns logits only."""
    return callable(getattr(model, "features", None)) and isinstance(getattr(model, "head", None), nn.Module)


def feature_width(model: nn.Module) -> int:
    """Return the feature width d of a model with ``features`` and ``head``.

    Raises:
        TypeError: if the model has neither ``feature_width`` nor a linear head.
    """
    width = getattr(model, "feature_width", None)
    if width is None:
        width = getattr(getattr(model, "head", None), "in_features", None)
    if not isinstance(width, int):
        raise TypeError(
            f"Expected {type(model).__name__} to have its feature width as `feature_width` or in a linear "
            f"`head`, but it has neither."
        )
    return width
