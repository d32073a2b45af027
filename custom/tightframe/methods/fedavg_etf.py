"""FedAvg_ETF: a classifier fixed as an equiangular tight frame, and global memory vectors.

Source: Huang, Xie, Yang, Wang, Lin and Cai, Neural Collapse Inspired Federated Learning with Non-iid Data
(2023).

The classifier V is a simplex equiangular tight frame that nobody trains, so that silos with other
classes cannot turn its class vectors against each other: ``logits = f V``. After a warm-up, each
training record is shifted by its class's global memory vector mu, the mean of that class's features
over the silos::

    logits = (f + alpha mu_y) V = f V + A[y],   A = alpha mu V    (C x C)

So a memory vector is a label-dependent offset of the logits, and silos receive A and which of its
rows exist, never mu. Inference has no offsets: ``logits = f V``.

With ``classifier: trained`` (table 4, "+ GMV") the backbone's own head trains on ``f + alpha mu_y``;
its vectors change while a silo trains, so that silos receive mu.

Where the paper is open, besides where ``tightframe explain`` says so: a class that nobody has keeps its
vector, and has no offset before any value; the loss of a batch is the mean (paper: a sum, which diverges at
the printed learning rate).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe import phases
from tightframe.learning import model_update
from tightframe.learning.class_sums import ClassSums, ratio_of_sums
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    scheduled_method,
    update_fields,
)
from tightframe.learning.stages import BatchView, Term, cross_entropy
from tightframe.models.geometry_heads import EtfHead
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

Divisor = Literal["over_holders", "over_selected", "count_weighted"]
Measure = Literal["eval_pass", "last_epoch"]
Average = Literal["uniform", "weighted"]
Collected = Literal["nothing", "flags", "means"]

TERMS = ("cross_entropy", "margin")
NUMERATOR, DENOMINATOR = "memory/numerator", "memory/denominator"
VECTORS = "memory/vectors"
OFFSETS, VALID = "memory/offsets", "memory/valid"
MEMORY, MEMORY_VALID = "memory", "memory_valid"
ETF = "head.etf"

FEATURE_BOUND = 2.0**14
COUNT_BOUND = 2.0**24
SUM_BOUND = 2.0**28


class FedAvgETFConfig(StrictModel):
    """FedAvg_ETF's options.

    Attributes:
        alpha: weight of the memory vectors; the paper uses 0.1 to 1. With 0 there is no memory, and
            nothing of it is sent.
        warm_up: R_warm, the first round (from 1) that uses the memory; class means are collected
            from the round before on. None stands for the second half of the run; the paper's best
            runs start after 50 to 90 of 100 rounds. Under the class rules class sums are open from the
            second round on, so that the memory acts from round 3 at the earliest.
        classifier: ``etf``, or the backbone's own head, ``trained`` (memory vectors alone, the paper's
            "+ GMV"); silos then receive them.
        beta_etf: length of the frame's class vectors.
        mu_divisor: ``over_holders`` is the mean over silos that have the class, ``over_selected`` the
            paper's algorithm read literally (all silos of the round, so that rare classes shrink),
            ``count_weighted`` the mean over records.
        measure: features of the class means: ``eval_pass`` with the trained model over all records, or
            ``last_epoch``, as they came by in the last epoch of training; of a table, at a site whose policy
            has ``records_per_feature``, the former (``UnitSides``).
        average: models are averaged with the same weight for each silo, as in the paper, or by the
            job's public weights.
    """

    alpha: float = Field(default=0.5, ge=0, le=100)
    warm_up: int | None = Field(default=None, ge=1)
    classifier: Literal["etf", "trained"] = "etf"
    beta_etf: float = Field(default=1.0, gt=0, le=1000)
    mu_divisor: Divisor = "over_holders"
    measure: Measure = "eval_pass"
    average: Average = "uniform"

    def first_round(self, rounds: int) -> int:
        """Return R_warm of a run of so many rounds."""
        return rounds // 2 + 1 if self.warm_up is None else self.warm_up


def update_memory(previous: torch.Tensor, summed_means: torch.Tensor, holders: torch.Tensor) -> torch.Tensor:
    """Return the memory vectors: the ratio of two sums, ``mu_c = sum_k m_kc / sum_k has_kc``.

    A class that no silo has keeps its previous vector.

    Args:
        previous: mu of the round before, (C, d).
        summed_means: class means summed over the silos that have the class, (C, d).
        holders: how many these are, (C,); below 1/2 counts as none.

    Returns:
        (C, d) in the type of ``previous``.

    >>> update_memory(torch.ones(2, 1), torch.tensor([[6.0], [0.0]]), torch.tensor([2, 0])).tolist()
    [[3.0], [1.0]]
    """
    return ratio_of_sums(previous, summed_means, holders)[0]


def memory_offsets(
    memory: torch.Tensor, valid: torch.Tensor, etf: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """Return the logit offsets that silos receive instead of the memory: ``A = alpha mu V``, rows by label.

    Args:
        memory: mu, (C, d).
        valid: (C,) bool or uint8.
        etf: V, (d, C).
        alpha: weight of the memory vectors.

    Returns:
        (C, C) in the type of ``etf``; rows that are not valid are zero.

    >>> memory_offsets(torch.eye(2), torch.tensor([True, False]), torch.ones(2, 2), alpha=0.5).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    vectors = torch.where(valid.to(torch.bool)[:, None], memory, 0).to(torch.float64)
    return (alpha * vectors @ etf.to(torch.float64)).to(etf.dtype)


def offset_margins(offsets: torch.Tensor) -> torch.Tensor:
    """Return each label's margin by the offsets alone: ``A[y, y] - max over j != y of A[y, j]``, (C,).

    Where this is large, the loss of records near their memory vector vanishes, and so do their
    gradients; so its mean over the records is reported.
    """
    own = torch.eye(len(offsets), dtype=torch.bool, device=offsets.device)
    return offsets.diagonal() - offsets.masked_fill(own, -torch.inf).amax(1)


def head(config: FedAvgETFConfig, width: int, classes: int) -> nn.Module | None:
    """Return the frozen frame: ``logits = f V``; None keeps the backbone's head."""
    if config.classifier == "trained":
        return None
    return EtfHead(width, classes, scale=config.beta_etf)


def parts(setting: Setting, round: int, rounds: int) -> tuple[LocalRule, ServerRule]:
    """Return training with offsets from R_warm on, and class means from the round before on; the means."""
    config: FedAvgETFConfig = setting.config
    uses, collect = _schedule(config, round, rounds)
    local = LocalRule(
        TERMS if uses else TERMS[:1],
        partial(objective, collect=collect),
        partial(_memory_fields, collect=collect),
        partial(finish, collect=collect),
    )
    server = ServerRule(
        partial(update_fields, weighted=config.average == "weighted"),
        partial(update, config=config),
        initial=initial,
        broadcast=_memory_broadcast(config) if uses else nothing,
    )
    return local, server


def initial(setting: Setting) -> dict[str, torch.Tensor]:
    """Return no memory yet."""
    width = model_update.shared_width(setting)
    return {
        MEMORY: torch.zeros(setting.num_classes, width),
        MEMORY_VALID: torch.zeros(setting.num_classes, dtype=torch.uint8),
    }


def nothing(state: ServerState) -> Tensors:
    """Return no offsets."""
    return {}


def vectors_of(state: ServerState) -> Tensors:
    """Return the memory, for a classifier that trains."""
    return {VECTORS: state.extra[MEMORY], VALID: state.extra[MEMORY_VALID]}


def _memory_broadcast(config: FedAvgETFConfig) -> Callable[[ServerState], Tensors]:
    return vectors_of if config.classifier == "trained" else partial(offsets_of, alpha=config.alpha)


def offsets_of(state: ServerState, *, alpha: float) -> Tensors:
    """Return the offsets, never the memory."""
    valid = state.extra[MEMORY_VALID]
    offsets = memory_offsets(state.extra[MEMORY], valid, state.model[ETF], alpha=alpha)
    return {OFFSETS: offsets, VALID: valid}


def _schedule(config: FedAvgETFConfig, round: int, rounds: int) -> tuple[bool, Collected]:
    """Return whether a round uses the memory, and what it collects for it.

    The memory of round R_warm must exist by then, so class means are collected from R_warm - 1 on.
    Under the class rules a class sum is open only once an earlier sum has told who holds the class;
    so the round before that has a per-class field without content, for the rules' own flags.
    """
    first = config.first_round(rounds)
    if config.alpha == 0 or round < first - 2:
        return False, "nothing"
    return round >= first, "flags" if round == first - 2 else "means"


def _memory_fields(setting: Setting, *, collect: Collected) -> tuple[phases.Field, ...]:
    config: FedAvgETFConfig = setting.config
    classes, width = setting.num_classes, model_update.shared_width(setting)
    by_records = config.mu_divisor == "count_weighted"
    shared = partial(phases.Field, static=True, per_class=True)
    shares = shared(
        DENOMINATOR,
        (classes,),
        bound=COUNT_BOUND if by_records else 1.0,
        sensitivity=1.0 if by_records else None,
    )
    bound = SUM_BOUND if by_records else FEATURE_BOUND
    sums = shared(NUMERATOR, (classes, width), bound=bound, means=not by_records)
    return {"nothing": (), "flags": (shares,), "means": (sums, shares)}[collect]


def _by_pass(silo: SiloView) -> bool:
    ruled = silo.records_per_feature > 0 and len(silo.setting.input_shape) == 1
    return ruled or silo.setting.config.measure == "eval_pass"


def objective(silo: SiloView, broadcast: Tensors, state: Tensors, *, collect: Collected) -> Objective:
    """Train what trains, with the offsets or vectors that were broadcast, if any; nothing is kept."""
    setting = silo.setting
    class_sums = ClassSums(setting.num_classes, model_update.shared_width(setting))
    terms: tuple[Term, ...] = (cross_entropy(),)
    if OFFSETS in broadcast:
        rows = broadcast[VALID].to(torch.bool)[:, None]
        terms = offset_terms(torch.where(rows, broadcast[OFFSETS], 0).to(silo.device))
    elif VECTORS in broadcast:
        rows = broadcast[VALID].to(torch.bool)[:, None]
        vectors = setting.config.alpha * torch.where(rows, broadcast[VECTORS], 0)
        terms = vector_terms(vectors.to(silo.device))
    if collect == "means" and silo.offers_prototypes and not _by_pass(silo):
        before = (setting.local.epochs - 1) * silo.drawn_records
        terms = (*terms, _watch(class_sums, after=before))
    return Objective(terms, gathered=class_sums)


def finish(trained: Trained, *, collect: Collected) -> Contribution:
    """Return the class means in rounds that collect them; the round before sends a field without content."""
    silo, class_sums = trained.silo, trained.objective.gathered
    config: FedAvgETFConfig = silo.setting.config
    if collect == "means" and silo.offers_prototypes and _by_pass(silo):
        class_sums.add_pass(silo.encoded(trained.model, "train"))
    numerator, denominator = memory_terms(class_sums, config)
    tensors = {DENOMINATOR: denominator, NUMERATOR: numerator}
    sent = {"nothing": (), "flags": (DENOMINATOR,), "means": (DENOMINATOR, NUMERATOR)}[collect]
    return Contribution({name: tensors[name] for name in sent})


def offset_terms(offsets: torch.Tensor) -> tuple[Term, Term]:
    """Return the cross-entropy with each record's offsets, and the mean margin, which is only reported.

    Args:
        offsets: A, (C, C); constant.
    """
    margins = offset_margins(offsets)

    def shifted(view: BatchView) -> torch.Tensor:
        return nn.functional.cross_entropy(view.logits + offsets[view.labels], view.labels)

    return (
        Term("cross_entropy", 1.0, shifted, per_record=True),
        Term("margin", 0.0, lambda view: margins[view.labels].mean(), per_record=True),
    )


def vector_terms(vectors: torch.Tensor) -> tuple[Term, Term]:
    """Return the cross-entropy of the head on shifted features, and the mean margin of the shifts alone.

    Args:
        vectors: alpha mu, (C, d); constant.
    """

    def shifted(view: BatchView) -> torch.Tensor:
        own: Any = view.model
        moved = view.features + vectors.to(view.features)[view.labels]
        return nn.functional.cross_entropy(own.head(moved), view.labels)

    def margin(view: BatchView) -> torch.Tensor:
        own: Any = view.model
        with torch.no_grad():
            zero = own.head(torch.zeros_like(vectors[:1]))
            return offset_margins(own.head(vectors) - zero)[view.labels].mean()

    return (
        Term("cross_entropy", 1.0, shifted, per_record=True),
        Term("margin", 0.0, margin, per_record=True),
    )


def memory_terms(class_sums: ClassSums, config: FedAvgETFConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a silo's terms of the memory's numerator (C, d) and denominator (C,).

    Classes without records are zero in both; of which classes a silo speaks, its site's own rule says.

    Raises:
        TrainingError: TF-301 if a feature is not finite.
    """
    terms = class_sums.totals if config.mu_divisor == "count_weighted" else class_sums.means
    return terms(least=1)


def _watch(class_sums: ClassSums, *, after: int) -> Term:
    """Return a term without weight that counts the features of all records after the first ``after``."""
    passed = 0

    def watch(view: BatchView) -> torch.Tensor:
        nonlocal passed
        if passed >= after:
            class_sums.add(view.features, view.labels)
        passed += len(view.labels)
        return view.features.new_zeros(())

    return Term("watch", 0.0, watch, per_record=False)


def update(state: ServerState, totals: Totals, cohort: Cohort, *, config: FedAvgETFConfig) -> ServerState:
    """Average the models, and update the memory where class means were collected and opened.

    Where they were not opened (a silo dropped out), the memory keeps its values.
    """
    averaged = cohort.uniform() if config.average == "uniform" else cohort
    state = state.evolve(model=model_update.apply_mean(state.model, totals, averaged))
    if NUMERATOR not in totals:
        return state
    shares = torch.as_tensor(totals[DENOMINATOR])
    held = shares >= 0.5
    if config.mu_divisor == "over_selected":
        shares = torch.where(held, float(cohort.size), 0.0).to(torch.float64)
    memory = update_memory(state.extra[MEMORY], torch.as_tensor(totals[NUMERATOR]), shares)
    valid = (state.extra[MEMORY_VALID].to(torch.bool) | held).to(torch.uint8)
    return state.evolve(extra={**state.extra, MEMORY: memory, MEMORY_VALID: valid})


METHOD = scheduled_method(
    name="fedavg_etf",
    title="FedAvg_ETF",
    paper="Huang et al., Neural Collapse Inspired Federated Learning with Non-iid Data (2023)",
    config=FedAvgETFConfig,
    findings=lambda config: (
        "its memory has a vector for each class"
        if config.classifier == "trained"
        else "its head is a simplex with a corner for each class"
    ),
    head=head,
    parts=parts,
)
