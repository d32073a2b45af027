"""A ledger's report: sums by data set and job, in numbers and in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tightframe.phases import Neighbours
from tightframe.privacy.accounting import (
    Epsilons,
    counts_on_others,
    epsilons,
    fitting,
    guaranteed,
    running,
)
from tightframe.privacy.events import Event, Gaussian, SubsampledGaussian
from tightframe.privacy.ledger.entries import Charge, DataNoted, Entry, Remembered
from tightframe.results.words import NOT_COUNTED, plural, rounded_down, rounded_up, without_others

_PROTECTS = {"record": "single records (one picture, one row)", "patient": "patients, with all their records"}
_SHOWN_FACTOR = 1e6


@dataclass(frozen=True)
class JobSpending:
    """Spending of one job on one data set.

    Attributes:
        job_id: the run's id.
        name: for people.
        charges: its charges, oldest first.
        retries: number of charges that repeated a purpose.
        epsilon: of this job alone.
    """

    job_id: str
    name: str
    charges: tuple[Charge, ...]
    retries: int
    epsilon: float


@dataclass(frozen=True)
class Spending:
    """Spending on one data set.

    Attributes:
        dataset_id: the site's name of its records.
        neighbours: whom the noise protects; None if nothing was charged.
        delta: at which all epsilons are meant.
        entries: its charges, with the epsilon up to and including each.
        jobs: by job, in order of their first charge.
        spent: by all jobs together.
        alone: guaranteed epsilon if no other silo adds noise.
        fingerprints: of the records of this name.
    """

    dataset_id: str
    neighbours: Neighbours | None
    delta: float
    entries: tuple[tuple[Entry, float], ...]
    jobs: tuple[JobSpending, ...]
    spent: Epsilons
    alone: float
    fingerprints: tuple[str, ...]

    @property
    def events(self) -> list[Event]:
        """All events that were charged."""
        return [entry.content.event for entry, _ in self.entries if isinstance(entry.content, Charge)]

    def last(self, kind: type[Event]) -> Event | None:
        """Return the last event of a kind."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)


def spendings(entries: Sequence[Entry], delta: float) -> list[Spending]:
    """Return the spending on each data set, by name.

    Raises:
        PrivacyValueError: TF-700.
    """
    names = sorted(
        {entry.content.dataset_id for entry in entries if isinstance(entry.content, Charge | DataNoted)}
    )
    return [_spending(entries, name, delta) for name in names]


def _spending(entries: Sequence[Entry], dataset_id: str, delta: float) -> Spending:
    charged: list[Entry] = []
    charges: list[tuple[Charge, int]] = []
    fingerprints: list[str] = []
    for entry in entries:
        content = entry.content
        if not isinstance(content, Charge | DataNoted) or content.dataset_id != dataset_id:
            continue
        if isinstance(content, DataNoted):
            fingerprints.append(content.fingerprint)
            continue
        charges.append((content, entry.retry))
        charged.append(entry)
    costs = running([charge.event for charge, _ in charges], delta)
    jobs = []
    for job_id in dict.fromkeys(charge.job_id for charge, _ in charges):
        own = [(charge, retry) for charge, retry in charges if charge.job_id == job_id]
        cost = guaranteed([charge.event for charge, _ in own], delta)
        of_job = tuple(charge for charge, _ in own)
        jobs.append(JobSpending(job_id, own[0][0].job_name, of_job, sum(retry > 0 for _, retry in own), cost))
    return Spending(
        dataset_id,
        charges[0][0].neighbours if charges else None,
        delta,
        tuple(zip(charged, costs, strict=True)),
        tuple(jobs),
        epsilons([charge.event for charge, _ in charges], delta),
        guaranteed([charge.alone or charge.event for charge, _ in charges], delta),
        tuple(dict.fromkeys(fingerprints)),  # an older entry may be repeated with a sketch
    )


def exact_jobs(entries: Sequence[Entry]) -> list[str]:
    """Return the ids of jobs whose sums were opened here and not charged: their totals are exact.

    A resumed job is charged to the first of its chain, its lineage. Facts of one step are of one job, and
    those of a sum with a term name the lineage.
    """
    charged = {entry.content.job_id for entry in entries if isinstance(entry.content, Charge)}
    lineages: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry.content, Remembered):
            continue
        facts = entry.content.facts
        opened = [str(fact["job"]) for fact in facts if fact.get("entry") == "revealed"]
        named = [str(fact["lineage"]) for fact in facts if "lineage" in fact]
        for job in opened:
            if named or job not in lineages:
                lineages[job] = named[0] if named else job
    return [job for job, lineage in lineages.items() if not {job, lineage} & charged]


def exact_text(jobs: Sequence[str]) -> str:
    """List the jobs that released exact totals, which no epsilon covers."""
    return (
        f"{plural(len(jobs), 'job')} without differential privacy released exact totals, which no epsilon "
        "counts; evaluations (TF-627) and rounds (TF-625) have limits of their own (by data set: tightframe "
        f"site release show). Of all data sets here: {', '.join(jobs)}"
    )


def event_text(event: Event) -> str:
    """Describe an event in a few words."""
    if isinstance(event, Gaussian):
        return f"release, z {event.noise_multiplier:g}"
    return f"{event.steps} steps, sigma {event.noise_multiplier:g}, q {event.sampling_rate:.4g}"


def spent_text(spent: Epsilons) -> str:
    """Describe epsilon by each analysis, the deciding one first."""
    others = [("exact", spent.exact), ("PLD", spent.pld), ("RDP", spent.rdp), ("PRV", spent.prv)]
    listed = ", ".join(f"{name} {rounded_up(value)}" for name, value in others if value is not None)
    return f"{rounded_up(spent.guaranteed)} ({listed})"


def left_text(spending: Spending, epsilon: float) -> str:
    """Describe the remainder of a cap."""
    left = epsilon - spending.spent.guaranteed
    if left < 0:
        return f"nothing: the cap is passed by {rounded_up(-left)}"
    return f"{rounded_down(left)} of {epsilon:g}"


def fits(
    spending: Spending, epsilon: float, *, release: Gaussian | None, training: SubsampledGaussian | None
) -> list[str]:
    """Describe what still fits into a cap, for each kind of release by itself.

    Args:
        spending: so far.
        epsilon: the cap, at the spending's delta.
        release: one release of class sums or counts; None to leave them out.
        training: one step; None to leave training out.
    """
    lines = []
    if release is not None:
        count = fitting(release, epsilon=epsilon, delta=spending.delta, spent=spending.events)
        releases = "release" if count == 1 else "releases"
        lines.append(f"{count} more {releases} at noise multiplier {release.noise_multiplier:g}")
    if training is not None:
        steps = fitting(training, epsilon=epsilon, delta=spending.delta, spent=spending.events)
        epochs = rounded_down(steps * training.sampling_rate, 1)
        lines.append(
            f"{steps} more training steps at noise multiplier {training.noise_multiplier:g} and sampling "
            f"rate {training.sampling_rate:.4g}, that is {epochs} epochs"
        )
    return lines


def explain(spending: Spending, epsilon: float | None, exact: Sequence[str] = ()) -> Iterator[str]:
    """Explain the spending in paragraphs for somebody responsible for the data who is not a statistician.

    Args:
        epsilon: the site's cap; None if it is not known here.
        exact: jobs at this site that released exact totals.
    """
    if spending.neighbours is None:
        yield "Nothing was released under differential privacy from these records. Their budget is whole."
        return
    first, last = spending.entries[0][0].time, spending.entries[-1][0].time
    count, jobs = len(spending.entries), len(spending.jobs)
    yield (
        f"From {first:%Y-%m-%d} to {last:%Y-%m-%d}, {jobs} {'job' if jobs == 1 else 'jobs'} charged "
        f"{count} {'release' if count == 1 else 'releases'} made from these records. Each "
        f"carries random noise that protects {_PROTECTS[spending.neighbours]}."
    )
    yield (
        f"Spent: epsilon {rounded_up(spending.spent.guaranteed)} at delta {spending.delta:g}. "
        f"{_meaning(spending.spent.guaranteed, spending.neighbours, spending.delta)}"
    )
    if exact:
        yield NOT_COUNTED.format(plural(len(exact), "job"))
    if counts_on_others(spending.spent.guaranteed, spending.alone):
        yield f"{without_others(spending.alone)} The cap counts {rounded_up(spending.spent.guaranteed)}."
    for job in spending.jobs:
        yield _job_text(job)
    if jobs > 1:
        yield (
            "The jobs' epsilons do not simply add up: together they cost what is said above, which is what a "
            "cap is held against."
        )
    if epsilon is not None:
        yield (
            f"Left of the cap: {left_text(spending, epsilon)}. A job that would pass it is refused before "
            "training."
        )
    if len(spending.fingerprints) > 1:
        yield (
            f"Versions of the records so far: {len(spending.fingerprints)}. A new one never restores the "
            "budget, because most records are the same."
        )


def _meaning(epsilon: float, neighbours: str, delta: float) -> str:
    factor = math.exp(epsilon) if epsilon < math.log(_SHOWN_FACTOR) else math.inf
    bound = f"{rounded_up(factor, 1)} times" if math.isfinite(factor) else "more than a million times"
    return (
        f"In plain words: whoever sees all of these noisy releases can become at most {bound} as sure as "
        f"before, in odds, whether one particular {neighbours} was among the data; with a probability of at "
        f"most about 1 in {round(1 / delta):,} this does not hold. It is a worst case, for an observer who "
        "knows all else."
    )


def _job_text(job: JobSpending) -> str:
    steps = sum(charge.event.steps for charge in job.charges if isinstance(charge.event, SubsampledGaussian))
    releases = sum(isinstance(charge.event, Gaussian) for charge in job.charges)
    parts = [f"{steps} steps of training"] if steps else []
    parts += [f"{releases} noisy {'sum or count' if releases == 1 else 'sums or counts'}"] if releases else []
    retried = ""
    if job.retries:
        retried = f" Retries of failed rounds among them: {job.retries}; they stay charged."
    return (
        f"Job {job.name!r} ({job.job_id}): {' and '.join(parts)}, by itself epsilon "
        f"{rounded_up(job.epsilon)}.{retried}"
    )
