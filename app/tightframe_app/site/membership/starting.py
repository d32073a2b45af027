"""``tightframe site start``: refuse to start a kit that runs already, or whose copy does.

A file beside ``startup``, and one in the folder for lasting state, which copies of a kit share, name the
kit and its last process. They prove nothing by themselves: the command line shows whether the process has
ended, or another program has its number.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tightframe.errors import JoinError
from tightframe.files import quoted
from tightframe_app.federation.kits import CONFIG_FILE, Kit
from tightframe_app.site import stop
from tightframe_app.site.checks.engine import components

STARTED = "started.json"
"""File beside ``startup`` with the kit's last start."""
STARTS = ["site", "start"]
ENGINES = ("script", "client", "server")
"""Roles of the processes that run a kit."""


def notes(kit: Kit) -> list[Path]:
    """Return the files with the last start of a kit, and of all that share its state folder."""
    state = state_folder(kit)
    shared = [] if state is None or not state.is_dir() else [state / f"started-{kit.name}.json"]
    return [kit.folder / STARTED, *shared]


def state_folder(kit: Kit) -> Path | None:
    """Return the folder for lasting state in a kit's ``local``; None if it names none."""
    try:
        if kit.kind == "site":
            values = json.loads((kit.local / CONFIG_FILE).read_text(encoding="utf-8"))
            return Path(values["state_dir"])
        (manager,) = [item for item in components(kit.local) if item.get("id") == "job_manager"]
        return Path(manager["args"]["uri_root"]).parent
    except (OSError, ValueError, KeyError, TypeError):
        return None


def claim(kit: Kit) -> None:
    """Note that this process starts a kit.

    Raises:
        JoinError: TF-758, naming the process and how to stop it, if the kit runs, or another with the same
            state folder.
    """
    _refuse(kit, kit.folder, _engine(kit.folder))
    with ExitStack() as stack:
        files = [stack.enter_context(_locked(path)) for path in notes(kit)]
        for descriptor in files:
            last = _read(descriptor)
            _refuse(kit, Path(str(last.get("kit"))), _running(last))
        for descriptor in files:
            start = {"kit": str(kit.folder), "process": os.getpid(), "started": round(time.time())}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(start) + "\n").encode(), 0)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file under a lock against other starts."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise JoinError(
            f"Expected to note this start in {path}, but got: {error.strerror}. Nothing was started. Start "
            "the kit by the account that owns it and its state folder.",
            code="TF-757",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Mapping[str, Any]:
    try:
        values = json.loads(os.pread(descriptor, 2**16, 0))
    except ValueError:
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("kit"), str) else {}


def _engine(folder: Path) -> int | None:
    """Return the engine's process that runs a kit; None if there is none."""
    return next((one.process.pid for one in stop.running(folder) if one.role in ENGINES), None)


def _running(last: Mapping[str, Any]) -> int | None:
    """Return the process of a noted start; None if it has ended."""
    if not last:
        return None
    # The process may not be the engine yet, and keeps its number. Its command is read first, so that one
    # that becomes the engine meanwhile is found as the engine.
    number = last.get("process")
    command: list[str] = []
    with suppress(psutil.Error, ValueError, TypeError):
        process = psutil.Process(number)
        if process.create_time() <= float(last.get("started", "inf")) + 1:  # else another one got its number
            command = process.cmdline()
    starts = number != os.getpid() and any(list(pair) == STARTS for pair in pairwise(command))
    engine = _engine(Path(last["kit"]))
    return number if engine is None and starts else engine


def _refuse(kit: Kit, runs: Path, process: int | None) -> None:
    if process is None:
        return
    ours = "it" if runs == kit.folder else f"{runs}, a kit of {kit.name} with the same state folder"
    why = (
        "two servers would write the same state"
        if kit.kind == "server"
        else "of two clients of one name the server loses one, with its job"
    )
    raise JoinError(
        f"Expected nothing to run {kit.folder}, but process {process} runs {ours}. Nothing was started: "
        f"{why}. Stop that one first: tightframe site stop --kit {quoted(runs)}",
        code="TF-758",
    )
