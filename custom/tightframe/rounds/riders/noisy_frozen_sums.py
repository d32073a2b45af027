"""The server's reading of noisy sums of frozen features: it adds the public deviations of their noise.

A method needs them to know what in the totals is noise. They follow from the job and the cohort alone. There
is no silo half: the silos' view of their records (``PrivateSilo``) adds the noise.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tightframe.config.job import JobConfig
from tightframe.learning.one_sum.noisy_sums import DEVIATIONS
from tightframe.phases import Cohort, Phase, Reading, ServerState, Totals
from tightframe.rounds.privacy_plan import PrivacyPlan, honest_silos, is_frozen_sum


def attach(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets the deviations beside the totals; the same without such sums."""
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
