"""What a silo does with a broadcast: evaluate it, train, encode, propose; and the closing.

Only processes that train import this module, because it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import safetensors.torch
import torch

from tightframe import training
from tightframe.errors import ContributionError, RunError, TrainingError
from tightframe.model_update import UPDATE, received_model
from tightframe.phases import Group, Phase, Schema, Tensors
from tightframe.rounds import classes, codec, evaluation, own_report, personal, statistics
from tightframe.rounds.checkpoint import SiloStateStore, save_tensors
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.local_silo import LocalSilo, guarded
from tightframe.rounds.private.evaluation_plan import purpose as evaluation_purpose
from tightframe.rounds.setup import PRESENT, prepare, set_threads
from tightframe.rounds.summation import Encoded
from tightframe.securesum.messages import SumId

__all__ = ["Contributor", "LocalSilo", "choose_device", "guarded"]

START = "start.safetensors"
PERSONAL = "personal_model.safetensors"
OVER_BOUND = "TF-402"


class Contributor:
    """The tasks of a silo that need torch.

    Raises:
        PolicyError: TF-614 if the method does what the site's policy does not accept.
    """

    def __init__(self, context: SiloContext) -> None:
        self._context = context
        self._setup = prepare(context.job)
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
        told: Mapping[str, int] | None = None,
    ) -> Encoded:
        """Answer one broadcast with a term of its sum.

        Args:
            message: of the task ``contribute``.
            weights: the public weights of all silos enrolled.
            honest: honest silos in the smallest sum that can be opened: they share noise among them.
            told: silos that tell of each fold, in a secure sum; None where the server sees each term anyway.
        """
        sum_id = SumId.of(message["kind"], message["round"], message["phase"], message["attempt"])
        self._check_place(message)
        self._store.settle(message["opened"])
        received = safetensors.torch.load(message["broadcast"])
        ended = message["kind"] == personal.KIND
        left_out = (*self._context.untold_folds(), *evaluation.told_by_few(self._context.job, told))
        silo = self._silo(message, sum_id.round + ended, sorted(weights), honest)
        if self._context.job.local_baseline_epochs and sum_id.phase == "train-0" and sum_id.round == 1:
            save_tensors(self._context.state_folder / START, received_model(received), mode=0o600)
        tensors: dict[str, torch.Tensor] = {}
        with seeded(silo.stream("torch"), self._device):
            phase = self._phase(message)
            if ended:
                schema = personal.schema()
            elif phase is None:
                schema = self._setup.closing_schema()
            else:
                schema = self._setup.schema(phase, evaluated=message["evaluate"])
            if message["evaluate"] and self._setup.evaluates:
                final = self._final(silo, received)
                counted = self._count(silo, silo.load(final))
                try:
                    exact = evaluation.without(counted, left_out)
                    tensors |= self._told(exact, message, sorted(weights), honest)
                finally:
                    # Whatever the budget says, a silo keeps the model and its own, exact report.
                    if message["kind"] == "closing":
                        own_report.close(self._context, self._setup, silo, final, counted)
            if ended:
                own = self._personalise(silo, received)
                # Its accuracy is an exact count of the very records that are not to be told of.
                tensors |= personal.untold(own) if "test" in left_out else own
            elif phase is not None:
                tensors |= self._contribution(silo, phase, received, sum_id)
            elif not self._setup.evaluates:
                final = self._final(silo, received)
                counted = self._count(silo, silo.load(final))
                own_report.close(self._context, self._setup, silo, final, counted)
                tensors[PRESENT.name] = torch.ones((), dtype=torch.float64)
        specs = codec.specs(schema, parties=len(weights))
        return Encoded(sum_id, specs, _term(silo, schema, tensors, weights))

    def _told(
        self, counted: dict[str, torch.Tensor], message: Message, cohort: Sequence[str], honest: int
    ) -> dict[str, torch.Tensor]:
        """What leaves of an evaluation: under privacy it is noisy, and charged before the noise is drawn."""
        plan = self._setup.privacy
        if plan is None:
            return counted
        from tightframe.rounds.private.evaluation import released

        purpose = evaluation_purpose(message["kind"], message["round"])
        return released(counted, self._context, plan, cohort=cohort, honest=honest, purpose=purpose)

    def _silo(self, message: Message, number: int, cohort: Sequence[str], honest: int) -> LocalSilo:
        """This silo's view in a round; what is released under privacy goes by one that charges it."""
        view = (self._context, self._setup, self._device, number)
        if self._setup.privacy is None or message["kind"] != "train":
            return LocalSilo(*view)
        from tightframe.rounds.private.silo import PrivateSilo

        return PrivateSilo(*view, cohort=cohort, honest=honest)

    def check_budget(self) -> None:
        """Refuse a job with privacy whose planned charges this site's budget does not hold.

        Raises:
            BudgetError: TF-701, saying what is left and what would fit.
        """
        from tightframe.rounds.private.silo import PrivateSilo

        view = (self._context, self._setup, self._device, 0)
        PrivateSilo(*view, cohort=(self._context.name,), honest=1).check_budget()

    def _check_place(self, message: Message) -> None:
        """Refuse a sum that the job does not have: what a server may ask is what the job plans.

        Raises:
            RunError: TF-505.
        """
        kind, rounds = message["kind"], self._context.job.rounds
        places = [message[name] for name in ("round", "phase", "attempt")]
        if not all(type(place) is int and place >= 0 for place in places):
            raise RunError("Expected whole numbers for round, phase and attempt.", code="TF-505")
        if kind not in self._kinds():
            raise RunError(
                f"Expected a sum of {sorted(self._kinds())}, which this job has, but the server asks for "
                f"{kind!r}.",
                code="TF-505",
            )
        first, last = (rounds, rounds) if kind in ("after", "closing", personal.KIND) else (0, 0)
        first, last = (self._context.job.done + 1, rounds) if kind == "train" else (first, last)
        number, index = places[:2]
        if not first <= number <= last:
            raise RunError(
                f"Expected a round from {first} to {last} for {kind!r}, but the server asks for {number}.",
                code="TF-505",
            )
        phases = 1 if kind in ("closing", personal.KIND) else len(self._phases(kind, number))
        begins = kind == "train" and index == 0 and self._setup.evaluates_in(number)
        may_evaluate = kind == "closing" or begins
        if index >= phases or (message["evaluate"] and not may_evaluate):
            raise RunError(
                f"Expected one of {phases} phases of {kind!r}, and an evaluation with a round's first or the "
                f"closing only, and with `privacy` as planned, but the server asks for phase {index}.",
                code="TF-505",
            )

    def _kinds(self) -> tuple[str, ...]:
        """The kinds of sums that the job has: under privacy those alone that have a mechanism."""
        job = self._context.job
        if job.privacy is not None:
            return ("train", "closing")
        made = (personal.KIND,) if job.personalise else ()
        begun = () if job.resume is not None else (statistics.KIND, "before")
        return (*begun, "train", "after", "closing", *made)

    def _contribution(
        self, silo: LocalSilo, phase: Phase, received: dict[str, torch.Tensor], sum_id: SumId
    ) -> Tensors:
        """What the method proposes, under the class rules."""
        classes_count = self._setup.dataset.num_classes
        flagged = bool(self._setup.class_flags(phase).fields)
        offer = classes.received_offer(received, classes_count) if flagged else None
        seen = {name: item for name, item in received.items() if name != classes.OFFERED}
        # `fit` names what would fit by itself; this is for passes of a method beside it.
        with memory_named("training.batch_size", self._context.job.training.batch_size, self._device):
            contribution = phase.contribute(silo, seen, self._store.committed())
        self._store.propose(sum_id, contribution.proposed_state)
        if offer is None:
            return contribution.tensors
        return classes.withhold(
            phase.schema,
            contribution.tensors,
            offer=offer,
            counts=silo.class_counts("train", distinct=True),
            least=self._least_records(),
            speaks=silo.offers_prototypes,
        )

    def _least_records(self) -> int:
        """Local records that a class must have: this site's rule, or the job's own if that is stricter.

        A silo that calls itself a holder and then sends nothing would leave others alone in a sum.
        """
        ours = self._context.policy.class_count(synthetic=self._context.data.synthetic)
        return max(ours, int(getattr(self._setup.setting.config, "min_class_count", 0)))

    def _phase(self, message: Message) -> Phase | None:
        """The phase that a message asks for; None for the closing and the personal models."""
        kind, index = message["kind"], message["phase"]
        if kind in ("closing", personal.KIND):
            return None
        return self._phases(kind, message["round"])[index]

    def _phases(self, kind: str, number: int) -> tuple[Phase, ...]:
        """The phases of a kind, in a round where it is one of training."""
        setup = self._setup
        return {
            statistics.KIND: setup.statistics_phases,
            "before": setup.before_phases,
            "train": lambda: setup.training_phases(number),
            "after": setup.after_phases,
        }[kind]()

    def _final(self, silo: LocalSilo, received: Tensors) -> Tensors:
        """The model received; or the silo's own, where the method has no global one."""
        own = self._setup.method.own_model
        return received_model(received) if own is None else own(silo, self._store.committed())

    def _count(self, silo: LocalSilo, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        settings = self._context.job.evaluation
        with memory_named("evaluation.batch_size", settings.batch_size, self._device):
            return evaluation.count(
                model,
                self._setup.method.predict,
                {fold: silo.batches(fold, augment=False, shuffle=False) for fold in evaluation.FOLDS},
                num_classes=self._setup.dataset.num_classes,
                score_bins=settings.score_bins,
            )

    def _personalise(self, silo: LocalSilo, received: Tensors) -> dict[str, torch.Tensor]:
        """Make the personal model, keep it and its results here; propose how good it is."""
        setup, run_dir = self._setup, self._context.run_dir
        phase = setup.training_phases(setup.job.rounds)[-1]
        self._context.log.info("%s: making the personal model", silo.name)
        with memory_named("training.batch_size", setup.job.training.batch_size, self._device):
            model = personal.build(silo, setup.method, phase, received, self._store.committed())
        tensors, confusion = personal.count(
            setup.method.predict,
            model,
            silo.batches("test", augment=False, shuffle=False),
            silo.class_counts("train"),
            setup.dataset.num_classes,
        )
        sha256 = save_tensors(run_dir / PERSONAL, model.state_dict(), mode=0o600)
        if own_report.begun(self._context):
            results = {name.removeprefix("personal/"): float(value) for name, value in tensors.items()}
            kept = {"model_sha256": sha256, "confusion": confusion.tolist()}
            own_report.add(self._context, "personal", kept | results)
        self._context.log.info("%s: personal model (this silo's own): %s", silo.name, run_dir / PERSONAL)
        return tensors

    def baseline(self) -> Message:
        """Train from the run's start on this silo's records alone, by plain cross-entropy.

        The result goes into the silo's own report and nowhere else.

        Raises:
            RunError: TF-508 if this silo has no report or missed round 1, so that it has no start.
        """
        setup, epochs = self._setup, self._context.job.local_baseline_epochs
        if not ((self._context.state_folder / START).is_file() and own_report.begun(self._context)):
            raise RunError(
                "this silo missed round 1 or the closing phase, so it has nothing to compare.", code="TF-508"
            )
        self._context.log.info("%s: training the local-only baseline, %d epochs", self._context.name, epochs)
        silo = LocalSilo(self._context, setup, self._device, 0)
        model = silo.load(safetensors.torch.load_file(self._context.state_folder / START))
        stage = training.Stage(
            terms=(training.cross_entropy(),),
            optimizer=training.OptimizerSettings.of(setup.setting.local),
            epochs=epochs,
        )
        with seeded(silo.stream("torch"), self._device):
            silo.fit(model, [stage])
            counted = self._count(silo, model)
        metrics = evaluation.local_metrics(counted, setup.dataset.class_names)
        own_report.add(self._context, "local_only", {"epochs": epochs} | metrics)
        return {}


def _term(
    silo: LocalSilo, schema: Schema, tensors: Tensors, weights: Mapping[str, float]
) -> dict[Group, bytes]:
    """A silo's term; an update that is over its bound is refused with what to do about it."""
    share = weights[silo.name] / max(weights.values())
    try:
        return codec.encode(schema, tensors, share=share, parties=len(weights))
    except ContributionError as error:
        if error.code != OVER_BOUND or not (error.field or "").startswith(UPDATE):
            raise
        advice = silo.against_large_updates()
        raise ContributionError(f"{error.args[0]} {advice}", code=error.code, field=error.field) from None


def choose_device(wanted: str) -> torch.device:
    """The site's device: ``auto`` takes a GPU where there is one.

    Raises:
        TrainingError: TF-303 if the site asks for a GPU that is not there.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise TrainingError(
                f"Expected the device {wanted} of the site's configuration, but torch finds {found} GPUs: "
                'set "device" to "cpu" or "auto", or install a CUDA build of torch.',
                code="TF-303",
            )
    return device


@contextmanager
def memory_named(key: str, size: int, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into an error that names the job's value to lower.

    Raises:
        TrainingError: TF-302.
    """
    try:
        yield
    except RuntimeError as error:
        if not training.is_out_of_memory(error):
            raise
        raise TrainingError(
            f"Expected {size} records at a time to fit into the memory of {device}, but they did not: "
            f"try a `{key}` of {max(1, size // 2)}.",
            code="TF-302",
        ) from None


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with torch's global streams (dropout) seeded, and leave them as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
