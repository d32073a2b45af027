"""Pooled sums of frozen features that were released with noise: their fields, and how a method reads them.

All reading is post-processing: it uses opened totals and the public deviations of their noise, and nothing of
what the sums were before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tightframe.errors import RunError
from tightframe.learning.one_sum.feature_sums import FrozenSums
from tightframe.phases import Field, Totals

PREFIX = "released/"
BOUND = 2.0**21
"""Bound of each number of a silo's term: 2^20 records or patients, and the noise."""
DEVIATIONS = "deviations"
"""Totals that ``rounds.riders.noisy_sums`` adds: ``PREFIX + part + "/deviations"``, ()."""
TOLD = 3.0
"""From so many deviations of its noise on, a count or a class sum tells a class from none."""


@dataclass(frozen=True)
class NoisySums:
    """An opened release, read.

    Attributes:
        sums: G symmetric, B and n, as they are to be solved; zero rows of classes that are not known. Its
            ``noise`` is the spectral norm that noise alone gives G.
        kept: the share of the released class means' spread that is not noise, from 0 to 1.
    """

    sums: FrozenSums
    kept: float


def noisy_fields(classes: int, width: int, *, products: bool) -> tuple[Field, ...]:
    """Return the fields of a release, none of them static: noise protects them, whatever the cohort.

    Args:
        width: d.
        products: whether G is released.
    """
    shapes: dict[str, tuple[int, ...]] = {"sums": (classes, width), "counts": (classes,)}
    if products:
        shapes = {"diagonal": (width,), "products": (width * (width - 1) // 2,), **shapes}
    return tuple(
        Field(PREFIX + name, shape, bound=BOUND, mechanism="frozen_sums")
        for name, shape in shapes.items()
        if 0 not in shape  # a single feature has no products with others
    )


def read(totals: Totals) -> NoisySums:
    """Return G, B and n from an opened release.

    Counts are drawn towards their mean, and class means towards theirs, by the share of their spread that
    noise explains (as James and Stein do): an error of a count scales its class mean, and noise makes class
    means longer. No count is below the length of its class sum, since features are no longer than 1. A class
    of which neither count nor class sum is ``TOLD`` deviations from nothing is left out.

    Raises:
        RunError: TF-510 if fewer than two classes can be told from none.
    """
    sums, counts = (torch.as_tensor(totals[PREFIX + name]).double() for name in ("sums", "counts"))
    of_sums, of_counts = (float(totals[f"{PREFIX}{name}/{DEVIATIONS}"]) for name in ("sums", "counts"))
    width = sums.shape[1]
    # What |B_c|^2 is above that of noise alone, whose own deviation is sqrt(2 d) squared deviations.
    squares = sums.square().sum(1) - width * of_sums**2
    known = (counts >= max(TOLD * of_counts, 0.5)) | (squares > TOLD * math.sqrt(2 * width) * of_sums**2)
    if (classes := int(known.sum())) < 2:
        raise RunError(
            f"Expected noisy sums of two classes at least, but noise hides all but {classes}: a class needs "
            f"about {math.ceil(TOLD * of_counts)} records. Allow more epsilon, or take more records.",
            code="TF-510",
        )
    drawn = _towards_mean(counts[known], of_counts)
    records = torch.zeros_like(counts)
    records[known] = torch.maximum(drawn, squares[known].clamp_min(0).sqrt()).clamp_min(1)
    shrunk, kept = _shrunk(torch.where(known[:, None], sums, 0.0), records, of_sums)
    return NoisySums(FrozenSums(_gram(totals, width), shrunk, records, noise=_noise(totals, width)), kept)


def _towards_mean(counts: torch.Tensor, deviation: float) -> torch.Tensor:
    mean = counts.mean()
    spread = float((counts - mean).square().sum())
    explained = (len(counts) - 1) * deviation**2
    return mean + max(0.0, 1 - explained / max(spread, 1e-12)) * (counts - mean)


def _shrunk(sums: torch.Tensor, counts: torch.Tensor, deviation: float) -> tuple[torch.Tensor, float]:
    """Return class sums (C, d) whose means are drawn towards the common one, and the share that is kept."""
    means = sums / counts.clamp_min(1)[:, None]
    common = sums.sum(0) / counts.sum()
    apart = torch.where((counts > 0)[:, None], means - common, 0.0)
    spread = float((counts * apart.square().sum(1)).sum())
    explained = sums.shape[1] * deviation**2 * float((1 / counts[counts > 0]).sum())
    kept = max(0.0, 1 - explained / max(spread, 1e-12))
    return counts[:, None] * (common + kept * apart), kept


def _gram(totals: Totals, width: int) -> torch.Tensor | None:
    if PREFIX + "diagonal" not in totals:
        return None
    upper = torch.zeros(width, width, dtype=torch.float64)
    if width > 1:
        rows, columns = torch.triu_indices(width, width, offset=1)
        upper[rows, columns] = torch.as_tensor(totals[PREFIX + "products"]).double()
    return upper + upper.T + torch.as_tensor(totals[PREFIX + "diagonal"]).double().diag()


def _noise(totals: Totals, width: int) -> float:
    """Return ``s sqrt(2 d)``, the semicircle's edge of symmetric noise of deviation s on the diagonal."""
    name = f"{PREFIX}diagonal/{DEVIATIONS}"
    return float(totals[name]) * math.sqrt(2 * width) if name in totals else 0.0
