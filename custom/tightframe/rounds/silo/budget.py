"""A silo's privacy budget: its ledger, its policy's cap, and the job's promised epsilon."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightframe.errors import SiteConfigError
from tightframe.files import write_atomically
from tightframe.phases import Neighbours
from tightframe.privacy import accounting
from tightframe.privacy.accounting import MAX_EPSILON, BudgetError
from tightframe.privacy.events import Event
from tightframe.privacy.ledger import rules
from tightframe.privacy.ledger.entries import MAX_ATTEMPT, Cap, Charge, Entry
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.rules import events_of
from tightframe.results.words import plural, rounded_down, rounded_up
from tightframe.rounds.context import SiloContext
from tightframe.rounds.privacy_plan import PrivacyPlan
from tightframe.rounds.silo import subnormals
from tightframe.rounds.site_ledger.known_records import note_records

SOLVED = "privacy.json"
Planned = Callable[[float], Sequence[Event]]
"""Epsilon of a job -> all privacy events that it may charge at that epsilon."""


@dataclass(frozen=True)
class Costs:
    """Cost of a job to its records' budget.

    Attributes:
        spent: privacy events of earlier jobs.
        planned: all privacy events that the job may charge.
        cap: the site's limit.
    """

    spent: tuple[Event, ...]
    planned: tuple[Event, ...]
    cap: Cap

    @property
    def before(self) -> float:
        """Epsilon that earlier jobs have spent."""
        return accounting.guaranteed(self.spent, self.cap.delta)

    @property
    def after(self) -> float:
        """Epsilon of these and of the job's planned charges; infinite where nothing bounds it."""
        return accounting.guaranteed((*self.spent, *self.planned), self.cap.delta)

    def in_words(self) -> str:
        """Describe the epsilon spent before and after the job, and the cap."""
        limit = "without a cap" if self.cap.epsilon >= MAX_EPSILON else f"of {self.cap.epsilon:g}"
        after = rounded_up(self.after)
        return f"from {rounded_up(self.before)} to {after} {limit} (epsilon at delta {self.cap.delta:g})"


class Budget:
    """One silo's budget in one run.

    Every charge is in the ledger, written under its lock, before the noise that it pays for is drawn.

    Args:
        cohort: the silos enrolled.
    """

    def __init__(self, context: SiloContext, plan: PrivacyPlan, cohort: Sequence[str]) -> None:
        self._context, self._plan, self._cohort = context, plan, tuple(sorted(cohort))

    @property
    def path(self) -> Path:
        """Path of the ledger: the site's own in production; in the simulator one for this run."""
        return self._context.budget_ledger.paths.ledger

    @property
    def cap(self) -> Cap:
        """Limit of the site's policy on the epsilon of all jobs together on these records."""
        policy = self._context.policy
        retries, releases = policy.charged_retries, policy.max_releases
        return Cap(
            epsilon=MAX_EPSILON if policy.epsilon_cap is None else policy.epsilon_cap,
            delta=self._plan.privacy.delta if policy.delta_cap is None else policy.delta_cap,
            retries=MAX_ATTEMPT if retries is None else retries,
            releases=releases,
        )

    def check(self, planned: Sequence[Event], at: Planned | None = None) -> None:
        """Refuse a job whose planned charges would not fit, before training.

        Args:
            planned: all planned charges of the job.
            at: the planned charges at another epsilon; None where another one changes no noise.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
            DatasetError: TF-703 if the same records have a budget under another name.
        """
        with self._open() as ledger:
            self._note(ledger)
            self._context.log.info(
                "%s: privacy ledger %s%s",
                self._context.name,
                self.path,
                "" if self._context.production else " (simulation: for this run only)",
            )
            self.check_against(ledger.entries(), planned, at)

    def check_against(
        self, entries: Sequence[Entry], planned: Sequence[Event], at: Planned | None = None
    ) -> Costs | None:
        """Refuse what ``check`` refuses, given the ledger's entries, without opening or writing anything.

        Args:
            planned, at: as of ``check``.

        Returns:
            What the job costs; None for a job that has charges already, which is checked at each charge.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
            NeighboursError: TF-706 if these records' budget is counted in the other relation.
        """
        self._check_named()
        if any(entry.charge is not None and entry.charge.job_id == self._job_id for entry in entries):
            return None  # this job or the one that it resumes: its further charges are checked each time
        self._keep_promise(
            "what is planned",
            planned,
            advice="Plan less, or give the job a larger `privacy.epsilon` or more noise.",
        )
        self._check_number()
        charges = [self._charge(f"planned {place}", 0, event, None) for place, event in enumerate(planned)]
        # Each planned charge has a purpose of its own here, repeats included, so `releases` cannot apply.
        cap = replace(self.cap, releases=None)
        costs = Costs(tuple(events_of(entries, self._dataset)), tuple(planned), cap)
        if at is None:
            rules.hold(entries, charges, cap)
            return costs
        rules.check_rules(entries, charges, cap)
        if costs.after > cap.epsilon:
            raise self._refusal(costs, at)
        return costs

    def _refusal(self, costs: Costs, at: Planned) -> BudgetError:
        cap, spent = costs.cap, "Nothing was spent before: what is asked for is too much by itself."
        if costs.spent:
            left = rounded_down(max(0.0, cap.epsilon - costs.before))
            spent = (
                f"Spent: {rounded_up(costs.before)} by {plural(len(costs.spent), 'charge')}. Left: {left}."
            )
        fitting = self._fitting(costs, at)
        helps = (
            "No `privacy.epsilon` would fit."
            if fitting is None
            else f"Would fit: --set privacy.epsilon={fitting:g} (jobs together spend less than the sum of "
            "their epsilons)."
        )
        return BudgetError(
            f"Expected the charges on {self._dataset!r} to stay within epsilon {cap.epsilon:g} at delta "
            f"{cap.delta:g}, but job {self._context.job.job_name!r} would bring them to "
            f"{rounded_up(costs.after) if math.isfinite(costs.after) else 'no bound'}. {spent} {helps} "
            "Nothing was charged."
        )

    def _fitting(self, costs: Costs, at: Planned) -> float | None:
        """Return the largest epsilon, of three digits, with which the job fits; None if there is none."""
        asked = self._plan.privacy.epsilon

        def fits(epsilon: float) -> bool:
            try:
                planned = tuple(at(epsilon))
            except BudgetError:  # too small for any noise in one of its parts
                return False
            promised = accounting.guaranteed(planned, self._plan.privacy.delta) <= epsilon
            return promised and replace(costs, planned=planned).after <= costs.cap.epsilon

        digits = 2 - math.floor(math.log10(asked))
        low, high = 0, math.ceil(asked * 10**digits)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(round(middle / 10**digits, digits)) else (low, middle)
        return round(low / 10**digits, digits) if low else None

    @subnormals.kept()
    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge a release to the ledger, before its noise is drawn.

        Args:
            purpose: of the release; a second charge for the same purpose counts as a retry.
            events: privacy events of the release.
            alone: event of the release if no other silo added noise.

        Raises:
            BudgetError: TF-701 if it does not fit into the job's promise or the site's cap.
        """
        with self._open() as ledger:
            self._note(ledger)  # checked here too: a server may have skipped the enrolment
            entries = ledger.entries()
            attempt = sum(
                1
                for entry in entries
                if entry.charge is not None and entry.charge.key[:2] == (self._job_id, purpose)
            )

            def promised(entries: Sequence[Entry]) -> None:
                charged = events_of(entries, self._dataset, job_id=self._job_id)
                self._keep_promise(
                    purpose,
                    [*charged, *events],
                    advice="Repeated rounds are charged again. Nothing was charged now; run the job again "
                    "with a larger `privacy.epsilon`, more `privacy.spare_rounds` or more noise.",
                )

            charges = [
                self._charge(purpose, attempt + place, event, alone) for place, event in enumerate(events)
            ]
            # With these charges: another job of the chain may be charging at the same time.
            ledger.charge_all(charges, cap=self.cap, check=promised)
            spent = ledger.spent(
                self._dataset, self._plan.privacy.neighbours, self.cap.delta, prv=False
            ).guaranteed
        self._context.log.info(
            "%s: charged %s; epsilon %s of %s at delta %g spent on these records",
            self._context.name,
            purpose,
            rounded_up(spent),
            "no cap" if self._context.policy.epsilon_cap is None else f"{self.cap.epsilon:g}",
            self.cap.delta,
        )

    @subnormals.kept()
    def solve_once(self, key: str, solve: Callable[[], float]) -> float:
        """Return a number that takes seconds to compute, cached under a key in the run's state."""
        path = self._context.state_folder / SOLVED
        solved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if key not in solved:
            solved[key] = solve()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(solved).encode(), mode=0o600)
        return float(solved[key])

    @subnormals.kept()
    def spent_by_job(self, *, prv: bool = True, alone: bool = False) -> accounting.Epsilons:
        """Return the epsilon that this job has spent on these records so far, at the job's delta.

        Args:
            prv: whether to compute the PRV accountant's value as well.
            alone: the value if no other silo adds noise.
        """
        with self._open() as ledger:
            return ledger.spent(
                self._dataset,
                self._plan.privacy.neighbours,
                self._plan.privacy.delta,
                job_id=self._job_id,
                alone=alone,
                prv=prv,
            )

    def _note(self, ledger: Ledger) -> None:
        self._check_named()
        note_records(self._context, ledger)

    def _check_named(self) -> None:
        """Refuse records without a name in production, where moving a folder must not renew their budget."""
        context = self._context
        if context.production and context.site.dataset_id is None:
            raise SiteConfigError(
                "Expected `dataset_id` in this site's configuration: the privacy budget of its records is "
                "kept under that name, so that moving a folder does not start a new budget.",
                code="TF-201",
            )

    def _keep_promise(self, purpose: str, events: Sequence[Event], *, advice: str) -> None:
        """Refuse a charge that would exceed the job's promised epsilon, repeats included."""
        privacy = self._plan.privacy
        total = accounting.guaranteed(events, privacy.delta)
        if total > privacy.epsilon:
            raise BudgetError(
                f"Expected this job to stay within the epsilon {privacy.epsilon:g} that it promises at delta "
                f"{privacy.delta:g}, but with {purpose} it comes to {rounded_up(total)}. {advice}"
            )

    def _check_number(self) -> None:
        """Refuse a job that plans more releases than this site's policy allows."""
        most, planned = self._context.policy.max_releases, self._plan.number_of_releases
        if most is not None and planned > most:
            raise BudgetError(
                f"Expected a job of at most {most} releases (`max_releases` of this site's policy), but this "
                f"one plans {planned}: {self._plan.describe()}. Plan fewer releases."
            )

    @property
    def _job_id(self) -> str:
        # A resumed job is charged to the first of its chain, whose promise holds for the whole chain.
        return self._context.job.lineage(self._context.job_id) or self._context.job.job_name

    @property
    def _dataset(self) -> str:
        return self._context.site.records_id(self._context.job.dataset)

    def _charge(self, purpose: str, attempt: int, event: Event, alone: Event | None) -> Charge:
        neighbours: Neighbours = self._plan.privacy.neighbours
        return Charge(
            job_id=self._job_id,
            job_name=self._context.job.job_name,
            purpose=purpose,
            attempt=attempt,
            dataset_id=self._dataset,
            neighbours=neighbours,
            event=event,
            cohort=self._cohort or (self._context.name,),
            alone=alone,
        )

    def _open(self) -> Ledger:
        """Open the site's ledger; create one only where there never was one."""
        return self._context.budget_ledger.open()
