"""A run that too few silos ended in NVFlare goes on there as a new job, and ends as the unbroken one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.engine.simulation import assert_equal, export_job, run_alone, simulate_job

from tightframe.flare.simulation.simulator import PREVIOUS_RUN
from tightframe_app.jobs import folders, resuming

# SCAFFOLD, because its silos keep state of their own.
CHANGES = {"method": "scaffold", "training.momentum": 0.0, "rounds": 3}


def test_a_stopped_job_goes_on_in_nvflare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = {"site": ["site-2"], "round": 2, "kind": "raise"}
    broken = export_job(tmp_path / "broken", sites=3, changes=CHANGES, fault=fault)
    first = simulate_job(broken, tmp_path / "broken", threads=3, engine_command=True)
    assert first.code != 0 and first.outcome["rounds_done"] == 1, first.output
    assert "TF-513: 1 of 3 silos in round 2 could not contribute, so that fewer than 3 did" in first.output
    assert first.output.count("nothing can be contributed to this sum: TF-503") == 1, "at the silo"
    assert "NOT TRAINED" in first.output and first.outcome["trained"] is False

    folder = tmp_path / "resumed" / "job"
    told, lines = resuming.export("fedmr_isic", first.workspace, folder)
    assert not told, "nothing was there before"
    assert "1 round done, 2 rounds left" in lines[1] and folders.check_folder(folder) == []
    monkeypatch.setenv(PREVIOUS_RUN, str(first.workspace))
    second = simulate_job(folder, tmp_path / "resumed", threads=3)
    assert second.code == 0, second.output
    assert second.outcome["resumed"]["after_round"] == 1
    whole = export_job(tmp_path / "whole", sites=3, changes=CHANGES)
    assert_equal(second.server, run_alone(whole, tmp_path / "alone"))
    assert not list((second.workspace / "site-1").rglob("app*/config/checkpoint.safetensors")), (
        "the server's state is no silo's business"
    )
