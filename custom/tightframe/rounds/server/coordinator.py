"""The server's half of a run: plan, collect, open, update; whatever carries the messages.

The server sees integers of sums and public weights. A silo that is late or fails is left out of
the sum (k of n) and asked again in the next exchange; fewer than the minimum end the run with
the silos and their codes named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightframe import __version__
from tightframe.errors import REASONS, REPLACED, RunError, TightframeError
from tightframe.learning.model_update import mean_losses, received_model
from tightframe.models.pretrained import load_initial
from tightframe.phases import Cohort, ServerState, advance
from tightframe.results.exchanges import Row
from tightframe.results.files import MODEL, WritePage
from tightframe.results.model_card import InitialModel
from tightframe.results.outcome import Ended
from tightframe.results.words import plural
from tightframe.rounds import checkpoint
from tightframe.rounds.context import Message
from tightframe.rounds.plan import AFTER, CLOSING, PERSONAL, Exchange
from tightframe.rounds.server import exchanges, resume
from tightframe.rounds.server.exchanges import Exchanges
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.declaration import WEIGHTS
from tightframe.rounds.sums.plain import (
    Accept,
    PlainSums,
    Sums,
    TooFewError,
    Transport,
    named_codes,
)
from tightframe.rounds.sums.secure_server import SecureSums, ServerIdentity
from tightframe.rounds.sums.transcripts import ServerRecord

__all__ = ["Accept", "Coordinator", "Message", "Result", "Transport"]


@dataclass
class Result:
    """What a finished run returns in the process that ran it."""

    state: ServerState
    outcome: Ended


class Coordinator:
    """Runs one job over a transport.

    Args:
        setup: the validated job.
        folder: where the results go.
        identity: what secure sums need of this run; plain sums need none.
        initial_model: safetensors file of a pretrained start, from the server's own site.
        job_id: the run's id, as engine and silos know it; by default the identity's.
        stopped: checkpoint of the run that the job goes on with.
        log: for the course of the run.
        on_round: called with each finished exchange.
        write_page: makes the page of the results; without it there is none.
    """

    def __init__(
        self,
        setup: JobSetup,
        folder: Path,
        *,
        identity: ServerIdentity | None = None,
        initial_model: str | None = None,
        job_id: str | None = None,
        stopped: Path | None = None,
        log: logging.Logger | None = None,
        on_round: Callable[[Row], None] | None = None,
        write_page: WritePage | None = None,
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.log = log or logging.getLogger("tightframe.run")
        self.record = RunRecord(folder, setup, self.log, write_page)
        self._initial_model = initial_model
        self._job_id = job_id or (identity.job_id if identity is not None else "")
        self._stopped = stopped
        self._on_round = on_round
        self._transcript: ServerRecord | None = None
        self._sums = self._choose_sums(identity)
        self._exchanges = Exchanges(setup.job, self._sums, self.record, self.log)

    def _choose_sums(self, identity: ServerIdentity | None) -> Sums:
        job = self.setup.job
        if job.summation == "plain":
            return PlainSums(job)
        if identity is None:
            raise RunError("secure sums were asked for without an identity of the run.", code="TF-615")
        self._transcript = ServerRecord(self.folder, identity)
        return SecureSums(self.setup, identity, self._transcript, self.log)

    @property
    def weights(self) -> dict[str, float]:
        """The public weights of the silos enrolled, as sums apply them."""
        return self.record.weights

    def run(self, transport: Transport) -> Result:
        """Enrol, train, close, write the results.

        Raises:
            TightframeError: named; what exists by then has been written, and says so.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            state = self._train(transport)
        except TightframeError as error:
            if error.code != REPLACED:  # the folder is another run's now
                self._finish(str(error))
            raise
        except Exception as error:
            self._finish(f"TF-500: the server failed with {type(error).__name__}")
            raise
        result = Result(state, self._finish(None))
        if self.setup.job.local_baseline_epochs:
            self._baseline(transport)
        return result

    def _finish(self, reason: str | None) -> Ended:
        self.record.sums = self._sums.describe()
        if self._transcript is not None:
            self._transcript.end(reason)
        return self.record.finish(reason)

    def _train(self, transport: Transport) -> ServerState:
        job = self.setup.job
        self._announce()
        found = resume.continued(job, self._stopped)
        state = self._begin(transport) if found is None else self._go_on(transport, *found)
        for number in range(job.done + 1, job.rounds + 1):
            among: list[str] | None = None
            for exchange in self.setup.plan.round(number):
                state, among = self._exchange(transport, state, exchange, among)
            self.record.rounds_done = number
            resume.save(
                self.record,
                state,
                number,
                job_id=self._job_id,
                static_cohort=self._sums.static_cohort,
                opened=self._exchanges.opened,
            )
        state = self._after(transport, state)
        sha256 = None
        if self.setup.method.own_model is None:
            sha256 = checkpoint.save_tensors(self.folder / MODEL, state.model)
        self.record.write_card(sha256)
        self.record.trained = True
        self._close(transport, state)
        self._personal(transport, state)
        self.record.write_card(sha256)
        return state

    def _after(self, transport: Transport, state: ServerState) -> ServerState:
        """What a method asks after the last round; there is a model by then, which no drop-out takes back."""
        for exchange in self.setup.plan.at(AFTER, self.setup.job.rounds):
            try:
                state, _ = self._exchange(transport, state, exchange)
            except TooFewError as error:
                self.log.warning("%s: %s", UNCHANGED, error)
                break
        return state

    def _announce(self) -> None:
        job, method = self.setup.job, self.setup.method
        self.log.info(
            "%s: %s (%s) on %s with %s; %s, %s and a closing phase, %s sums, seed %d",
            job.job_name,
            method.title,
            method.name,
            self.setup.dataset.title,
            job.models,
            plural(len(job.sites), "silo"),
            plural(job.rounds, "round"),
            job.summation,
            job.seed,
        )

    def _begin(self, transport: Transport) -> ServerState:
        """The state before round 1: of the start, once statistics and what a method asks before are in."""
        state = self._initial_state()
        self._enroll(transport)
        for exchange in self.setup.plan.beginning():
            state, _ = self._exchange(transport, state, exchange)
        return state

    def _go_on(self, transport: Transport, found: checkpoint.Checkpoint, kept: resume.Kept) -> ServerState:
        """The state after the last round of the jobs before; silos are told what those have opened."""
        resume.restore(self.record, found, kept, self.log)
        self._exchanges.opened = [*kept.opened]
        self._sums.static_cohort = kept.static_cohort
        self._enroll(transport, kept)
        if others := resume.changed_weights(kept, self.record.declared):
            self.log.warning("other records than before at %s: public weights changed", ", ".join(others))
        return found.state

    def _initial_state(self) -> ServerState:
        state = self.setup.initial_state()
        if self._initial_model is not None:
            if self.setup.method.own_model is not None:
                raise RunError(
                    f"Expected no pretrained start with {self.setup.method.name}, which has no global model: "
                    "take `initial_model` out of the server's site configuration.",
                    code="TF-505",
                )
            model = self.setup.setting.build_model()
            model.load_state_dict(dict(state.model))
            loaded = load_initial(model, Path(self._initial_model))
            self.record.initial_model = InitialModel(sha256=loaded.sha256, fresh=list(loaded.fresh))
            self.log.info(
                "pretrained start: SHA-256 %s, fresh tensors: %s", loaded.sha256, loaded.fresh or "none"
            )
            state = state.evolve(model={name: value.clone() for name, value in model.state_dict().items()})
        return state

    def _enroll(self, transport: Transport, kept: resume.Kept | None = None) -> None:
        """Enrol the job's silos; those of the jobs before, if it goes on: another cohort has no counts."""
        job, started = self.setup.job, time.monotonic()
        roster = list(job.roster) if kept is None else sorted(kept.weights)
        request = {"job_sha256": job.sha256(), "version": __version__, "roster": roster}
        enrolled = exchanges.enroll(self._sums, transport, request, roster, self.record)
        if kept is not None:
            enrolled.absent = {**kept.absent, **enrolled.absent}
        self.record.enrolled(enrolled)
        synthetic = {site: item.synthetic for site, item in enrolled.declared.items()}
        if len(set(synthetic.values())) > 1:
            made_up = sorted(site for site, value in synthetic.items() if value)
            raise RunError(
                f"synthetic and real records are never mixed, but {made_up} have synthetic ones.",
                code="TF-506",
            )
        if self.record.synthetic:
            self.log.warning("%s", BANNER.format(dataset=self.setup.dataset.title))
        self.log.info(
            "enrolled %d of %d silos in %.0f s; public weights (%s): %s%s",
            len(self.weights),
            len(job.sites),
            time.monotonic() - started,
            WEIGHTS[job.weights],
            ", ".join(f"{site} {weight:g}" for site, weight in sorted(self.weights.items())),
            "".join(f"; without {site} ({code})" for site, code in sorted(enrolled.absent.items())),
        )
        if lowered := self.record.lowered():
            self.log.warning("%s", lowered)
        self.log.info("sums: %s", self._sums.describe())
        for line in self.record.rules():
            self.log.info("rules: %s", line)

    def _exchange(
        self,
        transport: Transport,
        state: ServerState,
        exchange: Exchange,
        among: Sequence[str] | None = None,
    ) -> tuple[ServerState, list[str]]:
        """One exchange: broadcast, collect, open, update; the next state, and who is in the sum.

        A round's later phases are for those ``among`` its earlier ones, because what they send rests on that.

        Raises:
            TooFewError: if fewer silos than the job's minimum answer.
            RunError: TF-510 if statistics before the first round stay shut.
        """
        broadcast = dict(exchange.phase.broadcast(state))
        evaluate = exchange.evaluates(broadcast)
        phase = exchange.carrying(evaluate)
        if exchange.counts:
            counts = self._exchanges.counts
            row, totals = counts(transport, phase.schema, broadcast, exchange, evaluate=evaluate)
            if not row.static_opened:
                self._without(exchange, row)
        else:
            collect = self._exchanges.collect
            row, totals = collect(
                transport, phase.schema, broadcast, exchange, evaluate=evaluate, among=among
            )
        weights = {site: self.weights[site] for site in row.silos}
        cohort = Cohort(exchange.round, weights, max(self.weights.values()), enrolled=len(self.weights))
        reading = advance(phase, state, totals, cohort)
        for line in reading.warnings:
            self.log.warning("%s", line)
        row = row.model_copy(update={"training": mean_losses(reading.totals, cohort)})
        row = self.record.add(row, reading.notes, received_model(broadcast))
        if self._on_round is not None:
            self._on_round(row)
        return reading.state, row.silos

    def _without(self, exchange: Exchange, row: Row) -> None:
        """Handle a sum of counts outside the rounds that could not be opened.

        Raises:
            RunError: TF-510, before the first round. After the last one there is a model without it.
        """
        why = (
            f"silos dropped out twice: {named_codes(row.dropped)}"
            if row.dropped
            else "silos keep theirs shut, as they were opened for another cohort"
        )
        if exchange.before:
            raise RunError(f"statistics that the method needs could not be opened: {why}.", code="TF-510")
        if exchange.after:
            self.log.warning("%s: %s", UNCHANGED, why)

    def _close(self, transport: Transport, state: ServerState) -> None:
        """Evaluate the last model everywhere and leave it at the silos."""
        for exchange in self.setup.plan.at(CLOSING, self.setup.job.rounds):
            try:
                self._exchange(transport, state, exchange)
            except TooFewError as error:
                # The model is trained, and whoever is left has it; that it was not measured is no failure.
                self.log.warning("the final model was not measured: %s", error)
                self.record.closing_failed = str(error)

    def _personal(self, transport: Transport, state: ServerState) -> None:
        """Let every silo make its personal model, and sum how good they are on their own records.

        The model is trained and on record, so nothing that happens here can take it back.
        """
        for exchange in self.setup.plan.at(PERSONAL, self.setup.job.rounds):
            try:
                self._exchange(transport, state, exchange)
            except TightframeError as error:
                if error.code == REPLACED:
                    raise
                self.log.warning("personal models: %s", error)

    def _baseline(self, transport: Transport) -> None:
        """Let every silo train its local-only baseline; nothing of it comes back.

        The run is over and on record, so that nothing that happens here can take it back.
        """
        self.log.info("the run is over; each silo now trains its local-only baseline for its own report")
        requests: dict[str, Message] = {site: {} for site in self.weights}
        try:
            failed = transport.exchange("baseline", requests, lambda site, answer: None)
        except TightframeError as error:
            self.log.warning("the local-only baselines were cut off: %s", error)
            return
        for site, code in sorted(failed.items()):
            self.log.warning("%s has no local-only baseline: %s (%s)", site, code, REASONS.get(code, ""))
        self.log.info("local-only baselines: %d of %d silos", len(requests) - len(failed), len(requests))


UNCHANGED = "class sums after the last round stayed shut, so the model is as that round left it"

BANNER = (
    "SYNTHETIC TWIN: no silo was told where its records lie, so every one trains on generated stand-ins for "
    "{dataset}. "
    "They show that the software works; they say nothing about medicine or about a method. "
    "For real records, see docs/data.md."
)
