"""What a silo may spend: its ledger, its policy's cap, and the job's own promise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tightframe.data.base import SiloData
from tightframe.errors import SiteConfigError
from tightframe.files import write_atomically
from tightframe.phases import Fold, Neighbours
from tightframe.privacy import accounting
from tightframe.privacy.accounting import MAX_EPSILON, BudgetError
from tightframe.privacy.events import Event
from tightframe.privacy.ledger import rules
from tightframe.privacy.ledger.entries import MAX_ATTEMPT, Cap, Charge, Entry
from tightframe.privacy.ledger.ledger import Ledger, ledger_path
from tightframe.privacy.ledger.rules import events_of
from tightframe.results.words import rounded_up
from tightframe.rounds.context import SiloContext
from tightframe.rounds.lasting import Lasting
from tightframe.rounds.privacy_plan import PrivacyPlan

SOLVED = "privacy.json"
FOLDS: tuple[Fold, ...] = ("train", "validation", "test")


class Budget:
    """One silo's budget in one run.

    Every charge is in the ledger, with the lock held, before it returns; what is drawn comes after.

    Args:
        context: of the silo.
        plan: of the job.
        cohort: the silos enrolled.
    """

    def __init__(self, context: SiloContext, plan: PrivacyPlan, cohort: Sequence[str]) -> None:
        self._context, self._plan, self._cohort = context, plan, tuple(sorted(cohort))

    @property
    def path(self) -> Path:
        """Of the ledger: the site's own in production; in the simulator this run's, for one run."""
        return ledger_path(self._context.ledger_dir or self._context.state_folder, self._context.name)

    @property
    def cap(self) -> Cap:
        """What the site's policy lets be spent on these records, by all jobs together."""
        policy = self._context.policy
        retries, releases = policy.charged_retries, policy.max_releases
        return Cap(
            epsilon=MAX_EPSILON if policy.epsilon_cap is None else policy.epsilon_cap,
            delta=self._plan.privacy.delta if policy.delta_cap is None else policy.delta_cap,
            retries=MAX_ATTEMPT if retries is None else retries,
            releases=releases,
        )

    def check(self, planned: Sequence[Event]) -> None:
        """Refuse a job whose planned charges would not fit, before anything is trained.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
            DatasetError: TF-703 if these very records have a budget under another name.
        """
        with self._open() as ledger:
            self._note(ledger)
            self._context.log.info(
                "%s: privacy ledger %s%s",
                self._context.name,
                self.path,
                "" if self._context.production else " (simulation: for this run only)",
            )
            self.hold(ledger.entries(), planned)

    def hold(self, entries: Sequence[Entry], planned: Sequence[Event]) -> bool:
        """Refuse what ``check`` does, given all that the ledger has; nothing is opened or written.

        Returns:
            Whether it was held against that; not where a job goes on, which is held with each charge.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
            NeighboursError: TF-706 if these records' budget is counted in the other relation.
        """
        self._check_named()
        if any(entry.charge is not None and entry.charge.job_id == self._job_id for entry in entries):
            return False  # goes on, as a resumed job, too: what it may still charge is checked each time
        self._keep_promise(
            "what is planned",
            planned,
            advice="Plan less, or give the job a larger `privacy.epsilon` or more noise.",
        )
        self._check_number()
        charges = [self._charge(f"planned {place}", 0, event, None) for place, event in enumerate(planned)]
        # Each of these has a purpose of its own, those that may be repeated, too.
        rules.hold(entries, charges, replace(self.cap, releases=None))
        return True

    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge what is about to be drawn.

        Args:
            purpose: what for; charged again it is a retry.
            events: what it costs.
            alone: what it costs if no other silo adds noise.

        Raises:
            BudgetError: TF-701 if it does not fit into the job's promise or the site's cap.
        """
        with self._open() as ledger:
            self._note(ledger)  # a server may have left out the enrolment
            entries = ledger.entries()
            attempt = sum(
                1
                for entry in entries
                if entry.charge is not None and entry.charge.key[:2] == (self._job_id, purpose)
            )
            ours = events_of(entries, self._dataset, job_id=self._job_id)
            self._keep_promise(
                purpose,
                [*ours, *events],
                advice="What is repeated is charged again. Nothing was charged; run the job anew with a "
                "larger `privacy.epsilon`, more `privacy.spare_rounds` or more noise.",
            )
            charges = [
                self._charge(purpose, attempt + place, event, alone) for place, event in enumerate(events)
            ]
            ledger.charge_all(charges, cap=self.cap)
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

    def remembered(self, what: str, solve: Callable[[], float]) -> float:
        """A number that costs seconds to solve, kept with the run's own state."""
        kept = self._context.state_folder / SOLVED
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        if what not in found:
            found[what] = solve()
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(found).encode(), mode=0o600)
        return float(found[what])

    def spent_by_job(self, *, prv: bool = True) -> accounting.Epsilons:
        """What this job has cost these records so far, at the job's delta; PRV only if it is asked for."""
        with self._open() as ledger:
            return ledger.spent(
                self._dataset,
                self._plan.privacy.neighbours,
                self._plan.privacy.delta,
                job_id=self._job_id,
                prv=prv,
            )

    def _note(self, ledger: Ledger) -> None:
        """Know the records again."""
        self._check_named()
        ledger.note_data(self._dataset, fingerprint(self._context.job.dataset, self._context.data))

    def _check_named(self) -> None:
        """In production records go by a name that the site has chosen, which no move changes."""
        context = self._context
        if context.production and context.site.dataset_id is None:
            raise SiteConfigError(
                "Expected `dataset_id` in this site's configuration: the privacy budget of its records goes "
                "by it, and must not begin anew because a folder was moved.",
                code="TF-201",
            )

    def _keep_promise(self, purpose: str, events: Sequence[Event], *, advice: str) -> None:
        """Refuse a charge with which the job would cost more than it says: its repeats must fit, too."""
        privacy = self._plan.privacy
        total = accounting.guaranteed(events, privacy.delta)
        if total > privacy.epsilon:
            raise BudgetError(
                f"Expected this job to stay within the epsilon {privacy.epsilon:g} that it promises at delta "
                f"{privacy.delta:g}, but with {purpose} it comes to {rounded_up(total)}. {advice}"
            )

    def _check_number(self) -> None:
        """Refuse a job that releases more often than this site's policy lets it, before its first release."""
        most, planned = self._context.policy.max_releases, self._plan.number_of_releases
        if most is not None and planned > most:
            raise BudgetError(
                f"Expected a job of at most {most} releases, as `max_releases` of this site's policy says, "
                f"but this one plans {planned}: {self._plan.describe()}. Let it release less often."
            )

    @property
    def _job_id(self) -> str:
        # A resumed job is charged as the first of its chain: that one's promise holds for all of them.
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
        """The site's ledger; a new one only where there never was one."""
        lasting = self._context.lasting
        if lasting.places.ledger != self.path:  # in the simulator, whose silos take it over with their state
            lasting = Lasting(replace(lasting.places, ledger=self.path), lasting.entry, lasting.identity)
        return lasting.open()


def fingerprint(dataset: str, data: SiloData) -> str:
    """A hash by which a site knows its records again: of the data set, the source and all labels in order."""
    found = hashlib.sha256(json.dumps([dataset, data.source]).encode())
    for fold in FOLDS:
        labels = data.labels(fold)
        found.update(len(labels).to_bytes(8, "big") + labels.astype("<i8").tobytes())
    return found.hexdigest()
