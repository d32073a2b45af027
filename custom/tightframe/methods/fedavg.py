"""FedAvg: the weighted mean of locally trained models.

Source: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, Communication-Efficient Learning of
Deep Networks from Decentralized Data, AISTATS 2017, algorithm 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.loop import OptimizerSettings, Stage, Term, cross_entropy
from tightframe.learning.model_update import (
    apply_mean,
    broadcast_model,
    initial_model,
    model_fields,
    model_terms,
    received_model,
    training_fields,
    training_terms,
)
from tightframe.options import StrictModel
from tightframe.phases import (
    CLASS_COUNTS,
    Cohort,
    Contribution,
    Method,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Statistic,
    Tensors,
    Totals,
)

Loss = Literal["cross_entropy", "focal"]


class FedAvgConfig(StrictModel):
    """FedAvg's options: only the loss; epochs, batch size and optimiser are the job's.

    Attributes:
        loss: ``cross_entropy``, or ``focal``, FLamby's baseline on Fed-ISIC2019: the focal loss with
            classes weighted by their share of all silos' records, which the silos sum up first.
        focal_gamma: its exponent.
    """

    loss: Loss = "cross_entropy"
    focal_gamma: float = Field(default=2.0, ge=0, le=10)


def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """FLamby's weight of each class: all records over the class's own, ``N / N_c``, float32 (C,).

    A class whose count is not known (fewer than three silos hold it, or none) gets the largest
    weight of the known ones, because it is rare; with no class known all weights are one.
    """
    known = counts >= 0.5
    if not bool(known.any()):
        return torch.ones(len(counts))
    weights = torch.where(known, counts.sum() / counts.clamp_min(1), 0.0)
    return torch.where(known, weights, weights.max()).float()


def focal_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *, gamma: float = 2.0
) -> torch.Tensor:
    """The weighted focal loss: mean over records of ``-a_y (1 - p_y)^gamma log p_y``.

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
    """The focal loss needs all silos' class counts."""
    return ("class_counts",) if setting.config.loss == "focal" else ()


def init_server(setting: Setting, seed: int) -> ServerState:
    """The model that ``seed`` gives."""
    return ServerState(model=initial_model(setting, seed))


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """One phase: train, and sum the weighted differences."""
    schema = Schema((*model_fields(setting), *training_fields((setting.config.loss,))))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """The global model, as ``model/<name>``, and the class counts if the loss needs them."""
    counts = {name: state.extra[name] for name in (CLASS_COUNTS,) if name in state.extra}
    return {**broadcast_model(state.model), **counts}


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """E epochs of the loss from the global model; the silo keeps nothing."""
    received = received_model(broadcast)
    model = silo.load(received)
    local, config = silo.setting.local, silo.setting.config
    if config.loss == "focal":
        weights = class_weights(broadcast[CLASS_COUNTS]).to(silo.device)
        term = Term(
            "focal",
            1.0,
            lambda view: focal_loss(view.logits, view.labels, weights, gamma=config.focal_gamma),
            per_record=True,
        )
    else:
        term = cross_entropy()
    stage = Stage(terms=(term,), optimizer=OptimizerSettings.of(local), epochs=local.epochs)
    report = silo.fit(model, [stage])
    return Contribution({**model_terms(received, model), **training_terms(report, (config.loss,))})


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """``w <- w + sum_k p_k (w_k - w)`` with ``p_k = n_k / sum_j n_j`` over the cohort."""
    return state.evolve(model=apply_mean(state.model, totals, cohort))


def predict(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Class logits (B, C)."""
    logits: torch.Tensor = model(inputs)
    return logits


def private(config: FedAvgConfig) -> str | None:
    """The focal loss needs pooled class counts, which are opened exactly."""
    return "loss 'focal' sums exact class counts; take 'cross_entropy'" if config.loss == "focal" else None


METHOD = Method(
    name="fedavg",
    title="FedAvg",
    paper=(
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, "
        "AISTATS 2017"
    ),
    config=FedAvgConfig,
    init_server=init_server,
    plan=plan,
    predict=predict,
    statistics=statistics,
    private=private,
)
