"""What a server asks of silos for one sum, and what it gets: requests, cohort, totals, a row on record."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from tightframe.config.job import JobConfig
from tightframe.phases import Schema, Totals, stream_seed
from tightframe.results.exchanges import Row
from tightframe.rounds import checkpoint, codec
from tightframe.rounds.context import Message
from tightframe.rounds.plan import TRAIN, Exchange
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.sums.common import minimum
from tightframe.rounds.sums.plain import (
    Accept,
    Collected,
    Enrolled,
    RefusedError,
    Sums,
    TooFewError,
    Transport,
    named_codes,
)
from tightframe.securesum.messages import SumId


class Exchanges:
    """The sums of one run.

    Args:
        job: validated.
        sums: plain or secure.
        record: where each exchange is noted.
        log: of the server.

    Attributes:
        opened: (sum, cohort) of each sum opened so far. A silo that misses a request must still learn what
            became of its last term, so each is told what it has not heard of for certain.
    """

    def __init__(self, job: JobConfig, sums: Sums, record: RunRecord, log: logging.Logger) -> None:
        self._job, self._sums, self._record, self._log = job, sums, record, log
        self.opened: list[tuple[str, list[str]]] = []
        self._heard: dict[str, int] = {}

    def collect(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        exchange: Exchange,
        *,
        evaluate: bool,
        among: Sequence[str] | None = None,
        attempt: int = 0,
    ) -> tuple[Row, Totals]:
        """Send a broadcast, add the terms as they arrive, open the sum."""
        started = time.monotonic()
        sum_id = SumId.of(exchange.kind, exchange.round, exchange.index, attempt)
        request: Message = {
            "kind": exchange.kind,
            "round": exchange.round,
            "phase": exchange.index,
            "attempt": attempt,
            "evaluate": evaluate,
            "broadcast": checkpoint.tensor_bytes(broadcast),
        }
        if exchange.closing:  # each silo's own report says who is missing, and what that means
            request["lost"] = {site: item.as_json() for site, item in self._record.lost.items()}
        untold = {site: dict(self.opened[self._heard.get(site, 0) :]) for site in self._record.weights}
        drawn = self._drawn(exchange)
        requests = {site: {**request, "opened": untold[site]} for site in (drawn if among is None else among)}
        left_out = {site: "TF-511" for site in drawn if site not in requests}

        self._record.status = self._record.status.summing(
            exchange.kind, exchange.round, exchange.index, exchange.of
        )

        def accepted(site: str) -> None:
            self._heard[site] = len(self.opened)
            self._record.answered(site)

        try:
            found: Collected = self._sums.collect(transport, sum_id, schema, requests, accepted)
        except TooFewError as error:
            self._record.dropped(exchange.kind, exchange.round, error.cohort, {**left_out, **error.failed})
            raise
        self._record.weights = dict(self._sums.weights)
        totals = codec.decode(schema, found.totals, parties=len(self._record.weights))
        if found.totals:
            self.opened.append((str(sum_id), found.cohort))
        seconds = time.monotonic() - started
        row = Row(
            round=exchange.round,
            kind=exchange.kind,
            phase=exchange.index,
            phases=exchange.of,
            silos=found.cohort,
            dropped={**left_out, **found.failed},
            seconds=round(seconds, 3),
            bytes_down=found.bytes_down,
            bytes_up=found.bytes_up,
            static_opened=not found.shut,
        )
        return row, totals

    def counts(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        exchange: Exchange,
        *,
        evaluate: bool,
    ) -> tuple[Row, Totals]:
        """A sum of counts alone: opened for the whole roster only, so that all may be asked twice.

        After the rounds also if there were too few silos: a trained model must not hang on one answer.
        """
        try:
            row, totals = self.collect(transport, schema, broadcast, exchange, evaluate=evaluate)
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
            row, totals = self.again(transport, schema, broadcast, row, exchange, evaluate=evaluate)
        return row, totals

    def again(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        row: Row,
        exchange: Exchange,
        *,
        evaluate: bool,
    ) -> tuple[Row, Totals]:
        """Ask all once more for a sum of counts that stayed shut because a silo had dropped out."""
        self._log.warning(
            "%s: counts are opened for all silos only, but %s; asking all once more",
            row.kind,
            named_codes(row.dropped),
        )
        if row.bytes_up:  # with too few silos the exchange is on record already
            self._record.dropped(row.kind, row.round, row.silos, row.dropped)
        return self.collect(transport, schema, broadcast, exchange, evaluate=evaluate, attempt=1)

    def _long_gone(self, exchange: Exchange, row: Row) -> bool:
        """Whether all who are missing after the rounds were missing in the last two already."""
        since = [self._record.lost.get(site) for site in row.dropped]
        return exchange.closing and all(
            item is not None and item.kind == TRAIN and item.round < row.round for item in since
        )

    def _drawn(self, exchange: Exchange) -> Sequence[str]:
        """The silos that this sum is of: all enrolled, or those drawn for the round."""
        silos, number = sorted(self._record.weights), self._job.sites_per_round
        if number is None or not exchange.training:
            return silos
        seed = self._job.seed
        order = sorted(silos, key=lambda site: stream_seed(seed, "server", "draw", exchange.round, site))
        return sorted(order[:number])


class _Told:
    """A transport that keeps a record up to date on who has answered.

    Sums shrink their roster while silos are silent; where that ends in an error, only who carried their
    messages still knows everybody that was lost on the way.
    """

    def __init__(self, transport: Transport, record: RunRecord) -> None:
        self._transport = transport
        self._record = record
        self.lost: dict[str, str] = {}

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """See ``rounds.sums.plain.Transport``."""
        record = self._record
        record.status = record.status.enrolling(requests)

        def answered(site: str, answer: Message) -> None:
            accept(site, answer)
            if record.status.state == "enrolling":  # and not ended meanwhile
                record.status = record.status.heard(site)

        failed = self._transport.exchange(task, requests, answered)
        self.lost |= failed
        for site, code in failed.items():
            record.status = record.status.heard(site, code)
        return failed


def enroll(
    sums: Sums, transport: Transport, request: Message, roster: Sequence[str], record: RunRecord
) -> Enrolled:
    """Enrol a roster.

    Raises:
        RefusedError: TF-509, naming also who did not answer before others refused.
        TooFewError: TF-501. After both the record has every silo that is to blame, with its code.
    """
    told = _Told(transport, record)
    try:
        return sums.enroll(told, request, roster)
    except RefusedError as error:
        record.not_enrolled(told.lost)
        absent = {site: code for site, code in told.lost.items() if site not in error.refused}
        job, left = record.job, len(roster) - len(told.lost)
        spare = left >= (minimum(job, left) if job.summation == "secure" else job.min_sites)
        raise RefusedError(error.refused, absent, record.refused_rules, spare=spare) from None
    except TooFewError:
        record.not_enrolled(told.lost)
        raise
