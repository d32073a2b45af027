"""A silo's answer to a broadcast: evaluate the model, train, encode the term, propose the new state.

Only processes that train import this module, because it imports torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import safetensors.torch
import torch
from safetensors import SafetensorError

from tightframe.errors import ContributionError, RunError, TrainingError
from tightframe.learning.model_update import BROADCAST, UPDATE, broadcast_model, received_model
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.phases import Group, Phase, Schema, ServerState, Tensors
from tightframe.results import dropouts
from tightframe.results.local_report import Baseline
from tightframe.rounds import codec
from tightframe.rounds.checkpoint import SiloStateStore, save_tensors
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.plan import Exchange
from tightframe.rounds.riders import evaluation
from tightframe.rounds.riders.evaluation import few_silo_folds
from tightframe.rounds.setup import prepare, set_threads
from tightframe.rounds.silo import report
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums.plain import Encoded
from tightframe.securesum.messages import SumId

START = "start.safetensors"
OVER_BOUND = "TF-402"


class Contributor:
    """The tasks of a silo that need torch.

    Args:
        context: of the silo.

    Raises:
        PolicyError: TF-614 if the model is larger than the site's policy allows, or the policy does not
            accept the method.
    """

    def __init__(self, context: SiloContext) -> None:
        self._context = context
        with context.policy.refuse_oversized():
            self.setup = self._setup = prepare(context.job, context.policy.ceilings)
        context.policy.check_method(self._setup.setting.config, context.job)
        set_threads(context.job.threads)
        self._device = choose_device(context.site.device)
        self._store = SiloStateStore(context.state_folder, context.name)

    def contribute(
        self,
        message: Message,
        weights: Mapping[str, float],
        *,
        honest: int = 1,
        fold_silos: Mapping[str, int] | None = None,
    ) -> Encoded:
        """Answer one broadcast with a term of its sum.

        Args:
            message: of the task ``contribute``.
            weights: public weights of all silos enrolled.
            honest: t - c, the least number of honest silos in a sum that can be opened; each adds 1/honest
                of the noise's variance.
            fold_silos: number of silos that evaluate each fold, in a secure sum; None in a plain one, where
                the server sees each term.
        """
        evaluate = message["evaluate"]
        exchange = self._setup.plan.find(
            message["kind"], message["round"], message["phase"], evaluate=evaluate
        )
        sum_id = SumId.of(exchange.kind, exchange.round, exchange.index, message["attempt"])
        phase = exchange.carrying(evaluate)
        received = self._received(exchange.kind, phase, message["broadcast"])
        self._store.settle(message["opened"])
        silo = self._silo(exchange, message, sorted(weights), honest, fold_silos)
        if self._context.job.local_baseline_epochs and exchange.starts:
            save_tensors(self._context.state_folder / START, received_model(received), mode=0o600)
        batch_size = self._context.job.training.batch_size
        with (
            seeded(silo.stream("torch"), self._device),
            # `fit` does so by itself; this is for a method's other passes over the records.
            silo.memory_named("training.batch_size", batch_size),
        ):
            contribution = phase.contribute(silo, received, self._store.committed())
        if contribution.proposed_state is not None:
            self._store.propose(sum_id, contribution.proposed_state)
        specs = codec.specs(phase.schema, parties=len(weights))
        term = _term(silo, phase.schema, contribution.tensors, weights)
        basis = hashlib.sha256(message["broadcast"]).digest()
        encoded = Encoded(sum_id, specs, term, basis, follows=True)
        report.note_sent(self._context, phase.schema, encoded, at_end=exchange.reported)
        return encoded

    def _silo(
        self,
        exchange: Exchange,
        message: Message,
        cohort: Sequence[str],
        honest: int,
        fold_silos: Mapping[str, int] | None,
    ) -> LocalSilo:
        """Return this silo's view for an exchange; under privacy, training uses one that charges releases."""
        context, job = self._context, self._context.job
        view = (context, self._setup, self._device, exchange.stream)
        left_out = (*context.small_folds(), *few_silo_folds(job, fold_silos))
        lost = dropouts.read(message.get("lost"), cohort, job.rounds)
        if self._setup.privacy is None or not exchange.training:
            return LocalSilo(*view, cohort=cohort, honest=honest, left_out=left_out, lost=lost)
        from tightframe.rounds.silo.private_view import PrivateSilo

        return PrivateSilo(*view, cohort=cohort, honest=honest, left_out=left_out)

    def check_budget(self) -> None:
        """Refuse a job with privacy whose planned charges exceed this site's budget.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
        """
        from tightframe.rounds.silo.private_view import PrivateSilo

        view = (self._context, self._setup, self._device, 0)
        PrivateSilo(*view, cohort=(self._context.name,), honest=1).check_budget()

    def _received(self, kind: str, phase: Phase, broadcast: bytes) -> dict[str, torch.Tensor]:
        """Return the tensors of a broadcast, after checking that they are those of this phase.

        Raises:
            RunError: TF-604, naming the tensors that are missing or of another shape or type.
        """
        try:
            received = safetensors.torch.load(broadcast)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise RunError(
                f"Expected the broadcast as safetensors, but got {type(error).__name__}: {error}.",
                code="TF-604",
            ) from None
        expected = self._expected(phase)
        # A phase whose broadcast needs a later state may still carry the model.
        expected = {name: item for name, item in self._model.items() if name in received} | expected
        problems = [
            f"{name} {'missing' if name not in received else form(received[name])} for {form(item)}"
            for name, item in expected.items()
            if name not in received or form(received[name]) != form(item)
        ]
        if strange := sorted(
            name for name in received if name.startswith(BROADCAST) and name not in self._model
        ):
            problems += [f"{strange[:3]} that are not in the model"]
        if problems:
            raise RunError(
                f"Expected the broadcast tensors of a {kind!r} sum of this job, but got: "
                f"{', '.join(problems[:5])}: the server runs another job or version.",
                code="TF-604",
            )
        return received

    def _expected(self, phase: Phase) -> dict[str, torch.Tensor]:
        """Return the tensors that a broadcast must contain, with arbitrary values; it may contain more."""
        try:
            return dict(phase.broadcast(self._initial))
        except KeyError:  # the broadcast needs values that only a later state has
            return {}

    @functools.cached_property
    def _initial(self) -> ServerState:
        return self._setup.initial_state()

    @functools.cached_property
    def _model(self) -> Tensors:
        return broadcast_model(self._initial.model)

    def baseline(self) -> Message:
        """Train a local-only baseline: from the run's initial model, by plain cross-entropy.

        The result goes into the silo's own report and nowhere else.

        Raises:
            RunError: TF-508 if this silo missed round 1 or the closing, and has no initial model or report.
        """
        setup, epochs = self._setup, self._context.job.local_baseline_epochs
        if not ((self._context.state_folder / START).is_file() and report.begun(self._context)):
            raise RunError(
                "this silo missed round 1 or the closing phase, so there is nothing to compare.",
                code="TF-508",
            )
        self._context.log.info("%s: training the local-only baseline, %d epochs", self._context.name, epochs)
        silo = LocalSilo(self._context, setup, self._device, 0)
        model = silo.load(safetensors.torch.load_file(self._context.state_folder / START))
        stage = Stage(
            terms=(cross_entropy(),),
            optimizer=OptimizerSettings.of(setup.setting.local),
            epochs=epochs,
        )
        with seeded(silo.stream("torch"), self._device):
            silo.fit(model, [stage])
            counted = evaluation.count_at(silo, model)
        metrics = evaluation.local_metrics(counted, setup.dataset.class_names)
        alone = Baseline(validation=metrics.validation, test=metrics.test, epochs=epochs)
        report.add(self._context, local_only=alone)
        return {}


def form(tensor: torch.Tensor) -> str:
    """Describe a tensor's type and shape.

    >>> form(torch.zeros(2, 3))
    'float32 (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _term(
    silo: LocalSilo, schema: Schema, tensors: Tensors, weights: Mapping[str, float]
) -> dict[Group, bytes]:
    """Encode a silo's term; the error for an update over its bound says what to do about it."""
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
        TrainingError: TF-303 if the site asks for a GPU that is not there.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpus:
            raise TrainingError(
                f"Expected the device {wanted} of the site's configuration, but torch finds {gpus} GPUs: "
                'set "device" to "cpu" or "auto", or install a CUDA build of torch.',
                code="TF-303",
            )
    return device


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global random streams (dropout) for a block, and restore them after it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
