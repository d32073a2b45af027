"""Accuracy of models that are functions of one sum, beside trained ones, with and without privacy.

    python benchmarks/one_sum.py --data digits --partition P10C1 --seeds 5 --out p10c1.json
    python benchmarks/one_sum.py --data ham --methods fedcgs fedavg --epsilon none 8 2 --out ham.json
    python benchmarks/one_sum.py --figure one-sum.svg even4.json p10c2.json p10c1.json

All silos run in one process, through the same rounds and sums as in the engine. Each data set has one
encoder for all methods that train no network, and one network for the others (``one_sum_cases.py``). A row
of the JSON file is a method at an epsilon: mean and spread over seeds on all silos' test records, and the
difference to FedAvg at the same epsilon with a 95 % t interval, seed by seed. All rows have their first seed
before one has its second. The file is written after each run; a second call with the same file adds rows and
seeds, and repeats no run.

Partitions: ``even4`` (four silos of 300 training records), ``P10C2``, ``P10C1``, ``dirichlet0.05`` (ten
silos) for digits and mnist (its 10,000 test images, 2,000 of which test); the others have silos of their own,
``natural`` (the default), and can be divided anew by these. Class rules are off, as in the papers: with one
class a silo no class has three holders. Noise has no seed. FedSGD under privacy has a row for each silo's own
noise and one for shared noise, whose secure sums open whole, as those of one release do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import comparison
import torch
from one_sum_cases import CASES, NATURAL, PARTITIONS, Case, Noise
from rich.console import Console
from rich.table import Table

from methods import parse_method
from tightframe import federation
from tightframe.config.job import JobConfig
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.errors import TightframeError
from tightframe.privacy.training import portions
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import evaluation
from tightframe.rounds.server.coordinator import Result
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.view import LocalSilo

METHODS = ("fed3r", "fedcgs", "fedncm", "fedavg", "fedetf", "fedmr")
MEASURES = ("accuracy", "balanced_accuracy", "auroc")
ONE_ROW = ("method", "options", "noise", "epsilon")
DEFAULT_DATA = Path(__file__).resolve().parent.parent / ".." / "shared" / "data"


def scored(result: Result, job: JobConfig, records: Mapping[str, SiloData]) -> dict[str, float]:
    """Return the final model's measures on all silos' test records, which only a simulation may pool."""
    setup, totals = prepare(job), {}
    for name in records:
        context = SiloContext(name, job, None, run_dir=Path(), records=records[name])
        silo = LocalSilo(context, setup, torch.device("cpu"), 0)
        for field, value in evaluation.count_at(silo, silo.load(result.state.model)).items():
            totals[field] = totals.get(field, 0) + value.numpy()
    test = evaluation.summarise(totals, setup.dataset.class_names).test
    found = {name: getattr(test, name) for name in MEASURES}
    return {name: value for name, value in found.items() if value is not None}


def run(job: JobConfig, records: Mapping[str, SiloData], features: Path | None = None) -> dict[str, Any]:
    """Run a job; return its measures and seconds, or the code of a failure.

    Args:
        job: of the run.
        records: by silo.
        features: folder for features of frozen encoders, which runs of the same seed share; None: in memory.
    """
    started = time.monotonic()
    site = SiteEntry() if features is None else SiteEntry(feature_cache="kept", state_dir=str(features))
    try:
        result = federation.run_job(job, data=records, entries=dict.fromkeys(records, site))
    except TightframeError as error:
        return {"seed": job.seed, "error": error.code, "reason": str(error)}
    seconds = time.monotonic() - started
    spent = result.outcome.privacy_spent
    return {
        "seed": job.seed,
        **scored(result, job, records),
        "seconds": round(seconds, 2),
        "exchanges": len(result.outcome.rows),
        "privacy_spent": None if spent is None else spent.model_dump(mode="json"),
    }


def row_of(
    method: str,
    options: Mapping[str, Any],
    noise: Noise | None,
    epsilon: float | None,
    runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a row: means and deviations over the runs that ended, and the paired difference of accuracy.

    Args:
        method: its name.
        options: given on the command line in place of the case's.
        noise: whose; None without privacy.
        epsilon: None without privacy.
        runs: of all seeds.
        base: FedAvg's runs at the same epsilon.
    """
    done = [item for item in runs if "error" not in item]
    row: dict[str, Any] = {"method": method, "options": dict(options), "noise": noise, "epsilon": epsilon}
    for name in MEASURES:
        values = [item[name] for item in done if name in item]
        row[f"{name}_mean"] = statistics.fmean(values) if values else None
        row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    row["seeds"] = len(done)
    row["failed"] = [item["error"] for item in runs if "error" in item]
    row["seconds_mean"] = statistics.fmean(item["seconds"] for item in done) if done else None
    row["less_fedavg"] = None
    others = {item["seed"]: item["accuracy"] for item in base if "error" not in item}
    pairs = [item["accuracy"] - others[item["seed"]] for item in done if item["seed"] in others]
    if pairs and method != "fedavg":
        row["less_fedavg"] = comparison._finite(comparison.interval(pairs))
    row["runs"] = list(runs)
    return row


def measure(
    case: Case,
    partition: str,
    wanted: Sequence[tuple[str, dict[str, Any]]],
    epsilons: Sequence[float | None],
    seeds: Sequence[int],
    *,
    summation: str = "secure",
    features: Path,
    noises: Sequence[Noise | None] = (None, "own", "shared"),
    known: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    log: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Run every method at every epsilon with every seed; FedAvg first, if it is among them.

    Args:
        case: data set and constants.
        partition: of ``PARTITIONS``, or ``natural``.
        wanted: methods with options in place of the case's.
        epsilons: None for no privacy.
        seeds: of the result.
        summation: ``secure`` or ``plain``.
        features: see ``run``.
        noises: whose, of the rows that are run; None is for those without privacy.
        known: rows of an earlier call, whose runs are not repeated.
        keep: called with all rows after each run.
        log: called with a line after each run.

    Raises:
        JobError: if a method does not exist, or cannot do what is asked, before anything is trained.
    """
    opened: dict[int, dict[str, SiloData]] = {}

    def silos(seed: int) -> dict[str, SiloData]:
        if seed not in opened:
            opened[seed] = case.silos(partition, seed)
        return opened[seed]

    ordered = sorted(wanted, key=lambda item: item[0] != "fedavg")
    planned = [
        (method, options, noise, epsilon)
        for epsilon in epsilons
        for method, options in ordered
        for noise in case.noises(method, epsilon)
        if noise in noises
    ]
    names = sorted(silos(seeds[0]))
    for method, options, noise, epsilon in planned:
        prepare(case.job(method, options, names, partition, seeds[0], epsilon, noise, summation))
    rows = [dict(row) for row in known]
    for seed in seeds:
        for place in planned:
            method, options, noise, epsilon = place
            present = [row for row in rows if tuple(row[key] for key in ONE_ROW) == place]
            runs = [item for row in present for item in row["runs"]]
            if seed in {item["seed"] for item in runs}:
                continue
            job = case.job(method, options, names, partition, seed, epsilon, noise, summation)
            runs.append(run(job, silos(seed), features))
            shown = runs[-1].get("error") or f"{runs[-1]['accuracy']:.3f} in {runs[-1]['seconds']:.0f} s"
            log(f"epsilon {epsilon or 'none'}, {method}, {noise or 'no'} noise, seed {seed}: {shown}")
            base = next((r["runs"] for r in rows if (r["method"], r["epsilon"]) == ("fedavg", epsilon)), ())
            rows = [row for row in rows if row not in present]
            rows.append(row_of(*place, runs, base))
            keep(rows)
    return rows


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(
        title=f"{report['data']}, {report['partition']}, {report['summation']} sums; mean ± sd of seeds"
    )
    for column in ("method", "noise", "epsilon", *(name.replace("_", " ") for name in MEASURES)):
        table.add_column(column, justify="left" if column in ("method", "noise") else "right")
    for column in ("accuracy less FedAvg's [95 %]", "seeds", "s"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        cells = []
        for name in MEASURES:
            mean, spread = row[f"{name}_mean"], row[f"{name}_sd"]
            cells.append(
                "" if mean is None else f"{mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
            )
        shown = f"{row['method']} {comparison.described(row['options'])}" if row["options"] else row["method"]
        lost = f", {len(row['failed'])} failed: {', '.join(row['failed'])}" if row["failed"] else ""
        seconds = "" if row["seconds_mean"] is None else f"{row['seconds_mean']:.1f}"
        table.add_row(
            shown,
            row["noise"] or "",
            "none" if row["epsilon"] is None else f"{row['epsilon']:g}",
            *cells,
            comparison._difference({"difference": row["less_fedavg"]}),
            f"{row['seeds']}{lost}",
            seconds,
        )
    console.print(table)


def parse_epsilon(text: str) -> float | None:
    """Return an epsilon, None for ``none``.

    >>> parse_epsilon("none"), parse_epsilon("8")
    (None, 8.0)
    """
    if text == "none":
        return None
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected none or a positive number, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--data", choices=sorted(CASES), default="digits")
    command.add_argument("--partition", choices=[*PARTITIONS, NATURAL], help="default: even4, or natural")
    command.add_argument(
        "--methods", nargs="+", type=parse_method, default=[(name, None) for name in METHODS]
    )
    command.add_argument("--epsilon", nargs="+", type=parse_epsilon, default=[None])
    command.add_argument("--noise", nargs="+", choices=("own", "shared"), default=["own", "shared"])
    command.add_argument("--seeds", type=int, default=5, help="number of seeds")
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument(
        "--engine",
        choices=("loop", "vmap", "hooks"),
        help="of per-sample gradients; by default a job's; all give the same up to rounding",
    )
    command.add_argument("--summation", choices=("secure", "plain"), default="secure")
    command.add_argument(
        "--root",
        type=Path,
        default=Path(os.environ.get("TIGHTFRAME_TEST_DATA", DEFAULT_DATA)),
        help="folder with the real records; digits need none",
    )
    command.add_argument("--out", type=Path, help="JSON file, which a later call extends")
    command.add_argument(
        "--features",
        type=Path,
        help="folder that keeps features for later calls; by default for this one only",
    )
    command.add_argument("--figure", nargs="+", metavar="FILE", type=Path, help="SVG file, and result files")
    return command


def earlier(out: Path, same: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier call; refuse a file of other data.

    Raises:
        SystemExit: if the file is of other records or other sums.
    """
    if not out.is_file():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    present = {key: report.get(key) for key in same}
    if present != same:
        raise SystemExit(f"{out} holds results of {present}, not of {dict(same)}: choose another file")
    return list(report["rows"])


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its rows, and return the exit code."""
    arguments = parser().parse_args(given)
    if arguments.figure:
        import one_sum_figure

        one_sum_figure.draw(arguments.figure[1:], arguments.figure[0])
        return 0
    if arguments.out is None:
        raise SystemExit("expected --out FILE, or --figure FILE and result files")
    case = CASES[arguments.data](arguments.root)
    partition = arguments.partition or ("even4" if case.divided else NATURAL)
    if case.divided and partition == NATURAL:
        raise SystemExit(f"expected the partition of {case.name} to be one of {list(PARTITIONS)}")
    torch.set_num_threads(1)
    if arguments.engine is not None:
        portions.CHOSEN_ON_CPU = arguments.engine
    same = {"data": case.name, "partition": partition, "summation": arguments.summation}
    report: dict[str, Any] = {**same, "torch": torch.__version__, "rows": earlier(arguments.out, same)}

    def keep(rows: list[dict[str, Any]]) -> None:
        report["rows"] = rows
        written = arguments.out.with_name(f"{arguments.out.name}.new")
        written.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        written.replace(arguments.out)  # whole, whenever this is killed

    keep(report["rows"])  # fails before the minutes of training
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="tightframe-") as folder:
        measure(
            case,
            partition,
            [(name, options or {}) for name, options in arguments.methods],
            arguments.epsilon,
            range(arguments.first_seed, arguments.first_seed + arguments.seeds),
            summation=arguments.summation,
            noises=(None, *arguments.noise),
            features=Path(folder if arguments.features is None else arguments.features).resolve(),
            known=report["rows"],
            keep=keep,
            log=partial(progress.print, highlight=False),
        )
    show(report, Console(width=150))
    return 0


if __name__ == "__main__":
    comparison.end(main)
