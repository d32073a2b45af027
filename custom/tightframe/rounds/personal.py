"""Personal models as sums: how well the silos' own models do, told as means over silos only.

A personal model and its results stay at its silo. What travels are its three accuracies, each silo
counting once whatever its size, and the number of silos that have them. From a mean over n silos the
other n - 1 together would know the last one's number, and a sum of one silo is its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe import metrics
from tightframe.model_update import BUFFER, UPDATE, received_model
from tightframe.phases import Field, Method, Phase, Schema, SiloView, Tensors, Totals
from tightframe.rounds.classes import MIN_HOLDERS

Predict = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

KIND = "personal"
"""What their sum is called, where training rounds are called ``train``."""

ACCURACY = "personal/accuracy"
VALID_CLASSES = "personal/valid_classes"
LABEL_SHARE = "personal/label_share"
SILOS = "personal/silos"
JUDGED = "personal/judged"


def schema() -> Schema:
    """The fields, all scalars in [0, 1].

    ``personal/accuracy``, and ``personal/silos``, which is 1 for a silo that has it;
    ``personal/valid_classes`` (PM(V)) and ``personal/label_share`` (PM(L)), and ``personal/judged``,
    which is 1 for a silo that has both.
    """
    names = (ACCURACY, SILOS, VALID_CLASSES, LABEL_SHARE, JUDGED)
    return Schema(tuple(Field(name, (), ring=64, bound=1.0, static=True) for name in names))


def build(silo: SiloView, method: Method, phase: Phase, received: Tensors, state: Tensors) -> torch.nn.Module:
    """A silo's personal model: as the method makes it, or the model after one more round of training.

    The latter is how FedNH's comparison defines it for every method (Dai et al., AAAI 2023). Where a
    method sends no update of a model (it shares gradients), it is the global model itself.

    Args:
        silo: whose it is.
        method: of the job.
        phase: the last phase of the last round.
        received: what that phase broadcasts, and the final model.
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
    label_counts: torch.Tensor,
    num_classes: int,
) -> tuple[dict[str, torch.Tensor], NDArray[np.int64]]:
    """Evaluate a silo's personal model.

    Args:
        predict: class logits (B, C) of a batch.
        module: the personal model, evaluated as it is, in evaluation mode.
        batches: mini-batches (inputs, labels) of the records to judge by; for FedNH's PM(V) and PM(L)
            those of a test set that all silos share.
        label_counts: the silo's training records of each class, int64 (C,).
        num_classes: C.

    Returns:
        The tensors of ``schema``, float64, and the confusion matrix (C, C), rows true classes, which is
        for the silo's own report and never leaves it. What a silo lacks (it has no records here, or
        none of a class that it trained on) is zero, and so is its counter.

    Raises:
        ValueError: if ``label_counts`` has another shape, or a label is not in [0, C).
    """
    module.eval()
    confusion = np.zeros((num_classes, num_classes), np.int64)
    for inputs, labels in batches:
        # As in the evaluation of the global model: a diverged model is undecided, which is class 0.
        probabilities = torch.nan_to_num(torch.softmax(predict(module, inputs).float().double(), 1), nan=0.0)
        confusion += metrics.confusion_matrix(
            labels.cpu().numpy(), probabilities.argmax(1).cpu().numpy(), num_classes
        )
    counts = label_counts.cpu().numpy()
    values = dict.fromkeys((ACCURACY, SILOS, VALID_CLASSES, LABEL_SHARE, JUDGED), 0.0)
    if np.isfinite(accuracy := metrics.accuracy(confusion)):
        values |= {ACCURACY: float(accuracy), SILOS: 1.0}
    judged = {
        VALID_CLASSES: metrics.valid_class_accuracy(confusion, counts),
        LABEL_SHARE: metrics.label_share_accuracy(confusion, counts),
    }
    if np.isfinite(list(judged.values())).all():
        values |= judged | {JUDGED: 1.0}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}, confusion


def untold(tensors: Tensors) -> dict[str, torch.Tensor]:
    """What ``count`` gives as if the silo had no record: zeros, and in no mean."""
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def summarise(totals: Totals) -> dict[str, Any] | None:
    """Means over silos from the totals, as plain JSON values; None without three silos.

    ``accuracy`` is the mean over ``silos`` silos; ``valid_classes`` and ``label_share`` are means over
    those that have both, None where fewer than three do. Of fewer, a mean is close to one's own.
    """
    silos = round(float(totals.get(SILOS, 0.0)))
    judged = round(float(totals.get(JUDGED, 0.0)))
    if silos < MIN_HOLDERS:
        return None
    named = {"valid_classes": VALID_CLASSES, "label_share": LABEL_SHARE}
    shares = {
        key: float(totals[name]) / judged if judged >= MIN_HOLDERS else None for key, name in named.items()
    }
    return {"accuracy": float(totals[ACCURACY]) / silos, "silos": silos} | shares
