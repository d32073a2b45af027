"""Evaluation as sums: every silo evaluates the model that it has just received on its own records.

A confusion matrix and per-class score histograms are sums over records, so they travel as extra
fields of the same contribution and need no exchange of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe import metrics
from tightframe.config.job import JobConfig
from tightframe.learning.model_update import received_model
from tightframe.phases import (
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
from tightframe.results.parts.evaluation import Evaluation, FoldMetrics, OneAnswer
from tightframe.rounds.riders import score_reading
from tightframe.rounds.riders.class_rules import MIN_HOLDERS

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo

FOLDS: tuple[Fold, ...] = ("validation", "test")
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
_COUNT_BOUND = 2.0**28
NOTE = "evaluation"
"""Name of the note that holds the totals ``evaluation/...``."""
Term = Callable[["LocalSilo", Tensors], Tensors]
"""Makes a silo's term of its exact counts."""


def exact(silo: LocalSilo, counted: Tensors) -> Tensors:
    """Return a silo's exact counts as its term."""
    return counted


def attach(phase: Phase, added: Schema, term: Term = exact) -> Phase:
    """Return a phase in which silos first evaluate the model received.

    Args:
        phase: that the evaluation travels with; its broadcast contains the model.
        added: the evaluation's fields.
        term: makes them of a silo's exact counts.
    """

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = cast("LocalSilo", silo)
        _, counted = evaluate_received(view, received, state)
        own = term(view, blank_folds(counted, view.left_out))
        made = phase.contribute(silo, received, state)
        return replace(made, tensors={**made.tensors, **own})

    return replace(with_note(phase), schema=phase.schema + added, contribute=contribute)


def with_note(phase: Phase) -> Phase:
    """Return a phase whose evaluation totals the server notes and withholds from the method."""

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = split_totals(totals)
        reading = phase.read(state, others, cohort)
        return reading.noting(NOTE, own) if own else reading

    return replace(phase, read=read)


def evaluate_received(
    silo: LocalSilo, received: Tensors, state: Tensors
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return the model received, or the silo's own where the method has no global one, and its counts."""
    own = silo.setup.method.own_model
    final = received_model(received) if own is None else own(silo, state)
    return final, count_at(silo, silo.load(final))


def count_at(silo: LocalSilo, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Evaluate a model on the silo's own records; see ``count``."""
    settings = silo.setup.job.evaluation
    with silo.memory_named("evaluation.batch_size", settings.batch_size):
        return count(
            model,
            silo.setup.method.predict,
            {fold: silo.batches(fold, augment=False, shuffle=False) for fold in FOLDS},
            num_classes=silo.setup.dataset.num_classes,
            score_bins=settings.score_bins,
        )


def schema(num_classes: int, score_bins: int) -> Schema:
    """Return the evaluation's fields: confusion (C, C), scores (C, 2, bins) and loss () of each fold."""
    fields: list[Field] = []
    for fold in FOLDS:
        common: dict[str, Any] = {"bound": _COUNT_BOUND, "static": True}
        fields += [
            Field(f"evaluation/{fold}/confusion", (num_classes, num_classes), per_class=True, **common),
            Field(f"evaluation/{fold}/scores", (num_classes, 2, score_bins), per_class=True, **common),
            Field(f"evaluation/{fold}/loss", (), **common),
        ]
    return Schema(tuple(fields))


def blank_folds(tensors: Tensors, folds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the counts as if some folds had no records."""
    blank = tuple(f"evaluation/{fold}/" for fold in folds)
    return {
        name: torch.zeros_like(value) if blank and name.startswith(blank) else value
        for name, value in tensors.items()
    }


def few_silo_folds(job: JobConfig, fold_silos: Mapping[str, int] | None) -> tuple[Fold, ...]:
    """Return the folds that fewer than three silos evaluate, which all silos leave out of a secure sum.

    The exact total of so few silos would reveal the counts of one of them. With the class rules off nothing
    is left out.

    Args:
        job: of the run.
        fold_silos: number of silos that evaluate each fold; None in a plain sum.
    """
    if job.privacy is not None or job.class_rules == "off" or fold_silos is None:
        return ()
    return tuple(fold for fold in FOLDS if fold_silos[fold] < MIN_HOLDERS)


@torch.no_grad()
def count(
    model: torch.nn.Module,
    predict: Predict,
    batches: Mapping[Fold, Batches],
    *,
    num_classes: int,
    score_bins: int,
) -> dict[str, torch.Tensor]:
    """Evaluate a model on a silo's own records.

    Args:
        model: evaluated as it is, in evaluation mode.
        predict: logits (B, C) of a batch.
        batches: mini-batches of each fold.
        num_classes: C.
        score_bins: bins of [0, 1] for the softmax score of each class.

    Returns:
        The tensors of ``schema``, float64. The loss is the summed cross-entropy, at most 1e4 per
        record so that a diverged model stays within the field's bound.
    """
    model.eval()
    totals: dict[str, torch.Tensor] = {}
    for fold in FOLDS:
        confusion = np.zeros((num_classes, num_classes), np.int64)
        scores = np.zeros((num_classes, 2, score_bins), np.int64)
        loss = 0.0
        for inputs, labels in batches[fold]:
            logits = predict(model, inputs).float()
            each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            loss += float(torch.nan_to_num(each.double(), nan=1e4, posinf=1e4).clamp(max=1e4).sum())
            # A diverged model predicts NaN, which counts as class 0 at score 0.
            probabilities = torch.nan_to_num(torch.softmax(logits.double(), dim=1), nan=0.0)
            truth = labels.cpu().numpy()
            confusion += metrics.confusion_matrix(truth, probabilities.argmax(1).cpu().numpy(), num_classes)
            scores += metrics.score_histogram(probabilities.cpu().numpy(), truth, score_bins)
        totals[f"evaluation/{fold}/confusion"] = torch.from_numpy(confusion).double()
        totals[f"evaluation/{fold}/scores"] = torch.from_numpy(scores).double()
        totals[f"evaluation/{fold}/loss"] = torch.tensor(loss, dtype=torch.float64)
    return totals


def summarise(totals: Totals, class_names: tuple[str, ...], *, copies: int = 1) -> Evaluation:
    """Compute the metrics of each fold from the totals over all silos.

    Undefined values (a class without records) are None. ``auroc`` and ``average_precision`` are macro
    means over the classes present, from score histograms.

    Args:
        totals: the fields of ``schema``.
        class_names: names of the C classes.
        copies: how often each test record is counted, where silos share them.
    """
    folds = {
        fold: _fold_metrics(
            np.rint(totals[f"evaluation/{fold}/confusion"]).astype(np.int64),
            np.rint(totals[f"evaluation/{fold}/scores"]).astype(np.int64),
            float(totals[f"evaluation/{fold}/loss"]),
            class_names,
            copies if fold == "test" else None,
        )
        for fold in FOLDS
    }
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
        **({} if copies is None else score_reading.reading(scores, class_names, copies=copies)),
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
