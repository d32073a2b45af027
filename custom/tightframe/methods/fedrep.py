"""FedRep: each silo fits its own head to the common body first, then the body to that head.

Source: Collins, Hassani, Mokhtari and Shakkottai, Exploiting Shared Representations for Personalized
Federated Learning, ICML 2021, algorithm 1::

    h_k <- E_h epochs on the head alone, body u fixed
    u_k <- E epochs on the body alone, head h_k fixed
    u <- sum_k p_k u_k

The head h_k is the silo's own state. It never leaves, and becomes what it was trained to only if the
silo's term was in the opened sum. While the head trains, the body's parameters stay and its running
statistics (BatchNorm) go on, as in published code. The global model, the body under the head that the
run's seed gave, has a head that nobody has trained; what the method is for are the personal models.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from tightframe import model_update
from tightframe.optimizers import OptimizerSettings
from tightframe.personal_head import body_fields, body_terms, in_body, in_head, kept_head, own_model
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
from tightframe.stages import Stage, cross_entropy

TERMS = ("cross_entropy",)


class FedRepConfig(BaseModel):
    """FedRep's option.

    Attributes:
        head_epochs: E_h, of the head alone, in every round before the body's epochs (the job's), and once
            more on the final body for the personal model. The paper and FedNH's comparison have 10.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    head_epochs: int = Field(default=10, ge=1, le=10_000)


def init_server(setting: Setting, seed: int) -> ServerState:
    """The model that ``seed`` gives: the body, and the head with which every silo begins."""
    return ServerState(model=model_update.initial_model(setting, seed))


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """One phase: head, then body; sums the weighted differences of the body."""
    schema = Schema((*body_fields(setting), *model_update.training_fields(TERMS)))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """The body and the common head, as ``model/<name>``."""
    return model_update.broadcast_model(state.model)


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """The head's epochs, then the body's; sends the body's change, keeps the head."""
    received = model_update.received_model(broadcast)
    model = silo.load(own_model(received, state))
    report = silo.fit(model, [head_stage(silo.setting), body_stage(silo.setting)])
    terms = {**body_terms(received, model), **model_update.training_terms(report, TERMS)}
    return Contribution(terms, kept_head(model))


def head_stage(setting: Setting) -> Stage:
    """E_h epochs that leave the body's parameters as they are."""
    optimizer = OptimizerSettings.of(setting.local)
    return Stage((cross_entropy(),), optimizer, epochs=setting.config.head_epochs, trainable=in_head)


def body_stage(setting: Setting) -> Stage:
    """The job's epochs, which leave the head's parameters as they are."""
    local = setting.local
    return Stage((cross_entropy(),), OptimizerSettings.of(local), epochs=local.epochs, trainable=in_body)


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """``u <- u + sum_k p_k (u_k - u)`` with ``p_k = n_k / sum_j n_j`` over the cohort; the head stays."""
    return state.evolve(model=model_update.apply_mean(state.model, totals, cohort))


def predict(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Class logits (B, C)."""
    logits: torch.Tensor = model(inputs)
    return logits


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """The final body under this silo's head, which is fitted to it by ``head_epochs`` more.

    Args:
        silo: whose training records are used.
        model: the final body and the common head, by their own names.
        state: the silo's head as last committed; {} if it was part of no round.

    Returns:
        The personal model in evaluation mode.
    """
    own = silo.load(own_model(model, state))
    silo.fit(own, [head_stage(silo.setting)])
    return own.eval()


METHOD = Method(
    name="fedrep",
    title="FedRep",
    paper=(
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    ),
    config=FedRepConfig,
    init_server=init_server,
    plan=plan,
    predict=predict,
    personalise=personalise,
)
