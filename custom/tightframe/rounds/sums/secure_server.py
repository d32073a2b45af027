"""The server's half of secure sums: it relays, adds and opens, and never sees a single silo's term."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tightframe.errors import REPLACED, RunError, SecureSumError, TightframeError
from tightframe.phases import Schema
from tightframe.rounds import codec
from tightframe.rounds.codec import integer_totals
from tightframe.rounds.context import Message
from tightframe.rounds.declaration import Declaration, applied_weights
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.common import (
    SEAL,
    SEALS,
    SECURE,
    Collected,
    Enrolled,
    Transport,
    package_errors,
    split_refusals,
    sum_title,
    too_few,
)
from tightframe.rounds.sums.parameters import epoch_params, schema_name
from tightframe.rounds.sums.transcripts import ServerIdentity, ServerRecord
from tightframe.securesum import messages, rules, server
from tightframe.securesum.errors import RecoveryError, SurvivorsError, VerificationError
from tightframe.securesum.identity import Verifier
from tightframe.securesum.messages import GROUPS, Group


class SecureSums:
    """Secure sums at the server.

    Args:
        setup: the validated job.
    """

    def __init__(
        self, setup: JobSetup, identity: ServerIdentity, record: ServerRecord, log: logging.Logger
    ) -> None:
        self._setup = setup
        self._identity = identity
        self._record = record
        self._log = log
        self._epoch = 0
        self._slot, self._seals = 0, 0  # used in this epoch
        self.static_cohort: tuple[str, ...] | None = None  # the cohort for which counts were requested
        self._session: server.Session | None = None
        self._informed: set[str] = set()  # silos that have received this epoch's setup
        self._request: Message = {}
        self._weights: dict[str, float] = {}
        self._any_cohort = False  # whether every silo opens counts for any cohort (research profile)
        self._spool: server.Spool = FileSpool()
        self._evidence: server.Evidence | None = None  # of this epoch's last total
        self._checked = False  # whether silos have verified that total

    @property
    def weights(self) -> Mapping[str, float]:
        """Public weights of the enrolled silos, from their signed declarations, as sums apply them."""
        return self._weights

    @property
    def params(self) -> messages.Params:
        """Parameters of the current epoch."""
        return self._ready().params

    def describe(self) -> str:
        """Describe how the sums are protected, in words."""
        if self._session is None:
            return "secure"
        params = self.params
        text = (
            f"secure (the server sees totals of at least {rules.minimum_survivors(params)} of "
            f"{len(params.roster)} silos; silos verify each total and compute the model from it"
        )
        if self._evidence is not None and not self._checked:
            text += f", but have not verified the last one, of {sum_title(self._evidence.total.sum_id)}"
        text += f"; threshold {params.threshold}, {params.colluders} colluding assumed"
        if params.trust == "semi_honest":
            text += ", a semi-honest server assumed"
        return text + ("; SIMULATED identities, which prove nothing)" if self._identity.simulated else ")")

    def enroll(self, transport: Transport, request: Message, sites: Sequence[str]) -> Enrolled:
        """Enrol these silos in two exchanges, repeated with a smaller roster while silos do not answer.

        Raises:
            RefusedError, TooFewError: see ``Sums``.
        """
        self._request = dict(request)
        return self._set_up(transport, sites)

    def collect(
        self,
        transport: Transport,
        sum_id: messages.SumId,
        schema: Schema,
        requests: Mapping[str, Message],
        accepted: Callable[[str], None],
    ) -> Collected:
        """Collect a sum in two exchanges, terms and shares; after a drop-out agreement stands between them.

        Raises:
            TooFewError: TF-501; nothing was opened.
            RunError: if nothing was opened and a silo is to blame.
        """
        if self._slot >= self.params.slots - SEALS:
            self._close_epoch(transport, next(iter(requests.values())))
            self._epoch += 1
            self._log.info("all %d slots are used: setting up the next epoch", self.params.slots)
            self._set_up(transport, self.params.roster)
        name = schema_name(sum_id.phase, codec.specs(schema, len(self.params.roster)))
        total = self._sum(sum_id, name, _basis(next(iter(requests.values()))))
        if self.params.static_open and schema.group("static"):
            # Silos record the cohort when they mask, whether or not the sum is opened.
            self.static_cohort = self.params.roster
        return self._run(transport, total, schema, requests, accepted)

    @property
    def verified(self) -> bool:
        """Return True: silos give no share of a sum before they have verified the total that it rests on."""
        return True

    def seal(self, transport: Transport, request: Message, *, last: bool = True) -> bool:
        """Let the silos verify this epoch's last total, in a sum without fields, tried twice.

        A total that they do not verify is kept: the log, the transcript and ``describe`` say so.
        """
        slots = self.params.slots - (0 if last else SEALS)
        for _ in range(SEALS):
            if self._evidence is None or self._slot >= slots:
                break
            attempt, self._seals = self._seals, self._seals + 1
            if self._seal(transport, request, self._evidence, attempt):
                if last:
                    self._drop_evidence()
                self._checked = True
                return True
        return self._evidence is None

    def _seal(self, transport: Transport, request: Message, evidence: server.Evidence, attempt: int) -> bool:
        """Have a total verified once; return whether it was."""
        # Silos that gave shares in an earlier seal take part in no second try of the same sum.
        sum_id = messages.SumId.of(SEAL, self.params.epoch, attempt, 0)
        place = {"kind": SEAL, "round": sum_id.round, "phase": attempt, "attempt": 0}
        requests = {site: {**request, **place} for site in self.params.roster}
        total = self._sum(sum_id, SEAL, _basis(request))
        try:
            self._run(transport, total, Schema(()), requests, lambda site: None)
        except TightframeError as error:
            if error.code == REPLACED:
                raise
            title = sum_title(evidence.total.sum_id)
            self._log.warning("the silos did not verify the last total, of %s: %s", title, error)
            return False
        return True

    def _close_epoch(self, transport: Transport, request: Message) -> None:
        """Let the silos verify the epoch's last total; otherwise they take part in no other epoch.

        Raises:
            RunError: TF-623, if they do not.
        """
        self.seal(transport, request)
        if self._evidence is not None:
            last = sum_title(self._evidence.total.sum_id)
            raise RunError(
                f"the silos did not verify the total of {last}, so that they set up no other epoch: the log "
                "says which silos failed. Resume the job once they are back.",
                code="TF-623",
            )

    def _run(
        self,
        transport: Transport,
        total: server.Sum,
        schema: Schema,
        requests: Mapping[str, Message],
        accepted: Callable[[str], None],
    ) -> Collected:
        """Collect and open one sum."""
        down, up = 0, 0

        def add(site: str, answer: Message) -> None:
            nonlocal up
            with package_errors():
                total.add(site, _message(answer, site))
            up += len(answer[SECURE])
            self._informed.add(site)
            accepted(site)

        to_all = {}
        common = total.term_request().to_bytes()  # as large as the total: one copy for all
        for site in self.params.roster:
            if site not in requests:
                continue
            known, setup = site in self._informed, self._ready()
            own = common if known else total.term_request(setup.setup_for(site).to_bytes()).to_bytes()
            to_all[site] = {**requests[site], SECURE: own}
            down += len(own)
        failed = dict(transport.exchange("contribute", to_all, add))
        try:
            return self._open(transport, total, schema, failed, (down, up))
        except RunError as error:
            self._record.failed(total, error.code)
            self._spool.erase(total.slot)
            raise

    def _sum(self, sum_id: messages.SumId, schema: str, basis: bytes) -> server.Sum:
        slot, self._slot = self._slot, self._slot + 1
        return server.Sum(
            self._ready(),
            slot=slot,
            sum_id=sum_id,
            schema=schema,
            basis=basis,
            spool=self._spool,
            rests_on=self._evidence,
        )

    def _drop_evidence(self) -> None:
        if self._evidence is not None:
            self._spool.erase(self._evidence.total.slot)
        self._evidence, self._checked = None, False

    def _open(
        self,
        transport: Transport,
        total: server.Sum,
        schema: Schema,
        failed: dict[str, str],
        traffic: tuple[int, int],
    ) -> Collected:
        """Open a sum whose terms are in.

        Args:
            failed: silo -> code, of those without a term in it.
            traffic: bytes sent and received so far, for the record.
        """
        least, title = rules.minimum_survivors(self.params), sum_title(total.sum_id)
        try:
            cohort = list(total.close())
        except SurvivorsError:
            raise too_few(title, least, [item.name for item in total.receipts], failed) from None
        counts = self._any_cohort or (total.full and self.params.static_open)
        if not counts and schema.group("static") and not schema.group("update"):
            # Only counts, which are not opened for another cohort: nothing to reveal.
            self._record.failed(total, "TF-612")
            self._spool.erase(total.slot)
            return Collected(cohort, failed, {}, True, *traffic)
        lost: dict[str, str] = {}
        if not total.full:
            request = total.agreement_request().to_bytes()
            lost = self._ask(transport, "agree", request, cohort, total.add_agreement)
            if len(total.agreements) < self.params.threshold:
                agreed = [item.name for item in total.agreements]
                detail = " that agreed on the survivors"
                raise too_few(title, self.params.threshold, agreed, lost, detail)
        try:
            request = total.reveal_request().to_bytes()
        except VerificationError as error:
            raise RunError(
                f"nothing was opened in {title}: {error} This server's own total is wrong; please report it.",
                code=error.code,
            ) from None
        lost |= self._ask(transport, "reveal", request, cohort, total.add_reveal)
        if len(total.revealers) < self.params.threshold:
            # Silos that gave shares can join no other sum until this one is opened. The same request gets the
            # same answer, so it is enough if a silo comes back meanwhile.
            late = [site for site in cohort if site not in total.revealers]
            missing = self._ask(transport, "reveal", request, late, total.add_reveal)
            lost = {site: code for site, code in lost.items() if site not in late} | missing
        try:
            opened = total.open()
        except RecoveryError as error:
            self._log.error("%s: nothing was opened: %s", title, error)
            raise self._unopened(error, total, title, lost) from None
        for site, why in opened.blamed.items():
            self._log.error("%s is to blame: %s", site, why)
        for site, code in lost.items():
            self._log.warning("%s: its term is in the sum, but it gave no share: %s", site, code)
        self._record.opened(total, opened)
        if total.schema == SEAL:  # later sums rest on the total that it has verified
            self._spool.erase(total.slot)
        else:
            # At least t silos gave shares, which they do only once they have verified the named total.
            self._drop_evidence()
            self._evidence = opened.evidence
        shut = "static" not in opened.groups and bool(schema.group("static"))
        totals = integer_totals(schema, opened.evidence.total.groups)
        return Collected(cohort, failed, totals, shut, *traffic)

    def _unopened(
        self, error: RecoveryError, total: server.Sum, title: str, lost: Mapping[str, str]
    ) -> RunError:
        """Return the error for a sum that could not be opened, naming the silo to blame if there is one."""
        if error.blamed:
            return RunError(
                f"nothing was opened in {title}: {error} {error.blamed} is to blame: check its "
                "installation, or export the job without it.",
                code=error.code,
            )
        detail = " with valid shares; nothing was opened"
        return too_few(title, self.params.threshold, total.revealers, lost, detail)

    def _ask(
        self,
        transport: Transport,
        task: str,
        request: bytes,
        cohort: Sequence[str],
        take: Callable[[str, bytes], None],
    ) -> dict[str, str]:
        def accept(site: str, answer: Message) -> None:
            with package_errors():
                take(site, _message(answer, site))

        return dict(transport.exchange(task, {site: {SECURE: request} for site in cohort}, accept))

    def _set_up(self, transport: Transport, sites: Sequence[str]) -> Enrolled:
        absent: dict[str, str] = {}
        roster = sorted(sites)
        while True:
            least = self._setup.job.smallest_sum(len(roster))
            if len(roster) < least:
                raise too_few("enrolment", least, roster, absent)
            session, lost = self._try(transport, roster)
            if session is not None:
                break
            absent |= lost
            roster = [site for site in roster if site not in lost]
            self._epoch += 1
        self._drop_evidence()
        self._session, self._slot, self._seals, self._informed = session, 0, 0, set()
        self._record.session(session)
        declared = {
            name: Declaration.from_bytes(item.application, name) for name, item in session.peers.items()
        }
        self._weights = applied_weights(declared, self._setup.job.max_weight_share)
        self._any_cohort = all(item.any_static_cohort for item in declared.values())
        return Enrolled(declared, absent)

    def _try(
        self, transport: Transport, roster: Sequence[str]
    ) -> tuple[server.Session | None, dict[str, str]]:
        """Run both exchanges of a setup; return the session, or None and the silos that did not answer."""
        params = self._params(roster)
        verifier = Verifier(self._identity.anchor, {}, False, datetime.now(UTC))
        enrolment = server.Enrolment(params, verifier=verifier)

        def advertised(site: str, answer: Message) -> None:
            raw = _message(answer, site)
            with package_errors():
                enrolment.add(site, raw)
            declared = Declaration.from_bytes(enrolment.applications[site], site)
            declared.check_weight(site, self._setup.job.weights)

        request = {**self._request, "roster": list(roster), SECURE: params.to_bytes()}
        failed = transport.exchange("enroll", {site: dict(request) for site in roster}, advertised)
        if failed:
            return None, self._lost(failed)
        relay = enrolment.relay()
        session = server.Session(params, relay)

        def confirmed(site: str, answer: Message) -> None:
            raw = _message(answer, site)
            with package_errors():
                session.add(site, raw)

        relayed = relay.to_bytes()
        failed = transport.exchange("confirm", {site: {SECURE: relayed} for site in roster}, confirmed)
        return (None, self._lost(failed)) if failed else (session, {})

    def _lost(self, failed: Mapping[str, str]) -> dict[str, str]:
        """Return the silos to leave out of the next roster; before any training a refusal ends the run."""
        return split_refusals(failed) if self._session is None else dict(failed)

    def _params(self, roster: Sequence[str]) -> messages.Params:
        return epoch_params(
            self._setup,
            self._identity.job_id,
            roster,
            epoch=self._epoch,
            # Once counts were requested, they are opened for no other roster.
            static_open=self._any_cohort or self.static_cohort in (None, tuple(roster)),
        )

    def _ready(self) -> server.Session:
        if self._session is None:
            raise TightframeError("Expected silos to be enrolled before a secure sum, but they are not.")
        return self._session


def _basis(request: Message) -> bytes:
    """Return the SHA-256 of the state of the run that a request rests on."""
    return bytes.fromhex(request["state"])


def _message(answer: Message, site: str) -> bytes:
    raw = answer.get(SECURE)
    if not isinstance(raw, bytes):
        raise SecureSumError(
            f"Expected a protocol message from {site}, but got {sorted(answer)}.", code="TF-604"
        )
    return raw


class FileSpool:
    """A spool in a temporary folder (``TMPDIR``), which only its owner can read.

    It keeps masked terms until the silos have verified their total. It exists while it holds terms, and no
    longer than the process. Terms are masked, so the files disclose no more than the messages that the server
    received. Later terms overwrite erased ones, which takes a fraction of the time of a new file as long as
    the page cache holds them.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clear()

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tightframe-terms-")
        if self._erased[group]:
            path = self._erased[group].pop()
        else:
            self._files += 1
            path = Path(self._folder.name) / str(self._files)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
            stream.write(data)
        self._kept[slot, site, group] = path, len(data)

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return the bytes that were kept.

        Raises:
            FileNotFoundError: if there are none.
        """
        if (slot, site, group) not in self._kept:
            raise FileNotFoundError(f"Expected the {group} term of {site} in slot {slot}, but none is kept.")
        path, size = self._kept[slot, site, group]
        with path.open("rb") as stream:
            return stream.read(size)  # an erased term may have been longer

    def erase(self, slot: int) -> None:
        """Delete all terms of a slot; with the last one the folder is deleted, too."""
        for place in [place for place in self._kept if place[0] == slot]:
            path, _ = self._kept.pop(place)
            self._erased[place[2]].append(path)
        if self._folder is not None and not self._kept:
            self._folder.cleanup()
            self._clear()

    def _clear(self) -> None:
        self._folder, self._files = None, 0
        self._kept: dict[tuple[int, str, Group], tuple[Path, int]] = {}
        self._erased: dict[Group, list[Path]] = {group: [] for group in GROUPS}
