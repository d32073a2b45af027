"""A silo without rounds: just enough of ``phases.SiloView`` to run a method's ``contribute``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightframe.learning import loop
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.few_records import record_values
from tightframe.learning.few_records.distinct_rows import DistinctRows, own_rows, row_digests
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.learning.stages import FitReport, Stage
from tightframe.phases import Fold, OwnRows, Setting, SiloView, Tensors, stream_seed


@dataclass
class FakeSilo:
    """Records in memory, the same in every fold; augmentation adds noise, so that it can be noticed."""

    name: str
    setting: Setting
    inputs: torch.Tensor
    labels: torch.Tensor
    round: int = 1
    seed: int = 0
    offers_prototypes: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asked: list[dict[str, Any]] = field(default_factory=list)
    least: int = 1
    limits_evaluations = False

    def may_sum(self, fold: Fold) -> bool:
        return True

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """No record is repeated, so that ``distinct`` changes nothing."""
        return torch.bincount(self.labels, minlength=self.setting.num_classes)

    def held_counts(self) -> torch.Tensor:
        """Each record is of another patient."""
        return self.class_counts("train")

    @property
    def drawn_records(self) -> int:
        return len(self.labels)

    @property
    def min_class_count(self) -> int:
        return self.least

    @property
    def records_per_feature(self) -> int:
        return 0

    def record_values(self, *, staying: bool = False) -> torch.Tensor:
        read = [(self.inputs, self.labels)]
        return record_values.count_values(read, self.setting.num_classes, (), self.least)

    def backed(self, sizes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.ones(self.setting.num_classes, sizes.shape[1], dtype=torch.bool)

    def rows(self) -> tuple[list[bytes], torch.Tensor]:
        return row_digests(self.inputs), self.labels

    def own_rows(self, *, staying: bool = False) -> OwnRows:
        found = DistinctRows(self.setting.num_classes)
        found.add(*self.rows())
        return own_rows(found, self.record_values())

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("Expected a job without differential privacy: this silo draws no noise.")

    def private_gradient_sum(
        self, model: torch.nn.Module, terms: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("Expected a job without differential privacy: this silo draws no noise.")

    def private_frozen_sums(
        self, model: torch.nn.Module, width: int, *, products: bool, radius: float
    ) -> dict[str, torch.Tensor]:
        raise NotImplementedError("Expected a job without differential privacy: this silo draws no noise.")

    def load(self, tensors: Tensors) -> torch.nn.Module:
        model = self.setting.build_model()
        model.load_state_dict(dict(tensors))
        return model

    def batches(
        self, fold: Fold, *, augment: bool, shuffle: bool, epoch: int = 0, share: float = 1.0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.asked.append({"fold": fold, "augment": augment, "shuffle": shuffle, "epoch": epoch})
        stream = self.generator(f"order {epoch}")
        order = torch.arange(len(self.labels))
        if shuffle:
            order = torch.randperm(len(self.labels), generator=stream)
        order = order[: max(1, round(share * len(order)))]
        for chosen in merge_single_tail(order, self.setting.local.batch_size):
            inputs = self.inputs[chosen]
            if augment:
                inputs = inputs + 0.01 * torch.randn(inputs.shape, generator=stream)
            yield inputs, self.labels[chosen]

    def encoded(
        self, model: torch.nn.Module, fold: Fold, *, exact: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Computed anew each time: nothing is kept here."""
        used: Any = copy.deepcopy(model).double() if exact else model
        for inputs, labels in self.batches(fold, augment=False, shuffle=False):
            with torch.no_grad():
                yield used.features(inputs.double() if exact else inputs), labels

    def encoded_before(
        self, model: torch.nn.Module
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All records stay."""
        for features, labels in self.encoded(model, "train", exact=True):
            yield features, labels, torch.ones(len(labels), dtype=torch.bool)

    def class_patients(self, fold: Fold) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each record is a patient's only one, and none is withdrawn."""
        counts = self.class_counts(fold)
        return torch.zeros_like(counts), counts, counts

    def withdrawn_from(self, fold: Fold) -> tuple[torch.Tensor, bool]:
        """None is withdrawn."""
        return torch.zeros(0, dtype=torch.int64), False

    def unit_records(
        self, model: torch.nn.Module, *, passes: Sequence[range] = (), squared: bool = False
    ) -> UnitRecords:
        return UnitRecords(model, len(self.labels), least=self.least, squared=squared)

    def fit(self, model: torch.nn.Module, stages: Sequence[Stage]) -> FitReport:
        local = self.setting.local
        return loop.fit(
            model,
            lambda epoch: self.batches("train", augment=local.augment, shuffle=True, epoch=epoch),
            stages,
            device=self.device,
        )

    def fit_by_own_loop(self, model: torch.nn.Module) -> FitReport:
        raise NotImplementedError  # only a job's silo has a site that allows one

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(stream_seed(self.seed, self.name, self.round, purpose))


def _seen_by_methods(silo: FakeSilo) -> SiloView:
    """Hold the silo to the protocol: mypy refuses this function where they differ."""
    return silo
