"""The last layer of FedILC's model, and the moments of its gradients over a silo's training fold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tightframe.learning.gradients.fold import no_records, same_batches
from tightframe.methods.fedilc.fishr import GradientMoments, gradient_moments
from tightframe.phases import SiloView


def last_layer(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (C, d) and bias (C,) of a model's linear head, in float64 and attached to it.

    A head with one logit z for two classes, whose logits are (0, z), has the weight (1, d).

    Raises:
        ValueError: if the head is not linear.
    """
    head: Any = model.head
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not (
        isinstance(weight, torch.Tensor)
        and weight.ndim == 2
        and (bias is None or bias.shape == weight.shape[:1])
    ):
        raise ValueError(
            "Expected a linear head with a weight (C, d) and a bias (C,) or none, because the variance of "
            f"gradients is that of such a layer, but got {type(head).__name__}."
        )
    return weight.double(), None if bias is None else bias.double()


@torch.no_grad()
def fold_moments(silo: SiloView, model: nn.Module) -> GradientMoments:
    """Return the moments of the last layer's gradients over the training fold, in float64.

    The layer is taken without dropout of its input. The model's running statistics change.

    Raises:
        TrainingError: TF-208 if there is no record.
    """
    weight, bias = last_layer(model)
    total = None
    for inputs, labels in same_batches(silo, model):
        features = model.features(inputs).double()  # type: ignore[operator]
        moments = gradient_moments(features, labels, weight, bias)
        total = moments if total is None else total + moments
    if total is None:
        raise no_records()
    return total
