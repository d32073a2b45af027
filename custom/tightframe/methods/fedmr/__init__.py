"""FedMR: manifold reshaping against partially class-disjoint data.

Source: Fan, Yao, Zhang, Lyu, Zhang and Wang, Federated Learning under Partially Class-Disjoint Data via
Manifold Reshaping, Transactions on Machine Learning Research 2023.

A silo that sees few classes lets each class collapse onto few directions and lets it spread into
the space of the classes it never sees. FedMR adds two terms to the cross-entropy: the intra-class
term decorrelates the features of each class (eq. (3)), the inter-class term keeps them nearer to
their own global prototype than to the others (eq. (4))::

    L = L_ce + mu_intra * L_intra + mu_inter * L_inter

The file follows the paper's text only. What leaves a silo beside its update: per class the sum of
its features and their number, from which the server gets the exact global class means.

With differential privacy both terms are replaced by means of one loss a record, because as printed they
couple the records of a batch: the inter-class term weighs records alike and looks at all valid
prototypes, the intra-class term takes the class's statistics from the last noisy release, where they are
constants. Features are clipped, and in release rounds their class sums are noisy.

Paper and published code disagree, besides where ``tightframe explain`` says so, on

- variance in eq. (3): paper 1/N; code, and here, unbiased
- mu_intra's scale: fixed in paper and code, though the term grows as d^2: 1e-5 is 0.04 of our units at
  d = 64, 2.6 at ResNet18's 512, 4.1 at WRN-28-10's 640, where training is not finite
- mu_intra and mu_inter: paper two weights (in an appendix not seen); code one: 0.01 in the arguments, 1e-5 in
  the README; here two; as printed, code's 0.01 is 1.1e-6 (d = 512, two classes of 32 records in the batch)
- one record of a class: paper 0/0; code skips it, and crashes where none is left; here skipped
- inter-class term, prototypes: absent in the code; here as in the paper
- a silo's weight: paper, and here, records; code number of whole batches
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, Self, get_args

import torch
from pydantic import Field, model_validator

from tightframe import phases
from tightframe.learning import model_update
from tightframe.learning.class_sums import class_sum_fields, ratio_of_sums, silo_class_sums
from tightframe.learning.halves import LocalRule, Objective, ServerRule, Trained, scheduled_method
from tightframe.learning.stages import BatchView, Term, at_least_float32, cross_entropy
from tightframe.methods.fedmr.gradients import IntraClass, Margins
from tightframe.methods.fedmr.private import frozen_terms, moment_scale, summed
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

IntraForm = Literal["correlation", "paper", "official"]
InterSupport = Literal["observed", "all"]
InterUnits = Literal["relative", "distance"]

TERMS = ("cross_entropy", "intra", "inter")
SUMS = "prototype/feature_sums"
COUNTS = "prototype/counts"
PROTOTYPES = "prototypes"
MOMENTS = "class_moments"
VALID = "prototype_valid"


class InterOptions(StrictModel):
    """The options of the inter-class term.

    Attributes:
        mu_inter: weight of the inter-class term.
        inter_units: ``relative`` divides eq. (4) by the prototypes' mean distance from each other, so that
            one weight means the same whatever the features' scale; ``distance`` is eq. (4) as printed, in
            units of feature distance, and has no default weight (see ``inter_weight``).
        inter_support: ``observed`` is eq. (4) as printed, other prototypes come from the batch's
            classes only; ``all`` uses every valid prototype, so that missing classes act too.
        lite_m: records of each batch that the inter-class term looks at ("Lite"); None means all.
    """

    mu_inter: float = Field(default=0.3, ge=0)
    inter_units: InterUnits = "relative"
    inter_support: InterSupport = "observed"
    lite_m: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _weight_of_the_units(self) -> Self:
        if self.inter_units == "distance" and "mu_inter" not in self.model_fields_set:
            raise ValueError(
                "Expected `mu_inter` beside inter_units 'distance': its default is for 'relative'. In units "
                "of distance 0.01 trained all networks tried; 1 made one without normalisation diverge."
            )
        return self


class FedMRConfig(InterOptions):
    """FedMR's options: those of both terms.

    Attributes:
        mu_intra: weight of the intra-class term. In the form ``correlation`` the term is a mean squared
            correlation, in [0, 1] at every feature width. In the form ``paper`` it is ``|R_c|_F^2``, about
            ``d + d (d - 1) m`` with m that mean, so its weight must shrink with d^2; in the form
            ``official`` it is of the order of the number of records of a class in a batch. These two have
            no default weight.
        intra_form: ``correlation`` is eq. (3) over its off-diagonal entries, as their mean (the diagonal
            is constant, so the gradient is that of eq. (3) divided by d (d - 1)); ``paper`` is eq. (3) as
            printed, with the unbiased variance; ``official`` the scaling of the authors' experiments,
            (1 / sum_c N_c) sum_c (N_c - 1)^2 times the mean of R_ij^2 over i != j.
        intra_eps: added to the variance inside the root, in squared units of the features. It bounds the
            gradient through a feature that hardly varies, as a ReLU's that is nearly dead: the root's
            slope is at most ``intra_eps ** -0.5``, 32 by default; with 1e-8, 10,000 of it make the training
            of deep networks not finite.
    """

    mu_intra: float = Field(default=0.4, ge=0)
    intra_form: IntraForm = "correlation"
    intra_eps: float = Field(default=1e-3, gt=0)

    @model_validator(mode="after")
    def _weight_of_the_form(self) -> FedMRConfig:
        if self.intra_form != "correlation" and "mu_intra" not in self.model_fields_set:
            raise ValueError(
                f"Expected `mu_intra` beside intra_form {self.intra_form!r}, whose term is no mean squared "
                "correlation: its default is for 'correlation'. For 'paper' divide it by the squared "
                "feature width: 0.4 is 1e-4 at d = 64."
            )
        return self


def intra_class_loss(
    features: torch.Tensor, labels: torch.Tensor, *, form: IntraForm = "paper", eps: float = 1e-8
) -> torch.Tensor:
    """Return the intra-class term: squared correlations between features within each class, eq. (3).

    For each class c with N_c >= 2 records in the batch, with its records standardised by the
    class's own mean and unbiased variance, ``z^ = (z - mean_c) / sqrt(var_c + eps)``::

        R_c = z^T z^ / (N_c - 1)                                        (d, d), unit diagonal
        correlation: (1 / #classes) sum_c mean_{i != j} R_c[i, j]^2
        paper:    (1 / #classes) sum_c |R_c|_F^2
        official: (1 / sum_c N_c) sum_c (N_c - 1)^2 mean_{i != j} R_c[i, j]^2

    The unbiased variance makes the trace of R_c exactly d (lemma 1); the paper's printed 1/N
    differs from it by the factor (N_c / (N_c - 1))^2 in the loss of a class. A constant feature
    gives a zero row. All sums run over classes with at least two records; with none of them the
    result is zero, and its gradient too.

    Args:
        features: (B, d).
        labels: (B,) integer.
        eps: added to the variance.

    Returns:
        A scalar in float32 (or the features' own wider type), attached to ``features``.

    Raises:
        ValueError: if ``form`` is none of these.

    >>> records = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> round(float(intra_class_loss(records, torch.tensor([0, 0, 0]))), 4)
    4.0
    """
    if form not in get_args(IntraForm):
        raise ValueError(f"Expected `form` to be one of {get_args(IntraForm)}, but got {form!r}.")
    return IntraClass.apply(at_least_float32(features), labels, form, eps)


def inter_class_loss(
    features: torch.Tensor,
    labels: torch.Tensor,
    prototypes: torch.Tensor,
    valid: torch.Tensor,
    *,
    support: InterSupport = "observed",
) -> torch.Tensor:
    """Return the inter-class term: a margin towards the record's own global prototype, eq. (4).

    With C_b the classes of the batch that have a valid prototype, and S the supporting classes
    (``observed``: C_b, as printed; ``all``: every class with a valid prototype)::

        D_ij = mean over records z of class i of max(|z - G_i| - |z - G_j|, 0)
        L = (1 / #pairs) sum over pairs (i in C_b, j in S, j != i) of D_ij

    It is zero while there are no pairs (in round 1 no prototype exists). Distances are computed
    from differences, not from inner products, and their gradient at ``z = G`` is taken as zero.

    Args:
        features: (B, d).
        labels: (B,) int64 in [0, C).
        prototypes: (C, d); rows that are not valid are never used.
        valid: (C,) bool or uint8.

    Returns:
        A scalar in float32 (or the features' own wider type), attached to ``features``.

    Raises:
        ValueError: if ``support`` is neither.

    >>> anchors = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    >>> float(inter_class_loss(torch.tensor([[2.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 1]), anchors,
    ...                        torch.tensor([True, True])))
    0.5
    """
    if support not in ("observed", "all"):
        raise ValueError(f"Expected `support` to be 'observed' or 'all', but got {support!r}.")
    features = at_least_float32(features)
    valid = valid.to(torch.bool)
    anchors = torch.where(valid[:, None], prototypes, 0).to(features.dtype)
    distance = torch.cdist(features, anchors, compute_mode="donot_use_mm_for_euclid_dist")  # (B, C)
    return Margins.apply(distance, labels, valid, support == "observed")


def inter_weight(options: InterOptions, prototypes: torch.Tensor, valid: torch.Tensor) -> float:
    """Return the weight of eq. (4) in this round.

    As printed the term has slopes of the same size however large the features are, and grows with them:
    where nothing normalises features, each step can widen all distances by the same factor, and they grow
    without end. Divided by the prototypes' mean distance s (constant in a round) its slope in a feature is at
    most ``2 mu_inter / s``: the larger the features, the weaker the pull.

    Args:
        options: with ``mu_inter`` and its units.
        prototypes: (C, d).
        valid: which classes have one, (C,).
    """
    known = prototypes[valid.to(torch.bool)].double()
    if options.inter_units == "distance" or len(known) < 2:
        return options.mu_inter
    spread = float(torch.pdist(known).mean())
    # Without any spread no margin has a slope.
    return options.mu_inter / spread if spread > 0 else 0.0


def update_prototypes(
    previous: torch.Tensor, feature_sums: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global prototypes: exact class means over all records of the silos that submitted.

    ``G_c = sum_k n_kc g_kc / sum_k n_kc`` with g_kc the silo's class mean: the ratio of two sums. A
    class that nobody has keeps its previous prototype.

    Args:
        previous: prototypes of the round before, (C, d).
        feature_sums: summed features of each class, (C, d).
        counts: summed numbers of records, (C,); below 1/2 counts as absent.

    Returns:
        Prototypes (C, d) in the type of ``previous``, and which classes are in this sum, (C,) bool.
    """
    return ratio_of_sums(previous, feature_sums, counts)


def uses_moments(setting: Setting) -> bool:
    """Return whether silos receive the classes' second moments: with privacy, for the intra-class term."""
    return setting.privacy is not None and setting.config.mu_intra > 0


def _summed_width(setting: Setting, width: int) -> int:
    """Return how many numbers are summed for each class, beside their count."""
    return width + width * (width + 1) // 2 if uses_moments(setting) else width


def parts(setting: Setting, round: int, rounds: int) -> tuple[LocalRule, ServerRule]:
    """Return training with both terms and class sums; the mean, and prototypes of the opened class sums."""
    server = ServerRule(model_update.model_fields, _updater(setting), initial=initial, broadcast=received)
    if setting.privacy is None:
        return LocalRule(TERMS, objective, partial(sum_fields, static=True), finish), server
    # Noise, not the cohort, is what protects class sums with privacy, so that none of them is static.
    if round in setting.privacy.releases:
        return LocalRule(TERMS, objective, partial(sum_fields, static=False), finish_noisily), server
    return LocalRule(TERMS, objective), server


def initial(setting: Setting) -> dict[str, torch.Tensor]:
    """Return no prototypes yet."""
    width = model_update.shared_width(setting)
    extra = {
        PROTOTYPES: torch.zeros(setting.num_classes, width),
        VALID: torch.zeros(setting.num_classes, dtype=torch.uint8),
    }
    if uses_moments(setting):
        extra[MOMENTS] = torch.zeros(setting.num_classes, _summed_width(setting, width))
    return extra


def received(state: ServerState) -> dict[str, torch.Tensor]:
    """Return the prototypes, which of them exist, and with privacy the classes' moments."""
    return {name: state.extra[name] for name in (PROTOTYPES, VALID, MOMENTS) if name in state.extra}


def sum_fields(setting: Setting, *, static: bool) -> tuple[phases.Field, ...]:
    """Return class feature sums and class counts."""
    width = _summed_width(setting, model_update.shared_width(setting))
    return class_sum_fields(SUMS, COUNTS, setting.num_classes, width, static=static)


def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Return the cross-entropy and both terms; nothing is kept."""
    make_terms = _reshaping_terms if silo.setting.privacy is None else _frozen_terms
    return Objective((cross_entropy(), *make_terms(silo, broadcast)))


def finish(trained: Trained) -> Contribution:
    """Pass once over the training fold for the class sums.

    Paper, table 5: a silo may submit no prototypes; it then adds zeros to both sums.
    """
    width = trained.broadcast[PROTOTYPES].shape[1]
    sums, counts = silo_class_sums(trained.silo, trained.model, width)
    return Contribution({SUMS: sums, COUNTS: counts})


def finish_noisily(trained: Trained) -> Contribution:
    """Do the same with privacy: sums of clipped features, and of their products if the terms need them."""
    setting, model = trained.silo.setting, trained.model
    assert setting.privacy is not None  # noqa: S101  (asked for with privacy only)
    bound, second = setting.privacy.feature_clip, uses_moments(setting)
    sums, counts = trained.silo.private_class_sums(
        lambda inputs: summed(model.features(inputs), bound, second=second),  # type: ignore[operator]
        _summed_width(setting, trained.broadcast[PROTOTYPES].shape[1]),
    )
    return Contribution({SUMS: sums, COUNTS: counts})


def _reshaping_terms(silo: SiloView, broadcast: Tensors) -> tuple[Term, Term]:
    config: FedMRConfig = silo.setting.config

    def intra(view: BatchView) -> torch.Tensor:
        return intra_class_loss(view.features, view.labels, form=config.intra_form, eps=config.intra_eps)

    # Both couple the records of a batch (class statistics; class counts), so neither is per-record.
    return Term("intra", config.mu_intra, intra, per_record=False), inter_term(silo, broadcast, config)


def inter_term(silo: SiloView, broadcast: Tensors, options: InterOptions) -> Term:
    """Return the inter-class term towards the prototypes received."""
    prototypes, valid = broadcast[PROTOTYPES].to(silo.device), broadcast[VALID].to(silo.device)
    stream = silo.generator("lite")

    def inter(view: BatchView) -> torch.Tensor:
        features, labels = view.features, view.labels
        if options.lite_m is not None and options.lite_m < len(labels):
            chosen = torch.randperm(len(labels), generator=stream, device=stream.device)[: options.lite_m]
            chosen = chosen.to(labels.device, non_blocking=True)
            features, labels = features[chosen], labels[chosen]
        return inter_class_loss(features, labels, prototypes, valid, support=options.inter_support)

    return Term("inter", inter_weight(options, prototypes, valid), inter, per_record=False)


def _frozen_terms(silo: SiloView, broadcast: Tensors) -> tuple[Term, Term]:
    """Return both terms of one record each: what they compare it with is constant."""
    setting, config = silo.setting, silo.setting.config
    assert setting.privacy is not None  # noqa: S101  (asked for with privacy only)
    prototypes, valid = broadcast[PROTOTYPES].to(silo.device), broadcast[VALID].to(silo.device).bool()
    return frozen_terms(
        prototypes,
        valid,
        broadcast[MOMENTS].to(silo.device) if uses_moments(setting) else None,
        bound=setting.privacy.feature_clip,
        intra=config.mu_intra,
        inter=inter_weight(config, prototypes, valid),
        mean=config.intra_form == "correlation",
    )


def _updater(setting: Setting) -> Callable[[ServerState, Totals, Cohort], ServerState]:
    if not uses_moments(setting):
        return update
    assert setting.privacy is not None  # noqa: S101  (asked for with privacy only)
    scale = moment_scale(setting.privacy.feature_clip)

    def with_moments(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        if SUMS not in totals:
            return update(state, totals, cohort)
        width = state.extra[PROTOTYPES].shape[1]
        sums, counts = torch.as_tensor(totals[SUMS]) * scale, torch.as_tensor(totals[COUNTS])
        kept, _ = update_prototypes(state.extra[MOMENTS], sums, counts)
        changed = update(state, {**totals, SUMS: sums[:, :width].numpy()}, cohort)
        return changed.evolve(extra={**changed.extra, MOMENTS: kept})

    return with_moments


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Average the models as FedAvg; make prototypes of the two class sums, once valid always valid.

    Where the class sums were not opened (a silo dropped out), all prototypes keep their values.
    """
    model = model_update.apply_mean(state.model, totals, cohort)
    return state.evolve(model=model, extra=with_new_prototypes(state.extra, totals))


def with_new_prototypes(extra: Tensors, totals: Totals) -> Tensors:
    """Update the server's prototypes from this round's class sums, where they were opened."""
    if SUMS not in totals:
        return extra
    sums, counts = torch.as_tensor(totals[SUMS]), torch.as_tensor(totals[COUNTS])
    prototypes, summed = update_prototypes(extra[PROTOTYPES], sums, counts)
    valid = extra[VALID].to(torch.bool) | summed
    return {**extra, PROTOTYPES: prototypes, VALID: valid.to(torch.uint8)}


def private(config: FedMRConfig) -> str | None:
    """Return why these options have no loss of single records; None if they have."""
    if config.lite_m is not None:
        return "lite_m chooses among the records of a batch; leave it out"
    if config.intra_form == "official" and config.mu_intra > 0:
        return "intra_form 'official' weighs classes by their counts in a batch; take 'correlation'"
    return None


METHOD = scheduled_method(
    name="fedmr",
    title="FedMR",
    paper="Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping (TMLR)",
    counts_rounds=False,
    config=FedMRConfig,
    findings=lambda config: "its prototypes are means of the records of one class",
    parts=parts,
    private=private,
)
