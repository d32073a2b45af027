"""SCAFFOLD: control variates that take the drift out of local steps.

Source: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning, ICML 2020, algorithm 1 with option II for c_k::

    v <- v - eta (g(v) - c_k + c)                        tau_k steps from v = w
    c_k' = c_k - c + (w - w_k) / (eta tau_k)
    w <- w + eta_g mean over S of (w_k - w)
    c <- c + (|S| / K) mean over S of (c_k' - c_k)       K: all silos enrolled

c_k is silo k's own state. It becomes c_k' only if the silo's term was in the opened sum, so that at the
server c stays the mean of all c_k whoever drops out. For this to hold to the last bit a silo takes up
the change of c_k as it is summed, rounded to the grid of the encoding, and the server keeps the sum.

The formula for c_k' takes every step to be the learning rate times one gradient, which momentum breaks; see
``ScaffoldConfig.momentum``. Weight decay counts as part of the gradient. Means are not weighted by the
silos' sizes. The job's ``update_norm`` rescales w_k - w only: c_k' must be what was summed. A personal
model is trained without the correction, which would take out of it what is the silo's own.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.exact_updates import change_fields, mean_of_all, nothing_summed, on_grid, silos_ever
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
    update_fields,
)
from tightframe.learning.model_update import UPDATE, named
from tightframe.learning.stages import GradientCorrection, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

Momentum = Literal["refuse", "normalise", "ignore"]

CONTROL = "control/"
SILOS = "control_silos"

CONTROL_BOUND = 1e6


class ScaffoldConfig(StrictModel):
    """SCAFFOLD's options.

    Attributes:
        global_learning_rate: eta_g, the server's step along the mean update.
        momentum: what to do where the job's SGD has momentum (the job's default has). ``refuse`` the
            job; ``normalise``: divide by FedNova's sum of gradient weights in place of tau_k, so
            that c_k' is still a mean of gradients; ``ignore``: divide by tau_k all the same, as
            NIID-Bench does, which makes control variates up to 1 / (1 - momentum) times too large.
    """

    equations: ClassVar[int] = 2
    """Fields in one sum that are a silo's update times a factor that others can know."""

    global_learning_rate: float = Field(default=1.0, gt=0)
    momentum: Momentum = "refuse"


def gradient_correction(own: Tensors, common: Tensors) -> GradientCorrection:
    """Correct ``g <- g - c_k + c`` on the parameters that have a control variate.

    Args:
        own: c_k by parameter name.
        common: c, likewise, on the device of the model in training.
    """
    differences = {name: common[name] - own[name].to(common[name]) for name in common}

    def correct(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in differences and parameter.grad is not None:
                parameter.grad.add_(differences[name])

    return correct


def control_change(
    update: torch.Tensor, common: torch.Tensor, *, learning_rate: float, weight: float
) -> torch.Tensor:
    """Return ``c_k' - c_k = (w - w_k) / (eta a) - c`` on the grid of the sum, float64.

    Args:
        update: w_k - w.
        common: c.
        learning_rate: eta.
        weight: a, how many gradients are in the update: tau_k for plain SGD.

    >>> control_change(torch.tensor([-0.5]), torch.tensor([0.25]), learning_rate=0.5, weight=2).tolist()
    [0.25]
    """
    change = -update.double() / (learning_rate * weight) - common.double()
    return on_grid(change)


def local_rule(config: ScaffoldConfig, setting: Setting) -> LocalRule:
    """Return corrected steps of the cross-entropy; sends the change of c_k and keeps c_k'.

    Raises:
        ValueError: if the job's optimiser is not SGD, or has momentum that the options refuse.
    """
    require_sgd(setting, "SCAFFOLD's control variate")
    if config.momentum == "refuse":
        require_no_momentum(setting, "SCAFFOLD's control variates")

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        common = {name: item.to(silo.device) for name, item in named(broadcast, CONTROL).items()}
        own = named(state, CONTROL) or {name: torch.zeros_like(item) for name, item in common.items()}
        return Objective((cross_entropy(),), corrections=(gradient_correction(own, common),))

    def finish(trained: Trained) -> Contribution:
        rho = setting.local.momentum if config.momentum == "normalise" else 0.0
        weight = gradient_weight(trained.report.steps, momentum=rho)
        changes, kept = {}, {}
        for name, common in named(trained.broadcast, CONTROL).items():
            change = control_change(
                trained.terms[UPDATE + name],
                common.cpu(),
                learning_rate=setting.local.learning_rate,
                weight=max(weight, 1.0),  # without any step the update is zero
            )
            changes[CONTROL + name] = change
            kept[CONTROL + name] = trained.state.get(CONTROL + name, torch.zeros_like(change)) + change
        return Contribution(changes, kept)

    return LocalRule(
        ("cross_entropy",),
        objective,
        fields=lambda setting: change_fields(setting, CONTROL, CONTROL_BOUND),
        finish=finish,
    )


def server_rule(config: ScaffoldConfig) -> ServerRule:
    """Return the server's formulas. In its state: the sum over all silos of c_k, and their number K."""

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        size = float(cohort.size)
        steps = {
            name: config.global_learning_rate * mean for name, mean in mean_updates(totals, size).items()
        }
        sums = {
            CONTROL + name: item + torch.as_tensor(totals[CONTROL + name])
            for name, item in named(state.extra, CONTROL).items()
        }
        return state.evolve(
            model=next_model(state.model, plus(state.model, steps), totals, size),
            extra={**state.extra, **sums, SILOS: silos_ever(state.extra[SILOS], cohort)},
        )

    return ServerRule(
        fields=lambda setting: update_fields(setting, weighted=False),
        update=update,
        initial=lambda setting: nothing_summed(setting, (CONTROL,), SILOS),
        broadcast=lambda state: mean_of_all(state, CONTROL, SILOS),
    )


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return SCAFFOLD's training and SCAFFOLD's server: neither makes sense without the other."""
    return local_rule(setting.config, setting), server_rule(setting.config)


METHOD = composed_method(
    name="scaffold",
    title="SCAFFOLD",
    paper="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
    config=ScaffoldConfig,
    findings=lambda config: None,
    parts=parts,
    network="logits",
)
