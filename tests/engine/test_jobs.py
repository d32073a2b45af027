"""Committed jobs, made small, give through NVFlare what they give in one process, bit for bit.

Among them what a method adds to the sums: a second phase in a round, and memory under the class rules;
`test_parity` has FedMR and its prototypes, `tests/docs/test_doors.py` a table and personal models. A message
has no field of a method's own, so that the other jobs run in one process alone. Noise has no seed:
`test_privacy` has a private job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine.simulation import REDUCED, assert_equal, run_alone, simulate_job
from tests.support.runs import few_twins

from tightframe.config.job import JobConfig
from tightframe_app.jobs import folders, recipes

SITES = ["site-1", "site-2", "site-3"]
JOBS: dict[str, dict[str, Any]] = {
    # The memory of FedAvg_ETF acts from the third round on under the class rules. Here with plain sums, by
    # name, where it is secure in one process: the totals are the same.
    "fedavg_etf_isic": {**REDUCED, "rounds": 3, "summation": "plain"},
    "fedilc_eicu": {
        "dataset_options.twin_scale": 0.02,
        "dataset_options.drugs": 40,
        "model_options.widths": [16, 8],
        "rounds": 2,
    },
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_in_nvflare_equals_the_secure_one_in_process(name: str, tmp_path: Path) -> None:
    recipe = recipes.get(name)
    job = recipe.job(sites=SITES, changes=JOBS[name])
    done = simulate_job(_exported(job, tmp_path / name), tmp_path, threads=len(SITES))
    assert done.code == 0, done.output
    secure = recipe.job(sites=SITES, changes=JOBS[name] | {"summation": "secure"})
    expected = run_alone(_exported(secure, tmp_path / "secure"), tmp_path / "alone")
    assert_equal(done.server, expected)
    if job.summation == "plain":
        assert "plain, as the job asks by name" in done.output
        assert not (done.server / "transcript.jsonl").exists(), "nothing was signed"
    assert (done.outcome["personal"] is not None) == job.personalise


REDUCED_ALONE: dict[str, dict[str, Any]] = {
    "fedavg_eicu": JOBS["fedilc_eicu"],
    "fedetf_isic": {**REDUCED, "method_options.personal_alternations": 1},
    "fedetf_heart": {"rounds": 2, "training.epochs": 1, "method_options.personal_alternations": 1},
    # Nothing to train, and one round.
    "fed3r_isic": {
        "dataset_options.image_size": 16,
        "model_options.J": 2,
        "model_options.L": 2,
        "model_options.width": 24,
    },
    "fed3r_eicu": {"dataset_options.twin_scale": 0.02, "dataset_options.drugs": 40},
    "fedncm_heart": {"class_rules": "off"},  # of three centres one has no healthy record
}
ALONE = [
    recipe.name
    for recipe in recipes.RECIPES
    if recipe.name not in ("fedmr_isic", *JOBS) and not recipe.job().privacy
]


@pytest.mark.parametrize("name", ALONE)
def test_another_job_trains_in_one_process(name: str, tmp_path: Path) -> None:
    """With secure sums; tables with plain ones, too. Their methods on images: the same, by other records.

    FedNH's two kinds of sums are compared in its own tests.
    """
    results = {}
    for summation in ("secure",) if name.endswith("_isic") else ("secure", "plain"):
        changes = REDUCED_ALONE.get(name, REDUCED) | {"summation": summation}
        job = recipes.get(name).job(sites=SITES, changes=changes)
        with few_twins():
            folder = _exported(job, tmp_path / f"{summation}_job")
            results[summation] = run_alone(folder, tmp_path / summation)
    if "plain" in results:
        assert_equal(results["plain"], results["secure"])
    outcome = json.loads((results["secure"] / "outcome.json").read_text())
    assert outcome["trained"] is True and (outcome["personal"] is not None) == job.personalise


def _exported(job: JobConfig, folder: Path) -> Path:
    folders.write_job(folders.job_files(job), folder)
    return folder
