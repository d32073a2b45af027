"""The server's reading of noisy sums of gradients: the silos' mean gradient.

A method's ``update`` gets the mean gradient times the number of silos, as without privacy. What divides the
sum is the number of records (or patients) that take part, from all noisy numbers opened so far: never an
exact one, and never below the standard deviation of its own noise. All of it follows from opened totals and
costs no privacy budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tightframe.config.job import JobConfig
from tightframe.learning.gradients.sharing import RECORDS
from tightframe.phases import Cohort, Phase, Reading, ServerState, Totals
from tightframe.rounds.privacy_plan import PrivacyPlan, honest_silos, is_gradient_sum

if TYPE_CHECKING:
    from tightframe.privacy.releases.gradient_sums import GradientSumConfig

STATE = "privacy/gradient_sums/"
NUMBERS = ("records", "silos", "shares")
"""What is kept: the noisy number of records in all sums so far, the number of silos in them, and their noise
in shares of what is promised."""


def attach(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets noisy sums of gradients as mean gradients.

    There is no silo half: the silos' view of their records (``PrivateSilo``) adds the noise.
    """
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
    """Return the state with one more noisy number, and how many records a sum over these silos expects.

    The number is the mean of a silo over all sums so far, times the silos of this one: sums after a drop-out
    have fewer silos, and each round draws anew.

    Args:
        total: opened, in units of the clipping norm.
        silos: in the sum.
        honest: s - c, of which each silo's noise is a share.
    """
    added = (total * config.grid / config.count_units, silos, silos / honest)
    zero = torch.zeros((), dtype=torch.float64)
    numbers = [
        float(state.extra.get(STATE + name, zero)) + more for name, more in zip(NUMBERS, added, strict=True)
    ]
    records, met, shares = numbers
    mean, deviation = records / met, config.records_deviation(shares, met)
    kept = {
        STATE + name: torch.tensor(value, dtype=torch.float64)
        for name, value in zip(NUMBERS, numbers, strict=True)
    }
    expected = max(mean, deviation, 1.0) * silos
    return state.evolve(extra={**state.extra, **kept}), expected
