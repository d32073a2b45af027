"""A silo as a method sees it: its records, its random streams, its local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from tightframe import training
from tightframe.data.base import class_counts, own_labels
from tightframe.errors import RunError
from tightframe.model_update import build_template
from tightframe.phases import Fold, Setting, Tensors, stream_seed
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import JobSetup


class LocalSilo:
    """A silo as a method sees it (``phases.SiloView``) in one round."""

    def __init__(
        self, context: SiloContext, setup: JobSetup, device: torch.device, round_number: int
    ) -> None:
        self.name = context.name
        self.round = round_number
        self.setting: Setting = setup.setting_at(context.name)
        self.device = device
        self._context = context
        self._setup = setup
        # Convolutions and pooling are faster with channels last: EfficientNet-b0 by a third on a CPU.
        self._images = len(self.setting.input_shape) == 3

    @property
    def offers_prototypes(self) -> bool:
        """False where the job's list or the site itself keeps the prototypes at home."""
        chosen = self._setup.job.prototype_sites
        return self._context.site.offer_prototypes and (chosen is None or self.name in chosen)

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """Records of each class in a fold: int64 (C,); ``distinct`` counts repeated training records once."""
        data = self._context.data
        labels = own_labels(data) if distinct and fold == "train" else data.labels(fold)
        return torch.from_numpy(class_counts(labels, self.setting.num_classes))

    def against_large_updates(self) -> str:
        """What to do about an update that is over its bound."""
        return (
            "Lower `training.learning_rate`, raise `update_bound`, or set `update_norm`, to which updates "
            "are rescaled."
        )

    def load(self, tensors: Tensors) -> torch.nn.Module:
        """A model on this silo's device with these parameters and buffers."""
        model = build_template(self.setting)
        model.load_state_dict(dict(tensors))
        if self._images:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.to(self.device)

    def generator(self, purpose: str) -> torch.Generator:
        """A random stream on the CPU keyed by (seed, silo, round, purpose)."""
        return torch.Generator().manual_seed(self.stream(purpose))

    def batches(
        self, fold: Fold, *, augment: bool, shuffle: bool, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Mini-batches on the silo's device, the same for every (seed, silo, round, epoch)."""
        count = len(self._context.data.labels(fold))
        if shuffle:
            order = torch.randperm(
                count, generator=torch.Generator().manual_seed(self.stream("order", epoch))
            )
            indices = order.tolist()
        else:
            indices = list(range(count))
        yield from self._batches_in(indices, fold, self.stream("augment", epoch) if augment else None)

    def _batches_in(
        self, indices: list[int], fold: Fold, augment_seed: int | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Mini-batches of these records in this order."""
        job = self._setup.job
        records = self._context.data.records(fold, augment_seed=augment_seed)
        size = job.training.batch_size if fold == "train" else job.evaluation.batch_size
        loader: DataLoader[Any] = DataLoader(
            records,
            batch_sampler=training.merge_single_tail(indices, size),
            num_workers=self._context.site.loader_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # keeps the loader off the global stream
        )
        for inputs, labels in guarded(iter(loader), self._context.stopped):
            if self._images:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def fit(self, model: torch.nn.Module, stages: Sequence[training.Stage]) -> training.FitReport:
        """Run the stages of local training on the training fold."""
        local = self.setting.local
        return training.fit(
            model,
            lambda epoch: self.batches("train", augment=local.augment, shuffle=True, epoch=epoch),
            stages,
            device=self.device,
            amp=local.amp,
            progress=lambda text: self._context.log.info("%s, round %d: %s", self.name, self.round, text),
        )

    def stream(self, *purpose: str | int) -> int:
        """The seed of a random stream keyed by (seed, silo, round, purpose), in production also by a salt.

        Without it a second job with the same seed would repeat this silo's updates bit for bit, and the
        totals of both over different silos, or with other weights, would tell them.
        """
        return stream_seed(self._setup.job.seed, *self._context.salt(), self.name, self.round, *purpose)

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only under differential privacy (``rounds.private``): without noise there is nothing to give.

        Raises:
            RunError: TF-505, always.
        """
        raise RunError(
            "Expected a job with `privacy`, but noisy class sums were asked for without it.", code="TF-505"
        )


def guarded(batches: Iterator[Any], stopped: Callable[[], bool]) -> Iterator[Any]:
    """The same batches, ended by TF-504 as soon as the run is aborted."""
    for batch in batches:
        if stopped():
            raise RunError("the run was aborted during local training.", code="TF-504")
        yield batch
