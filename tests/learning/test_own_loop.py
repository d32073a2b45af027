"""An own training loop at a site: who allows it, what it gets, and what becomes of its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tightframe import data, federation, methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.errors import JobError, RunError
from tightframe.learning.own_loop import LocalTraining
from tightframe.rounds.setup import prepare

SILOS = ["a", "b", "c"]
SMALL: dict[str, Any] = {
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [4]},
    "seed": 3,
}
TRAINING = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-4}
SOURCE = '''
import torch
from torch import nn
from tightframe.learning.own_loop import TrainingLoop

def train(training):
    """Plain PyTorch."""
    model, own = training.model, training.settings
    optimizer = torch.optim.SGD(
        model.parameters(), lr=own.learning_rate, momentum=own.momentum, weight_decay=own.weight_decay
    )
    losses = []
    for epoch in range(own.epochs):
        for inputs, labels in training.batches(epoch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return sum(losses) / len(losses)

LOOP = TrainingLoop("plain_loop", train)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LocalTraining], float]]:
    """Another package with the entry point, found by ``importlib.metadata`` on the path."""
    folder = tmp_path / "site-packages"
    (folder / "hospital_loop-1.2.dist-info").mkdir(parents=True)
    (folder / "hospital_loop.py").write_text(SOURCE)
    (folder / "hospital_loop-1.2.dist-info" / "METADATA").write_text("Name: hospital_loop\nVersion: 1.2\n")
    (folder / "hospital_loop-1.2.dist-info" / "entry_points.txt").write_text(
        "[tightframe.training]\nplain_loop = hospital_loop:LOOP\nbroken = hospital_loop:train\n"
    )
    monkeypatch.syspath_prepend(folder)
    import hospital_loop  # type: ignore[import-not-found]

    yield hospital_loop.train
    sys.modules.pop("hospital_loop")


def _job(method: str = "fedavg", **values: Any) -> JobConfig:
    training = {**TRAINING, **values.pop("training", {})}
    named = {"job_name": "x", "method": method, "sites": SILOS, "min_sites": 2, "rounds": 2}
    return parse_job({**named, **SMALL, **values, "training": training})


def _silos() -> dict[str, Any]:
    spec = data.get("fed_heart_disease")
    assert spec.twin is not None
    return {site: spec.twin(index, spec.options()) for index, site in enumerate(SILOS)}


def _same(one: federation.Result, other: federation.Result) -> bool:
    return all(torch.equal(one.state.model[name], other.state.model[name]) for name in other.state.model)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fedavg", "fedopt"])
def test_a_loop_that_does_what_ours_does_gives_the_same_bits(
    method: str, installed: Callable[[LocalTraining], float]
) -> None:
    """The loop is plain ``torch.optim``; ours is not."""
    allowed = dict.fromkeys(SILOS, SiteEntry(training_loops=["plain_loop"]))
    plain: Any = {"summation": "plain"}  # the loop by name has secure sums
    ours = federation.run_job(_job(method, **plain), data=_silos())
    named = federation.run_job(_job(method, training={"loop": "plain_loop"}), data=_silos(), entries=allowed)
    handed = federation.run(
        method, SILOS, 2, training_loop=installed, training=TRAINING, min_sites=2, **SMALL, **plain
    )
    assert _same(named, ours) and _same(handed, ours)
    for result in (named, handed):
        rows, expected = ([row.as_json() for row in item.outcome.rows] for item in (result, ours))
        assert rows[1]["training"] == {"loss": pytest.approx(expected[1]["training"]["loss"], rel=1e-9)}
        assert rows[-1]["balanced_accuracy"] == expected[-1]["balanced_accuracy"]
    assert named.outcome.job["training"]["loop"] == "plain_loop"
    assert handed.outcome.job["training"]["loop"].startswith("object:train:")


def test_no_site_runs_a_loop_that_it_does_not_allow(installed: Any, caplog: pytest.LogCaptureFixture) -> None:
    job = _job(training={"loop": "plain_loop"})
    with pytest.raises(RunError):
        federation.run_job(job, data=_silos())
    assert (
        "TF-614" in caplog.text
        and "training_loops: the job asks for training.loop 'plain_loop'" in caplog.text
    )
    caplog.clear()
    absent = _job(training={"loop": "absent"})
    with pytest.raises(RunError):
        federation.run_job(
            absent, data=_silos(), entries=dict.fromkeys(SILOS, SiteEntry(training_loops=["absent"]))
        )
    assert "TF-101" in caplog.text and "an installed training loop of ['broken', 'plain_loop']" in caplog.text
    caplog.clear()
    broken = _job(training={"loop": "broken"})
    with pytest.raises(RunError):
        federation.run_job(
            broken, data=_silos(), entries=dict.fromkeys(SILOS, SiteEntry(training_loops=["broken"]))
        )
    assert "to be a TrainingLoop" in caplog.text


def test_jobs_without_a_loop_keep_their_hash() -> None:
    assert "loop" not in _job().model_dump(mode="json")["training"]
    assert _job().sha256() != _job(training={"loop": "x"}).sha256()


def test_only_methods_that_train_and_send_allow_a_loop() -> None:
    able = {item.name for item in methods.METHODS if item.own_training is not None}
    assert able == {"fedavg", "fedopt"}
    with pytest.raises(JobError, match=r"training.loop: fedprox trains in a way of its own.*fedavg, fedopt"):
        prepare(_job("fedprox", training={"loop": "x"}))
    with pytest.raises(JobError, match=r"not possible with fedavg: its loss"):
        prepare(_job(training={"loop": "x"}, method_options={"loss": "focal"}))


def test_no_loop_under_record_level_privacy() -> None:
    with pytest.raises(JobError, match=r"training.loop: not possible with `privacy`"):
        _job(training={"loop": "x"}, privacy={"epsilon": 8.0}, weights="uniform")


def _raises(training: LocalTraining) -> float:
    raise ValueError("patient 4711")


def _exits(training: LocalTraining) -> float:
    sys.exit(3)


def _nan(training: LocalTraining) -> float:
    with torch.no_grad():
        next(training.model.parameters()).fill_(torch.nan)
    return 1.0


def _replaces(training: LocalTraining) -> float:
    part: Any = training.model.head
    part.weight = nn.Parameter(part.weight.detach().clone())
    return 1.0


def _widens(training: LocalTraining) -> float:
    training.model.double()
    return 1.0


def _no_loss(training: LocalTraining) -> Any:
    return None


def _frees(training: LocalTraining) -> float:
    """Let nothing train: the flags are ours again afterwards."""
    training.model.requires_grad_(False)
    return 1.0


@pytest.mark.parametrize("wrong", [_raises, _exits, _nan, _replaces, _widens, _no_loss])
def test_what_goes_wrong_in_a_loop_is_a_flag_inside_the_sum(
    wrong: Callable[[LocalTraining], float],
    installed: Callable[[LocalTraining], float],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One silo's loop fails: the model is that of the two others, and no file of the server's tells which."""
    calls: list[int] = []

    def loop(training: LocalTraining) -> float:
        calls.append(len(calls))
        return wrong(training) if len(calls) == 3 else installed(training)

    values = {"training": TRAINING, "min_sites": 2, "folder": tmp_path, **SMALL}
    result = federation.run("fedavg", SILOS, 1, training_loop=loop, **values)
    assert calls == [0, 1, 2]
    assert "TF-304" in caplog.text and result.outcome.trained
    row = next(row.as_json() for row in result.outcome.rows if row.kind == "train")
    assert row["counts"]["failed_silos"] == 1
    left = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "server").rglob("*") if path.is_file()
    )
    assert "TF-304" not in left and "patient 4711" not in left


def test_what_a_loop_lets_train_changes_nothing_of_what_is_sent() -> None:
    result = federation.run("fedavg", SILOS, 1, training_loop=_frees, training=TRAINING, **SMALL)
    assert all(row.as_json().get("counts", {}).get("failed_silos") is None for row in result.outcome.rows)


def test_the_norm_of_an_update_binds_a_loop() -> None:
    def far(training: LocalTraining) -> float:
        with torch.no_grad():
            for item in training.model.parameters():
                item.add_(5.0)
        return 1.0

    def moved(**values: Any) -> float:
        result = federation.run("fedavg", SILOS, 1, training_loop=far, **SMALL, **values)
        start = prepare(_job(rounds=1)).initial_state().model
        steps = [result.state.model[name] - start[name] for name in start]
        return float(torch.cat([step.flatten() for step in steps]).norm())

    free, held = moved(update_bound=64.0), moved(update_norm=0.5)
    assert free > 30 and held == pytest.approx(0.5, abs=1e-3)


def test_a_loop_gets_the_same_records_in_the_job_s_order_and_a_seed_of_its_own() -> None:
    seen: list[tuple[int, int, list[float]]] = []

    def loop(training: LocalTraining) -> float:
        inputs, _ = next(iter(training.batches(0)))
        seen.append((training.round, training.seed, inputs.sum(1).tolist()))
        assert training.model.training and training.num_classes == 2 and len(inputs) == 16
        return 0.0

    for _ in range(2):
        federation.run("fedavg", SILOS, 2, training_loop=loop, training=TRAINING, **SMALL)
    assert [item[0] for item in seen[:6]] == [1, 1, 1, 2, 2, 2]
    assert len({item[1] for item in seen[:6]}) == 6 and seen[:6] == seen[6:]
