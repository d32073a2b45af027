"""FedILC: invariant gradient covariance and weighted geometric means of gradients.

Source: Zhu et al., FedILC: Weighted Geometric Mean and Invariant Gradient Covariance for Federated
Learning on Non-IID Data, arXiv 2205.09305.

Gradient sharing: a round is one step of Adam at the server, and silos do not train. With gA_k the mean
gradient over all records of silo k, gB_kj that over its mini-batch j, WGM the weighted geometric mean
(``tightframe.methods.fedilc.geometric_mean``) and L_F the penalty on the silos' gradient variances
(``tightframe.methods.fedilc.fishr``), the direction of the step is::

    fedsgd                  mean_k gA_k                   (FedSGD; ``learning.gradients.sharing``)
    geometric               WGM_k gA_k                    (Geometric)
    fishr_arith_fullbatch   mean_k gA_k + grad L_F        (the row that the paper calls FedCurv)
    inter_geo               WGM_k gA_k + grad L_F         (Fishr+Inter-Geo)
    intra_arith             mean_k mean_j gB_kj + grad L_F    (Fishr+Intra-Arith)
    intra_geo               mean_k WGM_j gB_kj + grad L_F     (Fishr+Intra-Geo)
    geo_substitute          the geometric mean with minority signs substituted, over gA_k

All silos count the same. What leaves a silo: in phase ``fishr`` its variances, C d + C numbers; in
phase ``gradient`` its gradient with its part of grad L_F already in it, or, where the geometric mean
is over silos, signs and logarithms as four sums and that part as a sum of its own.

The gradient of L_F is exact: ``sum_k 2 J_k^T (v_k - vbar)`` over the silos of phase ``gradient`` equals
the gradient through all silos' graphs. It needs vbar of the same model and records: both phases of a
round see the same mini-batches, augmentation and dropout, and vbar is dropped after use.

Limits. A full-batch gradient hardly changes from round to round at small learning rates, so sums of
two rounds over different cohorts nearly tell a silo's own; noise is what stops that.

Paper and published code disagree, besides where ``tightframe explain`` says so, on

- zeros: code negative, with 1e-10 added: two negatives and three zeros give -8.8e-7 instead of -0.29; here
  neutral, as zeros are common (dead ReLU, a drug never given at a silo)
- who differentiates L_F: paper the server, from uploaded variances; code one process with all silos' graphs;
  here two phases; ``stale``
- row "FedCurv": code Fishr with arithmetic means; here ``fishr_arith_fullbatch``; the real one is ``fedcurv``
- best model: paper lowest loss on the out-of-distribution test set; code keeps an alias of the last; here
  validation
- AUROC, AUPRC: code of thresholded predictions, averaged over batches; here of scores, over the whole set
- schedule of lambda: code exchanges the annealing's two weights in effect
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from pydantic import Field, model_validator
from torch import nn

from tightframe import phases
from tightframe.errors import RunError
from tightframe.learning import model_update
from tightframe.learning.gradients.fold import FoldGradients, by_name, fold_gradients
from tightframe.learning.gradients.sharing import (
    BOUND,
    GRADIENT,
    SCALE,
    check_one_step,
    descend,
    gradient_fields,
    gradient_phase,
    gradient_terms,
    mean_gradients,
)
from tightframe.learning.model_update import trained_parameters
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.server_optimizers import GradientDescent
from tightframe.learning.stages import FitReport, Stage, cross_entropy
from tightframe.methods.fedilc import geometric_mean
from tightframe.methods.fedilc.fishr import GradientMoments, SiloPenalty, fold_moments, last_layer
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, Phase, ServerState, Setting, SiloView, Tensors, Totals

MiniBatches = Literal["intra_arith", "intra_geo"]
WithFishr = Literal["fishr_arith_fullbatch", "inter_geo", MiniBatches]
Variant = Literal["fedsgd", "geometric", "geo_substitute", WithFishr]
MINI_BATCHES, WITH_FISHR = frozenset(get_args(MiniBatches)), frozenset(get_args(WithFishr))
SIGN_SPLIT = frozenset({"geometric", "inter_geo", "geo_substitute"})
PENALTY_OPTIONS = tuple(f"penalty_{end}" for end in ("weight", "scale", "anneal_rounds", "weight_before"))
USERS: dict[str, frozenset[str]] = {
    **dict.fromkeys((*PENALTY_OPTIONS, "stale"), WITH_FISHR),
    "threshold": frozenset({"geometric", "inter_geo", "intra_geo"}),
    "zero": SIGN_SPLIT | {"intra_geo"},
    "substitute": frozenset({"geo_substitute"}),
}
"""Options that only these variants look at."""


class FedILCConfig(StrictModel):
    """FedILC's options. The optimiser of a job's ``training`` section serves personal models only.

    The paper's settings: eICU learning rate 2e-4, weight decay 1e-3, penalty 0.1 (the defaults);
    Color-MNIST 3e-4, 0.01, 15; Rotated-CIFAR10 1e-4, 1e-3, 1.

    Attributes:
        variant: see ``fedilc``; mini-batches have the job's ``training.batch_size`` records (1 is the
            paper's reading of "each data example").
        zero: what zeros are to a geometric mean: ``neutral``, on neither side, but counted in m; or
            ``official``, negative, with logarithms of abs(a) + 1e-10.
        threshold: a geometric mean is zero where the mean sign is smaller.
        substitute: magnitude that ``geo_substitute`` puts for minority signs.
        penalty_weight: lambda of the penalty.
        penalty_scale: ``sum`` is the authors': over silos and coordinates; ``mean``, the original
            Fishr's, is smaller by the number of both.
        penalty_anneal_rounds: rounds in which the weight is ``penalty_weight_before`` still.
        penalty_weight_before: in those; the original Fishr starts without the penalty.
        stale: use the vbar of the round before, in one phase a round; not exact, and without
            the penalty in the first round.
        learning_rate, beta1, beta2, eps, weight_decay: of the server's Adam; the decay is coupled L2.
    """

    variant: Variant = "intra_geo"
    zero: geometric_mean.ZeroRule = "neutral"
    threshold: float = Field(default=0.0, ge=0, le=1)
    substitute: float = Field(default=geometric_mean.SUBSTITUTE, gt=0, le=1)
    penalty_weight: float = Field(default=0.1, ge=0)
    penalty_scale: Literal["sum", "mean"] = "sum"
    penalty_anneal_rounds: int = Field(default=0, ge=0)
    penalty_weight_before: float = Field(default=0.0, ge=0)
    stale: bool = False
    learning_rate: float = Field(default=2e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=1e-3, ge=0)

    @model_validator(mode="after")
    def _is_used(self) -> FedILCConfig:
        defaults = type(self).model_fields
        changed = [name for name in USERS if getattr(self, name) != defaults[name].default]
        if unused := [name for name in changed if self.variant not in USERS[name]]:
            raise ValueError(
                f"Expected options that the variant {self.variant!r} looks at, but got {unused}, which would "
                "change nothing"
            )
        return self

    @property
    def splits_by_sign(self) -> bool:
        """Sums are split by sign: a coordinate with one positive silo shows its magnitude."""
        return self.variant in SIGN_SPLIT

    @property
    def geometric(self) -> bool:
        """A geometric mean is taken somewhere, so that one record's influence has no bound.

        Record-level differential privacy must be refused then; a silo's own vector can still be
        rescaled and noised as a whole, unless it is split by sign.
        """
        return self.splits_by_sign or self.variant == "intra_geo"

    @property
    def server(self) -> GradientDescent:
        """The server's Adam."""
        betas = (self.beta1, self.beta2)
        return GradientDescent(
            "adam", self.learning_rate, betas=betas, eps=self.eps, weight_decay=self.weight_decay
        )

    @property
    def rule(self) -> geometric_mean.Rule:
        """The geometric mean, wherever it is taken."""
        kind: Any = "substitute" if self.variant == "geo_substitute" else "weighted"
        return geometric_mean.Rule(kind, self.zero, self.threshold, self.substitute)

    def weight_in(self, round: int) -> float:
        """Return the penalty's weight lambda in a round, from 1."""
        if self.variant not in WITH_FISHR:
            return 0.0
        return self.penalty_weight if round > self.penalty_anneal_rounds else self.penalty_weight_before

    def uses_variances(self, round: int) -> bool:
        """Return whether silos sum their gradient variances in a round, from 1."""
        return self.weight_in(round) > 0 or (self.stale and self.weight_in(round + 1) > 0)


PENALTY = "fishr/gradient/"
VARIANCE = "fishr/variance"  # (C, d + 1): the last layer's weight, and its bias in the last column
MEAN, SILOS = "fishr/mean", "fishr/silos"
TERMS = ("cross_entropy", "fishr")


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return the model that ``seed`` gives, before Adam's first step."""
    return ServerState(model_update.initial_model(setting, seed), setting.config.server.initial())


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """Return phase ``fishr`` where the penalty needs this round's vbar, and phase ``gradient``.

    Raises:
        ValueError: if the job's other values or its model do not fit this method.
    """
    _check(setting)
    config: FedILCConfig = setting.config
    if config.variant == "fedsgd":
        return (gradient_phase(setting, config.server, weighted=False),)
    template = model_update.shared_template(setting)
    fishr = config.uses_variances(round)
    variances: tuple[phases.Field, ...] = ()
    if fishr:
        classes, width = last_layer(template)[0].shape
        variances = (phases.Field(VARIANCE, (classes, width + 1), ring=64, bound=BOUND * SCALE),)
    models = model_update.model_fields(setting, template)
    fields = (
        *_gradient_fields(setting, template, fishr),
        *(field for field in models if field.name.startswith(model_update.BUFFER)),
        *model_update.training_fields(TERMS[: 1 + fishr]),
    )
    together = config.stale or not fishr
    gradient = Phase(
        "gradient",
        phases.Schema((*fields, *variances) if together else fields),
        broadcast_gradient,
        partial(contribute_gradient, round),
        partial(update_gradient, setting, round),
    )
    if together:
        return (gradient,)
    schema = phases.Schema(variances)
    return (Phase("fishr", schema, model_update.broadcast_of, contribute_variance, update_variance), gradient)


def _check(setting: Setting) -> None:
    """Refuse what would be ignored in silence."""
    problems = check_one_step(setting, digits="logarithms of gradients need their digits")
    if setting.update_norm is not None and setting.config.splits_by_sign:
        problems.append(f"no update_norm with {setting.config.variant}, because logarithms have no norm")
    if problems:
        raise ValueError("Expected " + "; ".join(problems) + ".")


def _gradient_fields(setting: Setting, template: nn.Module, fishr: bool) -> tuple[phases.Field, ...]:
    """Return fields of each gradient, or of its signs and logarithms and its part of grad L_F."""
    config: FedILCConfig = setting.config
    if not config.splits_by_sign:
        return gradient_fields(setting, template)
    plain: dict[str, Any] = {"ring": 64, "bound": BOUND * SCALE}
    shapes = {name: tuple(item.shape) for name, item in trained_parameters(template).items()}
    fields = []
    for term in config.rule.names:
        ring, bound = geometric_mean.RANGES[term]
        bound *= _scale(term)
        fields += [
            phases.Field(f"{GRADIENT}{term}/{name}", shape, ring, bound) for name, shape in shapes.items()
        ]
    if fishr:
        fields += [phases.Field(PENALTY + name, shape, **plain) for name, shape in shapes.items()]
    return tuple(fields)


# ---------------------------------------------------------------- at a silo


def broadcast_gradient(state: ServerState) -> Tensors:
    """Return the global model, and vbar with the number of silos behind it, where there is one."""
    mean = {name: state.extra[name] for name in (MEAN, SILOS) if name in state.extra}
    return {**model_update.broadcast_of(state), **mean}


def contribute_variance(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """Return v_k of the whole training fold; nothing is kept."""
    model = silo.load(model_update.received_model(broadcast))
    return Contribution(_variance_terms(*fold_moments(silo, model)))


def contribute_gradient(round: int, silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """Return the silo's gradient and its part of grad L_F; nothing is kept.

    Raises:
        RunError: TF-505 if this round's vbar is needed and the server has sent none.
        TrainingError, ContributionError: see ``learning.gradients.fold``.
    """
    config: FedILCConfig = silo.setting.config
    received = model_update.received_model(broadcast)
    fishr, penalty, tensors = config.uses_variances(round), None, {}
    if fishr:
        moments, few = fold_moments(silo, silo.load(received))
        if config.stale:
            tensors = _variance_terms(moments, few)
        if MEAN in broadcast:
            mean = broadcast[MEAN].to(silo.device)
            penalty = SiloPenalty.of(moments, mean[:, :-1], mean[:, -1])
        elif not config.stale:  # a stale one is missing in round 1
            raise RunError("Expected the mean variance of phase `fishr`, but got none.", code="TF-505")
    model = silo.load(received)
    fold = fold_gradients(
        silo,
        model,
        mini_batches=config.variant in MINI_BATCHES,
        running=geometric_mean.RunningMean(config.rule) if config.variant == "intra_geo" else None,
        penalty=None if penalty is None else partial(_share, penalty),
    )
    factor = 0.0 if penalty is None else _penalty_factor(config, round, model, int(broadcast[SILOS]))
    tensors |= _gradient_terms(config, model, fold, fishr=fishr, factor=factor)
    updates = model_update.model_terms(received, model).items()
    tensors |= {name: item for name, item in updates if name.startswith(model_update.BUFFER)}
    entropy, value = fold.cross_entropy, 0.0 if penalty is None else float(penalty.value)
    # The mean of the losses over silos is what the server's step is to lower.
    terms = {"loss": entropy + factor * value, "cross_entropy": entropy, "fishr": value}
    report = FitReport(fold.batches, fold.records, terms)
    return Contribution(tensors | model_update.training_terms(report, TERMS[: 1 + fishr]))


def _gradient_terms(
    config: FedILCConfig,
    model: nn.Module,
    fold: FoldGradients,
    *,
    fishr: bool,
    factor: float,
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``_gradient_fields``."""
    if not config.splits_by_sign:
        return gradient_terms(model, fold.gradient + factor * fold.penalty)
    split = partial(by_name, {n: p.shape for n, p in trained_parameters(model).items()})
    tensors = split(PENALTY, SCALE * fold.penalty) if fishr else {}
    for term, vector in config.rule.terms(fold.gradient).items():
        tensors |= split(f"{GRADIENT}{term}/", _scale(term) * vector)
    return tensors


def _share(
    penalty: SiloPenalty, features: torch.Tensor, labels: torch.Tensor, model: nn.Module
) -> torch.Tensor:
    return penalty.share(features, labels, *last_layer(model))


def _scale(term: str) -> float:
    """Return the factor of a term: sums of gradients are scaled, counts and logarithms are not."""
    return SCALE if term == geometric_mean.NEGATIVE_SUM else 1.0


def _penalty_factor(config: FedILCConfig, round: int, model: nn.Module, silos: int) -> float:
    """Return the weight of the *mean* over silos of ``grad |v_k - vbar|^2`` in the step's direction.

    lambda times the number of silos that vbar is the mean of, so that the mean stands for the sum over
    them also where some did not stay for phase ``gradient``.
    """
    weight = config.weight_in(round)
    if config.penalty_scale == "sum":
        return weight * silos
    return weight / sum(part.numel() for part in last_layer(model) if part is not None)


def _variance_terms(moments: GradientMoments, few: torch.Tensor) -> dict[str, torch.Tensor]:
    weight, bias = moments.variance()
    return {VARIANCE: SCALE * torch.cat([weight, bias[:, None]], 1).cpu().masked_fill(few, 0)}


# ---------------------------------------------------------------- at the server


def update_variance(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Keep vbar, the mean over this phase's silos, and how many they are."""
    mean = torch.as_tensor(totals[VARIANCE]) / (SCALE * cohort.size)
    return state.evolve(extra={**state.extra, MEAN: mean, SILOS: torch.tensor(cohort.size)})


def update_gradient(
    setting: Setting, round: int, state: ServerState, totals: Totals, cohort: Cohort
) -> ServerState:
    """Make one step of Adam, average buffers, and drop a vbar that is not to be used again."""
    config: FedILCConfig = setting.config
    template = model_update.shared_template(setting)
    directions = _directions(config, totals, trained_parameters(template), cohort.size)
    if config.splits_by_sign and config.uses_variances(round) and SILOS in state.extra:
        factor = _penalty_factor(config, round, template, int(state.extra[SILOS]))
        for name in directions:
            bend = torch.as_tensor(totals[PENALTY + name]) / (SCALE * cohort.size)
            directions[name] = directions[name] + factor * bend
    state = descend(config.server, state, directions, totals, cohort)
    state = state.evolve(
        extra={name: item for name, item in state.extra.items() if name not in (MEAN, SILOS)}
    )
    return update_variance(state, totals, cohort) if VARIANCE in totals else state


def _directions(
    config: FedILCConfig, totals: Totals, names: Iterable[str], silos: int
) -> dict[str, torch.Tensor]:
    """Return the direction of the step by parameter, without a penalty that is a sum of its own."""
    if not config.splits_by_sign:
        return mean_gradients(totals, silos)
    directions = {}
    for name in names:
        sums = {term: totals[f"{GRADIENT}{term}/{name}"] / _scale(term) for term in config.rule.names}
        terms = {term: torch.as_tensor(item) for term, item in sums.items()}
        directions[name] = config.rule.mean(terms, silos)
    return directions


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Train the final model for one epoch of the cross-entropy at the silo, by the job's own optimiser."""
    personal = silo.load(model)
    silo.fit(personal, [Stage((cross_entropy(),), OptimizerSettings.of(silo.setting.local), epochs=1)])
    return personal


METHOD = phases.Method(
    name="fedilc",
    title="FedILC",
    paper=(
        "Zhu et al., FedILC: Weighted Geometric Mean and Invariant Gradient Covariance for Federated "
        "Learning on Non-IID Data, arXiv 2205.09305"
    ),
    counts_rounds=False,
    config=FedILCConfig,
    findings=lambda config: "its penalty is of the softmax",
    init_server=init_server,
    plan=plan,
    personalise=personalise,
    rounded=True,
)
