"""FedNH: class prototypes that start far apart on the sphere and take up meaning from the silos.

Source: Dai, Chen, Li, Heinecke, Sun and Xu, Tackling Data Heterogeneity in Federated Learning with Class
Prototypes, AAAI 2023.

The head is a cosine classifier, ``logits = s * (f / |f|) W^T``. Its unit class vectors W never get a
gradient. They start uniformly spread, and after each round the server turns them a little towards
the mean direction of their class's features over all silos::

    mu_kc = normalise(mean over the silo's records of class c of f / |f|)
    W_c <- normalise(rho W_c + (1 - rho) normalise(sum_k n_kc mu_kc))

The divisor ``sum_k n_kc`` of the published code cancels in the normalisation, so a silo sends
``n_kc mu_kc`` and never its counts: what leaves it beside its update is one vector for each class. The
length of that vector is the count, so this holds in a secure sum only, whose length is at most the
pooled count.

Paper and published code disagree, besides where ``tightframe explain`` says so, on

- silos' weights in the prototype: paper alpha_k, not specified; code, and here, n_kc / sum n_kc by class
- normalisation: not in the paper; code, and here, before and after the moving average
- PM(V), PM(L): slides the reverse; here V = valid classes, L = label distribution, as code and tables
- silos in PM's mean: code those active in the round; here all
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from tightframe import phases
from tightframe.errors import TrainingError
from tightframe.learning import model_update
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    composed_method,
    update_fields,
)
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import GradientCorrection, at_least_float32, cross_entropy
from tightframe.models.geometry_heads import NormalisedPrototypeHead, PrototypeInit
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

Release = Literal["official", "sum"]
Average = Literal["uniform", "weighted"]

TERMS = ("cross_entropy",)
SUMS = "prototype/sums"
HEAD_PROTOTYPES = "head.prototypes"

NORM_GUARD = 1e-12
# Prototypes are kept in float32: what is left of old and new below this length is rounding.
CANCELLED = 1e-6
# The length of a class's term is at most its number of records; of more than these none is sent.
SUM_BOUND = 2.0**24


class FedNHConfig(StrictModel):
    """FedNH's options.

    Attributes:
        rho: share of the old prototype that a round keeps.
        init: first prototypes: ``orthonormal`` rows as the published code (independent random unit rows, if
            there are more classes than features), or an ``etf``, the optimum
            of the paper's program, for at most one class more than features.
        scale: first value of s. The published code starts at 20 for ResNets and at 1 for its small
            convolutional network.
        learn_scale: whether s is trained and averaged; the published alternative is fixed at 30.
        clip_norm: gradients longer than this are shortened to it; None leaves them.
        lr_decay: the learning rate of round t is the job's times ``lr_decay ** (t - 1)``; 0.99 in the
            paper's experiments, for all of their methods.
        average: models are averaged with the same weight for each silo, as paper and published code
            do, or by the job's public weights.
        proto_release: ``official`` sends ``n_kc mu_kc``. ``sum`` sends the plain sum of unit features,
            which one record changes by at most one, so that noise can be set for it; both point the
            same way where a class is spread alike at all silos.
        client_adv: the published code's variant in which a record counts in mu_kc by the probability
            that the silo's model gives its class.
        server_adv: its other one, in which mu_kc counts by ``exp(W_c . mu_kc)`` instead of n_kc.
        augment_prototypes: take the features of mu_kc from augmented pictures, as the published code.
    """

    rho: float = Field(default=0.9, ge=0, le=1)
    init: PrototypeInit = "orthonormal"
    scale: float = Field(default=20.0, gt=0, le=1000)
    learn_scale: bool = True
    clip_norm: float | None = Field(default=10.0, gt=0)
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    average: Average = "uniform"
    proto_release: Release = "official"
    client_adv: bool = False
    server_adv: bool = False
    augment_prototypes: bool = False

    @model_validator(mode="after")
    def _plain_sums(self) -> FedNHConfig:
        if self.proto_release == "sum" and (self.client_adv or self.server_adv):
            raise ValueError(
                "Expected `client_adv` and `server_adv` to be off where `proto_release` is 'sum', "
                "but got one of them on"
            )
        return self


def class_directions(
    features: torch.Tensor, labels: torch.Tensor, num_classes: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per class the weighted sum of unit features, ``sum_i w_i f_i / max(|f_i|, 1e-12)``.

    Args:
        features: (B, d).
        labels: (B,) int64 in [0, C).
        weights: of the records, (B,); one each by default.

    Returns:
        Sums (C, d), and the sum of weights of each class (C,), in float32 or the features' own wider
        type. A feature row of zeros has no direction and adds nothing to the first.
    """
    unit = nn.functional.normalize(at_least_float32(features), dim=1, eps=NORM_GUARD)
    member = nn.functional.one_hot(labels, num_classes).to(unit.dtype)
    if weights is not None:
        member = member * weights.to(unit.dtype)[:, None]
    return member.T @ unit, member.sum(0)


def unit_means(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``mu_c = normalise(sum_c / weight_c)``, (C, d); zero where a class is absent.

    Args:
        sums: of ``class_directions``, (C, d).
        weights: of ``class_directions``, (C,).
    """
    means = sums / weights.clamp_min(torch.finfo(weights.dtype).tiny)[:, None]
    return nn.functional.normalize(means, dim=1, eps=NORM_GUARD)


def local_prototypes(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return a silo's terms in the official form: per class its count times its unit mean direction.

    ``Q_c = n_c mu_c`` with ``mu_c = normalise(mean of the unit features of class c)``.

    Args:
        features: of all the silo's records, (n, d); their lengths do not matter.
        labels: (n,) int64 in [0, C).

    Returns:
        (C, d), zero where a class is absent.

    >>> local_prototypes(torch.tensor([[2.0, 0.0], [9.0, 0.0]]), torch.tensor([1, 1]), 2).tolist()
    [[0.0, 0.0], [2.0, 0.0]]
    """
    sums, counts = class_directions(features, labels, num_classes)
    return counts[:, None] * unit_means(sums, counts)


def update_prototypes(previous: torch.Tensor, summed: torch.Tensor, *, rho: float = 0.9) -> torch.Tensor:
    """Return the next prototypes: ``normalise(rho W + (1 - rho) normalise(sum))``.

    A class without a direction (absent everywhere, withheld, or silos that point opposite ways) keeps
    its prototype; so does one whose new prototype would have no length.

    Args:
        previous: W, unit rows (C, d).
        summed: ``sum_k Q_kc``, (C, d); its lengths do not matter.
        rho: share of the old prototype.

    Returns:
        (C, d) in the type of ``previous``.

    >>> update_prototypes(torch.eye(2), torch.tensor([[0.0, 7.0], [0.0, 0.0]]), rho=0.5).tolist()
    [[0.7071067690849304, 0.7071067690849304], [0.0, 1.0]]
    """
    old = previous.to(torch.float64)
    direction = nn.functional.normalize(summed.to(torch.float64), dim=1, eps=NORM_GUARD)
    moved = rho * old + (1 - rho) * direction
    length = torch.linalg.vector_norm(moved, dim=1, keepdim=True)
    turns = summed.to(torch.float64).any(1, keepdim=True) & (length > CANCELLED)
    return torch.where(turns, moved / length.clamp_min(CANCELLED), old).to(previous.dtype)


def head(config: FedNHConfig, width: int, classes: int) -> nn.Module:
    """Return the cosine classifier with its first prototypes."""
    return NormalisedPrototypeHead(
        width, classes, init=config.init, scale=config.scale, learn_scale=config.learn_scale
    )


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training of backbone and scale under fixed prototypes; the mean, and the prototypes' turn."""
    config: FedNHConfig = setting.config
    server = ServerRule(
        fields=partial(update_fields, weighted=config.average == "weighted"),
        update=partial(update, config=config),
    )
    return LocalRule(TERMS, objective, prototype_fields, finish), server


def prototype_fields(setting: Setting) -> tuple[phases.Field, ...]:
    """Return one vector for each class."""
    width = model_update.shared_width(setting)
    by_one = setting.config.proto_release == "sum"
    return (
        phases.Field(
            SUMS,
            (setting.num_classes, width),
            bound=SUM_BOUND,
            static=True,
            per_class=True,
            sensitivity=1.0 if by_one else None,
        ),
    )


def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Return the cross-entropy, with the round's learning rate and gradients of limited length."""
    config: FedNHConfig = silo.setting.config
    settings = OptimizerSettings.of(silo.setting.local)
    decay = config.lr_decay ** max(silo.round - 1, 0)
    return Objective(
        (cross_entropy(),),
        corrections=() if config.clip_norm is None else (clip_gradients(config.clip_norm),),
        optimizer=replace(settings, learning_rate=settings.learning_rate * decay),
    )


def finish(trained: Trained) -> Contribution:
    """Pass once with the trained model for the class directions; nothing is kept."""
    prototypes = trained.broadcast[model_update.BROADCAST + HEAD_PROTOTYPES]
    return Contribution({SUMS: prototype_terms(trained.silo, trained.model, prototypes)})


def clip_gradients(largest: float) -> GradientCorrection:
    """Return a correction that shortens the gradient of all parameters together to L2 norm ``largest``."""

    def correct(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], largest)

    return correct


@torch.no_grad()
def prototype_terms(silo: SiloView, model: nn.Module, prototypes: torch.Tensor) -> torch.Tensor:
    """Return the silo's term of the prototypes' sum, (C, d) float64 on the CPU, by the method's options.

    Args:
        silo: whose training fold is looked at; zeros without a look if it offers no prototypes.
        model: trained, in evaluation mode.
        prototypes: W as broadcast, (C, d).

    Raises:
        TrainingError: TF-301 if a feature is not finite.
    """
    config: FedNHConfig = silo.setting.config
    classes, width = prototypes.shape
    if not silo.offers_prototypes:
        return torch.zeros(classes, width, dtype=torch.float64)
    encoded = silo.encoded(model, "train")
    if config.augment_prototypes and len(silo.setting.input_shape) > 1:
        # Augmentation is keyed by the epoch: the one after the last of training.
        epoch = silo.setting.local.epochs
        records = silo.batches("train", augment=True, shuffle=False, epoch=epoch)
        encoded = ((model.features(inputs), labels) for inputs, labels in records)  # type: ignore[operator]
    sums, weights, counts, chosen = _passed(model, encoded, classes, width, by_probability=config.client_adv)
    if chosen is not None:
        sums *= silo.backed(*chosen)
    if config.proto_release == "sum":
        return sums
    means = unit_means(sums, weights)
    if config.server_adv:
        # The weight needs this silo's own vector and the broadcast prototypes only, so it stays a sum.
        return torch.exp((prototypes.cpu().to(torch.float64) * means).sum(1, keepdim=True)) * means
    return counts[:, None] * means


def _passed(
    model: nn.Module,
    encoded: Iterable[tuple[torch.Tensor, torch.Tensor]],
    classes: int,
    width: int,
    *,
    by_probability: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return sums (C, d), weights (C,) and counts (C,) of all records, float64 on the CPU.

    By probability also each record's, (n, 1), and its label, (n,).
    """
    records: list[tuple[torch.Tensor, torch.Tensor]] = []
    sums = torch.zeros(classes, width, dtype=torch.float64)
    weights, counts = torch.zeros(classes, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
    for features, labels in encoded:
        chosen = None
        if by_probability:
            logits = model.head(features).to(torch.float64)  # type: ignore[operator]
            chosen = logits.softmax(1).gather(1, labels[:, None])[:, 0]
            records.append((chosen[:, None].cpu(), labels.cpu()))
        part, weight = class_directions(features.to(torch.float64), labels, classes, chosen)
        sums += part.cpu()
        weights += weight.cpu()
        counts += torch.bincount(labels.cpu(), minlength=classes)
    if not bool(sums.isfinite().all()):
        raise TrainingError("Expected finite features after local training, but some are NaN or infinite.")
    if not records:
        return sums, weights, counts, None
    sizes, labels = (torch.cat(items) for items in zip(*records, strict=True))
    return sums, weights, counts, (sizes, labels)


def update(state: ServerState, totals: Totals, cohort: Cohort, *, config: FedNHConfig) -> ServerState:
    """Average the models, and turn the prototypes by ``update_prototypes``.

    Where the prototypes' sum was not opened (a silo dropped out), all of them keep their values.
    """
    if config.average == "uniform":
        cohort = cohort.uniform()
    model = model_update.apply_mean(state.model, totals, cohort)
    if SUMS in totals:
        model[HEAD_PROTOTYPES] = update_prototypes(
            model[HEAD_PROTOTYPES], torch.as_tensor(totals[SUMS]), rho=config.rho
        )
    return state.evolve(model=model)


METHOD = composed_method(
    name="fednh",
    title="FedNH",
    paper=("Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023"),
    config=FedNHConfig,
    findings=lambda config: "its head's prototypes are of single classes",
    head=head,
    parts=parts,
    personalise=None,
)
