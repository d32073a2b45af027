"""The sum of a silo's clipped gradients in integers, before its noise: ``clipped_gradient_sum``.

The order at a silo is fixed: draw the batch, clip each record's gradient over all trained parameters to norm
C (with patients hidden: each patient's mean gradient), truncate it to the grid of
``privacy.releases.gradient_sums``, towards zero, and add in integers. For any record, its part of the sum is
within the sensitivity, which is checked in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Batch, Stage, Term
from tightframe.privacy.discrete_gaussian import system_bytes
from tightframe.privacy.os_randomness import MaskSeeds, RandomBytes, poisson_batch
from tightframe.privacy.releases.class_sums import clip_features, on_grid
from tightframe.privacy.releases.gradient_sums import GradientSumConfig
from tightframe.privacy.training.clipping import Members, PatientMeans, rows
from tightframe.privacy.training.per_sample import EngineName, RecordLoss
from tightframe.privacy.training.portions import Portions, Records, loaded, probe_with_made_up


def clipped_gradient_sum(
    model: nn.Module,
    records: Records,
    terms: Sequence[Term],
    *,
    config: GradientSumConfig,
    clip_norm: float,
    device: torch.device | str,
    batch_size: int,
    charge: Callable[[], None],
    patients: NDArray[np.int64] | None = None,
    views: int = 1,
    engine: EngineName | None = None,
    workers: int = 0,
    progress: Callable[[str], None] | None = None,
    random_bytes: RandomBytes = system_bytes,
) -> torch.Tensor:
    """Return the sum over the records drawn of ``(clipped gradient, 1)``, without noise.

    Args:
        model: made private by ``normalisation.make_private``; afterwards in evaluation mode.
        records: the training records by view, each data set with every record once.
        terms: of the loss; all weighted ones per-record, see ``probe``.
        clip_norm: C.
        batch_size: records that are loaded at a time.
        charge: called once, before anything is drawn; its exceptions stop the round.
        patients: of each record, (n,), to hide patients; None hides records.
        views: of each record; the mean of their gradients is clipped.
        engine: of per-sample gradients; by default the loop on a CPU, the fastest on a GPU.
        workers: processes that load records.
        progress: called with a line about the choice of the engine.
        random_bytes: the generator of sampling and dropout; any but the operating system's is for tests.

    Returns:
        (P + 1,) int64, on the CPU: the gradient in units of ``C / config.grid``, the number of records or
        patients in units of ``1 / config.count_units``. Adding or removing one changes it by a vector whose
        squared norm is at most ``config.squared_sensitivity``.

    Raises:
        PrivacyError: TF-711 if a term or the model couples records.
        SensitivityError: TF-721, only by an error of this program.
        TrainingError: TF-302 if not even one record's gradient fits into memory.
        RandomnessError: TF-720 if the operating system gives no random numbers.
    """
    device = torch.device(device)
    count = len(records(0))  # type: ignore[arg-type]
    if count < 1:
        raise ValueError("Expected at least one record, but got none.")
    if views < 1:
        raise ValueError(f"Expected at least one view of each record, but got {views}.")
    members = None if patients is None else Members.of(patients, count)
    # The server has the optimiser; the probe needs a stage.
    stages = [Stage(terms, OptimizerSettings("sgd", 1.0), steps=1)]
    probe_with_made_up(model, records(0), stages, device)
    charge()
    trained = [item for item in model.parameters() if item.requires_grad]
    total = torch.zeros(sum(item.numel() for item in trained) + 1, dtype=torch.int64)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        masks = MaskSeeds(device, random_bytes)
        drawn = poisson_batch(count if members is None else len(members), config.sampling_rate, random_bytes)
        places = drawn if members is None else members.records(drawn)
        chunks = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
        in_chunks = loaded(lambda step: records(step % views), 0, chunks, workers, device, views)
        batches = (batch for batch in in_chunks if batch)
        portions = Portions(device, engine, batch_size, masks, progress)
        model.train()
        try:
            running = _Running(stack, portions, RecordLoss(model, terms), trained, batches)
            if members is None:
                for part in running.each(lambda group: _units(rows(group), clip_norm, config)):
                    total[:-1] += part.cpu()
            else:
                means = PatientMeans(members.sizes(drawn))
                for portion in running.each(rows):
                    for mean in means.add(portion):
                        total[:-1] += _units(mean, clip_norm, config).cpu()
        finally:
            model.eval()
        total[-1] = len(drawn) * config.count_units
    return total


@dataclass(frozen=True)
class _Running:
    """Batches, and the engine of their gradients."""

    stack: ExitStack
    portions: Portions
    loss: RecordLoss
    trained: Sequence[nn.Parameter]
    batches: Iterator[Batch]

    def each(self, reduce: Callable[[list[torch.Tensor]], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the results of ``reduce`` on the gradients of some records at a time."""
        engine = None
        for inputs, labels in self.batches:
            if engine is None:
                running = self.portions.running(self.loss, self.trained, (inputs, labels))
                engine = self.stack.enter_context(running)
            yield from self.portions.of(engine, inputs, labels, reduce)


def _units(gradients: torch.Tensor, clip_norm: float, config: GradientSumConfig) -> torch.Tensor:
    """Clip gradients (b, P) float64, truncate them to the grid, and add them: (P,) int64."""
    return on_grid(clip_features(gradients / clip_norm, 1.0), config.fractional_bits, 1.0).sum(0)
