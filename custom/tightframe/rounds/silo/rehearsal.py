"""A first round that one silo trains by itself, to measure its duration before a server can influence it.

All silos are assumed to have this silo's records, and the state is the job's start. Nothing of it is kept or
sent, and nothing is charged: its folder, salt and noise are its own. Features of a frozen encoder that the
silo already has are used; others stay in memory.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tightframe.files import locked_folder
from tightframe.phases import Cohort, ServerState
from tightframe.privacy.events import Event
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.feature_folders import delete_left
from tightframe.rounds.plan import BEFORE, STATISTICS, Exchange
from tightframe.rounds.privacy_plan import is_frozen_sum
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.own_state import SiloStateStore
from tightframe.rounds.silo.private_view import PrivateSilo
from tightframe.rounds.silo.view import LocalSilo, RequestedSum
from tightframe.rounds.state_files import REHEARSAL
from tightframe.rounds.sums.plain import PlainServer


class _FreeBudget(Budget):
    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge nothing: the noisy release never leaves this process."""


class _RehearsingSilo(PrivateSilo):
    _budget_of = _FreeBudget

    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge nothing."""


def rehearse(
    context: SiloContext,
    setup: JobSetup,
    device: torch.device,
    requested: RequestedSum,
    start: ServerState,
) -> Mapping[str, float]:
    """Return the seconds of each exchange through the first round here, by ``Exchange.measure``.

    Args:
        requested: the cohort, and ``RequestedSum.honest``.
        start: the state with which the job, or the first job of its chain, starts.

    Raises:
        Exception: any error of this silo's training on the job's own start.
    """
    job = context.job.origin
    setup = setup if job == context.job else prepare(job, context.policy.ceilings)
    left_out = context.untold()  # opens the records
    entry = context.site.model_copy(update={"feature_cache": "memory"})
    with _folder(context.state_folder) as folder:
        rehearsing = replace(context, job=job, entry=entry, state_dir=folder, run_dir=folder, log=_silent())
        rehearsing.features = context.features.lent()
        requested_sum = RequestedSum(requested.cohort, requested.honest, left_out)
        silo = _Rehearsal(rehearsing, setup, device, requested_sum, start)
        for exchange in (*setup.plan.at(STATISTICS, 0), *setup.plan.at(BEFORE, 0), *setup.plan.round(1)):
            silo.take_part(exchange)
    return silo.seconds


@contextmanager
def _folder(state: Path) -> Iterator[Path]:
    """Make a folder that is deleted at the end; the next rehearsal deletes that of a killed process."""
    delete_left(state)
    while True:
        folder = Path(tempfile.mkdtemp(dir=state, prefix=REHEARSAL))
        with locked_folder(folder) as own:
            if not own:  # another process mistook it for a killed one's, and deleted it
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder)
            return


class _Rehearsal:
    """One silo in a federation of copies of itself."""

    def __init__(
        self,
        context: SiloContext,
        setup: JobSetup,
        device: torch.device,
        requested: RequestedSum,
        start: ServerState,
    ) -> None:
        self._context, self._setup, self._device, self._requested = context, setup, device, requested
        self._store = SiloStateStore(context.state_folder, context.name)
        self._state = start
        self.seconds: dict[str, float] = {}

    def take_part(self, exchange: Exchange) -> None:
        """Make the term of one exchange, and continue with the sum of one such term per silo."""
        state, cohort = self._state, self._requested.cohort
        received = {name: item.clone() for name, item in exchange.phase.broadcast(state).items()}
        phase = exchange.phase_for(received)
        silo = self._silo(exchange)
        started, before = time.monotonic(), self._context.features.seconds
        contribution = phase.contribute(silo, received, self._store.committed())
        term = codec.encode(phase.schema, contribution.tensors, share=1.0, parties=len(cohort))
        if (part := exchange.measure) is not None:
            extra = self._context.features.seconds - before
            self.seconds[part] = time.monotonic() - started - extra
        sum_id = exchange.sum_id()
        if contribution.proposed_state is not None:
            self._store.propose(sum_id, contribution.proposed_state)
            self._store.commit(str(sum_id), cohort)
        copies = PlainServer(phase.schema)
        for name in cohort:
            copies.add(name, term)
        weight = float(len(self._context.data.labels("train")))
        everyone = Cohort(exchange.round, dict.fromkeys(cohort, weight), weight)
        self._state = exchange.advance(state, copies.open(), everyone).state

    def _silo(self, exchange: Exchange) -> LocalSilo:
        view = (self._context, self._setup, self._device, exchange.stream, self._requested)
        released = any(map(is_frozen_sum, exchange.phase.schema.fields))
        private = self._setup.privacy is not None and (exchange.training or released)
        return _RehearsingSilo(*view) if private else LocalSilo(*view)


def _silent() -> logging.Logger:
    log = logging.getLogger("tightframe.rehearsal")
    log.setLevel(logging.CRITICAL + 1)
    return log
