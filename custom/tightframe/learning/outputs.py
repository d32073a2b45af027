"""Meaning of logits: classes, of which a record has one, or findings, each of which it has or has not.

Which of both, the labels say: classes are (B,), findings (B, K) with 1 where a record has one, 0 where it has
not, and ``UNKNOWN`` where nobody knows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tightframe.phases import UNKNOWN

LEAST = 0.5
"""Probability from which on a finding is the answer."""


def probabilities(logits: torch.Tensor, *, findings: bool) -> torch.Tensor:
    """Return the probability of each class or finding, (B, C)."""
    return torch.sigmoid(logits) if findings else torch.softmax(logits, dim=1)


def loss(
    logits: torch.Tensor, labels: torch.Tensor, positive_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy of a batch, see ``losses``."""
    if labels.dim() == 1:
        return functional.cross_entropy(logits, labels)
    return losses(logits, labels, positive_weights).mean()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the records' cross-entropies, see ``losses``."""
    if labels.dim() == 1:
        return functional.cross_entropy(logits, labels, reduction="sum")
    return losses(logits, labels).sum()


def losses(
    logits: torch.Tensor, labels: torch.Tensor, positive_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the cross-entropy of each record, (B,).

    Of findings it is ``-1/K sum_k [w_k y_k log s(z_k) + (1 - y_k) log(1 - s(z_k))]`` over those that are
    known, s being the sigmoid. K and not their number divides, so that a record's loss is a sum of its
    findings' own, whatever the others are.

    Args:
        logits: z, (B, C).
        labels: classes (B,), or findings (B, K).
        positive_weights: w, (K,), of findings; 1 by default.

    >>> round(float(losses(torch.zeros(1, 2), torch.tensor([[1, UNKNOWN]]))), 4)  # log(2) / 2
    0.3466
    """
    if labels.dim() == 1:
        return functional.cross_entropy(logits, labels, reduction="none")
    each = functional.binary_cross_entropy_with_logits(
        logits, labels.clamp_min(0).to(logits.dtype), pos_weight=positive_weights, reduction="none"
    )
    return torch.where(labels == UNKNOWN, 0.0, each).mean(1)
