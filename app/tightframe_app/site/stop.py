"""``tightframe site stop``: end the engine's processes of one kit, and no others.

They are known by what they were started as: the engine's own modules with this kit as their workspace, and
the script of the kit's ``startup`` that starts the client anew. Where another account trains, its processes
of this site's jobs are known by that account and the site's name; they end when the client does, by the
service that has started them. A file with a process number proves
nothing (the number may be another process's by now), and with ``--once`` the engine writes none.
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
from tightframe_app.federation.kits import LAUNCHER, PERSON_FILE, Kit, persons_kit
from tightframe_app.site.engine import common_name, components

ENGINE = "nvflare.private.fed.app.client."
CLIENT, JOB = ENGINE + "client_train", ENGINE + "worker_process"
SCRIPT = "sub_start.sh"
SERVE = ["site", "serve"]
SHELLS = frozenset({"bash", "sh", "dash"})
NOTES = ("daemon_pid.fl", "pid.fl", "shutdown.fl", "restart.fl")
"""Files that the engine's script leaves of an ended run; a stale number keeps it from starting again."""
GRACE = 5.0
"""Seconds for a killed process to be gone."""
POLL = 1.0
PROC = Path("/proc")
UNITS = "tightframe"
"""Prefix of units that run a site; see ``provisioning/systemd``."""

Role = Literal["script", "client", "service", "job", "child"]


ASKED: frozenset[Role] = frozenset({"script", "client", "service"})


@dataclass(frozen=True)
class Found:
    """A process of the kit.

    Attributes:
        process: it; a number that another process has meanwhile is not mistaken for it.
        role: what it does.
        job: which job it runs, if it runs one.
        account: the training account, where that is another than the client's and the process is its.
    """

    process: psutil.Process
    role: Role
    job: str = ""
    account: str = ""

    def described(self) -> str:
        """For people."""
        what = {
            "script": "the engine's script, which starts the client anew",
            "client": "the engine's client",
            "service": "the training service, which starts jobs and ends them",
            "job": f"job {self.job}",
            "child": "a process that one of them has started",
        }
        whose = f" of {self.account}" if self.account else ""
        return f"{what[self.role]} (process {self.process.pid}{whose})"


@dataclass(frozen=True)
class Stopped:
    """Result of stopping a site's processes.

    Attributes:
        killed: those that did not end when asked to.
        left: those that are there still.
    """

    killed: list[Found] = field(default_factory=list)
    left: list[Found] = field(default_factory=list)


def site_kit(folder: Path) -> Kit:
    """The site's kit in a folder.

    Raises:
        SiteConfigError: TF-619, if it is another kit, with what there is to do there; TF-615, if it is none.
    """
    startup = folder / "startup"
    if (startup / PERSON_FILE).is_file():
        raise _other_kit(
            persons_kit(startup),
            "Of a person's kit nothing runs that could be stopped: Ctrl-C ends `tightframe watch` and the "
            "console, and `nvflare job abort JOB_ID` a job.",
        )
    kit = Kit.open(folder)
    if kit.kind == "server":
        raise _other_kit(
            f"the server's kit, {kit.name}",
            f"To stop the server: Ctrl-C where its startup/{SCRIPT} --once runs, or `kill PROCESS_ID` of the "
            "process that it has become. The same script starts it again.",
        )
    return kit


def _other_kit(found: str, instead: str) -> SiteConfigError:
    return SiteConfigError(
        f"Expected the kit of a site, but got {found}. Nothing was stopped. {instead} To stop a site, run "
        "`tightframe site stop --kit KIT` with the site's own kit, on the site's machine.",
        code="TF-619",
    )


def running(kit: Path) -> list[Found]:
    """The processes of a kit, the script first: what it starts anew is ended after it."""
    whole, trainer = kit.resolve(), _trainer(kit)
    found = [one for process in psutil.process_iter() if (one := _known(process, whole, trainer)) is not None]
    order: tuple[Role, ...] = ("script", "client", "service", "job", "child")
    numbers = {one.process.pid for one in found}
    for one in list(found):
        for child in _children(one.process):
            if child.pid not in numbers:
                numbers.add(child.pid)
                found.append(Found(child, "child", account=one.account))
    return sorted(found, key=lambda one: (order.index(one.role), one.process.pid))


def jobs(found: Iterable[Found]) -> list[str]:
    """The jobs that run, by their ids."""
    return sorted({one.job for one in found if one.role == "job"})


def service(found: Iterable[Found]) -> str | None:
    """The systemd unit that runs the client, if its name begins as ours does; None for any other way.

    By the control group, which the process cannot leave. Other names tell nothing: what is started by
    hand is in the group of a login or of a terminal, which may be a service, too, or a user's own one.
    """
    for one in found:
        if one.role == "client":
            try:
                groups = (PROC / str(one.process.pid) / "cgroup").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for group in groups:
                unit = group.rpartition("/")[2].removesuffix(".service")
                if ":/system.slice/" in group and group.endswith(".service") and unit.startswith(UNITS):
                    return unit
    return None


def check_owner(found: Iterable[Found]) -> None:
    """Refuse to begin what this account cannot finish.

    Raises:
        SiteConfigError: TF-618, naming the account that runs the kit.
    """
    me = os.getuid()
    for one in found:
        try:
            # What another account has of this site ends with the client, by that account's own service.
            if me in (0, one.process.uids().real) or one.account:
                continue
            owner = one.process.username()
        except psutil.NoSuchProcess:
            continue
        raise SiteConfigError(
            f"Expected this site's processes to be this account's own, but got {one.described()} of {owner}: "
            f"nothing was stopped. Run the command as {owner}.",
            code="TF-618",
        )


def wait_idle(kit: Path, say: Callable[[str], None]) -> list[Found]:
    """The processes of a kit once no job runs there; says which jobs are waited for."""
    waited: list[str] = []
    while (names := jobs(found := running(kit))) != []:
        if names != waited:
            say(f"waiting for job {', '.join(names)} to end")
            waited = names
        time.sleep(POLL)
    return found


def stop(kit: Path, found: Sequence[Found], *, timeout: float) -> Stopped:
    """Ask script and client to end, wait, kill what has not, and look once more.

    A job's process ends by itself within seconds of its client, as the engine has it: so it is asked nothing.

    Args:
        kit: whose processes they are.
        found: as ``running`` found them.
        timeout: seconds from asking to killing.
    """
    _each((one for one in found if one.role in ASKED), psutil.Process.terminate)
    everything = list(found)
    until = time.monotonic() + timeout
    while (alive := _alive(everything)) and time.monotonic() < until:
        psutil.wait_procs([one.process for one in alive], timeout=min(POLL, timeout))
        if not _alive(everything):
            # What was started while the others were asked: it has not been asked yet.
            new = [one for one in running(kit) if one not in everything]
            _each((one for one in new if one.role in ASKED), psutil.Process.terminate)
            everything += new
    _each(alive, psutil.Process.kill)
    psutil.wait_procs([one.process for one in alive], timeout=GRACE)
    left = running(kit)
    if not left:
        for name in NOTES:
            (kit / name).unlink(missing_ok=True)
    return Stopped(killed=alive, left=left)


def _alive(found: Iterable[Found]) -> list[Found]:
    return [one for one in found if _lives(one.process)]


def _lives(process: psutil.Process) -> bool:
    """Return true if it runs; one that has ended and was not asked for its exit code yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _each(found: Iterable[Found], do: Callable[[psutil.Process], None]) -> None:
    for one in found:
        try:
            do(one.process)
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            if not one.account:
                raise


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if _lives(child)]
    except psutil.NoSuchProcess:
        return []


def _trainer(kit: Path) -> tuple[str, str] | None:
    """The account that trains for a kit, by its launcher, and the site's name; None if the kit's own does."""
    from tightframe.flare.identity import SITE_FILE

    for item in components(kit / "local"):
        arguments = item.get("args")
        if item.get("path") == LAUNCHER and isinstance(arguments, dict):
            name = common_name(kit / "startup" / SITE_FILE)
            return (str(arguments.get("account")), name) if name is not None else None
    return None


def _known(process: psutil.Process, kit: Path, trainer: tuple[str, str] | None) -> Found | None:
    """Return a process of a kit; None if it is nothing to it, or cannot be looked at.

    Args:
        process: any.
        kit: the folder.
        trainer: account that trains for it, and name of its site.
    """
    try:
        command = process.cmdline()
        if not command or not _lives(process):
            return None
        if Path(command[0]).name in SHELLS:
            given = (Path(text) for text in command[1:] if Path(text).name == SCRIPT)
            if any(_in_folder(process, path) == kit / "startup" / SCRIPT for path in given):
                return Found(process, "script")
            return None
        if any(list(pair) == SERVE for pair in pairwise(command)):
            served = _values(command, "--kit")
            return (
                Found(process, "service")
                if any(_in_folder(process, Path(one)) == kit for one in served)
                else None
            )
        for module, role in ((CLIENT, "client"), (JOB, "job")):
            rest = list(_after(command, module))
            if any(_in_folder(process, Path(text)) == kit for text in _values(rest, "-m", "--workspace")):
                job = next(_values(rest, "-n", "--job_id"), "")
                return Found(process, "client" if role == "client" else "job", job)
            if role == "job" and trainer is not None and _trains(process, rest, trainer):
                return Found(process, "job", next(_values(rest, "-n", "--job_id"), ""), trainer[0])
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return None


def _trains(process: psutil.Process, arguments: Sequence[str], trainer: tuple[str, str]) -> bool:
    account, site = trainer
    return process.username() == account and site in _values(arguments, "-c", "--client_name")


def _after(command: Sequence[str], module: str) -> Iterator[str]:
    """The arguments of ``python -m MODULE``; none if it is another program."""
    for place in range(len(command) - 1):
        if command[place : place + 2] == ["-m", module]:
            yield from command[place + 2 :]
            return


def _values(arguments: Sequence[str], *options: str) -> Iterator[str]:
    return (value for option, value in pairwise(arguments) if option in options)


def _in_folder(process: psutil.Process, path: Path) -> Path:
    """A path as the process means it."""
    return (path if path.is_absolute() else Path(process.cwd()) / path).resolve()
