"""A run through NVFlare by our command equals the run in one process bit for bit.

Its processes are forked; in real ones `.ci/run` compares the README's job. By the engine's command without
a flag, which is a process for every task, `test_privacy` runs a job.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import forking
from tests.support.engine.simulation import MODELS, Run, assert_equal, export_job, run_alone
from tests.support.flare.boards import Daemon, expected_points, listening, read_events

from tightframe.flare.simulation.simulator import allow_list_text

SITES = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's results of the job in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(export_job(folder, sites=SITES), folder)


def _assert_equal(run: Run, expected: Path) -> None:
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


def test_our_command_equals_in_process_with_two_classes_and_boards(
    export: Callable[..., Path], alone: Path, tmp_path: Path
) -> None:
    """As people type it, with a file for one run; `.ci/run` has six silos at a time."""
    job = export(sites=SITES)
    with listening() as daemon:
        # Boards are asked for, and nothing else of the run may change.
        asked = {"sites": {}, "server": {"tensorboard": True, "statsd": {"port": daemon.port}}}
        (tmp_path / "server.json").write_text(json.dumps(asked))
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        values = forking.environment(os.environ | {"PATH": path})
        command = [str(shutil.which("tightframe", path=values["PATH"])), "simulate", str(job)]
        command += ["-t", "9", "-w", str(tmp_path / "my[ws]"), "-s", "server.json"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=values, timeout=900, check=False
        )
    run = Run(done.returncode, done.stdout + done.stderr, tmp_path / "my[ws]")
    _assert_equal(run, alone)
    _assert_told(run, daemon)
    assert f"threads: {SITES} instead of 9" in done.stdout
    assert "site configuration: server.json, for the server only" in done.stdout
    assert "SYNTHETIC TWIN" in run.output
    local = run.workspace / "local"
    assert [path.name for path in local.iterdir()] == ["resources.json"]
    assert (local / "resources.json").read_text() == allow_list_text()
    assert run.outcome["trained"] is True


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
