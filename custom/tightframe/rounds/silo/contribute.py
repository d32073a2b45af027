"""A silo's answer to a broadcast: evaluate the model, train, encode the term, propose the new state.

Only processes that train import this module, because it imports torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import safetensors.torch
import torch
from safetensors import safe_open

from tightframe.errors import ContributionError, RunError, TrainingError
from tightframe.files import write_atomically
from tightframe.learning.few_records.products import Sizes
from tightframe.learning.model_update import UPDATE, shared_template
from tightframe.learning.one_sum import withdrawal
from tightframe.learning.one_sum.withdrawal import CLEARED, withheld
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.models.frozen import FrozenEncoder, is_frozen
from tightframe.phases import Contribution, Group, Phase, Schema, ServerState, Tensors
from tightframe.results.files import NEEDS
from tightframe.results.local_report import Baseline
from tightframe.results.parts import dropouts
from tightframe.rounds import codec
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.encoded import LoadedEncoder, used_parts
from tightframe.rounds.evaluation_bits import Evaluations
from tightframe.rounds.few_records import across_jobs, rule
from tightframe.rounds.moments import POOLED, settle_moments
from tightframe.rounds.notes import Notes
from tightframe.rounds.order import place_of
from tightframe.rounds.plan import BEFORE, STATISTICS, Exchange
from tightframe.rounds.privacy_plan import is_frozen_sum
from tightframe.rounds.riders import evaluation, failures
from tightframe.rounds.riders.class_rules import HOLDERS
from tightframe.rounds.riders.evaluation import told_by_few
from tightframe.rounds.setup import prepare, set_threads
from tightframe.rounds.silo import own_report, subnormals
from tightframe.rounds.silo.checks import evaluations, request_order
from tightframe.rounds.silo.checks.enrolment import check_layers, check_possible_rows, counted, own_records
from tightframe.rounds.silo.followed_state import FollowedState
from tightframe.rounds.silo.own_state import SiloStateStore
from tightframe.rounds.silo.rehearsal import rehearse
from tightframe.rounds.silo.view import LocalSilo, RequestedSum
from tightframe.rounds.state_files import START
from tightframe.rounds.sums.common import SEAL, Check, Encoded, Peers
from tightframe.rounds.sums.release import formed_by
from tightframe.rounds.unproven import NO_NEEDS, Needs
from tightframe.rounds.withdrawn_list import note_request
from tightframe.securesum.messages import SumId, Total

OVER_BOUND = "TF-402"
WITHDRAWAL = "withdrawal"
"""Part of the run whose duration a withdrawal's exchanges measure: the first does the most work on
records."""
Result = TypeVar("Result")


class Contributor:
    """The tasks of a silo that need torch.

    Raises:
        PolicyError: TF-614 if the model is larger than the site's policy allows, or the policy does not
            accept the method.
    """

    def __init__(self, context: SiloContext) -> None:
        self._context = context
        with context.policy.refuse_oversized():
            self.setup = self._setup = prepare(context.job, context.policy.ceilings)
        context.policy.check_method(self._setup.setting.config, context.job)
        rule.check_job(context.policy, self._setup)
        set_threads(context.job.threads)
        self._device = choose_device(context.site.device)
        secure = context.job.summation == "secure"
        self._store = SiloStateStore(context.state_folder, context.name, secure=secure)
        self._followed = FollowedState(context.state_folder, self._setup, context.name, context.log)

    def contribute(
        self,
        message: Message,
        peers: Peers,
        *,
        total: Total | None = None,
        check: Check = lambda sum_id, fields, formed: None,
    ) -> Encoded:
        """Answer a request with a term of its sum, computed on this silo's own state of the run.

        Args:
            message: of the task ``contribute``.
            peers: the silos enrolled.
            total: the last one opened; None before the first.
            check: refuses another sum than the request's, and sums of other features or of other classes'
                records than before, before any work for it.

        Raises:
            NeedsStateError, RunError: as ``FollowedState.advance``.
            PolicyError: TF-625 if too few records are behind a sum of products.
        """
        context, job, weights = self._context, self._context.job, peers.weights
        exchange = self._setup.plan.find(message["kind"], message["round"], message["phase"])
        notes = Notes.read(context.state_folder)
        request_order.check_withdrawal(job, notes, exchange.place, message["state"], total)
        sum_id = exchange.sum_id(message["attempt"])
        state, follows = self._followed.advance(message, total, weights)
        request_order.check_order(
            context, self._setup.plan, exchange, message["state"], total, self._followed.behind
        )
        received = {name: item.clone() for name, item in exchange.phase.broadcast(state).items()}
        phase = exchange.phase_for(received)
        specs = codec.specs(phase.schema, parties=len(weights))
        formed = formed_by(self._setup, phase.schema, received, state.model)
        check(sum_id, specs, formed)
        rule.check_sum(context.policy, self._setup, phase.schema, state, peers.sizes)
        self._check_own_withdrawal(exchange, state)
        proven = follows and notes.have_total(total)
        note_request(context, (exchange.kind, exchange.index), asked=CLEARED in state.extra, proven=proven)
        self._settle(message, total)
        needs = Needs.of(context, message["state"], total)
        settle_moments(context, total)
        silo = self._silo(exchange, message, peers, state, needs)
        if job.local_baseline_epochs and job.withdraw is None and self._setup.plan.starts(exchange):
            own = NO_NEEDS if total is None and follows else needs  # the job's own start is known
            self._keep_start(state, own)
        # A server could have chosen this state: it is neither the job's own nor verified.
        begins = (exchange.kind, exchange.index) == (BEFORE, 0) and job.withdraw is not None
        chosen = (total is not None or not follows) and not begins  # ``check_withdrawal`` has compared it
        part = exchange.measure if job.withdraw is None else WITHDRAWAL if exchange.before else None

        def work() -> tuple[Contribution, dict[Group, bytes], bool]:
            check = functools.partial(self._check_own, silo, exchange, phase, state, peers.sizes)
            result = self._term(silo, check, phase, received, weights)
            # Inside the timed work: a failed training writes nothing.
            if result[0].proposed_state is not None:
                self._store.propose(sum_id, result[0].proposed_state, message["state"])
            return result

        self._encode(exchange, silo, state)
        if chosen:
            self._measure(part, silo, message)
        with context.pace.working(str(sum_id), part, known=not chosen) as doing:
            _, term, doing.whole = self._seen_at_work(work)
        encoded = Encoded(sum_id, specs, term, bytes.fromhex(message["state"]), follows, formed)
        evaluations = self.evaluations if exchange.reported else None
        words = () if evaluations is None else evaluations.in_words()
        own_report.note_sent(context, phase.schema, encoded, at_end=exchange.reported, evaluated=words)
        return encoded

    def _keep_start(self, state: ServerState, needs: Needs) -> None:
        """Keep the run's initial model, for the local baseline."""
        data = tensor_bytes(state.model, {NEEDS: json.dumps(needs.stored())})
        write_atomically(self._context.state_folder / START, data, mode=0o600)

    def _check_own_withdrawal(self, exchange: Exchange, state: ServerState) -> None:
        """Refuse classes and sums of withdrawn records whose numbers this silo has reported as too small.

        It reports that inside the first sum. If the total has no such report, another silo has hidden it.

        Args:
            state: of the run, on which the exchange rests.

        Raises:
            RunError: TF-523.
        """
        if self._context.job.withdraw is None or exchange.kind != BEFORE or exchange.index == 0:
            return
        asked = self._setup.withdrawal
        assert asked is not None  # noqa: S101  (this job withdraws)
        view = LocalSilo(self._context, self._setup, self._device, exchange.stream)
        withdrawal.check_own(view, self._store.committed(), asked, withheld(state))

    def _check_own(
        self, silo: LocalSilo, exchange: Exchange, phase: Phase, state: ServerState, sizes: Sizes
    ) -> None:
        """Refuse a sum of which this silo's own records have too few values, or too few possible rows.

        Raises:
            PolicyError: TF-625 or TF-628, which must not leave the silo.
        """
        if exchange.training and silo.pooled is not None:
            check_possible_rows(silo)
        policy, job = self._context.policy, self._context.job
        summed = any(item.features or item.products for item in phase.schema.fields)
        if not policy.records_per_feature or not summed:
            return
        if not silo.offers_prototypes:
            return
        own = silo.own_rows(staying=job.withdraw is not None)
        if HOLDERS in phase.schema:
            held = silo.held_counts() >= silo.min_class_count
            own = replace(own, counts=own.counts * held, by_class=own.by_class * held)
        plain = job.summation == "plain"
        rule.check_own(policy, self._setup, phase.schema, state, sizes, own, seen=plain)

    def _settle(self, message: Message, total: Total | None) -> None:
        """Commit what this silo trained for earlier sums, or drop it."""
        # A silo knows by itself whether it is in the named total: the server does not choose its state.
        cohorts = {} if total is None else {str(total.sum_id): list(total.survivors)}
        digest = None if total is None else total.digest().hex()
        self._store.settle({**message["opened"], **cohorts}, next(iter(cohorts), None), digest)

    def _seen_at_work(self, work: Callable[[], Result]) -> Result:
        """Do work on records whose duration others can observe."""
        return subnormals.without(work, self._context.job.threads) if self._context.pace.on else work()

    def _term(
        self,
        silo: LocalSilo,
        check: Callable[[], None],
        phase: Phase,
        received: Tensors,
        weights: Mapping[str, float],
    ) -> tuple[Contribution, dict[Group, bytes], bool]:
        """Return the contribution, its integers, and whether all of it was computed.

        After a failure it is neutral, with a flag.

        Args:
            check: raises refusals that depend on records.

        Raises:
            TightframeError: for errors that do not depend on records (``failures.hidden``).
        """
        batch_size, contribution = silo.setting.local.batch_size, Contribution({})
        try:
            with (
                repeatable(silo.stream("torch"), self._device),
                # `fit` does this itself; here it covers a method's other passes over the records.
                silo.memory_named("training.batch_size", batch_size),
            ):
                check()
                contribution = phase.contribute(silo, received, self._store.committed())
            failed = contribution.tensors.get(failures.FAILED)
            whole = failed is None or not bool(failed)
            term = _encoded(silo, phase.schema, contribution.tensors, weights)
            if not whole and self._setup.privacy is None:
                term = failures.blinded(phase.schema, term)
            return contribution, term, whole
        except Exception as error:
            # Errors about noisy values may leave: above all an exceeded bound.
            covered = self._setup.privacy is not None and isinstance(error, ContributionError)
            if covered or not failures.hidden(error):
                raise
            failures.note(self._context, error)
        private = self._setup.privacy
        contribution = failures.without_update(
            phase.schema, received, {} if private is not None else contribution.tensors
        )
        if private is not None:
            contribution = failures.with_noise(contribution, phase.schema, private, silo)
        term = _encoded(silo, phase.schema, contribution.tensors, weights)
        return contribution, term if private is not None else failures.blinded(phase.schema, term), False

    def _encode(self, exchange: Exchange, silo: LocalSilo, state: ServerState) -> None:
        """Compute the features of a frozen encoder, if the job has one.

        This precedes the work whose duration others can observe: the encoder is that of the job's start, so
        its time depends neither on a state that a server could have chosen, nor on how far that work gets.
        """
        context, own_model = self._context, self._setup.method.own_model
        if not context.pace.on or exchange.kind == STATISTICS or context.job.withdraw is not None:
            return  # statistics load no model; a withdrawal has other records: all its computation is work
        if context.features.has(parts := used_parts(self._setup)):
            return
        if not is_frozen(shared_template(silo.setting)):
            return

        def compute() -> None:
            tensors = state.model if own_model is None else own_model(silo, self._store.committed())
            view = LocalSilo(context, self._setup, self._device, exchange.stream)
            loaded = LoadedEncoder.of(cast(FrozenEncoder, view.load(tensors)))
            for fold, exact in parts:
                context.features.fold(context, loaded, fold, self._device, exact=exact)

        try:
            self._seen_at_work(compute)
        except Exception as error:
            if not failures.hidden(error):
                raise
            context.log.warning("%s: features cannot be computed: %s", context.name, failures.reason(error))

    def _measure(self, part: str | None, silo: LocalSilo, message: Message) -> None:
        """Rehearse a first round before the first work on a state that a server could choose.

        Otherwise such work would set the floor of later work (``pace``). In a withdrawal its first exchange
        sets the floor, on the state that the job names.

        Raises:
            RunError: TF-523 in a withdrawal without that exchange.
        """
        context, measure = self._context, part or "0"
        if not context.pace.lacks(measure):
            return
        if measure == WITHDRAWAL:
            raise RunError(
                "Expected this silo to have taken part in the first exchange of the withdrawal, which begins "
                "with the state that the job names, but it has not: nothing is taken out.",
                code="TF-523",
            )
        start = self._followed.start(message)
        context.log.info(
            "%s: rehearses a first round to measure its duration; nothing of it leaves", context.name
        )
        requested = RequestedSum(silo.cohort, silo.honest)
        try:
            timed = self._seen_at_work(lambda: rehearse(context, self._setup, self._device, requested, start))
            context.pace.rehearsed(timed)
        except Exception as error:  # training fails the same way, and answers in the form of any other term
            context.log.warning(
                "%s: the rehearsal of a first round failed: %s", context.name, failures.reason(error)
            )

    def _silo(
        self,
        exchange: Exchange,
        message: Message,
        peers: Peers,
        state: ServerState,
        needs: Needs = NO_NEEDS,
    ) -> LocalSilo:
        """Return this silo's view for an exchange; under privacy, training uses one that charges releases."""
        context, job, cohort = self._context, self._context.job, sorted(peers.weights)
        limited = self.evaluations if job.withdraw is not None else None
        withhold = () if limited is None else limited.withheld
        left_out = (*context.untold(), *told_by_few(job, peers.tellers), *withheld(state), *withhold)
        lost = dropouts.read(message.get("lost"), cohort, job.rounds)
        weight, pooled = peers.weights.get(context.name, math.inf), state.extra.get(POOLED)
        behind = 0.0, 0.0
        if not context.data.synthetic:
            behind = rule.part_behind(context.policy, self._setup, counted(context, peers.sizes))
        requested = RequestedSum(
            cohort, peers.honest, left_out, lost, needs, weight, pooled, withhold, behind
        )
        view = (context, self._setup, self._device, exchange.stream, requested)
        released = any(map(is_frozen_sum, exchange.phase.schema.fields))
        if self._setup.privacy is None or not (exchange.training or released):
            return LocalSilo(*view)
        from tightframe.rounds.silo.private_view import PrivateSilo

        return PrivateSilo(*view)

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse a job whose silos declare too few records for its products of features or its layers.

        Raises:
            PolicyError: TF-625.
        """
        policy, data = self._context.policy, self._context.data
        rule.check_declared(policy, self._setup, sizes)
        if self._context.job.weights == "uniform":
            self.check_layers(sizes, "records, were all silos as this one")
        if not data.synthetic:
            rule.check_behind(policy, self._setup, own_records(self._context))

    def check_layers(self, sizes: Sizes, of: str) -> None:
        """Refuse a sum of layers of silos that declare too few records.

        Raises:
            PolicyError: TF-625.
        """
        check_layers(self._context, self._setup, sizes, of)

    def rounds(self, sizes: Sizes) -> across_jobs.Rounds | None:
        """Return the job's exact sums that add to other jobs'; None if there are none, or no limit."""
        if not self._context.limits_rounds:
            return None
        return across_jobs.rounds_planned(self._setup, counted(self._context, sizes))

    @cached_property
    def evaluations(self) -> Evaluations | None:
        """Return the job's exact evaluations at this silo; None where they are not limited."""
        if not self._context.limits_evaluations:
            return None
        return evaluations.of_silo(self._context, self._setup, self._device)

    def check_budget(self) -> None:
        """Refuse a job with privacy whose planned charges exceed this site's budget.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
        """
        from tightframe.rounds.silo.private_view import PrivateSilo

        requested = RequestedSum((self._context.name,))
        PrivateSilo(self._context, self._setup, self._device, 0, requested).check_budget()

    def seal(self, message: Message, peers: Peers, *, total: Total | None, check: Check) -> Encoded:
        """Answer a request that only verifies the last total: its term is empty, and needs no training.

        The arguments are those of ``contribute``.
        """
        if total is not None:
            self._setup.plan.find(*place_of(total.sum_id))
        _, follows = self._followed.advance(message, total, peers.weights)
        sum_id = SumId.of(SEAL, message["round"], message["phase"], message["attempt"])
        check(sum_id, (), {})
        if total is not None:
            self._store.commit(str(total.sum_id), total.survivors, total.digest().hex())
        return Encoded(sum_id, (), {}, bytes.fromhex(message["state"]), follows)

    def baseline(self) -> Message:
        """Train a local-only baseline: from the run's initial model, by plain cross-entropy.

        The result goes into the silo's own report and nowhere else, and so does a failure that records can
        cause (``failures.hidden``).

        Raises:
            RunError: TF-508 if this silo missed round 1 or the closing (no initial model or report), or if
                that model's pooled statistics were not proven.
            TightframeError: for errors that do not depend on records.
        """
        epochs = self._context.job.local_baseline_epochs
        if not (self._has_start() and own_report.begun(self._context)):
            raise RunError(
                "this silo missed round 1 or the closing phase, so there is nothing to compare.",
                code="TF-508",
            )
        try:
            with self._context.pace.working("baseline", None, known=False):
                alone = self._seen_at_work(lambda: self._alone(epochs))
        except Exception as error:
            if not failures.hidden(error):
                raise
            self._context.log.error(
                "%s: there is no local-only baseline: %s",
                self._context.name,
                failures.reason(error),
            )
            return {}
        own_report.add(self._context, local_only=alone)
        return {}

    def _has_start(self) -> bool:
        """Check whether this silo has the run's initial model, and the totals that it rests on are proven."""
        if not (path := self._context.state_folder / START).is_file():
            return False
        with safe_open(path, "pt") as stream:
            metadata = stream.metadata() or {}
        return Needs.read(json.loads(metadata[NEEDS])).proven(self._context) if NEEDS in metadata else True

    def _alone(self, epochs: int) -> Baseline:
        """Train the local-only baseline, and return its results."""
        setup = self._setup
        self._context.log.info("%s: training the local-only baseline, %d epochs", self._context.name, epochs)
        silo = LocalSilo(self._context, setup, self._device, 0)
        model = silo.load(safetensors.torch.load_file(self._context.state_folder / START))
        stage = Stage(
            terms=(cross_entropy(),),
            optimizer=OptimizerSettings.of(setup.setting.local),
            epochs=epochs,
        )
        with repeatable(silo.stream("torch"), self._device):
            silo.fit(model, [stage])
            counted = evaluation.count_at(silo, model)
        metrics = evaluation.local_metrics(counted, setup.dataset.class_names)
        return Baseline(validation=metrics.validation, test=metrics.test, epochs=epochs)


def _encoded(
    silo: LocalSilo, schema: Schema, tensors: Tensors, weights: Mapping[str, float]
) -> dict[Group, bytes]:
    """Encode a silo's term; the error for an update over its bound contains advice."""
    share = weights[silo.name] / max(weights.values())
    try:
        return codec.encode(schema, tensors, share=share, parties=len(weights))
    except ContributionError as error:
        if error.code != OVER_BOUND or not (error.field or "").startswith(UPDATE):
            raise
        advice = silo.large_update_advice()
        raise ContributionError(f"{error.args[0]} {advice}", code=error.code, field=error.field) from None


def choose_device(wanted: str) -> torch.device:
    """Return the site's device; ``auto`` is a GPU where there is one.

    Raises:
        TrainingError: TF-303 if the site asks for a GPU that does not exist.
    """
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    if device.type == "cuda":
        # Read when a process first multiplies matrices on a GPU; without it results are not `repeatable`.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpus:
            raise TrainingError(
                f"Expected the device {wanted} of the site's configuration, but torch finds {gpus} GPUs: "
                'set "device" to "cpu" or "auto", or install a CUDA build of torch.',
                code="TF-303",
            )
    return device


@contextmanager
def repeatable(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global random streams (dropout) for a block, and restore them after it.

    A GPU uses deterministic operations: with its default choice two runs of one job on an H200 differed by
    0.003 in a model's entries after a round. Operations without a deterministic form still run; torch
    warns.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), deterministic() if devices else nullcontext():
        # On a machine without a GPU, torch.manual_seed takes three tracebacks.
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use deterministic operations for a block, where it has them."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
