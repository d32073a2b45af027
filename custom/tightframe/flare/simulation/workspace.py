"""Locking of a simulation's workspace, and the results of earlier runs.

The engine wipes a simulator's workspace at start, before any code of ours runs. ``tightframe simulate``
holds a lock beside the workspace during a run and keeps the results of earlier runs. A plain ``nvflare
simulator`` cannot be kept from wiping; its server half takes the same lock from inside the run, and a run
whose workspace was replaced by another one stops (``Run``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tightframe.errors import REPLACED, RunError, WorkspaceError
from tightframe.results.files import CHECKPOINT, OUTCOME

RESULTS = Path("server", "simulate_job")
"""Path, in a workspace, of the server's results of its last run."""
HELD = "TIGHTFRAME_WORKSPACE_HELD"
"""Environment variable: the workspace whose lock the process that started this one holds."""
RUN = "TIGHTFRAME_RUN"
"""Environment variable of a simulation's processes: its token, and the workspace's file that holds it."""
AT_WORK = "TIGHTFRAME_AT_WORK"
"""Environment variable: a folder to which the silos of a simulation write their progress."""
KEPT_RUNS = 5
_TOLD_SECONDS = 0.5
_MARK = ".tightframe_run"


def lock_file(workspace: Path) -> Path:
    """Return the lock's path: beside the workspace, because the engine moves or removes all that is in it."""
    absolute = workspace.absolute()
    return absolute.with_name(f".{absolute.name}.lock")


class Lock:
    """Lock of a workspace; the operating system releases it when its process ends, however that happens.

    Args:
        job: name of the job, shown to a run that is refused.
    """

    def __init__(self, workspace: Path, job: str) -> None:
        self._path, self._job = lock_file(workspace), job
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock if it is free; return whether this process holds it now."""
        if self._descriptor is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        started = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "started": started, "job": self._job}).encode())
        self._descriptor = descriptor
        return True

    def holder(self) -> str:
        """Describe the run that holds the lock."""
        try:
            run = json.loads(self._path.read_bytes())
            return f"the job {run['job']!s}, started {run['started']!s}, process {int(run['pid'])}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"

    def give_back(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def hold(workspace: Path, job: str) -> Iterator[None]:
    """Hold a workspace's lock for a run, unless the process that started this one holds it already.

    Raises:
        WorkspaceError: TF-103, if another run holds it; the text describes that run.
    """
    if os.environ.get(HELD) == str(workspace.absolute()):
        yield
        return
    lock = Lock(workspace, job)
    if not lock.take():
        raise WorkspaceError(
            f"Expected the workspace {workspace} to be free, but a simulation runs in it: {lock.holder()}. "
            "Two runs in one workspace would destroy each other's results: wait for its end, or choose "
            "another folder with --workspace."
        )
    os.environ[HELD] = str(workspace.absolute())
    try:
        yield
    finally:
        os.environ.pop(HELD, None)
        lock.give_back()


def keep_results(workspace: Path, *, most: int = KEPT_RUNS) -> tuple[Path | None, list[Path]]:
    """Move an earlier run's results out of a workspace that the engine is about to wipe.

    Args:
        workspace: held by the caller.
        most: number of runs to keep; of the others those without a finished round are removed first, then the
            oldest.

    Returns:
        The folder that holds the earlier run now, None if there was nothing to keep; and the folders removed.
    """
    results = workspace / RESULTS
    last = next((path for name in (OUTCOME, CHECKPOINT) if (path := results / name).is_file()), None)
    archive = workspace.absolute().with_name(f"{workspace.absolute().name}.runs")
    if last is None or most < 1:
        return None, []
    ended = datetime.fromtimestamp(last.stat().st_mtime).strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{ended}{_job_name(results)}"
    folder, number = archive / name, 1
    while folder.exists():
        number += 1
        folder = archive / f"{name}_{number}"
    partial = archive / f".{folder.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in workspace.iterdir():
        if path.name not in ("local", "startup"):
            path.rename(partial / path.name)
    partial.rename(folder)
    runs = [path for path in archive.iterdir() if path.is_dir() and not path.name.startswith(".")]
    earlier = sorted(set(runs) - {folder}, key=lambda path: (not _is_empty(path / RESULTS), path.name))
    removed = earlier[: max(0, len(runs) - most)]
    for path in removed:
        shutil.rmtree(path)
    return folder, removed


def _is_empty(results: Path) -> bool:
    """Check whether a kept run ended without a result and without a round from which it could go on."""
    try:
        trained = json.loads((results / OUTCOME).read_text(encoding="utf-8"))["trained"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return trained is False and not (results / CHECKPOINT).is_file()


def _job_name(results: Path) -> str:
    """Return the end of a kept run's name: its job's, where the run has left it."""
    try:
        name = json.loads((results / OUTCOME).read_text(encoding="utf-8"))["job_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', str(name))[:60]}"


class Run:
    """Marks a simulation's workspace from its server half, and detects that another run has replaced it."""

    def __init__(self, workspace: Path, job: str) -> None:
        self._mark, self._token = workspace / "server" / _MARK, secrets.token_hex(8)
        own = os.environ.get(HELD) == str(workspace.absolute())
        self._lock = None if own else Lock(workspace, job)
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(self._token, encoding="ascii")
        os.environ[RUN] = f"{self._token} {self._mark}"  # inherited by the silos' processes
        self.check()

    def check(self) -> None:
        """Refuse to go on in a workspace that another run has replaced.

        Raises:
            RunError: TF-104.
        """
        check_run()
        # The lock's holder may be the run that this one has replaced, which is about to end.
        if self._lock is not None:
            self._lock.take()

    def end(self) -> None:
        """Release the workspace."""
        os.environ.pop(RUN, None)
        if self._lock is not None:
            self._lock.give_back()


class AtWork:
    """Writes one silo's progress with its task to the folder that ``AT_WORK`` names, if it is set."""

    def __init__(self, silo: str) -> None:
        folder = os.environ.get(AT_WORK)
        self._path = None if folder is None else Path(folder) / f"{silo}.json"
        self._last = 0.0

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None:
        """Write that ``done`` of ``of`` batches are done; at most twice a second."""
        now = time.monotonic()
        if self._path is None or now - self._last < _TOLD_SECONDS:
            return
        self._last = now
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # the folder is gone: nobody watches any more
            partial.write_text(json.dumps({"what": what, "done": done, "of": of}), encoding="utf-8")
            partial.replace(self._path)

    def end(self) -> None:
        """Remove the progress at the end of a task."""
        self._last = 0.0
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def check_run() -> None:
    """Refuse to go on in a simulation whose workspace was replaced; do nothing in production.

    Raises:
        RunError: TF-104.
    """
    token, _, place = os.environ.get(RUN, "").partition(" ")
    if not token:
        return
    try:
        same = Path(place).read_text(encoding="ascii") == token
    except (OSError, ValueError):
        same = False
    if not same:
        raise RunError(
            f"another simulation replaced this run's workspace {Path(place).parents[1]}, and its results "
            "there are lost: give each simulation a folder of its own with -w. `tightframe simulate` refuses "
            "a workspace that is in use; `nvflare simulator` wipes it.",
            code=REPLACED,
        )
