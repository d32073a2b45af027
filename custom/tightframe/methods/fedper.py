"""FedPer: the body is everybody's, the head is each silo's own; both train together.

Source: Arivazhagan, Aggarwal, Singh and Choudhary, Federated Learning with Personalization Layers,
arXiv 1912.00818, algorithms 1 and 2, with the head as the one personalization layer::

    (u_k, h_k) <- E epochs of the silo's loss from (u, h_k)
    u <- sum_k p_k u_k

The head h_k is the silo's own state. It never leaves, and becomes what it was trained to only if the
silo's term was in the opened sum. The global model, the body under the head that the run's seed gave,
has a head that nobody has trained; what the method is for are the personal models.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import nn

from tightframe.learning.halves import LocalRule, ServerRule, composed_method, plain_training
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.own_models import averaging_body, keep_head, with_own_head
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Setting, SiloView, Tensors


class FedPerConfig(StrictModel):
    """FedPer's option.

    Attributes:
        personal_epochs: training of body and head between the final body and the personal model;
            None is one more round (the job's epochs), 0 takes the final body and the kept head as they are.
    """

    personal_epochs: int | None = Field(default=None, ge=0, le=10_000)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training of both under the silo's own head; the mean of the body."""
    return replace(plain_training(), start=with_own_head, finish=keep_head), averaging_body()


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Put the final body under this silo's head, and train both for ``personal_epochs``."""
    own = silo.load(with_own_head(model, state))
    config, local = silo.setting.config, silo.setting.local
    epochs = local.epochs if config.personal_epochs is None else config.personal_epochs
    if epochs:
        silo.fit(own, [Stage((cross_entropy(),), OptimizerSettings.of(local), epochs=epochs)])
    return own.eval()


METHOD = composed_method(
    name="fedper",
    title="FedPer",
    paper="Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818",
    config=FedPerConfig,
    findings=lambda config: None,
    parts=parts,
    personalise=personalise,
    needs_encoder="keeps each silo's head at home, so that nothing would be trained together",
)
