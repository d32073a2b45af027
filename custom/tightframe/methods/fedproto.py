"""FedProto: only class prototypes move; every silo has a model of its own.

Source: Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, FedProto: Federated Prototype Learning across
Heterogeneous Clients, AAAI 2022, eq. (3) to (6) and algorithm 1::

    silo:    min  cross-entropy + lam * mean over records with a G_y of  |z - G_y|^2 / d
             after training  g_kc = mean of z over its records of class c
    server:  G_c = sum_k (n_kc / N_c) g_kc = sum over all silos' records of class c of z / N_c

z are a record's features, d their width. The paper writes the server's mean over holders with a factor
1 / |holders| before weights that already sum to one; its code and those of the comparisons take the plain
mean over holders (``weighting: holders``), the formula without that factor is the pooled mean
(``records``). A class without prototype has no term: FedETF's code has a vector of zeros there, which
pulls features to zero. Published codes take the mean over d of the squared distance (lam 0.1 in FedNH's
and FedETF's comparisons, 1 in the authors').

The silo's model never leaves, and becomes what it was trained to only if the silo's term was in the opened
sum. Models start from a draw of each silo's own, and may be of different architectures; what they must share
is the feature width. There is no global model: what is evaluated is each silo's own, by its own head.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from tightframe import phases
from tightframe.learning import model_update
from tightframe.learning.class_sums import ClassSums, ratio_of_sums
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.own_models import TRAINED, kept_model, own_tensors, own_trained, trained
from tightframe.learning.stages import BatchView, Stage, Term, cross_entropy
from tightframe.models import feature_width
from tightframe.options import StrictModel
from tightframe.phases import (
    Cohort,
    Contribution,
    Method,
    Phase,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)

Weighting = Literal["holders", "records"]

TERMS = ("cross_entropy", "prototype")
SUMS, SHARES = "prototype/sums", "prototype/shares"
PROTOTYPES, VALID = "prototypes", "prototype_valid"
SUM_BOUND, FEATURE_BOUND, COUNT_BOUND = 2.0**28, 2.0**20, 2.0**24


class FedProtoConfig(StrictModel):
    """FedProto's options.

    Attributes:
        lam: lambda, the weight of the distance to the prototypes; 0.1 as in FedNH's and FedETF's comparisons,
            the authors: 1.
        weighting: a prototype is the mean of its holders' class means (``holders``), or of all their records
            (``records``).
    """

    lam: float = Field(default=0.1, ge=0)
    weighting: Weighting = "holders"


def prototype_loss(
    features: torch.Tensor, labels: torch.Tensor, prototypes: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Return the mean of ``|z - G_y|^2 / d`` over records whose class has a prototype; zero if none has.

    Args:
        features: z, (B, d).
        labels: y, (B,).
        prototypes: G, (C, d), constant; rows that are not valid are never used.
        valid: (C,) bool.

    >>> prototype_loss(torch.ones(2, 2), torch.tensor([0, 1]), torch.zeros(2, 2), torch.tensor([True, False]))
    tensor(1.)
    """
    known = valid[labels]
    rows = torch.where(valid[:, None], prototypes, 0.0)[labels].to(features)
    distances = (features - rows).square().mean(1)
    return torch.where(known, distances, 0.0).sum() / known.sum().clamp_min(1)


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return no model, and no prototype yet."""
    width = model_update.shared_width(setting)
    extra = {
        PROTOTYPES: torch.zeros(setting.num_classes, width),
        VALID: torch.zeros(setting.num_classes, dtype=torch.uint8),
    }
    return ServerState(model={}, extra=extra)


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """Return one phase: train near the prototypes received, then report the class sums."""
    classes, width = setting.num_classes, model_update.shared_width(setting)
    by_records = setting.config.weighting == "records"
    sums = phases.Field(
        SUMS,
        (classes, width),
        bound=SUM_BOUND if by_records else FEATURE_BOUND,
        static=True,
        per_class=True,
        means=not by_records,
    )
    shares = phases.Field(
        SHARES, (classes,), bound=COUNT_BOUND if by_records else 1.0, static=True, per_class=True
    )
    schema = phases.Schema((TRAINED, *model_update.training_fields(TERMS), sums, shares))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """Return the prototypes, and which of them exist."""
    return {name: state.extra[name] for name in (PROTOTYPES, VALID)}


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """Train e epochs of this silo's own model, and report its class sums; the model stays."""
    config: FedProtoConfig = silo.setting.config
    model = silo.load(own_tensors(silo, state))
    prototypes, valid = broadcast[PROTOTYPES].to(silo.device), broadcast[VALID].to(silo.device).bool()

    def distance(view: BatchView) -> torch.Tensor:
        return prototype_loss(view.features, view.labels, prototypes, valid)

    local = silo.setting.local
    stage = Stage(
        # A record's share depends on how many others of its batch have a prototype.
        (cross_entropy(), Term("prototype", config.lam, distance, per_record=False)),
        OptimizerSettings.of(local),
        epochs=local.epochs,
    )
    report = silo.fit(model, [stage])
    class_sums = ClassSums(silo.setting.num_classes, feature_width(model))
    if silo.offers_prototypes:
        class_sums.add_pass(silo.encoded(model, "train"))
    sums, shares = (class_sums.means if config.weighting == "holders" else class_sums.totals)(least=1)
    reported = {**model_update.training_terms(report, TERMS), SUMS: sums, SHARES: shares}
    return Contribution({**trained(), **reported}, kept_model(model))


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Update prototypes of the classes in these sums; after a drop-out, without class sums, all stay."""
    if SHARES not in totals:
        return state
    prototypes, held = ratio_of_sums(
        state.extra[PROTOTYPES], torch.as_tensor(totals[SUMS]), torch.as_tensor(totals[SHARES])
    )
    valid = (state.extra[VALID].bool() | held).to(torch.uint8)
    return state.evolve(extra={**state.extra, PROTOTYPES: prototypes, VALID: valid})


METHOD = Method(
    name="fedproto",
    title="FedProto",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
    counts_rounds=False,
    config=FedProtoConfig,
    findings=lambda config: "its prototypes are means of the records of one class",
    init_server=init_server,
    plan=plan,
    own_model=own_tensors,
    personalise=own_trained,
    needs_encoder="exchanges prototypes that nothing but the encoder learns from",
)
