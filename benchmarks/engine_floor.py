"""How long does the engine alone take for as many tasks as a job has, and how long does the job?

    python benchmarks/engine_floor.py [JOB] [--threads N]

Runs the job in the simulator, then the engine with a controller and an executor that do nothing, for as many
tasks at as many sites. Prints seconds by the clock and seconds of CPU of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReturnCode, Shareable, make_reply
from nvflare.apis.signal import Signal

from tightframe.results.outcome import Outcome
from tightframe.results.rows import read_rows
from tightframe_app.jobs import folders

AROUND = 3
"""Tasks that are in no line of ``metrics.jsonl``: enroll, confirm and the seal."""


class Asking(Controller):
    """Send every site a task, and wait, again and again."""

    def __init__(self, tasks: int, sites: int) -> None:
        super().__init__()
        self.tasks, self.sites = tasks, sites

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Send the tasks."""
        for _ in range(self.tasks):
            task = Task("nothing", data=Shareable())
            self.broadcast_and_wait(task, fl_ctx, min_responses=self.sites, wait_time_after_min_received=0)


class Answering(Executor):
    """Answer at once."""

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Return an empty answer."""
        return make_reply(ReturnCode.OK)


def timed(command: list[str], **environment: str) -> tuple[float, float]:
    """Run a command; return its seconds by the clock, and of CPU of all its processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            command, env=os.environ | environment, stdout=said, stderr=said, check=False, timeout=600
        )
        said.seek(0)
        if done.returncode:
            raise SystemExit(f"{command}: exit {done.returncode}\n{said.read().decode()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu


def empty_job(job: Path, folder: Path, tasks: int) -> None:
    """Write a job that does nothing with the same sites, intervals and number of tasks."""
    sites = folders.read_job(job)["sites"]
    name = "engine_floor"
    server: dict[str, Any] = {"format_version": 2, "server": {"task_request_interval": 0.1}, "components": []}
    arguments = {"tasks": tasks, "sites": len(sites)}
    server["workflows"] = [{"id": "nothing", "path": f"{name}.Asking", "args": arguments}]
    executor = {"path": f"{name}.Answering", "args": {}}
    client = {
        "format_version": 2,
        "components": [],
        "executors": [{"tasks": ["nothing"], "executor": executor}],
    }
    meta = {"name": "nothing", "resource_spec": {}, "min_clients": len(sites)}
    meta["deploy_map"] = {"app": ["server", *sites]}
    (folder / "app/config").mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "app/config/config_fed_server.json").write_text(json.dumps(server))
    (folder / "app/config/config_fed_client.json").write_text(json.dumps(client))


RUN = """
import os, sys
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner
code = SimulatorRunner(sys.argv[1], sys.argv[2], threads=int(sys.argv[3])).run()
sys.stdout.flush()
os._exit(code or 0)
"""


def main() -> None:
    """Run both, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", type=Path, nargs="?", default=Path("jobs/fedmr_isic"))
    parser.add_argument("--threads", "-t", type=int)
    chosen = parser.parse_args()
    sites = len(folders.read_job(chosen.job)["sites"])
    threads = str(chosen.threads or sites)
    with tempfile.TemporaryDirectory() as place:
        workspace = Path(place, "job")
        code = "from tightframe_app.cli import main; main()"
        command = [
            sys.executable,
            "-c",
            code,
            "simulate",
            str(chosen.job),
            "-w",
            str(workspace),
            "-t",
            threads,
        ]
        whole = timed(command)
        print(f"job: {whole[0]:.1f} s", flush=True)
        results = workspace / "server/simulate_job"
        tasks = AROUND + sum(row.asked for row in read_rows(results))
        training = Outcome.read(results).seconds
        floor = Path(place, "floor")
        empty_job(chosen.job, Path(place, "nothing"), tasks)
        (floor / "local").mkdir(parents=True)
        allowed = {"format_version": 2, "class_allow_list": ["engine_floor.Asking", "engine_floor.Answering"]}
        (floor / "local/resources.json").write_text(json.dumps(allowed))
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        alone = timed([sys.executable, "-c", RUN, f"{place}/nothing", str(floor), threads], PYTHONPATH=path)
    print(f"{sites} sites, {threads} threads, {tasks} tasks each; {os.cpu_count()} cores")
    print(f"{'':12}{'clock':>8}{'CPU':>8}  seconds")
    print(f"{'job':12}{whole[0]:8.1f}{whole[1]:8.1f}  of which the run itself took {training:.1f}")
    print(f"{'engine alone':12}{alone[0]:8.1f}{alone[1]:8.1f}")


if __name__ == "__main__":
    main()
