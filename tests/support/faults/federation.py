"""Six hospitals and a server, provisioned as a consortium does it, to which things happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.flare_api.flare_api import new_secure_session
from safetensors.numpy import load_file
from tests.support.faults.network import Network
from tests.support.production.federation import FAULTS, LEAD, SERVER, Federation, free_port

from tightframe.flare.identity import person_identity
from tightframe_app.jobs import folders, recipes

SITES = tuple(f"hospital-{number}" for number in range(1, 7))
PAUSED, RELAYED, FULL, KILLED, ORPHANED, WRONG_CLOCK = SITES
HERE = Path(__file__).resolve().parent
SMALL: Mapping[str, Any] = {
    "dataset_options.image_size": 16,
    "model_options.widths": [8, 8, 8],
    "training.epochs": 30,
}
PATIENCE = 300
"""Seconds until something that is on its way must have happened, on a machine with other work."""


@dataclass
class Six(Federation):
    """A federation of six, one of which reaches the server through a network that can fail.

    Attributes:
        skew: site -> seconds that its clock is ahead, from its next start on.
        network: of the one site.
        small_disk: whether the state folder of another is on a file system of its own, that can be filled.
        patience: seconds that a silo has for a task: four times what all took to start, because the first
            task imports torch in six processes at once.
    """

    skew: dict[str, int] = field(default_factory=dict)
    network: Network | None = None
    small_disk: bool = False
    patience: int = 120
    _starting: str = ""

    @property
    def environment(self) -> dict[str, str]:
        values = super().environment
        if ahead := self.skew.get(self._starting):
            path = os.pathsep.join([str(HERE / "skewed"), values["PYTHONPATH"]])
            values |= {"PYTHONPATH": path, "SECONDS_AHEAD": str(ahead)}
        return values

    @contextmanager
    def clock_of(self, name: str) -> Iterator[None]:
        """Commands and processes that are started meanwhile have that site's clock."""
        self._starting = name
        yield
        self._starting = ""

    def start(self, name: str) -> None:
        with self.clock_of(name):
            super().start(name)

    def restart(self, name: str) -> None:
        """Start a kit anew whose process is gone, and wait until site and server are together again."""
        joined = self.times_joined(name)
        self.start(name)
        if name != SERVER:
            wait(lambda: self.times_joined(name) > joined, f"{name} is not back")
            return
        for site in SITES:  # the server's log has begun anew
            wait(partial(self._has_joined, site), f"{site} has not found the server again")

    def _has_joined(self, name: str) -> bool:
        return self.times_joined(name) > 0

    def times_joined(self, name: str) -> int:
        """How often the server has let a site in: one that has just started, or that it had before."""
        said = self.said(SERVER)
        return said.count(f"New client {name}@") + said.count(f"Re-activate the client: {name} at")

    @contextmanager
    def lead(self) -> Iterator[Any]:
        session = new_secure_session(LEAD, str(self.kit(LEAD)))
        try:
            yield session
        finally:
            session.close()

    def submit(self, job: Path) -> Job:
        lead, _ = person_identity(self.kit(LEAD) / "startup")
        folders.sign(job, lead)
        with self.lead() as session:
            return Job(self, session.submit_job(str(job)))

    def go_on(self, stopped: Path, name: str, only: slice) -> Job:
        """Export and submit the job that goes on with one, by the guide's commands."""
        mine = {r"\bfedmr_isic\b": "fedmr_isic_dp", r"\bresumed\b": name, "JOB_ID": stopped.name}
        told = self.follow(self.operations, FAULTS, mine, only=only)
        told += self.follow(self.operations, FAULTS, mine, only=slice(2, None))
        (job_id,) = [line.split()[1] for line in told.splitlines() if line.startswith("job_id:")]
        return Job(self, job_id)

    def export(self, recipe: str, name: str, rounds: int, **changes: Any) -> Path:
        """A job of all six that is small enough for seconds, and as patient as this machine needs now."""
        patience = {"site_timeout": self.patience, "fetch_timeout": max(20, self.patience // 2)}
        values = {**SMALL, **patience, "rounds": rounds, **changes}
        job = recipes.for_production(recipes.get(recipe).job(sites=SITES, changes=values), values)
        folders.write_job(folders.job_files(job), self.folder / name)
        return self.folder / name

    def job_process(self, name: str) -> psutil.Process:
        """The process in which a site (or the server) works on the one job that runs."""
        children = psutil.Process(self.processes[name].pid).children(recursive=True)
        (found,) = [one for one in children if any("_process" in part for part in one.cmdline())]
        return found

    def kill(self, name: str) -> None:
        """`kill -9` of a kit's own process; not of those that it has started."""
        self.processes[name].kill()
        self.processes[name].wait(timeout=60)


@dataclass
class Job:
    """A submitted job, as the server's operator sees it while it runs, and the lead when it is over."""

    federation: Six
    job_id: str

    @property
    def run(self) -> Path:
        """Its folder at the server, while it runs."""
        return self.federation.kit(SERVER) / self.job_id

    def log(self, name: str = SERVER) -> str:
        """What the job's process at a site has written."""
        path = self.federation.kit(name) / self.job_id / "log.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_round(self, number: int) -> None:
        """Wait until a round is done; round 0 is done when the silos have enrolled."""
        mark = f"enrolled {len(SITES)} of" if number == 0 else f"round {number} of"
        seen = ""

        def done() -> bool:
            nonlocal seen
            now = self.log()
            assert now or not seen, f"over before round {number}: {seen[-5000:]}"
            seen = now
            return mark in now

        wait(done, f"round {number} is not done", self.log)

    def status(self) -> str:
        with self.federation.lead() as session:
            return str(session.get_job_meta(self.job_id)["status"])

    def ended(self) -> str:
        """Wait for the end; the engine's word for it."""
        with self.federation.lead() as session:
            return str(session.wait_for_job(self.job_id, timeout=3 * PATIENCE)["status"])

    def download(self) -> Path:
        """The server's results, as the lead gets them."""
        with self.federation.lead() as session:
            folder = session.download_job_result(self.job_id, str(self.federation.folder / "results"))
        return Path(folder) / "workspace"


@dataclass
class Done:
    """A job that is over.

    Attributes:
        status: the engine's word for how.
        results: what there is of it at the server, downloaded by the lead unless the server was killed.
    """

    job: Job
    status: str
    results: Path

    @property
    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "outcome.json").read_text())
        return found

    @property
    def rounds(self) -> dict[int, dict[str, Any]]:
        """Round -> what is on record of its training."""
        rows = [json.loads(line) for line in (self.results / "metrics.jsonl").read_text().splitlines()]
        return {row["round"]: row for row in rows if row["kind"] == "train"}


def over(job: Job) -> Done:
    """Wait for a job's end and get its results."""
    return Done(job, job.ended(), job.download())


def wait(there: Callable[[], bool], what: str, log: Callable[[], str] = str) -> None:
    """Wait until something is there, looking often enough to be in time for the next step."""
    until = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < until, f"{what}\n{log()[-5000:]}"
        time.sleep(0.02)


def set_up(folder: Path) -> Six:
    """Everything before the first process."""
    made = Six(folder, free_port(), forked=False)
    (folder / "home").mkdir()
    made.state(SERVER).parent.mkdir()
    others = [f"--site {name}={name.replace('-', '_')}" for name in SITES[3:]]
    made.follow(made.operations, "1. Lead", more=" ".join(others))
    made.follow(made.operations, "2. Keeper")
    made.fingerprint = made.root_fingerprint("ca")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(made.provision, (SERVER, *SITES, LEAD)))
    made.follow(made.operations, "In single", only=slice(2))
    return made


@contextmanager
def running(made: Six, relayed: str = RELAYED) -> Iterator[Six]:
    """The federation with all its processes; ``relayed`` is the site whose network can fail."""
    made.network = Network(made.port)
    kit = made.kit(relayed) / "startup" / "fed_client.json"
    values = json.loads(kit.read_text())
    values["servers"][0]["service"]["target"] = f"{SERVER}:{made.network.port}"
    kit.write_text(json.dumps(values))
    made.state(FULL).mkdir(mode=0o700, exist_ok=True)
    small = str(made.state(FULL))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tightframe-test", small]
    made.small_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        began = time.monotonic()
        made.start(SERVER)
        for place in range(0, len(SITES), 2):  # two at a time, as there are cores
            for name in SITES[place : place + 2]:
                made.start(name)
            made.wait_joined(*SITES[place : place + 2])
        made.patience = max(30, round(4 * (time.monotonic() - began)))
        yield made
    finally:
        for one in [made.processes[name] for name in made.processes]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(one.pid)
                for found in (process, *process.children(recursive=True)):
                    found.send_signal(signal.SIGCONT)
        made.network.heal()
        try:
            made.stop()
        finally:
            made.network.close()
            if made.small_disk:
                subprocess.run(["umount", "-l", small], check=True)


def assert_whole(folder: Path) -> int:
    """Every file of ours in a folder can be read from its first byte to its last; how many there are."""
    seen = 0
    for path in folder.rglob("*"):
        if not path.is_file() or path.name == "log.json":  # the engine's own, a line each
            continue
        assert not path.name.endswith(".tmp") and not path.name.endswith(".partial"), path
        if path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".jsonl":
            text = path.read_bytes()
            assert not text or text.endswith(b"\n"), path
            for line in text.splitlines():
                json.loads(line)
        else:
            continue
        seen += 1
    return seen
