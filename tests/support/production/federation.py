"""A federation as a consortium sets it up, on one machine, by the commands that a consortium has."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from PIL import Image
from tests.support import ROOT, forking
from tests.support.production.guides import ONE_MACHINE, Guide
from typer.testing import CliRunner

from tightframe.data.isic.folder import IMAGES
from tightframe_app import cli

BIN = Path(sys.executable).parent
PROJECT = "consortium"
SERVER, LEAD, MEMBER = "localhost", "lead@example.org", "member@example.org"
SITES = ("hospital-1", "hospital-2", "hospital-3")
NEWCOMER, STRANGER, EXPIRED = "hospital-4", "hospital-8", "hospital-9"
OPERATIONS = ROOT / "docs" / "operations.md"
SITE_GUIDE = ROOT / "docs" / "site-guide.md"
ACCOUNTS = "Two accounts"
"""Its commands are run by test_accounts."""
FAULTS = "Go on with a stopped job"
"""What stops jobs is in tests/faults."""
MEMBERS = f"--member {MEMBER}=university"
SPY = Path(__file__).parent / "spy"
ALL = slice(None)
START = 180
"""Seconds for server and sites to be up; each imports the engine on a shared core."""
PACKAGING, CERTIFYING = threading.Lock(), threading.Lock()
"""The engine packages in a working folder beside the kits, which are in one place here only."""


@dataclass
class Federation:
    """Folders and processes of everybody.

    Attributes:
        folder: of all.
        port: of the server.
        fingerprint: of the root.
        packaged: what the kits held before anybody joined.
        forked: whether commands are forked, and not started by an interpreter of their own.
        real: whose server or site, and its jobs, have interpreters of their own.
    """

    folder: Path
    port: int
    fingerprint: str = ""
    packaged: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    operations: Guide = field(default_factory=lambda: Guide(OPERATIONS, [FAULTS, ONE_MACHINE]))
    site_guide: Guide = field(default_factory=lambda: Guide(SITE_GUIDE, [ACCOUNTS]))
    forked: bool = True
    real: tuple[str, ...] = ()

    def kit(self, name: str) -> Path:
        return self.folder / "kits" / PROJECT / "prod_00" / name

    def state(self, name: str) -> Path:
        return self.folder / "state" / name

    def records(self, name: str) -> Path:
        return self.folder / "records" / name

    def kit_hashes(self) -> dict[str, str]:
        """What provisioning gave the server, the first hospitals and people: file -> SHA-256."""
        return {
            f"{name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for name in (SERVER, *SITES, LEAD, MEMBER)
            for path in sorted((self.kit(name) / "startup").iterdir())
        }

    def spied(self, name: str) -> Path:
        """Where a hospital's processes note what must not leave them."""
        return self.folder / "spied" / name

    def temporary(self, name: str) -> Path:
        """A kit's own folder for what its processes keep for a while."""
        return self.folder / "tmp" / name

    def said(self, name: str) -> str:
        """What a process has printed until now."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def forks(self, command: Sequence[str]) -> bool:
        """Whether a command is forked."""
        return self.forked

    def run(self, *command: str, code: int | None = 0, timeout: int = 240) -> str:
        """Run a command of the environment in the federation's folder; its output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=forking.environment(self.environment) if self.forks(command) else self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        output = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{output}"
        return output

    def run_here(self, *arguments: str) -> str:
        """Run a ``tightframe`` command that no guide is followed by, in this process; its output.

        In a process of its own each would import torch or the engine anew, on a core that others need.
        Paths among the arguments are whole ones.
        """
        done = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
        assert done.exit_code == 0, f"{arguments}: {done.exception!r}\n{done.output}"
        return done.output

    @property
    def environment(self) -> dict[str, str]:
        """The engine's commands keep what they know of kits in the home folder: here one of its own."""
        path = os.pathsep.join([str(ROOT / "custom"), str(ROOT / "app"), os.environ.get("PYTHONPATH", "")])
        return os.environ | {
            "HOME": str(self.folder / "home"),
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
            "PYTHONPATH": path.rstrip(os.pathsep),
            "COLUMNS": "200",
        }

    def environment_of(self, name: str) -> dict[str, str]:
        """A kit's processes have a temporary folder of their own, and obey; a hospital's are spied on."""
        for folder in (self.temporary(name), self.spied(name)):
            folder.mkdir(parents=True, exist_ok=True)
        self.orders.mkdir(exist_ok=True)
        own = self.environment | {"TMPDIR": str(self.temporary(name)), "TIGHTFRAME_PUPPET": str(self.orders)}
        own["PYTHONPATH"] = os.pathsep.join([str(SPY), own["PYTHONPATH"]])
        if name != SERVER:
            own |= {"TIGHTFRAME_SPY": str(self.spied(name))}
        return own if name in self.real else forking.environment(own, sites=True)

    @property
    def orders(self) -> Path:
        """Where a test leaves what a process is to run, as if its owner had changed it."""
        return self.folder / "orders"

    def ordered(self, pid: int, source: str, timeout: float = 60) -> Any:
        """Have a process run Python; what that calls ``answer``."""
        path = self.orders / f"{pid}-{time.monotonic_ns()}.py"
        part = path.with_suffix(".new")
        part.write_text(source)
        part.rename(path)
        until, result = time.monotonic() + timeout, path.with_suffix(".json")
        while not result.exists():
            assert time.monotonic() < until, f"{pid} did not obey"
            time.sleep(0.1)
        told = json.loads(result.read_text())
        assert "answer" in told, told["error"]
        return told["answer"]

    def signed(self, job: Path) -> Path:
        """The same folder, signed by the lead for one more submission."""
        told = self.run_here("jobs", "sign", str(job), "--kit", str(self.kit(LEAD)))
        assert f"signed by {LEAD} for hospital-1" in told
        return job

    def follow(
        self,
        guide: Guide,
        heading: str,
        changes: Mapping[str, str] | None = None,
        *,
        only: slice = ALL,
        more: str = "",
    ) -> str:
        """Run the commands under a heading of a guide as they stand there, with this federation's names.

        Args:
            guide: the page.
            heading: how it begins.
            changes: pattern -> what this reader has in its place.
            only: which of the commands.
            more: what this reader adds to each.
        """
        known = {
            r"flare\.example\.org": SERVER,
            r"\b8002\b": str(self.port),
            r"SHA256:[0-9A-F:.]+": self.fingerprint,
            r"/var/lib/tightframe-server": str(self.state(SERVER)),
        }
        lines = guide.commands(heading, known | dict(changes or {}), only)
        return "".join(self.run("bash", "-c", f"{line} {more}") for line in lines)

    def provision(self, name: str) -> None:
        """A key and a request by ``name``, a certificate by the root's keeper, a filled kit by ``name``."""
        if "@" in name or name == SERVER:
            mine = {r"lead@example\.org": name}
            asked = self.follow(self.operations, "3. Everybody", mine)
        else:
            mine = self.mine(name)
            make_records(self.records(name), centre(name))
            shutil.copy(self.folder / "federation" / "requests" / f"{name}.yml", self.folder)
            asked = self.follow(self.site_guide, "2. Ask", mine, only=slice(1, None), more="--device cpu")
        with CERTIFYING:
            for path in self.folder.glob("*.request.zip"):
                path.unlink()
            shutil.copy(self.folder / name / f"{name}.request.zip", self.folder)  # sent
            (code,) = [
                line.split(" ", 1)[1].strip() for line in asked.splitlines() if line.startswith("code ")
            ]
            told = self.follow(self.operations, "4. Keeper", more=f"--key '{code.split(',')[0]}'")
        kind = "server" if name == SERVER else name.split("@")[0] if "@" in name else "hospital"
        assert f"{name}, {kind}, of " in told and f"certified: {name}" in told, told
        with PACKAGING:
            if "@" in name or name == SERVER:
                told = self.follow(self.operations, "5. Everybody", mine)
            else:
                told = self.follow(self.site_guide, "3. Make", mine)
                assert "no problem was found" in told and f"pin    {name}=" in told

    def mine(self, name: str) -> dict[str, str]:
        """What a hospital's IT has in place of the guide's own names."""
        return {
            "hospital-1": name,
            "/var/lib/tightframe": str(self.state(name)),
            "/data/fed_isic2019": str(self.records(name)),
            '"center": 0': f'"center": {centre(name)}',
        }

    def provision_by_hand(self, name: str) -> None:
        """The same by the engine's own commands; nothing is filled."""
        paths = ["--profile", "federation/project.yml"]
        self.run("nvflare", "cert", "request", "-p", f"federation/requests/{name}.yml", "--out", name)
        received, signed = f"{name}/{name}.request.zip", f"{name}.signed.zip"
        self.run("nvflare", "cert", "approve", received, "-c", "ca", *paths, "--out", signed)
        with PACKAGING:
            package = ["nvflare", "package", signed, "--request-dir", name, "-w", "kits"]
            self.run(*package, "--fingerprint", self.fingerprint)

    def provision_by(self, ca: str, name: str) -> None:
        """The same with a new root, as where the old one's key was stolen."""
        paths = ["--profile", "federation/project.yml"]
        self.follow(self.operations, "When something leaks", {r"\bca-01\b": ca})
        self.run("nvflare", "cert", "request", "-p", f"federation/requests/{name}.yml", "--out", name)
        received, signed = f"{name}/{name}.request.zip", f"{name}.signed.zip"
        self.run("nvflare", "cert", "approve", received, "-c", ca, *paths, "--out", signed)
        package = ["nvflare", "package", signed, "--request-dir", name, "-w", f"kits-{ca}"]
        self.run(*package, "--fingerprint", self.root_fingerprint(ca))

    def root_fingerprint(self, ca: str) -> str:
        return str(json.loads((self.folder / ca / "ca.json").read_text())["rootCA_fingerprint"])

    def start(self, name: str) -> None:
        """Start a kit by the guide's command, in a process group of its own."""
        if name == SERVER:
            (line,) = self.operations.commands("6. Server", {r"flare\.example\.org": SERVER})
        else:
            (line,) = self.site_guide.commands("7. Start", {r"hospital-1": name}, slice(1))
        self._start(name, line, name)

    def start_as(self, name: str, other: str) -> None:
        """Start a copy of a site's kit that says to be another site; its certificate is what it was."""
        copy = self.folder / f"{name}-as-{other}"
        shutil.copytree(self.kit(name), copy)
        script = copy / "startup" / "sub_start.sh"
        script.write_text(script.read_text().replace(f"uid={name}", f"uid={other}"))
        self._start(name, f"{script} --once", copy.name)

    def _start(self, name: str, line: str, known_as: str) -> None:
        with (self.folder / f"{known_as}.log").open("wb") as log:
            self.processes[known_as] = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.environment_of(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def engine_process(self, name: str) -> psutil.Process:
        """The engine's own process of a kit, which starts those of jobs."""
        return forking.forked(psutil.Process(self.processes[name].pid))

    def joined(self, name: str) -> bool:
        """Whether the server has let a site in."""
        return f"New client {name}@" in self.said(SERVER)

    def wait_said(self, name: str, text: str, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while text not in self.said(name):
            assert time.monotonic() < until, self.said(name)[-5000:]
            time.sleep(0.1)

    def wait_joined(self, *names: str) -> None:
        until = time.monotonic() + START
        while not all(self.joined(name) for name in names):
            assert self.processes[SERVER].poll() is None, self.said(SERVER)
            assert time.monotonic() < until, {name: self.said(name)[-2000:] for name in (SERVER, *names)}
            time.sleep(0.5)

    def stop(self) -> None:
        """Ask every process to end, sites first, and make sure that it and its children did."""
        running = [one for one in reversed(list(self.processes.values())) if one.poll() is None]
        children = []
        for one in running:
            for process in {psutil.Process(one.pid), forking.forked(psutil.Process(one.pid))}:
                children += process.children(recursive=True)
        for one in running:
            one.send_signal(signal.SIGTERM)
        left = psutil.wait_procs(
            [psutil.Process(one.pid) for one in running if one.poll() is None], timeout=60
        )[1]
        left += psutil.wait_procs(children, timeout=60)[1]
        for process in left:
            process.kill()
        for one in running:
            one.wait(timeout=60)
        assert not left, f"had to be killed: {left}"


def centre(name: str) -> int:
    """The centre of Fed-ISIC2019, of six, whose records a hospital has."""
    return int(name[-1]) % 6


def make_records(folder: Path, centre: int) -> None:
    """Sixty made images of one centre, three classes, in the layout of Fed-ISIC2019.

    Each centre has class counts of its own: so many of the first class are of the second.
    """
    (folder / IMAGES).mkdir(parents=True)
    draw = np.random.default_rng(centre)
    with (folder / "train_test_split").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "target", "center", "fold", "fold2"])
        for index in range(60):
            name, fold = f"ISIC_{centre}{index:03d}", "train" if index < 48 else "test"
            target = 1 if index % 3 == 0 and index < 3 * centre else index % 3
            writer.writerow([name, target, centre, fold, f"{fold}_{centre}"])
            pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            pixels[..., target] //= 2
            Image.fromarray(pixels).save(folder / IMAGES / f"{name}.jpg")


def greet(port: int, root: Path, startup: Path | None) -> bytes:
    """What the server says first to who has a kit's certificate, or none, by Python's own TLS.

    In TLS 1.3 a client that is refused learns it only from a connection that is closed without a word.
    """
    context = ssl.create_default_context(cafile=str(root))
    if startup is not None:
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((SERVER, port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=SERVER) as secure,
    ):
        try:
            return secure.recv(1)
        except (ssl.SSLError, ConnectionResetError):
            return b""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expire(certificate: Path, root_key: Path) -> None:
    """Put another certificate over the same key in place, which ended long ago."""
    old = x509.load_pem_x509_certificate(certificate.read_bytes())
    key: Any = load_pem_private_key(root_key.read_bytes(), None)
    new = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        old.serial_number,
        datetime(2020, 1, 1),
        datetime(2021, 1, 1),
        list(old.extensions),
    )
    certificate.write_bytes(new.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def set_up(folder: Path, *, later: bool) -> Federation:
    """Everything before the first process: keys, certificates, kits, records, policies.

    Args:
        folder: of the federation.
        later: with a member, and those that come later: a hospital that joins, one whose certificate ends,
            one of another root.
    """
    forking.hasten()  # sessions of people are opened in this process
    made = Federation(folder, free_port())
    (folder / "home").mkdir()
    made.state(SERVER).parent.mkdir()
    made.follow(made.operations, "1. Lead", more=MEMBERS if later else "")
    made.follow(made.operations, "2. Keeper")
    made.fingerprint = made.root_fingerprint("ca")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(made.provision, (SERVER, *SITES, LEAD, *([MEMBER] if later else []))))
    if not later:
        return made
    made.packaged = made.kit_hashes()
    told = made.follow(
        made.operations,
        "1. Lead",
        more=f"--site {NEWCOMER}=hospital_4 {MEMBERS} --site {EXPIRED} --site {STRANGER}",
    )
    assert f"written: federation/requests/{NEWCOMER}.yml" in told
    assert "exists already: federation/project.yml" in told
    made.provision(NEWCOMER)
    made.provision_by_hand(EXPIRED)
    made.provision_by("other", STRANGER)
    return made


@contextmanager
def running(folder: Path, *, later: bool = False) -> Iterator[Federation]:
    """The federation, with its server and three hospitals up; all ended afterwards."""
    made = set_up(folder, later=later)
    try:
        made.start(SERVER)
        for name in SITES:
            made.start(name)
        made.wait_joined(*SITES)
        yield made
    finally:
        made.stop()
