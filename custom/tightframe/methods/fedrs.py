"""FedRS: a softmax that holds back the classes that a silo lacks.

Source: Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data,
KDD 2021. The local loss is the cross-entropy of scaled logits::

    l = -log( exp(s_y z_y) / sum_c exp(s_c z_c) )
    s_c = 1 if the silo has records of class c, else alpha

so that the class vectors of classes that a silo never sees are pushed away from its features by alpha
times as much only. The server averages as FedAvg does, and predictions use the logits as they are. With
alpha = 1 this is FedAvg.

Published comparisons have a soft form, in which a class counts by its share of the silo's records::

    s_c = alpha + (1 - alpha) n_c / max_j n_j

The scale stays at the silo. It follows from all its records' labels, so that one record more can change every
other record's loss. With differential privacy it is made of noisy class counts, drawn once, none of which is
zero; so the soft form only has one.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.halves import LocalRule, Objective, averaged, composed_method
from tightframe.learning.stages import BatchView, Term
from tightframe.options import StrictModel
from tightframe.phases import SiloView, Tensors

Form = Literal["binary", "soft"]


class FedRSConfig(StrictModel):
    """FedRS's options.

    Attributes:
        alpha: the scale of absent classes' logits; the paper takes 0.5. With 1 this is FedAvg.
        form: ``binary`` is the paper's: 1 for the classes that a silo has, alpha for the others. ``soft``
            grows from alpha to 1 with the class's share of the silo's records, as in published
            comparisons.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    form: Form = "binary"


def class_scales(counts: torch.Tensor, *, alpha: float, form: Form = "binary") -> torch.Tensor:
    """Return s, by which each class's logits are multiplied, float32 (C,).

    Args:
        counts: the silo's records of each class, (C,), not negative.
        alpha: the scale of a class without records.
        form: see ``FedRSConfig``.

    >>> class_scales(torch.tensor([4, 0, 1]), alpha=0.5).tolist()
    [1.0, 0.5, 1.0]
    >>> class_scales(torch.tensor([4, 0, 1]), alpha=0.5, form="soft").tolist()
    [1.0, 0.5, 0.625]
    """
    shares = counts.double() / counts.max().clamp_min(1) if form == "soft" else (counts > 0).double()
    return (alpha + (1 - alpha) * shares).float()


def restricted_loss(logits: torch.Tensor, labels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of scaled logits, a mean over records.

    Args:
        logits: z, (B, C).
        labels: (B,) int64.
        scales: s, (C,).

    >>> logits, labels = torch.tensor([[0.0, 2.0]]), torch.tensor([0])
    >>> round(float(restricted_loss(logits, labels, torch.tensor([1.0, 0.0]))), 4)  # log(2)
    0.6931
    """
    return nn.functional.cross_entropy(logits * scales, labels)


def local_rule(config: FedRSConfig) -> LocalRule:
    """Return the restricted softmax with the silo's own class counts, which stay there."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        counts = silo.class_counts("train")
        scales = class_scales(counts, alpha=config.alpha, form=config.form).to(silo.device)

        def loss(view: BatchView) -> torch.Tensor:
            return restricted_loss(view.logits, view.labels, scales)

        # Without privacy, adding a record can change the scales, and by them every other record's gradient.
        return Objective((Term("restricted", 1.0, loss, per_record=silo.setting.privacy is not None),))

    return LocalRule(("restricted",), objective)


def private(config: FedRSConfig) -> str | None:
    """Refuse the binary form: noisy class counts do not say whether a silo has a class."""
    if config.form == "binary":
        return "form 'binary' discloses which classes a silo has any record of; take 'soft'"
    return None


METHOD = composed_method(
    name="fedrs",
    title="FedRS",
    paper=(
        "Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, "
        "KDD 2021"
    ),
    config=FedRSConfig,
    findings=lambda config: "it restricts the softmax to a silo's classes",
    parts=averaged(local_rule),
    private=private,
    private_prior=lambda config: config.form == "soft",
    network="logits",
)
