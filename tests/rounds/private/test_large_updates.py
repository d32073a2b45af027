"""An update that noise takes over its bound: the message says how much noise that is, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.data.arrays import ArrayData
from tightframe.errors import RunError
from tightframe.privacy import accounting
from tightframe.privacy.training import portions
from tightframe.rounds.setup import prepare

JOB: dict[str, Any] = {
    "job_name": "small",
    "method": "fedavg",
    "dataset": "digits",
    "model": "small_cnn",
    "model_options": {"widths": [8, 8, 8]},
    "sites": ["a", "b", "c"],
    "min_sites": 3,
    "rounds": 1,
    "weights": "uniform",
    "training": {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "momentum": 0.0, "augment": False},
    "privacy": {"epsilon": 0.5, "noise_multiplier": 300.0, "spare_rounds": 0},
}


def _records(classes: int) -> dict[str, ArrayData]:
    """25 training records at each of three silos, of so many classes."""
    stream = np.random.default_rng(0)

    def fold(size: int) -> tuple[Any, Any]:
        return stream.normal(size=(size, 1, 8, 8)).astype(np.float32), stream.integers(0, classes, size)

    def silo() -> ArrayData:
        folds: Any = {"train": fold(25), "validation": fold(5), "test": fold(10)}
        return ArrayData(folds, source="made up", num_classes=10)

    return {site: silo() for site in "abc"}


@pytest.fixture
def records() -> dict[str, ArrayData]:
    return _records(10)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_noise_over_the_bound_is_told_with_what_makes_it_less(
    records: dict[str, ArrayData], tmp_path: Path, caplog: pytest.LogCaptureFixture, momentum: float
) -> None:
    asked = JOB | {"training": JOB["training"] | {"momentum": momentum, "epochs": 4}}
    with pytest.raises(RunError, match="TF-501"):
        federation.run_job(parse_job(asked), data=records, folder=tmp_path / "refused")
    (told,) = [text for text in caplog.messages if text.startswith("a: TF-402: Expected the absolute")]
    assert told.count("TF-402") == 1
    for part in ("at most 8", "noise multiplier 300.00", "a batch of 8 in 12 steps"):
        assert part in told, told
    for lever in ("`training.batch_size`", "smaller `privacy.noise_multiplier`", "`training.learning_rate`"):
        assert lever in told, told
    found = re.search(r"standard deviation (\S+) .* An `update_bound` of (\d+) would let it pass", told)
    assert found is not None, told
    deviation, bound = float(found[1]), int(found[2])

    # What it says is so: with that bound the run passes, and this is how far parameters really move.
    job = parse_job(asked | {"update_bound": bound})
    result = federation.run_job(job, data=records, folder=tmp_path / "passed")
    before = prepare(job).initial_state().model
    moved = torch.cat([(result.state.model[name] - start).flatten() for name, start in before.items()])
    assert float(moved.std()) * 3**0.5 == pytest.approx(deviation, rel=0.1), "the mean of three silos"


def test_where_gradients_pass_the_bound_noise_is_not_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Noise of standard deviation 0.0054; gradients of one class, three steps at learning rate 0.1.
    privacy = JOB["privacy"] | {"epsilon": 100.0, "noise_multiplier": 0.25}
    with pytest.raises(RunError, match="TF-501"):
        federation.run_job(
            parse_job(JOB | {"privacy": privacy, "update_bound": 0.033}), data=_records(1), folder=tmp_path
        )
    (told,) = [text for text in caplog.messages if text.startswith("a: TF-402")]
    assert "noise" not in told and "`update_norm`" in told


def test_without_privacy_nothing_is_said_of_noise(
    records: dict[str, ArrayData], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = {name: value for name, value in JOB.items() if name != "privacy"} | {"update_bound": 1e-6}
    with pytest.raises(RunError, match="TF-513"):
        federation.run_job(parse_job(job), data=records, folder=tmp_path)
    (told,) = [text for text in caplog.messages if text.startswith("a: nothing can be contributed")]
    assert "TF-402" in told
    assert "noise" not in told and told.endswith("or set `update_norm`, to which updates are rescaled.")
