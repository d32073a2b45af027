"""Silos drawn for each round: as many as asked, by the seed, and only where the sum allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightframe import federation
from tightframe.data.image_sets import open_silos
from tightframe.errors import JobError
from tightframe.results.rows import Row

OPTIONS = {"partition": "iid", "silos": 6, "subset": 180, "test_subset": 60, "test": "own"}
RECORDS = open_silos("digits", **OPTIONS)
SILOS = list(RECORDS)
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": OPTIONS,
    "model_options": {"widths": [8, 8, 16]},
    "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.05},
    "summation": "plain",
}


def _run(method: str = "fedavg", *, rounds: int = 4, **values: Any) -> tuple[federation.Result, list[Row]]:
    result = federation.run(method, RECORDS, rounds, min_sites=2, **{**SMALL, "seed": 5, **values})
    return result, [row for row in result.outcome.rows if row.kind == "train"]


@pytest.mark.whole
def test_each_round_is_of_as_many_silos_as_asked_and_not_always_of_the_same() -> None:
    result, rows = _run(sites_per_round=2)
    drawn = [tuple(row.silos) for row in rows]
    assert [len(silos) for silos in drawn] == [2, 2, 2, 2]
    assert len(set(drawn)) > 1
    assert all(not row.dropped for row in rows)  # who was not asked is no drop-out
    closing = result.outcome.rows[-1]
    assert closing.kind == "closing" and closing.silos == SILOS


@pytest.mark.whole
def test_the_draw_is_the_seeds_alone() -> None:
    first, again, other = (_run(sites_per_round=2, seed=seed, rounds=3) for seed in (5, 5, 6))
    assert [row.silos for row in first[1]] == [row.silos for row in again[1]]
    assert [row.silos for row in first[1]] != [row.silos for row in other[1]]
    for name, value in first[0].state.model.items():
        assert torch.equal(value, again[0].state.model[name])


@pytest.mark.whole
def test_a_round_is_the_mean_over_the_silos_drawn() -> None:
    one_each = {**SMALL, "seed": 5, "weights": "uniform"}
    sampled, rows = _run(sites_per_round=2, rounds=1, weights="uniform")
    everyone = federation.run("fedavg", RECORDS, 1, min_sites=6, **one_each)
    # With its records in a run of its own, a silo has the same start and the same random streams.
    alone = [
        federation.run("fedavg", {site: RECORDS[site]}, 1, **one_each).state.model for site in rows[0].silos
    ]
    for name, value in sampled.state.model.items():
        torch.testing.assert_close(value, (alone[0][name] + alone[1][name]) / 2, rtol=0, atol=1e-6)
    assert any(
        not torch.equal(value, everyone.state.model[name]) for name, value in sampled.state.model.items()
    )


METHODS = ["scaffold", "fednova", "moon", "fedetf", "fednh", "fedavg_etf", "fedrod", "feddyn", "fedcurv"]


@pytest.mark.whole
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_with_silos_that_come_and_go(method: str) -> None:
    small = {"model": "mlp", "model_options": {"widths": [16]}}
    small["training"] = {**SMALL["training"], "momentum": 0.0}
    result, rows = _run(method, sites_per_round=3, class_rules="off", rounds=3, **small)
    assert len(rows) == 3
    assert all(bool(torch.isfinite(value).all()) for value in result.state.model.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"summation": "secure"}, "not possible with secure sums"),
        ({"sites_per_round": 7}, "at most the number of sites (6), but got 7"),
        ({"min_sites": 3}, "at most `sites_per_round` (2), but got 3"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(values: dict[str, Any], words: str) -> None:
    asked = {**SMALL, "sites_per_round": 2, "min_sites": 2, **values}
    with pytest.raises(JobError) as caught:
        federation.run("fedavg", RECORDS, 1, **asked)
    assert words in str(caught.value)
