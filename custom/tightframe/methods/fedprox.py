"""FedProx: a quadratic term that keeps a silo near the global model.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in Heterogeneous
Networks, MLSys 2020, eq. (2)::

    min over v of  f_k(v) + (mu / 2) |v - w|^2

with w the global model that the silo received. The term is minimised by the same optimiser as the
loss, momentum and all; the server averages as FedAvg does. With mu = 0 this is FedAvg.
"""

from __future__ import annotations

from pydantic import Field

from tightframe.learning.halves import (
    LocalRule,
    Objective,
    averaged,
    composed_method,
    trained_parameters,
)
from tightframe.learning.losses import half_squared_distance
from tightframe.learning.model_update import BROADCAST
from tightframe.learning.stages import ParameterTerm, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import SiloView, Tensors


class FedProxConfig(StrictModel):
    """FedProx's option.

    Attributes:
        mu: weight of the term; the paper tries 0.001, 0.01, 0.1 and 1. With 0 this is FedAvg.
    """

    mu: float = Field(default=0.01, ge=0)


def local_rule(config: FedProxConfig) -> LocalRule:
    """Return the cross-entropy and the proximal term."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        anchors = {
            name: broadcast[BROADCAST + name].to(silo.device) for name in trained_parameters(silo.setting)
        }
        proximal = ParameterTerm("proximal", config.mu, lambda model: half_squared_distance(model, anchors))
        return Objective((cross_entropy(),), (proximal,))

    return LocalRule(("cross_entropy", "proximal"), objective, pull=config.mu)


METHOD = composed_method(
    name="fedprox",
    title="FedProx",
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    config=FedProxConfig,
    findings=lambda config: None,
    parts=averaged(local_rule),
    private=lambda config: None,
    network="logits",
)
