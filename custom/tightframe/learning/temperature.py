"""A temperature for a linear head: one number, from sums of the validation records' losses on a grid.

Scores of a ridge regression or distances to class means are no logarithms of probabilities. Divided by the
temperature with the least cross-entropy over all silos' validation records they are the best of that kind
(Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks, ICML 2017). It is folded into
weights and bias, so that whoever uses the model needs to know nothing of it.

The histograms of scores that an evaluation opens do not serve here: at temperature 1 a ridge regression's
probabilities all lie in two or three of their bins.
"""

from __future__ import annotations

import numpy as np
import torch

from tightframe.learning import model_update
from tightframe.learning.feature_sums import frozen
from tightframe.phases import Contribution, Field, ServerState, SiloView, Tensors, Totals

LOSSES = "temperature/losses"
KNOWN = "frozen/known"
"""In ``ServerState.extra`` and in broadcasts: classes that the head knows, uint8 (C,)."""
GRID = tuple(2.0 ** (step / 2) for step in range(-24, 13))
MOST = 64.0
"""Largest loss of a record that is counted."""
UNIT = 2.0**-16
"""Each record's loss is rounded to it, so that a total does not depend on how records are spread."""
WEIGHT, BIAS = "head.weight", "head.bias"


def field() -> Field:
    """Return the field of the summed losses, one a temperature; static, as an evaluation's loss."""
    return Field(LOSSES, (len(GRID),), bound=2.0**24 * MOST, static=True)


def losses(scores: torch.Tensor, labels: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy at each temperature of ``GRID``, float64, in multiples of ``UNIT``.

    Args:
        scores: (B, C) float64.
        labels: (B,).
        known: classes that compete, (C,) bool; records of others are left out.

    >>> low, high = losses(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([True, True]))[[0, -1]]
    >>> float(low), round(float(high), 2)
    (0.0, 0.69)
    """
    kept = known[labels]
    scores, labels = scores[kept].masked_fill(~known, float("-inf")), labels[kept]
    totals = []
    for temperature in GRID:
        each = torch.nn.functional.cross_entropy(scores / temperature, labels, reduction="none")
        each = each.nan_to_num(nan=MOST, posinf=MOST).clamp(max=MOST)
        totals.append((each / UNIT).round().sum() * UNIT)
    return torch.stack(totals)


def broadcast(state: ServerState) -> Tensors:
    """Return the model, and the classes that its head knows."""
    return {**model_update.broadcast_model(state.model), KNOWN: state.extra[KNOWN]}


def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
    """Sum the losses of this silo's validation records; zeros where they must not enter a total."""
    total = torch.zeros(len(GRID), dtype=torch.float64)
    if silo.may_sum("validation"):
        model, known = frozen(silo, received), received[KNOWN].bool().to(silo.device)
        with torch.no_grad():
            for features, labels in silo.encoded(model, "validation", exact=True):
                scores = model.head(features)  # type: ignore[operator]
                total += losses(scores, labels, known).cpu()
    return Contribution({LOSSES: total}, None)


def update(state: ServerState, totals: Totals) -> ServerState:
    """Divide the head by the best temperature; without validation records, or losses, it stays.

    The score of a class that the head does not know is not a score, and stays.
    """
    if LOSSES not in totals or not np.any(totals[LOSSES] > 0):
        return state
    temperature = GRID[int(np.argmin(totals[LOSSES]))]
    model = dict(state.model)
    model[WEIGHT] = (model[WEIGHT].double() / temperature).to(model[WEIGHT].dtype)
    if BIAS in model:
        bias, known = model[BIAS].double(), state.extra[KNOWN].bool()
        scaled = (
            bias / temperature if len(bias) != len(known) else torch.where(known, bias / temperature, bias)
        )
        model[BIAS] = scaled.to(model[BIAS].dtype)
    return state.evolve(model=model)
