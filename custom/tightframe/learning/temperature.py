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
from tightframe.learning.noisy_sums import NoisySums
from tightframe.phases import Contribution, Field, ServerState, SiloView, Tensors, Totals

LOSSES = "temperature/losses"
KNOWN = "frozen/known"
"""In ``ServerState.extra`` and in broadcasts: classes that the head knows, uint8 (C,)."""
GRID = tuple(2.0 ** (step / 2) for step in range(-24, 13))
MOST = 64.0
"""Largest loss of a record that is counted."""
DRAWS = 400
"""Points for each class of ``of_gaussians``."""
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


def of_gaussians(weight: torch.Tensor, bias: torch.Tensor, found: NoisySums) -> float:
    """Return the temperature with the least cross-entropy on Gaussian classes that follow from noisy sums.

    Under differential privacy no silo tells of its losses. Points of each class are drawn around its mean,
    drawn towards the common one as far as noise spreads means (else the noise that the head was fitted to
    would count as signal), with the covariance within classes; of the features only the scores are drawn,
    which are Gaussian, too. Without G the covariance is a multiple of the identity, whose trace is what unit
    length leaves: ``1 - mean |m_c|^2``.

    Args:
        weight: (C, d).
        bias: (C,).
        found: of the release.
    """
    sums, known = found.sums, found.sums.known
    counts = sums.counts[known]
    means, shares = found.means[known], counts / counts.sum()
    used = weight[known]
    if sums.gram is None:
        free = (1 - shares @ means.square().sum(1)).clamp_min(0) / means.shape[1]
        covariance = free * used @ used.T
    else:
        within = sums.gram / counts.sum() - (means * shares[:, None]).T @ means
        values, vectors = torch.linalg.eigh(within)
        covariance = (used @ vectors * values.clamp_min(0)) @ (used @ vectors).T
    values, vectors = torch.linalg.eigh(covariance)
    stream = torch.Generator().manual_seed(0)
    normal = torch.randn(DRAWS, len(values), generator=stream, dtype=torch.float64)
    spread = (torch.cat([normal, -normal]) * values.clamp_min(0).sqrt()) @ vectors.T
    centres, all_known = means @ used.T + bias[known], torch.ones(len(values), dtype=torch.bool)
    total = torch.zeros(len(GRID), dtype=torch.float64)
    for place, share in enumerate(shares):
        labels = torch.full((len(spread),), place)
        total += share * losses(centres[place] + spread, labels, all_known)
    return GRID[int(total.argmin())]


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
