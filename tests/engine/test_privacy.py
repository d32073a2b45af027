"""The job with differential privacy through NVFlare, a process for every task: charged, kept, told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.conftest import SMALL, simulate_job

from tightframe.privacy.ledger.chain import read_ledger
from tightframe_app import recipes

pytestmark = pytest.mark.engine

SITES = ["site-1", "site-2", "site-3"]


def test_each_silos_ledger_outlasts_its_processes(tmp_path: Path) -> None:
    # Every record in every step: what sampled steps cost takes a second in each of many processes.
    changes = {**SMALL, "rounds": 2, "privacy.noise_multiplier": 2.0, "training.batch_size": 512}
    job = recipes.get("fedmr_isic_dp").job(sites=SITES, changes=changes)
    folder = tmp_path / "private"
    recipes.write_job(recipes.job_files(job), folder)
    done = simulate_job(folder, tmp_path, threads=1)
    assert done.code == 0, done.output
    assert done.outcome["privacy"]["epsilon"] == 8.0 and done.outcome["evaluation"] is None
    for site in SITES:
        state = done.workspace / site / "simulate_job" / "silo_state"
        entries = read_ledger(state / "privacy" / site / "ledger.sqlite", check=None).entries
        purposes = [entry.charge.purpose for entry in entries if entry.charge is not None]
        assert purposes == ["round 1 training", "round 1 class sums", "round 2 training"]
