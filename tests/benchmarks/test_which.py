"""The comparison of methods on clinical sets: its jobs, and what it shows of runs. Nothing is run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def which(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import which

    return which


def test_one_seed_has_no_interval_and_what_did_not_run_no_row(which: ModuleType) -> None:
    runs = {
        "heart FedAvg 0": {"all": 0.75, "own": 0.5, "others": 0.25},
        "heart Ditto 0": {"all": 0.5, "own": 0.75, "others": 0.25},
        "heart FedRep 0": {"error": "TF-101"},
    }
    shown = which.Shown(runs, "heart", [0])
    assert shown.best == "FedAvg" and shown.effects(False) == []
    assert [line for line in shown.lines() if line.startswith(("| F", "| D"))] == [
        "| FedAvg | 0.750 (1) |  | 0.500 (1) |  | -0.250 | 0.250 (1) | -0.500 |",
        "| FedRep |  |  |  |  |  |  |  | TF-101",
        "| Ditto | 0.500 (1) | -0.250 | 0.750 (1) |  | +0.000 | 0.250 (1) | -0.500 |",
    ]


def test_own_models_are_compared_with_the_best_for_all_seed_by_seed(which: ModuleType) -> None:
    runs = {f"heart FedNCM {seed}": {"all": 0.5 + seed / 4, "own": 0.0} for seed in range(2)}
    runs |= {f"heart Ditto {seed}": {"all": 0.25, "own": 0.75 + seed / 4} for seed in range(2)}
    shown = which.Shown(runs, "heart", range(2))
    assert shown.less("Ditto", "own", "FedNCM", "all") == [0.25, 0.25]
    (found,) = shown.effects(True)
    assert (found["method"], found["baseline"], found["mean"], found["seeds"]) == (
        "ditto",
        "the global FedNCM",
        0.25,
        2,
    )
    assert "--free" in found["command"] and found["setting"].endswith("without hospitals' rules")


def test_jobs_are_as_hospitals_run_them_or_free(which: ModuleType) -> None:
    case = which.CASES["ham"](Path())
    names = ("a", "b", "c")
    job = which.job_of(case, "fedcgs", {}, names, 3, free=False)
    assert (job.summation, job.class_rules, job.update_norm) == ("secure", "on", 100.0)
    assert (job.model_options["width"], job.model_options["seed"]) == (97, 3)
    assert job.method_options == {"priors": "balanced", "shrinkage": 0.4} and not job.personalise
    free = which.job_of(case, "fedcgs", {}, names, 3, free=True)
    assert (free.summation, free.class_rules, free.model_options["width"]) == ("plain", "off", 256)
    assert which.job_of(case, "ditto", {}, names, 3, free=False).personalise
    repeated = which.job_of(which.case_of("eicu-100", Path()), "fedavg", {}, names, 0, free=False)
    assert repeated.dataset_options == {"drugs": 920, "train_hospitals": 100, "oversample_minority": True}
