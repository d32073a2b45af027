"""Run a job folder in the engine's simulator, without the engine's own command line.

``python -m tightframe.flare.simulation.simulator JOB -w WORKSPACE -t THREADS`` writes the allow list and
exits with 0 only if the run trained. ``tightframe simulate`` starts it in a process group of its own
(``run_apart``) and places a site configuration in the workspace for that run (``site_configuration``).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tightframe.config.site import FILE_NAME, MARKER
from tightframe.errors import SiteConfigError, WorkspaceError
from tightframe.flare.simulation.workspace import RESULTS, hold
from tightframe.results.files import OUTCOME
from tightframe.results.outcome import Outcome

# Exactly two classes. A prefix would let a job build any class below it with arguments of the job's
# choice: the engine builds an object from every argument that is a dictionary with a `path`, and some
# classes open files and start programs.
ALLOW_LIST: dict[str, Any] = {
    "format_version": 2,
    "class_allow_list": [
        "tightframe.flare.controller.FederationController",
        "tightframe.flare.executor.SiloExecutor",
    ],
}


PREVIOUS_RUN = "TIGHTFRAME_PREVIOUS_RUN"
"""Environment variable: the workspace of the simulation that a resumed job continues."""
INTERRUPTED = 130
_GRACE = 10.0
"""Seconds from asking a run to end to killing it."""


def prepare_workspace(workspace: Path) -> None:
    """Put the allow list into ``workspace/local``, unless there is one."""
    resources = workspace / "local" / "resources.json"
    resources.parent.mkdir(parents=True, exist_ok=True)
    if not resources.is_file():
        resources.write_text(allow_list_text(), encoding="utf-8")


def check_workspace(workspace: Path) -> None:
    """Refuse a folder that is not a simulator workspace: the engine wipes all of it except ``local/``.

    Raises:
        FileExistsError: if it is not one; the text names what would be lost.
    """
    if not workspace.exists():
        return
    if not workspace.is_dir():
        raise FileExistsError(f"Expected a folder for the workspace, but {workspace} is a file.")
    kit = [name for name in ("fed_client.json", "fed_server.json") if (workspace / "startup" / name).exists()]
    if kit:
        raise FileExistsError(
            f"Expected a simulator workspace, but {workspace} is a provisioned kit (startup/{kit[0]}): "
            "choose another folder with --workspace."
        )
    if _is_ours(workspace / "local" / "resources.json"):
        return
    foreign = sorted(path.name for path in workspace.iterdir() if path.name not in ("local", "startup"))
    if foreign:
        raise FileExistsError(
            f"Expected {workspace} to be a simulator workspace or empty, because the engine wipes it, "
            f"but it holds {foreign[:5]}: choose another folder with --workspace."
        )


def _is_ours(resources: Path) -> bool:
    """Check whether an allow list was written for simulations, that is, names our controller."""
    try:
        allowed = json.loads(resources.read_text(encoding="utf-8"))["class_allow_list"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(allowed, list) and ALLOW_LIST["class_allow_list"][0] in allowed


def allow_list_text() -> str:
    """Return the content of ``local/resources.json``."""
    return json.dumps(ALLOW_LIST, indent=2) + "\n"


@contextlib.contextmanager
def site_configuration(workspace: Path, given: Path | None) -> Iterator[Path | None]:
    """Place a site configuration in the workspace for one run, and always remove it afterwards.

    A copy left behind by a run that crashed is removed first, so that no later run uses real records
    by accident. The user's own file is never replaced or removed.

    Yields:
        The file that the run uses: ``given``, or the user's own in ``workspace/local``, or None.

    Raises:
        FileNotFoundError: if ``given`` does not exist.
        SiteConfigError: TF-202 if the workspace already has the user's own site configuration.
    """
    local = workspace / "local"
    site_file = local / FILE_NAME
    _take_back(local)
    if given is None or (site_file.exists() and given.resolve() == site_file.resolve()):
        yield site_file if site_file.is_file() else None
        return
    if not given.is_file():
        raise FileNotFoundError(f"Expected the site configuration at {given}, but there is no such file.")
    if site_file.exists():
        raise SiteConfigError(
            f"Expected one site configuration, but got {given} and the workspace's own {site_file}: "
            "move the workspace's file away, or run without --site-config."
        )
    local.mkdir(parents=True, exist_ok=True)
    content = given.read_bytes()
    lent = f"{hashlib.sha256(content).hexdigest()}\n{given.resolve()}\n{os.getpid()}\n"
    _write(local / MARKER, lent.encode())
    try:
        _write(site_file, content)
        yield given
    finally:
        _take_back(local)


def run_apart(command: Sequence[str], relay: Callable[[str], None] | None = None) -> int:
    """Run a program in its own process group and return its exit code; never leave it running.

    Args:
        command: the program and its arguments.
        relay: called with each line that the program writes; None lets it write to the terminal itself.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the group has ended.
        SystemExit: after SIGTERM or SIGHUP, likewise.
    """
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, _exit) for number in heard}
    # Only this process signals the group's leader: a Ctrl-C in the terminal would otherwise reach all of
    # the engine's processes at once, and each would print a traceback.
    piped = {} if relay is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    reading: threading.Thread | None = None
    process = subprocess.Popen(command, start_new_session=True, **piped)  # type: ignore[call-overload]  # noqa: S603
    try:
        if relay is not None:
            reading = threading.Thread(target=_relay, args=(process.stdout, relay), daemon=True)
            reading.start()
        return int(process.wait())
    finally:
        _end(process)
        if reading is not None:
            reading.join(_GRACE)  # every process that held the pipe has ended
        for number, handler in before.items():
            signal.signal(number, handler)


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
    results = workspace / RESULTS
    trained = (results / OUTCOME).is_file() and Outcome.read(results).trained
    return status if status or trained else 3


def main(arguments: list[str] | None = None) -> int:
    """Run this module's command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("-w", "--workspace", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=int, required=True)
    parser.add_argument("--gpu")
    parser.add_argument("-l", "--log", default="concise")
    chosen = parser.parse_args(arguments)
    stopped = _until_stopped()
    try:
        with hold(chosen.workspace, chosen.job.name):
            prepare_workspace(chosen.workspace)
            code = simulate(chosen.job, chosen.workspace, chosen.threads, gpu=chosen.gpu, log=chosen.log)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except WorkspaceError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    return INTERRUPTED if stopped else code


def _until_stopped() -> list[int]:
    """Turn SIGTERM into KeyboardInterrupt, on which the engine ends its processes.

    Returns:
        A list that holds the signal's number once it has arrived.
    """
    leader = os.getpid()
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != leader:  # the engine's own processes are forked from this one
            os._exit(128 + number)
        stopped.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    return stopped


def _relay(lines: Iterable[bytes], relay: Callable[[str], None]) -> None:
    # Read to the end even when the lines can no longer be passed on: a full pipe would block the run.
    broken = False
    for line in lines:
        try:
            if not broken:
                relay(line.decode(errors="replace").rstrip("\n"))
        except OSError:
            broken = True


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the group's leader, then kill what is left of the group; ignore Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def _take_back(local: Path) -> None:
    """Remove the site configuration that a run placed, and its marker; keep a file that was edited since."""
    marker, lent = local / MARKER, local / FILE_NAME
    if not marker.is_file():
        return
    digest = marker.read_text(encoding="utf-8").partition("\n")[0]
    if lent.is_file() and hashlib.sha256(lent.read_bytes()).hexdigest() == digest:
        lent.unlink()
    marker.unlink()


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _concise(folder: Path) -> str:
    """Return the path of the engine's concise log configuration, without its worker's lines per task."""
    from nvflare.fuel.utils.log_utils import concise_log_dict

    config = json.loads(json.dumps(concise_log_dict))
    config["filters"]["ConciseFilter"]["exclude_logger_names"] = ["__main__"]
    path = folder / "log_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the engine leaves threads behind that would keep the process alive
