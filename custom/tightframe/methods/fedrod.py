"""FedROD: a generic head on the balanced loss for everybody, a personal head beside it.

Source: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
Classification, ICLR 2022.

The global model (backbone and generic head G) is trained on the balanced softmax and averaged, so
that it fits balanced classes. Each silo has a personal head P, which never leaves it: it learns from
the plain cross-entropy what the silo's own class distribution adds to the generic logits::

    l_generic  = -log( n_y exp(G(h)_y) / sum_c n_c exp(G(h)_c) )    trains backbone and G
    l_personal = cross_entropy( stop(G(h)) + P(stop(h)), y )        trains P only

The global model predicts by G(h), the personal one by G(h) + P(h).

In its linear form P is the silo's own, starts from zeros and never leaves it. In the paper's other form a
hyper-network H, which all silos share, makes P from the silo's class shares a::

    P(h) = W h + b,  (W, b) = H(a),  a_c = n_c / sum_j n_j

Of records that are repeated n counts one, and it is 0 below the silo's ``min_class_count``: but for weight
decay the update of H's first layer is, unit by unit, a multiple of a, and that of its last one of its hidden
units at a. So a plain sum would show a and is refused, and the rows of a total over K silos lie in the span
of K such vectors: of two honest hospitals it tells each one's numbers of records of each class, exactly. More
honest silos than H has hidden units, and no fewer than classes, span all that there is. Of a unit after a
ReLU that one silo alone moves, the total would still be that silo's a: of 17 silos and 16 units there was one
for 28 to 65 % of starts with eight classes. So the hidden layer has a softplus, whose slope is nowhere 0.

H trains on l_personal and is averaged with the model, so that a silo that never trained has a personal head,
too. Its last layer starts from zeros, as P does.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
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
from tightframe.learning.model_update import broadcast_model, copied, shared_width
from tightframe.learning.stages import BatchView, Term
from tightframe.models import feature_width
from tightframe.options import StrictModel
from tightframe.phases import Contribution, Setting, SiloView, Tensors

TERMS = ("balanced_softmax", "personal")
PERSONAL = "personal_head"
ABSENT_SHARE = 1e-12
HYPER_WIDTH = 16
"""Width of the hyper-network's hidden layer, if the job names none."""


class FedRODConfig(StrictModel):
    """FedROD's options.

    Attributes:
        absent_classes: how a silo counts a class that it lacks: ``clamp`` once, ``tiny`` 1e-12 times
            (both are in use in published code), ``exclude`` leaves it out of the denominator.
        personal_head: ``linear``: the silo's own; ``hyper_network``: made from the silo's class shares by a
            network of two layers that trains on the personal loss and is averaged with the model, so that a
            silo that never trained has a personal head.
        hyper_width: units of the hyper-network's hidden layer, with ``hyper_network`` only; None is 16 (our
            choice).
        personal_epochs: local training between the final global model and the personal one; None
            is one more round (the job's epochs), 0 puts the kept (or made) personal head on the final
            global model as it is.
    """

    absent_classes: Literal["clamp", "tiny", "exclude"] = "clamp"
    personal_head: Literal["linear", "hyper_network"] = "linear"
    hyper_width: int | None = Field(default=None, ge=1, le=4096)
    personal_epochs: int | None = Field(default=None, ge=0, le=10_000)

    @property
    def share_units(self) -> int:
        """Hidden units of the network that takes a silo's class shares; 0 where none does."""
        return 0 if self.personal_head == "linear" else self.hyper_width or HYPER_WIDTH

    @model_validator(mode="after")
    def _looked_at(self) -> FedRODConfig:
        if self.personal_head == "linear" and self.hyper_width is not None:
            raise ValueError(
                f"Expected `hyper_width` only with `personal_head: hyper_network`, got {self.hyper_width}: "
                "leave it out"
            )
        return self


class HyperHead(nn.Module):
    """The generic head G, and the hyper-network H that makes personal heads.

    Args:
        feature_width: d.
        hidden: units of H's hidden layer.
    """

    def __init__(self, feature_width: int, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.generic = nn.Linear(feature_width, num_classes)
        last = nn.Linear(hidden, num_classes * (feature_width + 1))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.hyper = nn.Sequential(nn.Linear(num_classes, hidden), nn.Softplus(), last)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return G's logits (B, C) of features (B, d): those of the global model."""
        logits: torch.Tensor = self.generic(features)
        return logits

    def weights(self, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the personal head's weight (C, d) and bias (C,) for class shares (C,)."""
        values = self.hyper(shares).reshape(len(shares), -1)
        return values[:, :-1], values[:, -1]


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


def head(config: FedRODConfig, feature_width: int, num_classes: int) -> nn.Module | None:
    """Return the generic head with the hyper-network; None keeps the backbone's head."""
    if config.personal_head == "linear":
        return None
    return HyperHead(feature_width, num_classes, config.share_units)


def needs_secure_sums(config: FedRODConfig) -> str | None:
    """Say why the hyper-network cannot be trained in plain sums."""
    if config.personal_head == "linear":
        return None
    return "an update of FedROD's hyper-network shows a silo's class shares; or use `personal_head: linear`"


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training of both heads; the mean of backbone and generic head, and of a hyper-network."""
    if setting.config.personal_head == "hyper_network":
        return LocalRule(TERMS, objective), averaging()
    return LocalRule(TERMS, objective, finish=keep_personal_head), averaging()


def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Train backbone and generic head on the one loss, the personal head on the other."""
    hyper = silo.setting.config.personal_head == "hyper_network"
    personal = None if hyper else _personal_head(silo, state)
    shares = class_shares(silo)
    absent = silo.setting.config.absent_classes
    counts = silo.class_counts("train").to(silo.device)
    if absent == "tiny":  # no count is zero then, so that nothing is excluded
        counts = counts.double().clamp_min(ABSENT_SHARE)

    def generic_loss(view: BatchView) -> torch.Tensor:
        zero_counts: Literal["clamp", "exclude"] = "clamp" if absent == "clamp" else "exclude"
        return balanced_softmax_loss(view.logits, view.labels, counts, zero_counts=zero_counts)

    def personal_loss(view: BatchView) -> torch.Tensor:
        features = view.features.detach()
        if personal is None:
            own: Any = view.model
            added = nn.functional.linear(features, *own.head.weights(shares.to(features)))
        else:
            added = personal(features)
        return nn.functional.cross_entropy(view.logits.detach() + added, view.labels)

    return Objective(
        (
            # One record more changes the counts, and with them the loss of every other record.
            Term(TERMS[0], 1.0, generic_loss, per_record=False),
            Term(TERMS[1], 1.0, personal_loss, per_record=not hyper),
        ),
        beside={} if personal is None else {PERSONAL: personal},
    )


def class_shares(silo: SiloView) -> torch.Tensor:
    """Return a: the share of each class that the silo may tell of, (C,) float32."""
    counts = silo.class_counts("train", distinct=True).double()
    counts[silo.held_counts() < silo.min_class_count] = 0
    return (counts / counts.sum().clamp_min(1)).float().to(silo.device)


def keep_personal_head(trained: Trained) -> Contribution:
    """Keep the personal head as the silo's state; it goes nowhere else."""
    head = trained.objective.beside[PERSONAL].state_dict()
    return Contribution({}, copied(head, f"{PERSONAL}."))


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Make a personal model: one more round of local training, then the sum of both heads.

    A silo that was part of no round starts from a personal head of zeros, as every silo does at first.
    """
    config, local = silo.setting.config, silo.setting.local
    hyper = config.personal_head == "hyper_network"
    epochs = local.epochs if config.personal_epochs is None else config.personal_epochs
    own: Any
    if epochs:
        trained = train(silo, broadcast_model(model), state, parts(silo.setting)[0], epochs=epochs)
        own = trained.model
        personal = None if hyper else trained.objective.beside[PERSONAL]
    else:
        own = silo.load(model)
        personal = None if hyper else _personal_head(silo, state)
    if personal is None:
        own.head = SummedHead(own.head.generic, _made_head(silo, own.head))
    else:
        own.head = SummedHead(own.head, personal)
    own.eval()
    return own


def _made_head(silo: SiloView, shared: HyperHead) -> nn.Module:
    """Return the personal head that the hyper-network makes for this silo."""
    with torch.no_grad():
        weight, bias = shared.weights(class_shares(silo))
    personal = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0])
    personal.load_state_dict({"weight": weight, "bias": bias})
    return personal.to(silo.device)


def _personal_head(silo: SiloView, state: Tensors) -> nn.Module:
    """Return the kept personal head; zeros, which change no logit, where none is kept yet."""
    width = shared_width(silo.setting)
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
    generic = own.head.generic if isinstance(own.head, HyperHead) else own.head
    own.head = SummedHead(generic, nn.Linear(feature_width(model), setting.num_classes))
    return model


METHOD = composed_method(
    name="fedrod",
    title="FedROD",
    paper=(
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, "
        "ICLR 2022"
    ),
    config=FedRODConfig,
    needs_secure_sums=needs_secure_sums,
    findings=lambda config: "it balances the softmax by numbers of single classes",
    parts=parts,
    head=head,
    personalise=personalise,
    personal_form=personal_form,
)
