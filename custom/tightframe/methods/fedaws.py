"""FedAwS: the server spreads the class vectors apart after each mean.

Source: Yu, Rawat, Menon and Kumar, Federated Learning with Only Positive Labels, ICML 2020, algorithm 1.
After FedAvg's mean the server minimises, by a few steps of gradient descent on the class vectors w_c alone::

    R(W) = mean over pairs c != j of max(0, nu - d(w_c, w_j))^2,      d = (1 - cos(w_c, w_j)) / 2

so that classes that never meet at one silo do not fall together. It reads nothing but the mean of the
classifier, so that silos send what they send in FedAvg.

The paper's silos have one class each and train without negatives, by a squared distance to their class
vector; here, as in published comparisons, they have the cross-entropy. d is the cosine distance in [0, 1] of
those comparisons, 0.5 between orthogonal vectors; C vectors can all be C / (2 (C - 1)) apart.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from tightframe.learning import model_update
from tightframe.learning.halves import LocalRule, ServerRule, composed_method, plain_training
from tightframe.learning.server_optimizers import sgd_step
from tightframe.models.geometry_heads import unit_features
from tightframe.options import StrictModel
from tightframe.phases import Cohort, ServerState, Setting, Tensors, Totals

VECTORS = "head.weight"


class FedAwSConfig(StrictModel):
    """FedAwS's options.

    Attributes:
        margin: nu, the distance that is far enough: 0 does nothing, 0.5 makes class vectors orthogonal;
            C vectors can have C / (2 (C - 1)) at most.
        steps: steps of gradient descent after each mean. With 0 this is FedAvg.
        server_learning_rate: of these steps.
        momentum: of these steps, afresh in each round.
    """

    margin: float = Field(default=0.5, ge=0, le=1)
    steps: int = Field(default=10, ge=0, le=10_000)
    server_learning_rate: float = Field(default=0.1, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)


def spreadout(vectors: torch.Tensor, *, margin: float = 0.5) -> torch.Tensor:
    """Return R(W), a scalar.

    Vectors shorter than 1e-6 have cosines of about zero and no gradient.

    Args:
        vectors: w, one a row, (C, d), C of at least 2.

    >>> spreadout(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), margin=0.5)
    tensor(0.2500)
    """
    unit = unit_features(vectors)
    near = torch.relu(margin - (1 - unit @ unit.T) / 2).square()
    pairs = len(vectors) * (len(vectors) - 1)
    return near.masked_fill(torch.eye(len(near), dtype=torch.bool, device=near.device), 0).sum() / pairs


def spread(vectors: torch.Tensor, config: FedAwSConfig) -> torch.Tensor:
    """Take the server's steps on the class vectors (C, d), in float64."""
    moved: dict[str, torch.Tensor] = {VECTORS: vectors.detach().to("cpu", torch.float64)}
    moments: Tensors = {}
    for _ in range(config.steps):
        attached = moved[VECTORS].clone().requires_grad_()
        (slope,) = torch.autograd.grad(spreadout(attached, margin=config.margin), [attached])
        moved, moments = sgd_step(
            moved,
            {VECTORS: slope},
            moments,
            learning_rate=config.server_learning_rate,
            momentum=config.momentum,
        )
    return moved[VECTORS]


def server_rule(config: FedAwSConfig, setting: Setting) -> ServerRule:
    """Return FedAvg's mean, followed by the steps.

    Raises:
        ValueError: if the classifier has no vector for each class.
    """
    weight = getattr(model_update.shared_template(setting).head, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or len(weight) != setting.num_classes:
        raise ValueError(
            f"Expected a model whose head has a weight vector for each of the {setting.num_classes} classes, "
            "because FedAwS moves these apart, but it has another."
        )

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        model = model_update.apply_mean(state.model, totals, cohort)
        if config.steps:
            model[VECTORS] = spread(model[VECTORS], config).to(model[VECTORS].dtype)
        return state.evolve(model=model)

    return ServerRule(fields=model_update.model_fields, update=update)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return plain training, a server that spreads class vectors."""
    return plain_training(), server_rule(setting.config, setting)


METHOD = composed_method(
    name="fedaws",
    title="FedAwS",
    paper="Yu et al., Federated Learning with Only Positive Labels, ICML 2020",
    config=FedAwSConfig,
    findings=lambda config: "it spreads the classes' own vectors apart",
    parts=parts,
    private=lambda config: None,
)
