"""Run job folders in NVFlare's simulator, as a user would, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tightframe.flare.simulator import ALLOW_LIST

HERE = Path(__file__).resolve().parent
SMALL: Mapping[str, Any] = {
    "dataset_options.image_size": 16,
    "model_options.widths": [8, 8, 8],
    "training.epochs": 1,
    "rounds": 2,
}


@dataclass
class Run:
    """A finished simulation."""

    code: int
    output: str
    workspace: Path

    @property
    def server(self) -> Path:
        return self.workspace / "server" / "simulate_job"

    @property
    def outcome(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.server / "outcome.json").read_text())
        return values

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.server / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """Export a small job; ``fault`` puts the faulty executor at one site."""

    def make(
        name: str = "fedmr_isic",
        *,
        sites: int = 6,
        fault: Mapping[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Path:
        from tightframe_app import recipes

        job = recipes.get(name).job(
            sites=[f"site-{i}" for i in range(1, sites + 1)], changes={**SMALL, **(changes or {})}
        )
        files = recipes.job_files(job)
        if fault is not None:
            key = "app/config/config_fed_client.json"
            client = json.loads(files[key])
            executor = client["executors"][0]["executor"]
            executor["path"] = "faulty.FaultyExecutor"
            executor["args"]["fault"] = dict(fault)
            files[key] = json.dumps(client)
        folder = tmp_path / name
        recipes.write_job(files, folder)
        return folder

    return make


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Run]:
    """Run a job folder; the workspace is the test's own."""

    def run(
        job: Path,
        *,
        threads: int | None,
        site_config: Mapping[str, Any] | None = None,
        timeout: int = 280,
        engine_command: bool = False,
    ) -> Run:
        workspace = tmp_path / "workspace"
        local = workspace / "local"
        local.mkdir(parents=True, exist_ok=True)
        classes = [*ALLOW_LIST["class_allow_list"], "faulty.FaultyExecutor"]
        (local / "resources.json").write_text(json.dumps(ALLOW_LIST | {"class_allow_list": classes}))
        if site_config is not None:
            (local / "tightframe.json").write_text(json.dumps(site_config))
        if threads is None or engine_command:
            command = [
                str(Path(sys.executable).with_name("nvflare")),
                "simulator",
                str(job),
                "-w",
                str(workspace),
            ]
        else:
            command = [sys.executable, "-m", "tightframe.flare.simulator", str(job)]
            command += ["-w", str(workspace), "-t", str(threads)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        }
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        return Run(done.returncode, done.stdout + done.stderr, workspace)

    return run
