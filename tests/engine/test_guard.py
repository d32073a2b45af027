"""The egress guard in the engine's simulator, from the site's own ``local/privacy.json``.

The simulator builds the components of that file, but has no scopes, so that the guard works there as
a component alone; as a scope's filter it is tested in ``tests/flare/test_guard.py``, by the engine's
own client runner.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.engine.simulation import EXECUTORS

from tightframe.errors import REASONS
from tightframe.flare.simulation.simulator import ALLOW_LIST

SITES = 4


def _leaky_job(export: Callable[..., Path]) -> Path:
    folder = export(sites=SITES, changes={"min_sites": 3, "rounds": 1, "site_timeout": 400})
    path = folder / "app" / "config" / "config_fed_client.json"
    client = json.loads(path.read_text())
    executor = client["executors"][0]["executor"]
    executor["path"] = "leaky.LeakyExecutor"
    executor["args"]["leak"] = {"site": "site-4", "round": 1}
    path.write_text(json.dumps(client))
    return folder


def test_a_raw_tensor_is_stopped_and_the_run_goes_on(export: Callable[..., Path], tmp_path: Path) -> None:
    """One run: site-4 tries it in round 1; everything else of a whole secure run passes the guard."""
    workspace = tmp_path / "workspace"
    local = workspace / "local"
    local.mkdir(parents=True)
    allowed: dict[str, Any] = dict(ALLOW_LIST)
    allowed["class_allow_list"] = [*ALLOW_LIST["class_allow_list"], "leaky.LeakyExecutor"]
    (local / "resources.json").write_text(json.dumps(allowed))
    shutil.copy(ROOT / "provisioning" / "local" / "privacy.json", local)
    command = [sys.executable, "-m", "tightframe.flare.simulation.simulator", str(_leaky_job(export))]
    done = subprocess.run(
        [*command, "-w", str(workspace), "-t", str(SITES)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXECUTORS), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    server = workspace / "server" / "simulate_job"
    assert json.loads((server / "outcome.json").read_text())["trained"] is True
    rows = [json.loads(line) for line in (server / "metrics.jsonl").read_text().splitlines()]
    (first,) = (row for row in rows if row["kind"] == "train")
    stopped = "TF-730" if "TF-730" in REASONS else "TF-503"
    assert first["dropped"] == {"site-4": stopped}
    assert first["silos"] == ["site-1", "site-2", "site-3"]
    assert first["evaluated_by"] == [f"site-{i}" for i in range(1, 5)], "only that result failed"
    log = (workspace / "site-4" / "log.txt").read_text()
    assert "TF-730: the guard stopped a result of the task 'contribute'" in log
    assert "TF-730: the guard stopped a federated event (tightframe.leak)" in log
    for site in ("site-1", "site-2", "site-3"):
        assert "TF-730" not in (workspace / site / "log.txt").read_text()
        assert (workspace / site / "simulate_job" / "report.html").is_file()
    assert (server / "report.html").is_file(), "server and silos make their pages by themselves"
    for path in (workspace / "server").rglob("*"):
        assert not path.is_file() or b"4711.4711" not in path.read_bytes(), path
    assert "tightframe.leak" not in (workspace / "server" / "log.txt").read_text()
