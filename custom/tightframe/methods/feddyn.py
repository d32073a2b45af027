"""FedDyn: a linear term that makes silos' stationary points those of the mean objective.

Source: Acar, Zhao, Matas, Mattina, Whatmough and Saligrama, Federated Learning Based on Dynamic
Regularization, ICLR 2021, algorithm 1. With a = alpha, S the round's silos and K those enrolled::

    w_k = argmin over v of  f_k(v) - <h_k, v> + (a / 2) |v - w|^2
    h_k <- h_k - a (w_k - w)
    h <- h - a (1 / K) sum over S of (w_k - w)
    w <- mean over S of w_k - h / a

h_k and h only ever occur divided by a, so what is kept is ``d_k = -h_k / a``, the sum of all updates of
silo k that were summed, and at the server ``K d = sum_k d_k``. h is the mean of all h_k whoever drops out,
because a silo takes up its update as it is summed, and only where its term is in an opened sum
(``exact_sums``).

As alpha goes to zero the silos' training becomes FedAvg's, but the server's step does not: it goes on adding
the mean of all earlier updates, ``w <- mean w_k + d``, in which alpha does not occur. So alpha is above zero.

Everything that a silo keeps and sends is a function of its own updates, so that it is as private as they are.
A personal model is trained with h_k.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.exact_updates import exact_update_fields, nothing_summed, silos_ever, summed_terms
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    composed_method,
    mean_updates,
    next_model,
    plus,
    trained_parameters,
)
from tightframe.learning.model_update import BROADCAST, UPDATE, named
from tightframe.learning.stages import ParameterTerm, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

DRIFT = "drift/"
SILOS = "drift_silos"


class FedDynConfig(StrictModel):
    """FedDyn's option.

    Attributes:
        alpha: weight of the regulariser; the paper tries 0.001, 0.01 and 0.1.
    """

    alpha: float = Field(default=0.01, gt=0)


def regulariser(model: nn.Module, anchors: Tensors, drifts: Tensors) -> torch.Tensor:
    """Return ``(-<h_k, v - w> + (a / 2) |v - w|^2) / a``: a scalar attached to the parameters.

    The gradient is that of the paper's term, from which it differs by the constant ``<h_k, w>``.

    Args:
        model: v.
        anchors: w by parameter name, on the model's device, constant.
        drifts: d_k = -h_k / a, likewise; none counts as zero.
    """
    parts = []
    for name, parameter in model.named_parameters():
        if name in anchors:
            away = parameter - anchors[name]
            parts.append(0.5 * away.square().sum())
            if name in drifts:
                parts.append((drifts[name] * away).sum())
    return torch.stack(parts).sum()


def local_rule(config: FedDynConfig) -> LocalRule:
    """Return the cross-entropy with the dynamic regulariser; keeps the sum of the silo's updates."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        names = trained_parameters(silo.setting)
        anchors = {name: broadcast[BROADCAST + name].to(silo.device) for name in names}
        drifts = {name: item.to(anchors[name]) for name, item in named(state, DRIFT).items()}
        term = ParameterTerm("dynamic", config.alpha, lambda model: regulariser(model, anchors, drifts))
        return Objective((cross_entropy(),), (term,))

    def finish(trained: Trained) -> Contribution:
        summed = {DRIFT + name: item for name, item in named(summed_terms(trained), UPDATE).items()}
        earlier = trained.state
        kept = {key: earlier.get(key, torch.zeros_like(item)) + item for key, item in summed.items()}
        return Contribution({}, kept)

    return LocalRule(("cross_entropy", "dynamic"), objective, finish=finish, pull=config.alpha)


def server_rule() -> ServerRule:
    """Return the server's formulas. In its state: the sum of all silos' updates ever, and K."""

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        size = float(cohort.size)
        silos = silos_ever(state.extra[SILOS], cohort)
        sums, steps = {}, {}
        for name, mean in mean_updates(totals, size).items():
            sums[DRIFT + name] = state.extra[DRIFT + name] + torch.as_tensor(totals[UPDATE + name])
            steps[name] = mean + sums[DRIFT + name] / int(silos)
        return state.evolve(
            model=next_model(state.model, plus(state.model, steps), totals, size),
            extra={**state.extra, **sums, SILOS: silos},
        )

    return ServerRule(
        fields=exact_update_fields,
        update=update,
        terms=summed_terms,
        initial=lambda setting: nothing_summed(setting, (DRIFT,), SILOS),
    )


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedDyn's training and FedDyn's server: neither makes sense without the other."""
    return local_rule(setting.config), server_rule()


METHOD = composed_method(
    name="feddyn",
    title="FedDyn",
    paper="Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
    config=FedDynConfig,
    findings=lambda config: None,
    parts=parts,
    private=lambda config: None,
    network="logits",
)
