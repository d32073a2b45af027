"""FedROD: a generic head on the balanced loss for everybody, a personal head beside it.

Source: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
Classification, ICLR 2022.

The global model (backbone and generic head G) is trained on the balanced softmax and averaged, so
that it fits balanced classes. Each silo has a personal head P, which never leaves it: it learns from
the plain cross-entropy what the silo's own class distribution adds to the generic logits::

    l_generic  = -log( n_y exp(G(h)_y) / sum_c n_c exp(G(h)_c) )    trains backbone and G
    l_personal = cross_entropy( stop(G(h)) + P(stop(h)), y )        trains P only

The global model predicts by G(h), the personal one by G(h) + P(h).

The personal head is linear. The paper's other form, a network that makes the personal head from the
silo's class distribution, is not implemented: a job that asks for it is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    averaging,
    composed_method,
    train,
)
from tightframe.learning.losses import balanced_softmax_loss
from tightframe.learning.model_update import broadcast_model, shared_template
from tightframe.learning.stages import BatchView, Term
from tightframe.models import feature_width
from tightframe.options import StrictModel
from tightframe.phases import Contribution, Setting, SiloView, Tensors

TERMS = ("balanced_softmax", "personal")
PERSONAL = "personal_head"
ABSENT_SHARE = 1e-12


class FedRODConfig(StrictModel):
    """FedROD's options.

    Attributes:
        absent_classes: how a silo counts a class that it lacks: ``clamp`` once, ``tiny`` 1e-12 times
            (both are in use in published code), ``exclude`` leaves it out of the denominator.
        personal_head: ``linear``; nothing else is implemented.
        personal_epochs: local training between the final global model and the personal one; None
            is one more round (the job's epochs), 0 puts the kept personal head on the final global
            model as it is.
    """

    absent_classes: Literal["clamp", "tiny", "exclude"] = "clamp"
    personal_head: Literal["linear"] = "linear"
    personal_epochs: int | None = Field(default=None, ge=0, le=10_000)


class SummedHead(nn.Module):
    """The head of a personal model: the generic logits plus the personal ones.

    Args:
        generic: G, maps features (B, d) to logits (B, C).
        personal: P, likewise.
    """

    def __init__(self, generic: nn.Module, personal: nn.Module) -> None:
        super().__init__()
        self.generic = generic
        self.personal = personal

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (B, C) of features (B, d)."""
        logits: torch.Tensor = self.generic(features) + self.personal(features)
        return logits


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training of both heads; the mean of backbone and generic head."""
    return LocalRule(TERMS, objective, finish=keep_personal_head), averaging()


def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Train backbone and generic head on the one loss, the personal head on the other."""
    personal = _personal_head(silo, state)
    absent = silo.setting.config.absent_classes
    counts = silo.class_counts("train").to(silo.device)
    if absent == "tiny":  # no count is zero then, so that nothing is excluded
        counts = counts.double().clamp_min(ABSENT_SHARE)

    def generic_loss(view: BatchView) -> torch.Tensor:
        zero_counts: Literal["clamp", "exclude"] = "clamp" if absent == "clamp" else "exclude"
        return balanced_softmax_loss(view.logits, view.labels, counts, zero_counts=zero_counts)

    def personal_loss(view: BatchView) -> torch.Tensor:
        logits = view.logits.detach() + personal(view.features.detach())
        return nn.functional.cross_entropy(logits, view.labels)

    return Objective(
        (
            # One record more changes the counts, and with them the loss of every other record.
            Term(TERMS[0], 1.0, generic_loss, per_record=False),
            Term(TERMS[1], 1.0, personal_loss, per_record=True),
        ),
        beside={PERSONAL: personal},
    )


def keep_personal_head(trained: Trained) -> Contribution:
    """Keep the personal head as the silo's state; it goes nowhere else."""
    head = trained.objective.beside[PERSONAL].state_dict()
    return Contribution(
        {}, {f"{PERSONAL}.{name}": item.detach().cpu().clone() for name, item in head.items()}
    )


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Make a personal model: one more round of local training, then the sum of both heads.

    Args:
        silo: whose training records are used.
        model: the final global model, by its own names.
        state: the personal head as of the last round that this silo was part of; a silo that was
            part of none starts from zeros, as every silo does in its first round.

    Returns:
        The personal model in evaluation mode.
    """
    config, local = silo.setting.config, silo.setting.local
    epochs = local.epochs if config.personal_epochs is None else config.personal_epochs
    own: Any
    if epochs:
        trained = train(silo, broadcast_model(model), state, parts(silo.setting)[0], epochs=epochs)
        own, personal = trained.model, trained.objective.beside[PERSONAL]
    else:
        own, personal = silo.load(model), _personal_head(silo, state)
    own.head = SummedHead(own.head, personal)
    own.eval()
    return own


def _personal_head(silo: SiloView, state: Tensors) -> nn.Module:
    """Return the kept personal head; zeros, which change no logit, where none is kept yet."""
    width = feature_width(shared_template(silo.setting))
    head = nn.utils.skip_init(nn.Linear, width, silo.setting.num_classes)
    if state:
        head.load_state_dict({name.removeprefix(f"{PERSONAL}."): item for name, item in state.items()})
    else:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return head.to(silo.device)


def personal_form(setting: Setting, model: nn.Module) -> nn.Module:
    """Return a model with the sum of both heads, as ``personalise`` leaves it."""
    own: Any = model
    own.head = SummedHead(own.head, nn.Linear(feature_width(model), setting.num_classes))
    return model


METHOD = composed_method(
    name="fedrod",
    title="FedROD",
    paper=(
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, "
        "ICLR 2022"
    ),
    config=FedRODConfig,
    findings=lambda config: "it balances the softmax by numbers of single classes",
    parts=parts,
    personalise=personalise,
    personal_form=personal_form,
)
