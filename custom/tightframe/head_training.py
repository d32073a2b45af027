"""Training of a head alone, on features that no silo has: what a server does that calibrates its model."""

from __future__ import annotations

import torch
from torch import nn

from tightframe.optimizers import OptimizerSettings


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
        learning_rate: of SGD.
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
