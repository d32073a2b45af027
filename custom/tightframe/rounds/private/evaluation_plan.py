"""Which models of a job are evaluated with noise, with how much of it, and what that is charged as.

From the job alone, the same at server and silos. All evaluations are charged to the one budget of the
site's records, beside training and class sums. Test and validation records are other records than those
of training, so that parallel composition would allow less; it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightframe.config.job import JobConfig
from tightframe.phases import Field, Fold, Schema
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig
from tightframe.privacy.releases.plan import release_rounds

MAX_RECORDS = 2**24
"""A public limit of one silo's records: sums of so many cannot wrap around."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The noisy evaluations of a job.

    Attributes:
        config: of each of them.
        after: the training rounds whose models are evaluated; the last round, at the closing, is one.
        spare: evaluations that may be repeated.
        bound: of each number in a silo's term.
    """

    config: EvaluationConfig
    after: tuple[int, ...]
    spare: int
    bound: float

    @property
    def events(self) -> tuple[Gaussian, ...]:
        """What they are charged as, those that may be repeated with them."""
        return evaluation_totals.events(self.config, len(self.after) + self.spare)

    def in_round(self, number: int) -> bool:
        """Whether the model that a training round begins with is evaluated in it."""
        return number - 1 in self.after

    def schema(self, folds: Sequence[Fold], score_bins: int) -> Schema:
        """The fields: confusion (C, C) and scores (C, 2, bins) of each fold. There is no loss.

        None is static, and no class rule applies: noise, not the cohort, is what protects them.
        """
        classes = self.config.num_classes
        shapes = {"confusion": (classes, classes), "scores": (classes, 2, score_bins)}
        return Schema(
            tuple(
                Field(f"evaluation/{fold}/{name}", shape, bound=self.bound, mechanism="evaluation")
                for fold in folds
                for name, shape in shapes.items()
            )
        )

    def describe(self) -> str:
        """A part of a line for people."""
        where = [f"after round {number}" for number in self.after[:-1]]
        which = ", ".join([*where, "of the last model"]) if len(where) < 6 else f"of {len(self.after)} models"
        return f"noisy totals of the evaluation {which}"


def plan_evaluation(job: JobConfig, num_classes: int) -> EvaluationPlan | None:
    """The noisy evaluations that a job asks for; None where it has none.

    Raises:
        BudgetError: TF-701 if no noise is enough.
        ContributionError: TF-404 if a total could wrap around.
    """
    privacy = job.privacy
    if privacy is None or privacy.evaluation != "noisy":
        return None
    after = release_rounds(job.rounds, privacy.evaluations, predicts=True)
    number = len(after) + privacy.spare_rounds
    noise = accounting.solve(
        lambda multiplier: [Gaussian(multiplier)] * number,
        epsilon=privacy.epsilon * privacy.evaluation_noise_share,
        delta=privacy.delta,
    )
    config = EvaluationConfig(noise, num_classes)
    bound = evaluation_totals.term_bound(config, MAX_RECORDS, len(job.sites))
    return EvaluationPlan(config, after, privacy.spare_rounds, bound)


def purpose(kind: str, number: int) -> str:
    """What an evaluation is called in the ledger."""
    return "closing evaluation" if kind == "closing" else f"round {number} evaluation"
