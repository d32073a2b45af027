"""Runs through NVFlare equal runs in one process, and secure runs plain ones, bit for bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import MODELS, assert_equal, export_job, run_alone

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The server's results of the job of so many sites in one process, run once."""

    @functools.cache
    def run(sites: int) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        return run_alone(export_job(folder, sites=sites), folder)

    return run


# Without the flag one worker serves all silos in turn, a process for each of their tasks.
@pytest.mark.parametrize(("threads", "sites"), [(None, 3), (6, 6)], ids=["no flag", "-t 6"])
def test_nvflare_equals_in_process(
    export: Callable[..., Path],
    simulate: Callable[..., Any],
    alone: Callable[[int], Path],
    threads: int | None,
    sites: int,
) -> None:
    run, expected = simulate(export(sites=sites), threads=threads), alone(sites)
    assert run.code == 0, run.output
    assert "secure (the server sees totals of at least" in run.outcome["sums"]
    # The checkpoint has the job's id and seconds beside its tensors, which `assert_equal` compares.
    for name in MODELS[:2]:
        assert (run.server / name).read_bytes() == (expected / name).read_bytes(), name
    assert_equal(run.server, expected)
    for site in ("site-1", f"site-{sites}"):
        kept = run.workspace / site / "simulate_job"
        assert (kept / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert json.loads((kept / "local_report.json").read_text())["silo"] == site


def test_plain_sums_by_name_give_the_same_in_nvflare(
    export: Callable[..., Path], simulate: Callable[..., Any], alone: Callable[[int], Path]
) -> None:
    """Here against secure sums in one process, which equal those in NVFlare by the test above."""
    run = simulate(export(changes={"summation": "plain"}), threads=6)
    assert run.code == 0, run.output
    assert "plain, as the job asks by name" in run.output
    assert not (run.server / "transcript.jsonl").exists(), "nothing was signed"
    assert_equal(run.server, alone(6))
