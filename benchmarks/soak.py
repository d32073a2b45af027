"""Soak test: check that a long run leaks no memory, files, threads or processes, with faults in its rounds.

Six silos and the server in NVFlare's simulator with a thread for each silo (`-t 6`), so that each silo is
one process for the whole run, as at a hospital. FedMR with a small network on the synthetic twin, secure
sums. In more than half of the rounds one silo has a fault, drawn by the seed: its records cannot be read or
are not numbers, its answer is lost or late, or its process is stopped (SIGSTOP) and continued. Every process
records its measurements at the start of each round, after a forced collection. The benchmark prints a table
and writes every number as JSON and the curves as PNG (`--out`; by default in `benchmarks/results/`, which
git ignores). The exit code is 0 only if the run trained, every round went as planned, no process's memory
grew by more than 5 % from round 5 to the last (medians of three rounds at either end), and no other count
grew and nothing was left behind.

    python benchmarks/soak.py                       # 50 rounds, about 15 minutes
    python benchmarks/soak.py --rounds 12 --leak site-3     # must fail: that silo leaks
    python benchmarks/soak.py --trace               # slower; prints the lines that allocated lasting memory

It reads /proc and calls glibc, so it needs Linux with glibc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import soak_verdict
from soak_parts import PAUSES, SAMPLES
from soak_verdict import Fault, Finding

from tightframe.flare.simulation.simulator import ALLOW_LIST
from tightframe.flare.simulation.workspace import RESULTS
from tightframe.results.files import OUTCOME
from tightframe.results.outcome import Outcome
from tightframe.results.rows import read_rows

HERE = Path(__file__).resolve().parent
SITES = tuple(f"site-{number}" for number in range(1, 7))
PROCESSES = ("server", *SITES)
SMALL = {
    "dataset_options.image_size": 16,
    "model_options.widths": [8, 8, 8],
    "training.epochs": 1,
}
MARK = "TIGHTFRAME_SOAK"
"""Environment variable that identifies the processes of a run, whatever group they are in."""
GRACE_SECONDS = 15.0
"""Seconds within which the engine's processes must end after the command: they sleep for two seconds."""


def write_job(folder: Path, args: argparse.Namespace, faults: Sequence[Fault]) -> Path:
    """Write the small job, with the measuring component and executor; return its folder."""
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

    # A silo that is busy or stopped has fetched its task; only one that starts late needs longer to fetch.
    patience = {"site_timeout": args.patience, "fetch_timeout": 300}
    job = recipes.get("fedmr_isic").job(
        sites=SITES, changes={**SMALL, **patience, "rounds": args.rounds, "seed": args.seed}
    )
    files = job_folders.job_files(job)
    soak = {
        "folder": str(folder),
        "rounds": args.rounds,
        "trace": [args.first, args.rounds] if args.trace else [],
    }
    key = "app/config/config_fed_client.json"
    client = json.loads(files[key])
    executor = client["executors"][0]["executor"]
    executor["path"] = "soak_parts.SoakExecutor"
    executor["args"]["soak"] = soak | {"faults": [asdict(fault) for fault in faults], "leaky": args.leak}
    files[key] = json.dumps(client)
    key = "app/config/config_fed_server.json"
    server = json.loads(files[key])
    server["components"].append({"id": "soak", "path": "soak_parts.ServerProbe", "args": {"soak": soak}})
    files[key] = json.dumps(server)
    job_folders.write_job(files, folder / "job")
    return folder / "job"


class Run:
    """One run of the engine in its own folder, with its own folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.workspace, self.temporary = folder / "workspace", folder / "tmp"
        self._folder, self._mark = folder, uuid.uuid4().hex
        for path in (self.workspace / "local", self.temporary, folder / PAUSES, folder / SAMPLES):
            path.mkdir(parents=True)
        self._paused: dict[psutil.Process, float] = {}

    def start(self, job: Path, arenas: int) -> None:
        """Start the simulator, with a thread for each silo.

        Args:
            job: folder of the job.
            arenas: number of glibc's allocator arenas in each process; 0 for glibc's default.
        """
        classes = [*ALLOW_LIST["class_allow_list"], "soak_parts.SoakExecutor", "soak_parts.ServerProbe"]
        resources = self.workspace / "local" / "resources.json"
        resources.write_text(json.dumps(ALLOW_LIST | {"class_allow_list": classes}), encoding="utf-8")
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {MARK: self._mark, "TMPDIR": str(self.temporary), "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"MALLOC_ARENA_MAX": str(arenas)} if arenas else {}
        command = [sys.executable, "-m", "tightframe.flare.simulation.simulator", str(job)]
        command += ["-w", str(self.workspace), "-t", str(len(SITES))]
        with (self._folder / "engine.log").open("wb") as log:
            self._engine = subprocess.Popen(
                command,
                env=os.environ | environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        """Pause silos as planned until the run ends; return its exit code, or None if it took too long."""
        until, printed = time.monotonic() + seconds, 0
        while (code := self._engine.poll()) is None and time.monotonic() < until:
            self._pause()
            rows = self.rows()
            for row in rows[printed:]:
                without = ", ".join(f"{site} ({why})" for site, why in row["dropped"].items())
                print(
                    f"... {row['kind']} {row['round']}: {row['seconds']:.1f} s"
                    + (f", without {without}" if without else ""),
                    file=sys.stderr,
                    flush=True,
                )
            printed = len(rows)
            time.sleep(0.1)
        return code

    def _pause(self) -> None:
        """Stop the processes that request it, and continue those whose pause is over."""
        now = time.monotonic()
        for request in [path for path in (self._folder / PAUSES).iterdir() if path.suffix != ".new"]:
            pid, seconds = json.loads(request.read_text(encoding="utf-8"))
            process = psutil.Process(pid)
            process.suspend()
            request.unlink()
            self._paused[process] = now + seconds
        for process in [one for one, until in self._paused.items() if until <= now]:
            process.resume()
            del self._paused[process]

    def rows(self) -> list[dict[str, Any]]:
        """Return the server's rows so far."""
        return [row.as_json() for row in read_rows(self.workspace / RESULTS)]

    def trained(self) -> bool:
        """Check whether the run's outcome says that it trained; False without an outcome."""
        results = self.workspace / RESULTS
        return (results / OUTCOME).is_file() and Outcome.read(results).trained

    def series(self) -> dict[str, list[dict[str, Any]]]:
        """Return the processes' measurements."""
        samples = {}
        for name in PROCESSES:
            path = self._folder / SAMPLES / f"{name}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            samples[name] = sorted((json.loads(line) for line in lines), key=lambda sample: sample["after"])
        return samples

    def processes(self) -> list[psutil.Process]:
        """Return the run's processes, whatever their parent is by now."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self._mark:
                    processes.append(process)
        return processes

    def left(self) -> list[str]:
        """End the processes that outlived the command; return them with the ports on which they listened."""
        until = time.monotonic() + GRACE_SECONDS
        while (processes := self.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                held = [
                    str(item.laddr.port)
                    for item in process.net_connections("inet")
                    if item.status == psutil.CONN_LISTEN
                ]
                left.append(f"{process.pid} {process.name()}" + (f", ports {' '.join(held)}" if held else ""))
        self.stop()
        return left

    def stop(self) -> None:
        """Kill the processes of the run that are left."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._engine.wait()

    def temporaries(self) -> list[str]:
        """Return the temporary files and folders that are left."""
        return sorted(path.relative_to(self.temporary).as_posix() for path in self.temporary.iterdir())


def traced(folder: Path, first: int, last: int, count: int = 8) -> dict[str, list[str]]:
    """Return the lines that allocated most of the memory that the last round had and the first had not."""
    differences = {}
    for name in PROCESSES:
        places = [folder / f"{name}-{after}.trace" for after in (first, last)]
        if all(place.is_file() for place in places):
            begin, end = (tracemalloc.Snapshot.load(str(place)) for place in places)
            differences[name] = [str(item) for item in end.compare_to(begin, "lineno")[:count]]
    return differences


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Run the job, and return the report and the findings."""
    faults = soak_verdict.plan(args.seed, args.rounds, SITES, args.faults, args.patience)
    started = time.monotonic()
    run = Run(folder)
    run.start(write_job(folder, args, faults), args.arenas)
    try:
        code = run.wait(args.limit)
        seconds = time.monotonic() - started
        left = run.left()
    finally:
        run.stop()
    trained = code == 0 and run.trained()
    series = run.series()
    ending = f"exit code {code}" if code is not None else f"not over after {args.limit} s"
    findings = [
        Finding("the run trained", trained, f"{ending}, {seconds:.0f} s"),
        soak_verdict.as_planned(run.rows(), faults, args.rounds),
        *soak_verdict.findings(series, PROCESSES, args.first, args.rounds, args.growth),
        *soak_verdict.left_behind(left, run.temporaries()),
    ]
    report = {
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "keep")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seconds": round(seconds, 1),
        "faults": [asdict(fault) for fault in faults],
        "samples": series,
        "traced": traced(folder, args.first, args.rounds),
        "findings": [asdict(item) for item in findings],
        "rows": [
            {key: row[key] for key in ("round", "kind", "seconds", "silos", "dropped", "static_opened")}
            for row in run.rows()
        ],
    }
    return report, findings


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """Create a folder for the run; remove it afterwards unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure, print, write, and exit with 1 if anything failed or was not measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=5, help="round with whose memory the last is compared")
    parser.add_argument("--growth", type=float, default=0.05, help="largest relative growth of memory")
    parser.add_argument("--faults", type=float, default=0.6, help="part of the rounds that have a fault")
    parser.add_argument("--patience", type=int, default=60, help="seconds that a silo may take for a task")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults and of the job")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which the run is ended")
    parser.add_argument(
        "--arenas",
        type=int,
        default=4,
        help="MALLOC_ARENA_MAX, as a kit's start script sets it; 0: glibc's default",
    )
    parser.add_argument("--leak", choices=SITES, help="control: make this silo leak")
    parser.add_argument("--trace", action="store_true", help="also record which lines allocate memory")
    parser.add_argument("--keep", type=Path, help="new folder in which to keep the run's files")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / "soak.json", help="JSON; PNG beside it"
    )
    args = parser.parse_args()
    least = args.first + 2 * soak_verdict.WINDOW - 1
    if args.rounds < least:
        parser.error(
            f"Expected --rounds of at least {least} with --first {args.first}, but got {args.rounds}."
        )
    with working_folder(args.keep) as folder:
        report, findings = measure(args, folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    faults = [Fault(**fault) for fault in report["faults"]]
    soak_verdict.plot(report["samples"], faults, args.first, args.growth, args.out.with_suffix(".png"))
    print(f"{report['machine']}; after round {args.first} and after round {args.rounds}")
    print(soak_verdict.table(report["samples"], args.first, args.rounds))
    for name, lines in report["traced"].items():
        print(f"\n{name}\n  " + "\n  ".join(lines))
    print()
    for item in findings:
        print(item)
    sys.exit(int(not all(item.passed for item in findings)))


if __name__ == "__main__":
    main()
