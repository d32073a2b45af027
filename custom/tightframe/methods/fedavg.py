"""FedAvg: the weighted mean of locally trained models.

Source: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, Communication-Efficient Learning of
Deep Networks from Decentralized Data, AISTATS 2017, algorithm 1.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from tightframe.model_update import (
    apply_mean,
    broadcast_model,
    initial_model,
    model_fields,
    model_terms,
    received_model,
    training_fields,
    training_terms,
)
from tightframe.phases import (
    Cohort,
    Contribution,
    Method,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.training import OptimizerSettings, Stage, cross_entropy

TERMS = ("cross_entropy",)


class FedAvgConfig(BaseModel):
    """FedAvg has no options of its own: epochs, batch size and optimiser are the job's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def init_server(setting: Setting, seed: int) -> ServerState:
    """The model that ``seed`` gives."""
    return ServerState(model=initial_model(setting, seed))


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """One phase: train, and sum the weighted differences."""
    schema = Schema((*model_fields(setting), *training_fields(TERMS)))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """The global model, as ``model/<name>``."""
    return broadcast_model(state.model)


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """E epochs of the cross-entropy from the global model; the silo keeps nothing."""
    received = received_model(broadcast)
    model = silo.load(received)
    local = silo.setting.local
    stage = Stage(terms=(cross_entropy(),), optimizer=OptimizerSettings.of(local), epochs=local.epochs)
    report = silo.fit(model, [stage])
    return Contribution({**model_terms(received, model), **training_terms(report, TERMS)})


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """``w <- w + sum_k p_k (w_k - w)`` with ``p_k = n_k / sum_j n_j`` over the cohort."""
    return state.evolve(model=apply_mean(state.model, totals, cohort))


def predict(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Class logits (B, C)."""
    logits: torch.Tensor = model(inputs)
    return logits


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
)
