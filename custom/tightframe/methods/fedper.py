"""FedPer: the body is everybody's, the head is each silo's own; both train together.

Source: Arivazhagan, Aggarwal, Singh and Choudhary, Federated Learning with Personalization Layers,
arXiv 1912.00818, algorithms 1 and 2, with the head as the one personalization layer::

    (u_k, h_k) <- E epochs of the silo's loss from (u, h_k)
    u <- sum_k p_k u_k

The head h_k is the silo's own state. It never leaves, and becomes what it was trained to only if the
silo's term was in the opened sum. The global model, the body under the head that the run's seed gave,
has a head that nobody has trained; what the method is for are the personal models.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from tightframe import model_update
from tightframe.optimizers import OptimizerSettings
from tightframe.personal_head import body_fields, body_terms, kept_head, own_model
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
from tightframe.stages import FitReport, Stage, cross_entropy

TERMS = ("cross_entropy",)


class FedPerConfig(BaseModel):
    """FedPer's option.

    Attributes:
        personal_epochs: training of body and head between the final body and the personal model;
            None is one more round (the job's epochs), 0 takes the final body and the kept head as they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    personal_epochs: int | None = Field(default=None, ge=0, le=10_000)


def init_server(setting: Setting, seed: int) -> ServerState:
    """The model that ``seed`` gives: the body, and the head with which every silo begins."""
    return ServerState(model=model_update.initial_model(setting, seed))


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """One phase: train both, and sum the weighted differences of the body."""
    schema = Schema((*body_fields(setting), *model_update.training_fields(TERMS)))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """The body and the common head, as ``model/<name>``."""
    return model_update.broadcast_model(state.model)


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """E epochs of body and head; sends the body's change, keeps the head."""
    received = model_update.received_model(broadcast)
    model = silo.load(own_model(received, state))
    report = _train(silo, model, silo.setting.local.epochs)
    terms = {**body_terms(received, model), **model_update.training_terms(report, TERMS)}
    return Contribution(terms, kept_head(model))


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """``u <- u + sum_k p_k (u_k - u)`` with ``p_k = n_k / sum_j n_j`` over the cohort; the head stays."""
    return state.evolve(model=model_update.apply_mean(state.model, totals, cohort))


def predict(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Class logits (B, C)."""
    logits: torch.Tensor = model(inputs)
    return logits


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """The final body under this silo's head, after ``personal_epochs`` of both.

    Args:
        silo: whose training records are used.
        model: the final body and the common head, by their own names.
        state: the silo's head as last committed; {} if it was part of no round.

    Returns:
        The personal model in evaluation mode.
    """
    own = silo.load(own_model(model, state))
    config, local = silo.setting.config, silo.setting.local
    epochs = local.epochs if config.personal_epochs is None else config.personal_epochs
    if epochs:
        _train(silo, own, epochs)
    return own.eval()


def _train(silo: SiloView, model: nn.Module, epochs: int) -> FitReport:
    optimizer = OptimizerSettings.of(silo.setting.local)
    report: FitReport = silo.fit(model, [Stage((cross_entropy(),), optimizer, epochs=epochs)])
    return report


METHOD = Method(
    name="fedper",
    title="FedPer",
    paper="Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818",
    config=FedPerConfig,
    init_server=init_server,
    plan=plan,
    predict=predict,
    personalise=personalise,
)
