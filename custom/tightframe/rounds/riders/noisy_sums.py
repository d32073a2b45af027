"""The server's reading of noisy sums. There is no silo half: ``PrivateSilo`` adds the noise.

*Class sums* are averaged over releases, clipped, and used only above a floor: a method's ``update`` gets sums
and numbers of records, as without privacy, but averaged over all releases so far.

*Gradients*: a method's ``update`` gets the mean gradient times the number of silos, as without privacy. The
divisor is the number of participating records (or patients), from all noisy numbers opened so far: never an
exact one, and never below the standard deviation of its own noise.

*Sums of frozen features* come with the public deviations of their noise, which tell a method how noisy the
totals are. They follow from the job and the cohort alone.

All of it follows from opened totals and costs no privacy budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tightframe.config.job import JobConfig
from tightframe.learning.gradients.sharing import RECORDS
from tightframe.learning.model_update import named
from tightframe.learning.one_sum.noisy_sums import DEVIATIONS
from tightframe.phases import Cohort, Field, Phase, Reading, ServerState, Totals
from tightframe.privacy.releases.class_sums import ReleaseAverage
from tightframe.privacy.releases.gradient_sums import GradientSumConfig
from tightframe.rounds.privacy_plan import (
    PrivacyPlan,
    honest_silos,
    is_class_sum,
    is_frozen_sum,
    is_gradient_sum,
)

RELEASES = "privacy/releases/"


def attach_class_sums(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets noisy class sums as averages over the releases so far."""

    def read_sums(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        honest = honest_silos(job, cohort.enrolled)
        state, averaged = read_class_sums(plan, phase, state, totals, silos=cohort.size, honest=honest)
        return phase.read(state, averaged, cohort)

    return replace(phase, read=read_sums)


def read_class_sums(
    plan: PrivacyPlan, phase: Phase, state: ServerState, totals: Totals, *, silos: int, honest: int
) -> tuple[ServerState, Totals]:
    """Add a release to the state, and average the class sums over all releases for the method.

    Classes whose noisy count is below the floor get zero records, so that a method keeps its earlier values.

    Args:
        totals: as opened.
        silos: number of silos in the sum.
        honest: s - c of the enrolled silos.

    Returns:
        The state with this release, and the totals with averaged class sums.
    """
    class_fields = [item for item in phase.schema.fields if is_class_sum(item) and item.name in totals]
    if not class_fields:
        return state, totals
    sums, counts = _pair(class_fields)
    config = plan.class_sums
    numbers = np.concatenate([totals[sums.name], totals[counts.name][:, None]], 1)
    units = torch.from_numpy(config.as_units(numbers))
    earlier = named(state.extra, RELEASES)
    average = ReleaseAverage.of(earlier) if earlier else ReleaseAverage.empty(*units.shape)
    average = average.add(units, silos=silos, honest=honest)
    reading = average.read(config)
    records = torch.where(reading.usable, reading.counts, 0.0)
    changed = {
        **totals,
        sums.name: (reading.means * records[:, None]).numpy(),
        counts.name: records.numpy(),
    }
    extra = {**state.extra, **{RELEASES + name: item for name, item in average.state().items()}}
    return state.evolve(extra=extra), changed


def _pair(fields: list[Field]) -> tuple[Field, Field]:
    """Return the field of sums (C, w) and that of numbers of records (C,) among a phase's class sums.

    Raises:
        ValueError: if there is not exactly one of each.
    """
    wide = [item for item in fields if len(item.shape) == 2]
    flat = [item for item in fields if len(item.shape) == 1]
    if len(wide) != 1 or len(flat) != 1:
        raise ValueError(
            "Expected a phase to have one field (C, w) and one (C,) of class sums, but got "
            f"{[item.name for item in fields]}."
        )
    return wide[0], flat[0]


GRADIENTS = "privacy/gradient_sums/"
NUMBERS = ("records", "silos", "shares")
"""Numbers kept: the noisy number of records in all sums so far, the number of silos in them, and their noise
in shares of what is promised."""


def attach_gradients(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets noisy sums of gradients as mean gradients."""
    config = plan.gradients
    names = [item.name for item in phase.schema.fields if is_gradient_sum(item) and item.name != RECORDS]
    if config is None or not names:
        return phase

    def read_gradients(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        if RECORDS not in totals:
            return phase.read(state, totals, cohort)
        honest = honest_silos(job, cohort.enrolled) if plan.privacy.noise == "shared" else 1
        state, expected = expected_records(config, state, float(totals[RECORDS]), cohort.size, honest)
        factor = plan.privacy.clip_norm * cohort.size / expected
        changed = {**totals, **{name: totals[name] * factor for name in names}}
        return phase.read(state, changed, cohort)

    return replace(phase, read=read_gradients)


def expected_records(
    config: GradientSumConfig, state: ServerState, total: float, silos: int, honest: int
) -> tuple[ServerState, float]:
    """Return the state with one more noisy number, and the expected records of a sum over these silos.

    The number is the mean per silo over all sums so far, times the silos of this one: sums after a drop-out
    have fewer silos, and each round draws new batches.

    Args:
        total: opened, in units of the clipping norm.
        silos: in the sum.
        honest: s - c, of which each silo's noise is a share.
    """
    added = (total * config.grid / config.count_units, silos, silos / honest)
    zero = torch.zeros((), dtype=torch.float64)
    numbers = [
        float(state.extra.get(GRADIENTS + name, zero)) + more
        for name, more in zip(NUMBERS, added, strict=True)
    ]
    records, met, shares = numbers
    mean, deviation = records / met, config.records_deviation(shares, met)
    kept = {
        GRADIENTS + name: torch.tensor(value, dtype=torch.float64)
        for name, value in zip(NUMBERS, numbers, strict=True)
    }
    expected = max(mean, deviation, 1.0) * silos
    return state.evolve(extra={**state.extra, **kept}), expected


def attach_frozen_sums(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets the deviations with the totals; the same phase without such sums."""
    names = [item.name for item in phase.schema.fields if is_frozen_sum(item)]
    release = plan.frozen
    if release is None or not names:
        return phase

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        honest = honest_silos(job, cohort.enrolled)
        deviations = {
            f"{name}/{DEVIATIONS}": np.array(
                release.config.part(name).deviation(silos=cohort.size, honest=honest)
            )
            for name in names
            if name in totals
        }
        return phase.read(state, {**totals, **deviations}, cohort)

    return replace(phase, read=read)
