"""Ditto: FedAvg for everybody, and beside it a personal model that is kept near the global one.

Source: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization,
ICML 2021, eq. (1) and algorithm 1::

    w <- FedAvg's round                                        the global model
    v_k <- v_k - eta (grad f_k(v_k) + lam (v_k - w))           s epochs, w as received

v_k starts from the first global model that its silo receives and is the silo's own state; it becomes
what it was trained to only if the silo's term of that round was in the opened sum. Nothing that the
server learns depends on it, so that the global model is FedAvg's, bit for bit. The distance is to the
model received, as in the paper and FedETF's code; FedNH's code takes the silo's model just trained. The
personal model is v_k after one more round near the final model. A round costs twice FedAvg's training.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import nn

from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    averaging,
    composed_method,
    trained_parameters,
)
from tightframe.learning.losses import half_squared_distance
from tightframe.learning.model_update import copied, named, received_model
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import ParameterTerm, Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Contribution, Setting, SiloView, Tensors

PERSONAL = "personal/"


class DittoConfig(StrictModel):
    """Ditto's options.

    Attributes:
        lam: lambda, the weight of the distance; the paper tries 0.05 to 2, FedNH's comparison has 0.75.
            With 0 the personal model is the silo's alone.
        personal_epochs: s, a round; None is the job's.
        personal_learning_rate: None is the job's.
    """

    lam: float = Field(default=0.75, ge=0)
    personal_epochs: int | None = Field(default=None, ge=1, le=10_000)
    personal_learning_rate: float | None = Field(default=None, gt=0)


def train_personal(silo: SiloView, received: Tensors, state: Tensors) -> nn.Module:
    """Train s epochs of the personal objective: from what the silo kept, near the model received.

    Args:
        silo: whose records are used.
        received: w, by its own names.
        state: the personal model as last committed; {} before the first time.

    Returns:
        v_k in evaluation mode.
    """
    config, local = silo.setting.config, silo.setting.local
    model = silo.load(named(state, PERSONAL) or received)
    anchors = {name: received[name].to(silo.device) for name in trained_parameters(silo.setting)}
    optimizer = OptimizerSettings.of(local)
    if config.personal_learning_rate is not None:
        optimizer = replace(optimizer, learning_rate=config.personal_learning_rate)
    stage = Stage(
        terms=(cross_entropy(),),
        optimizer=optimizer,
        epochs=config.personal_epochs or local.epochs,
        parameter_terms=(
            ParameterTerm("proximal", config.lam, lambda model: half_squared_distance(model, anchors)),
        ),
    )
    silo.fit(model, [stage])
    return model


def finish(trained: Trained) -> Contribution:
    """Keep the personal model as the silo's state; send nothing more."""
    model = train_personal(trained.silo, received_model(trained.broadcast), trained.state)
    return Contribution({}, copied(model.state_dict(), PERSONAL))


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedAvg's training and mean, with the personal model trained beside it."""
    rule = LocalRule(
        ("cross_entropy",), lambda silo, broadcast, state: Objective((cross_entropy(),)), finish=finish
    )
    return rule, averaging()


METHOD = composed_method(
    name="ditto",
    title="Ditto",
    paper="Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
    config=DittoConfig,
    findings=lambda config: None,
    parts=parts,
    # One more round of the personal half: near the final model, from what the silo kept.
    personalise=train_personal,
    network="logits",
)
