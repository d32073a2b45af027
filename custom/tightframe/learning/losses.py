"""Losses that more than one method uses; methods never import each other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import at_least_float32
from tightframe.phases import Tensors

ZeroCounts = Literal["clamp", "exclude"]
Reduction = Literal["mean", "sum", "none"]


def balanced_softmax_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_counts: torch.Tensor,
    *,
    gamma: float = 1.0,
    zero_counts: ZeroCounts = "clamp",
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Return the cross-entropy of logits raised by the logarithm of the class counts.

    ``l = -log(n_y^gamma exp(z_y) / sum_c n_c^gamma exp(z_c))``: training then fits what the logits
    say beyond the class frequencies, so that the bare logits are those of balanced classes.
    Sources: Ren et al., Balanced Meta-Softmax for Long-Tailed Visual Recognition, NeurIPS 2020;
    with gamma Li et al., No Fear of Classifier Biases (FedETF), ICCV 2023.

    Args:
        logits: z, (B, C).
        labels: (B,) int64.
        class_counts: n, (C,), not negative; only their ratios matter where none is below one.
        gamma: exponent; with 0 the counts do not matter (but see ``exclude``).
        zero_counts: ``clamp`` raises all counts to at least one, so that absent classes stay as
            weak negatives; ``exclude`` takes classes of count zero out of the denominator, so that
            they get no gradient. A record of an excluded class has an infinite loss.
        reduction: ``mean``, ``sum`` or ``none`` over records.

    Returns:
        A scalar, or (B,) for ``none``, in float32 or the logits' own wider type.

    Raises:
        ValueError: if ``zero_counts`` or ``reduction`` is none of these, or ``class_counts`` has
            another shape.

    >>> logits = torch.zeros(1, 2)
    >>> round(float(balanced_softmax_loss(logits, torch.tensor([0]), torch.tensor([1, 3]))), 4)  # log(4)
    1.3863
    """
    if zero_counts not in ("clamp", "exclude"):
        raise ValueError(f"Expected `zero_counts` to be 'clamp' or 'exclude', but got {zero_counts!r}.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Expected `reduction` to be 'mean', 'sum' or 'none', but got {reduction!r}.")
    if class_counts.shape != logits.shape[1:]:
        wanted, got = tuple(logits.shape[1:]), tuple(class_counts.shape)
        raise ValueError(f"Expected `class_counts` of shape {wanted}, but got {got}.")
    logits = at_least_float32(logits)
    counts = class_counts.to(logits)
    if zero_counts == "clamp":
        offsets = gamma * counts.clamp_min(1).log()
    else:
        held = counts > 0
        offsets = torch.where(held, gamma * torch.where(held, counts, 1.0).log(), -torch.inf)
    return nn.functional.cross_entropy(logits + offsets, labels, reduction=reduction)


def half_squared_distance(model: nn.Module, anchors: Tensors) -> torch.Tensor:
    """Return ``|v - w|^2 / 2`` over the parameters that have an anchor: a scalar attached to them.

    Args:
        model: v.
        anchors: w by parameter name, on the model's device, constant.
    """
    return (
        0.5
        * torch.stack(
            [
                (parameter - anchors[name]).square().sum()
                for name, parameter in model.named_parameters()
                if name in anchors
            ]
        ).sum()
    )


def fit_head(
    head: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    epochs: int,
    learning_rate: float,
    momentum: float,
    batch_size: int,
    stream: torch.Generator,
) -> None:
    """Train a head in place by SGD on the cross-entropy.

    Args:
        head: features (B, d) -> logits (B, C); in evaluation mode throughout and afterwards.
        features: (N, d) float32.
        labels: (N,) int64.
        epochs: passes over all of them.
        momentum: likewise.
        batch_size: records of a step; the last step of an epoch may have fewer.
        stream: of the order, drawn anew in each epoch.
    """
    settings = OptimizerSettings("sgd", learning_rate, momentum)
    optimizer = settings.build([item for item in head.parameters() if item.requires_grad])
    head.eval()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=stream).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(features[chosen]), labels[chosen]).backward()
            optimizer.step()
