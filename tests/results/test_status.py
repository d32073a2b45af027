"""Where a run stands, as a watcher sees it while it goes on, from another thread or in between."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.results.building import evaluated, row, spent
from tests.support.results.building import status as begun

from tightframe import federation
from tightframe.data.image_sets import open_silos
from tightframe.errors import RunError
from tightframe.results.status import MOST_MOMENTS
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.silo.session import SiloSession

SILOS = ["silo-0", "silo-1", "silo-2", "silo-3"]


def test_what_is_asked_what_came_and_what_was_late() -> None:
    status = begun("job", 3, (8.0, 1e-5)).enrolled(["b", "a", "c"], {"d": "TF-701"})
    status = status.summing("train", 2, 0, 1).answer("c").answer("a")
    assert (status.state, status.round, status.phase, status.answered) == ("summing", 2, 1, ("a", "c"))
    missing = {"b": "TF-502", "c": "TF-301"}
    last = row(2, "train", ["a"], missing, 1.5, 10, 20, training={"loss": 0.7}, privacy=spent(2, 1, 4.0))
    status = status.summed(last)
    told = status.as_json()
    assert told["answered"] == ["a"] and told["late"] == ["b"] and told["dropped"] == {"c": "TF-301"}
    assert told["joined"] == ["a", "b", "c"] and told["refused"] == {"d": "TF-701"}
    assert (told["loss"], told["epsilon"], told["epsilon_promised"], told["delta"]) == (0.7, 4.0, 8.0, 1e-5)
    assert told["privacy"]["range"] == [2.0, 4.0]
    status = status.summing("closing", 3, 0, 1)
    now = status.as_json()
    assert now["answered"] == [] and now["late"] == ["b"] and now["dropped"] == {"c": "TF-301"}
    status = status.summed(row(3, "closing", ["a"], {}, 0.5, 1, 2))
    later = status.ended(trained=False, reason="TF-501: too few silos in round 3: silo x").as_json()
    assert later["late"] == [] and later["dropped"] == {} and later["epsilon"] == 4.0 and later["loss"] == 0.7
    assert (later["seconds"], later["bytes_down"], later["bytes_up"]) == (2.0, 11, 22)
    assert (later["state"], later["reason"]) == ("stopped", "TF-501")
    json.dumps(later, allow_nan=False)


def test_a_noisy_evaluation_is_called_so() -> None:
    exact = begun("job", 3).evaluated(row(1, "train", ["a"], evaluation=evaluated(balanced_accuracy=0.5)))
    assert exact.as_json()["noisy"] is False
    noisy = evaluated(balanced_accuracy=None, noisy=True)
    told = exact.evaluated(row(1, "train", ["a"], evaluation=noisy)).as_json()
    assert told["noisy"] is True and told["balanced_accuracy"] is None and told["evaluated_round"] == 1


def test_the_course_has_each_round_once_and_stays_small() -> None:
    ranged = spent(2, 1, 4.0)
    value = evaluated(balanced_accuracy=0.5, balanced_accuracy_interval=(0.4, 0.6))
    status = begun("job", 3, (8.0, 1e-5)).evaluated(row(0, "start", [], evaluation=evaluated()))
    assert status.course == (), "no number, no point"
    status = status.summed(row(1, "train", ["a"], training={"loss": 0.7}))
    status = status.summed(row(2, "train", ["a"], training={"loss": 0.6}, privacy=ranged))
    status = status.evaluated(row(1, "train", ["a"], evaluation=value)).summed(row(2, "closing", ["a"]))
    assert status.as_json()["course"] == [
        {
            "round": 1,
            "loss": 0.7,
            "balanced_accuracy": 0.5,
            "balanced_accuracy_interval": [0.4, 0.6],
            "epsilon": None,
        },
        {
            "round": 2,
            "loss": 0.6,
            "balanced_accuracy": None,
            "balanced_accuracy_interval": None,
            "epsilon": [2.0, 4.0],
        },
    ]
    for number in range(1, 5000):
        status = status.summed(row(number, "train", ["a"], training={"loss": float(number)}))
        if number % 263 == 0:
            status = status.evaluated(row(number, "train", ["a"], evaluation=value))
        assert len(status.course) <= MOST_MOMENTS
    rounds = [item.round for item in status.course]
    assert rounds[0] == 1 and rounds[-1] == 4999 and rounds == sorted(set(rounds))
    assert {*range(263, 5000, 263)} < set(rounds), "models that are evaluated now and then stay in the curve"
    assert max(late - early for early, late in pairwise(rounds)) < 5000 / MOST_MOMENTS * 4


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a watcher would have seen at each task of ``silo-1``."""
    seen: list[dict[str, Any]] = []
    made: list[Coordinator] = []
    run, handle = Coordinator.run, SiloSession.handle

    def running(self: Coordinator, transport: Any) -> Any:
        made.append(self)
        try:
            return run(self, transport)
        finally:
            seen.append(self.record.status.as_json())

    def handling(self: SiloSession, task: str, message: Any) -> Any:
        if self.context.name == "silo-1":
            seen.append({"task": task, **made[0].record.status.as_json()})
        if self.context.name == "silo-3" and (message.get("kind"), message.get("round")) == ("train", 2):
            raise RunError("no power", code="TF-503")
        return handle(self, task, message)

    monkeypatch.setattr(Coordinator, "run", running)
    monkeypatch.setattr(SiloSession, "handle", handling)
    return seen


def _run(folder: Path, least: int) -> federation.Result:
    options = {"partition": "iid", "silos": 4, "test": "own"}
    return federation.run(
        "fedavg",
        open_silos("digits", **options),
        2,
        dataset="digits",
        dataset_options=options,
        model_options={"widths": [8, 8]},
        training={"batch_size": 64},
        summation="plain",
        min_sites=least,
        folder=folder,
    )


def test_a_run_as_it_is_seen_from_outside(tmp_path: Path, watched: list[dict[str, Any]]) -> None:
    result = _run(tmp_path, 3)
    *during, last = watched
    shown = [(item["task"], item["state"], item["kind"], item["round"]) for item in during]
    assert shown == [
        ("enroll", "enrolling", None, 0),
        ("contribute", "summing", "train", 1),
        ("contribute", "summing", "train", 2),
        ("contribute", "summing", "closing", 2),
    ]
    assert all(item["joined"] == SILOS and item["answered"] == ["silo-0"] for item in during[1:])
    second, closing = during[2:]
    rows = {(row.kind, row.round): row for row in result.outcome.rows}
    start, first = rows["start", 0], rows["train", 1]
    assert start.test is not None
    assert second["balanced_accuracy"] == start.test.balanced_accuracy
    assert (second["evaluated_round"], closing["evaluated_round"]) == (0, 1)
    assert second["loss"] == first.training["loss"] and second["seconds"] == first.seconds
    final = result.outcome.final()
    assert final is not None and final.test is not None
    assert last["balanced_accuracy"] == final.test.balanced_accuracy
    assert (last["state"], last["reason"], last["epsilon"], last["privacy"]) == ("trained", None, None, None)
    assert last["bytes_up"] == sum(row.bytes_up for row in result.outcome.rows)


def test_a_run_that_stops_says_who_was_missing_and_the_code(
    tmp_path: Path, watched: list[dict[str, Any]]
) -> None:
    with pytest.raises(RunError, match="TF-501"):
        _run(tmp_path, 4)
    last = watched[-1]
    assert (last["state"], last["reason"], last["dropped"]) == ("stopped", "TF-501", {"silo-3": "TF-503"})
    assert last["answered"] == SILOS[:3] and last["round"] == 2
