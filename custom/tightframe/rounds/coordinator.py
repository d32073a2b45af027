"""The server's half of a run: plan, collect, open, update; whatever carries the messages.

The server sees integers of sums and public weights. A silo that is late or fails is left out of
the sum (k of n) and asked again in the next exchange; fewer than the minimum end the run with
the silos and their codes named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe import __version__
from tightframe.errors import REASONS, RunError, TightframeError
from tightframe.model_update import broadcast_model, received_model
from tightframe.models.pretrained import load_initial
from tightframe.phases import Cohort, Phase, ServerState, Totals
from tightframe.report.words import plural
from tightframe.rounds import checkpoint, classes, enrolment, evaluation, personal, resume, statistics
from tightframe.rounds.context import Message
from tightframe.rounds.declaration import WEIGHTS
from tightframe.rounds.exchanges import Exchanges, Place
from tightframe.rounds.notices import BANNER, UNCHANGED
from tightframe.rounds.outcome import Outcome
from tightframe.rounds.private import shown
from tightframe.rounds.private.plan import honest_silos
from tightframe.rounds.private.server import read
from tightframe.rounds.rows import Row
from tightframe.rounds.run_record import RunRecord
from tightframe.rounds.secure.record import ServerRecord
from tightframe.rounds.secure.server import SecureSums, ServerIdentity
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.summation import (
    Accept,
    PlainSums,
    Sums,
    TooFewError,
    Transport,
    named_codes,
)

__all__ = ["Accept", "Coordinator", "Message", "Result", "Transport"]


@dataclass
class Result:
    """What a finished run returns in the process that ran it."""

    state: ServerState
    outcome: Outcome


def _places(kind: str, number: int, phases: Sequence[Phase]) -> Iterator[tuple[Place, Phase]]:
    for index, phase in enumerate(phases):
        yield Place(kind, number, index, len(phases)), phase


class Coordinator:
    """Runs one job over a transport.

    Args:
        setup: the validated job.
        folder: where the results go.
        identity: what secure sums need of this run; plain sums need none.
        initial_model: safetensors file of a pretrained start, from the server's own site.
        job_id: the run's id, as engine and silos know it; by default the identity's.
        stopped: checkpoint of the run that the job goes on with.
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
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.log = log or logging.getLogger("tightframe.run")
        self.record = RunRecord(folder, setup, self.log)
        self._initial_model = initial_model
        self._job_id = job_id or (identity.job_id if identity is not None else "")
        self._stopped = stopped
        self._on_round = on_round
        self._holders: NDArray[np.float64] | None = None  # of each class, in the last opened sum
        self._transcript: ServerRecord | None = None
        self._sums = self._choose_sums(identity)
        self._exchanges = Exchanges(setup.job, self._sums, self.record, self.log)

    def _choose_sums(self, identity: ServerIdentity | None) -> Sums:
        job = self.setup.job
        if job.summation == "plain":
            return PlainSums(job.min_sites)
        if identity is None:
            raise RunError("secure sums were asked for without an identity of the run.", code="TF-615")
        self._transcript = ServerRecord(self.folder, identity)
        return SecureSums(self.setup, identity, self._transcript, self.log)

    @property
    def weights(self) -> dict[str, float]:
        """The public weights of the silos enrolled."""
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
            self._finish(str(error))
            raise
        except Exception as error:
            self._finish(f"TF-500: the server failed with {type(error).__name__}")
            raise
        result = Result(state, self._finish(None))
        if self.setup.job.local_baseline_epochs:
            self._baseline(transport)
        return result

    def _finish(self, reason: str | None) -> Outcome:
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
            for place, phase in _places("train", number, self.setup.training_phases(number)):
                state, among = self._phase(transport, state, phase, place, among)
            self.record.rounds_done = number
            resume.save(
                self.record,
                state,
                number,
                job_id=self._job_id,
                static_cohort=self._sums.static_cohort,
                opened=self._exchanges.opened,
                holders=self._holders,
            )
        state = self._after(transport, state)
        sha256 = None
        if self.setup.method.own_model is None:
            sha256 = checkpoint.save_tensors(self.folder / "model.safetensors", state.model)
        self.record.write_card(sha256)
        self.record.trained = True
        self._close(transport, state)
        if job.personalise:
            self._personal(transport, state)
        self.record.write_card(sha256)
        return state

    def _after(self, transport: Transport, state: ServerState) -> ServerState:
        """What a method asks after the last round; there is a model by then, which no drop-out takes back."""
        for place, phase in _places("after", self.setup.job.rounds, self.setup.after_phases()):
            try:
                state, _ = self._phase(transport, state, phase, place)
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
        for place, phase in _places(statistics.KIND, 0, self.setup.statistics_phases()):
            state, _ = self._phase(transport, state, phase, place)
        state = self.setup.standardised(state)
        for place, phase in _places("before", 0, self.setup.before_phases()):
            state, _ = self._phase(transport, state, phase, place)
        return state

    def _go_on(self, transport: Transport, found: checkpoint.Checkpoint, kept: resume.Kept) -> ServerState:
        """The state after the last round of the jobs before; silos are told what those have opened."""
        resume.restore(self.record, found, kept, self.log)
        self._exchanges.opened = [*kept.opened]
        self._holders = None if kept.holders is None else np.array(kept.holders, dtype=np.float64)
        self._sums.static_cohort = kept.static_cohort
        self._enroll(transport, kept)
        if others := resume.changed_weights(kept, self.weights):
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
            self.record.initial_model = {"sha256": loaded.sha256, "fresh": list(loaded.fresh)}
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
        enrolled = enrolment.enroll(self._sums, transport, request, roster, self.record)
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
        self.log.info("sums: %s", self._sums.describe())
        for line in self.record.rules():
            self.log.info("rules: %s", line)

    def _phase(
        self,
        transport: Transport,
        state: ServerState,
        phase: Phase,
        place: Place,
        among: Sequence[str] | None = None,
    ) -> tuple[ServerState, list[str]]:
        """One phase: broadcast, collect, open, update; the next state, and who is in the sum.

        A round's later phases are for those ``among`` its earlier ones, because what they send rests on that.
        """
        setup, flagged = self.setup, bool(self.setup.class_flags(phase).fields)
        offer = classes.offered(self._holders, setup.dataset.num_classes)
        broadcast = dict(phase.broadcast(state))
        evaluate = (
            place.evaluates
            and setup.evaluates_in(place.round)
            and any(name.startswith("model/") for name in broadcast)
        )
        schema = setup.schema(phase, evaluated=evaluate)
        sent = {**broadcast, classes.OFFERED: offer} if flagged else broadcast
        counts = place.kind != "train" and bool(phase.schema.group("static"))
        if counts:
            row, totals = self._exchanges.counts(transport, schema, sent, place, evaluate=evaluate)
        else:
            collect = self._exchanges.collect
            row, totals = collect(transport, schema, sent, place, evaluate=evaluate, among=among)
        if row.shut and counts:
            self._without(place, row)
        own, others = evaluation.split_totals(totals)
        if flagged:
            others, holders = classes.admit(phase.schema, others, offer)
            if holders is not None and self._holders is None and not classes.offered(holders, 0).any():
                self.log.warning(
                    "no class has %d holders: class sums are never used, and %s runs without them",
                    classes.MIN_HOLDERS,
                    setup.method.title,
                )
            self._holders = self._holders if holders is None else holders
        weights = {site: self.weights[site] for site in row.silos}
        cohort = Cohort(place.round, weights, max(self.weights.values()), enrolled=len(self.weights))
        if setup.privacy is not None:
            honest = honest_silos(setup.job, len(self.weights))
            told, others = shown.split(others)
            row.spent = self._spent(told, row)
            state, read_totals = read(setup.privacy, phase, state, others, silos=cohort.size, honest=honest)
            others = dict(read_totals)
        if others:
            state = phase.update(state, others, cohort)
        row.training = {
            name.removeprefix("training/"): float(value) / cohort.total_weight
            for name, value in others.items()
            if name.startswith("training/")
        }
        self._add(row, own if evaluate and own else None, broadcast)
        return state, row.silos

    def _without(self, place: Place, row: Row) -> None:
        """What a sum of counts outside the rounds means that stayed shut: before them the run ends.

        Raises:
            RunError: TF-510, before the first round. After the last one there is a model without it.
        """
        why = (
            f"silos dropped out twice: {named_codes(row.dropped)}"
            if row.dropped
            else "silos keep theirs shut, as they were opened for another cohort"
        )
        if place.kind != "after":
            raise RunError(f"statistics that the method needs could not be opened: {why}.", code="TF-510")
        self.log.warning("%s: %s", UNCHANGED, why)

    def _spent(self, told: Totals, row: Row) -> shown.Spent | None:
        """What silos tell of the epsilon that the job has cost them; None if one of them tells nonsense."""
        try:
            return shown.read(self.setup.job, told, row.silos, row.round)
        except ValueError as error:
            self.log.warning("round %d: what silos tell of their epsilon is not used: %s", row.round, error)
            return None

    def _close(self, transport: Transport, state: ServerState) -> None:
        """Evaluate the last model everywhere and leave it at the silos."""
        schema = self.setup.closing_schema()
        broadcast = broadcast_model(state.model)
        place = Place("closing", self.setup.job.rounds)
        row, totals = self._exchanges.counts(transport, schema, broadcast, place, evaluate=True)
        self._add(row, (totals or None) if self.setup.evaluates else None, broadcast)

    def _personal(self, transport: Transport, state: ServerState) -> None:
        """Let every silo make its personal model, and sum how good they are on their own records.

        The model is trained and on record, so nothing that happens here can take it back.
        """
        phase = self.setup.training_phases(self.setup.job.rounds)[-1]
        broadcast = {**phase.broadcast(state), **broadcast_model(state.model)}
        place = Place(personal.KIND, self.setup.job.rounds)
        try:
            row, totals = self._exchanges.counts(
                transport, personal.schema(), broadcast, place, evaluate=False
            )
        except TightframeError as error:
            self.log.warning("personal models: %s", error)
            return
        self._add(row, None, broadcast)
        self.record.personal = personal.summarise(totals) if totals else None

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

    def _add(self, row: Row, counted: Totals | None, broadcast: Mapping[str, torch.Tensor]) -> None:
        self.record.add(row, counted, received_model(broadcast))
        if self._on_round is not None:
            self._on_round(row)
