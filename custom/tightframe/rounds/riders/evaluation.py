"""Evaluation as sums: every silo evaluates the model that it has just received on its own records.

A confusion matrix and per-class score histograms are sums over records, so they travel as extra
fields of the same contribution and need no exchange of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe import metrics
from tightframe.config.job import JobConfig
from tightframe.data.base import in_steps
from tightframe.learning import outputs
from tightframe.learning.model_update import received_model
from tightframe.metrics import clinical
from tightframe.phases import (
    UNKNOWN,
    Cohort,
    Contribution,
    Field,
    Fold,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
    taken_out,
)
from tightframe.results.parts.evaluation import (
    ClassReading,
    Evaluation,
    Finding,
    FoldMetrics,
    OneAnswer,
    Rule,
)
from tightframe.rounds.declaration import EVALUATED, OWN
from tightframe.rounds.riders import failures
from tightframe.rounds.riders.class_rules import MIN_HOLDERS
from tightframe.rounds.riders.view import RiderView, rider_view

FOLDS = EVALUATED
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
_COUNT_BOUND = 2.0**28
NOTE = "evaluation"
"""Name of the note that holds the totals ``evaluation/...``."""
Term = Callable[[RiderView, Tensors], Tensors]
"""Computes a silo's term from its exact counts."""
READ_AT = 0.9
"""Specificity (or sensitivity) at which result files give the other one; pages can show any."""
TOLD = "told/"
"""Prefix of tensors that leave the silo instead: a coarse loss, and findings whose unknown values come in
steps."""
MOST_LOSS = 16.0
"""Largest loss of a record in a sum that leaves a silo (``loss_step``)."""


def loss_step(score_bins: int) -> float:
    """Return the step of summed losses that leave a silo, the same for all silos; at least 1.

    A server that chooses the model reads no real number of one record from the total, and fewer steps of its
    loss than the score histograms have bins. Steps of a mean would be multiples of a silo's own number of
    records, which differences of totals would disclose.

    >>> [loss_step(score_bins) for score_bins in (8, 32, 64)]
    [4.0, 1.0, 1.0]
    """
    return max(1.0, 2 * MOST_LOSS / score_bins)


def exact(silo: RiderView, counted: Tensors) -> Tensors:
    """Return a silo's exact counts as its term."""
    return counted


def attach(phase: Phase, added: Schema, term: Term = exact) -> Phase:
    """Return a phase in which silos first evaluate the model received.

    Args:
        phase: that the evaluation travels with; its broadcast contains the model.
        added: the evaluation's fields.
        term: computes them from a silo's exact counts.
    """

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = rider_view(silo)
        _, counted = evaluate_received(view, received, state)
        own = term(view, told(counted, view.left_out))
        contribution = phase.contribute(silo, received, state)
        return replace(contribution, tensors={**contribution.tensors, **own})

    return replace(with_note(phase), schema=phase.schema + added, contribute=contribute)


def with_note(phase: Phase) -> Phase:
    """Return a phase whose evaluation totals the server notes and withholds from the method."""

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = split_totals(totals)
        if failures.lacking(totals):  # one silo could not evaluate: its part is random
            own = {}
        reading = phase.read(state, others, cohort)
        return reading.noting(NOTE, own) if own else reading

    return replace(phase, read=read)


def evaluate_received(
    silo: RiderView, received: Tensors, state: Tensors
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return the received model, or the silo's own where the method has no global one, and its counts."""
    own = silo.setup.method.own_model
    final = received_model(received) if own is None else own(silo, state)
    return final, count_at(silo, silo.load(final))


def count_at(silo: RiderView, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Evaluate a model on the silo's own records; see ``count``."""
    settings = silo.setup.job.evaluation
    with silo.memory_named("evaluation.batch_size", settings.batch_size):
        return count(
            model,
            silo.setup.method.predict,
            {fold: silo.batches(fold, augment=False, shuffle=False) for fold in FOLDS},
            num_classes=silo.setup.dataset.num_classes,
            score_bins=settings.score_bins,
            findings=silo.setup.dataset.multi_label,
            told_labels=_told_labels(silo) if silo.setup.dataset.multi_label else {},
            coarse_loss=True,
        )


def _told_labels(silo: RiderView) -> dict[Fold, NDArray[np.int64]]:
    """Return the findings that enter exact counts of each fold; empty if all do, or noise protects them."""
    left_out = [part.partition("/") for part in silo.left_out if "/" in part]
    step = 1 if silo.setup.privacy is not None else silo.context.policy.min_test_count
    if step == 1 and not left_out:
        return {}
    labels = {fold: in_steps(silo.context.data.labels(fold), step) for fold in FOLDS}
    for fold, _, place in left_out:
        labels[cast("Fold", fold)][:, int(place)] = UNKNOWN
    return labels


def schema(num_classes: int, score_bins: int, *, findings: bool = False) -> Schema:
    """Return the evaluation's fields: confusion (C, C), scores (C, 2, bins) and loss () of each fold.

    With findings the confusion is (K, 2, 2), and ``records`` () counts the records, because each record is in
    as many cells as it has known findings.
    """
    confusion = (num_classes, 2, 2) if findings else (num_classes, num_classes)
    fields: list[Field] = []
    for fold in FOLDS:
        common: dict[str, Any] = {"bound": _COUNT_BOUND, "static": True}
        fields += [
            Field(f"evaluation/{fold}/confusion", confusion, per_class=True, **common),
            Field(f"evaluation/{fold}/scores", (num_classes, 2, score_bins), per_class=True, **common),
            Field(f"evaluation/{fold}/loss", (), **common),
        ]
        if findings:
            fields.append(Field(f"evaluation/{fold}/records", (), **common))
    return Schema(tuple(fields))


def told(tensors: Tensors, left_out: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that leave the silo: without left-out folds, unknown findings and losses in steps.

    Findings that are left out are unknown in ``told_labels``, so that ``count`` has none of them.

    Args:
        tensors: as of ``count``.
        left_out: folds, and findings of a fold by their place (``test/2``); with ``OWN``, where models are
            silos' own, all of it.
    """
    folds = FOLDS if OWN in left_out else [part for part in left_out if "/" not in part]
    blank = tuple(f"evaluation/{fold}/" for fold in folds)
    leaving = {name: tensors.get(TOLD + name, value) for name, value in tensors.items()}
    return {
        name: torch.zeros_like(value) if name.startswith(blank) else value
        for name, value in leaving.items()
        if not name.startswith(TOLD)
    }


def told_by_few(job: JobConfig, tellers: Mapping[str, int] | None) -> tuple[str, ...]:
    """Return the parts that fewer than three silos evaluate, which all silos leave out of a secure sum.

    The exact total of one or two silos would reveal the counts of one of them. With the class rules off
    nothing is left out.

    Args:
        tellers: number of silos that evaluate each part; None in a plain sum.
    """
    if job.privacy is not None or job.class_rules == "off" or tellers is None:
        return ()
    return tuple(part for part, silos in tellers.items() if silos < MIN_HOLDERS)


@torch.no_grad()
def count(
    model: torch.nn.Module,
    predict: Predict,
    batches: Mapping[Fold, Batches],
    *,
    num_classes: int,
    score_bins: int,
    findings: bool = False,
    told_labels: Mapping[Fold, NDArray[np.int64]] = MappingProxyType({}),
    coarse_loss: bool = False,
) -> dict[str, torch.Tensor]:
    """Evaluate a model on a silo's own records.

    Args:
        model: evaluated as it is, in evaluation mode.
        predict: logits (B, C) of a batch.
        batches: mini-batches of each fold.
        score_bins: bins of [0, 1] for the score of each class.
        findings: whether the classes are findings, of which a record may have several or none.
        told_labels: findings of each fold (n, K) that leave the silo, if not all do.
        coarse_loss: whether the loss leaves in steps (``loss_step``).

    Returns:
        The tensors of ``schema``, float64, and those that leave in their place, prefixed ``TOLD``. The loss
        is the summed cross-entropy, at most 1e4 per record so that a diverged model stays within the field's
        bound.
    """
    model.eval()
    totals: dict[str, torch.Tensor] = {}
    for fold in FOLDS:
        confusion = np.zeros((num_classes, 2, 2) if findings else (num_classes, num_classes), np.int64)
        scores = np.zeros((num_classes, 2, score_bins), np.int64)
        leaving = {"confusion": np.zeros_like(confusion), "scores": np.zeros_like(scores)}
        loss, coarse, records = 0.0, 0.0, 0
        for inputs, labels in batches[fold]:
            logits = predict(model, inputs).float()
            losses = outputs.losses(logits, labels)
            loss += _summed(losses, 1e4)
            countable = told_labels[fold][records : records + len(labels)] if fold in told_labels else None
            if coarse_loss:
                if countable is not None:
                    losses = outputs.losses(logits, torch.from_numpy(countable).to(labels.device))
                coarse += _summed(losses, MOST_LOSS)
            # A diverged model predicts NaN, which counts as class 0 at score 0.
            likely = torch.nan_to_num(outputs.probabilities(logits.double(), findings=findings), nan=0.0)
            probabilities, truth = likely.cpu().numpy(), labels.cpu().numpy()
            if findings:
                confusion += metrics.finding_confusion(truth, probabilities >= outputs.LEAST)
            else:
                confusion += metrics.confusion_matrix(truth, likely.argmax(1).cpu().numpy(), num_classes)
            scores += metrics.score_histogram(probabilities, truth, score_bins)
            if countable is not None:
                leaving["confusion"] += metrics.finding_confusion(countable, probabilities >= outputs.LEAST)
                leaving["scores"] += metrics.score_histogram(probabilities, countable, score_bins)
            records += len(truth)
        totals[f"evaluation/{fold}/confusion"] = torch.from_numpy(confusion).double()
        totals[f"evaluation/{fold}/scores"] = torch.from_numpy(scores).double()
        totals[f"evaluation/{fold}/loss"] = torch.tensor(loss, dtype=torch.float64)
        if coarse_loss:
            step = loss_step(score_bins)
            told_loss = round(coarse / step) * step
            totals[f"{TOLD}evaluation/{fold}/loss"] = torch.tensor(told_loss, dtype=torch.float64)
        if findings:
            totals[f"evaluation/{fold}/records"] = torch.tensor(records, dtype=torch.float64)
        if fold in told_labels:
            rounded = {f"{TOLD}evaluation/{fold}/{name}": value for name, value in leaving.items()}
            totals |= {name: torch.from_numpy(value).double() for name, value in rounded.items()}
    return totals


def _summed(losses: torch.Tensor, most: float) -> float:
    """Return the sum of records' losses, each clipped to ``most``; NaN counts as ``most``."""
    return float(torch.nan_to_num(losses.double(), nan=most, posinf=most).clamp(max=most).sum())


def summarise(totals: Totals, class_names: tuple[str, ...], *, copies: int = 1) -> Evaluation:
    """Compute the metrics of each fold from the totals over all silos.

    Undefined values (a class without records) are None. ``auroc`` and ``average_precision`` are macro
    means over the classes present, from score histograms.

    Args:
        totals: the fields of ``schema``.
        class_names: names of the C classes.
        copies: how often each test record is counted, where silos share them.
    """
    folds = {}
    for fold in FOLDS:
        confusion, scores = (
            np.rint(totals[f"evaluation/{fold}/{name}"]).astype(np.int64) for name in ("confusion", "scores")
        )
        records = totals.get(f"evaluation/{fold}/records")
        loss, counted = float(totals[f"evaluation/{fold}/loss"]), copies if fold == "test" else None
        folds[fold] = (
            _fold_metrics(confusion, scores, loss, class_names, counted)
            if records is None
            else _finding_metrics(confusion, scores, loss, round(float(records)), class_names, counted)
        )
    return Evaluation(validation=folds["validation"], test=folds["test"])


def split_totals(totals: Totals) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """Split totals into those of the evaluation and all others."""
    return taken_out(totals, lambda name: name.startswith("evaluation/"))


def local_metrics(tensors: Tensors, class_names: tuple[str, ...]) -> Evaluation:
    """Compute ``summarise`` of one silo's own counts, for the report that stays at the silo."""
    return summarise({name: value.numpy() for name, value in tensors.items()}, class_names)


def _fold_metrics(
    confusion: NDArray[np.int64],
    scores: NDArray[np.int64],
    loss: float,
    class_names: tuple[str, ...],
    copies: int | None,
) -> FoldMetrics:
    records = int(confusion.sum())
    if records == 0:
        return FoldMetrics(records=0)
    recall = metrics.per_class_recall(confusion)
    return FoldMetrics(
        records=records,
        loss=loss / records,
        accuracy=_number(metrics.accuracy(confusion)),
        balanced_accuracy=_number(metrics.balanced_accuracy(confusion)),
        recall={name: _number(value) for name, value in zip(class_names, recall, strict=True)},
        class_records=dict(zip(class_names, confusion.sum(1).tolist(), strict=True)),
        one_answer=one_answer(confusion, class_names),
        confusion=confusion.tolist(),
        auroc=_number(metrics.macro_mean(metrics.auroc(scores))),
        average_precision=_number(metrics.macro_mean(metrics.average_precision(scores))),
        **({} if copies is None else read_scores(scores, class_names, copies=copies)),
    )


def _finding_metrics(
    confusion: NDArray[np.int64],
    scores: NDArray[np.int64],
    loss: float,
    records: int,
    class_names: tuple[str, ...],
    copies: int | None,
) -> FoldMetrics:
    """Compute the metrics of a fold whose records have findings, of confusion (K, 2, 2)."""
    if records == 0:
        return FoldMetrics(records=0)
    known = [place for place, table in enumerate(confusion) if table.any()]
    recall = np.stack([metrics.per_class_recall(table) for table in confusion])
    areas, precisions = metrics.auroc(scores), metrics.average_precision(scores)
    findings = {
        name: Finding(
            confusion=table.tolist() if place in known else None,
            sensitivity=_number(recall[place, 1]),
            specificity=_number(recall[place, 0]),
            auroc=_number(areas[place]),
            average_precision=_number(precisions[place]),
        )
        for place, (name, table) in enumerate(zip(class_names, confusion, strict=True))
    }
    return FoldMetrics(
        records=records,
        loss=loss / records,
        accuracy=_number(metrics.macro_mean(np.array([metrics.accuracy(table) for table in confusion]))),
        balanced_accuracy=_number(metrics.macro_mean(recall.mean(1))),
        recall={name: item.sensitivity for name, item in findings.items()},
        class_records={class_names[place]: int(confusion[place, 1].sum()) for place in known},
        findings=findings,
        auroc=_number(metrics.macro_mean(areas)),
        average_precision=_number(metrics.macro_mean(precisions)),
        **(
            {}
            if copies is None
            else read_scores(scores[known], [class_names[place] for place in known], copies=copies)
        ),
    )


def read_scores(
    scores: NDArray[Any],
    class_names: Sequence[str],
    *,
    copies: int = 1,
    deviation: float | None = None,
    records: Sequence[tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Return the fields of ``FoldMetrics`` that come from scores.

    Args:
        scores: opened histograms (C, 2, bins).
        class_names: names of the C classes.
        copies: how often each record is counted, where silos share their test records.
        deviation: standard deviation of the noise in each count; None where counts are exact.
        records: limits of the number of records of each histogram, with noise.
    """
    exact = deviation is None
    rounded = np.rint(scores).astype(np.int64) if exact else np.round(scores, 3)
    read: dict[str, ClassReading] = {}
    limits = [None] * len(class_names) if records is None else records
    for name, (positives, negatives), ends in zip(class_names, scores / copies, limits, strict=True):
        of_class = clinical.Scores(positives, negatives, deviation, ends)
        if of_class.told:
            read[name] = _class(of_class)
    noise = {} if exact else {"scores_deviation": deviation}
    histograms = {name: tuple(counts.tolist()) for name, counts in zip(class_names, rounded, strict=True)}
    return {"scores": histograms, "read_at": READ_AT, "reading": read, **noise}


def _class(scores: clinical.Scores) -> ClassReading:
    return ClassReading(
        brier=_bounds(clinical.brier(scores)),
        calibration_error=_bounds(clinical.calibration_error(scores)),
        at_specificity=_rule(clinical.at_specificity(scores, READ_AT)),
        at_sensitivity=_rule(clinical.at_sensitivity(scores, READ_AT)),
    )


def _bounds(interval: tuple[float, float]) -> tuple[float, float] | None:
    return interval if math.isfinite(interval[0]) and math.isfinite(interval[1]) else None


def _rule(point: clinical.Point | None) -> Rule | None:
    if point is None:
        return None
    se, sp = point.sensitivity, point.specificity
    return Rule(
        threshold=point.threshold,
        sensitivity=se.value,
        sensitivity_interval=(se.low, se.high),
        specificity=sp.value,
        specificity_interval=(sp.low, sp.high),
        reachable=point.reachable,
    )


def one_answer(confusion: NDArray[np.int64], class_names: Sequence[str]) -> OneAnswer | None:
    """Return ``metrics.one_answer`` with the class's name.

    Args:
        confusion: counts (C, C), rows are true classes.
        class_names: names of the C classes.

    >>> one_answer(np.array([[5, 0], [3, 0]]), ["a", "b"])
    OneAnswer(of_class='a', share=1.0, interval=None, certain=True)
    """
    answer = metrics.one_answer(confusion)
    if answer is None:
        return None
    return OneAnswer(of_class=class_names[answer[0]], share=answer[1], interval=None, certain=True)


def _number(value: Any) -> float | None:
    return None if not np.isfinite(value) else float(value)
