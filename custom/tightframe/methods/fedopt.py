"""FedOpt: the mean update is a pseudo-gradient for an adaptive optimiser at the server.

Source: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, Adaptive Federated
Optimization, ICLR 2021, algorithm 2. With D the mean of the silos' w_k - w::

    m <- b1 m + (1 - b1) D
    FedAdam:  v <- b2 v + (1 - b2) D^2
    FedYogi:  v <- v - (1 - b2) D^2 sign(v - D^2)
    FedAdagrad:  v <- v + D^2
    w <- w + eta_s m / (sqrt(v) + tau)

from m = 0 and v = tau^2, without bias correction; the paper runs FedAdagrad with b1 = 0. The moments are
part of the server's state and are checkpointed with it. Silos train as in FedAvg; running statistics
(BatchNorm) are averaged.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tightframe.learning.halves import (
    LocalRule,
    ServerRule,
    composed_method,
    mean_updates,
    next_model,
    plain_training,
    update_fields,
)
from tightframe.learning.server_optimizers import fedopt_step, kept_moments
from tightframe.options import StrictModel
from tightframe.phases import Cohort, ServerState, Setting, Totals

Variant = Literal["adam", "yogi", "adagrad"]
Weighting = Literal["uniform", "size"]


class AdaptiveServer(StrictModel):
    """The options of the server's step.

    Attributes:
        server_learning_rate: eta_s. The paper's best ones are between 0.001 and 0.1 for its tasks;
            each coordinate moves by at most about this much a round.
        beta1, beta2: decay of the moments; FedAdagrad's second moment has none.
        tau: adaptivity: smaller is more adaptive.
        weighting: D is the mean over silos as in the paper (``uniform``), or weighted by their public
            weights as in FedAvg (``size``).
    """

    server_learning_rate: float = Field(default=0.01, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)
    weighting: Weighting = "uniform"


class FedOptConfig(AdaptiveServer):
    """FedOpt's options.

    Attributes:
        variant: ``adam`` is FedAdam, ``yogi`` FedYogi, ``adagrad`` FedAdagrad, which the paper runs with
            ``beta1`` 0.
    """

    variant: Variant = "adam"


def server_rule(config: AdaptiveServer, variant: Variant) -> ServerRule:
    """Return FedAdam's, FedYogi's or FedAdagrad's step on the mean update."""
    weighted = config.weighting == "size"

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        divisor = cohort.total_weight if weighted else float(cohort.size)
        means = mean_updates(totals, divisor)
        parameters, moments = fedopt_step(
            {name: state.model[name] for name in means},
            means,
            kept_moments(state.extra, ""),
            variant=variant,
            learning_rate=config.server_learning_rate,
            betas=(config.beta1, config.beta2),
            tau=config.tau,
        )
        model = next_model(state.model, parameters, totals, divisor)
        return state.evolve(model=model, extra={**state.extra, **moments})

    return ServerRule(fields=lambda setting: update_fields(setting, weighted=weighted), update=update)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return plain training, an adaptive server."""
    return plain_training(), server_rule(setting.config, setting.config.variant)


METHOD = composed_method(
    name="fedopt",
    title="FedOpt",
    paper="Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    config=FedOptConfig,
    findings=lambda config: None,
    parts=parts,
    private=lambda config: None,
    rounded=True,
    network="logits",
    own_training=lambda config: None,
)
