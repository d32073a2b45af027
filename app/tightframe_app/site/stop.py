"""``tightframe site stop``: end the engine's processes of one kit, a site's or the server's, and no others.

Processes are identified by their command lines (the engine's modules with this kit as their workspace, and
the script in the kit's ``startup`` that restarts the client) and by their account, root or an owner of the
kit's files, as anybody can forge a command line. If another account trains, its processes of this site's
jobs are identified by that account and the site's name; the service that started them ends them when the
client ends. A file with a process number proves nothing, because the number may have been reused, and with
``--once`` the engine writes none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import psutil

from tightframe.errors import SiteConfigError
from tightframe.files import quoted
from tightframe_app.federation.kits import LAUNCHER, PERSON_FILE, Kit, common_name, persons_kit
from tightframe_app.site.checks.engine import components

Role = Literal["script", "client", "server", "service", "job", "child"]

ENGINE = "nvflare.private.fed.app."
CLIENT, JOB = ENGINE + "client.client_train", ENGINE + "client.worker_process"
SERVER, SERVER_JOB = ENGINE + "server.server_train", ENGINE + "server.runner_process"
MODULES: tuple[tuple[str, Role], ...] = (
    (CLIENT, "client"),
    (JOB, "job"),
    (SERVER, "server"),
    (SERVER_JOB, "job"),
)
SCRIPT = "sub_start.sh"
SERVE = ["site", "serve"]
SHELLS = frozenset({"bash", "sh", "dash"})
NOTES = ("daemon_pid.fl", "pid.fl", "shutdown.fl", "restart.fl")
"""Files that the engine's script leaves after a run; a stale process number keeps it from starting again."""
GRACE = 5.0
"""Seconds to wait for a killed process to disappear."""
POLL = 1.0
PROC = Path("/proc")
UNITS = "tightframe"
"""Prefix of the systemd units that run a site; see ``provisioning/systemd``."""

TERMINATED: frozenset[Role] = frozenset({"script", "client", "server", "service"})


@dataclass(frozen=True)
class KitProcess:
    """A process of the kit.

    Attributes:
        process: distinguished from a later one with the same number.
        job: id of its job, if any.
        account: the training account, if the process runs in it and it is not the client's account.
    """

    process: psutil.Process
    role: Role
    job: str = ""
    account: str = ""

    def described(self) -> str:
        """Return a description to print."""
        what = {
            "script": "the engine's script, which restarts the engine",
            "client": "the engine's client",
            "server": "the engine's server",
            "service": "the training service, which starts jobs and ends them",
            "job": f"job {self.job}",
            "child": "a child process of one of them",
        }
        of_account = f" of {self.account}" if self.account else ""
        return f"{what[self.role]} (process {self.process.pid}{of_account})"


@dataclass(frozen=True)
class Stopped:
    """Result of stopping a site's processes.

    Attributes:
        killed: processes that did not end when terminated.
    """

    killed: list[KitProcess] = field(default_factory=list)
    left: list[KitProcess] = field(default_factory=list)


def opened(folder: Path) -> Kit:
    """Return the kit of a site or of the server in a folder.

    Raises:
        SiteConfigError: TF-619, with what to do instead, for a person's kit; TF-615, if it is no kit.
    """
    startup = folder / "startup"
    if (startup / PERSON_FILE).is_file():
        raise _other_kit(
            "the kit of a site or of the server",
            persons_kit(startup),
            "A person's kit has no processes to stop: Ctrl-C ends `tightframe watch` and the console, and "
            "`nvflare job abort JOB_ID` ends a job. To stop a site or the server, run `tightframe site stop "
            "--kit KIT` with its own kit, on its machine.",
        )
    return Kit.open(folder)


def site_kit(folder: Path) -> Kit:
    """Return the site's kit in a folder.

    Raises:
        SiteConfigError: TF-619, with what to do instead, for another kind of kit; TF-615, if it is no kit.
    """
    kit = opened(folder)
    if kit.kind == "server":
        raise _other_kit(
            "the kit of a site",
            f"the server's kit, {kit.name}",
            f"The server is stopped by `tightframe site stop --kit {quoted(folder)}`.",
        )
    return kit


def _other_kit(expected: str, got: str, instead: str) -> SiteConfigError:
    return SiteConfigError(
        f"Expected {expected}, but got {got}. Nothing was changed. {instead}", code="TF-619"
    )


def running(kit: Path) -> list[KitProcess]:
    """Return a kit's processes, the script first, so that it cannot restart an ended one."""
    folder, trainer = kit.resolve(), _trainer(kit)
    processes = [
        item
        for process in psutil.process_iter()
        if (item := _kit_process(process, folder, trainer)) is not None
    ]
    order: tuple[Role, ...] = ("script", "client", "server", "service", "job", "child")
    numbers = {item.process.pid for item in processes}
    for item in list(processes):
        for child in _children(item.process):
            if child.pid not in numbers:
                numbers.add(child.pid)
                processes.append(KitProcess(child, "child", account=item.account))
    return sorted(processes, key=lambda item: (order.index(item.role), item.process.pid))


def jobs(processes: Iterable[KitProcess]) -> list[str]:
    """Return the ids of the running jobs."""
    return sorted({item.job for item in processes if item.role == "job"})


def service(processes: Iterable[KitProcess]) -> str | None:
    """Return the systemd unit that runs client or server, if its name has our prefix; else None.

    The unit is that of the control group, which the process cannot leave. Other names are not conclusive: a
    client started by hand is in the group of a login or a terminal, which may also be a service.
    """
    for item in processes:
        if item.role in ("client", "server"):
            try:
                groups = (PROC / str(item.process.pid) / "cgroup").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for group in groups:
                unit = group.rpartition("/")[2].removesuffix(".service")
                if ":/system.slice/" in group and group.endswith(".service") and unit.startswith(UNITS):
                    return unit
    return None


def check_owner(processes: Iterable[KitProcess]) -> None:
    """Refuse to stop processes that this account may not stop.

    Raises:
        SiteConfigError: TF-618; the text names the account that runs the kit.
    """
    me = os.getuid()
    for item in processes:
        try:
            # The training account's service ends its processes when the client ends.
            if me in (0, item.process.uids().real) or item.account:
                continue
            owner = item.process.username()
        except psutil.NoSuchProcess:
            continue
        raise SiteConfigError(
            f"Expected this site's processes to run as this account, but {item.described()} runs as {owner}: "
            f"nothing was stopped. Run the command as {owner}.",
            code="TF-618",
        )


def wait_idle(kit: Path, say: Callable[[str], None]) -> list[KitProcess]:
    """Wait until no job runs, printing the jobs waited for; return the kit's remaining processes."""
    waited: list[str] = []
    while (names := jobs(processes := running(kit))) != []:
        if names != waited:
            say(f"waiting for job {', '.join(names)} to end")
            waited = names
        time.sleep(POLL)
    return processes


def stop(kit: Path, processes: Sequence[KitProcess], *, timeout: float) -> Stopped:
    """Terminate script, client and service, wait, kill the rest, and list what still runs.

    A job's process is not terminated: by the engine's design it ends within seconds of its client.

    Args:
        processes: from ``running``.
        timeout: seconds from terminating to killing.
    """
    _signal((item for item in processes if item.role in TERMINATED), psutil.Process.terminate)
    everything = list(processes)
    until = time.monotonic() + timeout
    while (alive := _alive(everything)) and time.monotonic() < until:
        psutil.wait_procs([item.process for item in alive], timeout=min(POLL, timeout))
        if not _alive(everything):
            # Processes started meanwhile have not been terminated yet.
            new = [item for item in running(kit) if item not in everything]
            _signal((item for item in new if item.role in TERMINATED), psutil.Process.terminate)
            everything += new
    _signal(alive, psutil.Process.kill)
    psutil.wait_procs([item.process for item in alive], timeout=GRACE)
    left = running(kit)
    if not left:
        for name in NOTES:
            (kit / name).unlink(missing_ok=True)
    return Stopped(killed=alive, left=left)


def _alive(processes: Iterable[KitProcess]) -> list[KitProcess]:
    return [item for item in processes if _lives(item.process)]


def _lives(process: psutil.Process) -> bool:
    """Check whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: Iterable[KitProcess], do: Callable[[psutil.Process], None]) -> None:
    for item in processes:
        try:
            do(item.process)
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            if not item.account:
                raise


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if _lives(child)]
    except psutil.NoSuchProcess:
        return []


def _trainer(kit: Path) -> tuple[str, str] | None:
    """Return the training account in a kit's launcher, and the site's name; None with one account."""
    from tightframe.flare.identity import SITE_FILE

    for item in components(kit / "local"):
        arguments = item.get("args")
        if item.get("path") == LAUNCHER and isinstance(arguments, dict):
            name = common_name(kit / "startup" / SITE_FILE)
            return (str(arguments.get("account")), name) if name is not None else None
    return None


def _kit_process(process: psutil.Process, kit: Path, trainer: tuple[str, str] | None) -> KitProcess | None:
    """Identify a process of the kit; return None for any other, or if it cannot be inspected.

    Args:
        process: any.
        trainer: the kit's training account and site name.
    """
    try:
        kit_process = _by_command(process, kit, trainer)
        return kit_process if kit_process is not None and _may_run(process, kit, trainer) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _by_command(process: psutil.Process, kit: Path, trainer: tuple[str, str] | None) -> KitProcess | None:
    """Identify a process by its command line alone."""
    command = process.cmdline()
    if not command or not _lives(process):
        return None
    if Path(command[0]).name in SHELLS:
        scripts = (Path(text) for text in command[1:] if Path(text).name == SCRIPT)
        if any(_in_folder(process, path) == kit / "startup" / SCRIPT for path in scripts):
            return KitProcess(process, "script")
        return None
    if any(list(pair) == SERVE for pair in pairwise(command)):
        served = _values(command, "--kit")
        return (
            KitProcess(process, "service")
            if any(_in_folder(process, Path(item)) == kit for item in served)
            else None
        )
    for module, role in MODULES:
        rest = list(_after(command, module))
        if any(_in_folder(process, Path(text)) == kit for text in _values(rest, "-m", "--workspace")):
            job = next(_values(rest, "-n", "--job_id"), "")
            return KitProcess(process, role, job)
        if role == "job" and trainer is not None and _trains(process, rest, trainer):
            return KitProcess(process, "job", next(_values(rest, "-n", "--job_id"), ""), trainer[0])
    return None


def _may_run(process: psutil.Process, kit: Path, trainer: tuple[str, str] | None) -> bool:
    """Check whether a process runs in an account that can use the kit's key, or in the training account."""
    owners = (path.lstat().st_uid for path in (kit, *(kit / "startup").glob("*")) if path.exists())
    uid = process.uids().real
    return uid == 0 or uid in owners or (trainer is not None and process.username() == trainer[0])


def _trains(process: psutil.Process, arguments: Sequence[str], trainer: tuple[str, str]) -> bool:
    account, site = trainer
    return process.username() == account and site in _values(arguments, "-c", "--client_name")


def _after(command: Sequence[str], module: str) -> Iterator[str]:
    """Yield the arguments of ``python -m MODULE``; nothing for another program."""
    for place in range(len(command) - 1):
        if command[place : place + 2] == ["-m", module]:
            yield from command[place + 2 :]
            return


def _values(arguments: Sequence[str], *options: str) -> Iterator[str]:
    return (value for option, value in pairwise(arguments) if option in options)


def _in_folder(process: psutil.Process, path: Path) -> Path:
    """Resolve a path from the process's working folder."""
    return (path if path.is_absolute() else Path(process.cwd()) / path).resolve()
