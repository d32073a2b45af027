"""FedDC: each silo learns how far it drifts from the global model, and the server takes the drift out.

Source: Gao, Fu, Li, Chen, Xu and Xu, FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction, CVPR 2022, algorithm 1. With a = alpha, S the round's silos and K those enrolled::

    w_k = argmin over v of  f_k(v) + (a / 2) |v - (w - h_k)|^2 + <v, g - g_k>
    h_k <- h_k + (w_k - w)
    g_k' = g_k - g + (w - w_k) / (eta tau_k)
    g <- g + (1 / K) sum over S of (g_k' - g_k)
    w <- mean over S of w_k + mean over all K of h_k

The change of h_k is the silo's update itself, so that beside it only ``g_k' - g_k`` is sent. h_k and g_k
are the silo's own and become the new ones only if its term is in the opened sum; the silo takes both
changes up as they are summed (``exact_sums``), so that the server has the sum over all silos whoever drops
out.

g_k' takes every step to be the learning rate times one gradient, which momentum breaks; see
``FedDCConfig.momentum``. A personal model is trained without ``<v, g - g_k>``, for which it would need g.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.exact_updates import (
    change_fields,
    exact_update_fields,
    mean_of_all,
    nothing_summed,
    on_grid,
    silos_ever,
    summed_terms,
)
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    composed_method,
    gradient_weight,
    mean_updates,
    next_model,
    plus,
    require_no_momentum,
    require_sgd,
    trained_parameters,
)
from tightframe.learning.model_update import BROADCAST, UPDATE, named
from tightframe.learning.stages import ParameterTerm, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

Momentum = Literal["refuse", "normalise", "ignore"]

DRIFT, GRADIENT = "drift/", "gradient/"
SILOS = "drift_silos"
GRADIENT_BOUND = 1e6


class FedDCConfig(StrictModel):
    """FedDC's options.

    Attributes:
        alpha: weight of the quadratic term.
        momentum: what to do where the job's SGD has momentum (the job's default has). ``refuse`` the
            job; ``normalise``: divide by FedNova's sum of gradient weights in place of tau_k, so
            that g_k' is still a mean of gradients; ``ignore``: divide by tau_k all the same.
    """

    equations: ClassVar[int] = 2
    """Fields in one sum that are a silo's update times a factor that others can know."""

    alpha: float = Field(default=0.01, ge=0)
    momentum: Momentum = "refuse"


def half_squared_distance(model: nn.Module, anchors: Tensors) -> torch.Tensor:
    """Return ``|v - (w - h_k)|^2 / 2``: a scalar attached to the parameters.

    Args:
        model: v.
        anchors: w - h_k by parameter name, on the model's device, constant.
    """
    distances = [
        (item - anchors[name]).square().sum() for name, item in model.named_parameters() if name in anchors
    ]
    return 0.5 * torch.stack(distances).sum()


def inner_product(model: nn.Module, directions: Tensors) -> torch.Tensor:
    """Return ``<v, g - g_k>``: a scalar attached to the parameters.

    Args:
        model: v.
        directions: g - g_k by parameter name, on the model's device, constant.
    """
    terms = [(item * directions[name]).sum() for name, item in model.named_parameters() if name in directions]
    return torch.stack(terms).sum()


def local_rule(config: FedDCConfig, setting: Setting) -> LocalRule:
    """Return the cross-entropy with both of the paper's terms; sends the change of g_k, keeps h_k and g_k.

    Raises:
        ValueError: if the job's optimiser is not SGD, or has momentum that the options refuse.
    """
    require_sgd(setting, "FedDC's gradient state")
    if config.momentum == "refuse":
        require_no_momentum(setting, "FedDC's gradient states")

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        drifts, gradients = named(state, DRIFT), named(state, GRADIENT)
        anchors, directions = {}, {}
        for name in trained_parameters(silo.setting):
            received = broadcast[BROADCAST + name].to(silo.device)
            anchors[name] = received - drifts[name].to(received) if name in drifts else received
            if GRADIENT + name in broadcast:
                common = broadcast[GRADIENT + name].to(received)
                directions[name] = common - gradients[name].to(received) if name in gradients else common
        terms = [ParameterTerm("drift", config.alpha, lambda model: half_squared_distance(model, anchors))]
        if directions:
            terms.append(ParameterTerm("gradient", 1.0, lambda model: inner_product(model, directions)))
        return Objective((cross_entropy(),), tuple(terms))

    def finish(trained: Trained) -> Contribution:
        rho = setting.local.momentum if config.momentum == "normalise" else 0.0
        weight = max(gradient_weight(trained.report.steps, momentum=rho), 1.0)  # no step: a zero update
        reach = setting.local.learning_rate * weight
        changes, kept = {}, {}
        for name, common in named(trained.broadcast, GRADIENT).items():
            slope = -trained.terms[UPDATE + name].double() / reach
            changes[GRADIENT + name] = on_grid(slope - common.cpu().double())
        added = {DRIFT + name: item for name, item in named(summed_terms(trained), UPDATE).items()} | changes
        for name, item in added.items():
            kept[name] = trained.state.get(name, torch.zeros_like(item)) + item
        return Contribution(changes, kept)

    return LocalRule(
        ("cross_entropy", "drift", "gradient"),
        objective,
        fields=lambda setting: change_fields(setting, GRADIENT, GRADIENT_BOUND),
        finish=finish,
        pull=config.alpha,
    )


def server_rule() -> ServerRule:
    """Return the server's formulas. In its state: sums over all silos of h_k and g_k, and their number K."""

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        size = float(cohort.size)
        silos = silos_ever(state.extra[SILOS], cohort)
        sums, steps = {}, {}
        for name, mean in mean_updates(totals, size).items():
            for kind, sent in ((DRIFT, UPDATE), (GRADIENT, GRADIENT)):
                sums[kind + name] = state.extra[kind + name] + torch.as_tensor(totals[sent + name])
            steps[name] = mean + sums[DRIFT + name] / int(silos)
        return state.evolve(
            model=next_model(state.model, plus(state.model, steps), totals, size),
            extra={**state.extra, **sums, SILOS: silos},
        )

    return ServerRule(
        fields=exact_update_fields,
        update=update,
        terms=summed_terms,
        initial=lambda setting: nothing_summed(setting, (DRIFT, GRADIENT), SILOS),
        broadcast=lambda state: mean_of_all(state, GRADIENT, SILOS),
    )


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedDC's training and FedDC's server: neither makes sense without the other."""
    return local_rule(setting.config, setting), server_rule()


METHOD = composed_method(
    name="feddc",
    title="FedDC",
    paper=(
        "Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, "
        "CVPR 2022"
    ),
    config=FedDCConfig,
    findings=lambda config: None,
    parts=parts,
    network="logits",
)
