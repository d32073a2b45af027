"""A malicious server, all that it learns, and what it must never be able to do.

``AnyServer`` asks silos whatever a strategy makes up and keeps every answer. After each it works out, from
the secrets that a test knows, what the answers give away together:

- *Which sums it can open.* A masked term is one equation with pads between two silos and a pad of its own.
  Where the own pad is gone, honest silos hang together by the pads that the server does not know; only the
  sum of a whole connected part is free of pads. Each such part must be all honest silos of the one survivor
  set that they signed.
- *What these rest on.* A silo that gave shares must have been told a total that is the sum of its silos'
  terms, and trained the state that follows from it. With a colluding silo in that total it may be off by the
  vector for which this silo signed combinations.
- *Which errors left.* Each has a code, and changes nothing at the silo.
- *What a silo keeps for itself.* The own state with which it made a term of an opened sum was trained on
  verified states alone, for sums for which it gave shares or whose total with it it verified, and is that of
  the total told if the silo is in it.
- *How often.* In a job no two sums are opened that rest on the same state, but for rounding; in a chain of
  jobs no more than the threat model says. Counts open for one cohort.
- *What a silo works on.* One state behind each total, one request a slot, and few tries of it; for the next
  exchange of the plan alone, and for none before the last.
- *What a silo ends with.* A model is among its results only if it is of the verified state after the last
  round, and its personal one if its own state is such a one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.attacks.malicious_server import ROOT
from tests.support.attacks.small_silos import (
    DECLARED,
    ENDLESS,
    JOB,
    NEEDS_STATE,
    SECURE,
    Colluder,
    CrashError,
    Deals,
    Line,
    SmallSilo,
    next_state,
    own_after,
    params_of,
    setup_of,
    specs,
    state_sha256,
    term_of,
)
from tests.support.securesum.protocol import add_integers

from tightframe import __version__
from tightframe.errors import RunError, TightframeError
from tightframe.phases import ServerState
from tightframe.rounds.context import Message
from tightframe.rounds.notes import read_sum
from tightframe.rounds.order import place_of
from tightframe.rounds.run_state import differences, state_bytes
from tightframe.rounds.sums.common import SEAL
from tightframe.securesum import messages
from tightframe.securesum.checks import dropped_masks, dropped_secrets, link
from tightframe.securesum.errors import ProtocolError, RecoveryError, VerificationError
from tightframe.securesum.identity import Anchor, Verifier
from tightframe.securesum.masks import Accumulator
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    NO_TOTAL,
    Advertisements,
    Agreement,
    AgreementRequest,
    Group,
    Kind,
    Masked,
    Params,
    Receipt,
    Reveal,
    RevealRequest,
    SumId,
    TermProof,
    TermRequest,
    Total,
    challenge,
    links_of,
    pair_secret_hash,
    receipts_digest,
)
from tightframe.securesum.primitives import Secret, ed25519_sign
from tightframe.securesum.proofs import Ground
from tightframe.securesum.rules import minimum_survivors
from tightframe.securesum.server import Enrolment, Evidence, MemorySpool, Session, Sum
from tightframe.securesum.site import journal
from tightframe.securesum.site.setup import establish, setup_digest
from tightframe.securesum.site.state import Confirmed, Established, slot_secret, slot_share
from tightframe.securesum.site.totals import KeptTerm

SEEN: Counter[str] = Counter()
"""How often what happened, in all runs of this process: refusals by task and code, sums opened, and so on."""
VERIFIER = Verifier(Anchor(ROOT.certificate), {}, False, datetime.now(UTC))


_ESTABLISHED: dict[tuple[bytes, str, bytes], Established] = {}


def establish_once(state: Confirmed, raw: bytes) -> Established:
    """What ``establish`` returns, which is slow and depends on nothing else; a refusal is made anew."""
    key = state.session, state.epoch.name, setup_digest(raw)
    if key not in _ESTABLISHED:
        if len(_ESTABLISHED) > 512:
            _ESTABLISHED.clear()
        _ESTABLISHED[key] = establish(state, raw)
    return _ESTABLISHED[key]


@dataclass(frozen=True)
class Asked:
    """The request for a term that a silo answered, and the silo's own state with which it did."""

    sum_id: SumId
    schema: str
    basis: str
    total: Total | None
    own: bytes = b""

    @property
    def key(self) -> tuple[SumId, str, str, bytes]:
        """All that the silos of one sum must have in common."""
        return self.sum_id, self.schema, self.basis, b"" if self.total is None else self.total.digest()


@dataclass
class Slot:
    """What the server has of one slot: answers, and what a test knows besides.

    Attributes:
        number: of the slot.
        masked: silo -> its masked term.
        asked: silo -> what its term answers.
        held: honest silo -> everybody's shares that it holds.
        signed: honest silo -> the survivors, and the digest of their receipts, that it signed; or, for the
            whole roster, that it gave shares for.
        agreements: honest silo -> its agreement.
        shown: (holder, dealer, group, kind) of all shares revealed.
        given: honest silo -> groups of which it revealed shares.
        combined: honest silo -> digest of the total for which it told combinations of its term of this slot.
        kept: the colluding silo's term as it keeps it.
        term: the colluding silo's term.
        opened: group -> survivors, once the server can open it.
        lies: digests of totals for which the colluding silo signed false combinations in this slot.
    """

    number: int
    masked: dict[str, Masked] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)
    held: dict[str, Secret] = field(default_factory=dict)
    signed: dict[str, tuple[tuple[str, ...], bytes]] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    shown: set[tuple[str, str, Group, Kind]] = field(default_factory=set)
    given: dict[str, tuple[Group, ...]] = field(default_factory=dict)
    combined: dict[str, bytes] = field(default_factory=dict)
    kept: KeptTerm | None = None
    term: Mapping[Group, bytes] = field(default_factory=dict)
    opened: dict[Group, tuple[str, ...]] = field(default_factory=dict)
    lies: set[bytes] = field(default_factory=set)

    def sums_of(self, name: str) -> bool:
        """Whether a silo gave shares of it, and it is no seal."""
        return name in self.given and self.asked[name].schema != SEAL


@dataclass
class Epoch:
    """An epoch whose set-up is complete.

    Attributes:
        session: as the server has it.
        secrets: honest silo -> its secrets of each slot.
        slots: by number.
        last: evidence of the last total of the chain that the server goes on with.
        chain: (slot, digest) of that chain's totals.
    """

    session: Session
    secrets: Mapping[str, tuple[Secret, ...]]
    slots: dict[int, Slot] = field(default_factory=dict)
    last: Evidence | None = None
    chain: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def params(self) -> Params:
        return self.session.params

    def slot(self, number: int) -> Slot:
        return self.slots.setdefault(number, Slot(number))

    @property
    def next(self) -> int:
        """The first slot that no silo was asked for."""
        return max(self.slots, default=-1) + 1


@dataclass(frozen=True)
class Opened:
    """A sum that the server can open: the job, the step, and the state that it rests on."""

    job: str
    step: int
    basis: str


@dataclass(frozen=True)
class Made:
    """What a silo trained for itself: from which states, and for the sum of which slot."""

    basis: str
    own: bytes
    epoch: int
    slot: int


@dataclass(frozen=True)
class _SetUp:
    """A set-up that many runs begin with."""

    session: Session
    secrets: Mapping[str, tuple[Secret, ...]]
    vaults: Mapping[str, tuple[list[Any], Any, dict[str, bytes]]]
    colluder: Colluder | None


_SET_UPS: dict[tuple[int, int | None, Deals], _SetUp] = {}


class AnyServer:
    """A server that sends anything, and one silo at most that plays along.

    Args:
        sites: number of silos.
        colluding: index of the silo that plays along; None if all are honest.
        folder: for the silos' files.
        deals: what the silo that plays along deals falsely.
        keeps: whether silos keep a state of their own.
        line: the job's exchanges.
    """

    def __init__(
        self,
        sites: int,
        colluding: int | None,
        folder: Path,
        deals: Deals | None = None,
        *,
        keeps: bool = True,
        line: Line = ENDLESS,
    ) -> None:
        self.names, self.line = tuple(f"site-{number}" for number in range(1, sites + 1)), line
        self.setup = setup_of(self.names, None, line)
        mate = None if colluding is None else self.names[colluding]
        self.silos = {
            name: SmallSilo(name, self.names, folder / name, keeps=keeps, line=line)
            for name in self.names
            if name != mate
        }
        self.deals, self.keeps = deals or Deals(), keeps
        self.colluder = None if mate is None else Colluder(mate, self.names, self.deals)
        self.start = start = self.setup.initial_state()
        self.state, self.before = state_sha256(start), ""
        self.states: dict[str, ServerState] = {self.state: start}
        self.deceived: set[str] = set()  # silos that got other requests for a term than the honest server's
        self.good = {self.state}  # states that follow from the job and from verified totals
        self.claims: dict[str, list[str]] = {}  # sums that it says were opened
        self.made: dict[bytes, Made] = {}  # a silo's own state -> what it was trained from
        self.counted: set[bytes] = set()  # those with which silos gave shares
        self.after = {self.state: 0}  # state -> the step that it follows from
        self.follows: dict[str, str] = {}  # state -> the one before
        self.known = {self.state: 0}  # verified state -> the step that it follows from
        self.job, self.jobs = JOB, 0
        self.refused: set[str] = set()  # silos that do not take part in the job
        self.forgot: set[str] = set()  # silos that lost their copy of the run's state, or all in memory
        self.summed: list[Opened] = []
        self.cohorts: set[tuple[str, ...]] = set()  # for which counts were opened
        self.verified: dict[str, set[tuple[int, int]]] = {}  # totals with a silo
        self.tries: dict[tuple[str, int, int], list[tuple[str, SumId, Total | None]]] = {}
        self.asked: set[tuple[str, SumId]] = set()  # job, sum
        self.behind: dict[tuple[str, int, bytes], list[str]] = {}  # silo, epoch, total -> states worked on
        self.step = 0  # the last one whose total it goes on with
        self.epochs: dict[int, Epoch] = {}
        self.begun = -1  # the last epoch that was begun
        self.log: list[tuple[str, str, Message]] = []
        self.answers: dict[tuple[str, str, str, bytes, str], bytes] = {}
        key = (sites, colluding, self.deals)
        if key not in _SET_UPS:
            self.begin(self.names)
            _SET_UPS[key] = self._stored()
        self._restore(_SET_UPS[key])

    # Set-up --------------------------------------------------------------------------------------

    def _stored(self) -> _SetUp:
        vaults = {
            name: (list(silo.vault.facts), silo.vault._state, dict(silo.vault._stored))
            for name, silo in self.silos.items()
        }
        epoch = self.epochs[0]
        return _SetUp(epoch.session, epoch.secrets, vaults, self.colluder and self.colluder.copy())

    def _restore(self, stored: _SetUp) -> None:
        for name, (facts, state, kept) in stored.vaults.items():
            vault = self.silos[name].vault
            vault.facts, vault._state, vault._stored = list(facts), state, dict(kept)
            self.silos[name].restart()
        self.colluder = stored.colluder and stored.colluder.copy()
        self.epochs, self.begun = {0: Epoch(stored.session, stored.secrets)}, 0
        self.log = []

    @property
    def mate(self) -> str | None:
        """The silo that plays along."""
        return None if self.colluder is None else self.colluder.name

    def willing(self) -> list[str]:
        """Silos that must take part in another epoch: who verified the totals of all sums that it opened."""
        found = [] if self.mate is None else [self.mate]
        for name, silo in self.silos.items():
            state = silo.established
            if name in self.refused or silo.begun_elsewhere:
                continue
            if state is not None and state.last_revealed > (-1 if state.told is None else state.told.slot):
                continue  # it gave shares of a sum whose total it was not told
            if state is None or state.told is None:
                found.append(name)
                continue
            kind = journal.TotalVerified.KIND
            verified = [(item["epoch"], item["slot"]) for item in silo.vault.facts if item["entry"] == kind]
            if (state.epoch.params.epoch, state.told.slot) in verified:
                found.append(name)
        return sorted(found)

    def begin(
        self, roster: Sequence[str], *, static_open: bool = True, faces: Mapping[str, str] | None = None
    ) -> bool:
        """Set up an epoch; False if a silo refuses.

        Args:
            roster: of the epoch.
            static_open: as the server proposes it.
            faces: silo -> what is wrong of what it is shown: ``roster``, or ``declaration`` of the one that
                plays along.
        """
        self.begun += 1
        before = self.colluder and self.colluder.copy()
        refusing = set(roster) & set(self.silos) - set(self.willing())
        made = self._begun(roster, static_open, faces or {})
        assert not (made and refusing), "an epoch of silos that gave shares of a total not verified"
        if not made:
            self.colluder = before
        return made

    def _begun(self, roster: Sequence[str], static_open: bool, faces: Mapping[str, str]) -> bool:
        proposed = partial(params_of, self.names, static_open=static_open, job_id=self.job)
        params = proposed(roster, self.begun)
        honest = [name for name in roster if name in self.silos]
        enrolment, items = Enrolment(params, verifier=VERIFIER), {}
        for name in roster:
            if name == self.mate:
                assert self.colluder is not None
                items[name] = self.colluder.advertise(params)
                enrolment.add(name, items[name])
                continue
            shown = params
            if faces.get(name) == "roster":
                shown = proposed(roster[:-1], self.begun)
            message = {"job_sha256": "", "version": __version__, SECURE: shown.to_bytes()}
            answer = self.deliver(name, "enroll", message)
            if isinstance(answer, str):
                return False
            items[name] = answer[SECURE]
            if shown == params:
                enrolment.add(name, items[name])
        relay = Advertisements(tuple(items[name] for name in roster))
        sessions = {}
        for name in honest:
            mine = relay
            if faces.get(name) == "declaration" and self.colluder is not None and self.mate in roster:
                other = self.colluder.copy().advertise(params, DECLARED.to_bytes().replace(b"true", b"false"))
                mine = Advertisements(tuple(other if item == self.mate else items[item] for item in roster))
            answer = self.deliver(name, "confirm", {SECURE: mine.to_bytes()})
            if isinstance(answer, str):
                return False
            sessions[name] = answer[SECURE]
        if self.colluder is not None and self.mate in roster:
            sessions[self.colluder.name] = self.colluder.confirm(relay, VERIFIER)
        session = Session(params, relay)
        try:
            for name, raw in sessions.items():
                session.add(name, raw)
        except ProtocolError:
            assert faces
            return False
        secrets = {name: self.silos[name].vault.state().secrets for name in honest}  # type: ignore[union-attr]
        self.epochs[self.begun] = Epoch(session, secrets)
        return True

    @property
    def epoch(self) -> Epoch:
        """The last one whose set-up is complete."""
        return self.epochs[max(self.epochs)]

    def resume(self, state: str, after: int, lost: Iterable[str] = ()) -> bool:
        """Begin a job that goes on after a round with a state; False if no epoch of it begins.

        Args:
            state: with which it begins.
            after: the round; each silo goes back to its own state of then.
            lost: silos without their state of the job before.
        """
        self.jobs += 1
        self.job = f"{JOB}-{self.jobs}"
        self.refused, lost = set(), set(lost)
        for name, silo in self.silos.items():
            words = silo.verified.split()
            known, behind = state in words, f"after:{state}/"
            sums = [read_sum(word.removeprefix(behind)) for word in words if word.startswith(behind)]
            # Who gave no shares of the closing knows the last state as the one behind the closing alone.
            known = known and (not sums or after * self.line.of in map(self.line.step, sums))
            try:
                silo.resume(self.job, after, with_state=name not in lost)
            except RunError:
                self.refused.add(name)
                continue
            kind = journal.StateSummed.KIND
            summed = [item for item in silo.vault.facts if item["entry"] == kind]
            rounds = [item["round"] for item in summed]
            own = [item["round"] for item in summed if item["basis"] == state]
            then = after * self.line.of
            right = known and self.after.get(state) == then and not set(own) - {self.round_of(then + 1)}
            if name in lost or not right or after < max(rounds, default=0) - 2:
                self.deceived.add(name)
            self.forgot.discard(name)
            if name in lost:
                self.forgot.add(name)
        self.state, self.before, self.step, self.claims = state, "", after * self.line.of, {}
        self.after.setdefault(state, self.step)
        return len(roster := self.willing()) >= 3 and self.begin(
            roster, static_open=tuple(roster) == self.names
        )

    def resumable(self) -> tuple[str, int]:
        """The state from which an honest server would resume, and the round after which."""
        best = self.state if self.state in self.good else self.before or self.state
        while self.after[best] % self.line.of:
            best = self.follows[best]
        return best, self.round_after(best)

    def round_after(self, state: str) -> int:
        """The last round that is over with a state; 0 for one that is not known."""
        return self.after.get(state, 0) // self.line.of

    def round_of(self, step: int) -> int:
        """The round of a step."""
        return self.line.place(step)[1]

    def start_again(self, names: Iterable[str]) -> None:
        """Begin other processes of the job at silos, which have lost what was in memory."""
        for name in names:
            self.silos[name].start_again()
            self.deceived.add(name)

    def lose_copy(self, name: str) -> None:
        """Damage a silo's copy of the run's state: it takes one over as soon as it may."""
        self.silos[name].lose_followed()
        self.deceived.add(name)
        self.behind = {key: states for key, states in self.behind.items() if key[0] != name}

    # Messages ------------------------------------------------------------------------------------

    def honest(self, message: Message) -> bool:
        """Return True for a request for the run's next term, with its state and total; note the sum."""
        last = self.epoch.last
        try:
            request = TermRequest.from_bytes(message[SECURE])
        except ProtocolError:
            return False
        self.asked.add((self.epoch.params.job, request.sum_id))
        if request.schema != SEAL and self.line.step(request.sum_id) != self.step + 1:
            return False
        right = b"" if last is None else last.total.to_bytes()
        return (message["state"], message["before"], request.total) == (self.state, self.before, right)

    def sum_id(self, kind: str, step: int | None = None) -> SumId:
        """Return the name of a sum that was in no request before: of the next step, unless one is given."""
        step = self.step + 1 if step is None else step
        for attempt in range(1000):
            made = self.line.sum_id(step, attempt)
            if kind == SEAL:
                made = SumId.of(kind, self.epoch.params.epoch, attempt, 0)
            if (self.epoch.params.job, made) not in self.asked:
                break
        return made

    def deliver(self, name: str, task: str, message: Message, *, crash: bool = False) -> Message | str:
        """Send a message; return the answer, or the code of the refusal."""
        silo = self.silos[name]
        if task == "contribute" and not self.honest(message):
            self.deceived.add(name)
        before, silo.vault.crash = silo.vault.done(), crash
        own, trained = silo.own(), len(silo.trained)
        try:
            answer = silo.handle(task, message)
        except CrashError:
            SEEN[f"crash {task}"] += 1
            self._check_work(name, message, silo.trained[trained:])
            silo.restart()
            return "crash"
        except TightframeError as error:
            code: str = error.code
            assert re.fullmatch(r"TF-\d{3}", code), f"a refusal without a code: {error!r}"
            assert silo.vault.done() == before, "a refusal changed something"
            assert silo.own() == own, "a refusal changed the silo's own state"
            SEEN[f"refused {task} {code}"] += 1
            self._check_work(name, message, silo.trained[trained:])
            return code
        finally:
            silo.vault.crash = False
        self._check_work(name, message, silo.trained[trained:])
        if NEEDS_STATE in answer:
            assert silo.vault.done() == before
            SEEN["asked for the state"] += 1
            return answer
        self.log.append((task, name, message))
        key = (self.job, name, task, message[SECURE], message.get("state", ""))
        raw = answer[SECURE]
        if key in self.answers:
            assert self.answers[key] == raw, "another answer to a repeated request"
            SEEN["repeated"] += 1
            return answer
        self.answers[key] = raw
        if task in ("contribute", "agree", "reveal"):
            getattr(self, f"_learn_{task}")(name, message, answer[SECURE])
        if self.line.ends:
            self._check_results(name)
        return answer

    def _check_work(
        self, name: str, message: Message, trained: Sequence[tuple[str, SumId, Total | None]]
    ) -> None:
        """Check what a silo has worked on: one request a slot, a state behind a total, the plan's steps."""
        for state, sum_id, total in trained:
            step = self.line.step(sum_id)
            epoch = self.silos[name].vault.state().epoch.params.epoch
            slot = TermRequest.from_bytes(message[SECURE]).slot
            tries = self.tries.setdefault((name, epoch, slot), [])
            tries.append((state, sum_id, total))
            assert len(tries) <= journal.MAX_STARTS, "records are read for a slot without end"
            assert all(item == tries[0] for item in tries), "records are read for two requests of a slot"
            if total is None:
                known = state in self.good or not differences(self.start, self.states[state])
                assert known, "a state before a first total that nobody verified"
                last = self.after.get(state, step - 1)
                assert step in self.line.after(last), "a state of another exchange"
            else:
                last = self.line.step(total.sum_id)
                assert step in self.line.after(last), "an exchange that is not the next of the plan"
            if name in self.forgot:  # it takes a state over, as one that missed a sum
                continue
            behind = self.behind.setdefault((name, epoch, b"" if total is None else total.digest()), [])
            if all(differences(self.states[other], self.states[state]) for other in behind):
                behind.append(state)
            assert len(behind) == 1, "several states behind one total"

    def _of(self, name: str, number: int) -> Slot:
        state = self.silos[name].established
        assert state is not None
        return self.epochs[state.epoch.params.epoch].slot(number)

    def _learn_contribute(self, name: str, message: Message, raw: bytes) -> None:
        request, masked = TermRequest.from_bytes(message[SECURE]), Masked.from_bytes(raw)
        slot = self._of(name, request.slot)
        if name in slot.masked:  # as asked in another job that goes on from the same
            assert slot.masked[name].to_bytes() == raw, "two terms under one mask"
            SEEN["repeated"] += 1
            return
        total = Total.from_bytes(request.total) if request.total else None
        self._check_order(name, slot, total)
        slot.masked[name] = masked
        own = b"" if request.schema == SEAL else self.silos[name].used
        slot.asked[name] = Asked(request.sum_id, request.schema, message["state"], total, own)
        number = self._epoch_of(name).params.epoch
        after = own_after(name, request.sum_id, message["state"], own)
        self.made[after] = Made(message["state"], own, number, request.slot)
        state = self.silos[name].established
        assert state is not None
        slot.held[name] = state.slots[request.slot].shares  # type: ignore[union-attr]
        combined = masked.receipt.combinations
        if combined:
            assert total is not None
            epoch = self._epoch_of(name)
            told = epoch.slots[total.slot]
            assert told.signed[name] == (total.survivors, total.receipts), "combinations of another sum"
            assert set(combined) <= set(told.given[name]), "combinations of a group that it kept shut"
            digest = total.digest()
            assert told.combined.setdefault(name, digest) == digest, "combinations of two totals of a slot"
            self._check_secrecy(epoch, told)

    def _check_order(self, name: str, slot: Slot, total: Total | None) -> None:
        """Check that a total is the one told before or of a later sum, and that none was passed over."""
        before = {number: item for number, item in self._epoch_of(name).slots.items() if name in item.asked}
        assert slot.number > max(before, default=-1), "an earlier slot"
        given = [number for number, item in self._epoch_of(name).slots.items() if item.sums_of(name)]
        shown = -1 if total is None else total.slot
        assert shown >= max(given, default=-1), "a total before that of the shares given"
        told = before[max(before)].asked[name].total if before else None
        if told is None:
            assert total is None or total.slot >= max(before, default=0), "a total that was passed over"
        else:
            assert total is not None, "a total that was told is withheld"
            assert total == told or total.slot >= max(before), "another total than the one told"

    def _learn_agree(self, name: str, message: Message, raw: bytes) -> None:
        request, item = AgreementRequest.from_bytes(message[SECURE]), Agreement.from_bytes(raw)
        slot = self._of(name, request.slot)
        epoch = self._epoch_of(name)
        signed = self._shown(epoch, request.receipts)
        assert signed[0] != epoch.params.roster, "a signature that nobody needs"
        assert slot.signed.setdefault(name, signed) == signed, "two survivor sets or receipts"
        slot.agreements[name] = item
        SEEN["agreed"] += 1

    def _shown(self, epoch: Epoch, receipts: Sequence[Receipt]) -> tuple[tuple[str, ...], bytes]:
        """Return the survivors and the digest of their receipts."""
        return tuple(item.name for item in receipts), receipts_digest(epoch.session.session, receipts)

    def _learn_reveal(self, name: str, message: Message, raw: bytes) -> None:
        request, item = RevealRequest.from_bytes(message[SECURE]), Reveal.from_bytes(raw)
        epoch = self._epoch_of(name)
        slot = self._of(name, request.slot)
        signed = self._shown(epoch, request.receipts)
        if signed[0] == epoch.params.roster:
            slot.signed.setdefault(name, signed)
            SEEN["shares given for the whole roster"] += 1
        assert slot.signed[name] == signed, "shares for another survivor set or receipts than it signed"
        shares: Mapping[Group, Mapping[str, bytes]] = {"update": item.update, "static": item.static}
        for group, revealed in shares.items():
            for dealer, data in revealed.items():
                place = epoch.params.index(dealer)
                kinds = [kind for kind in KINDS if slot_share(slot.held[name], place, group, kind) == data]
                assert len(kinds) == 1
                slot.shown.add((name, dealer, group, kinds[0]))
        slot.given[name] = tuple(group for group in GROUPS if shares[group])
        SEEN["shares given"] += 1
        if len({slot.signed[silo][0] for silo in slot.given}) > 1:
            SEEN["shares given for the roster and a smaller set"] += 1
        self._check_ground(epoch, slot, name)
        self._check_secrecy(epoch, slot)

    def _epoch_of(self, name: str) -> Epoch:
        state = self.silos[name].established
        assert state is not None
        return self.epochs[state.epoch.params.epoch]

    # What it can compute -------------------------------------------------------------------------

    def _check_secrecy(self, epoch: Epoch, slot: Slot) -> None:
        """Work out which sums of honest terms can be unmasked; each must be one whole survivor set's."""
        params = epoch.params
        for group in GROUPS:
            known = {
                kind: {dealer for dealer in params.roster if self._known(epoch, slot, dealer, group, kind)}
                for kind in KINDS
            }
            if group == "update":
                known["self"] |= set(slot.combined)  # as good as its own mask, as far as sums go
            parts = self._parts(params, slot, known["pair"])
            free = [part for part in parts if part <= known["self"] & set(slot.masked)]
            if not free:
                continue
            assert len(free) == 1, f"sums over {free} can be opened"
            survivors = self._opened_for(params, slot)
            assert free[0] == set(survivors) & set(self.silos), "a sum over others than signed for it"
            assert slot.opened.get(group, survivors) == survivors, "a sum over two survivor sets"
            assert len(survivors) >= minimum_survivors(params)
            assert len({slot.asked[name].key for name in free[0]}) == 1, "terms of different sums"
            if group not in slot.opened:
                slot.opened[group] = survivors
                SEEN[f"opened {group}"] += 1
                if slot.asked[next(iter(free[0]))].schema != SEAL:
                    self._check_again(epoch, slot.asked[next(iter(free[0]))], group)

    def _check_again(self, epoch: Epoch, asked: Asked, group: Group) -> None:
        """Check that a sum that is opened repeats none: its state, or the cohort of its counts."""
        if group == "static":
            self.cohorts.add(epoch.params.roster)
            assert len(self.cohorts) == 1, "counts of two cohorts"
            return
        now = Opened(epoch.params.job, self.line.step(asked.sum_id), asked.basis)
        state = self.states[asked.basis]
        same = [item for item in self.summed if not differences(self.states[item.basis], state)]
        if now.step > self.line.last:  # the closing changes nothing of the state that personal models rest on
            assert {item.step > self.line.last for item in same} <= {True}, "a state trained on and evaluated"
            same = [item for item in same if item.step == now.step]
        assert now.job not in {item.job for item in same}, "one state summed twice in a job"
        if asked.total is not None:
            allowed = self.line.after(self.line.step(asked.total.sum_id))
            assert now.step in allowed, "a sum out of order"
        assert {item.step for item in same} <= {now.step}, "a state summed in another step"
        assert len({item.job for item in same}) < journal.MAX_JOBS_OF_STATE, "a state summed without end"
        rounds = [self.round_of(item.step) for item in self.summed if item.job != now.job]
        back = max(rounds, default=0) - self.round_of(now.step)
        assert back <= 1, "a chain that goes back by more than a round"
        SEEN[f"opened {self.line.place(now.step)[0]} {self.line.place(now.step)[2]}"] += 1
        SEEN["opened a state's sum once more in a resumed job"] += bool(same)
        self.summed.append(now)

    def _opened_for(self, params: Params, slot: Slot) -> tuple[str, ...]:
        """Return the survivors of the sum that shares of a slot open, which enough honest silos gave for.

        A few may have been shown the whole roster, and others a smaller set that t silos signed; or all the
        whole roster but those who were asked to sign a smaller set, and gave nothing.
        """
        sets = {slot.signed[name][0] for name in slot.given}
        least = params.threshold - (self.mate in params.roster)
        enough = [
            names for names in sets if sum(slot.signed[name][0] == names for name in slot.given) >= least
        ]
        smaller = [names for names in sets if names != params.roster]
        assert len(smaller) <= 1, f"honest silos gave shares for {sets}"
        assert len(enough) <= 1, f"enough honest silos gave shares for each of {enough}"
        (survivors,) = enough or smaller
        if survivors != params.roster:
            signers = [name for name, (names, _) in slot.signed.items() if names == survivors]
            needed = params.threshold - (self.mate in survivors)
            assert len(signers) >= needed, "fewer than the threshold signed its survivors"
        return survivors

    def _known(self, epoch: Epoch, slot: Slot, dealer: str, group: Group, kind: Kind) -> bool:
        if dealer == self.mate:
            return True
        holders = {
            holder for holder, of, part, what in slot.shown if (of, part, what) == (dealer, group, kind)
        }
        if self.mate in epoch.params.roster:
            holders.add(str(self.mate))
        return len(holders) >= epoch.params.threshold

    def known_seeds(self, epoch: Epoch, slot: Slot) -> dict[str, dict[Group, bytes]]:
        """Return the seeds b of a slot that the server can work out."""
        found: dict[str, dict[Group, bytes]] = {}
        for name in epoch.params.roster:
            own = self._secrets(epoch, name)
            groups: list[Group] = [group for group in GROUPS if self._known(epoch, slot, name, group, "self")]
            if groups and slot.number < len(own):
                found[name] = {
                    group: slot_secret(own[slot.number], group, "self").expose() for group in groups
                }
        return found

    def _parts(self, params: Params, slot: Slot, seeds: set[str]) -> list[set[str]]:
        """Return sets of honest silos that hang together by masks that the server does not know."""
        honest = [name for name in params.roster if name in self.silos]
        parts: list[set[str]] = [{name} for name in honest]
        for first in honest:
            for second in honest:
                if first >= second or first in seeds or (second in seeds and first in slot.masked):
                    continue
                joined = [part for part in parts if first in part or second in part]
                parts = [part for part in parts if part not in joined] + [set().union(*joined)]
        return parts

    def _check_ground(self, epoch: Epoch, slot: Slot, name: str) -> None:
        """Check what the sum rests on for which a silo gave shares."""
        asked = slot.asked[name]
        if asked.schema != SEAL:
            self._check_own(epoch, name, asked)
        if asked.total is None:
            known = asked.basis in self.good or not differences(self.start, self.states[asked.basis])
            assert known, "a first sum on a state that nobody verified"
            self.good.add(asked.basis)
            self.known.setdefault(asked.basis, 0)
            return
        total, source = asked.total, epoch.slots[asked.total.slot]
        self._check_total(epoch, slot, source, total)
        if name in total.survivors:
            self.verified.setdefault(name, set()).add((epoch.params.epoch, total.slot))
        honest = [silo for silo in total.survivors if silo in self.silos]
        bases = {source.asked[silo].basis for silo in honest}
        assert len(bases) == 1 and bases <= self.good
        expected = next_state(
            self.setup, self.states[bases.pop()], total, dict.fromkeys(epoch.params.roster, 1.0)
        )
        trained = self.states[asked.basis]
        assert state_sha256(expected) == asked.basis or not differences(expected, trained), "another state"
        self.good.add(asked.basis)
        self.known.setdefault(asked.basis, self.line.step(total.sum_id))

    def _check_own(self, epoch: Epoch, name: str, asked: Asked) -> None:
        """Check with what own state a silo made a term for which it gives shares."""
        own = asked.own
        told = asked.total
        if self.keeps and told is not None and name in told.survivors and told.schema != SEAL:
            source = epoch.slots[told.slot].asked[name]
            after = own_after(name, source.sum_id, source.basis, source.own)
            if self.line.step(source.sum_id) > self.line.last:
                after = source.own
            assert own == after, "own training was dropped"
            SEEN["own state of the total told"] += 1
        if own:
            made, total = self.made[own], asked.total
            place = made.epoch, made.slot
            counts = name in self.epochs[made.epoch].slots[made.slot].given
            counts = counts or place in self.verified.get(name, ()) or own in self.counted
            if total is not None and name in total.survivors:
                counts = counts or place == (epoch.params.epoch, total.slot)
                # A term that trained nothing was made with it: who opened its sum has verified that.
                source = epoch.slots[total.slot].asked[name]
                ends = self.line.step(source.sum_id) > self.line.last
                counts = counts or (ends and source.own == own)
            assert counts, "an own state of a sum for which it gave no shares"
            self.counted.add(own)
        self._check_made(own)

    def _check_made(self, own: bytes) -> None:
        """Check that an own state was trained on verified states alone."""
        while own:
            assert self.made[own].basis in self.good, "an own state that was trained on a crafted state"
            own = self.made[own].own
            SEEN["own state on a verified state"] += 1

    def _check_results(self, name: str) -> None:
        """Check of what state a silo's final models are: its results, no longer kept apart."""
        for state, own in self.silos[name].results:
            assert self.known.get(state) == self.line.last, "a final model that nobody verified"
            self._check_made(own)
            SEEN["results"] += 1

    def _check_total(self, epoch: Epoch, slot: Slot, source: Slot, total: Total) -> None:
        """Check that a total is the sum of its silos' terms, but for what the colluding silo vouches for."""
        for silo in total.survivors:
            signed = source.signed.get(silo)
            if silo in source.given and signed is not None:
                whole = epoch.params.roster
                if signed[0] == total.survivors:
                    assert set(total.groups) <= set(source.given[silo])
                else:
                    assert signed[0] == whole and silo not in source.combined, "a total over another set"
                    SEEN["verified without a silo that was shown the whole roster"] += 1
            if silo in self.silos:
                assert (source.asked[silo].sum_id, source.asked[silo].schema) == (total.sum_id, total.schema)
        if total.schema == SEAL:
            return
        true = self.sum_of(epoch, source, total.survivors)
        if any(true[group] != data for group, data in total.groups.items()):
            assert self.mate in total.survivors and total.digest() in slot.lies, "a false total was verified"
            SEEN["verified with a vector of the colluding silo's"] += 1

    def sum_of(self, epoch: Epoch, slot: Slot, survivors: Iterable[str]) -> dict[Group, bytes]:
        """The sum of the terms of a slot, in Python's integers."""
        parties = len(epoch.params.roster)
        terms = [
            dict(slot.term) if name == self.mate else dict(self._term_of(slot.asked[name], name, parties))
            for name in survivors
        ]
        return {group: add_integers(specs(parties), group, terms) for group in GROUPS}

    @staticmethod
    def _term_of(asked: Asked, name: str, parties: int) -> Mapping[Group, bytes]:
        return term_of(name, place_of(asked.sum_id), asked.basis, parties, asked.own)

    # What an honest server does ------------------------------------------------------------------

    def evidence(self, epoch: Epoch, slot: Slot) -> Evidence:
        """What the server has of a sum that it can open."""
        survivors = slot.opened["update"]
        name = next(item for item in survivors if item in self.silos)
        asked = slot.asked[name]
        groups: dict[Group, bytes] = {"update": b""}
        if asked.schema != SEAL:
            true = self.sum_of(epoch, slot, survivors)
            groups = {group: true[group] for group in GROUPS if group in slot.opened}
        secrets: dict[Group, dict[str, Secret]] = {}
        for group in groups:
            secrets[group] = {}
            for dealer in epoch.params.roster:
                kind: Kind = "self" if dealer in survivors else "pair"
                own = self._secrets(epoch, dealer)[slot.number]
                secrets[group][dealer] = slot_secret(own, group, kind)
        spool = MemorySpool()
        for silo in survivors:
            spool.keep(slot.number, silo, "update", slot.masked[silo].update)
            spool.keep(slot.number, silo, "static", slot.masked[silo].static)
        return Evidence(
            epoch.session,
            Total(slot.number, asked.sum_id, asked.schema, survivors, groups, self._digest(slot, survivors)),
            {silo: slot.masked[silo].receipt for silo in survivors},
            {silo: slot.masked[silo].links for silo in survivors},
            secrets,
            spool,
        )

    def _digest(self, slot: Slot, survivors: tuple[str, ...]) -> bytes:
        """Return the digest of receipts for which most silos gave their shares of a sum."""
        shown = [slot.signed[name] for name in sorted(slot.given)]
        found = Counter(digest for names, digest in shown if names == survivors)
        return found.most_common(1)[0][0]

    def _secrets(self, epoch: Epoch, name: str) -> tuple[Secret, ...]:
        if name in epoch.secrets:
            return epoch.secrets[name]
        assert self.colluder is not None
        state = self.colluder._state
        if hasattr(state, "secrets"):
            return tuple(state.secrets)
        return tuple(item.secrets for item in state.slots)

    def adopt(self, epoch: Epoch, slot: Slot) -> None:
        """Go on with a sum that can be opened: its total is the next one told."""
        evidence = self.evidence(epoch, slot)
        asked = next(slot.asked[name] for name in slot.opened["update"] if name in self.silos)
        SEEN[f"adopted {asked.schema}"] += 1
        if asked.schema == SEAL:
            return
        epoch.last = evidence
        epoch.chain.append((slot.number, evidence.total.digest()))
        self._go_on(asked.basis, evidence.total, epoch)

    def _go_on(self, basis: str, total: Total, epoch: Epoch) -> None:
        self.before, self.state = basis, self.follow(basis, total, epoch)
        self.step = self.line.step(total.sum_id)
        if self.step > self.line.last:
            self.after.setdefault(self.state, self.line.last)
            return
        self.after[self.state] = self.step
        self.after.setdefault(basis, self.step - 1)

    def follow(self, basis: str, total: Total, epoch: Epoch) -> str:
        """Return the state after a total, known by its hash from now on."""
        weights = dict.fromkeys(epoch.params.roster, 1.0)
        try:
            state = next_state(self.setup, self.states[basis], total, weights)
        except TightframeError:
            return basis
        sha256 = state_sha256(state)
        self.states[sha256] = state
        self.follows.setdefault(sha256, basis)
        return sha256

    def clean(self, name: str, epoch: Epoch) -> bool:
        """Return True if a silo of the epoch was told nothing but the chain that the server goes on with.

        And if it has signed no other survivors of the sum whose total is told next, and given shares of no
        later one.
        """
        if name == self.mate:
            return True
        if epoch.params.job != self.job or name in self.deceived or name in self.deals.boxes:
            return False
        facts = self.silos[name].vault.facts
        summed = [item for item in facts if item["entry"] == journal.StateSummed.KIND]
        rounds = {item["round"] for item in summed if item["basis"] == self.state and item["job"] != self.job}
        if rounds - {self.round_of(self.step + 1)}:
            return False  # a resumed job has a state summed in its own round
        masked = [item for item in facts if item["entry"] == journal.StateMasked.KIND]
        jobs = {item["job"] for item in masked if item["basis"] == self.state}
        if len(jobs - {self.job}) >= journal.MAX_JOBS_OF_STATE:
            return False
        state = self.silos[name].vault.known
        if state is None or state.epoch.params.epoch != epoch.params.epoch:
            return False
        opened = -1 if epoch.last is None else epoch.last.total.slot
        if self._last_revealed(name, epoch) > opened:
            return False
        if epoch.last is not None:
            total = epoch.last.total
            signed = epoch.slots[total.slot].signed.get(name)
            if signed is not None and signed != (total.survivors, total.receipts):
                return False
        numbers = [number for number, slot in epoch.slots.items() if name in slot.asked]
        if not numbers:
            return not any(journal_slot(fact) == epoch.params.epoch for fact in self.silos[name].vault.facts)
        asked, number = epoch.slots[max(numbers)].asked[name], max(numbers)
        told = None if asked.total is None else asked.total.digest()
        right = [digest for slot, digest in epoch.chain if slot < number]
        return told == (right[-1] if right else None)

    def _last_revealed(self, name: str, epoch: Epoch) -> int:
        """Return the last slot of a sum that a silo's journal says it gave shares of; -1 if there is none.

        Its state does not say so after a crash between the two: then they count as given, and none left.
        """
        kind, mine = journal.Revealed.KIND, (epoch.params.job, epoch.params.epoch)
        facts = [item for item in self.silos[name].vault.facts if item["entry"] == kind]
        slots = [item["slot"] for item in facts if (item["job"], item["epoch"]) == mine]
        return max((slot for slot in slots if epoch.slots[slot].asked[name].schema != SEAL), default=-1)

    def message(self, request: TermRequest, **changes: Any) -> Message:
        """A request for a term, as the honest server says it but for ``changes``."""
        kind, number, index = place_of(request.sum_id)
        return {
            "kind": kind,
            "round": number,
            "phase": index,
            "attempt": request.sum_id.attempt,
            "opened": self.claims,
            "state": self.state,
            "before": self.before,
            SECURE: request.to_bytes(),
            **changes,
        }

    def setup_for(self, name: str, epoch: Epoch) -> bytes:
        """The set-up with the first request of an epoch."""
        return epoch.session.setup_for(name).to_bytes()

    def ask(self, name: str, message: Message, *, crash: bool = False) -> Message | str:
        """Ask for a term, and again with the state if the silo asks for it."""
        answer = self.deliver(name, "contribute", message, crash=crash)
        if not isinstance(answer, str) and NEEDS_STATE in answer and message["state"] in self.states:
            sent = {**message, "state_bytes": state_bytes(self.states[message["state"]])}
            answer = self.deliver(name, "contribute", sent, crash=crash)
        return answer

    def honest_sum(self, kind: str, gone: Mapping[str, str]) -> None:
        """Run a sum as the honest server does; ``gone`` says at which exchange silos drop out.

        Whatever was tried before: silos that were told nothing false answer, and the total is exact.
        """
        epoch = self.epoch
        seal = kind == SEAL
        if epoch.next >= epoch.params.slots or (self.step == self.line.end and not seal):
            return
        turn = Sum(
            epoch.session,
            slot=epoch.next,
            sum_id=self.sum_id(kind),
            schema=kind,
            basis=bytes.fromhex(self.state),
            spool=MemorySpool(),
            rests_on=epoch.last,
        )
        slot = epoch.slot(turn.slot)
        clean = {name for name in epoch.params.roster if self.clean(name, epoch)}
        for name in epoch.params.roster:
            if gone.get(name) == "contribute":
                continue
            if name == self.mate:
                last = None if epoch.last is None else epoch.last.total
                mine = self.play_along(epoch, slot, turn.sum_id, turn.schema, last)
                turn.add(name, mine.to_bytes())
                continue
            request = turn.term_request(self.setup_for(name, epoch))
            answer = self.ask(name, self.message(request))
            if isinstance(answer, str) or NEEDS_STATE in answer:
                assert name not in clean, f"{name} was told nothing false, and refuses: {answer}"
                continue
            turn.add(name, answer[SECURE])
        follows = sum(item.follows for item in turn.receipts)
        if len(turn.receipts) < minimum_survivors(epoch.params) or follows <= epoch.params.colluders:
            SEEN["honest sum with too few"] += 1
            return
        survivors = turn.close()
        agreement = {SECURE: turn.agreement_request().to_bytes()}
        for name in () if turn.full else survivors:
            if gone.get(name) == "agree":
                continue
            if name == self.mate:
                turn.add_agreement(name, self.sign_agreement(epoch, slot.number, turn.receipts).to_bytes())
                continue
            answer = self.deliver(name, "agree", agreement)
            assert not isinstance(answer, str), answer
            turn.add_agreement(name, answer[SECURE])
        if not turn.full and len(turn.agreements) < epoch.params.threshold:
            return
        try:
            asking = turn.reveal_request()
        except VerificationError:
            assert self.unprovable(epoch, turn.receipts), "a true total that an honest server cannot prove"
            SEEN["honest sum on a total without a proof"] += 1
            return
        assert not self.unprovable(epoch, turn.receipts), "a proof by what the silo that is gone did not use"
        for name in survivors:
            if gone.get(name) in ("agree", "reveal") or name == self.mate:
                continue
            answer = self.deliver(name, "reveal", {SECURE: asking.to_bytes()})
            assert not isinstance(answer, str), answer
            turn.add_reveal(name, answer[SECURE])
        if self.colluder is not None and self.mate in survivors:
            turn.add_reveal(self.colluder.name, self.shares(epoch, slot, survivors).to_bytes())
        if len(turn.revealers) < epoch.params.threshold:
            return
        try:
            opened = turn.open()
        except RecoveryError as error:
            assert error.blamed == self.mate and self.deals != Deals(), error
            SEEN["honest sum that false dealing keeps shut"] += 1
            if "update" in slot.opened:  # with what the silo that plays along knows
                self.adopt(epoch, slot)
            return
        if not seal:
            true = self.sum_of(epoch, slot, survivors)
            assert opened.groups["update"] == true["update"]
            assert opened.groups.get("static", true["static"]) == true["static"]
        SEEN[f"honest {place_of(turn.sum_id)[0]}"] += 1
        if seal:
            return
        epoch.last = opened.evidence
        epoch.chain.append((turn.slot, opened.evidence.total.digest()))
        self._go_on(self.state, opened.evidence.total, epoch)

    # The silo that plays along -------------------------------------------------------------------

    def misled(self, epoch: Epoch, number: int, survivors: Iterable[str]) -> list[str]:
        """Silos of a sum without the one that plays along, whose masks with it its seed does not give."""
        names = list(survivors)
        if self.mate is None or self.mate in names or self.mate not in epoch.params.roster or number % 2:
            return []
        return [name for name in names if name in self.deals.pairs]

    def unprovable(self, epoch: Epoch, receipts: Iterable[Receipt]) -> bool:
        """Return True if the last total has a term that neither its silo nor the server can show."""
        if epoch.last is None:
            return False
        total = epoch.last.total
        there = {item.name for item in receipts if item.combinations}
        return bool(set(self.misled(epoch, total.slot, total.survivors)) - there)

    def off_by(self, epoch: Epoch, total: Total, victim: str, group: Group) -> bytes:
        """By how much a total is off if a misled silo's masks are removed as the other's seed gives them."""
        session, mate, slot = epoch.session.session, str(self.mate), total.slot
        seed = slot_secret(self._secrets(epoch, mate)[slot], group, "pair")
        links = links_of(epoch.slots[slot].masked[victim].links, group, epoch.params.roster, victim)
        wrong = dropped_secrets(session, slot, group, victim, {mate: seed}, links)
        dealt = self.deals.pair_secret(seed.expose(), session, slot, group, mate, victim)
        assert dealt != wrong[mate][0]
        used = {mate: (dealt, dealt if mate < victim else link(links[mate], dealt))}
        plus, minus = dropped_masks(session, slot, group, victim, wrong)
        right_plus, right_minus = dropped_masks(session, slot, group, victim, used)
        vector = Accumulator(Ground(session, epoch.params, {}, total.told()).layout(group))
        vector.add_streams([*plus, *right_minus], [*minus, *right_plus])
        return vector.to_bytes()

    def with_other_hashes(self, epoch: Epoch, number: int, proof: TermProof) -> TermProof:
        """A proof with the hashes of the pair secrets that the seeds give: those of a second list."""
        victim, mate, session, pairs = proof.receipt.name, str(self.mate), epoch.session.session, proof.pairs
        for group in GROUPS:
            seed = slot_secret(self._secrets(epoch, mate)[number], group, "pair").expose()
            links = links_of(proof.links, group, epoch.params.roster, victim)
            secret = dropped_secrets(session, number, group, victim, {mate: Secret(seed)}, links)[mate][1]
            first, second = sorted((victim, mate))
            signed = epoch.session.signed_pair_secret_hash(first, second, number, group)
            pairs = pairs.replace(signed, pair_secret_hash(session, first, second, number, group, secret))
        return replace(proof, pairs=pairs)

    def play_along(
        self,
        epoch: Epoch,
        slot: Slot,
        sum_id: SumId,
        schema: str,
        total: Total | None,
        *,
        vouches: str = "vouches",
        added: Mapping[Group, bytes] | None = None,
        **receipt: Any,
    ) -> Masked:
        """The colluding silo's masked term, with a receipt that says what it is told to.

        Args:
            epoch, slot, sum_id, schema: of the sum.
            total: that its receipt names.
            vouches: whether its combinations of the total are right for ``added``, ``wrong``, or ``none``.
            added: what they are to have in addition to those of its term.
            receipt: other fields of the receipt.
        """
        assert self.colluder is not None
        self.colluder.establish(self.setup_for(self.colluder.name, epoch))
        term: Mapping[Group, bytes] = {"update": b"", "static": b""}
        if schema != SEAL:
            term = term_of(self.colluder.name, ("", slot.number, 0), "", len(epoch.params.roster))
        combined = self.vouch(epoch, slot, total, added) if vouches == "vouches" else {}
        if vouches == "wrong":
            combined = {"update": bytes(1536)}
        told = NO_TOTAL if total is None else total.digest()
        says = {"total": told, "basis": bytes.fromhex(self.state), "combinations": combined, **receipt}
        masked, kept = self.colluder.mask(slot.number, sum_id, schema, term, **says)
        slot.masked[self.colluder.name], slot.kept, slot.term = masked, kept, term
        return masked

    def vouch(
        self, epoch: Epoch, slot: Slot, total: Total | None, added: Mapping[Group, bytes] | None = None
    ) -> dict[Group, bytes]:
        """The colluding silo's combinations of a total, as if its term had been ``added`` more."""
        assert self.colluder is not None
        if total is None or self.mate not in total.survivors or total.slot not in epoch.slots:
            return {}
        source = epoch.slots[total.slot]
        if source.kept is None or total.schema not in epoch.params.schemas:
            return {}
        told = total.told()
        ground = Ground(epoch.session.session, epoch.params, epoch.session.peers, told)
        if any(len(source.kept.integers[group]) != ground.layout(group).nbytes for group in told.groups):
            return {}
        if added:
            slot.lies.add(total.digest())
        made = challenge(epoch.session.session, told)
        return self.colluder.combine(ground, source.kept, made, added or {})

    def sign_agreement(self, epoch: Epoch, number: int, receipts: Sequence[Any]) -> Agreement:
        """An agreement of the colluding silo."""
        assert self.colluder is not None
        session = epoch.session.session
        names, digest = [item.name for item in receipts], receipts_digest(session, receipts)
        signed = messages.agreement_signed(session, number, receipts[0].sum_id, names, digest)
        return Agreement(self.colluder.name, number, ed25519_sign(self.colluder.signing, signed))

    def shares(self, epoch: Epoch, slot: Slot, survivors: Sequence[str]) -> Reveal:
        """The colluding silo's shares, as an honest one reveals them."""
        assert self.colluder is not None
        held = self.colluder._state.slots[slot.number].shares
        parts = {
            group: {
                dealer: slot_share(held, place, group, "self" if dealer in survivors else "pair")
                for place, dealer in enumerate(epoch.params.roster)
            }
            for group in GROUPS
        }
        given = {group for groups in slot.given.values() for group in groups}
        static = parts["static"] if "static" in given else {}
        unsigned = Reveal(self.colluder.name, slot.number, parts["update"], static, b"")
        signature = ed25519_sign(self.colluder.signing, unsigned.signed(epoch.session.session))
        return replace(unsigned, signature=signature)


def journal_slot(fact: Any) -> int | None:
    """The epoch of a slot that a journal says was used."""
    return int(fact["epoch"]) if fact["entry"] == journal.SlotUsed.KIND else None
