"""FedProc: features are drawn to prototypes of their class that all silos share.

Source: Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang, FedProc: Prototypical Contrastive Federated Learning on
Non-IID Data, Future Generation Computer Systems 143, 2023 (arXiv 2109.12273). Between backbone and classifier
there is a projection z = proj(h). In round t of T, with unit vectors z and c_j::

    L = alpha_t L_gpc + (1 - alpha_t) L_ce,      alpha_t = 1 - t / T
    L_gpc = -log( exp(z . c_y / tau) / sum_j exp(z . c_j / tau) )
    c_j = mean over the silos that hold class j of (mean over the silo's records of j of z)

so that training begins with the features and ends with the classifier. The prototypes are the ratio of two
sums, of class means and of holders. A class that nobody tells of keeps its last prototype. Records of a
class without a prototype have the plain cross-entropy in place of L, and such classes are in no denominator.

Given the prototypes the loss is a mean of single records' losses; the prototypes themselves are exact. In the
published code only z is normalised, prototypes are over records, and there is no temperature (rate 0.1).
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import nn

from tightframe import phases
from tightframe.learning import model_update
from tightframe.learning.class_sums import ClassSums, ratio_of_sums
from tightframe.learning.halves import LocalRule, Objective, ServerRule, Trained, scheduled_method
from tightframe.learning.stages import BatchView, Term, at_least_float32, cross_entropy
from tightframe.models.geometry_heads import unit_features
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

TERMS = ("cross_entropy", "prototypical")
MEANS, HOLDERS = "prototypes/means", "prototypes/holders"
PROTOTYPES, VALID = "prototypes", "prototypes_valid"
FEATURE_BOUND = 2.0**14


class FedProcConfig(StrictModel):
    """FedProc's options.

    Attributes:
        tau: temperature of the cosines; the paper takes 0.5.
        projection_width: outputs of the projection, two layers with a ReLU between them, that is put before
            the classifier; the paper takes 256. None adds none: the features are then compared as they
            are, and the network is that of the other methods.
    """

    tau: float = Field(default=0.5, gt=0)
    projection_width: int | None = Field(default=256, ge=1, le=65_536)


class ProjectedHead(nn.Module):
    """A projection, and a linear classifier of what it gives.

    Args:
        feature_width: width d of the features.
        width: of the projection's outputs.
        num_classes: number of classes C.
    """

    def __init__(self, feature_width: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.feature_width = feature_width
        self.projection = nn.Sequential(
            nn.Linear(feature_width, feature_width), nn.ReLU(), nn.Linear(feature_width, width)
        )
        self.output = nn.Linear(width, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (B, C) of features (B, d)."""
        logits: torch.Tensor = self.output(self.projection(features))
        return logits


def head(config: FedProcConfig, width: int, classes: int) -> nn.Module | None:
    """Return the projection and the classifier; None keeps the backbone's head."""
    if config.projection_width is None:
        return None
    return ProjectedHead(width, config.projection_width, classes)


def projected(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return z of features (B, d), of which the prototypes are means."""
    if not isinstance(model.head, ProjectedHead):
        return features
    vectors: torch.Tensor = model.head.projection(features)
    return at_least_float32(vectors)


def prototypical_losses(
    vectors: torch.Tensor,
    labels: torch.Tensor,
    prototypes: torch.Tensor,
    valid: torch.Tensor,
    *,
    tau: float = 0.5,
) -> torch.Tensor:
    """Return L_gpc of each record, (B,); zero for records of a class without a prototype.

    Vectors shorter than 1e-6 count as cosines of zero and have no gradient.

    Args:
        vectors: z, (B, w).
        labels: (B,) int64.
        prototypes: c, (C, w), constant.
        valid: which classes have one, (C,) bool; at least one has.
        tau: temperature.

    >>> rows = torch.eye(2)
    >>> losses = prototypical_losses(rows[:1], torch.tensor([0]), rows, torch.tensor([True, True]), tau=1.0)
    >>> round(float(losses), 4)  # log(1 + exp(-1))
    0.3133
    """
    anchors = unit_features(torch.where(valid[:, None], prototypes, 0).to(vectors))
    cosines = unit_features(vectors) @ anchors.T
    logits = (cosines / tau).masked_fill(~valid, -torch.inf)
    known = valid[labels]
    # A class without a prototype is in no denominator; its records take any other and then count as zero.
    stand_in = torch.where(known, labels, valid.long().argmax())
    return nn.functional.cross_entropy(logits, stand_in, reduction="none") * known


def local_rule(config: FedProcConfig, *, alpha: float) -> LocalRule:
    """Return both losses, and the class means of the trained model.

    Args:
        config: the method's options.
    """

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        valid = broadcast[VALID].to(torch.bool).to(silo.device)
        if not bool(valid.any()):
            return Objective((cross_entropy(),))
        prototypes = broadcast[PROTOTYPES].to(silo.device)

        def classified(view: BatchView) -> torch.Tensor:
            losses = nn.functional.cross_entropy(view.logits, view.labels, reduction="none")
            return (losses * (1 - alpha * valid[view.labels].float())).mean()

        def drawn(view: BatchView) -> torch.Tensor:
            vectors = projected(view.model, view.features)
            return prototypical_losses(vectors, view.labels, prototypes, valid, tau=config.tau).mean()

        return Objective(
            (Term(TERMS[0], 1.0, classified, per_record=True), Term(TERMS[1], alpha, drawn, per_record=True))
        )

    def fields(setting: Setting) -> tuple[phases.Field, ...]:
        shared = partial(phases.Field, static=True, per_class=True)
        shape = (setting.num_classes, _width(setting))
        return (
            shared(MEANS, shape, bound=FEATURE_BOUND),
            shared(HOLDERS, (setting.num_classes,), bound=1.0),
        )

    def finish(trained: Trained) -> Contribution:
        return Contribution(class_means(trained.silo, trained.model))

    return LocalRule(TERMS, objective, fields=fields, finish=finish)


@torch.no_grad()
def class_means(silo: SiloView, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a silo's class means of z and the classes that it reports, float64; zero for the others.

    Args:
        silo: whose training records are passed through the model once, without augmentation.
        model: trained, in evaluation mode.

    Raises:
        TrainingError: TF-301 if a feature is not finite.
    """
    class_sums = ClassSums(silo.setting.num_classes, _width(silo.setting))
    for features, labels in silo.encoded(model, "train") if silo.offers_prototypes else ():
        class_sums.add(projected(model, at_least_float32(features)), labels)
    means, held = class_sums.means(least=1)
    return {MEANS: means, HOLDERS: held}


def server_rule() -> ServerRule:
    """Return FedAvg's mean, and the prototypes where class means were opened; else they stay as they are."""

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        state = state.evolve(model=model_update.apply_mean(state.model, totals, cohort))
        if MEANS not in totals:
            return state
        means, holders = torch.as_tensor(totals[MEANS]), torch.as_tensor(totals[HOLDERS])
        prototypes, held = ratio_of_sums(state.extra[PROTOTYPES], means, holders)
        valid = (state.extra[VALID].to(torch.bool) | held).to(torch.uint8)
        return state.evolve(extra={**state.extra, PROTOTYPES: prototypes, VALID: valid})

    return ServerRule(
        fields=model_update.model_fields,
        update=update,
        initial=_no_prototypes,
        broadcast=lambda state: {name: state.extra[name] for name in (PROTOTYPES, VALID)},
    )


def _width(setting: Setting) -> int:
    width: int | None = setting.config.projection_width
    return model_update.shared_width(setting) if width is None else width


def _no_prototypes(setting: Setting) -> dict[str, torch.Tensor]:
    return {
        PROTOTYPES: torch.zeros(setting.num_classes, _width(setting)),
        VALID: torch.zeros(setting.num_classes, dtype=torch.uint8),
    }


def parts(setting: Setting, round: int, rounds: int) -> tuple[LocalRule, ServerRule]:
    """Return FedProc's training with alpha_t = 1 - t / T, and its server."""
    return local_rule(setting.config, alpha=1 - round / rounds), server_rule()


METHOD = scheduled_method(
    name="fedproc",
    title="FedProc",
    paper="Mu et al., FedProc: Prototypical Contrastive Federated Learning on Non-IID Data, FGCS 2023",
    config=FedProcConfig,
    findings=lambda config: "its prototypes are means of the records of one class",
    head=head,
    parts=parts,
)
