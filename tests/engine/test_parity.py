"""Runs through NVFlare equal runs in one process, and secure runs plain ones, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import MODELS, Run, assert_equal, export_job, run_alone
from tests.flare.boards import Daemon, expected_points, listening, read_events

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
    with listening() as daemon:
        # Where boards are asked for, nothing else of the run may change.
        asked = {"server": {"tensorboard": True, "statsd": {"port": daemon.port}}} if threads else None
        run, expected = simulate(export(sites=SITES), threads=threads, site_config=asked), alone
    assert run.code == 0, run.output
    if asked:
        _assert_told(run, daemon)
    else:
        assert not (run.server / "tb_events").exists() and not daemon.lines
    assert "secure (the server sees totals of at least" in run.outcome["sums"]
    # The checkpoint has the job's id and seconds beside its tensors, which `assert_equal` compares.
    for name in MODELS[:2]:
        assert (run.server / name).read_bytes() == (expected / name).read_bytes(), name
    assert_equal(run.server, expected)
    for site in ("site-1", f"site-{SITES}"):
        kept = run.workspace / site / "simulate_job"
        assert (kept / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert json.loads((kept / "local_report.json").read_text())["silo"] == site


def _assert_told(run: Run, daemon: Daemon) -> None:
    """TensorBoard's own reader and a StatsD daemon have what ``metrics.jsonl`` has."""
    found, expected = read_events(run.server / "tb_events"), expected_points(run.rows)
    assert found.keys() == expected.keys() and len(expected) > 30
    assert found == pytest.approx(expected, rel=1e-6, abs=6e-4)  # seconds are rounded in the file
    gauges = daemon.gauges()
    assert gauges["tightframe_running", None] == 0 and gauges["tightframe_trained", None] == 1
    assert gauges["tightframe_run_bytes_up", None] == sum(row["bytes_up"] for row in run.rows)
    assert gauges["tightframe_silos_joined", None] == len(run.outcome["roster"])
    assert (
        gauges["tightframe_balanced_accuracy", None] == run.outcome["evaluation"]["test"]["balanced_accuracy"]
    )
    for text in ("".join(daemon.lines).encode(), *(path.read_bytes() for path in _events(run))):
        assert b"site-" not in text
    assert not [path for path in _events(run) if path.parent.parent != run.server / "tb_events"]


def _events(run: Run) -> list[Path]:
    return [path for path in run.workspace.rglob("events.out.tfevents.*") if path.is_file()]


def test_plain_sums_by_name_give_the_same_in_nvflare(
    export: Callable[..., Path], simulate: Callable[..., Any], alone: Path
) -> None:
    """Here against secure sums in one process, which equal those in NVFlare by the test above."""
    run = simulate(export(sites=SITES, changes={"summation": "plain"}), threads=SITES)
    assert run.code == 0, run.output
    assert "plain, as the job asks by name" in run.output
    assert not (run.server / "transcript.jsonl").exists(), "nothing was signed"
    assert_equal(run.server, alone)
