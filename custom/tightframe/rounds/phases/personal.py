"""Personal models as sums: their accuracies, published as means over silos only.

A personal model and its results stay at its silo. What travels are its three accuracies, in which each silo
counts once whatever its size, and the number of silos that have them. A mean over few silos is withheld: from
a mean over n silos, n - 1 of them together can compute the last one's value.

An accuracy is a fraction k/n of records, and a sum of fractions with different denominators can often be
split in only one way: an exact sum would reveal each silo's k. So accuracies are summed in steps of 1/32, the
same at all silos, where many combinations give the same total. The rounding error is at most 1/64 per silo,
and about half a percentage point in a mean over four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe import metrics
from tightframe.data.base import class_patients
from tightframe.learning import outputs
from tightframe.learning.model_update import BUFFER, UPDATE, broadcast_model, received_model
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Method,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.results.files import PERSONAL
from tightframe.results.local_report import SiloPersonal
from tightframe.results.outcome import Personal
from tightframe.rounds import unproven
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.riders.class_rules import MIN_HOLDERS
from tightframe.rounds.riders.evaluation import one_answer
from tightframe.rounds.riders.view import RiderView, rider_view

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup

Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

NOTE = "personal"
"""Name of the note that holds the result of ``summarise``."""
ACCURACY = "personal/accuracy"
VALID_CLASSES = "personal/valid_classes"
LABEL_SHARE = "personal/label_share"
SILOS = "personal/silos"
JUDGED = "personal/judged"
FRACTION_BITS = 5
"""Fraction bits of the accuracies, whose total in finer steps would disclose each silo's."""


def schema() -> Schema:
    """Return the fields, all scalars in [0, 1], summed in steps of ``2**-FRACTION_BITS``.

    ``personal/accuracy``, and ``personal/silos``, which is 1 for a silo that has one;
    ``personal/valid_classes`` (PM(V)) and ``personal/label_share`` (PM(L)), and ``personal/judged``, which is
    1 for a silo that has both.
    """
    names = (ACCURACY, SILOS, VALID_CLASSES, LABEL_SHARE, JUDGED)
    return Schema(
        tuple(Field(name, (), ring=64, bound=1.0, static=True, bits=FRACTION_BITS) for name in names)
    )


def phase(setup: JobSetup, last: Phase) -> Phase:
    """Return the phase in which every silo makes its personal model and stores it.

    Args:
        last: the last phase of the last round, with which a model is trained once more.
    """

    def broadcast(state: ServerState) -> Tensors:
        return {**last.broadcast(state), **broadcast_model(state.model)}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = rider_view(silo)
        tensors = _make(view, last, received, state)
        # The accuracy is computed from exact counts of the test records, which then must stay at the silo.
        return Contribution(blank(tensors) if "test" in view.left_out else tensors, None)

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        reading = Reading(state, {})
        return reading.noting(NOTE, summarise(totals)) if totals else reading

    return Phase("personal", schema(), broadcast, contribute, lambda state, totals, cohort: state, read)


def _make(silo: RiderView, last: Phase, received: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    """Make the personal model and store it with its results; return the tensors of ``schema``."""
    setup, context = silo.setup, silo.context
    context.log.info("%s: making the personal model", silo.name)
    model = build(silo, setup.method, last, received, state)
    findings = setup.dataset.multi_label
    label_counts = None if findings else public_class_counts(silo)
    tensors, confusion = count(
        setup.method.predict,
        model,
        silo.batches("test", augment=False, shuffle=False),
        label_counts,
        setup.dataset.num_classes,
    )
    path = unproven.place(context, silo.needs) / PERSONAL
    personal = SiloPersonal(
        model_sha256=save_tensors(path, model.state_dict(), mode=0o600),
        confusion=None if findings else confusion.tolist(),
        findings=confusion.tolist() if findings else None,
        one_answer=None if findings else one_answer(confusion, setup.dataset.class_names),
        accuracy=float(tensors[ACCURACY]),
        silos=float(tensors[SILOS]),
        valid_classes=float(tensors[VALID_CLASSES]),
        label_share=float(tensors[LABEL_SHARE]),
        judged=float(tensors[JUDGED]),
    )
    silo.add_to_report(personal=personal)
    if path.parent == context.run_dir:
        context.log.info("%s: personal model (this silo's own): %s", silo.name, path)
    if label_counts is not None:
        return _tensors(_measures(without_few(silo, confusion, label_counts), label_counts))
    counted = [place for place in range(len(confusion)) if f"test/{place}" not in silo.left_out]
    return _tensors(_accuracies(confusion[counted]))


def public_class_counts(silo: RiderView) -> torch.Tensor:
    """Return the training records of each class, int64 (C,), none where the class rules hide a class.

    Otherwise PM(V) less the accuracy discloses a single record of a class.
    """
    counts, policy = silo.class_counts("train"), silo.context.policy
    if silo.setup.privacy is not None or policy.class_rules_off:
        return counts
    return torch.where(silo.held_counts() >= silo.min_class_count, counts, 0)


def without_few(
    silo: RiderView, confusion: NDArray[np.int64], label_counts: torch.Tensor
) -> NDArray[np.int64]:
    """Return a confusion matrix (C, C) without few patients' test records of a class that was not trained on.

    The accuracy has them and PM(V) has not, so that their difference would disclose them.

    Args:
        label_counts: as of ``public_class_counts``.
    """
    data, policy = silo.context.data, silo.context.policy
    if silo.setup.privacy is not None or policy.class_rules_off:
        return confusion
    patients = class_patients(data, data.labels("test"), len(confusion), "test")
    few = (patients < silo.min_class_count) & (label_counts.numpy() == 0)
    return np.where(few[:, None], 0, confusion)


def build(silo: SiloView, method: Method, phase: Phase, received: Tensors, state: Tensors) -> torch.nn.Module:
    """Build a silo's personal model: by the method's own rule, or by one more round of training.

    The latter is the definition of FedNH's comparison for all methods (Dai et al., AAAI 2023). Where a
    method sends no update of a model (it shares gradients), it is the global model itself.

    Args:
        phase: the last phase of the last round.
        received: broadcast of that phase, with the final model.
        state: the silo's own committed state.
    """
    model = received_model(received)
    if method.personalise is not None:
        return method.personalise(silo, model, state)
    trained = phase.contribute(silo, received, state).tensors
    tensors = {
        name: trained[BUFFER + name] if BUFFER + name in trained else value + trained.get(UPDATE + name, 0)
        for name, value in model.items()
    }
    return silo.load(tensors)


@torch.no_grad()
def count(
    predict: Predict,
    module: torch.nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    label_counts: torch.Tensor | None,
    num_classes: int,
) -> tuple[dict[str, torch.Tensor], NDArray[np.int64]]:
    """Evaluate a silo's personal model.

    Args:
        predict: class logits (B, C) of a batch.
        module: the personal model, evaluated as it is, in evaluation mode.
        batches: mini-batches (inputs, labels) of the test records; for FedNH's PM(V) and PM(L) those of a
            test set that all silos share.
        label_counts: the silo's training records of each class, int64 (C,); None where records have findings,
            which have no PM(V) and PM(L).

    Returns:
        The tensors of ``schema``, float64, and the confusion matrix (C, C), rows true classes (of findings
        (K, 2, 2)), which is for the silo's own report and never leaves it. An undefined value (no test
        records, or none of a class that the silo trained on) is zero, and so is its counter.

    Raises:
        ValueError: if ``label_counts`` has another shape, or a label is not in [0, C).
    """
    module.eval()
    findings = label_counts is None
    confusion = np.zeros((num_classes, 2, 2) if findings else (num_classes, num_classes), np.int64)
    for inputs, labels in batches:
        # As in the evaluation of the global model, a diverged model's NaN counts as class 0.
        logits = predict(module, inputs).float().double()
        likely = torch.nan_to_num(outputs.probabilities(logits, findings=findings), nan=0.0)
        truth = labels.cpu().numpy()
        if findings:
            confusion += metrics.finding_confusion(truth, likely.cpu().numpy() >= outputs.LEAST)
        else:
            confusion += metrics.confusion_matrix(truth, likely.argmax(1).cpu().numpy(), num_classes)
    values = _accuracies(confusion) if label_counts is None else _measures(confusion, label_counts)
    return _tensors(values), confusion


def _measures(confusion: NDArray[np.int64], label_counts: torch.Tensor) -> dict[str, float]:
    """Return ``schema``'s values of a confusion matrix (C, C)."""
    counts = label_counts.cpu().numpy()
    judged = {
        VALID_CLASSES: metrics.valid_class_accuracy(confusion, counts),
        LABEL_SHARE: metrics.label_share_accuracy(confusion, counts),
    }
    known = np.isfinite(list(judged.values())).all()
    return _accuracies(confusion) | (judged | {JUDGED: 1.0} if known else {})


def _accuracies(confusion: NDArray[np.int64]) -> dict[str, float]:
    """Return ``schema``'s values with the accuracy alone; for findings (K, 2, 2) their mean accuracy."""
    values = dict.fromkeys((ACCURACY, SILOS, VALID_CLASSES, LABEL_SHARE, JUDGED), 0.0)
    tables = confusion if confusion.ndim == 3 else confusion[None]
    accuracy = metrics.macro_mean(np.array([metrics.accuracy(table) for table in tables]))
    return values | ({ACCURACY: accuracy, SILOS: 1.0} if np.isfinite(accuracy) else {})


def _tensors(values: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def blank(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of ``count`` for a silo without records: zeros, which enter no mean."""
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def summarise(totals: Totals) -> Personal | None:
    """Compute means over silos from the totals; None for fewer than three silos.

    ``accuracy`` is the mean over ``silos`` silos; ``valid_classes`` and ``label_share`` are means over
    those that have both, None where fewer than three do: such a mean is close to one silo's own value.
    """
    silos = round(float(totals.get(SILOS, 0.0)))
    judged = round(float(totals.get(JUDGED, 0.0)))
    if silos < MIN_HOLDERS:
        return None
    valid, share = (
        float(totals[name]) / judged if judged >= MIN_HOLDERS else None
        for name in (VALID_CLASSES, LABEL_SHARE)
    )
    return Personal(
        accuracy=float(totals[ACCURACY]) / silos, silos=silos, valid_classes=valid, label_share=share
    )
