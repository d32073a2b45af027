"""A silo's evaluation with noise: what it charges, draws and sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightframe.phases import Tensors
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig
from tightframe.rounds.context import SiloContext
from tightframe.rounds.evaluation import FOLDS
from tightframe.rounds.private.budget import Budget
from tightframe.rounds.private.plan import PrivacyPlan


def released(
    counted: Tensors,
    context: SiloContext,
    plan: PrivacyPlan,
    *,
    cohort: Sequence[str],
    honest: int,
    purpose: str,
) -> dict[str, torch.Tensor]:
    """A silo's term: its counts with its share of the noise, charged to its ledger before that is drawn.

    A silo without a record is charged and adds noise as all others do.

    Args:
        counted: as ``rounds.evaluation.count`` has them.
        context: of the silo.
        plan: of the job, with noisy evaluations.
        cohort: the silos enrolled.
        honest: t - c, the least number of honest silos in a sum that can be opened.
        purpose: in the ledger.

    Raises:
        BudgetError: TF-701; nothing is drawn then.
        ValueError: if the plan has no noisy evaluation.
    """
    if plan.evaluation is None:
        raise ValueError("Expected a job with noisy evaluations, but its evaluation is local.")
    config = plan.evaluation.config
    Budget(context, plan, cohort).charge(
        purpose,
        evaluation_totals.events(config, 1),
        alone=evaluation_totals.lone_event(config, honest),
    )
    return with_noise(counted, config, honest)


def with_noise(counted: Tensors, config: EvaluationConfig, honest: int) -> dict[str, torch.Tensor]:
    """The fields of ``EvaluationPlan.schema``: exact counts on the integer grid, with this silo's noise."""
    units = {"confusion": config.confusion_units, "scores": config.score_units}
    made: dict[str, torch.Tensor] = {}
    for fold in FOLDS:
        for name, unit in units.items():
            field = f"evaluation/{fold}/{name}"
            exact = evaluation_totals.in_units(counted[field].numpy(), unit)
            noisy = exact + evaluation_totals.noise_for(exact.shape, config, honest)
            made[field] = torch.from_numpy(evaluation_totals.as_numbers(noisy))
    return made
