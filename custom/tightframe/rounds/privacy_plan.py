"""Plan of a job with differential privacy: its releases and their noise, from the job alone.

The plan is the same at server and silos, except for the noise of training, which each silo solves for its own
number of records. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tightframe.config.job import JobConfig, Privacy
from tightframe.metrics.clinical import class_floor
from tightframe.phases import Field, Phase, PrivacySetting
from tightframe.privacy import accounting
from tightframe.privacy.events import Event, Gaussian, SubsampledGaussian
from tightframe.privacy.releases import class_sums_plan as release_plan
from tightframe.privacy.releases import evaluation_totals, frozen_sums_plan, gradient_sums
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig, release_rounds
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig, EvaluationPlan
from tightframe.privacy.releases.frozen_sums_plan import FrozenSumsConfig
from tightframe.privacy.releases.gradient_sums import GradientSumConfig
from tightframe.privacy.releases.table_statistics import StatisticsConfig, check_bound
from tightframe.results.words import plural
from tightframe.securesum.rules import honest_sites

CLASS_COUNTS = "class counts"


@dataclass(frozen=True)
class PrivacyPlan:
    """Releases of every silo in a job.

    Attributes:
        releases: rounds in which class sums are released; empty if the method has no class sums.
        prior: whether the method uses the silo's own class counts, made noisy once.
        spare: number of releases of class sums that may be repeated.
        class_noise: noise multiplier of each release of class sums or counts; None if there are none.
        evaluation: the noisy evaluations; None where the evaluation stays at the silos.
        gradients: of the noisy sum of gradients in each round; None where silos train.
        frozen: the release of sums of frozen features; None if the job has none.
        trains: whether silos train, by DP-SGD.
        statistics: the release of statistics of tables; None if the job has none.
    """

    privacy: Privacy
    releases: tuple[int, ...]
    prior: bool
    spare: int
    class_noise: float | None
    evaluation: EvaluationPlan | None = None
    gradients: GradientSumConfig | None = None
    frozen: FrozenRelease | None = None
    trains: bool = True
    statistics: StatisticsRelease | None = None

    @property
    def class_sums(self) -> ClassSumsConfig:
        """Settings of the release of class sums.

        Raises:
            ValueError: if the method has no class sums.
        """
        if self.class_noise is None:
            raise ValueError("Expected a method with class sums, but this one releases none.")
        return ClassSumsConfig(
            noise_multiplier=self.class_noise,
            feature_clip=self.privacy.feature_clip,
            releases=max(1, len(self.releases)),
            neighbours=self.privacy.neighbours,
        )

    @property
    def class_events(self) -> tuple[Event, ...]:
        """Privacy events of class sums and class counts, repeats included."""
        if self.class_noise is None:
            return ()
        return (Gaussian(self.class_noise),) * (len(self.releases) + self.spare + self.prior)

    @property
    def number_of_releases(self) -> int:
        """Number of releases other than training, without repeats."""
        evaluations = 0 if self.evaluation is None else len(self.evaluation.after)
        single = (self.frozen is not None) + (self.statistics is not None)
        return len(self.releases) + self.prior + single + evaluations

    @property
    def release_events(self) -> tuple[Event, ...]:
        """Privacy events of all releases but training, repeats included."""
        others = (self.frozen, self.evaluation, self.statistics)
        return (*self.class_events, *(event for plan in others if plan is not None for event in plan.events))

    def training_noise(self, sampling_rate: float, steps: int) -> float:
        """Return the noise multiplier of DP-SGD with which a silo's whole job stays within its epsilon.

        Args:
            sampling_rate: probability that a record, or patient, is in a step's batch.
            steps: number of steps in the whole job.

        Raises:
            BudgetError: TF-701 if no noise is enough.
        """
        if self.privacy.noise_multiplier is not None:
            return self.privacy.noise_multiplier
        return accounting.solve(
            lambda noise: [SubsampledGaussian(noise, sampling_rate, steps)],
            epsilon=self.privacy.epsilon,
            delta=self.privacy.delta,
            spent=self.release_events,
        )

    def training_shares(self, honest: int) -> int:
        """Return the number of shares of training's noise: s - c, or 1 where each silo adds all of it."""
        return honest if self.privacy.noise == "shared" else 1

    @property
    def counts_on_others(self) -> bool:
        """Check whether other silos add some of the noise that protects a silo's records."""
        joint = (self.class_noise, self.frozen, self.evaluation, self.statistics)
        return self.privacy.noise == "shared" or any(part is not None for part in joint)

    def training_in_words(self) -> str:
        """Describe the protection of the training, as part of a line."""
        if self.gradients is None:
            return "DP-SGD"
        rate = self.gradients.sampling_rate
        drawn = "all records" if rate >= 1 else f"records drawn at rate {rate:g}"
        unit = drawn.replace("record", self.privacy.neighbours)
        shared = "noise shared by all silos" if self.privacy.noise == "shared" else "each silo's own noise"
        return f"one sum of gradients a round of {unit}, z {self.gradients.noise_multiplier:g}, {shared}"

    def describe(self) -> str:
        """Describe the plan in one line."""
        extra = [f"class sums in {plural(len(self.releases), 'round')}"] if self.releases else []
        extra += ["class counts once"] if self.prior else []
        extra += ["sums of frozen features once, for the start"] if self.frozen is not None else []
        others = f", beside it noisy {' and '.join(extra)}" if extra else ""
        how = f"{self.training_in_words()}, gradients clipped to {self.privacy.clip_norm:g}{others}"
        if not self.trains:
            how = "no training" if self.frozen is None else self.frozen.describe()
        local = "evaluation stays at the silos"
        evaluation = local if self.evaluation is None else self.evaluation.describe()
        if self.statistics is not None:
            how, evaluation = self.statistics.describe(), "no training"
        return (
            f"differential privacy: each silo at most epsilon {self.privacy.epsilon:g} at delta "
            f"{self.privacy.delta:g} in this job, for one {self.privacy.neighbours} more or less; {how}; "
            f"{evaluation}"
            + (
                "; it counts on noise that other silos add, see each silo's report"
                if self.counts_on_others
                else ""
            )
        )


def public_setting(job: JobConfig) -> PrivacySetting | None:
    """Return the part of a job's privacy that methods see; None without privacy."""
    if job.privacy is None:
        return None
    if not job.rounds:
        return PrivacySetting(job.privacy.feature_clip, ())
    rounds = release_plan.release_rounds(job.rounds, job.privacy.releases)
    return PrivacySetting(job.privacy.feature_clip, rounds)


def make_plan(
    job: JobConfig,
    phases: Iterable[tuple[int, Sequence[Phase]]],
    *,
    prior: bool,
    num_classes: int,
    findings: bool = False,
    gradient_rate: float | None = None,
) -> PrivacyPlan:
    """Make the plan of a job whose ``privacy`` is set.

    Args:
        phases: number and phases of each training round; of round 0 those before the first.
        prior: whether the method's loss uses the silo's class counts.
        findings: whether the classes are findings, of which a record may have several.
        gradient_rate: of a method whose round is one sum of gradients, see ``phases.Method``.

    Raises:
        BudgetError: TF-701 if no noise is enough.
        ContributionError: TF-404 if a class sum, an evaluation or a sum of gradients could wrap around.
    """
    privacy, phases = job.privacy, tuple(phases)
    if privacy is None:
        raise ValueError("Expected a job with `privacy`, but it has none.")
    fields = [(number, item) for number, of in phases for phase in of for item in phase.schema.fields]
    releases = tuple(dict.fromkeys(number for number, item in fields if is_class_sum(item)))
    frozen = [item for _, item in fields if is_frozen_sum(item)]
    trains = (job.evaluate_only is None and job.statistics is None) and (
        not frozen or gradient_rate is not None or any(item.mechanism == "training" for _, item in fields)
    )
    spare = privacy.spare_rounds if releases else 0
    number = len(releases) + spare + prior
    if frozen and trains:
        number += 1 + privacy.spare_rounds
    noise = None
    if number:
        noise = accounting.solve(
            lambda multiplier: [Gaussian(multiplier)] * number,
            epsilon=privacy.epsilon * privacy.class_noise_share,
            delta=privacy.delta,
        )
    evaluation = plan_evaluation(job, num_classes, findings=findings)
    plan = PrivacyPlan(privacy, releases, prior, spare, noise, evaluation, trains=trains)
    if frozen:
        plan = replace(plan, frozen=plan_frozen(job, plan, frozen))
    if releases:
        release_plan.wrap_bound(plan.class_sums, MAX_RECORDS, len(job.sites), honest=1)
    if gradient_rate is not None:
        plan = replace(plan, gradients=_plan_gradients(job, plan, phases, gradient_rate))
    return plan


def _plan_gradients(
    job: JobConfig, plan: PrivacyPlan, phases: Sequence[tuple[int, Sequence[Phase]]], rate: float
) -> GradientSumConfig:
    """Return the settings of a job's noisy sums of gradients: the same noise in all rounds and at all silos.

    Public numbers alone decide it: epsilon, rounds and the sampling rate.
    """
    first = next(of for number, of in phases if number)
    fields = [item for phase in first for item in phase.schema.fields if is_gradient_sum(item)]
    noise = plan.training_noise(rate, job.rounds + plan.privacy.spare_rounds)
    size = sum(item.size for item in fields) - 1  # one is the number of records
    config = GradientSumConfig(noise, size, rate)
    gradient_sums.check_sum(config, MAX_RECORDS, len(job.sites), min(item.bound for item in fields))
    return config


def is_class_sum(item: Field) -> bool:
    """Check whether a field carries noisy class sums."""
    return item.mechanism == "class_sums"


def is_gradient_sum(item: Field) -> bool:
    """Check whether a field carries a noisy sum of clipped gradients, or the number of records in it."""
    return item.mechanism == "gradient_sum"


def is_frozen_sum(item: Field) -> bool:
    """Check whether a field carries noisy sums of frozen features."""
    return item.mechanism == "frozen_sums"


def honest_silos(job: JobConfig, enrolled: int) -> int:
    """Return the least number of honest silos in any sum that can be opened, s - c; 1 for plain sums.

    s is the smallest sum that silos open (``JobConfig.smallest_sum``): the threshold, ``min_sites`` if that
    is more, and all that enrolled where sums open whole only. It follows from the job and the roster, so that
    each silo knows it before it draws its share.

    The server of plain sums sees each silo's own term, so each silo adds all of the noise.

    Args:
        enrolled: number of silos enrolled.
    """
    if job.summation == "plain":
        return 1
    return honest_sites(job.smallest_sum(enrolled), job.assumed_colluders(enrolled))


def noise_of_scores(job: JobConfig, plan: PrivacyPlan) -> tuple[float, float]:
    """Return the noise of a job's noisy evaluations, of all its sites together, in test records.

    Returns:
        Its standard deviation in each cell, and the fewest records of a class whose scores are read.

    Raises:
        ValueError: if the plan has no noisy evaluation.
    """
    if plan.evaluation is None:
        raise ValueError("Expected a job with noisy evaluations, but its evaluation is local.")
    config, parties = plan.evaluation.config, len(job.sites)
    cell = config.deviation(silos=parties, honest=honest_silos(job, parties))
    return cell, class_floor(cell, 2 if config.findings else config.num_classes)


HIDDEN = (
    "the noise of {cell:.1f} records a cell hides scores {of}: a class needs {floor:.0f} test records in all "
    "sites together. Raise privacy.evaluation_noise_share or privacy.epsilon, or keep the evaluation local "
    "(privacy.evaluation=local)"
)
MAX_RECORDS = 2**24
"""Public limit on one silo's records, for which the sums cannot wrap around."""


def plan_evaluation(job: JobConfig, num_classes: int, *, findings: bool = False) -> EvaluationPlan | None:
    """Plan the noisy evaluations of a job; None if it has none.

    Raises:
        BudgetError: TF-701 if no noise is enough.
        ContributionError: TF-404 if a total could wrap around.
    """
    privacy = job.privacy
    if privacy is None or privacy.evaluation != "noisy":
        return None
    after = release_rounds(job.rounds, privacy.evaluations, predicts=True) if job.rounds else (0,)
    number = len(after) + privacy.spare_rounds
    noise = accounting.solve(
        lambda multiplier: [Gaussian(multiplier)] * number,
        # All of it where nothing trains.
        epsilon=privacy.epsilon * (privacy.evaluation_noise_share if job.rounds else 1.0),
        delta=privacy.delta,
    )
    config = EvaluationConfig(noise, num_classes, findings)
    bound = evaluation_totals.term_bound(config, MAX_RECORDS, len(job.sites))
    return EvaluationPlan(config, after, privacy.spare_rounds, bound)


@dataclass(frozen=True)
class _OneRelease:
    """A release that a job makes once.

    Attributes:
        spare: number of times that it may be repeated.
    """

    config: StatisticsConfig | FrozenSumsConfig
    spare: int

    @property
    def events(self) -> tuple[Gaussian, ...]:
        """Privacy events of the release, repeats included."""
        return self.config.events(1 + self.spare)


@dataclass(frozen=True)
class StatisticsRelease(_OneRelease):
    """The one release of statistics of tables in a job."""

    config: StatisticsConfig

    def describe(self) -> str:
        """Describe the release in a part of a line."""
        return (
            "one noisy release of counts, sums and squares (noise multiplier "
            f"{self.config.noise_multiplier:g})"
        )


def with_statistics(plan: PrivacyPlan, job: JobConfig, *, columns: int, numbers: int) -> PrivacyPlan:
    """Return the plan with the release of statistics, which takes all of epsilon.

    Args:
        plan: of a job that releases nothing else.
        job: with ``privacy``.
        columns: K, of the contract.
        numbers: N, those of them that are numbers.

    Raises:
        BudgetError: TF-701 if no noise is enough.
        ContributionError: TF-404 if a total could exceed its bound.
    """
    privacy = plan.privacy
    noise = privacy.noise_multiplier
    if noise is None:
        noise = accounting.solve(
            lambda multiplier: [Gaussian(multiplier)] * (1 + privacy.spare_rounds),
            epsilon=privacy.epsilon,
            delta=privacy.delta,
        )
    config = StatisticsConfig(noise, columns=columns, numbers=numbers)
    check_bound(config, MAX_RECORDS, len(job.sites))
    return replace(plan, statistics=StatisticsRelease(config, privacy.spare_rounds))


@dataclass(frozen=True)
class FrozenRelease(_OneRelease):
    """The one release of sums of frozen features in a job."""

    config: FrozenSumsConfig

    def describe(self) -> str:
        """Describe the release of a job that trains nothing in a part of a line."""
        summed = "products, class sums and class counts" if self.config.products else "class sums and counts"
        return (
            f"one noisy release of {summed} of frozen features (noise multiplier "
            f"{self.config.noise_multiplier:g}), and no training"
        )


def plan_frozen(job: JobConfig, plan: PrivacyPlan, fields: Sequence[Field]) -> FrozenRelease:
    """Plan the release of sums of frozen features.

    Where silos train nothing, it takes all of epsilon except what evaluations need; as the start of a method
    that trains, it takes its part of ``class_noise_share``.

    Args:
        job: with ``privacy``.

    Raises:
        BudgetError: TF-701 if no noise is enough.
        ContributionError: TF-404 if a sum could exceed its bound.
    """
    privacy = plan.privacy
    noise = plan.class_noise if plan.trains else privacy.noise_multiplier
    if noise is None:
        noise = accounting.solve(
            lambda multiplier: [Gaussian(multiplier)] * (1 + privacy.spare_rounds),
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            spent=plan.release_events,
        )
    config = FrozenSumsConfig(
        noise,
        products=any(item.name.endswith("/diagonal") for item in fields),
        product_weight=privacy.product_weight,
        count_weight=privacy.count_weight,
        neighbours=privacy.neighbours,
    )
    for item in fields:
        frozen_sums_plan.check_bound(config, item.bound, len(job.sites))
    return FrozenRelease(config, privacy.spare_rounds)
