"""What a job's exact evaluations tell of this silo's own records, and which smaller ones would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tightframe.learning.record_values import NUMBER_BITS
from tightframe.rounds import evaluation_bits
from tightframe.rounds.context import SiloContext
from tightframe.rounds.evaluation_bits import Evaluations
from tightframe.rounds.riders import evaluation
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.view import LocalSilo
from tightframe.securesum.site.journal import Most

BINS = (32, 16, 8, 4, 2)
"""Score bins that are tried for a job that does not fit."""


def of_silo(context: SiloContext, setup: JobSetup, device: torch.device | None = None) -> Evaluations | None:
    """Return what a job evaluates exactly at a silo; None where that is not limited.

    Of a table its training records are read, to count what varies in them; of pictures none are. What a table
    holds is bounded by its possible rows, too (``row_bits``): numbers beside columns of few values hide these
    only as far as the model shows the numbers.
    """
    if not context.limits_evaluations:
        return None
    values = None
    if len(setup.setting.input_shape) == 1:
        silo = LocalSilo(context, setup, device or torch.device("cpu"), 0)
        values = silo.record_values().clamp(max=silo.row_bits() / NUMBER_BITS).numpy()
    labels = {fold: context.data.labels(fold) for fold in evaluation.FOLDS}

    def planned(at: JobSetup) -> Evaluations:
        return evaluation_bits.of_job(at, context.policy, labels, values, context.untold())

    return replace(planned(setup), smaller=lambda left: _smaller(setup, planned, left))


def _smaller(setup: JobSetup, planned: Callable[[JobSetup], Evaluations], left: Most) -> str:
    """Say with which `evaluation` a job would fit into what is left: with most bins, and of most models."""
    own, fits = setup.job.evaluation, list[tuple[int, int]]()
    for bins in dict.fromkeys((own.score_bins, *(each for each in BINS if each < own.score_bins))):
        for models in (own.models, 6, 3, 2, 1):
            at = own.model_copy(update={"models": models, "score_bins": bins})
            job = setup.job.model_copy(update={"evaluation": at})
            if models <= own.models and planned(replace(setup, job=job)).fits(left):
                fits.append((models, bins))
                break
    if not fits:
        return "no smaller `evaluation` would fit"
    both = fits[:1] + [each for each in fits[-1:] if each[0] > fits[0][0]]
    told = [f'{{"models": {models}, "score_bins": {bins}}}' for models, bins in both]
    return f'"evaluation": {" or ".join(told)} would fit'
