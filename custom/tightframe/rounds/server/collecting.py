"""One exchange at the server: requests to the silos, their sum, the next state, the row of the record."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tightframe.config.job import JobConfig
from tightframe.errors import RunError, TooFewError
from tightframe.learning.model_update import mean_losses, received_model
from tightframe.phases import Cohort, Phase, ServerState, stream_seed
from tightframe.results.rows import Row
from tightframe.rounds.codec import IntegerTotals
from tightframe.rounds.context import NEEDS_STATE, Message
from tightframe.rounds.plan import TRAIN, Exchange
from tightframe.rounds.run_state import state_bytes, state_sha256
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.sums.common import (
    Accept,
    Collected,
    Enrolled,
    RefusedError,
    Sums,
    Transport,
    describe_codes,
)


@dataclass(frozen=True)
class SharedState:
    """The state of a run as named in requests: silos compute it from the last total, or ask for it.

    Attributes:
        state: on which the next exchange rests.
        before: SHA-256 (hex) of the state before the last opened total; empty if there is none.
        start: weights of a pretrained start, until a sum has been opened; None without one.
    """

    state: ServerState
    before: str = ""
    start: bytes | None = None

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 (hex) of the state."""
        return state_sha256(self.state)

    def after(self, state: ServerState) -> SharedState:
        """Return the shared state after a total was opened."""
        return SharedState(state, self.sha256)

    def named(self) -> Message:
        """Return the keys by which every request names it."""
        start = {} if self.start is None else {"start": self.start}
        return {"state": self.sha256, "before": self.before, **start}


UNCHANGED = "class sums after the last round could not be opened, so the model is as that round left it"


class Collector:
    """The exchanges of one run.

    Args:
        sums: plain or secure.
        on_round: called with the row of each exchange.

    Attributes:
        opened: (sum, cohort) of each sum opened so far. A silo that missed a request must still learn whether
            its last term was opened, so each request lists all sums that the silo may not know.
        start: loads the pretrained start for silos that missed the first exchanges; returns None without one.
        unverified: writes the checkpoint of the last round, once silos have verified its total.
    """

    def __init__(
        self,
        job: JobConfig,
        sums: Sums,
        record: RunRecord,
        log: logging.Logger,
        on_round: Callable[[Row], None] | None = None,
    ) -> None:
        self._job, self._sums, self._record, self._log = job, sums, record, log
        self._on_round = on_round
        self.opened: list[tuple[str, list[str]]] = []
        self.start: Callable[[], bytes | None] = lambda: None
        self.unverified: Callable[[], None] | None = None
        self._known: dict[str, int] = {}  # silo -> number of sums in `opened` that it certainly knows

    def run(
        self,
        transport: Transport,
        shared: SharedState,
        exchange: Exchange,
        among: Sequence[str] | None = None,
    ) -> tuple[SharedState, list[str]]:
        """Run one exchange: ask, collect, open, update.

        Args:
            shared: the state of the run, which silos compute too.
            among: silos in the sum of the round's phase before; only they can answer a later phase.

        Returns:
            The next state, and the silos in the sum.

        Raises:
            TooFewError: if fewer silos than the job's minimum answer.
            RunError: TF-510 if statistics before the first round could not be opened.
        """
        broadcast = dict(exchange.phase.broadcast(shared.state))
        phase = exchange.phase_for(broadcast)
        if exchange.counts_only:
            row, totals = self.collect_counts(transport, exchange, phase, shared)
            if not row.static_opened:
                self._handle_unopened(exchange, row)
        else:
            row, totals = self.collect(transport, exchange, phase, shared, among=among)
        if (
            totals and self.unverified is not None
        ):  # this sum was opened, so silos have verified the last total
            self.unverified()
            self.unverified = None
        cohort = Cohort.of(exchange.round, row.silos, self._record.weights)
        reading = exchange.advance(shared.state, totals, cohort)
        for line in reading.warnings:
            self._log.warning("%s", line)
        row = row.model_copy(update={"training": mean_losses(reading.totals, cohort)})
        row = self._record.add(row, reading.notes, received_model(broadcast))
        if self._on_round is not None:
            self._on_round(row)
        return (shared.after(reading.state) if totals else shared), row.silos

    def _handle_unopened(self, exchange: Exchange, row: Row) -> None:
        """Handle a sum of counts outside the rounds that could not be opened.

        Raises:
            RunError: TF-510, before the first round. After the last one there is a model without it.
        """
        reason = (
            f"silos dropped out twice: {describe_codes(row.dropped)}"
            if row.dropped
            else "silos keep theirs closed, because they were opened for another cohort"
        )
        if exchange.before:
            whose = "" if self._job.statistics is not None else " that the method needs"
            raise RunError(f"statistics{whose} could not be opened: {reason}.", code="TF-510")
        if exchange.after:
            self._log.warning("%s: %s", UNCHANGED, reason)
        if exchange.closing and self._job.evaluate_only is not None:
            raise RunError(f"the evaluation could not be opened: {reason}.", code="TF-510")

    def collect(
        self,
        transport: Transport,
        exchange: Exchange,
        phase: Phase,
        shared: SharedState,
        *,
        among: Sequence[str] | None = None,
        attempt: int = 0,
    ) -> tuple[Row, IntegerTotals]:
        """Ask silos for their terms, add them as they arrive, open the sum.

        Args:
            phase: of the exchange, with its evaluation if it has one.
            shared: as for ``run``.
            among: silos to ask; by default those drawn for the round.
            attempt: 1 if the sum is repeated.

        Returns:
            The row for the record, and the totals.

        Raises:
            TooFewError: TF-501; nothing was opened.
        """
        started = time.monotonic()
        schema = phase.schema
        sum_id = exchange.sum_id(attempt)
        common: Message = {
            "kind": exchange.kind,
            "round": exchange.round,
            "phase": exchange.index,
            "attempt": attempt,
            **shared.named(),
        }
        drawn = self._drawn(exchange)
        requests = self._requests(exchange, common, drawn if among is None else among)
        left_out = {site: "TF-511" for site in drawn if site not in requests}

        self._record.status = self._record.status.summing(
            exchange.kind, exchange.round, exchange.index, exchange.of
        )

        def accepted(site: str) -> None:
            self._known[site] = len(self.opened)
            self._record.answered(site)

        try:
            following = _FollowingTransport(transport, shared, self.start)
            collected: Collected = self._sums.collect(following, sum_id, schema, requests, accepted)
        except TooFewError as error:
            self._record.dropped(exchange.kind, exchange.round, error.cohort, {**left_out, **error.failed})
            raise
        self._record.weights = dict(self._sums.weights)
        if collected.totals:
            self.opened.append((str(sum_id), collected.cohort))
        seconds = time.monotonic() - started
        row = Row(
            round=exchange.round,
            kind=exchange.kind,
            phase=exchange.index,
            phases=exchange.of,
            silos=collected.cohort,
            dropped={**left_out, **collected.failed},
            seconds=round(seconds, 3),
            bytes_down=collected.bytes_down,
            bytes_up=collected.bytes_up,
            static_opened=not collected.shut,
        )
        return row, collected.totals

    def seal(self, transport: Transport, shared: SharedState, *, last: bool = True) -> bool:
        """Let the silos verify the last total; return whether they did.

        Args:
            shared: the state of the run.
            last: whether no other exchange rests on it.
        """
        following = _FollowingTransport(transport, shared, self.start)
        return self._sums.seal(following, {"opened": {}, **shared.named()}, last=last)

    def _requests(self, exchange: Exchange, common: Message, silos: Sequence[str]) -> dict[str, Message]:
        """Return each silo's request: the common part, and the opened sums that it may not know."""
        if exchange.closing:  # for the silos' own reports, which list the silos that dropped out
            lost = {site: item.as_json() for site, item in self._record.lost.items()}
            common = {**common, "lost": lost}
        return {site: {**common, "opened": dict(self.opened[self._known.get(site, 0) :])} for site in silos}

    def collect_counts(
        self,
        transport: Transport,
        exchange: Exchange,
        phase: Phase,
        shared: SharedState,
    ) -> tuple[Row, IntegerTotals]:
        """Collect a sum of counts, which is opened only for the whole roster, in up to two attempts.

        After the rounds there is a second attempt even after too few answers, so that a trained model does
        not depend on a single one.

        Raises:
            TooFewError: TF-501; see ``collect``.
        """
        try:
            row, totals = self.collect(transport, exchange, phase, shared)
        except TooFewError as error:
            row = Row(
                round=exchange.round,
                kind=exchange.kind,
                silos=error.cohort,
                dropped=error.failed,
                static_opened=False,
            )
            totals = {}
            if self._job.summation == "plain" or exchange.before or self._long_gone(exchange, row):
                raise
        if not row.static_opened and row.dropped and not self._long_gone(exchange, row):
            self._note_repeat(row)
            row, totals = self.collect(transport, exchange, phase, shared, attempt=1)
        return row, totals

    def _note_repeat(self, row: Row) -> None:
        """Log and record that a sum of counts is repeated because a silo had dropped out."""
        self._log.warning(
            "%s: counts are opened for all silos only, but %s; asking all once more",
            row.kind,
            describe_codes(row.dropped),
        )
        if row.bytes_up:  # an exchange with too few silos is already recorded
            self._record.dropped(row.kind, row.round, row.silos, row.dropped)

    def _long_gone(self, exchange: Exchange, row: Row) -> bool:
        """Check whether all silos missing at the closing were lost before the last training round."""
        losses = [self._record.lost.get(site) for site in row.dropped]
        return exchange.closing and all(
            item is not None and item.kind == TRAIN and item.round < row.round for item in losses
        )

    def _drawn(self, exchange: Exchange) -> Sequence[str]:
        """Return the silos to ask: all enrolled, or those drawn for the round."""
        silos, number = sorted(self._record.weights), self._job.sites_per_round
        if number is None or not exchange.training:
            return silos
        seed = self._job.seed
        order = sorted(silos, key=lambda site: stream_seed(seed, "server", "draw", exchange.round, site))
        return sorted(order[:number])


class _FollowingTransport:
    """A transport that sends the state of the run to silos that cannot compute it, and asks them again."""

    def __init__(self, transport: Transport, shared: SharedState, start: Callable[[], bytes | None]) -> None:
        self._transport = transport
        self._shared = shared
        self._start = start

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Carry a task as ``rounds.sums.common.Transport`` says."""
        again: dict[str, Message] = {}
        load = functools.cache(self._start)

        def answered(site: str, answer: Message) -> None:
            if answer.get(NEEDS_STATE) is True and site not in again:
                state = state_bytes(self._shared.state)
                weights = load()
                start = {} if weights is None else {"start": weights}
                again[site] = {**requests[site], **start, "state_bytes": state}
            else:
                accept(site, answer)

        failed = dict(self._transport.exchange(task, requests, answered))
        if again:
            failed |= self._transport.exchange(task, again, accept)
        return failed


class _RecordingTransport:
    """A transport that records which silos have answered the enrolment.

    Sums shrink their roster while silos do not answer. If that ends in an error, only the transport knows all
    silos that were lost before.

    Attributes:
        lost: silo -> code of all silos without an accepted answer so far.
    """

    def __init__(self, transport: Transport, record: RunRecord) -> None:
        self._transport = transport
        self._record = record
        self.lost: dict[str, str] = {}

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Carry a task as ``rounds.sums.common.Transport`` says, and record the answers."""
        record = self._record
        record.status = record.status.enrolling(requests)

        def answered(site: str, answer: Message) -> None:
            accept(site, answer)
            if record.status.state == "enrolling":  # the run may have ended meanwhile
                record.status = record.status.heard(site)

        failed = self._transport.exchange(task, requests, answered)
        self.lost |= failed
        for site, code in failed.items():
            record.status = record.status.heard(site, code)
        return failed


def enroll(
    sums: Sums, transport: Transport, request: Message, roster: Sequence[str], record: RunRecord
) -> Enrolled:
    """Enrol a roster. On failure the record gets every silo that did not enrol, with its code.

    Raises:
        RefusedError: TF-509, naming also the silos that did not answer before others refused.
        TooFewError: TF-501.
    """
    recording = _RecordingTransport(transport, record)
    try:
        return sums.enroll(recording, request, roster)
    except RefusedError as error:
        record.not_enrolled(recording.lost)
        absent = {site: code for site, code in recording.lost.items() if site not in error.refused}
        job, left = record.job, len(roster) - len(recording.lost)
        spare = left >= (job.smallest_sum(left) if job.summation == "secure" else job.min_sites)
        raise RefusedError(error.refused, absent, record.refused_rules, spare=spare) from None
    except TooFewError:
        record.not_enrolled(recording.lost)
        raise
