"""A silo as a method sees it under differential privacy: the same interface, with charged, noisy releases.

Methods and the local training loop need no change: ``fit`` is DP-SGD, class counts are noisy, class sums are
clipped and noisy. Each is charged to the site's ledger before its noise is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tightframe.data.base import own_labels, record_patients
from tightframe.errors import RunError
from tightframe.learning.stages import Batch, FitReport, Stage, Term
from tightframe.phases import Fold
from tightframe.privacy.events import Event, Gaussian, PrivacyValueError, SubsampledGaussian
from tightframe.privacy.ledger.entries import Entry
from tightframe.privacy.releases import class_sums, frozen_sums
from tightframe.privacy.releases.frozen_sums_plan import checked_records
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.gradient_sum import clipped_gradient_sum
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.context import SiloContext
from tightframe.rounds.privacy_plan import CLASS_COUNTS
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.budget import Budget, Costs, Planned
from tightframe.rounds.silo.view import LocalSilo, RequestedSum

PRIOR = "noisy_class_counts.safetensors"


class PrivateSilo(LocalSilo):
    """A silo whose job has differential privacy.

    Args:
        context, setup, device, round_number, requested: as of ``LocalSilo``.

    Raises:
        ValueError: if the job has no privacy.
    """

    _budget_of: ClassVar[type[Budget]] = Budget
    """Budget that its releases are charged to."""

    def __init__(
        self,
        context: SiloContext,
        setup: JobSetup,
        device: torch.device,
        round_number: int,
        requested: RequestedSum,
    ) -> None:
        super().__init__(context, setup, device, round_number, requested)
        if setup.privacy is None:
            raise ValueError("Expected a job with `privacy`, but it has none.")
        self._plan = setup.privacy
        self._budget = self._budget_of(context, setup.privacy, self.cohort)

    def fit(self, model: torch.nn.Module, stages: Sequence[Stage]) -> FitReport:
        """Train by DP-SGD; the report has no losses, which are exact statistics of the records.

        Raises:
            PrivacyError: TF-711 if the gradient of a record depends on other records.
            BudgetError: TF-701 if it does not fit into this site's budget; nothing is drawn then.
            DataError: TF-210 if the job protects patients and the data set has no patient ids.
        """
        settings = self.training_settings()
        report, _ = private_fit(
            model,
            self._views,
            stages,
            settings=settings,
            device=self.device,
            patients=self._patients,
            views=self._plan.privacy.views,
            charge=lambda events: self._budget.charge(f"round {self.round} training", events),
            workers=self.context.site.loader_workers,
            progress=lambda text: self.context.log.info("%s, round %d: %s", self.name, self.round, text),
        )
        return report

    def large_update_advice(self) -> str:
        """Return advice where noise alone exceeds the bound, with the size of that noise.

        Each step's gradient has noise of standard deviation ``sigma * C / L`` (``dp_sgd``). SGD with
        momentum m carries the noise of a step with j steps to go into the update with the factor
        ``(1 - m^j) / (1 - m)``.
        """
        job, settings, privacy = self.setup.job, self.training_settings(), self._plan.privacy
        local, steps = job.training, job.training.epochs * settings.epoch_steps
        factors = [(1 - local.momentum**left) / (1 - local.momentum) for left in range(1, steps + 1)]
        each = local.learning_rate * settings.noise_multiplier * settings.clip_norm / settings.expected_batch
        noise = each * math.hypot(*factors)
        if local.optimizer != "sgd" or 6 * noise <= job.update_bound:
            return super().large_update_advice()
        lever = (
            "a larger `privacy.epsilon`, fewer rounds or epochs"
            if privacy.noise_multiplier is None
            else "a smaller `privacy.noise_multiplier`, fewer epochs"
        )
        return (
            f"With `privacy` an update has noise, here of standard deviation {noise:.2g} in every "
            f"coordinate: noise multiplier {settings.noise_multiplier:.2f}, `privacy.clip_norm` "
            f"{settings.clip_norm:g}, a batch of {settings.expected_batch:g} in {steps} steps. It falls with "
            f"a larger `training.batch_size`, {lever}, a smaller `privacy.clip_norm`, and a lower "
            f"`training.learning_rate`. An `update_bound` of {math.ceil(6 * noise)} would let it pass, but a "
            "model learns little under noise of that size."
        )

    def training_settings(self) -> PrivateSettings:
        """Return clipping, noise and sampling of this silo's training; the same in every round."""
        job, patients = self.setup.job, self._patients
        labels = self.context.data.labels("train")
        records = coarse_count(len(labels) if patients is None else len(np.unique(patients)))
        settings = PrivateSettings.of(
            batch_size=job.training.batch_size,
            records=records,
            clip_norm=self._plan.privacy.clip_norm,
            noise_multiplier=1.0,
        )
        steps = self._planned_rounds * job.training.epochs * settings.epoch_steps
        noise = self._budget.solve_once(
            f"training noise, {records} {self._plan.privacy.neighbours}s",
            lambda: self._plan.training_noise(settings.sampling_rate, steps),
        )
        return replace(settings, noise_multiplier=noise)

    def check_budget(self) -> None:
        """Refuse a job whose planned charges exceed this site's budget.

        Raises:
            BudgetError: TF-701.
            PrivacyValueError: TF-700 if records are repeated.
            DataError: TF-210 if the job protects patients and the data set has no patient ids.
        """
        self._budget.check(self._planned(), self._planned_at)
        if (patients := self._patients) is not None:
            count = len(np.unique(patients))
            self.context.log.info("%s: the training records belong to %d patients", self.name, count)

    def check_budget_against(self, entries: Sequence[Entry]) -> Costs | None:
        """Refuse what ``check_budget`` refuses, given the entries of this site's ledger; write nothing.

        Returns:
            What the job costs; None for a job that has charges already.

        Raises:
            BudgetError, PrivacyValueError, DataError: as ``check_budget``.
            NeighboursError: TF-706 if these records' budget is counted in the other relation.
        """
        return self._budget.check_against(entries, self._planned(), self._planned_at)

    @property
    def _planned_at(self) -> Planned | None:
        """Function of the job's charges here at another epsilon; None where its noise is given."""
        setup, privacy = self.setup, self._plan.privacy

        def planned(epsilon: float) -> tuple[Event, ...]:
            job = setup.job.model_copy(update={"privacy": privacy.model_copy(update={"epsilon": epsilon})})
            other = prepare(job, self.context.policy.ceilings)
            requested = RequestedSum(self.cohort, self.honest)
            return _TriedSilo(self.context, other, self.device, self.round, requested)._planned()

        return planned if privacy.noise_multiplier is None else None

    def _planned(self) -> tuple[Event, ...]:
        """Check the records, and return all events that the job may charge here, repeats included."""
        data = self.context.data
        if len(own_labels(data)) != len(data.labels("train")):
            raise PrivacyValueError(
                f"Expected each training record of {data.source} once, but some are repeated: noise that "
                "hides one record does not hide its copies. Remove the copies, or the option that repeats "
                "records."
            )
        count = len(data.labels("train"))
        if (patients := self._patients) is not None:
            count = len(np.unique(patients))
        if self._plan.frozen is not None:
            checked_records(count, self._plan.privacy.neighbours)
        if not self._plan.trains:
            return self._plan.release_events
        return (*self._plan.release_events, *(self._planned_round(),) * self._planned_rounds)

    def _planned_round(self) -> Event:
        """Return the privacy event of one round's training."""
        if self._plan.gradients is not None:
            return self._plan.gradients.event()
        settings = self.training_settings()
        steps = self.setup.job.training.epochs * settings.epoch_steps
        return SubsampledGaussian(settings.noise_multiplier, settings.sampling_rate, steps)

    @property
    def _planned_rounds(self) -> int:
        """Number of the job's rounds, spare rounds included."""
        return self.setup.job.rounds + self._plan.privacy.spare_rounds

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """Return class counts (C,); of the training fold noisy, drawn once per job, float64, at least 1."""
        if fold != "train" or not self._plan.prior:
            return super().class_counts(fold, distinct=distinct)
        path = self.context.state_folder / PRIOR
        if not path.is_file():
            data, patients = self.context.data, self._patients
            labels = own_labels(data) if patients is None else data.labels("train")
            owners = None if patients is None else torch.from_numpy(patients)
            noise = self._plan.class_sums.noise_multiplier
            self._budget.charge(CLASS_COUNTS, (Gaussian(noise),))
            counts = class_sums.noisy_counts(
                torch.from_numpy(labels), self.setting.num_classes, noise, patients=owners
            )
            save_tensors(path, {"counts": counts}, mode=0o600)
        return safetensors.torch.load_file(path)["counts"]

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return clipped class sums (C, w) and counts (C,) of the training records, with this silo's noise.

        A silo that does not offer its prototypes still adds its share of the noise, which the others need.

        Args:
            features: maps a batch of inputs to features (B, w).
            width: w.

        Raises:
            BudgetError: TF-701; nothing is drawn then.
        """
        config, classes = self._plan.class_sums, self.setting.num_classes
        total = torch.zeros(classes, width + 1, dtype=torch.int64)
        if not self.offers_prototypes:
            return self._with_noise(total)
        with torch.no_grad():
            for portion, labels, owners in self._portions(features):
                # `class_sums` counts values that are not finite as zero: an error would reveal single
                # records.
                total += class_sums.class_sums(portion, labels, classes, config, patients=owners)
        alone = config.lone_event(self.honest)
        self._budget.charge(f"round {self.round} class sums", config.events(1), alone=alone)
        return self._with_noise(total)

    def private_gradient_sum(
        self, model: torch.nn.Module, terms: Sequence[Term]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the training records' clipped gradients and their number, with this silo's noise.

        Args:
            model: as it was broadcast.

        Returns:
            (P,) and (), float64, in units of the clipping norm.

        Raises:
            ValueError: if the job's plan has no such sum.
            PrivacyError: TF-711 if the gradient of a record depends on other records.
            BudgetError: TF-701; nothing is drawn then.
            DataError: TF-210 if the job protects patients and the data set has no patient ids.
        """
        config = self._plan.gradients
        if config is None:
            raise ValueError("Expected a method whose round is one sum of gradients, but the plan has none.")
        shares = self._plan.training_shares(self.honest)
        alone = None if shares == 1 else config.event(shares)
        units = clipped_gradient_sum(
            model,
            self._views,
            terms,
            config=config,
            clip_norm=self._plan.privacy.clip_norm,
            device=self.device,
            batch_size=self.setup.job.training.batch_size,
            charge=lambda: self._budget.charge(
                f"round {self.round} training", (config.event(),), alone=alone
            ),
            patients=self._patients,
            views=self._plan.privacy.views,
            workers=self.context.site.loader_workers,
            progress=lambda text: self.context.log.info("%s, round %d: %s", self.name, self.round, text),
        )
        numbers = torch.from_numpy(
            config.as_numbers(units.numpy() + config.share(tuple(units.shape), shares))
        )
        return numbers[:-1], numbers[-1]

    def private_frozen_sums(
        self, model: torch.nn.Module, width: int, *, products: bool, radius: float
    ) -> dict[str, torch.Tensor]:
        """Return sums of frozen features of the training records with this silo's noise, by part.

        A silo that does not offer its prototypes adds only its share of the noise, which the others need.

        Raises:
            BudgetError: TF-701; nothing is drawn then.
            RunError: TF-505 if the job plans no such release.
        """
        release = self._plan.frozen
        if release is None or release.config.products != products:
            raise RunError("Expected a release that this job plans, but got another one.", code="TF-505")
        totals = frozen_sums.FrozenTotals(self.setting.num_classes, width, products=products)
        if self.offers_prototypes:
            self._add_features(totals, model, radius)
            place = f"round {self.round}" if self.round else "start"
            alone = release.config.lone_event(self.honest)
            self._budget.charge(f"{place} feature sums", release.config.events(1), alone=alone)
        numbers = {}
        for name, units in totals.parts().items():
            part = release.config.part(name)
            noisy = units.numpy() + part.share(tuple(units.shape), self.honest)
            numbers[name] = torch.from_numpy(part.as_numbers(noisy))
        return numbers

    def _add_features(self, totals: frozen_sums.FrozenTotals, model: torch.nn.Module, radius: float) -> None:
        """Add all training records; where the job protects patients, in one portion, as integers."""
        patients, kept = self._patients, []
        for features, labels in self.encoded(model, "train", exact=True):
            rows = frozen_sums.whole_features(features, radius)
            if patients is None:
                totals.add(rows, labels)
            else:  # at most 2**12 each
                kept.append((rows.to("cpu", torch.int16), labels.cpu()))
        if patients is not None:
            rows, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
            totals.add(rows, labels, torch.from_numpy(patients))

    def _portions(
        self, features: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield features (B, w), labels (B,) and patients (B,) of all training records.

        If the job protects records, the patients are None; if it protects patients, all records of a
        patient are in one portion.
        """

        def computed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for inputs, labels in batches:
                yield features(inputs).detach().to("cpu", torch.float64), labels.cpu()

        patients = self._patients
        if patients is None:
            for portion, labels in computed(self.batches("train", augment=False, shuffle=False)):
                yield portion, labels, None
            return
        order = np.argsort(patients, kind="stable")
        batches = computed(self._batches_in(order.tolist(), "train", None))
        yield from whole_patients(batches, torch.from_numpy(patients[order]))

    def _with_noise(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._plan.class_sums
        noisy = total + class_sums.noise_for(tuple(total.shape), config, self.honest)
        numbers = torch.from_numpy(config.as_numbers(noisy.numpy()))
        return numbers[:, :-1], numbers[:, -1]

    @property
    def _patients(self) -> NDArray[np.int64] | None:
        """Patient of each training record, (n,), if the job protects patients; else None.

        Raises:
            DataError: TF-210 if the job protects patients and the data set has no patient ids.
        """
        protected = self._plan.privacy.neighbours == "patient"
        return record_patients(self.context.data, "train") if protected else None

    def _views(self, step: int) -> Dataset[Any]:
        """Return the training records in the form in which one step sees them."""
        if self.context.stopped():
            raise RunError("the run was aborted during local training.", code="TF-504")
        if self._encoder is not None:
            return self.context.features.fold(self.context, self._encoder, "train", self.device)
        seed = self.stream("augment", step) if self.setting.local.augment else None
        records: Dataset[Any] = self.context.data.records("train", augment_seed=seed)
        return records


class _UnkeptBudget(Budget):
    def solve_once(self, key: str, solve: Callable[[], float]) -> float:
        """Solve without the cache, for a trial epsilon."""
        return solve()


class _TriedSilo(PrivateSilo):
    _budget_of = _UnkeptBudget


def coarse_count(records: int) -> int:
    """Round a number of records, or patients, down to its four leading binary digits.

    A silo's sampling rate and noise are computed from it and show in its updates, so they must not depend
    on a single record. Rounding down makes the sampling rate larger, and the larger rate is charged.

    >>> [coarse_count(number) for number in (1, 15, 99, 290, 9930)]
    [1, 15, 96, 288, 9216]
    """
    dropped = max(0, records.bit_length() - 4)
    return records >> dropped << dropped


Portion = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Features (B, d), labels (B,) and patients (B,) of some records."""


def whole_patients(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], patients: torch.Tensor
) -> Iterator[Portion]:
    """Regroup batches, in the same order, so that each patient's records are in one portion.

    A patient's part of the class sums is clipped as a whole, so no portion may end within a patient. Only a
    batch and the records of one patient are in memory at a time.

    Args:
        batches: features and labels of records in the order of ``patients``.
        patients: of each record, (n,), sorted so that each patient's records are consecutive.

    Raises:
        ValueError: if a patient's records are not consecutive, or their number is not that of ``patients``.
    """
    if len(torch.unique_consecutive(patients)) != len(torch.unique(patients)):
        raise ValueError("Expected each patient's records to be consecutive, but got some that are apart.")
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = end = 0
    for features, labels in batches:
        pending.append((features, labels))
        end += len(labels)
        owners = patients[start:end]
        incomplete = end < len(patients) and bool(patients[end] == owners[-1])
        cut = int((owners != owners[-1]).sum()) if incomplete else len(owners)
        if cut:
            batch = torch.cat([item[0] for item in pending]), torch.cat([item[1] for item in pending])
            yield batch[0][:cut], batch[1][:cut], owners[:cut]
            pending = [(batch[0][cut:], batch[1][cut:])]
            start += cut
    if end != len(patients):
        raise ValueError(f"Expected {len(patients)} records, but got {end}.")
