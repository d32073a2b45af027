"""Run job folders in NVFlare's simulator, as a user would, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT, forking
from typer.testing import CliRunner

from tightframe.flare.simulation.simulator import ALLOW_LIST
from tightframe_app.cli import app

EXECUTORS = Path(__file__).resolve().parent
"""Executors and components that jobs of the tests name."""
LOST_PORT = re.compile(r"Communication error with client (\S+):")
"""What the engine's simulator logs if another program took the port that it had chosen for a site's process,
which then says nothing; and if a process ends that has said something."""
ASKING = 0.5
"""Seconds between two requests for work in runs with faults."""
REDUCED: Mapping[str, Any] = {
    "dataset_options.image_size": 16,
    "model_options.widths": [8, 8, 8],
    "training.epochs": 1,
    "rounds": 2,
}
"""Changes that make a committed job of images a small one."""


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


def export_job(
    folder: Path,
    name: str = "fedmr_isic",
    *,
    sites: int = 6,
    fault: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Export a small job into a folder; a ``fault``, or several, put the faulty executor at every site.

    Runs with faults mostly wait for a silo, meanwhile the others ask for work: twice a second is enough.
    """
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

    job = recipes.get(name).job(
        sites=[f"site-{i}" for i in range(1, sites + 1)], changes={**REDUCED, **(changes or {})}
    )
    files = job_folders.job_files(job)
    if fault:
        key = "app/config/config_fed_client.json"
        client = json.loads(files[key])
        executor = client["executors"][0]["executor"]
        executor["path"] = "faulty.FaultyExecutor"
        executor["args"]["faults"] = [fault] if isinstance(fault, Mapping) else list(fault)
        files[key] = json.dumps(client)
        key = "app/config/config_fed_server.json"
        server = json.loads(files[key])
        assert server["server"]["task_request_interval"] < ASKING
        server["server"]["task_request_interval"] = ASKING
        files[key] = json.dumps(server)
    job_folders.write_job(files, folder / name)
    return folder / name


def simulate_job(
    job: Path,
    folder: Path,
    *,
    threads: int | None,
    site_config: Mapping[str, Any] | None = None,
    timeout: int = 600,
    engine_command: bool = False,
    guarded: bool = False,
) -> Run:
    """Run a job folder in ``folder``'s own workspace; once more if a site's process lost its port.

    Args:
        job: the folder.
        folder: of the workspace.
        threads: of the engine.
        site_config: of all sites.
        timeout: in seconds.
        engine_command: start it by the engine's own command.
        guarded: the sites have our ``privacy.json``.
    """
    workspace = folder / "workspace"
    if threads is None or engine_command:
        command = ["nvflare", "simulator"]
    else:
        command = ["python3", "-m", "tightframe.flare.simulation.simulator"]
    command += [str(job), "-w", str(workspace), *([] if threads is None else ["-t", str(threads)])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXECUTORS), os.environ.get("PYTHONPATH", "")])
    }
    place = Path(sys.executable).parent
    if (folder_of := forking.started()) is not None:
        environment, place = forking.environment(environment), folder_of / "bin"
    command[0] = str(place / command[0])
    for again in (True, False):
        local = workspace / "local"
        local.mkdir(parents=True, exist_ok=True)
        classes = [*ALLOW_LIST["class_allow_list"], "faulty.FaultyExecutor", "asking.Console"]
        (local / "resources.json").write_text(json.dumps(ALLOW_LIST | {"class_allow_list": classes}))
        if guarded:
            shutil.copy(ROOT / "provisioning" / "local" / "privacy.json", local)
        if site_config is not None:
            (local / "tightframe.json").write_text(json.dumps(site_config))
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=folder, check=False
        )
        output = done.stdout + done.stderr
        if not (again and any(f" - {site}: " not in output for site in LOST_PORT.findall(output))):
            break
        shutil.rmtree(workspace)
    return Run(done.returncode, output, workspace)


def run_alone(job: Path, folder: Path) -> Path:
    """Run a job folder in one process without the engine, that of the tests; the server's results."""
    from tightframe import federation
    from tightframe.config.job import parse_job
    from tightframe_app.jobs import folders as job_folders

    federation.run_job(parse_job(job_folders.read_job(job)), folder=folder)
    return folder / "server"


def verify(transcript: Path, root: Path) -> tuple[int, str]:
    """``tightframe transcript verify``: exit code and output without line breaks."""
    done = CliRunner().invoke(app, ["transcript", "verify", str(transcript), "--root", str(root)])
    return done.exit_code, " ".join(done.output.split())


MODELS = ("model.safetensors", "best_model.safetensors", "checkpoint.safetensors")


def assert_equal(one: Path, other: Path) -> None:
    """Two servers' results are the same bit for bit, rows of metrics apart from seconds and bytes.

    A checkpoint holds the hash of its job beside the tensors, so those of jobs that differ in their
    sums are compared tensor by tensor.
    """
    from safetensors.numpy import load_file

    for name in MODELS:
        mine, theirs = load_file(one / name), load_file(other / name)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype and value.tobytes() == theirs[key].tobytes(), (name, key)
    rows = [
        [
            {
                key: value
                for key, value in json.loads(line).items()
                if not key.startswith(("seconds", "bytes"))
            }
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (one, other)
    ]
    assert rows[0] == rows[1] and len(rows[0]) > 2
