"""A federation of which one hospital has two accounts: system accounts, made for the test and removed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nvflare
from tests.support.production.federation import (
    ACCOUNTS,
    LEAD,
    PROJECT,
    SERVER,
    SITES,
    Federation,
    free_port,
    make_records,
)

SITE = "hospital-2"
SERVICE = f"{SITE}-training"
_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "ensurepip")


@dataclass
class TwoAccounts(Federation):
    """The federation, and the two accounts of ``SITE``."""

    real: tuple[str, ...] = (SERVER,)
    engine: str = f"tfe{os.getpid()}"
    training: str = f"tft{os.getpid()}"

    @property
    def training_kit(self) -> Path:
        return self.folder / "kits-training" / PROJECT / "prod_00" / SITE

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "training.sock"

    @property
    def environment(self) -> dict[str, str]:
        """As everywhere, with an interpreter that every account can run."""
        own = super().environment
        path = os.pathsep.join([str(self.folder / "bin"), own["PATH"]])
        packages = str(Path(nvflare.__path__[0]).parent)
        return own | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], packages]),
            "LD_LIBRARY_PATH": str(self.folder / "python" / "lib"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def forks(self, command: Sequence[str]) -> bool:
        """What root runs; the other accounts may not run what forks."""
        return not any("setpriv" in word for word in command)

    def changes(self) -> dict[str, str]:
        """This reader's names; it is root, and needs no sudo."""
        run_as = "setpriv --reuid={0} --regid={0} --init-groups env HOME=/home/{0}"
        return {
            "sudo -u tightframe-engine": run_as.format(self.engine),
            "sudo -u tightframe-training": run_as.format(self.training),
            "sudo ": "",
            "hospital-1": SITE,
            r"SHA256:[0-9A-F:.]+": self.fingerprint,
            r"/var/lib/tightframe\b": str(self.state(SITE)),
            r"/run/tightframe\b": str(self.socket.parent),
            "/data/fed_isic2019": str(self.records(SITE)),
            '"center": 0': '"center": 2',
            "tightframe-engine": self.engine,
            "tightframe-training": self.training,
        }

    def follow_two(self, only: slice, more: str = "") -> str:
        """Run commands of the guide's section."""
        return self.follow(self.site_guide, ACCOUNTS, self.changes(), only=only, more=more)

    def start_two(self, which: int, known_as: str) -> None:
        """Start the service or the client by the guide's command."""
        more = f"--socket {self.socket}" if known_as == SERVICE else ""
        (line,) = self.site_guide.commands(ACCOUNTS, self.changes(), slice(which, which + 1 or None))
        with (self.folder / f"{known_as}.log").open("ab") as log:
            self.processes[known_as] = subprocess.Popen(
                ["bash", "-c", f"umask 077; exec {line} {more}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_log(self, job: str, seconds: float = 120) -> None:
        """Wait until a job's process has begun to run it."""
        path, until = self.training_kit / job / "log.txt", time.monotonic() + seconds
        while not (path.exists() and "ClientRunner" in path.read_text(errors="replace")):
            assert time.monotonic() < until, self.said(SERVICE)[-3000:]
            time.sleep(0.2)

    def as_account(self, name: str, code: str, *arguments: str) -> str:
        """Run Python as an account; what it prints."""
        command = [
            "setpriv",
            f"--reuid={name}",
            f"--regid={pwd.getpwnam(name).pw_gid}",
            "--init-groups",
            "python3",
            "-c",
            code,
        ]
        return self.run(*command, *arguments)


def reachable_python(folder: Path) -> None:
    """Copy this interpreter to where every account can run it, and the package's command with it.

    An interpreter in somebody's home folder is that account's alone.
    """
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    made = folder / "python"
    shutil.copytree(base / "lib" / version, made / "lib" / version, ignore=_LEFT_OUT, symlinks=True)
    for library in (base / "lib").glob("libpython*"):
        shutil.copy(library, made / "lib" / library.name)
    (made / "bin").mkdir()
    shutil.copy((base / "bin" / version).resolve(), made / "bin" / "python3")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(made / "bin" / "python3")
    command = folder / "bin" / "tightframe"
    command.write_text(f"#!{made}/bin/python3\nfrom tightframe_app.cli import main\nmain()\n")
    command.chmod(0o755)


def set_up(made: TwoAccounts) -> None:
    """Everything before the first process, the site with two accounts by its section of the guide."""
    reachable_python(made.folder)
    (made.folder / "home").mkdir()
    made.state(SERVER).parent.mkdir()
    made.follow(made.operations, "1. Lead")
    made.follow(made.operations, "2. Keeper")
    made.fingerprint = made.root_fingerprint("ca")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(made.provision, (SERVER, LEAD, *(name for name in SITES if name != SITE))))
    make_records(made.records(SITE), 2)
    shutil.copy(made.folder / "federation" / "requests" / f"{SITE}.yml", made.folder)
    made.follow_two(slice(0, 2))  # the accounts
    made.follow_two(slice(2, 4))
    for asked in (SITE, SERVICE):
        shutil.copy(made.folder / asked / f"{SITE}.request.zip", made.folder)
        signed = {r"hospital-1-2029": asked, r"hospital-1(?=\.request)": SITE}
        made.follow(made.operations, "One at a time", signed)
    made.follow_two(slice(4, 6))
    made.follow_two(slice(6, 11))
    where = f"--socket {made.socket}"
    made.follow_two(slice(11, 12), more=f"--device cpu {where}")
    made.follow_two(slice(12, 13), more=where)


@contextmanager
def running() -> Iterator[TwoAccounts]:
    """The federation, up; processes, accounts and files are gone afterwards."""
    # Not below the folder of the tests, which is for this account alone.
    folder = Path(tempfile.mkdtemp(prefix="tightframe-accounts-"))
    folder.chmod(0o755)
    made = TwoAccounts(folder, free_port())
    try:
        set_up(made)
        made.start_two(-2, SERVICE)
        made.start(SERVER)
        for name in SITES:
            if name != SITE:
                made.start(name)
        made.start_two(-1, SITE)
        made.wait_joined(*SITES)
        yield made
    finally:
        try:
            made.stop()
        finally:
            for account in (made.engine, made.training):
                subprocess.run(["userdel", "--remove", account], check=False, capture_output=True)
            shutil.rmtree(folder)
