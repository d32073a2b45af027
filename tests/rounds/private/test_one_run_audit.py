"""One run of a whole federation, audited: what the server sees refutes no epsilon above the promised one.

Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023. Every canary is a
record of one silo, with an input direction of its own, and in by a coin. In a linear model its class sums
and its gradient then have coordinates of their own, and both are as long as clipping lets them be: no canary
disturbs another one. The attacker, who knows canaries, start and job, says of a fifth of them that they are
in and of a fifth that they are out; the right guesses bound epsilon from below, with confidence 0.999. A run
with an eighth of the noise must refute the promise, else the audit would show nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.audit import one_run_bound, right_guesses

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.data.arrays import ArrayData
from tightframe.phases import Schema
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.privacy.training import dp_sgd, portions
from tightframe.rounds import codec
from tightframe.rounds.riders.noisy_sums import RELEASES
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.plain import PlainServer

CLASSES, SHAPE = 8, (3, 24, 24)
CANARIES = 3 * 24 * 24
LENGTH = 10.0  # of a canary; beside it the biases' share of a gradient is small
EACH = CANARIES // 5
EPSILON, DELTA = 2.0, 1e-5
JOB: dict[str, Any] = {
    "job_name": "audited",
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 24},
    "model": "mlp",
    "model_options": {"widths": []},
    "sites": ["site-1", "site-2", "site-3", "site-4"],
    "min_sites": 4,
    "seed": 5,
    "weights": "uniform",
    # Every record in every step, and steps that hardly move the model, so that a canary pulls alike in all.
    "training": {
        "epochs": 1,
        "batch_size": 4096,
        "learning_rate": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "augment": False,
    },
}


class Canaries:
    """The coins, and the silos' records: canaries at site-1, a few ordinary ones everywhere."""

    def __init__(self) -> None:
        stream = np.random.default_rng()  # by the test's name, as the noise
        self.labels = stream.integers(CLASSES, size=CANARIES)
        self.present = stream.random(CANARIES) < 0.5
        inputs = (LENGTH * np.eye(CANARIES)).reshape(-1, *SHAPE).astype(np.float32)
        self.silos = {}
        for site in JOB["sites"]:
            few = (stream.normal(size=(16, *SHAPE)).astype(np.float32), np.arange(16) % CLASSES)
            train = few
            if site == "site-1":
                train = (
                    np.concatenate([few[0], inputs[self.present]]),
                    np.concatenate([few[1], self.labels[self.present]]),
                )
            self.silos[site] = ArrayData(
                {"train": train, "validation": few, "test": few}, source="canaries", num_classes=CLASSES
            )

    def bound(self, scores: NDArray[np.float64]) -> float:
        """The lower bound of epsilon from scores (CANARIES,), higher for those that are in."""
        right = right_guesses(scores, self.present, EACH)
        return one_run_bound(CANARIES, 2 * EACH, right, delta=DELTA)


def _spent(folder: Path) -> float:
    """What site-1 says that the job cost it."""
    report = json.loads((folder / "site-1" / "local_report.json").read_text(encoding="utf-8"))
    assert report["privacy"]["promised"] == EPSILON
    return float(report["privacy"]["epsilon"])


def _from_class_sums(folder: Path) -> tuple[float, float]:
    """FedMR over secure sums: the bound from the class sums that the server keeps, and what was spent."""
    canaries = Canaries()
    job = {
        **JOB,
        "method": "fedmr",
        "method_options": {"mu_intra": 0.0},
        "rounds": 1,
        # Nearly all of the budget for what is attacked.
        "privacy": {"epsilon": EPSILON, "delta": DELTA, "spare_rounds": 0, "class_noise_share": 0.95},
    }
    result = federation.run_job(parse_job(job), data=canaries.silos, folder=folder)
    sums = result.state.extra[RELEASES + "total"].numpy()
    return canaries.bound(sums[canaries.labels, np.arange(CANARIES)]), _spent(folder)


def _from_updates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """FedAvg over plain sums: the bound from site-1's updates, which this server sees, and what was spent."""
    canaries, seen = Canaries(), []
    add = PlainServer.add

    def noting(self: PlainServer, site: str, term: Any) -> None:
        alone = PlainServer(self._schema)
        add(alone, site, term)
        if site == "site-1" and any(item.name == "update/head.weight" for item in self._schema.fields):
            seen.append(_update(self._schema, alone))
        add(self, site, term)

    job = parse_job(
        {
            **JOB,
            "method": "fedavg",
            "rounds": 2,
            "summation": "plain",
            "privacy": {"epsilon": EPSILON, "delta": DELTA, "spare_rounds": 0},
        }
    )
    with monkeypatch.context() as patch:
        patch.setattr(PlainServer, "add", noting)
        federation.run_job(job, data=canaries.silos, folder=folder)
    assert len(seen) == 2
    start = prepare(job).initial_state().model
    weight, bias = (start[f"head.{name}"].double() for name in ("weight", "bias"))
    # Down the gradient of the cross-entropy: the true class less what the model says, along the canary.
    pull = np.eye(CLASSES)[canaries.labels] - torch.softmax(LENGTH * weight.T + bias, 1).numpy()
    pull /= np.linalg.norm(pull, axis=1, keepdims=True)
    return canaries.bound((sum(seen).T * pull).sum(1)), _spent(folder)


def _update(schema: Schema, server: PlainServer) -> NDArray[np.float64]:
    found = codec.decode(schema, server.open(), parties=len(JOB["sites"]))
    return np.asarray(found["update/head.weight"])


def _eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the noise in every draw; what is planned and charged stays as it is.

    Gradients of all records at once take less time, and are the same; the run that keeps its promise has had
    the probe.
    """
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)
    monkeypatch.setattr(portions, "CHOSEN_ON_CPU", "vmap")
    variance, normal = ClassSumsConfig.share_variance, dp_sgd.standard_normal
    monkeypatch.setattr(
        ClassSumsConfig, "share_variance", lambda config, honest: variance(config, honest) // 64
    )
    monkeypatch.setattr(dp_sgd, "standard_normal", lambda size, source: normal(size, source) / 8)


def test_class_sums_through_secure_sums_keep_the_promise_and_an_eighth_of_the_noise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, spent = _from_class_sums(tmp_path / "kept")
    assert 0.95 * EPSILON < spent <= EPSILON
    assert found <= spent
    _eighth(monkeypatch)
    caught, claimed = _from_class_sums(tmp_path / "broken")
    assert claimed <= EPSILON < caught


def test_updates_of_a_silo_keep_the_promise_and_an_eighth_of_the_noise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, spent = _from_updates(tmp_path / "kept", monkeypatch)
    assert 0.95 * EPSILON < spent <= EPSILON
    assert 0.02 < found <= spent  # what is seen under the promise, too
    _eighth(monkeypatch)
    caught, claimed = _from_updates(tmp_path / "broken", monkeypatch)
    assert claimed <= EPSILON < caught
