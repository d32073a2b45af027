"""Per-class sums of features under differential privacy: clip, grid, sum, noise, and reading them.

The order at a silo is fixed: clip every record's feature vector to norm B, truncate it to the integer grid,
add in int64, then add the silo's share of the noise. For any record, its part of the sums is within the
sensitivity of ``class_sums_plan``; nothing here depends on a record in any other way, and nothing refuses
because of one, since a refusal would disclose it as well. Every class is offered: the floor on the *noisy*
counts replaces all thresholds on true ones.

Noise is never added to a class *mean*: one record of a small class moves all of it, so that its sensitivity
has no useful bound. Means are read from noisy sums: the server's half, ``ReleaseAverage``, reads totals and
public numbers only, which costs no privacy.

Numbers of records by themselves are released once: the prior of FedETF's loss, and pooled counts. A loss that
uses a silo's true class counts is not a sum over records: one record changes the prior of all others. With
counts that were released once with noise, and charged, it is. One record changes one count by 1, and a
patient's contribution is clipped to an L2 norm of 1, so the sensitivity is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tightframe.errors import TightframeError
from tightframe.privacy.discrete_gaussian import discrete_gaussian
from tightframe.privacy.events import PrivacyValueError, number, whole
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.privacy.releases.noise import MAX_SILOS, variance_of_share

_MARGIN = 1 - 2.0**-32
"""A float64 norm of up to a million numbers is accurate to ``2**-33`` in any order of addition, so a norm
below this share of a bound is below the bound."""
_COUNT_DEVIATIONS = 3.0
"""Standard deviations of its noise below which a count does not distinguish a class from an empty one."""


class SensitivityError(TightframeError):
    """A record's or patient's term of a sum is over the bound that was charged for (TF-721)."""

    code = "TF-721"


def clip_features(features: torch.Tensor, bound: float) -> torch.Tensor:
    """Scale each record's feature vector down to an L2 norm of at most ``bound``.

    Args:
        features: (B, d), any floating type; a record with a value that is not finite becomes zero, because a
            refusal would disclose it.
        bound: B.

    Returns:
        (B, d) float64, detached.

    >>> clip_features(torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0]]), 1.0).round(decimals=6)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    values = features.detach().to(torch.float64)
    values = torch.where(values.isfinite().all(1, keepdim=True), values, 0.0)
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    limit = bound * _MARGIN
    # An infinite norm (of numbers above 1e154) leaves zero.
    return values * torch.where(norms > limit, limit / norms, 1.0)


def on_grid(features: torch.Tensor, bits: int, bound: float) -> torch.Tensor:
    """Truncate to the grid, ``trunc(features * 2**bits)``: towards zero, so that no norm grows.

    Args:
        features: (B, d) float64, clipped to ``bound``.
        bits: fraction bits f of the grid.
        bound: B; the integers' norms are at most ``floor(B * 2**f)``, which is checked in integers.

    Returns:
        (B, d) int64.

    Raises:
        SensitivityError: TF-721, if a record was not clipped.
        PrivacyValueError: TF-700, if the check would not fit into 64 bits.
    """
    limit = math.floor(math.ldexp(bound, bits))
    _check_width(features.shape[1], limit)
    scaled = torch.trunc(features.to(torch.float64) * 2.0**bits)
    # Also false for NaN. Beyond the limit the conversion, or the squares below, could wrap around.
    inside = bool((scaled.abs() <= limit).all())
    whole_numbers = torch.where(scaled.abs() <= limit, scaled, 0.0).to(torch.int64)
    if not inside or bool(((whole_numbers**2).sum(1) > limit**2).any()):
        raise SensitivityError(
            f"Expected features clipped to norm {bound:g}, but got larger ones. Nothing was released; "
            "clip them with `clip_features` first."
        )
    return whole_numbers


def class_sums(
    features: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    config: ClassSumsConfig,
    *,
    patients: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the released vector before its noise: ``(S_c, lambda_int N_c)`` of every class c.

    With ``neighbours="record"`` the sums of parts of the records may be added. With ``"patient"``, all
    records of a patient must be in one call, since a patient's contribution is clipped as a whole.

    Args:
        features: (B, d); each *distinct* record once, since a repeated record counts twice.
        labels: (B,) int64 in [0, C).
        patients: (B,) int64, patient of each record; only for ``neighbours="patient"``.

    Returns:
        (C, d + 1) int64, on the CPU.

    Raises:
        PrivacyValueError: TF-700, if patients are missing or not expected, or the grid is too fine.
        SensitivityError: TF-721, only by an error of this program.
    """
    _check_patients(config, patients)
    clipped = clip_features(features, config.feature_limit / config.grid)
    rows = on_grid(clipped, config.fractional_bits, config.feature_limit / config.grid)
    counts = torch.full((len(rows), 1), config.count_units, dtype=torch.int64, device=rows.device)
    terms = torch.cat([rows, counts], 1)
    return summed(terms, labels, num_classes, config.squared_sensitivity, patients)


def noise_for(shape: tuple[int, ...], config: ClassSumsConfig, honest: int) -> torch.Tensor:
    """Draw one silo's share of a release's noise, from the operating system's generator.

    Charge the release to the ledger before this is called.

    Args:
        shape: of the sums, (C, d + 1).
        honest: s - c: the shares of so many silos carry the promised variance ``z**2 D**2`` together.

    Returns:
        int64 tensor of that shape.

    Raises:
        RandomnessError: TF-720, if the operating system gives no random numbers.
    """
    return torch.from_numpy(config.share(shape, honest))


def summed(
    terms: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    squared_limit: int,
    patients: torch.Tensor | None,
) -> torch.Tensor:
    """Add the records' terms for every class.

    Args:
        terms: (B, w) int64, each of squared norm ``squared_limit`` at most.
        labels: (B,) int64 in [0, C).
        squared_limit: ``D**2``.
        patients: (B,), for the patient level: then all terms of a patient together are within D.

    Returns:
        (C, w) int64, on the CPU.

    Raises:
        PrivacyValueError: TF-700, for invalid labels.
        SensitivityError: TF-721.
    """
    check_labels(labels, len(terms), num_classes)
    labels = labels.to(terms.device)
    if patients is not None:
        terms, labels = _clip_patients(terms, labels, num_classes, squared_limit, patients.to(terms.device))
    sums = torch.zeros(num_classes, terms.shape[1], dtype=torch.int64, device=terms.device)
    return sums.index_add_(0, labels, terms).cpu()


def check_labels(labels: torch.Tensor, records: int, num_classes: int) -> None:
    """Refuse labels that are not one of the classes for each record.

    Raises:
        PrivacyValueError: TF-700.
    """
    # A label out of range would also count for the next patient.
    if labels.shape != (records,) or bool(((labels < 0) | (labels >= num_classes)).any()):
        raise PrivacyValueError(
            f"Expected a label from 0 to {num_classes - 1} for each record, but got others. "
            "Check how the records were read."
        )


def _check_width(width: int, limit: int) -> None:
    if max(width, 1) * limit**2 >= 2**63:
        raise PrivacyValueError(
            f"Expected the squared norm of {width} integers to fit into 64 bits, but a norm may be "
            f"2**{math.log2(limit):.1f}. Use fewer `fractional_bits` or a smaller `feature_clip`."
        )


def _check_patients(config: ClassSumsConfig, patients: torch.Tensor | None) -> None:
    if (patients is not None) != (config.neighbours == "patient"):
        raise PrivacyValueError(
            f"Expected patients {'for' if patients is None else 'only for'} neighbours='patient', but got "
            f"{'none' if patients is None else 'some'} for {config.neighbours!r}. "
            "Give them, or change what is to be hidden."
        )


def _clip_patients(
    terms: torch.Tensor, labels: torch.Tensor, num_classes: int, squared_limit: int, patients: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each patient's terms down so that together they are within D.

    Returns:
        (P, w) int64, a row for each pair of a patient and a class, and the rows' classes (P,).
    """
    _check_width(num_classes * terms.shape[1], math.isqrt(squared_limit) + 1)
    people, person = torch.unique(patients, return_inverse=True)
    pairs, pair = torch.unique(person * num_classes + labels, return_inverse=True)
    owner, classes = pairs // num_classes, pairs % num_classes
    rows = torch.zeros(len(pairs), terms.shape[1], dtype=torch.int64, device=terms.device)
    rows.index_add_(0, pair, terms)
    # A patient already within D, in integers, is not changed.
    over = _squared_norms(rows, owner, len(people), squared_limit) > squared_limit
    squares = torch.zeros(len(people), dtype=torch.float64, device=rows.device)
    squares.index_add_(0, owner, (rows.to(torch.float64) ** 2).sum(1))
    factors = math.sqrt(squared_limit) * _MARGIN / squares.sqrt()
    scaled = torch.trunc(rows.to(torch.float64) * factors[owner, None]).to(torch.int64)
    rows = torch.where(over[owner, None], scaled, rows)
    if bool((_squared_norms(rows, owner, len(people), squared_limit) > squared_limit).any()):
        raise SensitivityError(
            "Expected what every patient adds to be within the sensitivity after clipping, but got more. "
            "Nothing was released; report this."
        )
    return rows, classes


def _squared_norms(rows: torch.Tensor, owner: torch.Tensor, people: int, squared_limit: int) -> torch.Tensor:
    """Return each patient's squared norm in integers: exact up to the limit, else any value above it."""
    # One integer beyond D exceeds the limit by itself, and its square is kept from wrapping around.
    beyond = math.isqrt(squared_limit) + 1
    squares = rows.clamp(-beyond, beyond) ** 2
    norms = torch.zeros(people, dtype=torch.int64, device=rows.device)
    return norms.index_add_(0, owner, squares.sum(1))


COUNT_GRID = 2**20
"""Units in one record: counts get noise on a grid this fine, since noise in whole records would need coarse
rounding."""


def class_counts(
    labels: torch.Tensor, num_classes: int, *, patients: torch.Tensor | None = None
) -> torch.Tensor:
    """Count records of each class, without noise, in units of ``1 / COUNT_GRID``.

    Args:
        labels: (B,) int64 in [0, C); each *distinct* record once.
        patients: (B,) int64, of each record, to hide patients. All records of a patient then count 1
            together, as an L2 norm over the classes; without it, each record counts 1.

    Returns:
        (C,) int64; sensitivity ``COUNT_GRID``.

    Raises:
        PrivacyValueError: TF-700, for a label that is not one.

    >>> (class_counts(torch.tensor([0, 2, 2]), 3) / COUNT_GRID).tolist()
    [1.0, 0.0, 2.0]
    """
    ones = torch.full((len(labels), 1), COUNT_GRID, dtype=torch.int64, device=labels.device)
    return summed(ones, labels, num_classes, COUNT_GRID**2, patients)[:, 0]


def count_noise(num_classes: int, noise_multiplier: float, honest: int) -> torch.Tensor:
    """Draw one silo's share of the noise: int64 (C,). Charge ``Gaussian(noise_multiplier)`` before.

    Args:
        noise_multiplier: z.
        honest: s - c where the counts are summed over silos; 1 where this silo's own are used.

    Raises:
        RandomnessError: TF-720, if the operating system gives no random numbers.
    """
    variance = variance_of_share(noise_multiplier, COUNT_GRID**2, honest)
    return torch.from_numpy(discrete_gaussian(variance, (num_classes,)))


def read_counts(total: torch.Tensor) -> torch.Tensor:
    """Return numbers of records, float64 (C,), from noisy units; at least 1: a prior takes logarithms."""
    return (total.to(torch.float64) / COUNT_GRID).clamp_min(1.0)


def noisy_counts(
    labels: torch.Tensor, num_classes: int, noise_multiplier: float, *, patients: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a silo's own class prior: its counts with all of the noise, float64 (C,), 1 at least.

    It never leaves the silo by itself, but models trained with it do: charge ``Gaussian(noise_multiplier)``
    once, before this is called, and use the result in all rounds.

    Args:
        labels: (B,) int64 in [0, C); each *different* record once.
        noise_multiplier: z; the sensitivity is 1.
        patients: (B,) int64, to hide patients.
    """
    units = class_counts(labels, num_classes, patients=patients)
    return read_counts(units + count_noise(num_classes, noise_multiplier, honest=1))


@dataclass(frozen=True)
class ClassReading:
    """Class means and counts of a release.

    Attributes:
        means: (C, d) float64, class means of the clipped features, of norm B at most; zero where not usable.
        counts: (C,) float64, noisy numbers of records, 1 at least.
        usable: (C,) bool, which classes are above the floor.
    """

    means: torch.Tensor
    counts: torch.Tensor
    usable: torch.Tensor


@dataclass(frozen=True)
class ReleaseAverage:
    """The average of a job's releases so far: R of them have the noise of one with the whole budget.

    Older releases are of older models, so each may count less than the next one: by ``decay``. All of its
    state is tensors, which a server's state keeps from round to round.

    Attributes:
        total: (C, d + 1) float64, weighted sum of the releases, in units of the grid.
        weight: () float64, sum of their weights.
        noise: () float64, summed variance of their noise, in units of ``z**2 D**2``.
    """

    total: torch.Tensor
    weight: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def empty(cls, num_classes: int, width: int) -> ReleaseAverage:
        """Return an average without a release; ``width`` is d + 1."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(torch.zeros(num_classes, width, dtype=torch.float64), zero, zero.clone())

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> ReleaseAverage:
        """Restore an average from its ``state``."""
        return cls(state["total"], state["weight"], state["noise"])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {"total": self.total, "weight": self.weight, "noise": self.noise}

    def add(
        self, total: torch.Tensor, *, silos: int = 1, honest: int = 1, decay: float = 1.0
    ) -> ReleaseAverage:
        """Return the average with one more release.

        Args:
            total: (C, d + 1) int64.
            honest: s - c, as it was for ``noise_for``.
            decay: weight of earlier releases relative to this one; 1 is the plain average, 0 this one alone.

        Raises:
            PrivacyValueError: TF-700, for another shape or a decay outside of [0, 1].
        """
        if total.shape != self.total.shape or total.dtype != torch.int64:
            raise PrivacyValueError(
                f"Expected a release of shape {tuple(self.total.shape)} in int64, but got "
                f"{tuple(total.shape)} in {total.dtype}. Give the opened integers of the same job."
            )
        number("decay", decay, 0.0, 1.0)
        share = whole("silos", silos, 1, MAX_SILOS) / whole("honest", honest, 1, MAX_SILOS)
        return ReleaseAverage(
            self.total * decay + total.to(torch.float64),
            self.weight * decay + 1,
            self.noise * decay**2 + share,
        )

    def read(self, config: ClassSumsConfig) -> ClassReading:
        """Return class means and counts of the average: post-processing, which costs no privacy.

        A class is usable if its noisy count is at least ``count_floor`` and at least three standard
        deviations of the count's noise, so that of 700 empty classes one gets a mean of noise alone. Means
        longer than B are shortened to B, which can only bring them closer to the true ones.

        Raises:
            PrivacyValueError: TF-700, if there is no release yet.
        """
        weight = float(self.weight)
        if weight == 0:
            raise PrivacyValueError("Expected a release to read, but got none yet. Add one first.")
        average = self.total / weight
        counts = average[:, -1] / config.count_units
        sums = average[:, :-1] / config.grid
        # z D / lambda_int records: the standard deviation of a count's noise in one promised total.
        promised = config.noise_multiplier * math.sqrt(config.squared_sensitivity) / config.count_units
        deviation = promised * math.sqrt(float(self.noise)) / weight
        usable = counts >= max(config.count_floor, _COUNT_DEVIATIONS * deviation)
        counts = counts.clamp_min(1.0)
        means = sums / counts[:, None]
        norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
        means = means * torch.where(norms > config.feature_clip, config.feature_clip / norms, 1.0)
        return ClassReading(torch.where(usable[:, None], means, 0.0), counts, usable)
