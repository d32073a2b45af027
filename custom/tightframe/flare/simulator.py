"""Run a job folder in the engine's simulator, without the engine's own command line.

``python -m tightframe.flare.simulator JOB -w WORKSPACE -t THREADS`` prepares the workspace
(allow list, site configuration) and exits with the truth: 0 only if the run trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

ALLOW_LIST = {"format_version": 2, "class_allow_list": ["nvflare.", "tightframe."]}


def prepare_workspace(workspace: Path, site_config: Path | None = None) -> None:
    """Put the allow list, and a site configuration if one is given, into ``workspace/local``.

    Raises:
        FileNotFoundError: if the site configuration does not exist.
    """
    local = workspace / "local"
    local.mkdir(parents=True, exist_ok=True)
    resources = local / "resources.json"
    if not resources.is_file():
        resources.write_text(json.dumps(ALLOW_LIST, indent=2) + "\n", encoding="utf-8")
    if site_config is not None:
        if not site_config.is_file():
            raise FileNotFoundError(
                f"Expected the site configuration at {site_config}, but there is no such file."
            )
        if site_config.resolve() != (local / "tightframe.json").resolve():
            shutil.copyfile(site_config, local / "tightframe.json")


def simulate(
    job: Path, workspace: Path, threads: int, *, gpu: str | None = None, log: str = "concise"
) -> int:
    """Run a job folder; return the engine's exit code, or 3 if the run left no trained outcome."""
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

    with tempfile.TemporaryDirectory(prefix="tightframe-") as folder:
        runner = SimulatorRunner(
            job_folder=str(job.resolve()),
            workspace=str(workspace.resolve()),
            threads=None if gpu else threads,
            gpu=gpu,
            log_config=_concise(Path(folder)) if log == "concise" else log,
        )
        status = int(runner.run() or 0)
    outcome = workspace / "server" / "simulate_job" / "outcome.json"
    trained = outcome.is_file() and json.loads(outcome.read_text(encoding="utf-8")).get("trained") is True
    return status if status or trained else 3


def _concise(folder: Path) -> str:
    """The engine's concise logging without the lines of its worker script for every task."""
    from nvflare.fuel.utils.log_utils import concise_log_dict

    config = json.loads(json.dumps(concise_log_dict))
    config["filters"]["ConciseFilter"]["exclude_logger_names"] = ["__main__"]
    path = folder / "log_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def main(arguments: list[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("-w", "--workspace", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=int, required=True)
    parser.add_argument("--site-config", type=Path)
    parser.add_argument("--gpu")
    parser.add_argument("-l", "--log", default="concise")
    chosen = parser.parse_args(arguments)
    prepare_workspace(chosen.workspace, chosen.site_config)
    return simulate(chosen.job, chosen.workspace, chosen.threads, gpu=chosen.gpu, log=chosen.log)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the engine leaves threads behind that would keep the process alive
