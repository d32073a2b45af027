"""FedNova: updates normalised by the number of steps behind them, so that no silo counts twice.

Source: Wang, Liu, Liang, Joshi and Poor, Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization, NeurIPS 2020, eqs. (10) to (12)::

    d_k = (w - w_k) / (eta a_k)
    w <- w - eta (sum_k p_k a_k) (sum_k p_k d_k),   p_k = n_k / sum_j n_j over the cohort

a_k is the sum of the weights with which the silo's gradients enter its update: the number of steps for
plain SGD, more with momentum, less with a proximal term (``learning.halves.gradient_weight``). So d_k
is a mean gradient, and where all silos take as many steps this is FedAvg. The sums are n_k d_k, n_k a_k
and n_k. Running statistics (BatchNorm) are averaged: they are no gradients.

a_k is a function of the silo's number of records, so its sum is static: after a drop-out it stays shut, and
the server steps by the mean a_k of the last sum that was opened. Before the first there is none, and the
model stays as it is for that round.

With the job's ``update_norm`` it is d_k that is rescaled to it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tightframe.learning.halves import (
    NORMALISER,
    LocalRule,
    ServerRule,
    Trained,
    composed_method,
    gradient_weight,
    next_model,
    plain_training,
    plus,
    require_sgd,
    update_fields,
)
from tightframe.learning.model_update import UPDATE
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Field, ServerState, Setting, Tensors, Totals

DIRECTION = "direction/"
MEAN_WEIGHT = "normaliser_mean"
"""In the server's state: sum_k p_k a_k of the last sum in which the normaliser was opened."""

# A direction is multiplied by eta times all the steps of a round, so it is summed in 64 bits: what the
# ring drops is 2**-24 of a gradient. In the unit of a gradient, eta bounds nothing.
DIRECTION_BOUND = 1e6
WEIGHT_BOUND = 1e9


class FedNovaConfig(StrictModel):
    """FedNova has no options: learning rate, momentum and epochs are the job's."""


def normaliser(setting: Setting, steps: int, mu: float) -> float:
    """Return a_k of a silo that took so many steps of SGD, with ``(mu / 2) |v - w|^2`` in its loss.

    Raises:
        ValueError: if the learning rate times ``mu`` is 1 or more: each step would then overshoot w.
    """
    local = setting.local
    if local.learning_rate * mu >= 1:
        raise ValueError(
            "Expected `training.learning_rate` times mu to be below 1, but got "
            f"{local.learning_rate:g} * {mu:g}."
        )
    return gradient_weight(steps, momentum=local.momentum, proximal=local.learning_rate * mu)


def server_rule(setting: Setting, *, mu: float = 0.0) -> ServerRule:
    """Return FedNova's half of the server.

    Args:
        mu: weight of the proximal term in the silos' loss.

    Raises:
        ValueError: if the local optimiser is not SGD, or the proximal term too strong for it.
    """
    require_sgd(setting, "FedNova's normaliser")
    normaliser(setting, 1, mu)  # refuses here, not at the silos

    def fields(setting: Setting) -> tuple[Field, ...]:
        return (
            *(_direction(item) for item in update_fields(setting, weighted=True)),
            Field(NORMALISER, (), bound=WEIGHT_BOUND, weighted=True, static=True),
        )

    def terms(trained: Trained) -> Tensors:
        weight = normaliser(setting, trained.report.steps, mu)
        # Without any step the update is zero, and so is its direction.
        length = setting.local.learning_rate * weight if weight else 1.0
        return {
            NORMALISER: torch.tensor(weight, dtype=torch.float64),
            **{
                name.replace(UPDATE, DIRECTION, 1) if name.startswith(UPDATE) else name: (
                    -item.double() / length if name.startswith(UPDATE) else item
                )
                for name, item in trained.terms.items()
            },
        }

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        divisor = cohort.total_weight
        kept: Tensors = {}
        if NORMALISER in totals:
            reach = setting.local.learning_rate * float(totals[NORMALISER]) / divisor  # eta sum_k p_k a_k
            kept = {MEAN_WEIGHT: torch.tensor(float(totals[NORMALISER]) / divisor, dtype=torch.float64)}
        elif MEAN_WEIGHT in state.extra:
            reach = setting.local.learning_rate * float(state.extra[MEAN_WEIGHT])
        else:
            return state
        steps = {
            name.removeprefix(DIRECTION): -reach * torch.as_tensor(total, dtype=torch.float64) / divisor
            for name, total in totals.items()
            if name.startswith(DIRECTION)
        }
        model = next_model(state.model, plus(state.model, steps), totals, divisor)
        return state.evolve(model=model, extra={**state.extra, **kept})

    return ServerRule(fields=fields, terms=terms, update=update)


def _direction(item: Field) -> Field:
    """Return the field of a parameter's direction in place of its update; others as they are."""
    if not item.name.startswith(UPDATE):
        return item
    return replace(item, name=item.name.replace(UPDATE, DIRECTION, 1), ring=64, bound=DIRECTION_BOUND)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return plain training, FedNova's server."""
    return plain_training(), server_rule(setting)


METHOD = composed_method(
    name="fednova",
    title="FedNova",
    paper=(
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020"
    ),
    config=FedNovaConfig,
    findings=lambda config: None,
    parts=parts,
    network="logits",
)
