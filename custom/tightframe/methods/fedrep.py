"""FedRep: each silo fits its own head to the common body first, then the body to that head.

Source: Collins, Hassani, Mokhtari and Shakkottai, Exploiting Shared Representations for Personalized
Federated Learning, ICML 2021, algorithm 1::

    h_k <- E_h epochs on the head alone, body u fixed
    u_k <- E epochs on the body alone, head h_k fixed
    u <- sum_k p_k u_k

The head h_k is the silo's own state. It never leaves, and becomes what it was trained to only if the
silo's term was in the opened sum. While the head trains, the body's parameters stay and its running
statistics (BatchNorm) go on, as in published code. The global model, the body under the head that the
run's seed gave, has a head that nobody has trained; what the method is for are the personal models.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from tightframe.learning.halves import LocalRule, Objective, ServerRule, composed_method
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.own_models import averaging_body, in_body, in_head, keep_head, with_own_head
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Setting, SiloView, Tensors


class FedRepConfig(StrictModel):
    """FedRep's option.

    Attributes:
        head_epochs: E_h, of the head alone, in every round before the body's epochs (the job's), and once
            more on the final body for the personal model. The paper and FedNH's comparison have 10.
    """

    head_epochs: int = Field(default=10, ge=1, le=10_000)


def head_stage(setting: Setting) -> Stage:
    """Return the stage of E_h epochs that leave the body's parameters as they are."""
    optimizer = OptimizerSettings.of(setting.local)
    return Stage((cross_entropy(),), optimizer, epochs=setting.config.head_epochs, trainable=in_head)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return the head's epochs under the silo's own head, then the body's; the mean of the body."""
    objective = Objective((cross_entropy(),), trainable=in_body, before=(head_stage(setting),))
    local = LocalRule(
        ("cross_entropy",), lambda silo, broadcast, state: objective, start=with_own_head, finish=keep_head
    )
    return local, averaging_body()


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Put the final body under this silo's head, and fit that to it by ``head_epochs`` more."""
    own = silo.load(with_own_head(model, state))
    silo.fit(own, [head_stage(silo.setting)])
    return own.eval()


METHOD = composed_method(
    name="fedrep",
    title="FedRep",
    paper=(
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    ),
    config=FedRepConfig,
    findings=lambda config: None,
    parts=parts,
    personalise=personalise,
    needs_encoder="keeps each silo's head at home, so that nothing would be trained together",
)
