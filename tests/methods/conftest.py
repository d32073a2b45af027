"""Settings, silos and sums for the tests of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.silo import FakeSilo

from tightframe import models
from tightframe.phases import Cohort, Setting, stream_seed


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
