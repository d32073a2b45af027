"""A silo that fails is left out and named; too few silos end the run with the truth.

The job is the recipe's, so its sums are secure: of six silos one may be lost, and where one is lost
counts stay shut, so that the evaluation of that exchange is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("kind", "code"), [("raise", "TF-503"), ("nan", "TF-301"), ("late", "TF-502"), ("killed", "TF-502")]
)
def test_the_run_goes_on_with_five_silos_and_says_so(
    export: Callable[..., Path], simulate: Callable[..., Any], kind: str, code: str
) -> None:
    fault = {"site": ["site-4"], "round": 1, "kind": kind, "seconds": 46}
    patience = {"late": 40, "killed": 40}.get(kind, 120)
    changes = {"site_timeout": patience, "fetch_timeout": 40}
    run = simulate(export(fault=fault, changes=changes), threads=6)
    assert run.code == 0, run.output
    five = ["site-1", "site-2", "site-3", "site-5", "site-6"]
    first = next(row for row in run.rows if row["round"] == 1 and row["kind"] == "train")
    assert first["silos"] == five and first["dropped"] == {"site-4": code}
    assert f"without site-4 ({code})" in run.output
    assert f"site-4 was left out of round 1: {code}" in run.output
    # The sum of round 1 would have told how the initial model does.
    assert not first["static_opened"] and not [row for row in run.rows if row["kind"] == "start"]
    assert "counts and class sums stay shut, so the evaluation is missing" in run.output
    second = next(row for row in run.rows if row["round"] == 2 and row["kind"] == "train")
    if kind == "killed":
        assert second["silos"] == five and first["evaluation"] is None
        assert run.outcome["evaluation"] is None
        assert "Test metrics: missing (counts stay shut after a drop-out)" in run.output
    else:
        six = sorted([*five, "site-4"])
        assert second["silos"] == six, "it is back in the next round"
        assert second["static_opened"] and first["evaluated_by"] == six and run.outcome["evaluated_by"] == six
    assert run.outcome["trained"] is True and (run.server / "model.safetensors").is_file()
    searched = [path for path in (run.workspace / "server").rglob("*") if path.is_file()]
    assert any(path.name == "outcome.json" for path in searched)
    for path in searched:
        assert b"Mustermann" not in path.read_bytes(), f"a silo's own message reached {path.name}"


def test_fewer_than_the_minimum_end_the_run_and_are_named(
    export: Callable[..., Path], simulate: Callable[..., Any]
) -> None:
    fault = {"site": ["site-2", "site-5"], "round": 1, "kind": "raise"}
    run = simulate(export(fault=fault), threads=6, engine_command=True)
    assert run.code != 0
    assert "TF-501" in run.output and "too few silos in round 1: expected at least 5, but got 4" in run.output
    assert "site-2: TF-503" in run.output and "site-5: TF-503" in run.output
    assert "NOT TRAINED" in run.output
    assert run.outcome["trained"] is False


def test_missing_data_is_an_error_before_any_training(
    export: Callable[..., Path], simulate: Callable[..., Any], tmp_path: Path
) -> None:
    sites = {
        f"site-{i}": {"data": {"fed_isic2019": {"root": str(tmp_path / "nowhere"), "center": i - 1}}}
        for i in (1, 2, 3)
    }
    run = simulate(export(sites=3), threads=3, site_config={"sites": sites}, engine_command=True)
    assert run.code != 0
    assert "TF-203" in run.output and "site-1 refused" in run.output and "nowhere" in run.output
    assert not (run.server / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"bogus": 1, "rounds": "four", "min_sites": 9},
        # Looked at when the job's own values are right.
        {"method_options": {"mu": 1.0}},
    ],
    ids=["values", "method"],
)
def test_a_bad_job_is_an_error_before_any_training_and_all_of_it_is_named(
    export: Callable[..., Path], simulate: Callable[..., Any], wrong: dict[str, Any]
) -> None:
    folder = export(sites=3)
    for name in ("server", "client"):
        path = folder / "app" / "config" / f"config_fed_{name}.json"
        config = json.loads(path.read_text())
        place = config["workflows"][0] if name == "server" else config["executors"][0]["executor"]
        place["args"] |= wrong
        path.write_text(json.dumps(config))
    run = simulate(folder, threads=3, engine_command=True)
    assert run.code != 0
    assert "TF-101" in run.output and all(key in run.output for key in wrong)
    assert not (run.server / "metrics.jsonl").exists()
