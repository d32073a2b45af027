"""A temperature for a linear head: one number, from sums of the validation records' losses on a grid.

Scores of a ridge regression or distances to class means are no logarithms of probabilities. Divided by the
temperature with the least cross-entropy over all silos' validation records they are the best of that kind
(Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks, ICML 2017). It is folded into
weights and bias, so that whoever uses the model needs to know nothing of it.

The histograms of scores that an evaluation opens do not serve here: at temperature 1 a ridge regression's
probabilities all lie in two or three of their bins.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.learning import model_update
from tightframe.learning.one_sum.closed_form import Priors
from tightframe.learning.one_sum.feature_sums import frozen
from tightframe.learning.one_sum.noisy_sums import NoisySums
from tightframe.phases import Contribution, Field, ServerState, SiloView, Tensors, Totals

LOSSES = "temperature/losses"
KNOWN = "frozen/known"
"""In ``ServerState.extra`` and in broadcasts: classes that the head knows, uint8 (C,)."""
GRID = tuple(2.0 ** (step / 2) for step in range(-24, 13))
MOST = 64.0
"""Largest loss of a record that is counted."""
DRAWS, ALL_DRAWS, TAIL = 400, 10_000, 5
"""Half the number of points for a class in ``of_gaussians``, and for all where classes are many; degrees of
freedom of their distribution."""
PASSES, STEPS = 3, 100
"""Turns of intercepts and temperature, and steps of each search for intercepts."""
HIDDEN = 0.7
"""Up to this share of the spectral norm of G's noise an eigenvalue counts as noise there."""
SLACK = 1.0
"""Nats of all validation records together, see ``chosen``."""
UNIT = 2.0**-16
"""Each record's loss is rounded to it, so that a total does not depend on how records are spread, but where
silos limit evaluations (``reported``)."""
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
        totals.append(_rounded(each).sum())
    return torch.stack(totals)


def reported(losses: torch.Tensor, records: int, classes: int) -> torch.Tensor:
    """Return losses as they leave a silo that limits evaluations: few numbers, and no record's margin.

    They are whole nats, at most one a record more than those of a head that says nothing, and rise on both
    sides of the least, as sums of records' losses do that are not limited.

    Args:
        losses: at each temperature of ``GRID``.
        records: that they are of.
        classes: that compete.

    >>> reported(torch.tensor([9.0, 3.2, 2.1, 2.3, 2.7]), 3, 2).tolist()
    [5.0, 3.0, 2.0, 2.0, 3.0]
    """
    least, most = int(losses.argmin()), _most(records, classes)
    down, up = losses[: least + 1].flip(0).cummax(0).values.flip(0), losses[least:].cummax(0).values
    return torch.cat([down[:-1], up]).clamp(max=most).round()


def reported_bits(records: int, classes: int) -> float:
    """Return the bits of ``reported``: of the number of ways to fall to the least and rise from it.

    >>> round(reported_bits(13, 2))
    81
    """
    most, last = _most(records, classes), len(GRID) - 1

    def rising(length: int) -> float:
        ways = math.lgamma(most + length + 1) - math.lgamma(most + 1) - math.lgamma(length + 1)
        return ways / math.log(2)

    each = [rising(place) + rising(last - place) for place in range(len(GRID))]
    return math.log2(most + 1) + float(np.logaddexp2.reduce(each))


def _most(records: int, classes: int) -> int:
    return math.floor(records * (math.log(max(1, classes)) + 1))


def _rounded(losses: torch.Tensor) -> torch.Tensor:
    """Return losses as they are counted: ``MOST`` at most, in multiples of ``UNIT``."""
    return (losses.nan_to_num(nan=MOST, posinf=MOST).clamp(max=MOST) / UNIT).round() * UNIT


def of_gaussians(
    weight: torch.Tensor, bias: torch.Tensor, noisy: NoisySums, *, intercepts: Priors | None = None
) -> tuple[float, torch.Tensor]:
    """Return a temperature, and a bias (C,), for a head that was solved from noisy sums, from these alone.

    Under differential privacy no silo tells of its losses. Points of each class are drawn around its mean
    with the covariance within classes, and with the tails of a t-distribution, since those of real features
    are heavier than a Gaussian's. Of the features only the scores are drawn. The temperature is the one with
    the least cross-entropy on these points.

    Eigenvalues of the covariance that noise alone could make are replaced by their mean, which noise leaves
    as it is. Without G the points are Gaussian, and the covariance is what unit length leaves,
    ``1 - mean |m_c|^2``: for the share of the means' spread that is signal over sqrt(d) directions, because
    features that tell classes apart vary together, for the rest over all d.

    Args:
        weight: (C, d).
        bias: (C,).
        intercepts: shift the bias so that on these points the mean probability of each class is its share
            of the records (or 1 / K): the condition that the best intercepts meet. A ridge regression with a
            large penalty needs it, whose scores grow with the number of a class's records. None leaves them.
    """
    known = noisy.sums.known
    observed = noisy.sums.counts[known] / noisy.sums.records
    means, used = noisy.sums.sums[known] / noisy.sums.counts[known][:, None], weight[known]
    values, vectors = torch.linalg.eigh(used @ _within(noisy, means, observed) @ used.T)
    stream = torch.Generator().manual_seed(0)
    number = max(10, min(DRAWS, ALL_DRAWS // len(values)))
    drawn = torch.randn(number, len(values), generator=stream, dtype=torch.float64)
    if noisy.sums.gram is not None:
        squares = torch.randn(number, TAIL, generator=stream, dtype=torch.float64).square().mean(1)
        drawn = drawn / squares.sqrt()[:, None]
    spread = (torch.cat([drawn, -drawn]) * values.clamp_min(0).sqrt()) @ vectors.T
    points = (means @ used.T + bias[known])[:, None] + spread
    scale = _least_loss(points, observed)
    if intercepts is not None:
        shares = observed if intercepts == "observed" else torch.full_like(observed, 1 / len(observed))
        shift = torch.zeros_like(shares)
        for _ in range(PASSES):  # a poor bias makes for a poor temperature
            shift = shift + _intercepts((points + shift) / scale, shares) * scale
            scale = _least_loss(points + shift, observed)
        bias = bias.clone()
        bias[known] += shift
    return scale, bias


def _least_loss(points: torch.Tensor, shares: torch.Tensor) -> float:
    """Return the best temperature for points (C, n, C) of each class, with the classes' shares (C,)."""
    scores = points.movedim(2, 0).contiguous()  # exponentials of long rows are several times as fast
    below = scores - scores.amax(0)
    right = torch.stack([each[place] for place, each in enumerate(below.unbind(1))])
    total = [shares @ _rounded((below / t).exp().sum(0).log() - right / t).sum(1) for t in GRID]
    return GRID[int(torch.stack(total).argmin())]


def _intercepts(points: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the shift (C,) of scores with which mean probabilities are the shares, by scaling in turn."""
    scores, each = points.flatten(0, 1).T.contiguous(), shares.repeat_interleave(points.shape[1])
    shift = torch.zeros_like(shares)
    for _ in range(STEPS):
        shifted = scores + shift[:, None]
        odds = shifted.sub_(shifted.amax(0)).exp_()
        mean = odds @ (each / odds.sum(0)) / points.shape[1]
        shift = shift + (shares / mean.clamp_min(1e-12)).log()
    return shift


def _within(noisy: NoisySums, means: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the covariance within classes (d, d) that ``of_gaussians`` assumes."""
    sums, width = noisy.sums, means.shape[1]
    if sums.gram is None:
        variance = (1 - shares @ means.square().sum(1)).clamp_min(0)
        per_direction = variance * (noisy.kept / math.sqrt(width) + (1 - noisy.kept) / width)
        return per_direction * torch.eye(width, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(sums.gram / sums.records - (means * shares[:, None]).T @ means)
    hidden = values <= HIDDEN * sums.noise / sums.records
    if bool(hidden.any()):
        values = torch.where(hidden, values[hidden].mean().clamp_min(0), values)
    return (vectors * values) @ vectors.T


def broadcast(state: ServerState) -> Tensors:
    """Return the model, and the classes that its head knows."""
    return {**model_update.broadcast_model(state.model), KNOWN: state.extra[KNOWN]}


def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
    """Sum the losses of this silo's validation records; zeros where they must not enter a total."""
    total, records = torch.zeros(len(GRID), dtype=torch.float64), 0
    if silo.may_sum("validation"):
        model, known = frozen(silo, received), received[KNOWN].bool().to(silo.device)
        with torch.no_grad():
            for features, labels in silo.encoded(model, "validation", exact=True):
                scores = model.head(features)  # type: ignore[operator]
                total += losses(scores, labels, known).cpu()
                records += int(known[labels].sum())
        if silo.limits_evaluations:
            total = reported(total, records, int(known.sum()))
    return Contribution({LOSSES: total}, None)


def chosen(losses: NDArray[np.float64]) -> float:
    """Return the temperature of the least summed loss, or the softest one of records without an error.

    Of several with the least, in whole nats, it is the middle one.

    Where the head tells all validation records apart, the loss falls for ever with the temperature, and n
    records without an error would be claimed as certainty. Then it is the largest temperature whose loss is
    within 1 nat: a mean probability of the right class of exp(-1 / n), about 1 - 1 / n.

    Args:
        losses: at each temperature of ``GRID``.

    >>> falling = np.array([0.0] * 20 + [2.0**step for step in range(len(GRID) - 20)])
    >>> chosen(falling) == GRID[20]
    True
    """
    least = np.flatnonzero(losses == losses.min())
    if least[0] > 0:
        return GRID[least[len(least) // 2]]
    within = losses <= losses[0] + SLACK
    return GRID[len(GRID) - 1 if bool(within.all()) else int(np.argmin(within)) - 1]


def warned(totals: Totals) -> list[str]:
    """Say that the best temperature is at an end of the grid, if it is."""
    if LOSSES not in totals or not np.any(totals[LOSSES] > 0):
        return []
    least = int(np.argmin(totals[LOSSES]))
    if least == 0:
        return [
            "the head makes no error on the validation records of the classes that it knows, so that they do "
            f"not say how sure it may be: its temperature is the softest that explains them, "
            f"{chosen(totals[LOSSES]):.2g}"
        ]
    if least == len(GRID) - 1:
        return [
            f"the temperature is the largest of the grid, {GRID[-1]:g}: on the validation records the head "
            "says next to nothing"
        ]
    return []


def update(state: ServerState, totals: Totals) -> ServerState:
    """Divide the head by the best temperature; without validation records, or losses, it stays."""
    if LOSSES not in totals or not np.any(totals[LOSSES] > 0):
        return state
    return scaled(state, chosen(totals[LOSSES]))


def scaled(state: ServerState, temperature: float) -> ServerState:
    """Divide the head by a temperature, but for the scores of classes that it does not know."""
    model = dict(state.model)
    model[WEIGHT] = (model[WEIGHT].double() / temperature).to(model[WEIGHT].dtype)
    if BIAS in model:
        bias, known = model[BIAS].double(), state.extra[KNOWN].bool()
        scaled = (
            bias / temperature if len(bias) != len(known) else torch.where(known, bias / temperature, bias)
        )
        model[BIAS] = scaled.to(model[BIAS].dtype)
    return state.evolve(model=model)


def between(bare: Tensors, model: Tensors) -> float:
    """Return the temperature of ``GRID`` by which a head was divided, from its weights before and after.

    >>> bare = {WEIGHT: torch.tensor([[1.0, -2.0]])}
    >>> between(bare, {WEIGHT: bare[WEIGHT] / 4})
    4.0
    """
    before, after = (float(item[WEIGHT].double().norm()) for item in (bare, model))
    if before == 0 or after == 0:
        return 1.0
    return min(GRID, key=lambda temperature: abs(math.log(before / after / temperature)))
