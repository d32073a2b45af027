"""The silo as a method sees it: its records, random streams and local training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tightframe.data.base import class_counts, distinct_records, own_labels, own_patients
from tightframe.data.withdrawn import record_ids
from tightframe.errors import RunError, TrainingError
from tightframe.learning import loop, own_loop
from tightframe.learning.batches import merge_single_tail, reading_processes
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.learning.model_update import build_template
from tightframe.learning.stages import FitReport, Stage, Term
from tightframe.models.frozen import FrozenEncoder
from tightframe.phases import Fold, Setting, Tensors, stream_seed
from tightframe.results.local_report import SiloPersonal
from tightframe.results.parts.dropouts import Lost
from tightframe.rounds.context import SiloContext
from tightframe.rounds.encoded import LoadedEncoder, common_inputs, unit_sides
from tightframe.rounds.few_records.layers import behind, units_on_records
from tightframe.rounds.few_records.own_counts import OwnCounts
from tightframe.rounds.unproven import NO_NEEDS, Needs

if TYPE_CHECKING:
    from tightframe.data.table.common_values import CommonPixels, CommonValues
    from tightframe.privacy.events import Event
    from tightframe.rounds.setup import JobSetup
    from tightframe.rounds.silo.budget import Budget


class _Drawn(NamedTuple):
    """The records drawn in an epoch, or in several that train the same, for ``UnitRecords``.

    Attributes:
        often: how often each record's patient is drawn, (n,).
        number: number of records drawn.
        copies: number of copies of each record among all, (n,).
    """

    often: NDArray[np.int64]
    number: int
    copies: NDArray[np.int64]


@dataclass(frozen=True)
class RequestedSum:
    """The sum for which the server requests a term.

    Attributes:
        cohort: the enrolled silos, in order.
        honest: s - c, the least number of honest silos in a sum that can be opened.
        left_out: parts that this silo's evaluation leaves out: folds, and findings of a fold (``test/2``).
        lost: silos that dropped out, as reported by the server.
        needs: proofs that the state behind the sum requires.
        weight: this silo's public weight in the sum.
        pooled: moments of inputs in that state, see ``rounds.moments.packed``; None without any.
        withhold: folds that a withdrawal no longer evaluates, as this site's limits leave no room.
        behind: fractions of this silo's records that must be behind each layer, and behind each input of a
            class's row (``UnitRecords``).
    """

    cohort: Sequence[str]
    honest: int = 1
    left_out: Sequence[str] = ()
    lost: Mapping[str, Lost] = field(default_factory=dict)
    needs: Needs = NO_NEEDS
    weight: float = math.inf
    pooled: torch.Tensor | None = None
    withhold: Collection[Fold] = ()
    behind: tuple[float, float] = (0.0, 0.0)


class LocalSilo(OwnCounts):
    """A silo in an exchange, as methods (``phases.SiloView``) and riders (``riders.view.RiderView``) see it.

    Args:
        round_number: round that keys its random streams.
        requested: sum that its term goes into; by default a sum of no silos, for what the silo does alone.
    """

    def __init__(
        self,
        context: SiloContext,
        setup: JobSetup,
        device: torch.device,
        round_number: int,
        requested: RequestedSum = RequestedSum(()),
    ) -> None:
        self.name = context.name
        self.round = round_number
        self.setting: Setting = replace(setup.setting_at(context.name), local=context.training)
        self.device = device
        self.context = context
        self.cohort, self.honest = requested.cohort, requested.honest
        self.left_out, self.lost, self.needs = requested.left_out, requested.lost, requested.needs
        self.pooled, self.weight = requested.pooled, requested.weight
        self.withhold, self._behind = requested.withhold, requested.behind
        self.setup = setup
        self._encoder: LoadedEncoder | None = None
        self._units: UnitRecords | None = None
        self._drawn: dict[int | None, _Drawn] = {}  # by epoch; None for records in their order
        self._trains, self._evaluates, self._rounded = True, False, False
        # Convolutions and pooling are faster with channels last: EfficientNet-b0 by a third on a CPU.
        self._images = len(self.setting.input_shape) == 3

    @property
    def offers_prototypes(self) -> bool:
        """Check that neither the job's list nor the site's configuration withholds its prototypes."""
        chosen = self.setup.job.prototype_sites
        return self.context.site.offer_prototypes and (chosen is None or self.name in chosen)

    @property
    def limits_evaluations(self) -> bool:
        """Return True if this site limits exact evaluations, and the job opens some."""
        return self.context.limits_evaluations

    def may_sum(self, fold: Fold) -> bool:
        """Check that neither the site's policy nor a lack of silos with its records leaves a fold out."""
        return fold not in self.left_out

    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge a release to the site's ledger, before its noise is drawn.

        Args:
            purpose: of the release; a second charge for the same purpose counts as a retry.
            events: privacy events of the release.
            alone: event of the release if no other silo adds noise.

        Raises:
            BudgetError: TF-701; the caller must then draw no noise.
            ValueError: if the job has no privacy.
        """
        self._open_budget().charge(purpose, events, alone=alone)

    def spent(self) -> float:
        """Return the epsilon that the job has cost this silo's records so far, by the site's ledger.

        Raises:
            ValueError: if the job has no privacy.
        """
        return self._open_budget().spent_by_job(prv=False).guaranteed

    def _open_budget(self) -> Budget:
        from tightframe.rounds.silo.budget import Budget

        if self.setup.privacy is None:
            raise ValueError("Expected a job with `privacy`, but it has none.")
        return Budget(self.context, self.setup.privacy, self.cohort)

    def keep_model(self, final: Tensors, counted: Tensors) -> None:
        """Store the last model at this silo, and begin the silo's own report."""
        from tightframe.rounds.silo import own_report

        own_report.close(self, final, counted)

    def add_to_report(self, *, personal: SiloPersonal) -> None:
        """Add the personal model to this silo's own report, unless it missed the closing and has none."""
        from tightframe.rounds.silo import own_report

        if own_report.begun(self.context):
            own_report.add(self.context, personal=personal)

    def inputs(
        self, *, staying: bool = False, evaluated: bool = False, rounded: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of the training records' inputs, not features of a loaded model, and labels.

        Args:
            staying, evaluated: see ``record_values``.
            rounded: see ``SiloContext.common``.
        """
        before = self.context.job.withdraw is not None and not staying
        context = self.context.before_withdrawal if before else self.context
        view = LocalSilo(context, self.setup, self.device, self.round)  # without a loaded encoder
        view._evaluates, view._rounded = evaluated, rounded
        return view.batches("train", augment=False, shuffle=False)

    def memory_named(self, key: str, size: int) -> AbstractContextManager[None]:
        """Turn running out of memory into TF-302, naming the job's value ``key`` to lower from ``size``."""
        return memory_named(key, size, self.device)

    def large_update_advice(self) -> str:
        """Return advice on how to keep an update within its bound."""
        return (
            "Lower `training.learning_rate`, raise `update_bound`, or set `update_norm`, to which updates "
            "are rescaled."
        )

    def load(self, tensors: Tensors) -> torch.nn.Module:
        """Build a model with these parameters and buffers on this silo's device.

        If its encoder is frozen and records are not augmented, features are computed once in the run: from
        now on ``batches`` yields features in place of inputs, and the model takes these.

        Raises:
            RunError: TF-505 if another frozen encoder was loaded in this exchange.
        """
        model = build_template(self.setting)
        model.load_state_dict(dict(tensors))
        if self._images:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = model.to(self.device)
        if isinstance(model, FrozenEncoder):
            self._take_features(model)
        return model

    def _take_features(self, model: FrozenEncoder) -> None:
        """Let a model take cached features, unless records are augmented."""
        if self.setting.local.augment:
            if self.setup.method.one_sum is not None or not self.setup.dataset.augments:
                return  # features do not change from epoch to epoch, or only a personal model computes them
            self.context.features.tell_once(
                lambda: self.context.log.info(
                    "%s: the encoder is frozen, but its features are computed in every epoch, because "
                    "`training.augment` changes records from epoch to epoch; set it to false to compute them "
                    "once",
                    self.name,
                )
            )
            return
        model.takes_features = True
        loaded = LoadedEncoder.of(model)
        if self._encoder is None:
            self._encoder = loaded
        elif self._encoder.sha256 != loaded.sha256:
            raise RunError(
                "Expected one frozen encoder in an exchange, but the method loaded two with other weights.",
                code="TF-505",
            )

    def encoded(
        self, model: torch.nn.Module, fold: Fold, *, exact: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield features (B, d) and labels (B,) of a fold, in order, without augmentation and gradients.

        Features of a frozen encoder come from the cache, with ``training.augment``, too. Few of a table's
        training records are never alone on one side of a unit (``UnitSides``).

        Args:
            model: of this silo, in evaluation mode.
            exact: compute in float64, so that a record's features do not show which others were in its batch.
        """
        if isinstance(model, FrozenEncoder):
            loaded = LoadedEncoder.of(model)
            cached = self.context.features.fold(self.context, loaded, fold, self.device, exact=exact)
            size = self.setup.job.evaluation.batch_size
            yield from cached.batches(list(range(len(cached))), size, self.device)
            return
        used: Any = copy.deepcopy(model).double() if exact else model
        pixels = None if self.context.has_rows else common_inputs(self.context, used, fold)

        def run(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = batch[0] if pixels is None else pixels.apply(batch[0], ())
            with torch.no_grad():
                return used.features(inputs.double() if exact else inputs), batch[1]

        with unit_sides(self.context, used, fold) as sides:
            yield from sides.passes(lambda: self.batches(fold, augment=False, shuffle=False), run)

    def encoded_before(
        self, model: torch.nn.Module
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield features (B, d), labels (B,) and a mask of those that stay (B,), before a withdrawal.

        Args:
            model: of this silo, in evaluation mode.
        """
        before = LocalSilo(self.context.before_withdrawal, self.setup, self.device, self.round)
        names = record_ids(before.context.data, "train")
        stays = torch.tensor([name not in self.context.withdrawn.names for name in names], device=self.device)
        place = 0
        for features, labels in before.encoded(model, "train", exact=True):
            yield features, labels, stays[place : place + len(labels)]
            place += len(labels)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a random generator on the CPU, keyed by (seed, silo, round, purpose)."""
        return torch.Generator().manual_seed(self.stream(purpose))

    def batches(
        self, fold: Fold, *, augment: bool, shuffle: bool, epoch: int = 0, share: float = 1.0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield mini-batches (inputs, labels) on the silo's device, fixed by (seed, silo, round, epoch).

        Inputs are features (B, d) once a model was loaded whose features are computed once, see ``load``.

        Args:
            augment: augment records as the data set does.
            shuffle: for training: take a random order, or draw each batch from all records if the site's
                policy asks for it. False keeps the records in order.
            share: fraction of the fold to take, in that order, one record at least.
        """
        count = len(self.context.data.labels(fold))
        indices = self._order(count, epoch) if shuffle else list(range(count))
        if share < 1:
            indices = indices[: max(1, round(share * len(indices)))]
        activity = f"epoch {epoch + 1}" if shuffle else f"{fold} records"
        seed = self.stream("augment", epoch) if augment else None
        drawn = self._drawn.get(epoch if shuffle else None) if fold == "train" else None
        yield from self._batches_in(indices, fold, seed, activity, drawn)

    def _order(self, count: int, epoch: int) -> list[int]:
        """Return the indices of an epoch's records: each once, or each batch drawn from all."""
        stream = torch.Generator().manual_seed(self.stream("order", epoch))
        if not self.context.draws_batches:
            return torch.randperm(count, generator=stream).tolist()
        sizes = [len(batch) for batch in self._steps()]
        return torch.cat([torch.randperm(count, generator=stream)[:size] for size in sizes]).tolist()

    def _steps(self) -> Sequence[Sequence[int]]:
        """Return an epoch's batches, of no records in particular."""
        return merge_single_tail(range(self.drawn_records), self.setting.local.batch_size)

    def _batches_in(
        self,
        indices: list[int],
        fold: Fold,
        augment_seed: int | None,
        activity: str = "training",
        drawn: _Drawn | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield mini-batches of these records in this order.

        Args:
            augment_seed: seed of their augmentation; None for none.
            activity: shown with the progress, for monitoring.
            drawn: for ``UnitRecords``; None if it does not need it.
        """
        job = self.setup.job
        size = self.setting.local.batch_size if fold == "train" else job.evaluation.batch_size
        chosen = merge_single_tail(indices, size)
        if self._encoder is not None:
            cached = self.context.features.fold(self.context, self._encoder, fold, self.device)
            total = math.ceil(len(indices) / size)
            batches = guarded(cached.batches(indices, size, self.device), self.context.stopped)
            for done, batch in enumerate(batches):
                self.context.at_work(f"round {self.round}, {activity}", done, total)
                self._tell_units(chosen[done], drawn)
                yield batch
            return
        records = self.context.data.records(fold, augment_seed=augment_seed)
        common = self._common() if fold == "train" else None
        loader: DataLoader[Any] = DataLoader(
            records,
            batch_sampler=chosen,
            **reading_processes(self.context.site.loader_workers),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # keeps the loader off the global stream
        )
        for done, (inputs, labels) in enumerate(guarded(iter(loader), self.context.stopped)):
            self.context.at_work(f"round {self.round}, {activity}", done, len(loader))
            self._tell_units(chosen[done], drawn)
            if common is not None:
                inputs = common.apply(inputs, chosen[done])
            inputs = inputs.to(self.device, non_blocking=True)
            if self._images:  # after the copy, as a GPU changes the layout faster
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, labels.to(self.device, non_blocking=True)

    def _tell_units(self, chosen: list[int], drawn: _Drawn | None) -> None:
        if self._units is not None and drawn is not None:
            self._units.next_batch(drawn.often[chosen], drawn.number, drawn.copies[chosen])

    def _common(self) -> CommonPixels | CommonValues | None:
        units = 0 if self._evaluates else self.records_per_feature / 2 * units_on_records(self.setup)
        few = units / behind(self.setup).share if units else 0
        return self.context.common(few, rounded=self._rounded)

    def fit(self, model: torch.nn.Module, stages: Sequence[Stage]) -> FitReport:
        """Run the stages of local training on the training fold."""
        local = self.setting.local
        batches = len(self._steps())
        if not self._trains:
            return FitReport(sum((stage.epochs or 0) * batches + (stage.steps or 0) for stage in stages))
        with self.unit_records(model, passes=loop.passes(stages, batches)) as units:
            report = loop.fit(
                model,
                lambda epoch: self.batches("train", augment=local.augment, shuffle=True, epoch=epoch),
                stages,
                device=self.device,
                amp=local.amp,
                progress=lambda text: self.context.log.info("%s, round %d: %s", self.name, self.round, text),
            )
        self._put_back(units)
        return report

    def _put_back(self, units: UnitRecords) -> None:
        units.put_back()
        if layers := units.unbacked():
            self.context.log.warning(
                "%s, round %d: of %s all stays as received, or classes' rows do: too few of this silo's "
                "records have more than a 64th of the largest losses there (records_per_feature)",
                self.name,
                self.round,
                ", ".join(layers),
            )

    def unit_records(
        self, model: torch.nn.Module, *, passes: Sequence[range] = (), squared: bool = False
    ) -> UnitRecords:
        """Return a counter of the training records that move each unit of a model's layers.

        Args:
            passes: epochs of shuffled batches that train the same; empty for records in their order.
            squared: for sums of squared gradients.
        """
        labels, distinct = self.context.data.labels("train"), own_labels(self.context.data)
        counts = [class_counts(item, self.setting.num_classes) for item in (labels, distinct)]
        repeats = math.ceil(max(counts[0] / np.maximum(counts[1], 1))) if len(labels) > len(distinct) else 1
        least = self.min_class_count if self.records_per_feature and self.setup.privacy is None else 0
        self._drawn = self._draws(passes) if least > 1 else {}
        part, each = self._behind
        self._units = UnitRecords(
            model, len(labels), repeats=repeats, least=least, part=part, each=each, squared=squared
        )
        return self._units

    def _draws(self, passes: Sequence[range]) -> dict[int | None, _Drawn]:
        """Return the records drawn in each epoch; under None those of a pass in their order."""
        owners, records = own_patients(self.context.data), distinct_records(self.context.data)
        copies, count = np.bincount(records)[records], len(records)
        several, draws = count > owners.max(initial=-1) + 1, dict[int | None, _Drawn]()
        for epochs in passes if several or self.context.draws_batches else ():
            often = np.zeros(count, dtype=np.int64)
            for epoch in epochs:
                often += np.bincount(self._order(count, epoch), minlength=count)
            of_patients = np.bincount(owners, often)[owners].astype(np.int64)
            draws |= dict.fromkeys(epochs, _Drawn(of_patients, int(often.sum()), copies))
        if several:
            draws[None] = _Drawn(np.bincount(owners)[owners], count, copies)
        return draws

    def fit_by_own_loop(self, model: torch.nn.Module) -> FitReport:
        """Let the training loop that the job names train on the training fold.

        Raises:
            TrainingError: TF-304; see ``learning.own_loop.run``.
        """
        if not self._trains:
            return FitReport()
        local = self.setting.local
        training = own_loop.LocalTraining(
            model=model,
            batches=lambda epoch: self.batches("train", augment=local.augment, shuffle=True, epoch=epoch),
            settings=local,
            num_classes=self.setting.num_classes,
            round=self.round,
            seed=self.stream("own loop"),
            device=self.device,
            log=self.context.log,
        )
        with self.unit_records(model, passes=[range(local.epochs)]) as units:
            report = own_loop.run(own_loop.get(local.loop), training, self.context.stopped)
        self._put_back(units)
        return report

    @contextmanager
    def without_training(self) -> Iterator[None]:
        """Train nothing in a ``with`` block: ``fit`` returns the number of steps and takes none."""
        self._trains = False
        try:
            yield
        finally:
            self._trains = True

    def stream(self, *purpose: str | int) -> int:
        """Return the seed of a random stream: of (seed, silo, round, purpose) and, in production, a salt.

        Without the salt a second job with the same seed would repeat this silo's updates bit for bit, and
        two totals, over different silos or with other weights, would reveal them.
        """
        return stream_seed(self.setup.job.seed, *self.context.salt(), self.name, self.round, *purpose)

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: only ``private_view.PrivateSilo`` releases noisy class sums."""
        raise _without_privacy("noisy class sums were")

    def private_gradient_sum(
        self, model: torch.nn.Module, terms: Sequence[Term]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: only ``private_view.PrivateSilo`` releases noisy sums of gradients."""
        raise _without_privacy("a noisy sum of gradients was")

    def private_frozen_sums(
        self, model: torch.nn.Module, width: int, *, products: bool, radius: float
    ) -> dict[str, torch.Tensor]:
        """Refuse: only ``private_view.PrivateSilo`` releases noisy sums of frozen features."""
        raise _without_privacy("noisy sums of features were")


def _without_privacy(requested: str) -> RunError:
    return RunError(f"Expected a job with `privacy`, but {requested} requested without it.", code="TF-505")


def guarded(batches: Iterator[Any], stopped: Callable[[], bool]) -> Iterator[Any]:
    """Yield the same batches, and stop as soon as the run is aborted.

    Raises:
        RunError: TF-504 if it is aborted.
    """
    for batch in batches:
        if stopped():
            raise RunError("the run was aborted during local training.", code="TF-504")
        yield batch


@contextmanager
def memory_named(key: str, size: int, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into an error that names the job's value to lower.

    Args:
        key: of the job's value.
        device: on which the memory ran out.

    Raises:
        TrainingError: TF-302.
    """
    try:
        yield
    except RuntimeError as error:
        if not loop.is_out_of_memory(error):
            raise
        raise TrainingError(
            f"Expected {size} records at a time to fit into the memory of {device}, but they did not: "
            f"try a `{key}` of {max(1, size // 2)}.",
            code="TF-302",
        ) from None
