"""Runs through NVFlare equal runs in one process, and secure runs plain ones, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import MODELS, assert_equal, export_job, run_alone

pytestmark = pytest.mark.engine
SITES = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's results of the job in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(export_job(folder, sites=SITES), folder)


# Without the flag one worker serves all silos in turn, a process for each of their tasks. `test_secure` has
# six silos at a time.
@pytest.mark.parametrize("threads", [None, SITES], ids=["no flag", f"-t {SITES}"])
def test_nvflare_equals_in_process(
    export: Callable[..., Path],
    simulate: Callable[..., Any],
    alone: Path,
    threads: int | None,
) -> None:
    run, expected = simulate(export(sites=SITES), threads=threads), alone
    assert run.code == 0, run.output
    assert "secure (the server sees totals of at least" in run.outcome["sums"]
    # The checkpoint has the job's id and seconds beside its tensors, which `assert_equal` compares.
    for name in MODELS[:2]:
        assert (run.server / name).read_bytes() == (expected / name).read_bytes(), name
    assert_equal(run.server, expected)
    for site in ("site-1", f"site-{SITES}"):
        kept = run.workspace / site / "simulate_job"
        assert (kept / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert json.loads((kept / "local_report.json").read_text())["silo"] == site


def test_plain_sums_by_name_give_the_same_in_nvflare(
    export: Callable[..., Path], simulate: Callable[..., Any], alone: Path
) -> None:
    """Here against secure sums in one process, which equal those in NVFlare by the test above."""
    run = simulate(export(sites=SITES, changes={"summation": "plain"}), threads=SITES)
    assert run.code == 0, run.output
    assert "plain, as the job asks by name" in run.output
    assert not (run.server / "transcript.jsonl").exists(), "nothing was signed"
    assert_equal(run.server, alone)
