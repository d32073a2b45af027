"""Processes of tests, forked from one that has imported the packages of others already.

Four fifths of the CPU time of a command, and of a process that works on a job of a test, are imports. One
process a test session imports torch, the engine, other packages of others and what each job begins with of
ours, has a single thread, and forks a child for each program that tests start with ``environment()``. A small
script in the place of ``python3``, ``tightframe`` and ``nvflare`` stands for the child: it passes on
arguments, environment, folder and files, then the signals that it gets, and ends as the child does; if it is
killed, so is the child.

A server or site is forked if ``environment(sites=True)`` asks for it. Before it is anything else it forks a
process that forks those of its jobs: they are below the engine that starts them, as the doors demand
(TF-731), and end with it.

What the script does not know (``python -c``, other scripts), a process of another account, and all else
without ``environment()`` is the real interpreter. ``TIGHTFRAME_REAL_PROCESSES=1`` makes all of them real.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "TIGHTFRAME_FORKING"
"""Environment variable: the socket of the process that forks; a process is real if there is no such file."""
SITES = "TIGHTFRAME_FORKED_SITES"
"""Environment variable: whether servers and sites are forked, too."""
REAL = "TIGHTFRAME_REAL_PROCESSES"
COMMANDS = {"tightframe": "tightframe_app.cli", "nvflare": "nvflare.cli"}
PACKAGES = "torch numpy nvflare pydantic cryptography safetensors typer rich psutil yaml PIL opacus scipy"
"""Of others: what our code imports of them, anywhere, is imported before a child is forked."""
OURS = (
    "tightframe.flare.executor",
    "tightframe.flare.controller",
    "tightframe.methods",
    "tightframe.rounds.silo.contribute",
    "tightframe.rounds.server.coordinator",
    "tightframe.data.isic.records",
    "tightframe.data.table.tabulated",
    "tightframe.data.isic.twin",
    "tightframe.report.pages.server",
    "tightframe.report.pages.silo",
    "tightframe_app.cli",
)
"""What silos' jobs, the server's and commands import; when imported, none of it changes the engine."""
DRIVERS = "nvflare.fuel.f3.drivers"
"""Package of which the engine imports every module before it connects."""
ENGINE = (
    "private.fed.app.client.worker_process",
    "private.fed.app.server.runner_process",
    "private.fed.app.client.client_train",
    "private.fed.app.server.server_train",
    "private.fed.app.simulator.simulator",  # it holds what the next one has
    "private.fed.app.simulator.simulator_runner",
    "private.fed.app.simulator.simulator_worker",
    "fuel.flare_api.flare_api",
    "cli",
)
PAUSES: Mapping[str, float] = {
    "fuel/f3/mpm.py": 0.1,
    "fuel/f3/cellnet/connector_manager.py": 0.1,
    "private/fed/authenticator.py": 0.1,
    "private/fed/app/client/client_train.py": 0.2,
    "private/fed/server/job_runner.py": 0.25,
}
"""Longest pause, in seconds, that files of the engine make in forked processes, and in those of tests.

They wait half a second to three for a network, or look once a second whether something has begun or ended.
"""
_DIES_WITH_PARENT = 1
SCRIPT = '''#!{python} -ISs
"""Stand for a forked process, or become the real one."""
import json, os, signal, socket, struct, sys

name, given, where = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ.get("{socket}", "")
words = list(given)
while words and words[0] in ("-u", "-P"):
    del words[0]
known = name in {commands} or words[:1] == ["-m"]
site = given[:2] in (["site", "start"], ["site", "serve"])
site = site or words[1:2] and words[1].endswith("_train") and "{sites}" not in os.environ
connection = socket.socket(socket.AF_UNIX)
if not known or site or os.geteuid() != {owner} or connection.connect_ex(where):
    here = os.path.join(os.path.dirname(sys.argv[0]), "python3")
    os.execv("{base}", [here, *(["{programs}/" + name] if name in {commands} else []), *given])
ignored = [int(n) for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) == signal.SIG_IGN]
os.umask(umask := os.umask(0))
asked = {{"name": name, "arguments": given, "folder": os.getcwd(), "umask": umask, "ignored": ignored}}
asked = json.dumps(asked | {{"executable": sys.argv[0], "environment": dict(os.environ)}}).encode()
with connection:
    socket.send_fds(connection, [struct.pack("=q", len(asked)) + asked], [0, 1, 2])
    (child,) = struct.unpack("=i", connection.recv(4, socket.MSG_WAITALL))
    for number in {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}} - {{*ignored}}:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(*struct.unpack("=i", connection.recv(4, socket.MSG_WAITALL)))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
'''


def environment(values: Mapping[str, str], *, sites: bool = False) -> dict[str, str]:
    """Return an environment in which programs are forked, made of another; servers and sites if asked for."""
    folder = started()
    if folder is None:
        return dict(values)
    path = os.pathsep.join([str(folder / "bin"), values["PATH"]])
    return dict(values) | {"PATH": path, SOCKET: str(folder / "socket")} | ({SITES: "1"} if sites else {})


def executable(values: Mapping[str, str]) -> str:
    """Return the interpreter of an environment: the script, where programs are forked in it."""
    return str(shutil.which("python3", path=values["PATH"])) if SOCKET in values else sys.executable


def forked(process: psutil.Process) -> psutil.Process:
    """Return the process for which a script stands; the same one if it is none of these scripts.

    Raises:
        psutil.NoSuchProcess: it has not been forked yet, or has ended.
    """
    folder = started()
    if folder is None or process.cmdline()[1:2] != ["-ISs"]:
        return process
    with contextlib.suppress(FileNotFoundError, ValueError):  # not there yet, or not written yet
        return psutil.Process(int((folder / "forked" / str(process.pid)).read_text()))
    raise psutil.NoSuchProcess(process.pid)


_forks: list[subprocess.Popen[bytes]] = []


@functools.cache
def started() -> Path | None:
    """Start the process that forks, once for all processes of a test session, and return its folder."""
    if os.environ.get(REAL) == "1" or not hasattr(os, "pidfd_open"):  # not on a Mac
        return None
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"tightframe-forking-{os.getuid()}-{session}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "socket").exists():
            return folder
        _write_programs(folder)
        values = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-P", __file__, str(folder), str(session)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=values | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        _forks.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            said = (folder / "log").read_text()
            shutil.rmtree(folder)
            raise RuntimeError(f"The process that forks did not start: {said}")
    return folder


def _write_programs(folder: Path) -> None:
    """Write the scripts, and beside them what makes a folder an environment of Python."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "forked").mkdir()
    names = {
        "python": sys.executable,
        "socket": SOCKET,
        "sites": SITES,
        "commands": list(COMMANDS),
        "owner": os.geteuid(),
        "programs": Path(sys.executable).parent,
        "base": Path(sys.executable).resolve(),
    }
    for name in ("python", "python3", *COMMANDS):
        (programs / name).write_text(SCRIPT.format(**names))
        (programs / name).chmod(0o700)
    outside = str(sys.prefix == sys.base_prefix).lower()
    (folder / "pyvenv.cfg").write_text(
        f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = {outside}\n"
    )
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")


def _import_before() -> None:
    """Import what our code and the engine's processes import of others, and what jobs begin with of ours."""
    line = re.compile(rf"^\s*(?:from|import) ((?:{'|'.join(PACKAGES.split())})\b[\w.]*)", re.MULTILINE)
    wanted = {f"nvflare.{name}" for name in ENGINE}
    for path in [*(ROOT / "custom").rglob("*.py"), *(ROOT / "app").rglob("*.py")]:
        wanted |= set(line.findall(path.read_text(encoding="utf-8")))
    drivers = importlib.import_module(DRIVERS)
    wanted |= {found.name for found in pkgutil.iter_modules(drivers.__path__, f"{DRIVERS}.")}
    for name in sorted(name for name in wanted if "mlflow" not in name):  # it starts a thread
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    for name in OURS:
        with contextlib.suppress(ModuleNotFoundError):  # found by the path of a test alone
            importlib.import_module(name)
    # `python -m` warns where it is there already.
    for name in (f"nvflare.{name}" for name in ENGINE):
        package, _, own = name.rpartition(".")
        vars(sys.modules[package]).pop(own, None)
        del sys.modules[name]
    # A child would end with them, and copy the memory in which torch's are.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


@functools.cache
def hasten() -> None:
    """Shorten pauses of the engine in this process."""
    longest = {f"/nvflare/{file}": seconds for file, seconds in PAUSES.items()}
    sleep, files = time.sleep, tuple(longest)

    def pause(seconds: float) -> None:
        if seconds > 0.1 and (name := sys._getframe(1).f_code.co_filename).endswith(files):
            seconds = min(seconds, next(most for file, most in longest.items() if name.endswith(file)))
        sleep(seconds)

    time.sleep = pause  # type: ignore[assignment]


def serve(folder: Path, session: int, ready: Callable[[], object]) -> socket.socket | None:
    """Fork a child for each connection until the session, or another process, has ended.

    Returns:
        In a child, its connection; in this process, None at the end.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "starting"))
    listener.listen(64)
    events, end = select.epoll(), os.pidfd_open(session)
    events.register(listener, select.EPOLLIN)
    events.register(end, select.EPOLLIN)
    asking: dict[int, tuple[int, socket.socket]] = {}
    children: dict[int, tuple[int, socket.socket]] = {}
    (folder / "starting").rename(folder / "socket")
    ready()
    while True:
        for found, _ in events.poll(maxevents=1):  # so that none is of a file that was closed meanwhile
            if found == end:
                return None
            if found == listener.fileno():
                connection = listener.accept()[0]
                if (pid := os.fork()) == 0:
                    listener.close()
                    events.close()
                    for number, (_, other) in children.items():
                        other.close()
                        os.close(number)
                    os.close(end)
                    return connection
                child = os.pidfd_open(pid)
                # The child reads what is sent; here only whether the other end is there.
                events.register(connection, select.EPOLLRDHUP)
                events.register(child, select.EPOLLIN)
                asking[connection.fileno()] = children[child] = (pid, connection)
                with contextlib.suppress(BrokenPipeError):
                    connection.send(struct.pack("=i", pid))
            elif found in asking:
                events.unregister(found)
                pid, _ = asking.pop(found)
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):  # it had no group of its own yet
                    os.killpg(pid, signal.SIGKILL)
            else:
                pid, connection = children.pop(found)
                events.unregister(found)
                os.close(found)
                _, status = os.waitpid(pid, 0)
                if asking.pop(connection.fileno(), None):
                    events.unregister(connection)
                    with contextlib.suppress(BrokenPipeError):
                        connection.send(struct.pack("=i", status))
                connection.close()


@dataclass
class Asked:
    """What a script asks for: a program, how, and with which files."""

    what: dict[str, Any]
    files: list[int]

    @property
    def is_site(self) -> bool:
        words = [word for word in self.what["arguments"] if word not in ("-u", "-P")]
        return words[:1] == ["-m"] and words[1].endswith("_train")


def receive(folder: Path, connection: socket.socket) -> Asked:
    """Read what a script asks for, and note which process it stands for."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    asking, _, _ = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    (folder / "forked" / str(asking)).write_text(str(os.getpid()))
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    (size,) = struct.unpack("=q", head)
    what = json.loads(connection.recv(size, socket.MSG_WAITALL))
    connection.close()
    return Asked(what, files)


def fork_below(folder: Path, asked: Asked) -> socket.socket | None:
    """Fork a process that forks the jobs of this one, a server or site, until it has ended.

    Returns:
        In a job's process, its connection; in this process, None.
    """
    above, place = os.getpid(), folder / f"below-{os.getpid()}"
    place.mkdir()
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        asked.what["environment"][SOCKET] = str(place / "socket")
        return None
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    for file in (ready, *asked.files):
        os.close(file)
    connection = serve(place, above, lambda: os.close(told))
    if connection is None:
        os._exit(0)
    return connection


def become(asked: Asked) -> tuple[str, list[str]]:
    """Take over what a process has from whoever starts it; return the module to run, and how.

    Returns:
        Name of the program, and its arguments.
    """
    os.setsid()
    what = asked.what
    for place, file in enumerate(asked.files):
        os.dup2(file, place)
        os.close(file)
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, signal.SIG_IGN if number in what["ignored"] else usual)
    os.umask(what["umask"])
    os.chdir(what["folder"])
    os.environ.clear()
    os.environ.update(what["environment"])
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    options, rest = [], list(what["arguments"])
    while rest and rest[0] in ("-u", "-P"):
        options.append(rest.pop(0))
    _open_streams(unbuffered="-u" in options)
    importlib.invalidate_caches()
    sys.executable = str(Path(what["executable"]).with_name("python3"))
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules.pop("sitecustomize", None)
    if any((Path(path) / "sitecustomize.py").is_file() for path in sys.path):
        importlib.import_module("sitecustomize")
    sys.modules["__main__"] = types.ModuleType("__main__")
    if what["name"] in COMMANDS:
        sys.path.insert(0, str(Path(what["executable"]).parent))
        return COMMANDS[what["name"]], [what["executable"], *rest]
    if "-P" not in options:
        sys.path.insert(0, os.getcwd())
    return "", rest[1:]


def _open_streams(*, unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = io.TextIOWrapper(
            open(number, "wb", -1 if number == 1 and not unbuffered else 0, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Fork until the session has ended; in each child, run its program as ``python`` does."""
    folder = Path(sys.argv[1])
    gc.disable()
    _import_before()
    hasten()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # as in tests/conftest.py
    gc.enable()
    connection = serve(folder, int(sys.argv[2]), lambda: os.write(1, b"ready\n"))
    if connection is None:
        shutil.rmtree(folder)
        return
    asked = receive(folder, connection)
    if asked.is_site and (connection := fork_below(folder, asked)) is not None:
        asked = receive(folder, connection)
    code = 0
    try:
        _run(*become(asked))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # As Python ends, but for the clearing of every module, which would copy the memory of all of them.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _run(module: str, arguments: list[str]) -> None:
    np.random.seed()
    if module:
        sys.argv = sys.orig_argv = arguments
        sys.exit(importlib.import_module(module).main())
    sys.argv, sys.orig_argv = ["-m", *arguments[1:]], [sys.executable, "-m", *arguments]
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
