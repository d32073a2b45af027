"""A silo without rounds: just enough of ``phases.SiloView`` to run a method's ``contribute``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tightframe import models
from tightframe.learning import loop
from tightframe.learning.stages import FitReport, Stage
from tightframe.phases import Cohort, Setting, stream_seed


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

    def class_counts(self, fold: str) -> torch.Tensor:
        return torch.bincount(self.labels, minlength=self.setting.num_classes)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        model = self.setting.build_model()
        model.load_state_dict(dict(tensors))
        return model

    def batches(
        self, fold: str, *, augment: bool, shuffle: bool, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.asked.append({"fold": fold, "augment": augment, "shuffle": shuffle, "epoch": epoch})
        stream = self.generator(f"order {epoch}")
        order = torch.arange(len(self.labels))
        if shuffle:
            order = torch.randperm(len(self.labels), generator=stream)
        for chosen in loop.merge_single_tail(order, self.setting.local.batch_size):
            inputs = self.inputs[chosen]
            if augment:
                inputs = inputs + 0.01 * torch.randn(inputs.shape, generator=stream)
            yield inputs, self.labels[chosen]

    def fit(self, model: torch.nn.Module, stages: Sequence[Stage]) -> FitReport:
        local = self.setting.local
        return loop.fit(
            model,
            lambda epoch: self.batches("train", augment=local.augment, shuffle=True, epoch=epoch),
            stages,
            device=self.device,
        )

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(stream_seed(self.seed, self.name, self.round, purpose))


@pytest.fixture
def make_setting() -> Callable[..., Setting]:
    """Settings with a tiny network; keyword arguments change the local training."""

    def make(config: Any, *, classes: int = 3, model: str = "small_cnn", **local: Any) -> Setting:
        values: dict[str, Any] = {
            "epochs": 1,
            "batch_size": 8,
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "augment": True,
            "amp": False,
        }
        spec = models.get(model)
        options = spec.options(widths=(8, 16)) if model == "small_cnn" else spec.options()
        shape = (1, 8, 8) if model == "small_cnn" else (3, 16, 16)
        return Setting(
            config=config,
            num_classes=classes,
            input_shape=shape,
            build_model=lambda: spec.build(options, shape, classes),
            local=SimpleNamespace(**{**values, **local}),
        )

    return make


@pytest.fixture
def make_silo() -> Callable[..., FakeSilo]:
    """Silos with random records of the given labels."""

    def make(setting: Setting, labels: Sequence[int], *, name: str = "site-1", **changes: Any) -> FakeSilo:
        stream = torch.Generator().manual_seed(stream_seed(1, name))
        inputs = torch.randn(len(labels), *setting.input_shape, generator=stream)
        return FakeSilo(name, setting, inputs, torch.tensor(labels), **changes)

    return make


@pytest.fixture
def open_sum() -> Callable[..., tuple[dict[str, np.ndarray], Cohort]]:
    """The sum of contributions as the coordinator would open it, without encoding."""

    def add(schema: Any, terms: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Cohort]:
        weights = {name: float(weight) for name, (weight, _) in terms.items()}
        cohort = Cohort(round=1, weights=weights, largest=max(weights.values()))
        totals = {}
        for item in schema.fields:
            total = np.zeros(item.shape)
            for name, (_, tensors) in terms.items():
                assert tuple(tensors[item.name].shape) == item.shape, item.name
                share = weights[name] / cohort.largest if item.weighted else 1.0
                total = total + share * tensors[item.name].to(torch.float64).numpy()
            totals[item.name] = total
        for name, (_, tensors) in terms.items():
            assert set(tensors) == {item.name for item in schema.fields}, name
        return totals, cohort

    return add
