"""Rules of a charge: charged once, one neighbouring relation, few retries and releases, within the cap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightframe.phases import Neighbours
from tightframe.privacy.accounting import (
    BudgetError,
    fitting,
    guaranteed,
    solve,
)
from tightframe.privacy.events import Event, Gaussian, with_noise
from tightframe.privacy.ledger.entries import (
    Begun,
    Cap,
    Charge,
    DataNoted,
    DatasetError,
    Entry,
    NeighboursError,
    RepeatError,
)
from tightframe.results.words import rounded_down, rounded_up


def charges_of(entries: Iterable[Entry]) -> list[Charge]:
    """Return all charges, oldest first."""
    return [entry.content for entry in entries if isinstance(entry.content, Charge)]


def events_of(
    entries: Iterable[Entry], dataset_id: str, *, job_id: str | None = None, alone: bool = False
) -> list[Event]:
    """Return the events charged on a data set.

    Args:
        dataset_id: the site's name of its records.
        job_id: of one job only.
        alone: the events if no other silo adds noise.
    """
    return [
        charge.alone if alone and charge.alone is not None else charge.event
        for charge in charges_of(entries)
        if charge.dataset_id == dataset_id and job_id in (None, charge.job_id)
    ]


def check_name(
    entries: Iterable[Entry], noted: DataNoted, also: Sequence[str] = (), *, of: str | None = None
) -> None:
    """Refuse records that are known by another name.

    Args:
        also: other hashes of them.
        of: name of the ledger's site, if it is another site's; then any name is refused.

    Raises:
        DatasetError: TF-703.
    """
    for entry in entries:
        known = entry.content
        if not isinstance(known, DataNoted) or (of is None and known.dataset_id == noted.dataset_id):
            continue
        if known.fingerprint in (noted.fingerprint, *also) or known.is_like(noted):
            how = ""
        elif known.has_columns_of(noted):
            how = (
                ", because columns hold the same values (or in the same order), or pictures look the same, "
                "for most records"
            )
        else:
            continue
        if of is not None:
            raise DatasetError(
                f"Expected these records to be those of {of}, as entry {entry.sequence} of its ledger in the "
                f"same state folder says ({known.dataset_id!r}), but got another site's{how}. Under another "
                f"name of the site the same records would have a second budget and history: join as {of}."
            )
        raise DatasetError(
            f"Expected these records to go by `dataset_id` {known.dataset_id!r}, as entry {entry.sequence} "
            f"of the ledger says, but got {noted.dataset_id!r}{how}. The same records, or most of them, "
            "under another name would have a second budget and history: write the first name into the "
            "site's entry."
        )


def known_by_rows(entries: Iterable[Entry], noted: DataNoted) -> list[str]:
    """Return other names of records whose older entry has neither columns nor looks to compare."""
    last = {item.content.dataset_id: item.content for item in entries if isinstance(item.content, DataNoted)}
    return [name for name, known in last.items() if known.columns is None and name != noted.dataset_id]


def secret_ids(entries: Sequence[Entry]) -> set[str]:
    """Return the names of the secrets that key columns, since a person last restarted the ledger."""
    ids = set[str]()
    for entry in entries:
        if isinstance(entry.content, Begun):
            ids.clear()
        elif isinstance(entry.content, DataNoted) and entry.content.secret_id:
            ids.add(entry.content.secret_id)
    return ids


@dataclass(frozen=True)
class Overspent:
    """A charge that exceeds the cap.

    Attributes:
        charge: the first one over the cap.
        spent: the events that the ledger has of these records.
        beside: earlier ones of the same request; none of them is charged.
        cap: the site's.
    """

    charge: Charge
    spent: tuple[Event, ...]
    beside: tuple[Event, ...]
    cap: Cap

    def error(self) -> BudgetError:
        """Return the refusal in words; computing what would fit takes seconds."""
        cap, charge = self.cap, self.charge
        before = (*self.spent, *self.beside)
        requested = guaranteed([*before, charge.event], cap.delta)
        needed = rounded_up(requested) if math.isfinite(requested) else "no bound"
        return BudgetError(
            f"Expected the charges on {charge.dataset_id!r} to stay within epsilon {cap.epsilon:g} at delta "
            f"{cap.delta:g}, but with {describe(charge)} they come to {needed}. "
            f"{self._so_far()} {what_fits(charge.event, before, epsilon=cap.epsilon, delta=cap.delta)} "
            "Nothing was charged."
        )

    def _so_far(self) -> str:
        """Return the spending of earlier charges, and of the request's own before the refused one."""
        text = "Nothing was spent before: what is asked for is too much by itself."
        if self.spent:
            spent = guaranteed(self.spent, self.cap.delta)
            left = rounded_down(max(0.0, self.cap.epsilon - spent))
            text = f"Spent: {rounded_up(spent)} by {_charges(len(self.spent))}. Left: {left}."
        if not self.beside:
            return text
        total = rounded_up(guaranteed((*self.spent, *self.beside), self.cap.delta))
        return f"{text} Before it the request has {_charges(len(self.beside))}, with which that is {total}."


def check_rules(entries: Sequence[Entry], charges: Sequence[Charge], cap: Cap) -> None:
    """Check every rule except the cap on epsilon.

    Raises:
        RepeatError: TF-705.
        NeighboursError: TF-706.
        BudgetError: TF-701, for releases.
    """
    earlier = charges_of(entries)
    for charge in charges:
        if any(charge.key == other.key for other in earlier):
            raise RepeatError(
                f"Expected {describe(charge)} to be charged once, but it was charged before. New noise is a "
                "new attempt; identical bytes that are sent again are a resend."
            )
        check_neighbours(earlier, charge.dataset_id, charge.neighbours)
        _check_counts(earlier, charge, cap)
        earlier.append(charge)


def overspent(entries: Sequence[Entry], charges: Sequence[Charge], cap: Cap) -> Overspent | None:
    """Return the first charge with which a data set's events exceed the cap; None if all fit."""
    for dataset_id in dict.fromkeys(charge.dataset_id for charge in charges):
        spent = tuple(events_of(entries, dataset_id))
        new = [charge for charge in charges if charge.dataset_id == dataset_id]
        if guaranteed([*spent, *(charge.event for charge in new)], cap.delta) <= cap.epsilon:
            continue
        beside: tuple[Event, ...] = ()
        for charge in new[:-1]:
            if guaranteed([*spent, *beside, charge.event], cap.delta) > cap.epsilon:
                return Overspent(charge, spent, beside, cap)
            beside += (charge.event,)
        return Overspent(new[-1], spent, beside, cap)
    return None


def hold(entries: Sequence[Entry], charges: Sequence[Charge], cap: Cap) -> None:
    """Check that all of these could be charged now, given a ledger's entries.

    Raises:
        BudgetError, RepeatError, NeighboursError: as ``Ledger.charge``.
    """
    check_rules(entries, charges, cap)
    if over := overspent(entries, charges, cap):
        raise over.error()


def what_fits(event: Event, before: Sequence[Event], *, epsilon: float, delta: float) -> str:
    """Describe how many of this event still fit into a budget, and the noise with which it would fit."""
    if guaranteed(before, delta) >= epsilon:
        return "Nothing fits any more."
    count = fitting(event, epsilon=epsilon, delta=delta, spent=before)
    try:
        noise = solve(lambda z: [with_noise(event, z)], epsilon=epsilon, delta=delta, spent=before)
        more = f"with a noise multiplier of at least {noise:.4f}"
    except BudgetError:  # with the earlier charges, no noise is enough by this analysis
        more = None
    if isinstance(event, Gaussian):
        many = f"{count} such releases would fit"
        return f"{many}." if more is None or count else f"{many}; one would {more}."
    many = f"{count} of its {event.steps} steps would fit"
    return f"{many}." if more is None else f"{many}, or all of them {more}."


def retries_of(earlier: Sequence[Charge], charge: Charge) -> int:
    """Count earlier charges of this job and purpose."""
    return sum((other.job_id, other.purpose) == (charge.job_id, charge.purpose) for other in earlier)


def check_neighbours(charges: Iterable[Charge], dataset_id: str, neighbours: Neighbours) -> None:
    """Check that all charges on a data set use the same neighbouring relation.

    Raises:
        NeighboursError: TF-706.
    """
    for other in charges:
        if other.dataset_id == dataset_id and other.neighbours != neighbours:
            raise NeighboursError(
                f"Expected charges on {dataset_id!r} to protect a {other.neighbours}, as those before, but "
                f"got {neighbours!r}. Set the job's `neighbours` to {other.neighbours!r}: what was released "
                "before cannot be counted under another relation."
            )


def describe(charge: Charge) -> str:
    """Describe a charge in a few words."""
    return f"{charge.purpose!r} of job {charge.job_name!r} (attempt {charge.attempt})"


def _charges(number: int) -> str:
    return f"{number} charge" if number == 1 else f"{number} charges"


def _check_counts(earlier: Sequence[Charge], charge: Charge, cap: Cap) -> None:
    """Check the caps of one job other than that on epsilon."""
    first: dict[str, Charge] = {}
    retries = 0
    for other in earlier:
        if other.job_id == charge.job_id:
            retries += other.purpose in first
            first.setdefault(other.purpose, other)
    if charge.purpose in first:
        if retries >= cap.retries:
            raise RepeatError(
                f"Expected at most {cap.retries} charged retries in job {charge.job_name!r}, but got one "
                f"more: {describe(charge)}. Find out why its rounds fail; this site's policy sets the number."
            )
        return
    releases = sum(isinstance(other.event, Gaussian) for other in first.values())
    if cap.releases is not None and isinstance(charge.event, Gaussian) and releases >= cap.releases:
        raise BudgetError(
            f"Expected at most {cap.releases} releases in job {charge.job_name!r}, but got one more: "
            f"{describe(charge)}. Let the job release less often; this site's policy sets the number."
        )
