"""MOON: features that stay near the global model's and away from those of the silo's last model.

Source: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, eq. (3)::

    L = L_ce + mu * L_con
    L_con = -log( e^{cos(z, z_g) / tau} / (e^{cos(z, z_g) / tau} + e^{cos(z, z_p) / tau}) )

z are a record's features in the network in training, z_g in the global model just received and z_p
in the model that the silo trained in the last round in which its term was summed; both of these are
frozen and in evaluation mode. A silo that takes part for the first time has no such model and trains by L_ce
alone. The paper compares the outputs of a projection head that it adds to the network; here they
are the features that the classifier sees, so that the network is the same for all methods.

The last model is the silo's own state and never leaves it. Given the two frozen networks the term is
a mean over records of something that depends on one record each: it couples no records, so gradients
of single records exist and may be clipped (DP-SGD). What a silo keeps was trained on its records, but
enters what it sends only by such gradients.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.halves import (
    LocalRule,
    Objective,
    Trained,
    averaged,
    composed_method,
)
from tightframe.learning.model_update import copied, named, received_model
from tightframe.learning.stages import BatchView, Term, at_least_float32, cross_entropy
from tightframe.models.geometry_heads import unit_features
from tightframe.options import StrictModel
from tightframe.phases import Contribution, SiloView, Tensors

PREVIOUS = "previous/"


class MoonConfig(StrictModel):
    """MOON's options.

    Attributes:
        mu: weight of the contrastive term; the paper tries 0.1, 1, 5 and 10.
        tau: its temperature.
    """

    mu: float = Field(default=1.0, ge=0)
    tau: float = Field(default=0.5, gt=0)


def contrastive_loss(
    features: torch.Tensor,
    global_features: torch.Tensor,
    previous_features: torch.Tensor,
    *,
    tau: float = 0.5,
) -> torch.Tensor:
    """Return the model-contrastive term, eq. (3): a mean over records.

    Cosines of rows shorter than 1e-6 are taken as zero and have no gradient.

    Args:
        features: z, (B, d).
        global_features: z_g, (B, d), constant.
        previous_features: z_p, (B, d), constant.
        tau: temperature.

    >>> rows = torch.tensor([[3.0, 4.0]])
    >>> round(float(contrastive_loss(rows, rows, rows)), 4)  # log(2)
    0.6931
    """
    unit = unit_features(at_least_float32(features))
    near = (unit * unit_features(at_least_float32(global_features))).sum(1)
    far = (unit * unit_features(at_least_float32(previous_features))).sum(1)
    return nn.functional.softplus((far - near) / tau).mean()


def local_rule(config: MoonConfig) -> LocalRule:
    """Return the cross-entropy and, from a silo's second participation on, the contrastive term."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        if not state:
            return Objective((cross_entropy(),))
        received = _frozen(silo, received_model(broadcast))
        previous = _frozen(silo, named(state, PREVIOUS))

        def contrastive(view: BatchView) -> torch.Tensor:
            with torch.no_grad():
                near, far = (model.features(view.inputs) for model in (received, previous))  # type: ignore[operator]
            return contrastive_loss(view.features, near, far, tau=config.tau)

        return Objective((cross_entropy(), Term("contrastive", config.mu, contrastive, per_record=True)))

    return LocalRule(("cross_entropy", "contrastive"), objective, finish=keep_model)


def keep_model(trained: Trained) -> Contribution:
    """Propose the model just trained as the one that the next round's features stay away from."""
    return Contribution({}, copied(trained.model.state_dict(), PREVIOUS))


def _frozen(silo: SiloView, tensors: Tensors) -> nn.Module:
    return silo.load(tensors).eval().requires_grad_(False)


METHOD = composed_method(
    name="moon",
    title="MOON",
    paper="Li et al., Model-Contrastive Federated Learning, CVPR 2021",
    config=MoonConfig,
    findings=lambda config: None,
    parts=averaged(local_rule),
)
