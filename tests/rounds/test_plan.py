"""The plan of a run, and that a rider needs no more than its own file and a place in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.jobs import SMALL
from tests.support.runs import twin

from tightframe import federation
from tightframe.data.base import SiloData
from tightframe.errors import RunError
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.results.rows import read_rows
from tightframe.rounds.plan import KINDS, RunPlan
from tightframe.rounds.riders import class_rules, epsilon, evaluation, failures
from tightframe.rounds.server.collecting import Collector
from tightframe.rounds.setup import prepare

FOUR = ["site-1", "site-2", "site-3", "site-4"]


def records() -> dict[str, SiloData]:
    return {site: twin(site) for site in FOUR}


PRIVATE = {"weights": "uniform", "privacy": {"epsilon": 20.0, "noise_multiplier": 1.5, "evaluation": "noisy"}}


def setup_of(method: str = "fedmr", **changes: Any) -> Any:
    return prepare({**SMALL, "method": method, "sites": FOUR, "min_sites": 3, "rounds": 2, **changes})


def test_exact_evaluations_are_of_as_many_models_as_the_job_says() -> None:
    """A round evaluates the model that it begins with, of the round before; the closing the last one."""

    def evaluated(**changes: Any) -> list[int]:
        return [item.round for item in setup_of(**changes).plan if item.evaluating is not None]

    assert evaluated(rounds=10) == [*range(1, 11), 10], "all 11 models, the start's among them"
    assert len(evaluated(rounds=50)) == 11
    assert evaluated(rounds=50, evaluation={"models": 6}) == [1, 11, 21, 31, 41, 50]
    assert evaluated(rounds=50, evaluation={"models": 1}) == [50]


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("fedmr", {}, ["train 1/0", "train 2/0", "closing 2/0"]),
        ("ccvr", {}, ["train 1/0", "train 2/0", "after 2/0", "closing 2/0"]),
        (
            "fedavg",
            {"method_options": {"loss": "focal"}, "personalise": True},
            ["statistics 0/0", "statistics 0/1", "train 1/0", "train 2/0", "closing 2/0", "personal 2/0"],
        ),
        ("fedmr", PRIVATE, ["train 1/0", "train 2/0", "closing 2/0"]),
    ],
)
def test_a_plan_lists_every_exchange_in_order(
    method: str, changes: dict[str, Any], expected: list[str]
) -> None:
    plan = setup_of(method, **changes).plan
    listed = [f"{item.kind} {item.round}/{item.index}" for item in plan]
    if method == "ccvr":  # holders of classes first, where a method asks for class sums after the rounds
        listed = list(dict.fromkeys(item.rpartition("/")[0] + "/0" for item in listed))
    assert listed == expected
    assert [item.kind for item in plan] == sorted((item.kind for item in plan), key=KINDS.index)


def test_fields_stand_in_the_order_method_epsilon_classes_failures_evaluation() -> None:
    (exchange,) = setup_of().plan.round(1)
    names = [item.name for item in exchange.carrying(True).schema.fields]
    first = names.index(class_rules.HOLDERS)
    assert names[first + 1] == failures.FAILED and names[first + 2].startswith("evaluation/")
    assert not any(name.startswith(("classes/", "evaluation/")) for name in names[:first])
    (exchange,) = setup_of(**PRIVATE, rounds=2).plan.round(2)
    names = [item.name for item in exchange.carrying(True).schema.fields]
    told = names.index(epsilon.BINS)
    assert names[told : told + 2] == [epsilon.BINS, epsilon.SHOWN] and class_rules.HOLDERS not in names
    assert not any(name.startswith("evaluation/") for name in names[:told])


@pytest.mark.parametrize(
    ("kind", "number", "index"),
    [
        ("train", 0, 0),
        ("train", 3, 0),
        ("train", 1, 1),
        ("train", 1, -1),
        ("statistics", 0, 0),
        ("personal", 2, 0),
        ("closing", 1, 0),
        ("closing", 2, 1),
        ("sums", 1, 0),
    ],
)
def test_what_is_not_planned_is_not_found(kind: str, number: int, index: int) -> None:
    with pytest.raises(RunError, match=r"^TF-505: "):
        setup_of().plan.find(kind, number, index)


AUGMENTED = "augmented/records"


def counting(phase: Phase) -> Phase:
    """A rider as somebody would add it: silos count, the server notes and remembers."""

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        made = phase.contribute(silo, received, state)
        return replace(made, tensors={**made.tensors, AUGMENTED: torch.tensor(3.0, dtype=torch.float64)})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own = totals.get(AUGMENTED)
        reading = phase.read(state, {k: v for k, v in totals.items() if k != AUGMENTED}, cohort)
        return reading if own is None else reading.noting("augmented", float(own))

    return replace(
        phase, schema=phase.schema + Schema((Field(AUGMENTED, ()),)), contribute=contribute, read=read
    )


@pytest.mark.whole
def test_a_rider_needs_its_own_file_and_the_plan_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ruled = RunPlan._ruled
    monkeypatch.setattr(RunPlan, "_ruled", lambda self, phase: counting(ruled(self, phase)))
    caplog.set_level("INFO")
    shared = {name: SMALL[name] for name in ("dataset_options", "model_options", "training")}
    result = federation.run("fedmr", records(), 2, dataset=SMALL["dataset"], folder=tmp_path, **shared)
    rows = read_rows(tmp_path / "server")
    assert [row.counts for row in rows if row.kind == "train"] == [{"augmented": 12.0}] * 2, (
        "four silos, 3 each"
    )
    assert "counts" not in rows[-1].as_json() and rows[-1].kind == "closing"
    assert " | augmented 12 | " in caplog.text
    assert result.outcome.rows[-2].evaluation


@pytest.mark.whole
def test_whoever_has_state_totals_and_cohort_computes_the_next_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second party, with the setup of its own, follows a run from what was opened alone."""
    opened: list[dict[str, Any]] = []
    collect = Collector.collect

    def seen(self: Collector, *arguments: Any, **named: Any) -> Any:
        row, totals = collect(self, *arguments, **named)
        opened.append(dict(totals))
        return row, totals

    monkeypatch.setattr(Collector, "collect", seen)
    shared = {name: SMALL[name] for name in ("dataset_options", "model_options", "training")}
    values = {"dataset": SMALL["dataset"], "weights": "uniform", "seed": 3, **shared}
    result = federation.run("fedmr", records(), 3, folder=tmp_path, **values)

    setup = setup_of(rounds=3, **values, job_name="fedmr-in-process", summation="secure")
    state = setup.initial_state()
    cohort = dict.fromkeys(FOUR, 1.0)
    exchanges = [item for item in setup.plan if item.training]
    for exchange, totals in zip(exchanges, opened[:3], strict=True):
        reading = exchange.advance(state, totals, Cohort(exchange.round, cohort, 1.0))
        assert evaluation.NOTE in reading.notes
        state = reading.state
    assert class_rules.holders_in(state) is not None
    for name, value in result.state.model.items():
        assert torch.equal(state.model[name], value), name
    assert set(state.extra) == set(result.state.extra)
    for name, value in result.state.extra.items():
        np.testing.assert_array_equal(state.extra[name].numpy(), value.numpy())
