"""Silos whose records are in memory, few and of few classes, for whole runs in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tightframe.errors import RunError
from tightframe.models import feature_width
from tightframe.phases import Method, Phase, ServerState, Setting
from tightframe.rounds.riders import class_rules


class Records:
    """A silo's records in memory."""

    source, synthetic = "random numbers", True

    def __init__(self, labels: list[int], seed: int) -> None:
        self._labels = np.array(labels, dtype=np.int64)
        stream = torch.Generator().manual_seed(seed)
        self._inputs = torch.randn(len(labels), 3, 16, 16, generator=stream)

    def labels(self, fold: str) -> np.ndarray:
        return self._labels

    def check(self, progress: Any = None) -> None:
        pass

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return list(zip(self._inputs, self._labels.tolist(), strict=True))


class GoneOnce(Records):
    """A silo that is stopped when it is to train for the n-th time, and so drops out of that sum."""

    def __init__(self, labels: list[int], seed: int, *, time: int) -> None:
        super().__init__(labels, seed)
        self._left = time

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        self._left -= augment_seed is not None
        if augment_seed is not None and self._left == 0:
            raise RunError("stopped", code="TF-504")
        return super().records(fold, augment_seed=augment_seed)


# One silo of one class, classes of one record, most classes nowhere.
RUN = {"a": [0] * 6 + [1] * 6, "b": [0] * 5 + [1], "c": [0] * 7 + [1] + [2], "d": [0] * 8}


def made_silos() -> dict[str, Records]:
    return {name: Records(labels, seed) for seed, (name, labels) in enumerate(RUN.items())}


def in_turn(seed: int) -> list[int]:
    """Labels of one silo of several: class 0 or 1 in turn, and class 2 that all have."""
    return [seed % 2] * 8 + [2] * 8


def stateless_rounds(
    method: Method, setting: Setting, silos: Mapping[str, Any], open_sum: Callable[..., Any], count: int
) -> tuple[list[ServerState], Phase, dict[str, Any]]:
    """Rounds of a method with one phase whose silos keep nothing, on silos of ``make_silo``.

    Returns:
        The server's states, the first one included; the last phase, and what was contributed to it.
    """
    states = [method.init_server(setting, 7)]
    for number in range(1, count + 1):
        (phase,) = method.plan(setting, number, count)
        terms = {}
        for name, silo in silos.items():
            silo.round = number
            contribution = phase.contribute(silo, phase.broadcast(states[-1]), {})
            assert contribution.proposed_state == {}
            terms[name] = (len(silo.labels), contribution.tensors)
        states.append(phase.update(states[-1], *open_sum(phase.schema, terms)))
    return states, phase, terms


def setting_with_head(
    method: Method, make_setting: Any, config: Any, *, num_classes: int = 4, **local: Any
) -> Setting:
    """A setting of ``make_setting`` whose models have the method's head."""
    plain: Setting = make_setting(config, classes=num_classes, **local)

    def build() -> nn.Module:
        model: Any = plain.build_model()
        assert method.head is not None
        model.head = method.head(config, feature_width(model), num_classes)
        return model

    return replace(plain, build_model=build)


# One silo of one class, one with a class of one record; nobody has class 3.
LABELS = {"site-1": [0] * 9 + [1] * 8, "site-2": [1] * 6, "site-3": [0] * 5 + [2]}


def headed_rounds(
    method: Method,
    make_setting: Any,
    make_silo: Any,
    open_sum: Any,
    config: Any,
    count: int = 2,
    **local: Any,
) -> tuple[list[ServerState], Any, dict[str, Any], dict[str, Any]]:
    """``stateless_rounds`` on silos of ``LABELS``, and the silos."""
    setting = setting_with_head(method, make_setting, config, **local)
    silos = {name: make_silo(setting, labels, name=name) for name, labels in LABELS.items()}
    return *stateless_rounds(method, setting, silos, open_sum, count), silos


def withheld(phase: Phase, terms: Mapping[str, Any]) -> dict[str, Any]:
    """The terms of silos of ``LABELS`` without rows of classes with fewer than five records."""
    found = {}
    for name, (weight, tensors) in terms.items():
        kept = class_rules.withhold(
            phase.schema,
            tensors,
            offer=torch.ones(4, dtype=torch.bool),
            counts=torch.bincount(torch.tensor(LABELS[name]), minlength=4),
            min_count=5,
            active=True,
        )
        del kept[class_rules.HOLDERS]
        found[name] = (weight, kept)
    return found


def assert_averaged(
    before: ServerState, after: ServerState, terms: Mapping[str, Any], average: str, *, but: str
) -> None:
    """Every tensor of the model but one is moved by the mean of the updates of silos of ``LABELS``."""
    size = {name: (len(labels) if average == "weighted" else 1) for name, labels in LABELS.items()}
    for name, value in after.model.items():
        if name == but:
            continue
        moved = sum(size[site] * tensors["update/" + name].double() for site, (_, tensors) in terms.items())
        expected = before.model[name].double() + moved / sum(size.values())
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
