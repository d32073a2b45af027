"""The permanent journal of a site's actions, and the later actions that it rules out.

An entry records one action. The caller makes the entries of a step durable before it sends the
step's reply. ``History`` checks new actions against all entries so far. Nothing here reads or writes
a file: that is the caller's part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self, TypeAlias, assert_never, get_args

from tightframe.securesum import reading
from tightframe.securesum.errors import (
    EvaluationsError,
    MessageError,
    ReleaseProfileError,
    ReplayError,
    StaticCohortError,
    SurvivorsError,
)
from tightframe.securesum.messages import GROUPS, Group, Params, SumId, read_sum_id
from tightframe.securesum.primitives import Value

Slot: TypeAlias = tuple[str, int, int]
"""Job, epoch, slot."""
MAX_STARTS = 8
"""Limit of starts of one slot's term; a start is repeated only if the process died on the way."""

MAX_ENROLMENTS = 64
"""Limit of enrolments of a job in a row without a term, or twice the silos if that is more: each try of an
honest server leaves out at least one silo of the last."""

MAX_JOBS_OF_STATE = 4
"""Limit of jobs in one chain in which a site masks terms of sums that rest on one state in one round."""

Profile: TypeAlias = tuple[tuple[str, str], ...]
"""The release profile of sums over a data set: name and value of every setting that changes one site's term
before the sum, sorted by name. The caller chooses the settings; a value of several parts is a JSON object. A
name ``x`` covers each ``x from y``: it holds whatever the y."""


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise MessageError(where, expected="text", found=reading.described(value))
    return value


def _digits(value: object, where: str) -> bytes:
    try:
        return bytes.fromhex(_text(value, where))
    except ValueError:
        raise MessageError(where, expected="hexadecimal digits", found="other text") from None


def _profile(value: object, where: str) -> Profile:
    return tuple(sorted(reading.mapping(_text, 1, 2**16)(value, where).items()))


class Most(NamedTuple):
    """Exact evaluations of a data set: of how many models, and ``PARTS`` of each fold; None for no limit."""

    models: int | None
    validation: int | None
    test: int | None


NONE = "none"
"""Value of a setting's part that is null, or that a profile lacks."""
PARTS = 10**6
"""Parts into which a fold's content is divided, as evaluations disclose it: jobs can count it differently."""


def opened(numbers: Sequence[int | None]) -> list[str | None]:
    """Return words for the numbers of ``Most``.

    >>> opened((3, 415_000, None))
    ['3 models', '41.5% of what the validation records hold', None]
    """
    models, *folds = numbers
    shares = [
        None if parts is None else f"{parts / PARTS:.1%} of what the {fold} records hold"
        for fold, parts in zip(("validation", "test"), folds, strict=True)
    ]
    return [None if models is None else "1 model" if models == 1 else f"{models} models", *shares]


_Text = Annotated[str, _text]
_Digits = Annotated[bytes, _digits]
_Count = Annotated[int, reading.integer(0, 2**63 - 1)]
_Sites = Annotated[tuple[str, ...], reading.sequence(_text, 0, 2**16)]
_Groups = Annotated[tuple[Group, ...], reading.sequence(reading.one_of(*GROUPS), 0, len(GROUPS))]
_Profile = Annotated[Profile, _profile]


class JournalEntry(reading.Record):
    """An entry as plain values: kind, then fields, bytes as hexadecimal digits, a profile as a map."""

    KIND: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.KIND = kind

    def as_value(self) -> dict[str, Value]:
        """Return plain values for a journal in JSON."""
        values = {
            key: item.hex() if isinstance(item, bytes) else item for key, item in super().as_value().items()
        }
        if isinstance(self, ProfileUsed | ProfileAccepted):
            values["profile"] = dict(self.profile)
        return {"entry": self.KIND, **values}

    @classmethod
    def from_value(cls, value: Mapping[str, Value]) -> Self:
        """Return the entry of which ``value`` is the ``as_value``.

        Raises:
            MessageError: TF-604.
        """
        keys = {"entry": reading.one_of(cls.KIND), **reading.keys_of(cls)}
        parts = reading.record(keys)(value, f"a journal entry {cls.KIND}")
        return cls(**{key: part for key, part in parts.items() if key != "entry"})


@dataclass(frozen=True)
class Advertised(JournalEntry, kind="advertised"):
    """This site took part in the setup of an epoch: SHA-256 of its parameters and of the advertisement."""

    job: _Text
    epoch: _Count
    params: _Digits
    advertisement: _Digits


@dataclass(frozen=True)
class _OfSlot(JournalEntry):
    """An entry of a slot."""

    job: _Text
    epoch: _Count
    slot: _Count


@dataclass(frozen=True)
class Requested(_OfSlot, kind="requested"):
    """A term was requested for a slot: digest of the request. Written before a record is read for it."""

    request: _Digits


@dataclass(frozen=True)
class SlotUsed(_OfSlot, kind="slot_used"):
    """A term was masked with a slot's secrets: SHA-256 of the masked bytes of each group."""

    sum_id: Annotated[SumId, read_sum_id]
    update: _Digits
    static: _Digits


@dataclass(frozen=True)
class Agreed(_OfSlot, kind="agreed"):
    """This site signed a survivor set that is smaller than the roster."""

    survivors: _Sites


@dataclass(frozen=True)
class Revealed(_OfSlot, kind="revealed"):
    """This site revealed its shares of a slot for a survivor set: of b for its members, of s for the rest."""

    survivors: _Sites
    groups: _Groups


@dataclass(frozen=True)
class TotalVerified(_OfSlot, kind="total_verified"):
    """This site checked that a total told is the sum of its terms: slot and digest of the total."""

    total: _Digits


@dataclass(frozen=True)
class _OfCohort(JournalEntry):
    """An entry of a static term of a data set, for a cohort, in a lineage of jobs."""

    dataset: _Text
    roster: _Sites
    lineage: _Text


@dataclass(frozen=True)
class StaticMasked(_OfCohort, kind="static_masked"):
    """This site masked a static term of a data set for a cohort; from then on t other sites can open it."""


@dataclass(frozen=True)
class StaticOpened(_OfCohort, kind="static_opened"):
    """This site revealed its shares of the static group of a data set, for a cohort, in a lineage of jobs."""


@dataclass(frozen=True)
class CohortAccepted(JournalEntry, kind="cohort_accepted"):
    """A person at this site accepted one other cohort for a data set, knowing what that discloses."""

    dataset: _Text
    roster: _Sites


@dataclass(frozen=True)
class ProfileUsed(JournalEntry, kind="profile_used"):
    """This site masked a term of a data set under a release profile, in a lineage of jobs."""

    dataset: _Text
    profile: _Profile
    lineage: _Text


@dataclass(frozen=True)
class ProfileAccepted(JournalEntry, kind="profile_accepted"):
    """A person at this site accepted a further release profile for a data set, knowing what both disclose."""

    dataset: _Text
    profile: _Profile


@dataclass(frozen=True)
class _OfSum(JournalEntry):
    """An entry of what a sum in a job tells of a data set."""

    dataset: _Text
    job: _Text
    round: _Count
    phase: _Text

    @property
    def sum(self) -> tuple[str, int, str]:
        """Which sum it is, in whatever try: of all tries one is opened."""
        return self.job, self.round, self.phase


@dataclass(frozen=True)
class _RunAccepted(JournalEntry):
    """An entry of a person who accepted one more run of a job, by the job's hash."""

    dataset: _Text
    config: _Digits


@dataclass(frozen=True)
class Evaluated(_OfSum, kind="evaluated"):
    """This site masked a term that tells of evaluated records: of how many models, ``PARTS`` of each fold.

    ``config`` is the job's hash.
    """

    config: _Digits
    models: _Count
    validation: _Count
    test: _Count


@dataclass(frozen=True)
class EvaluationsAccepted(_RunAccepted, kind="evaluations_accepted"):
    """A person at this site accepted all exact evaluations of one more run of a job, by the job's hash."""


@dataclass(frozen=True)
class Trained(_OfSum, kind="trained"):
    """This site masked a term of trained layers without noise: of which layers, and records surely behind it.

    ``widest`` has the most units; ``units`` and ``inputs`` are of the layer on what does not change of a
    record, ``numbers`` of all layers.
    """

    lineage: _Text
    config: _Digits
    widest: _Count
    units: _Count
    inputs: _Count
    numbers: _Count
    records: _Count


@dataclass(frozen=True)
class Multiplied(_OfSum, kind="multiplied"):
    """This site masked a term of products of trained features: how many, of how many values of records."""

    lineage: _Text
    config: _Digits
    numbers: _Count
    values: _Count


@dataclass(frozen=True)
class RoundsAccepted(_RunAccepted, kind="rounds_accepted"):
    """A person at this site accepted all rounds without noise of one more run of a job, by the job's hash."""


@dataclass(frozen=True)
class _OfState(JournalEntry):
    """An entry of a sum of a round that rests on a state, in a lineage of jobs."""

    lineage: _Text
    job: _Text
    round: _Count
    basis: _Digits


@dataclass(frozen=True)
class StateMasked(_OfState, kind="state_masked"):
    """This site masked a term of a sum of a round that rests on a state, in a lineage of jobs."""


@dataclass(frozen=True)
class StateSummed(_OfState, kind="state_summed"):
    """This site revealed its shares of a sum of a round that rests on a state, in a lineage of jobs."""


Entry: TypeAlias = (
    Advertised
    | Requested
    | SlotUsed
    | Agreed
    | Revealed
    | StaticMasked
    | StaticOpened
    | CohortAccepted
    | ProfileUsed
    | ProfileAccepted
    | Evaluated
    | EvaluationsAccepted
    | Trained
    | Multiplied
    | RoundsAccepted
    | TotalVerified
    | StateMasked
    | StateSummed
)

_ENTRIES: Mapping[object, type[Entry]] = {kind.KIND: kind for kind in get_args(Entry)}


def entry_from_value(value: Mapping[str, Value]) -> Entry:
    """Read an entry from its ``as_value``.

    Raises:
        MessageError: TF-604, if it is not an entry. A journal that cannot be read completely must not be
            used, because actions missing from it would be allowed again.
    """
    kind = value.get("entry") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _ENTRIES:
        raise MessageError("a journal entry", expected=f"one of {list(_ENTRIES)}", found="something else")
    return _ENTRIES[kind].from_value(value)


class _Runs:
    """Runs of jobs that a person accepted for a data set: by the job's hash, once begun by the job's id."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bytes], int] = {}
        self._begun: set[tuple[str, str]] = set()
        self._accepted: set[tuple[str, str]] = set()

    def accept(self, entry: EvaluationsAccepted | RoundsAccepted) -> None:
        kind = (entry.dataset, entry.config)
        self._open[kind] = self._open.get(kind, 0) + 1

    def begin(self, entry: Evaluated | Trained | Multiplied) -> None:
        """Note a term of a run, whose first one uses up an acceptance."""
        run, kind = (entry.dataset, entry.job), (entry.dataset, entry.config)
        if run not in self._begun and self._open.get(kind, 0):
            self._open[kind] -= 1
            self._accepted.add(run)
        self._begun.add(run)

    def accepts(self, entry: Evaluated | Trained | Multiplied) -> bool:
        run = (entry.dataset, entry.job)
        return run in self._accepted or (
            run not in self._begun and self._open.get((entry.dataset, entry.config), 0) > 0
        )


class History:
    """The actions that a site's entries rule out: append-only, each check in constant time.

    Args:
        entries: all entries of this site's journal, oldest first.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._epochs: dict[str, int] = {}
        self._idle: dict[str, int] = {}  # job -> enrolments since its last term
        self._slots: dict[tuple[str, int], int] = {}
        self._requests: dict[Slot, list[bytes]] = {}
        self._sums: set[tuple[str, SumId]] = set()
        self._used: dict[Slot, SumId] = {}
        self._answered: set[tuple[str, int, str]] = set()  # (job, round, phase) of sums with revealed shares
        self._survivors: dict[Slot, set[tuple[str, ...]]] = {}
        self._revealed: dict[tuple[Slot, Group], set[tuple[str, ...]]] = {}
        self._verified: set[Slot] = set()  # of totals
        self._rounds: dict[str, dict[str, int]] = {}  # lineage -> job -> the last round with revealed shares
        self._states: dict[tuple[str, bytes], dict[int, set[str]]] = {}  # (lineage, state) -> round -> jobs
        self._begun: dict[tuple[str, bytes, int], set[str]] = {}  # (lineage, state, round) -> jobs with terms
        self._cohorts: dict[str, set[tuple[str, ...]]] = {}
        self._profiles: dict[str, list[Profile]] = {}  # in the order in which they came
        self._evaluated: dict[
            str, dict[tuple[str, int, str], Evaluated]
        ] = {}  # data set -> sum -> what it told
        self._trained: dict[str, dict[tuple[str, int, str], Trained | Multiplied]] = {}
        self._evaluations, self._training = _Runs(), _Runs()
        for entry in entries:
            self.append(entry)

    def __repr__(self) -> str:
        return f"History({len(self._epochs)} jobs, {len(self._sums)} sums)"

    def append(self, entry: Entry) -> None:
        """Add one entry."""
        match entry:
            case Advertised():
                self._epochs[entry.job] = max(entry.epoch, self._epochs.get(entry.job, -1))
                self._idle[entry.job] = self._idle.get(entry.job, 0) + 1
            case Requested():
                slot = (entry.job, entry.epoch, entry.slot)
                self._requests.setdefault(slot, []).append(entry.request)
            case SlotUsed():
                self._idle[entry.job] = 0
                key = (entry.job, entry.epoch)
                self._slots[key] = max(entry.slot, self._slots.get(key, -1))
                self._sums.add((entry.job, entry.sum_id))
                self._used[entry.job, entry.epoch, entry.slot] = entry.sum_id
            case Agreed():
                slot = (entry.job, entry.epoch, entry.slot)
                self._survivors.setdefault(slot, set()).add(entry.survivors)
            case Revealed():
                slot = (entry.job, entry.epoch, entry.slot)
                self._survivors.setdefault(slot, set()).add(entry.survivors)
                if (used := self._used.get(slot)) is not None:
                    self._answered.add((entry.job, used.round, used.phase))
                for group in entry.groups:
                    self._revealed.setdefault((slot, group), set()).add(entry.survivors)
            case StaticMasked() | StaticOpened():
                self._cohorts.setdefault(entry.dataset, set()).add(entry.roster)
            case CohortAccepted():
                self._cohorts[entry.dataset] = {entry.roster}
            case ProfileUsed() | ProfileAccepted():
                known = self._profiles.setdefault(entry.dataset, [])
                if entry.profile not in known:
                    known.append(entry.profile)
            case Evaluated():
                self._evaluations.begin(entry)
                self._evaluated.setdefault(entry.dataset, {})[entry.sum] = entry
            case EvaluationsAccepted():
                self._evaluations.accept(entry)
            case Trained() | Multiplied():
                self._training.begin(entry)
                self._trained.setdefault(entry.dataset, {})[entry.sum] = entry
            case RoundsAccepted():
                self._training.accept(entry)
            case TotalVerified():
                self._verified.add((entry.job, entry.epoch, entry.slot))
            case StateMasked():
                self._begun.setdefault((entry.lineage, entry.basis, entry.round), set()).add(entry.job)
            case StateSummed():
                rounds = self._rounds.setdefault(entry.lineage, {})
                rounds[entry.job] = max(entry.round, rounds.get(entry.job, 0))
                summed = self._states.setdefault((entry.lineage, entry.basis), {})
                summed.setdefault(entry.round, set()).add(entry.job)
                # Earlier versions noted no masked term.
                self._begun.setdefault((entry.lineage, entry.basis, entry.round), set()).add(entry.job)
            case _:
                assert_never(entry)

    def check_epoch(self, params: Params) -> None:
        """Check that this site may take part in the setup of this epoch.

        Epoch numbers of a job only increase. An epoch is never begun twice, not even with the same
        parameters, because its keys would be different. And each is an entry for good, so that a server gets
        few of them for nothing.

        Raises:
            ReplayError: TF-608.
        """
        if self._idle.get(params.job, 0) >= (most := max(MAX_ENROLMENTS, 2 * len(params.roster))):
            raise ReplayError(
                f"the enrolments of job {params.job} in a row without a term",
                expected=f"at most {most}",
                found="one more",
            )
        last = self._epochs.get(params.job)
        if last is not None and params.epoch <= last:
            raise ReplayError(
                f"the epoch of job {params.job}", expected=f"after {last}", found=str(params.epoch)
            )

    def check_slot(self, job: str, epoch: int, slot: int, sum_id: SumId) -> None:
        """Check that a slot may be used for a sum: slot numbers only increase, and sum ids never repeat.

        A sum may be tried again only as long as this site has revealed no share for any try of it. A
        site's term is the same in every try, so the difference of two totals over different survivors
        could be one site's whole update.

        Raises:
            ReplayError: TF-608.
        """
        last = self._slots.get((job, epoch))
        if last is not None and slot <= last:
            raise ReplayError(f"the slot of sum {sum_id}", expected=f"after {last}", found=str(slot))
        if (job, sum_id) in self._sums:
            raise ReplayError(f"the sum in slot {slot}", expected="a new one", found=f"{sum_id}, used before")
        if (job, sum_id.round, sum_id.phase) in self._answered:
            raise ReplayError(
                f"the try {sum_id}",
                expected="of a sum without revealed shares",
                found="one with revealed shares",
            )

    def check_request(self, wanted: Requested) -> None:
        """Check that a slot's term was requested in the same way before, if at all, and not too often.

        A site whose process died over a request tells by that something of its records. So a server gets
        one request a slot, and a limited number of tries of it.

        Raises:
            ReplayError: TF-608.
        """
        before = self._requests.get((wanted.job, wanted.epoch, wanted.slot), [])
        if any(request != wanted.request for request in before):
            raise ReplayError(
                f"the request for a term of slot {wanted.slot}", expected="the first one", found="another"
            )
        if len(before) >= MAX_STARTS:
            raise ReplayError(
                f"the request for a term of slot {wanted.slot}",
                expected=f"at most {MAX_STARTS} times",
                found="once more, after this site's process ended each time before its term was made",
            )

    def check_resumed(self, params: Params, sum_id: SumId, basis: bytes, *, first: bool) -> None:
        """Check that a resumed job goes on where its chain stopped.

        Before a record is read for it, and as its term is masked: other jobs may have begun meanwhile. Once
        a term has left, others can open it without this site, so each counts from then on.

        Each job that begins with a state gives one more total of updates from it, over silos of the server's
        choice and from batches drawn anew. So the chain goes back by one round at most, which a server that
        stopped can have lost; a state is summed in its own round; and in a few jobs alone.

        Args:
            params: of an epoch of the resumed job.
            basis: SHA-256 of the state that it rests on.
            first: whether no total is told with the request.

        Raises:
            ReplayError: TF-608.
        """
        job, rounds = params.job, self._rounds.get(params.lineage, {})
        last = max((number for other, number in rounds.items() if other != job), default=0)
        if sum_id.round < last - 1:
            raise ReplayError(
                "the round of a resumed job",
                expected=f"{last - 1} at least, because this site gave shares of round {last} before",
                found=str(sum_id.round),
            )
        begun = self._begun.get((params.lineage, basis, sum_id.round), set())
        if not first or job in rounds or job in begun:
            return
        summed = self._states.get((params.lineage, basis), {})
        if summed and sum_id.round not in summed:
            raise ReplayError(
                "the state that a resumed job begins with",
                expected=f"that of round {sum_id.round}",
                found=f"that of {sorted(summed)}",
            )
        if len(begun) >= MAX_JOBS_OF_STATE:
            raise ReplayError(
                f"the state of round {sum_id.round}",
                expected=f"summed in {MAX_JOBS_OF_STATE} jobs at most",
                found="one more job that begins with it",
            )

    def verified(self, job: str, epoch: int, slot: int) -> bool:
        """Return True if this site has verified the total of a slot."""
        return (job, epoch, slot) in self._verified

    def check_survivors(self, job: str, epoch: int, slot: int, survivors: Sequence[str]) -> None:
        """Check that this site has signed or revealed for no other survivor set in this slot.

        Raises:
            SurvivorsError: TF-611.
        """
        for before in self._survivors.get((job, epoch, slot), ()):
            if before != tuple(survivors):
                raise SurvivorsError(
                    f"the survivors of slot {slot}",
                    expected=f"the set that this site answered before, {list(before)}",
                    found=str(list(survivors)),
                )

    def check_kinds(self, job: str, epoch: int, slot: int, survivors: Sequence[str], group: Group) -> None:
        """Check that no share of the other kind was revealed for any site in this slot and group.

        One survivor set for each slot implies it. It is checked separately because the security of the
        sum depends on it: with b and s of a site, the server has its vector.

        Raises:
            SurvivorsError: TF-611.
        """
        for before in self._revealed.get(((job, epoch, slot), group), ()):
            both = sorted(set(before) ^ set(survivors))
            if both:
                raise SurvivorsError(
                    f"the {group} shares of slot {slot}",
                    expected="of one kind for each site",
                    found=f"the other kind revealed before for {both}",
                )

    def check_static(self, dataset: str, roster: Sequence[str]) -> None:
        """Check that the static group of a data set was masked for no other cohort.

        Raises:
            StaticCohortError: TF-612.
        """
        for before in sorted(self._cohorts.get(dataset, ())):
            if before != tuple(roster):
                raise StaticCohortError(
                    f"the cohort of the static group of {dataset}",
                    expected=f"the one that it is open for, {list(before)}",
                    found=str(list(roster)),
                )

    def static_known(self, dataset: str, roster: Sequence[str]) -> bool:
        """Return True if the static group was masked or opened for this cohort before."""
        return tuple(roster) in self._cohorts.get(dataset, ())

    def profiles(self, dataset: str) -> tuple[Profile, ...]:
        """Return the release profiles used or accepted for a data set, in the order of their entries."""
        return tuple(self._profiles.get(dataset, ()))

    def check_profile(self, dataset: str, profile: Profile) -> None:
        """Check that a release profile is the data set's first, agrees with an earlier one, or was accepted.

        A profile lacks the settings of sums that its jobs do not have. Such a job agrees with one that has
        these sums, as long as no other job had them with another value.

        Raises:
            ReleaseProfileError: TF-617, naming the settings that an earlier profile has with another value.
        """
        known, now = [dict(item) for item in self.profiles(dataset)], dict(profile)
        if not known or any(_agrees(now, before, known) for before in known):
            return
        differing = differences(self.profiles(dataset), profile)
        shown = [(name, *in_words(values, value)) for name, values, value in differing]
        earlier = ", ".join(f"{name} {' or '.join(values)}" for name, values, _ in shown)
        asked = ", ".join(f"{name} {value}" for name, _, value in shown)
        together = all(value in values for _, values, value in differing)
        raise ReleaseProfileError(
            f"the release profile of {dataset}",
            expected=f"as in earlier sums over it ({earlier})",
            found=f"{'a new combination of these' if together else 'another'} ({asked})",
        )

    def evaluated(self, dataset: str) -> tuple[int, int, int]:
        """Return what all jobs have told of a data set's evaluated records, as ``Most`` has it."""
        evaluations = self._evaluated.get(dataset, {}).values()
        return (
            sum(entry.models for entry in evaluations),
            sum(entry.validation for entry in evaluations),
            sum(entry.test for entry in evaluations),
        )

    def left(self, dataset: str, most: Most) -> Most:
        """Return what is left of a site's limits."""
        limits = zip(most, self.evaluated(dataset), strict=True)
        return Most(*(None if limit is None else max(0, limit - used) for limit, used in limits))

    def check_evaluations(self, wanted: Evaluated, most: Most) -> None:
        """Check that what a job tells, with what earlier ones told, is within a site's limits, or accepted.

        Args:
            wanted: what one sum tells, or a whole job.
            most: the site's limits over all jobs.

        Raises:
            EvaluationsError: TF-627.
        """
        if wanted.sum in self._evaluated.get(wanted.dataset, {}):
            return  # tried again
        if self._evaluations.accepts(wanted):
            return
        left, before = self.left(wanted.dataset, most), self.evaluated(wanted.dataset)
        now = (wanted.models, wanted.validation, wanted.test)
        over = [
            place
            for place, (number, limit) in enumerate(zip(now, left, strict=True))
            if limit is not None and number > limit
        ]
        if over:
            limits, more, earlier = (opened(numbers) for numbers in (most, now, before))
            raise EvaluationsError(
                f"exact evaluations over {wanted.dataset} by all jobs",
                expected=f"within {', '.join(str(limits[place]) for place in over)}",
                found=", ".join(
                    f"{more[place]} in this job after {str(earlier[place]).partition(' ')[0]} in earlier ones"
                    for place in over
                ),
            )

    def trained(self, dataset: str) -> tuple[Trained | Multiplied, ...]:
        """Return all jobs' sums of trained layers and features; of a sum's tries one is opened."""
        return tuple(self._trained.get(dataset, {}).values())

    def accepts_rounds(self, wanted: Trained | Multiplied) -> bool:
        """Return True if a person accepted the run of this sum, whatever it tells with earlier ones."""
        return self._training.accepts(wanted)


def differences(known: Sequence[Profile], profile: Profile) -> list[tuple[str, list[str], str]]:
    """Return name, earlier values and new value of each setting that differs from an earlier profile."""
    differing = []
    for name, value in sorted(profile):
        earlier = list(dict.fromkeys(other for item in known for other in values_of(name, dict(item))))
        if any(other != value for other in earlier):
            differing.append((name, earlier, value))
    return differing


def in_words(earlier: Sequence[str], value: str) -> tuple[list[str], str]:
    """Return earlier values and a new one of a setting for people: of JSON objects the parts that differ.

    Options of another method or model are those that all have: its others say nothing beside its name.

    >>> in_words(['{"a":{"b":1},"c":2}'], '{"a":{"b":1.5},"c":2}')
    (['b 1'], 'b 1.5')
    >>> in_words(["yes"], "no")
    (['yes'], 'no')
    """
    parts = [_parts(text) for text in (*earlier, value)]
    objects = [item for item in parts if item is not None]
    names = dict.fromkeys(name for item in objects for name in item)

    def differs(name: str) -> bool:
        return any(item.get(name, NONE) != objects[-1].get(name, NONE) for item in objects)

    def tells(name: str) -> bool:
        of, options, _ = name.partition("_options")
        return not options or not differs(of) or all(name in item for item in objects)

    differing = [name for name in names if differs(name) and tells(name)]
    if len(objects) < len(parts) or not differing:
        return list(earlier), value
    ends = [name.rpartition(".")[2] for name in differing]
    short = {name: end if ends.count(end) == 1 else name for name, end in zip(differing, ends, strict=True)}
    words = [", ".join(f"{short[name]} {item.get(name, NONE)}" for name in differing) for item in objects]
    return list(dict.fromkeys(words[:-1])), words[-1]


def _parts(text: str) -> dict[str, str] | None:
    """Return the parts of a JSON object by the dotted names of their places; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    parts: dict[str, str] = {}
    for name, item in value.items():
        inner = _parts(json.dumps(item)) if item else None
        if inner is None:
            parts[name] = NONE if item is None else item if isinstance(item, str) else json.dumps(item)
        else:
            parts |= {f"{name}.{below}": part for below, part in inner.items()}
    return parts


def values_of(name: str, profile: Mapping[str, str]) -> list[str]:
    """Return the values that a profile has of a setting: by its name, or by one that covers it or is covered.

    >>> values_of("x from b", {"x": "1", "x from a": "2", "x from b": "3"})
    ['1', '3']
    """
    return [
        value
        for other, value in profile.items()
        if other == name or other.startswith(f"{name} from ") or name.startswith(f"{other} from ")
    ]


def _agrees(now: Mapping[str, str], before: Mapping[str, str], known: Sequence[Mapping[str, str]]) -> bool:
    """Return True if a profile has an earlier one's values, and contradicts none in its other settings."""
    return all(
        value == before[name]
        if name in before
        else all(value == other for item in known for other in values_of(name, item))
        for name, value in now.items()
    )
