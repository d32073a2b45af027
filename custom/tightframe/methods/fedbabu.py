"""FedBABU: the head stays as it was drawn while the body is trained; each silo fine-tunes at the end.

Source: Oh, Kim and Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification,
ICLR 2022, algorithm 1::

    u_k <- E epochs on the body alone, under the head h that the run's seed gives
    u <- sum_k p_k u_k
    personal model: a few epochs of body and head from (u, h)

Everybody has the same head, which never trains and never travels up, so that the bodies are trained for
one and the same classifier. With BatchNorm its running statistics are averaged, as always here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch import nn

from tightframe.learning.halves import (
    LocalRule,
    ServerRule,
    composed_method,
    plain_training,
)
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.own_models import averaging_body, in_body, in_head
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Setting, SiloView, Tensors

Part = Literal["all", "head", "body"]
_SELECT: dict[Part, Callable[[str], bool]] = {"all": lambda name: True, "head": in_head, "body": in_body}


class FedBabuConfig(StrictModel):
    """FedBABU's options.

    Attributes:
        personal_epochs: fine-tuning of the final model at each silo; the paper reports 5.
        fine_tune: what is fine-tuned: the whole model as in the paper's tables, or one part.
    """

    personal_epochs: int = Field(default=5, ge=1, le=10_000)
    fine_tune: Part = "all"


def head(config: FedBabuConfig, feature_width: int, num_classes: int) -> nn.Module:
    """Return a linear head that does not train, drawn as the backbone's own would be."""
    return nn.Linear(feature_width, num_classes).requires_grad_(False)


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedAvg's training and mean, of the parameters that train."""
    return plain_training(), averaging_body()


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Fine-tune the final model on this silo's training records."""
    config = silo.setting.config
    own = silo.load(model)
    own.get_submodule("head").requires_grad_(True)
    stage = Stage(
        (cross_entropy(),),
        OptimizerSettings.of(silo.setting.local),
        epochs=config.personal_epochs,
        trainable=_SELECT[config.fine_tune],
    )
    silo.fit(own, [stage])
    return own.eval()


METHOD = composed_method(
    name="fedbabu",
    title="FedBABU",
    paper=(
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    ),
    config=FedBabuConfig,
    findings=lambda config: None,
    parts=parts,
    head=head,
    private=lambda config: None,
    personalise=personalise,
    needs_encoder="trains nothing but the encoder in its rounds",
)
