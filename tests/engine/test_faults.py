"""A silo that fails is left out and named; that too few silos end a run is in ``test_resume.py``.

The job is the recipe's, so its sums are secure: of four silos one may be lost, and where one is lost
counts stay shut, so that the evaluation of that exchange is missing. One lost at the reveal is in
``test_secure.py``.

The egress guard is at all sites of the run with failures, from the site's own ``local/privacy.json``. The
simulator builds the components of that file, but has no scopes, so that the guard works there as a component
alone; as a scope's filter it is tested in ``tests/flare/test_guard.py``, by the engine's own client runner.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine.faulty import EVENT, WEIGHTS
from tests.support.engine.simulation import Run, export_job, simulate_job, verify

from tightframe.errors import REASONS

FAILED = {"raise": 1, "nan": 2}
"""Round in which training fails at a silo: inside the sum."""
LATE_IN = 3
"""Round in which it is late: outside of it."""
LEAK_IN = 5
"""The last round, in which it tries to send a raw tensor."""
PATIENCE = {"site_timeout": 20, "fetch_timeout": 120}
"""Seconds; a round of a silo takes less than one of a core, and none of it is imports."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of four silos in which site-4 fails four times, each time in another way."""
    folder = tmp_path_factory.mktemp("faulty")
    faults = [
        {"site": ["site-4"], "round": number, "kind": kind, "seconds": 24}
        for kind, number in {**FAILED, "late": LATE_IN, "leak": LEAK_IN}.items()
    ]
    job = export_job(folder, sites=4, fault=faults, changes={**PATIENCE, "min_sites": 3, "rounds": LEAK_IN})
    run = simulate_job(job, folder, threads=4, timeout=900, guarded=True)
    assert run.code == 0, run.output
    return run


def _row(run: Run, number: int) -> dict[str, Any]:
    return next(row for row in run.rows if row["round"] == number and row["kind"] == "train")


def _without_site_4(run: Run, number: int, code: str, others: list[str], of: int) -> None:
    """A round, its lines for people, and what the server's folder must not hold."""
    row = _row(run, number)
    assert row["silos"] == others and row["dropped"] == {"site-4": code}
    assert (
        f"round {number} of {run.outcome['rounds']}: {len(others)} of {of} silos; "
        f"without site-4 ({code}) | counts and class sums stay shut, so the evaluation is missing"
    ) in run.output
    assert f"site-4 was left out of round {number}: {code}" in run.output
    assert not row["static_opened"]
    # The sum of a round tells how the model does that it began with.
    if number == 1:
        assert not [row for row in run.rows if row["kind"] == "start"]
    else:
        assert _row(run, number - 1)["evaluation"] is None
    assert run.outcome["trained"] is True and (run.server / "model.safetensors").is_file()
    searched = [path for path in (run.workspace / "server").rglob("*") if path.is_file()]
    assert any(path.name == "outcome.json" for path in searched)
    for path in searched:
        assert b"Mustermann" not in path.read_bytes(), f"a silo's own message reached {path.name}"


def test_the_run_goes_on_with_the_other_silos_and_says_so(faulty: Run) -> None:
    number, four = LATE_IN, [f"site-{place}" for place in range(1, 5)]
    _without_site_4(faulty, number, "TF-502", four[:3], of=4)
    following = _row(faulty, number + 1)
    assert following["silos"] == four, "it is back in the next round"
    assert following["static_opened"] and _row(faulty, number)["evaluated_by"] == four
    assert following["dropped"] == {} and faulty.outcome["evaluated_by"] == four


@pytest.mark.parametrize("kind", FAILED)
def test_a_silo_that_fails_in_training_is_counted_and_not_named(faulty: Run, kind: str) -> None:
    row = _row(faulty, FAILED[kind])
    assert row["silos"] == [f"site-{place}" for place in range(1, 5)] and row["dropped"] == {}
    assert row["counts"]["failed_silos"] == 1 and row["static_opened"]
    assert f"round {FAILED[kind]}: 1 silo of 4 could not contribute" in faulty.output
    for path in (faulty.workspace / "server").rglob("*"):
        assert not path.is_file() or b"Mustermann" not in path.read_bytes(), path.name


def test_a_raw_tensor_is_stopped_and_the_run_goes_on(faulty: Run) -> None:
    """Everything else of a whole secure run passes the guard."""
    last, others = _row(faulty, LEAK_IN), [f"site-{place}" for place in range(1, 4)]
    assert "TF-730" in REASONS and last["dropped"] == {"site-4": "TF-730"}
    assert last["silos"] == others
    assert last["evaluated_by"] == [*others, "site-4"], "only that result failed"
    log = (faulty.workspace / "site-4" / "log.txt").read_text()
    assert "TF-730: the guard stopped a result of the task 'contribute'" in log
    assert f"TF-730: the guard stopped a federated event ({EVENT})" in log
    for site in others:
        assert "TF-730" not in (faulty.workspace / site / "log.txt").read_text()
        assert (faulty.workspace / site / "simulate_job" / "report.html").is_file()
    assert (faulty.server / "report.html").is_file(), "server and silos make their pages by themselves"
    for path in (faulty.workspace / "server").rglob("*"):
        assert not path.is_file() or str(WEIGHTS[0]).encode() not in path.read_bytes(), path
    assert EVENT not in (faulty.workspace / "server" / "log.txt").read_text()


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of five silos in which two die: while all set up, and in round 2."""
    folder = tmp_path_factory.mktemp("losing")
    faults = [
        {"site": ["site-5"], "task": "confirm", "kind": "killed"},
        {"site": ["site-4"], "round": 2, "kind": "killed"},
    ]
    changes = {**PATIENCE, "fetch_timeout": 12, "min_sites": 3, "rounds": 3}
    job = export_job(folder, sites=5, fault=faults, changes=changes)
    run = simulate_job(job, folder, threads=5, timeout=900)
    assert run.code == 0, run.output
    return run


def test_a_silo_that_dies_during_the_setup_makes_a_smaller_roster(losing: Run) -> None:
    """In `confirm`, which is after the silo has enrolled; in `enroll`: ``tests/rounds/secure``."""
    assert losing.outcome["trained"] is True
    assert losing.outcome["not_enrolled"] == {"site-5": "TF-502"}
    assert "site-5 was not enrolled: TF-502 (late)" in losing.output
    sums = losing.outcome["sums"]
    assert "at least 3 of 4 silos;" in sums and "threshold 3" in sums
    four = ["site-1", "site-2", "site-3", "site-4"]
    start, first = losing.rows[:2]
    assert start["evaluated_by"] == first["silos"] == four
    assert start["static_opened"] and first["static_opened"], "the roster that is left is whole"
    code, said = verify(losing.server / "transcript.jsonl", losing.server / "simulated_root.pem")
    assert code == 0 and "4: site-1, site-2, site-3, site-4" in said, said


def test_the_run_goes_on_without_a_silo_that_has_died(losing: Run) -> None:
    three = ["site-1", "site-2", "site-3"]
    _without_site_4(losing, 2, "TF-502", three, of=5)
    third = _row(losing, 3)
    assert third["silos"] == three
    assert _row(losing, 2)["evaluation"] is None and third["evaluation"] is None
    assert losing.outcome["evaluation"] is None
    assert "Test metrics: missing (counts stay shut after a drop-out)" in losing.output


def test_missing_data_is_an_error_before_any_training(
    export: Callable[..., Path], simulate: Callable[..., Any], tmp_path: Path
) -> None:
    sites = {
        f"site-{i}": {"data": {"fed_isic2019": {"root": str(tmp_path / "nowhere"), "center": i - 1}}}
        for i in (1, 2, 3)
    }
    run = simulate(export(sites=3), threads=3, site_config={"sites": sites}, engine_command=True)
    assert run.code != 0
    assert "site-1, site-2 and site-3 refused: TF-203" in run.output and "nowhere" in run.output
    assert not (run.server / "metrics.jsonl").exists()


def test_a_bad_job_is_an_error_before_any_training_and_all_of_it_is_named(
    export: Callable[..., Path], simulate: Callable[..., Any]
) -> None:
    wrong = {"bogus": 1, "rounds": "four", "min_sites": 9}
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
