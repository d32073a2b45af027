"""FedAvg: the weighted mean of locally trained models.

Source: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, Communication-Efficient Learning of
Deep Networks from Decentralized Data, AISTATS 2017, algorithm 1::

    w_k <- E epochs of the silo's loss from w
    w <- w + sum_k p_k (w_k - w),   p_k = n_k / sum_j n_j over the cohort
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning import outputs
from tightframe.learning.halves import LocalRule, Objective, ServerRule, averaging, composed_method
from tightframe.learning.stages import Term, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import (
    CLASS_COUNTS,
    FINDING_COUNTS,
    ServerState,
    Setting,
    SiloView,
    Statistic,
    Tensors,
)

Loss = Literal["cross_entropy", "focal", "weighted"]
LARGEST_WEIGHT = 100.0


class FedAvgConfig(StrictModel):
    """FedAvg's options: only the loss; epochs, batch size and optimiser are the job's.

    Attributes:
        loss: ``cross_entropy``, or ``focal``, FLamby's baseline on Fed-ISIC2019: the focal loss with
            classes weighted by their share of all silos' records, which the silos sum up first; or, for
            findings, ``weighted``: the binary cross-entropy with ``positive_weights`` of such sums.
        focal_gamma: its exponent.
    """

    loss: Loss = "cross_entropy"
    focal_gamma: float = Field(default=2.0, ge=0, le=10)


def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return FLamby's weight of each class: all records over the class's own, ``N / N_c``, float32 (C,).

    A class whose count is not known (fewer than three silos hold it, or none) gets the largest
    weight of the known ones, because it is rare; with no class known all weights are one.
    """
    known = counts >= 0.5
    if not bool(known.any()):
        return torch.ones(len(counts))
    weights = torch.where(known, counts.sum() / counts.clamp_min(1), 0.0)
    return torch.where(known, weights, weights.max()).float()


def positive_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return the weight of each finding's positives: records without it over those with it, float32 (K,).

    At most ``LARGEST_WEIGHT`` either way; one where the counts (K, 2) are not known.
    """
    present, absent = counts.clamp_min(0).unbind(1)
    known = (present >= 0.5) & (absent >= 0.5)
    ratio = absent / present.clamp_min(1)
    return torch.where(known, ratio.clamp(1 / LARGEST_WEIGHT, LARGEST_WEIGHT), 1.0).float()


def focal_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *, gamma: float = 2.0
) -> torch.Tensor:
    """Return the weighted focal loss: mean over records of ``-a_y (1 - p_y)^gamma log p_y``.

    Source: Lin, Goyal, Girshick, He and Dollar, Focal Loss for Dense Object Detection, ICCV 2017,
    eq. (5).

    Args:
        logits: (B, C).
        labels: (B,) int64.
        weights: a, one for each class, (C,).
        gamma: exponent; 0 is the weighted cross-entropy (not divided by the weights' sum).

    >>> round(float(focal_loss(torch.zeros(1, 2), torch.tensor([0]), torch.ones(2))), 4)  # log(2) / 4
    0.1733
    """
    log_likelihood = nn.functional.log_softmax(logits.float(), dim=1).gather(1, labels[:, None])[:, 0]
    # Where p is 1 to the last bit, the slope of (1 - p)^gamma is infinite for gamma below one.
    miss = (1 - log_likelihood.exp()).clamp_min(torch.finfo(torch.float32).eps)
    return -(weights[labels] * miss**gamma * log_likelihood).mean()


def statistics(setting: Setting) -> tuple[Statistic, ...]:
    """Ask for the pooled counts of the chosen loss."""
    needed: dict[str, tuple[Statistic, ...]] = {"focal": ("class_counts",), "weighted": ("finding_counts",)}
    return needed.get(setting.config.loss, ())


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training by the chosen loss, and the mean of a server that sends the counts it has.

    Raises:
        ValueError: for positive weights of records with one class each.
    """
    config: FedAvgConfig = setting.config
    if config.loss == "weighted" and not setting.findings:
        raise ValueError("Expected records with findings for the loss 'weighted', but each has one class")
    return LocalRule((config.loss,), partial(objective, config)), replace(averaging(), broadcast=counts_of)


def counts_of(state: ServerState) -> Tensors:
    """Return pooled counts, if the loss needs them."""
    return {name: state.extra[name] for name in (CLASS_COUNTS, FINDING_COUNTS) if name in state.extra}


def objective(config: FedAvgConfig, silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Return the chosen loss; the silo keeps nothing."""
    if config.loss == "cross_entropy":
        return Objective((cross_entropy(),))
    if config.loss == "weighted":
        positive = positive_weights(broadcast[FINDING_COUNTS]).to(silo.device)
        weighted = Term(
            "weighted",
            1.0,
            lambda view: outputs.loss(view.logits, view.labels, positive),
            per_record=True,
        )
        return Objective((weighted,))
    weights = class_weights(broadcast[CLASS_COUNTS]).to(silo.device)
    term = Term(
        "focal",
        1.0,
        lambda view: focal_loss(view.logits, view.labels, weights, gamma=config.focal_gamma),
        per_record=True,
    )
    return Objective((term,))


def private(config: FedAvgConfig) -> str | None:
    """Refuse losses that need pooled counts, which are opened exactly."""
    exact = config.loss != "cross_entropy"
    return f"loss '{config.loss}' sums exact class counts; take 'cross_entropy'" if exact else None


def takes_findings(config: FedAvgConfig) -> str | None:
    """Refuse the focal loss, whose weights are of single classes."""
    return (
        "its focal loss is of the softmax; take 'cross_entropy' or 'weighted'"
        if config.loss == "focal"
        else None
    )


def own_training(config: FedAvgConfig) -> str | None:
    """Refuse a loss that an own training loop would not minimise."""
    return (
        None
        if config.loss == "cross_entropy"
        else "its loss is the loop's own; leave method_options.loss out"
    )


METHOD = composed_method(
    name="fedavg",
    title="FedAvg",
    paper=(
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, "
        "AISTATS 2017"
    ),
    config=FedAvgConfig,
    findings=takes_findings,
    parts=parts,
    # The focal loss needs the class counts that the server sends.
    personalise=None,
    statistics=statistics,
    private=private,
    network="logits",
    own_training=own_training,
)
