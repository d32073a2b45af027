"""A silo under differential privacy: the same view for a method, but what leaves is noisy and charged.

Methods and the local loop know nothing of it: ``fit`` is DP-SGD, class counts are noisy, class sums are
clipped and noisy. Each is charged to the site's ledger before anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tightframe.config.job import Privacy
from tightframe.data.base import SiloData, own_labels
from tightframe.data.patients import record_patients
from tightframe.errors import RunError
from tightframe.learning.stages import Batch, FitReport, Stage
from tightframe.phases import Fold, Tensors
from tightframe.privacy.events import Event, Gaussian, PrivacyValueError, SubsampledGaussian
from tightframe.privacy.ledger.entries import Entry
from tightframe.privacy.releases import class_counts, class_sums
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.context import SiloContext
from tightframe.rounds.privacy_plan import CLASS_COUNTS
from tightframe.rounds.riders import epsilon
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.view import LocalSilo

PRIOR = "noisy_class_counts.safetensors"


class PrivateSilo(LocalSilo):
    """A silo whose job has differential privacy.

    Args:
        context, setup, device, round_number: as of ``LocalSilo``.
        cohort: the silos enrolled.
        honest: t - c, the least number of honest silos in a sum that can be opened.
        left_out: folds that its evaluation does not tell of.

    Raises:
        ValueError: if the job has no privacy.
    """

    def __init__(
        self,
        context: SiloContext,
        setup: JobSetup,
        device: torch.device,
        round_number: int,
        *,
        cohort: Sequence[str],
        honest: int,
        left_out: Sequence[str] = (),
    ) -> None:
        super().__init__(
            context, setup, device, round_number, cohort=cohort, honest=honest, left_out=left_out
        )
        if setup.privacy is None:
            raise ValueError("Expected a job with `privacy`, but it has none.")
        self._plan = setup.privacy
        self._budget = Budget(context, setup.privacy, cohort)

    def fit(self, model: torch.nn.Module, stages: Sequence[Stage]) -> FitReport:
        """DP-SGD over the stages; its report has no losses, which are statistics of the records.

        Raises:
            PrivacyError: TF-711 if the gradient of a record depends on other records.
            BudgetError: TF-701 if it does not fit into this site's budget; nothing is drawn then.
            DataError: TF-210 if the job hides patients and they are not known.
        """
        settings = self.training_settings()
        report, _ = private_fit(
            model,
            self._views,
            stages,
            settings=settings,
            device=self.device,
            patients=self._patients,
            charge=lambda events: self._budget.charge(f"round {self.round} training", events),
            workers=self.context.site.loader_workers,
            progress=lambda text: self.context.log.info("%s, round %d: %s", self.name, self.round, text),
        )
        return report

    def against_large_updates(self) -> str:
        """Where noise alone passes the bound: how much it is, and what makes it less.

        Each step's gradient has noise of standard deviation ``sigma * C / L`` (``dp_sgd``). SGD with
        momentum m takes that of step i into all later ones, ``(1 - m^j) / (1 - m)`` times with j steps to go.
        """
        job, settings, privacy = self.setup.job, self.training_settings(), self._plan.privacy
        local, steps = job.training, job.training.epochs * settings.epoch_steps
        taken = [(1 - local.momentum**left) / (1 - local.momentum) for left in range(1, steps + 1)]
        each = local.learning_rate * settings.noise_multiplier * settings.clip_norm / settings.expected_batch
        noise = each * math.hypot(*taken)
        if local.optimizer != "sgd" or 6 * noise <= job.update_bound:
            return super().against_large_updates()
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
        """Clipping, noise and sampling of this silo's training; the same in every round."""
        job, patients = self.setup.job, self._patients
        labels = self.context.data.labels("train")
        records = taken_as_known(len(labels) if patients is None else len(np.unique(patients)))
        settings = PrivateSettings.of(
            batch_size=job.training.batch_size,
            records=records,
            clip_norm=self._plan.privacy.clip_norm,
            noise_multiplier=1.0,
        )
        steps = self._planned_rounds * job.training.epochs * settings.epoch_steps
        noise = self._budget.remembered(
            f"training noise, {records} {self._plan.privacy.neighbours}s",
            lambda: self._plan.training_noise(settings.sampling_rate, steps),
        )
        return replace(settings, noise_multiplier=noise)

    def check_budget(self) -> None:
        """Refuse a job whose planned charges this site's budget does not hold.

        Raises:
            BudgetError: TF-701.
            PrivacyValueError: TF-700 if records are repeated.
            DataError: TF-210 if the job hides patients and they are not known.
        """
        self._budget.check(self._planned())

    def hold_budget(self, entries: Sequence[Entry]) -> bool:
        """Refuse what ``check_budget`` does, given all that this site's ledger has; it stays as it is.

        Returns:
            Whether it was held against that; not where a job goes on.

        Raises:
            BudgetError, PrivacyValueError, DataError: as ``check_budget``.
            NeighboursError: TF-706 if these records' budget is counted in the other relation.
        """
        return self._budget.hold(entries, self._planned())

    def _planned(self) -> tuple[Event, ...]:
        """All that the job may charge here, repeats included; looks at the records first."""
        data = self.context.data
        if len(own_labels(data)) != len(data.labels("train")):
            raise PrivacyValueError(
                f"Expected each training record of {data.source} once, but some are repeated: noise that "
                "hides one record does not hide its copies. Leave out what repeats them."
            )
        if (patients := self._patients) is not None:
            count = len(np.unique(patients))
            self.context.log.info("%s: the training records are those of %d patients", self.name, count)
        settings = self.training_settings()
        steps = self.setup.job.training.epochs * settings.epoch_steps
        each = SubsampledGaussian(settings.noise_multiplier, settings.sampling_rate, steps)
        return (*self._plan.release_events, *(each,) * self._planned_rounds)

    @property
    def _planned_rounds(self) -> int:
        """The job's rounds and those that may be repeated."""
        return self.setup.job.rounds + self._plan.privacy.spare_rounds

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """Of the training fold: noisy, drawn once a job, float64 (C,), 1 at least."""
        if fold != "train" or not self._plan.prior:
            return super().class_counts(fold, distinct=distinct)
        kept = self.context.state_folder / PRIOR
        if not kept.is_file():
            data, patients = self.context.data, self._patients
            labels = own_labels(data) if patients is None else data.labels("train")
            owners = None if patients is None else torch.from_numpy(patients)
            noise = self._plan.class_sums.noise_multiplier
            self._budget.charge(CLASS_COUNTS, (Gaussian(noise),))
            counts = class_counts.noisy_counts(
                torch.from_numpy(labels), self.setting.num_classes, noise, patients=owners
            )
            save_tensors(kept, {"counts": counts}, mode=0o600)
        return safetensors.torch.load_file(kept)["counts"]

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clipped sums of the training records, with this silo's share of the noise.

        A silo that keeps its prototypes at home adds that noise alone: the others count on it.

        Raises:
            BudgetError: TF-701; nothing is drawn then.
        """
        config, classes = self._plan.class_sums, self.setting.num_classes
        total = torch.zeros(classes, width + 1, dtype=torch.int64)
        if not self.offers_prototypes:
            return self._with_noise(total)
        with torch.no_grad():
            for found, labels, owners in self._portions(features):
                # What is not finite counts as zero there: to refuse it would tell of single records.
                total += class_sums.class_sums(found, labels, classes, config, patients=owners)
        alone = config.lone_event(self.honest)
        self._budget.charge(f"round {self.round} class sums", config.events(1), alone=alone)
        return self._with_noise(total)

    def told_spent(self) -> Tensors:
        """What this silo's policy lets out of what the job has cost its records, up to now; see ``shown``."""
        how = self.context.policy.epsilon_shown
        spent = self._budget.spent_by_job(prv=False).guaranteed if how != "nothing" else 0.0
        return epsilon.terms(spent, how, self.name, self.setup.job.roster)

    def _portions(
        self, features: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Features, labels and, if patients are hidden, patients of all training records.

        All records of a patient are in one portion then.
        """

        def computed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for inputs, labels in batches:
                yield features(inputs).detach().to("cpu", torch.float64), labels.cpu()

        patients = self._patients
        if patients is None:
            for found, labels in computed(self.batches("train", augment=False, shuffle=False)):
                yield found, labels, None
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
        """Whose each training record is, if the job hides patients."""
        return hidden_patients(self._plan.privacy, self.context.data)

    def _views(self, step: int) -> Dataset[Any]:
        """The training records as one step sees them."""
        if self.context.stopped():
            raise RunError("the run was aborted during local training.", code="TF-504")
        seed = self.stream("augment", step) if self.setting.local.augment else None
        records: Dataset[Any] = self.context.data.records("train", augment_seed=seed)
        return records


def taken_as_known(records: int) -> int:
    """A number of records, or patients, rounded down to its four leading binary digits.

    Sampling rate and noise of a silo follow from it, and its updates show them; so they must not follow
    from single records. Fewer records than there are make the rate larger, and are charged so.

    >>> [taken_as_known(number) for number in (1, 15, 99, 290, 9930)]
    [1, 15, 96, 288, 9216]
    """
    dropped = max(0, records.bit_length() - 4)
    return records >> dropped << dropped


Portion = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Features (B, d), labels (B,) and patients (B,) of some records."""


def hidden_patients(privacy: Privacy, data: SiloData) -> NDArray[np.int64] | None:
    """Whose each training record is, (n,), if the job hides patients; None if it hides records.

    Raises:
        DataError: TF-210 if patients are to be hidden and are not known.
    """
    return record_patients(data, "train") if privacy.neighbours == "patient" else None


def whole_patients(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], patients: torch.Tensor
) -> Iterator[Portion]:
    """The same records in the same order, cut so that all of a patient's are in one portion.

    What a patient adds to class sums is clipped as a whole, so no part of it may be released by itself. Held
    at a time are a batch and the records of one patient.

    Args:
        batches: features and labels of records in the order of ``patients``.
        patients: whose each record is, (n,), each patient's next to each other.

    Raises:
        ValueError: if a patient's records are apart, or there are not as many records as ``patients``.
    """
    if len(torch.unique_consecutive(patients)) != len(torch.unique(patients)):
        raise ValueError("Expected each patient's records next to each other, but got some that are apart.")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = end = 0
    for features, labels in batches:
        held.append((features, labels))
        end += len(labels)
        owners = patients[start:end]
        goes_on = end < len(patients) and bool(patients[end] == owners[-1])
        cut = int((owners != owners[-1]).sum()) if goes_on else len(owners)
        if cut:
            whole = torch.cat([item[0] for item in held]), torch.cat([item[1] for item in held])
            yield whole[0][:cut], whole[1][:cut], owners[:cut]
            held = [(whole[0][cut:], whole[1][cut:])]
            start += cut
    if end != len(patients) or start != end:
        raise ValueError(f"Expected {len(patients)} records, but got {end}.")
