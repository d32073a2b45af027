"""What a server asks of silos for one sum, and what it gets: requests, cohort, totals, a row on record."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tightframe.config.job import JobConfig
from tightframe.phases import Schema, Totals, stream_seed
from tightframe.rounds import checkpoint, codec, statistics
from tightframe.rounds.rows import Row
from tightframe.rounds.run_record import RunRecord
from tightframe.rounds.summation import Collected, Sums, TooFewError, Transport, named_codes
from tightframe.securesum.messages import SumId


@dataclass(frozen=True)
class Place:
    """Where in a run a sum is: what it is for, its round, its place among ``of`` phases."""

    kind: str
    round: int
    index: int = 0
    of: int = 1

    @property
    def evaluates(self) -> bool:
        """A round's first sum carries the evaluation of the model before it."""
        return self.kind == "train" and self.index == 0

    @property
    def before(self) -> bool:
        """It comes before the first round, so that no work is lost if the run ends there."""
        return self.kind in (statistics.KIND, "before")


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
        place: Place,
        *,
        evaluate: bool,
        among: Sequence[str] | None = None,
        attempt: int = 0,
    ) -> tuple[Row, Totals]:
        """Send a broadcast, add the terms as they arrive, open the sum."""
        started = time.monotonic()
        sum_id = SumId.of(place.kind, place.round, place.index, attempt)
        request = {
            "kind": place.kind,
            "round": place.round,
            "phase": place.index,
            "attempt": attempt,
            "evaluate": evaluate,
            "broadcast": checkpoint.tensor_bytes(broadcast),
        }
        untold = {site: dict(self.opened[self._heard.get(site, 0) :]) for site in self._record.weights}
        drawn = self._drawn(place)
        requests = {site: {**request, "opened": untold[site]} for site in (drawn if among is None else among)}
        left_out = {site: "TF-511" for site in drawn if site not in requests}

        self._record.status = self._record.status.summing(place.kind, place.round, place.index, place.of)

        def accepted(site: str) -> None:
            self._heard[site] = len(self.opened)
            self._record.status = self._record.status.answer(site)

        try:
            found: Collected = self._sums.collect(transport, sum_id, schema, requests, accepted)
        except TooFewError as error:
            self._record.dropped(place.kind, place.round, error.cohort, {**left_out, **error.failed})
            raise
        self._record.weights = dict(self._sums.weights)
        totals = codec.decode(schema, found.totals, parties=len(self._record.weights))
        if found.totals:
            self.opened.append((str(sum_id), found.cohort))
        seconds = time.monotonic() - started
        row = Row(
            place.round,
            place.kind,
            found.cohort,
            {**left_out, **found.failed},
            seconds,
            found.bytes_down,
            found.bytes_up,
            shut=found.shut,
            phase=place.index,
            phases=place.of,
        )
        return row, totals

    def counts(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        place: Place,
        *,
        evaluate: bool,
    ) -> tuple[Row, Totals]:
        """A sum of counts alone: opened for the whole roster only, so that all may be asked twice.

        After the rounds also if there were too few silos: a trained model must not hang on one answer.
        """
        try:
            row, totals = self.collect(transport, schema, broadcast, place, evaluate=evaluate)
        except TooFewError as error:
            if self._job.summation == "plain" or place.before:
                raise
            row = Row(place.round, place.kind, error.cohort, error.failed, 0.0, 0, 0, shut=True)
            totals = {}
        if row.shut and row.dropped:
            row, totals = self.again(transport, schema, broadcast, row, place, evaluate=evaluate)
        return row, totals

    def again(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        row: Row,
        place: Place,
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
        return self.collect(transport, schema, broadcast, place, evaluate=evaluate, attempt=1)

    def _drawn(self, place: Place) -> Sequence[str]:
        """The silos that this sum is of: all enrolled, or those drawn for the round."""
        silos, number = sorted(self._record.weights), self._job.sites_per_round
        if number is None or place.kind != "train":
            return silos
        seed = self._job.seed
        order = sorted(silos, key=lambda site: stream_seed(seed, "server", "draw", place.round, site))
        return sorted(order[:number])
