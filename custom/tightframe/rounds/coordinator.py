"""The server's half of a run: plan, collect, open, update; whatever carries the messages.

The server sees integers of sums and public weights. A silo that is late or fails is left out of
the sum (k of n) and asked again in the next exchange; fewer than the minimum end the run with
the silos and their codes named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tightframe import __version__
from tightframe.errors import REASONS, ContributionError, RunError, TightframeError
from tightframe.model_update import broadcast_model, received_model
from tightframe.models.pretrained import load_initial
from tightframe.phases import Cohort, Phase, Schema, ServerState, Totals
from tightframe.rounds import checkpoint, codec, evaluation, outcome
from tightframe.rounds.context import Message
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.summation import SumId, server_summation

TOO_FEW = "TF-501"
Accept = Callable[[str, Message], None]


class Transport(Protocol):
    """Carries one task to every silo and brings the answers back."""

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Send each silo its request and hand each answer to ``accept`` as it arrives.

        Returns:
            Silo -> code for every silo without an accepted answer. ``accept`` may raise a
            named error, which makes that silo's answer a failure of the same code.
        """


@dataclass
class Result:
    """What a finished run returns in the process that ran it."""

    state: ServerState
    outcome: outcome.Outcome


class Coordinator:
    """Runs one job over a transport.

    Args:
        setup: the validated job.
        folder: where the results go.
        initial_model: safetensors file of a pretrained start, from the server's own site.
    """

    def __init__(
        self,
        setup: JobSetup,
        folder: Path,
        *,
        initial_model: str | None = None,
        log: logging.Logger | None = None,
        on_round: Callable[[outcome.Row], None] | None = None,
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.log = log or logging.getLogger("tightframe.run")
        self.record = outcome.RunRecord(folder, setup.job, setup.method, setup.dataset, self.log)
        self._initial_model = initial_model
        # Sums opened so far, and how many of them each silo has heard of for certain: a silo that
        # misses a request must still learn what became of its last term.
        self._opened: list[tuple[str, list[str]]] = []
        self._told: dict[str, int] = {}
        self._on_round = on_round

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
            self.record.finish(str(error))
            raise
        except Exception as error:
            self.record.finish(f"TF-500: the server failed with {type(error).__name__}")
            raise
        result = Result(state, self.record.finish(None))
        if self.setup.job.local_baseline_epochs:
            self._baseline(transport)
        return result

    def _train(self, transport: Transport) -> ServerState:
        job = self.setup.job
        self._announce()
        state = self._initial_state()
        self._enroll(transport)
        for index, phase in enumerate(self.setup.before_phases()):
            state = self._phase(transport, state, phase, "before", 0, index, evaluate=False)
        for number in range(1, job.rounds + 1):
            for index, phase in enumerate(self.setup.training_phases(number)):
                state = self._phase(transport, state, phase, "train", number, index, evaluate=index == 0)
            self.record.rounds_done = number
            checkpoint.save_state(self.folder, state, round_number=number, job_sha256=job.sha256())
        for index, phase in enumerate(self.setup.after_phases()):
            state = self._phase(transport, state, phase, "after", job.rounds, index, evaluate=False)
        sha256 = checkpoint.save_tensors(self.folder / "model.safetensors", state.model)
        self.record.write_card(sha256)
        self.record.trained = True
        self._close(transport, state)
        self.record.write_card(sha256)
        return state

    def _announce(self) -> None:
        job, method = self.setup.job, self.setup.method
        self.log.info(
            "%s: %s (%s) on %s with %s; %s, %s and a closing phase, %s sums, seed %d",
            job.job_name,
            method.title,
            method.name,
            self.setup.dataset.title,
            job.model,
            outcome.plural(len(job.sites), "silo"),
            outcome.plural(job.rounds, "round"),
            job.summation,
            job.seed,
        )

    def _initial_state(self) -> ServerState:
        state = self.setup.initial_state()
        if self._initial_model is not None:
            model = self.setup.setting.build_model()
            model.load_state_dict(dict(state.model))
            loaded = load_initial(model, Path(self._initial_model))
            self.record.initial_model = {"sha256": loaded.sha256, "fresh": list(loaded.fresh)}
            self.log.info(
                "pretrained start: SHA-256 %s, fresh tensors: %s", loaded.sha256, loaded.fresh or "none"
            )
            state = state.evolve(model={name: value.clone() for name, value in model.state_dict().items()})
        return state

    def _enroll(self, transport: Transport) -> None:
        job, started = self.setup.job, time.monotonic()
        request = {"job_sha256": job.sha256(), "version": __version__, "roster": list(job.roster)}
        synthetic: dict[str, bool] = {}

        def accept(site: str, answer: Message) -> None:
            weight, made_up = answer.get("weight"), answer.get("synthetic")
            if not isinstance(weight, float) or not 0 < weight < 2**40 or not isinstance(made_up, bool):
                raise ContributionError(f"{site} answered enrolment with {sorted(answer)}, not a weight.")
            self.weights[site] = weight
            synthetic[site] = made_up

        failed = transport.exchange("enroll", {site: dict(request) for site in job.roster}, accept)
        refused = {site: code for site, code in failed.items() if code != "TF-502"}
        if refused:
            raise RunError(
                "before any training, "
                + "; ".join(
                    f"{site} refused: {code} ({REASONS.get(code, 'see docs/errors.md')})"
                    for site, code in sorted(refused.items())
                )
                + ". The details are in each silo's own log; "
                + "mend them, or export the job without those silos.",
                code="TF-509",
            )
        if len(self.weights) < job.min_sites:
            raise self._too_few("enrolment", failed, len(self.weights))
        self.record.absent = dict(failed)
        if len(set(synthetic.values())) > 1:
            made_up = sorted(site for site, value in synthetic.items() if value)
            raise RunError(
                f"synthetic and real records are never mixed, but {made_up} have synthetic ones.",
                code="TF-506",
            )
        self.record.synthetic = any(synthetic.values())
        if self.record.synthetic:
            self.log.warning("%s", BANNER.format(dataset=self.setup.dataset.title))
        self.log.info(
            "enrolled %d of %d silos in %.0f s; public weights (%s): %s%s",
            len(self.weights),
            len(job.sites),
            time.monotonic() - started,
            WEIGHTS[job.weights],
            ", ".join(f"{site} {weight:g}" for site, weight in sorted(self.weights.items())),
            "".join(f"; without {site} ({code})" for site, code in sorted(failed.items())),
        )

    def _phase(
        self,
        transport: Transport,
        state: ServerState,
        phase: Phase,
        kind: str,
        number: int,
        index: int,
        *,
        evaluate: bool,
    ) -> ServerState:
        """One phase: broadcast, collect, open, update."""
        broadcast = phase.broadcast(state)
        evaluate = evaluate and any(name.startswith("model/") for name in broadcast)
        schema = self.setup.schema(phase, evaluated=evaluate)
        row, totals = self._collect(transport, schema, broadcast, kind, number, index, evaluate=evaluate)
        own, others = evaluation.split_totals(totals)
        cohort = Cohort(number, {site: self.weights[site] for site in row.silos}, max(self.weights.values()))
        state = phase.update(state, others, cohort)
        row.training = {
            name.removeprefix("training/"): float(value) / cohort.total_weight
            for name, value in others.items()
            if name.startswith("training/")
        }
        self._add(row, own if evaluate else None, broadcast)
        return state

    def _close(self, transport: Transport, state: ServerState) -> None:
        """Evaluate the last model everywhere and leave it at the silos."""
        schema = self.setup.evaluation_schema()
        broadcast = broadcast_model(state.model)
        row, totals = self._collect(
            transport, schema, broadcast, "closing", self.setup.job.rounds, 0, evaluate=True
        )
        self._add(row, totals, broadcast)

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

    def _collect(
        self,
        transport: Transport,
        schema: Schema,
        broadcast: Mapping[str, torch.Tensor],
        kind: str,
        number: int,
        index: int,
        *,
        evaluate: bool,
    ) -> tuple[outcome.Row, Totals]:
        """Send a broadcast, add the terms as they arrive, open the sum."""
        job, started = self.setup.job, time.monotonic()
        sum_id = SumId.of(kind, number, index, 0)
        data = checkpoint.tensor_bytes(broadcast)
        request = {
            "kind": kind,
            "round": number,
            "phase": index,
            "attempt": sum_id.attempt,
            "evaluate": evaluate,
            "weights": dict(self.weights),
            "broadcast": data,
        }
        untold = {site: dict(self._opened[self._told.get(site, 0) :]) for site in self.weights}
        requests = {site: {**request, "opened": opened} for site, opened in untold.items()}
        sums = server_summation(job.summation, schema)
        received = {"bytes": 0}
        cohort: list[str] = []

        def accept(site: str, answer: Message) -> None:
            term = answer.get("term")
            if not isinstance(term, dict) or not all(isinstance(part, bytes) for part in term.values()):
                raise ContributionError(f"{site} answered with {sorted(answer)}, not with a term.")
            sums.add(site, term)
            received["bytes"] += sum(len(part) for part in term.values())
            cohort.append(site)
            self._told[site] = len(self._opened)

        failed = dict(transport.exchange("contribute", requests, accept))
        if len(cohort) < job.min_sites:
            self.record.dropped(kind, number, sorted(cohort), failed)
            raise self._too_few(f"round {number}" if kind == "train" else kind, failed, len(cohort))
        cohort.sort()
        totals = codec.decode(schema, sums.open(cohort), parties=len(self.weights))
        self._opened.append((str(sum_id), cohort))
        row = outcome.Row(
            number,
            kind,
            cohort,
            failed,
            time.monotonic() - started,
            len(data) * len(self.weights),
            received["bytes"],
        )
        return row, totals

    def _add(self, row: outcome.Row, counted: Totals | None, broadcast: Mapping[str, torch.Tensor]) -> None:
        self.record.add(row, counted, received_model(broadcast))
        if self._on_round is not None:
            self._on_round(row)

    def _too_few(self, where: str, failed: Mapping[str, str], got: int) -> RunError:
        named = ", ".join(
            f"{site}: {code} ({REASONS.get(code, 'see docs/errors.md')})"
            for site, code in sorted(failed.items())
        )
        return RunError(
            f"too few silos in {where}: expected at least {self.setup.job.min_sites}, "
            f"but got {got}; {named}.",
            code=TOO_FEW,
        )


WEIGHTS: Mapping[str, str] = {
    "exact": "training records",
    "power_of_two": "training records, rounded down to a power of two",
    "uniform": "one each",
}

BANNER = (
    "SYNTHETIC TWIN: no site is configured, so every silo trains on generated stand-ins for {dataset}. "
    "They show that the software works; they say nothing about medicine or about a method. "
    "For real records, write the workspace's local/tightframe.json or use tightframe simulate --site-config."
)
