"""The server's half of a run, independent of the transport: plan, collect, open, update.

The server sees the integers of sums and public weights. A silo that is late or fails is left out of
the sum (k of n) and asked again in the next exchange; with fewer silos than the minimum the run ends, and the
error names the silos and their codes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tightframe import __version__
from tightframe.errors import REASONS, REPLACED, RunError, TightframeError, TooFewError
from tightframe.learning.one_sum.withdrawal import MIN_SILOS, withheld
from tightframe.models.pretrained import read_weights
from tightframe.phases import ServerState
from tightframe.results.files import MODEL, WritePage
from tightframe.results.model_card import InitialModel
from tightframe.results.outcome import Ended
from tightframe.results.parts.withdrawal import WithdrawnRecords, not_covered
from tightframe.results.rows import Row
from tightframe.results.words import plural
from tightframe.rounds import checkpoint
from tightframe.rounds.context import Message
from tightframe.rounds.declaration import WEIGHTS
from tightframe.rounds.plan import AFTER, BEFORE, CLOSING, PERSONAL
from tightframe.rounds.run_state import start_state
from tightframe.rounds.server import collecting, resume
from tightframe.rounds.server.collecting import UNCHANGED, Collector, SharedState
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.common import Sums, Transport
from tightframe.rounds.sums.plain import PlainSums
from tightframe.rounds.sums.secure_server import SecureSums
from tightframe.rounds.sums.transcripts import ServerIdentity, ServerRecord


@dataclass
class Result:
    """Result of a finished run, for the process that ran it."""

    state: ServerState
    outcome: Ended


class Coordinator:
    """Runs one job over a transport.

    Args:
        setup: the validated job.
        identity: of the run, for secure sums; plain sums need none.
        initial_model: safetensors file of a pretrained start, from the server's own site.
        job_id: the run's id in the engine; by default the identity's.
        stopped: checkpoint of the run that the job resumes.
        ended_jobs: folder in which the engine keeps ended jobs, to find models that a withdrawal does not
            reach; None where their results lie beside this one's.
        on_round: called with the row of each exchange.
        write_page: writes the page of the results; without it there is none.
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
        ended_jobs: Path | None = None,
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
        self._ended_jobs = ended_jobs
        self._transcript: ServerRecord | None = None
        self._sums = self._choose_sums(identity)
        self._collector = Collector(setup.job, self._sums, self.record, self.log, on_round)
        self._collector.start = self._named_start
        self._warned = False

    def _choose_sums(self, identity: ServerIdentity | None) -> Sums:
        job = self.setup.job
        if job.summation == "plain":
            return PlainSums(job)
        if identity is None:
            raise RunError("the job has secure sums, but the run has no identity for them.", code="TF-615")
        self._transcript = ServerRecord(self.folder, identity)
        return SecureSums(self.setup, identity, self._transcript, self.log)

    @property
    def weights(self) -> dict[str, float]:
        """Public weights of the enrolled silos, as sums apply them."""
        return self.record.weights

    def run(self, transport: Transport) -> Result:
        """Enrol, train, close, write the results.

        Raises:
            TightframeError: if the run failed; the results so far are written, with the reason.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            state = self._train(transport)
        except TightframeError as error:
            if error.code != REPLACED:  # otherwise the folder belongs to another run now
                self._finish(str(error))
            raise
        except Exception as error:
            self._finish(f"TF-500: the server failed with {type(error).__name__}")
            raise
        result = Result(state, self._finish(None))
        if self.setup.job.local_baseline_epochs and self.setup.job.withdraw is None:
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
        previous = resume.continued(job, self._stopped)
        if previous is None:
            shared = self._begin(transport)
        elif job.resume is None:
            shared = self._withdraw(transport, *previous)
        else:
            shared = self._resume(transport, *previous)
        if job.statistics is not None:  # nothing else to do
            self.record.trained = True
            self._collector.seal(transport, shared)
            return shared.state
        for number in range(job.done + 1, job.rounds + 1):
            among: list[str] | None = None
            for exchange in self.setup.plan.round(number):
                shared, among = self._collector.run(transport, shared, exchange, among)
            self.record.rounds_done = number
            self._keep_checkpoint(shared.state, number)
        shared = self._after(transport, shared)
        state, sha256 = shared.state, None
        self.record.set_absent_classes(state)
        if self.setup.method.own_model is None:
            sha256 = checkpoint.save_tensors(self.folder / MODEL, state.model)
        self.record.write_card(sha256)
        self.record.trained = True
        shared = self._close(transport, shared)
        shared = self._personal(transport, shared)
        self._collector.seal(transport, shared)
        self.record.write_card(sha256)
        return state

    def _keep_checkpoint(self, state: ServerState, number: int) -> None:
        """Write a round's checkpoint; with verified totals only once silos have verified its last total.

        A silo resumes only from a state whose totals it has verified, so until then the previous round's
        checkpoint is the one to resume from.
        """
        write = resume.checkpoint_of(
            self.record,
            state,
            number,
            job_id=self._job_id,
            static_cohort=self._sums.static_cohort,
            opened=self._collector.opened,
        )
        if self._sums.verified:
            self._collector.unverified = write
        else:
            write()

    def _after(self, transport: Transport, shared: SharedState) -> SharedState:
        """Run a method's exchanges after the last round; if one fails, the model stays unchanged."""
        for exchange in self.setup.plan.at(AFTER, self.setup.job.rounds):
            try:
                shared, _ = self._collector.run(transport, shared, exchange)
            except TooFewError as error:
                self.log.warning("%s: %s", UNCHANGED, error)
                break
        return shared

    def _announce(self) -> None:
        job, method = self.setup.job, self.setup.method
        if job.statistics is not None:
            self.log.info(
                "%s: statistics before training on %s with %s; no training, %s sums",
                job.job_name,
                self.setup.dataset.title,
                plural(len(job.sites), "silo"),
                job.summation,
            )
            return
        if not self.setup.trains:
            self.log.info(
                "%s: evaluation of a model of %s (%s) on %s with %s; %s, no training, %s sums",
                job.job_name,
                method.title,
                method.name,
                self.setup.dataset.title,
                job.models,
                plural(len(job.sites), "silo"),
                job.summation,
            )
            return
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

    def _begin(self, transport: Transport) -> SharedState:
        """Enrol the silos, run the exchanges before round 1, and return the state."""
        weights = None if self._initial_model is None else read_weights(self._initial_model)
        state, loaded = start_state(self.setup, weights)
        if loaded is not None:
            self.record.initial_model = InitialModel(sha256=loaded.sha256, fresh=list(loaded.fresh))
            self.log.info(
                "pretrained start: SHA-256 %s, fresh tensors: %s", loaded.sha256, loaded.fresh or "none"
            )
        self._enroll(transport)
        shared = SharedState(state, start=weights)
        for exchange in self.setup.plan.beginning():
            shared, _ = self._collector.run(transport, shared, exchange)
        return shared

    def _resume(
        self, transport: Transport, stored: checkpoint.Checkpoint, saved: resume.SavedRun
    ) -> SharedState:
        """Enrol the silos, and return the state of the checkpoint that the job resumes from."""
        resume.restore(self.record, stored, saved, self.log)
        self.record.withheld = withheld(stored.state)
        self._collector.opened = [*saved.opened]
        self._named_start()  # warns
        self._sums.static_cohort = saved.static_cohort
        self._enroll(transport, saved)
        if changed := resume.changed_weights(saved, self.record.declared):
            self.log.warning(
                "public weights changed since the stopped run, so records did too, at %s", ", ".join(changed)
            )
        return SharedState(stored.state)

    def _withdraw(
        self, transport: Transport, stored: checkpoint.Checkpoint, saved: resume.SavedRun
    ) -> SharedState:
        """Enrol the run's silos, and return its state after records were taken out of its total.

        Raises:
            RunError: TF-521 without a total, TF-523 without all silos of the run, or if too few records are
                withdrawn.
        """
        record, withdraw = self.record, self.setup.job.withdraw
        records = resume.require_total(stored.state, f"the state of job {saved.job_id}")
        record.initial_model = saved.initial_model
        self._sums.static_cohort = saved.static_cohort
        self._named_start()  # warns
        self._enroll(transport, saved)
        if missing := sorted(set(saved.weights) - set(record.weights)):
            raise RunError(
                f"Expected all silos of run {saved.job_id}, whose records are in its total, but "
                f"{', '.join(missing)} did not enrol: withdraw once all are there.",
                code="TF-523",
            )
        shared = SharedState(stored.state)
        for exchange in self.setup.plan.beginning():
            # No silo discloses classes, or adds names to its list, after a total that it has not verified.
            asks = exchange.kind == BEFORE and exchange.index > 0
            if asks and not self._collector.seal(transport, shared, last=False):
                raise RunError(
                    "Expected the silos to verify the numbers of records before they take any out, but too "
                    "few did (the log says why): nothing was taken out. Withdraw once all are there.",
                    code="TF-523",
                )
            shared, _ = self._collector.run(transport, shared, exchange)
        assert withdraw is not None  # noqa: S101  (this job withdraws)
        stay = resume.require_total(shared.state, "the state after the withdrawal")
        record.withheld = withheld(shared.state)
        model = checkpoint.tensor_bytes(stored.state.model)
        record.withdrawn = WithdrawnRecords(
            previous=withdraw.previous,
            lineage=withdraw.lineage,
            records=records - stay,
            stay=stay,
            silos=MIN_SILOS,
            withheld=list(record.withheld),
            not_covered=not_covered(
                self.folder.parent,
                withdraw.lineage,
                [hashlib.sha256(model).hexdigest()],
                self.folder,
                self._ended_jobs,
            ),
        )
        for line in record.withdrawn.lines():
            self.log.info("withdrawal: %s", line)
        return shared

    def _named_start(self) -> bytes | None:
        """Return the pretrained start of this job and of those that it continues, if its file is here."""
        named, path = self.setup.job.initial_model_sha256, self._initial_model
        if named is None:
            return None
        weights = read_weights(path) if path is not None and Path(path).is_file() else None
        if weights is not None and hashlib.sha256(weights).hexdigest() == named:
            return weights
        if not self._warned:
            self._warned = True
            self.log.warning(
                "the pretrained start with SHA-256 %s is not at %s%s: a silo without a copy of it "
                "fails at each exchange (TF-505)",
                named,
                path or "the server",
                "" if weights is None else ", whose file has another",
            )
        return None

    def _enroll(self, transport: Transport, saved: resume.SavedRun | None = None) -> None:
        """Enrol the job's silos; in a resumed job those of the stopped run, whose counts were opened."""
        job, started = self.setup.job, time.monotonic()
        roster = list(job.roster) if saved is None else sorted(saved.weights)
        request = {"job_sha256": job.sha256(), "version": __version__, "roster": roster}
        enrolled = collecting.enroll(self._sums, transport, request, roster, self.record)
        if saved is not None:
            enrolled.absent = {**saved.absent, **enrolled.absent}
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

    def _close(self, transport: Transport, shared: SharedState) -> SharedState:
        """Let every silo evaluate the last model and store it."""
        for exchange in self.setup.plan.at(CLOSING, self.setup.job.rounds):
            try:
                shared, _ = self._collector.run(transport, shared, exchange)
            except TooFewError as error:
                if not self.setup.trains:
                    raise  # the evaluation was the job's only purpose
                # The model is trained, and the silos that answered have it: the run has not failed.
                self.log.warning("the final model was not measured: %s", error)
                self.record.closing_failed = str(error)
        return shared

    def _personal(self, transport: Transport, shared: SharedState) -> SharedState:
        """Let every silo make its personal model, and sum their accuracies.

        The model is trained and recorded by now, so no error here can fail the run.
        """
        for exchange in self.setup.plan.at(PERSONAL, self.setup.job.rounds):
            try:
                shared, _ = self._collector.run(transport, shared, exchange)
            except TightframeError as error:
                if error.code == REPLACED:
                    raise
                self.log.warning("personal models: %s", error)
        return shared

    def _baseline(self, transport: Transport) -> None:
        """Let every silo train its local-only baseline, which stays at the silo.

        The run is over and recorded by now, so no error here can fail it.
        """
        self.log.info("the run is over; each silo now trains its local-only baseline for its own report")
        requests: dict[str, Message] = {site: {} for site in self.weights}
        try:
            failed = transport.exchange("baseline", requests, lambda site, answer: None)
        except TightframeError as error:
            self.log.warning("the local-only baselines were interrupted: %s", error)
            return
        for site, code in sorted(failed.items()):
            self.log.warning("%s has no local-only baseline: %s (%s)", site, code, REASONS.get(code, ""))
        self.log.info("local-only baselines: %d of %d silos", len(requests) - len(failed), len(requests))


BANNER = (
    "SYNTHETIC TWIN: no silo has a path to its records, so every one trains on generated stand-ins for "
    "{dataset}. "
    "They show that the software works; they say nothing about medicine or about a method. "
    "For real records, see docs/data.md."
)
