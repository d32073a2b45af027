"""DP-SGD: ``private_fit``, the local loop with clipped records, Poisson batches and noise.

Source: Abadi et al., Deep Learning with Differential Privacy, CCS 2016. In each step every record takes
part with probability q, independently; its gradient g_i over all trained parameters together is scaled
down to length C if it is longer; with L = q n the expected number of records of a batch::

    g = (sum_i g_i min(1, C / |g_i|) + N(0, (sigma C)^2)) / L

An empty batch gives a step of noise alone. To hide patients, *patients* take part with probability q, each
with all their records; n is the number of patients, and g_i the mean gradient of one patient's records:
``clipping``.

With K views of each record (``views``), g_i is the mean of the gradients of K of its augmentations, taken
*before* clipping: one record still moves the sum by C at most, and the same noise hides it. Source: De et
al., Unlocking High-Accuracy Differentially Private Image Classification through Scale, 2022, section 3.

Terms that depend on parameters only (FedProx's term, SCAFFOLD's correction, weight decay, momentum) are added
after the noise: parameters are protected by earlier noise, or sent by the server, so this is post-processing
and costs nothing. They must not be clipped with the records, which would make the clipping depend on them;
and nothing that reads records may be added there, which ``probe`` tests.

Batches and noise come from the operating system's generator, see ``os_randomness``; norms, clipping, sums and
noise are float64 on every device. Gradients are float32: where a GPU computes several records' together,
other records change a gradient's last bits, see ``per_sample``. Reduced precision (AMP, TF32) is not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tightframe.errors import TrainingError
from tightframe.learning.loop import PROGRESS_SECONDS
from tightframe.learning.stages import FitReport, Stage
from tightframe.privacy.discrete_gaussian import system_bytes
from tightframe.privacy.events import SubsampledGaussian
from tightframe.privacy.os_randomness import MaskSeeds, RandomBytes, poisson_batch, standard_normal
from tightframe.privacy.training.clipping import Members, PatientSum, clipped_sum, rows
from tightframe.privacy.training.per_sample import Engine, EngineName, RecordLoss, gradients
from tightframe.privacy.training.portions import Portions, Records, loaded, probe_with_made_up


@dataclass(frozen=True)
class PrivateSettings:
    """Public settings on which the guarantee of one ``private_fit`` rests.

    Attributes:
        clip_norm: C, the longest gradient of one record, or of one patient.
        noise_multiplier: sigma, the noise's standard deviation over C.
        sampling_rate: q, the probability with which a record (or patient) is in a step's batch.
        expected_batch: L, the divisor of the noisy sum. A constant: the real number of records in a batch
            depends on the records.

    Raises:
        ValueError: if one is not positive and finite, or q is above 1.
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    expected_batch: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Expected `{name}` to be positive and finite, but got {value}.")
        if self.sampling_rate > 1:
            raise ValueError(f"Expected `sampling_rate` to be at most 1, but got {self.sampling_rate}.")

    @classmethod
    def of(
        cls, *, batch_size: int, records: int, clip_norm: float, noise_multiplier: float
    ) -> PrivateSettings:
        """Make settings for batches of ``batch_size`` in expectation out of ``records``, or out of patients.

        ``records`` sets q and L, so it must not depend on a single record: a site uses its declared number,
        the same for the ledger, for planning and here.
        """
        if batch_size < 1 or records < 1:
            raise ValueError(
                f"Expected `batch_size` and `records` to be positive, but got {batch_size} and {records}."
            )
        rate = min(1.0, batch_size / records)
        return cls(clip_norm, noise_multiplier, rate, rate * records)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch: 1 / q, rounded up."""
        return math.ceil(1 / self.sampling_rate - 1e-9)

    def steps(self, stage: Stage) -> int:
        """Return the number of steps of a stage."""
        if stage.steps is not None:
            return stage.steps
        return int(stage.epochs or 0) * self.epoch_steps

    def events(self, stages: Sequence[Stage]) -> tuple[SubsampledGaussian, ...]:
        """Return the privacy events of a ``private_fit``: all steps have the same noise and rate."""
        steps = sum(self.steps(stage) for stage in stages)
        return (SubsampledGaussian(self.noise_multiplier, self.sampling_rate, steps),) if steps else ()


def private_fit(
    model: nn.Module,
    records: Records,
    stages: Sequence[Stage],
    *,
    settings: PrivateSettings,
    device: torch.device | str,
    patients: NDArray[np.int64] | None = None,
    views: int = 1,
    charge: Callable[[tuple[SubsampledGaussian, ...]], None] | None = None,
    engine: EngineName | None = None,
    workers: int = 0,
    probe: bool = True,
    progress: Callable[[str], None] | None = None,
    random_bytes: RandomBytes = system_bytes,
) -> tuple[FitReport, tuple[SubsampledGaussian, ...]]:
    """Train ``model`` in place by the stages, as ``learning.loop.fit`` does, but by DP-SGD.

    Args:
        model: made private by ``normalisation.make_private``; afterwards in evaluation mode, without
            gradients.
        records: the data set as step s sees it, so that a record's one view of a step may be augmented by
            (s, record). Steps count on over stages. Each must hold every record once. With K ``views`` step s
            takes each of its records as K s, K s + 1, ... K s + K - 1 see it.
        stages: what to train; all weighted terms per-record, see ``probe``.
        patients: of each record, (n,), to hide patients; None hides records.
        views: K, of each record in a step.
        charge: called with the events before anything is drawn; its exceptions stop the training.
        engine: of per-sample gradients; by default the loop on a CPU, the fastest on a GPU.
        workers: processes that load records.
        probe: whether to test first that records are not coupled.
        progress: called with the steps done, at most every 20 seconds. Losses are statistics of the records
            without noise, so they are not reported.
        random_bytes: the generator of sampling, noise and dropout; any but the operating system's is for
            tests.

    Returns:
        The report and the events that ran, which are those that were charged. In the report, ``steps`` is
        real and ``records`` the expected number (of patients where these are hidden); ``terms`` is empty, see
        ``progress``.

    Raises:
        ValueError: if there are no records, not one patient for each, no view, or a stage trains nothing.
        PrivacyError: TF-711 if a term or the model couples records.
        TrainingError: TF-301 if parameters are not finite afterwards; TF-302 if not even one record's
            gradient fits into memory.
        RandomnessError: TF-720 if the operating system gives no random numbers.
    """
    device = torch.device(device)
    count = len(records(0))  # type: ignore[arg-type]
    if count < 1:
        raise ValueError("Expected at least one record to train on, but got none.")
    if views < 1:
        raise ValueError(f"Expected at least one view of each record, but got {views}.")
    members = None if patients is None else Members.of(patients, count)
    if probe:
        probe_with_made_up(model, records(0), stages, device)
    events = settings.events(stages)
    if charge is not None:
        charge(events)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        helper = stack.enter_context(ThreadPoolExecutor(1, "noise"))
        loop = _Loop(model, device, settings, engine, random_bytes, helper, progress, members, views)
        loop.run_all(stages, records, count, workers)
    if loop.steps != sum(event.steps for event in events):
        raise AssertionError("the steps taken are not those that were charged")
    _check_finite(model)
    return FitReport(loop.steps, round(loop.steps * settings.expected_batch)), events


class _Loop:
    """One call of ``private_fit``."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        settings: PrivateSettings,
        engine: EngineName | None,
        random_bytes: RandomBytes,
        helper: ThreadPoolExecutor,
        progress: Callable[[str], None] | None,
        members: Members | None,
        views: int,
    ) -> None:
        self.model = model
        self.device = device
        self.settings = settings
        batch = max(1, round(settings.expected_batch))
        self.portions = Portions(device, engine, batch, MaskSeeds(device, random_bytes), progress)
        self.random_bytes = random_bytes
        self.helper = helper
        self.progress = progress
        self.members = members
        self.views = views
        self.last_progress = time.monotonic()
        self.steps = 0

    def run_all(self, stages: Sequence[Stage], records: Records, count: int, workers: int) -> None:
        """Run all stages; then the model is in evaluation mode, its flags as before, without gradients."""
        flags = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        try:
            self.model.train()
            for stage in stages:
                self.run(stage, records, count, flags, workers)
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(flags[name])
                parameter.grad = None
            self.model.eval()

    def run(self, stage: Stage, records: Records, count: int, flags: dict[str, bool], workers: int) -> None:
        """Train one stage; ``flags`` says which parameters the model itself lets train."""
        trained = stage.select(self.model, flags)
        optimizer = stage.optimizer.build(trained)
        loss = RecordLoss(self.model, stage.terms)
        size = sum(item.numel() for item in trained)
        steps = self.settings.steps(stage)
        members = self.members
        units = count if members is None else len(members)
        chosen = [poisson_batch(units, self.settings.sampling_rate, self.random_bytes) for _ in range(steps)]
        places = chosen if members is None else [members.records(batch) for batch in chosen]
        loaded_batches = loaded(records, self.steps, places, workers, self.device, self.views)
        with ExitStack() as stack:
            engine: Engine | None = None
            for taken, batch in zip(chosen, loaded_batches, strict=True):
                noise = self.helper.submit(standard_normal, size, self.random_bytes)
                if batch is not None and engine is None:
                    engine = stack.enter_context(self.portions.running(loss, trained, batch))
                total = torch.zeros(size, dtype=torch.float64, device=self.device)
                if batch is not None and engine is not None:
                    sizes = None if members is None else members.sizes(taken)
                    self._add(total, engine, *batch, sizes)
                self._set_gradients(trained, total, noise)
                self._steer(stage, trained)
                optimizer.step()
                self.steps += 1
                self._tell()

    def _add(
        self,
        total: torch.Tensor,
        engine: Engine,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        sizes: Sequence[int] | None,
    ) -> None:
        """Add the clipped gradients of a batch, as many records at a time as memory holds."""
        clip = self.settings.clip_norm
        if sizes is None:
            for part in self.portions.of(engine, inputs, labels, lambda group: clipped_sum(group, clip)):
                total.add_(part)
            return
        patients = PatientSum(total, sizes, clip)
        for part in self.portions.of(engine, inputs, labels, rows):
            patients.add(part)

    def _set_gradients(
        self, trained: Sequence[nn.Parameter], total: torch.Tensor, noise: Future[torch.Tensor]
    ) -> None:
        """Set each parameter's gradient to ``(sum + noise) / L``, the only release of the records."""
        deviation = self.settings.noise_multiplier * self.settings.clip_norm
        noisy = (total + deviation * noise.result().to(self.device)) / self.settings.expected_batch
        parts = torch.split(noisy, [item.numel() for item in trained])
        for parameter, part in zip(trained, parts, strict=True):
            # In the parameter's own memory format, with which optimisers are fastest.
            parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))

    def _steer(self, stage: Stage, trained: Sequence[nn.Parameter]) -> None:
        """Add what depends on parameters alone, then let corrections change the noisy gradient."""
        for part in stage.parameter_terms:
            if part.weight:
                for parameter, item in zip(
                    trained, gradients(part.weight * part.fn(self.model), trained), strict=True
                ):
                    assert parameter.grad is not None  # noqa: S101  (set just before)
                    parameter.grad.add_(item)
        for correct in stage.corrections:
            correct(self.model)

    def _tell(self) -> None:
        if self.progress is not None and time.monotonic() - self.last_progress >= PROGRESS_SECONDS:
            self.progress(f"private step {self.steps}")
            self.last_progress = time.monotonic()


def _check_finite(model: nn.Module) -> None:
    """Check the parameters: they are already protected, so this discloses nothing about a record."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainingError(
                f"Expected finite parameters after private training, but {name} has NaN or infinite entries. "
                "Lower the learning rate or the clipping norm: the noise of a step is as large as both.",
                code="TF-301",
            )
