"""FedMMD: features whose distribution stays near that of the global model's features.

Source: Yao, Huang, Wu, Zhang and Sun, Two-Stream Federated Learning: Reduce the Communication Costs, VCIP
2018. The silo minimises, with features of a mini-batch in the network in training and in the frozen
global model that it received::

    L = L_ce + lambda MMD^2(Z, Z_g)
    MMD^2 = mean k(z, z') + mean k(z_g, z_g') - 2 mean k(z, z_g)
    k(x, y) = sum over i = -2 .. 2 of exp( -|x - y|^2 / (2^i s) )

s is the mean squared distance of two different features of Z and Z_g together, taken as a constant; the means
are over all pairs, equal ones included. The server averages as FedAvg does. With lambda = 0 this is FedAvg.

The term compares the records of a mini-batch with each other, so that gradients of single records do not
exist, and there is no form of it for differential privacy.
"""

from __future__ import annotations

import torch
from pydantic import Field

from tightframe.learning.halves import LocalRule, Objective, averaged, composed_method
from tightframe.learning.model_update import received_model
from tightframe.learning.stages import BatchView, Term, at_least_float32, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import SiloView, Tensors

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
LEAST_DISTANCE = 1e-12


class FedMMDConfig(StrictModel):
    """FedMMD's option.

    Attributes:
        weight: lambda, of the discrepancy. With 0 this is FedAvg.
    """

    weight: float = Field(default=0.1, ge=0)


def squared_discrepancy(features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return MMD^2 of two sets of features with five bandwidths, a scalar of at least about zero.

    Args:
        features: Z, (B, d).
        others: Z_g, (B', d), constant.

    >>> rows = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    >>> float(squared_discrepancy(rows, rows))
    0.0
    """
    both = torch.cat([at_least_float32(features), at_least_float32(others)])
    # Distances do not change with the origin, but what rounding leaves of them does.
    both = both - both.detach().mean(0)
    squares = both.square().sum(1)
    distances = (squares[:, None] + squares[None, :] - 2 * both @ both.T).clamp_min(0)
    pairs = len(both) * (len(both) - 1)
    mean = (distances.detach().sum() / pairs).clamp_min(LEAST_DISTANCE)
    kernel = torch.stack([torch.exp(-distances / (scale * mean)) for scale in SCALES]).sum(0)
    own, rest = slice(None, len(features)), slice(len(features), None)
    return kernel[own, own].mean() + kernel[rest, rest].mean() - 2 * kernel[own, rest].mean()


def local_rule(config: FedMMDConfig) -> LocalRule:
    """Return the cross-entropy and the discrepancy of the features from the received model's."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        frozen = silo.load(received_model(broadcast)).eval().requires_grad_(False)

        def discrepancy(view: BatchView) -> torch.Tensor:
            with torch.no_grad():
                others = frozen.features(view.inputs)  # type: ignore[operator]
            return squared_discrepancy(view.features, others)

        term = Term("discrepancy", config.weight, discrepancy, per_record=False)
        return Objective((cross_entropy(), term))

    return LocalRule(("cross_entropy", "discrepancy"), objective, pull=config.weight)


METHOD = composed_method(
    name="fedmmd",
    title="FedMMD",
    paper="Yao et al., Two-Stream Federated Learning: Reduce the Communication Costs, VCIP 2018",
    config=FedMMDConfig,
    findings=lambda config: None,
    parts=averaged(local_rule),
)
