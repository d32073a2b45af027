"""Every method's own defaults train every kind of network: nothing becomes infinite or not a number."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tightframe import federation, methods
from tightframe.rounds import plan
from tightframe.rounds.run_state import state_sha256

NETWORKS = {"small_cnn": 1, "mlp": 1, "conv2cifar": 2, "resnet20": 1, "resnet18": 1}
"""Networks, and how much larger than 8 x 8 pixels their images are; the MLP normalises nothing."""
IN_EACH_RUN = ("mlp", "conv2cifar")
"""For every method; ResNet20 and small_cnn for FedMR; with TIGHTFRAME_TEST_NETWORKS=all all for every one.

ResNet18 has the blocks of ResNet20, and CCVR's and CReFF's servers train a head on features, whatever made
them: here the MLP's alone, CReFF's for one round. All take long.
"""
OF_FEATURES = ("ccvr", "creff")
OPTIONS = {"combine": {"local": "moon", "server": "fedadam"}}
ONE_SUM = ("fed3r", "fedcgs", "fedncm")
"""Train nothing: one exchange."""
WITHOUT_MOMENTUM = ("scaffold", "feddc")
"""They refuse the job's default momentum, and say so."""


def pairs() -> list[tuple[str, str]]:
    every = os.environ.get("TIGHTFRAME_TEST_NETWORKS") == "all"
    names = [item.name for item in methods.METHODS]
    if every:
        return [(a, b) for b in NETWORKS for a in names]
    chosen = [(a, b) for b in IN_EACH_RUN for a in names if not (a in OF_FEATURES and b == "conv2cifar")]
    return [*chosen, ("fedmr", "small_cnn"), ("fedmr", "resnet20")]


@functools.cache
def silos(larger: int) -> dict[str, Any]:
    """Digits, six of ten classes at each of two silos, three records of each class, all in each fold."""
    source = load_digits()
    images = np.kron(source.images / 16.0, np.ones((1, larger, larger))).astype(np.float32)[:, None]
    found = {}
    for silo in range(2):
        own = [np.flatnonzero(source.target == (5 * silo + k) % 10)[3 * silo :][:3] for k in range(6)]
        records = (images[np.concatenate(own)], source.target[np.concatenate(own)].astype(np.int64))
        found[f"silo-{silo}"] = {"train": records, "validation": records, "test": records}
    return found


def finite(tensors: dict[str, torch.Tensor]) -> bool:
    return all(bool(item.isfinite().all()) for item in tensors.values())


@pytest.fixture(autouse=True)
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state by the first that computes it: the server and both silos do, from the same values."""
    advance, known = plan.advance, dict[Any, Any]()

    def once(phase: Any, state: Any, totals: Any, cohort: Any) -> Any:
        values = tuple((name, np.asarray(item).tobytes()) for name, item in totals.items())
        key = (tuple(phase.schema.fields), state_sha256(state), values, repr(cohort))
        if key not in known:
            known[key] = advance(phase, state, totals, cohort)
        return known[key]

    monkeypatch.setattr(plan, "advance", once)


@pytest.mark.whole
@pytest.mark.parametrize(("method", "network"), pairs())
def test_two_rounds_are_finite(method: str, network: str) -> None:
    ended = federation.run(
        method,
        silos(NETWORKS[network]),
        1 if method in (*ONE_SUM, "creff") else 2,
        model=network,
        class_names=[str(label) for label in range(10)],
        method_options=OPTIONS.get(method, {}),
        summation="plain",
        class_rules="off",
        evaluation={"models": 1},
        training={"batch_size": 8, "epochs": 1} | ({"momentum": 0.0} if method in WITHOUT_MOMENTUM else {}),
    )
    assert finite(ended.state.model) and finite(ended.state.extra)
    trained = [row.training for row in ended.outcome.rows if row.training]
    assert bool(trained) == (method not in ONE_SUM)
    assert all(np.isfinite(value) for row in trained for value in row.values())
