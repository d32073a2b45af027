"""Evaluation as sums: what every silo counts on the model that it has just received.

A confusion matrix and per-class score histograms are sums over records, so they travel as extra
fields of the same contribution and cost no exchange of their own.
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
)
from tightframe.results.evaluation import Evaluation, FoldMetrics, OneAnswer
from tightframe.rounds.riders.class_rules import MIN_HOLDERS

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo

FOLDS: tuple[Fold, ...] = ("validation", "test")
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
_COUNT_BOUND = 2.0**28
NOTE = "evaluation"
"""Name of the note: the totals ``evaluation/...``."""
Term = Callable[["LocalSilo", Tensors], Tensors]


def exact(silo: LocalSilo, counted: Tensors) -> Tensors:
    """A silo's term: its counts as they are."""
    return counted


def riding(phase: Phase, added: Schema, term: Term = exact) -> Phase:
    """A phase whose silos evaluate the model received before they do anything else.

    Args:
        phase: that the evaluation rides on; its broadcast has the model.
        added: the evaluation's fields.
        term: makes them of a silo's exact counts.
    """

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = cast("LocalSilo", silo)
        _, counted = counted_model(view, received, state)
        own = term(view, without(counted, view.left_out))
        made = phase.contribute(silo, received, state)
        return replace(made, tensors={**made.tensors, **own})

    return replace(reading(phase), schema=phase.schema + added, contribute=contribute)


def reading(phase: Phase) -> Phase:
    """A phase at whose server the evaluation's totals become a note, and are no method's."""

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = split_totals(totals)
        found = phase.read(state, others, cohort)
        return found.noting(NOTE, own) if own else found

    return replace(phase, read=read)


def counted_model(
    silo: LocalSilo, received: Tensors, state: Tensors
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """(the model received, or the silo's own where the method has no global one; its counts there)."""
    own = silo.setup.method.own_model
    final = received_model(received) if own is None else own(silo, state)
    return final, count_at(silo, silo.load(final))


def count_at(silo: LocalSilo, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Count a model's hits on the silo's own records; see ``count``."""
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
    """The evaluation's fields: confusion (C, C), scores (C, 2, bins), loss () of each fold."""
    fields: list[Field] = []
    for fold in FOLDS:
        common: dict[str, Any] = {"bound": _COUNT_BOUND, "static": True}
        fields += [
            Field(f"evaluation/{fold}/confusion", (num_classes, num_classes), per_class=True, **common),
            Field(f"evaluation/{fold}/scores", (num_classes, 2, score_bins), per_class=True, **common),
            Field(f"evaluation/{fold}/loss", (), **common),
        ]
    return Schema(tuple(fields))


def without(tensors: Tensors, folds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Counts as if some folds had no record."""
    left_out = tuple(f"evaluation/{fold}/" for fold in folds)
    return {
        name: torch.zeros_like(value) if left_out and name.startswith(left_out) else value
        for name, value in tensors.items()
    }


def told_by_few(job: JobConfig, told: Mapping[str, int] | None) -> tuple[Fold, ...]:
    """The folds that a secure sum of exact counts does not hide: fewer than three silos tell of them.

    What others leave out makes the total that of the rest. With the class rules off it is told nevertheless.

    Args:
        job: of the run.
        told: silos that tell of each fold; None in a plain sum.
    """
    if job.privacy is not None or job.class_rules == "off" or told is None:
        return ()
    return tuple(fold for fold in FOLDS if told[fold] < MIN_HOLDERS)


@torch.no_grad()
def count(
    model: torch.nn.Module,
    predict: Predict,
    batches: Mapping[Fold, Batches],
    *,
    num_classes: int,
    score_bins: int,
) -> dict[str, torch.Tensor]:
    """Count a model's hits on a silo's own records.

    Args:
        model: evaluated as it is, in evaluation mode.
        predict: logits (B, C) of a batch.
        batches: mini-batches of each fold.
        num_classes: C.
        score_bins: bins of [0, 1] for the softmax score of each class.

    Returns:
        The tensors of ``schema``, float64. The loss is the summed cross-entropy, cut at 1e4 a
        record so that a diverged model cannot leave the field's bound.
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
            # A diverged model predicts NaN: it is counted as undecided, which is class 0 at score 0.
            probabilities = torch.nan_to_num(torch.softmax(logits.double(), dim=1), nan=0.0)
            truth = labels.cpu().numpy()
            confusion += metrics.confusion_matrix(truth, probabilities.argmax(1).cpu().numpy(), num_classes)
            scores += metrics.score_histogram(probabilities.cpu().numpy(), truth, score_bins)
        totals[f"evaluation/{fold}/confusion"] = torch.from_numpy(confusion).double()
        totals[f"evaluation/{fold}/scores"] = torch.from_numpy(scores).double()
        totals[f"evaluation/{fold}/loss"] = torch.tensor(loss, dtype=torch.float64)
    return totals


def summarise(totals: Totals, class_names: tuple[str, ...]) -> Evaluation:
    """Return metrics of each fold from the totals over all silos.

    Values that do not exist (a class without records) are None. ``auroc`` and ``average_precision`` are macro
    means over the classes present, from score histograms.
    """
    folds = {
        fold: _fold_metrics(
            np.rint(totals[f"evaluation/{fold}/confusion"]).astype(np.int64),
            np.rint(totals[f"evaluation/{fold}/scores"]).astype(np.int64),
            float(totals[f"evaluation/{fold}/loss"]),
            class_names,
        )
        for fold in FOLDS
    }
    return Evaluation(validation=folds["validation"], test=folds["test"])


def split_totals(totals: Totals) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """(the evaluation's totals, all others)."""
    own = {name: value for name, value in totals.items() if name.startswith("evaluation/")}
    return own, {name: value for name, value in totals.items() if name not in own}


def local_metrics(tensors: Tensors, class_names: tuple[str, ...]) -> Evaluation:
    """Return ``summarise`` of one silo's own counts, for the report that stays at the silo."""
    return summarise({name: value.numpy() for name, value in tensors.items()}, class_names)


def _fold_metrics(
    confusion: NDArray[np.int64], scores: NDArray[np.int64], loss: float, class_names: tuple[str, ...]
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
    )


def one_answer(confusion: NDArray[np.int64], class_names: Sequence[str]) -> OneAnswer | None:
    """Return ``metrics.one_answer`` with the class's name.

    Args:
        confusion: (C, C), rows are true classes.
        class_names: C of them.

    >>> one_answer(np.array([[5, 0], [3, 0]]), ["a", "b"])
    OneAnswer(of_class='a', share=1.0, interval=None, certain=True)
    """
    answer = metrics.one_answer(confusion)
    if answer is None:
        return None
    return OneAnswer(of_class=class_names[answer[0]], share=answer[1], interval=None, certain=True)


def _number(value: Any) -> float | None:
    return None if not np.isfinite(value) else float(value)
