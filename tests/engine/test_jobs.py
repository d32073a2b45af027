"""Every committed job, made small, gives through NVFlare what it gives in one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import SMALL, assert_equal, run_alone, simulate_job

from tightframe_app.jobs import folders, recipes

pytestmark = pytest.mark.engine

SITES = ["site-1", "site-2", "site-3"]
BY_DATASET: dict[str, dict[str, Any]] = {
    "fed_isic2019": {**SMALL, "rounds": 2},
    "eicu": {
        "dataset_options.twin_scale": 0.02,
        "dataset_options.drugs": 40,
        "model_options.widths": [16, 8],
        "rounds": 2,
    },
    "fed_heart_disease": {"rounds": 2, "training.epochs": 1},
}
# The memory of FedAvg_ETF acts from the third round on under the class rules.
OF_JOB: dict[str, dict[str, Any]] = {"fedavg_etf_isic": {"rounds": 3}}
# `test_parity` has FedMR; noise has no seed, so `test_privacy` has the private ones.
JOBS = [recipe.name for recipe in recipes.RECIPES if recipe.name != "fedmr_isic" and not recipe.job().privacy]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_in_nvflare_equals_the_one_in_process(name: str, tmp_path: Path) -> None:
    recipe = recipes.get(name)
    changes = BY_DATASET[recipe.values["dataset"]] | OF_JOB.get(name, {})
    job = recipe.job(sites=SITES, changes=changes)
    folder = tmp_path / name
    folders.write_job(folders.job_files(job), folder)
    done = simulate_job(folder, tmp_path, threads=len(SITES))
    assert done.code == 0, done.output
    expected = run_alone(folder, tmp_path / "alone")
    assert_equal(done.server, expected)
    assert (done.outcome["personal"] is not None) == job.personalise
    if job.personalise:
        for site in SITES:
            ours = done.workspace / site / "simulate_job" / "personal_model.safetensors"
            assert ours.read_bytes() == (tmp_path / "alone" / site / ours.name).read_bytes()
