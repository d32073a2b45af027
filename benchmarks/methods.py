"""Comparison of methods with FedAvg on the papers' partitions: one table of all seeds.

All silos run in one process. Prints a table (mean and spread over seeds, paired differences with
intervals, rounds to FedAvg's best, seconds and bytes per round), writes every number as JSON and the
curves as PNG (``--out``; by default in ``benchmarks/results/``, which git ignores). FedMR's weights
are chosen from a declared grid on the validation folds, with seeds that are not in the result, and the
whole grid is printed.

    python benchmarks/methods.py --data digits --partition P10C2 --seeds 3
    python benchmarks/methods.py --data fashion_mnist --partition P5C2 --seeds 5 --methods fedmr fedetf
    python benchmarks/methods.py --data cifar10 --root /data/cifar --partition P10C3 --scale paper --seeds 3

Partitions: PrhoCsigma (``P10C2``), ``Dir0.1x20`` with ``-fednh`` (default), ``-fedetf`` or ``-fedmr``,
Cx-100-c (``C10-100-2``), ``IIDx10``; ``natural`` for data sets with their own silos. A method can have
options: ``fedetf:gamma=0.5,temperature=10``. Silos compute on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import comparison
import isic
import torch
from rich.console import Console
from scales import HAM, Scale, scale_of

from tightframe import data, federation, methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.data.base import SiloData
from tightframe.data.image_sets import BENCHMARK_SETS, DERIVED, open_silos
from tightframe.errors import TightframeError
from tightframe.rounds.setup import prepare

FIRST_GRID_SEED = 1000
"""First seed of the grid; the seeds of the result are below it."""

GRIDS: dict[str, list[dict[str, Any]]] = {
    "fedmr": [{"mu_intra": intra, "mu_inter": inter} for intra in (0.1, 0.4, 1.0) for inter in (1e-3, 1e-2)]
}
"""Declared before any result: mu_intra around its default, mu_inter up to 1e-2."""

DEFAULT_METHODS = ("fedmr", "fedetf", "fednh", "fedavg_etf")
RESULTS = Path(__file__).resolve().parent / "results"
ROOTS = {
    "fashion_mnist": Path("/usr/share/datasets/fashion-mnist"),  # Debian's dataset-fashion-mnist
    HAM: Path(os.environ.get("TIGHTFRAME_TEST_DATA", isic.DEFAULT_DATA)),
}


def parse_partition(text: str) -> dict[str, Any]:
    """Return a data set's options for a partition in the papers' notation.

    >>> parse_partition("P10C2")
    {'partition': 'class_disjoint', 'silos': 10, 'classes_per_silo': 2}
    >>> parse_partition("Dir0.1x20-fedetf")
    {'partition': 'dirichlet', 'silos': 20, 'alpha': 0.1, 'variant': 'fedetf'}
    >>> parse_partition("C10-100-2")
    {'partition': 'shards', 'silos': 100, 'classes_per_silo': 2}
    """
    if match := re.fullmatch(r"P(\d+)C(\d+)", text):
        return {"partition": "class_disjoint", "silos": int(match[1]), "classes_per_silo": int(match[2])}
    if match := re.fullmatch(r"Dir([\d.]+)x(\d+)(?:-(fednh|fedetf|fedmr))?", text):
        variant = {"variant": match[3]} if match[3] else {}
        return {"partition": "dirichlet", "silos": int(match[2]), "alpha": float(match[1]), **variant}
    if match := re.fullmatch(r"C\d+-(\d+)-(\d+)", text):
        return {"partition": "shards", "silos": int(match[1]), "classes_per_silo": int(match[2])}
    if match := re.fullmatch(r"IIDx(\d+)", text):
        return {"partition": "iid", "silos": int(match[1])}
    if text == "natural":
        return {}
    raise argparse.ArgumentTypeError(f"expected P10C2, Dir0.1x20, C10-100-2, IIDx10 or natural, got {text!r}")


def parse_method(text: str) -> tuple[str, dict[str, Any] | None]:
    """Return a method and its options, None if none are given.

    >>> parse_method("fedetf:gamma=0.5,zero_counts=exclude")
    ('fedetf', {'gamma': 0.5, 'zero_counts': 'exclude'})
    """
    name, colon, rest = text.partition(":")
    if not colon:
        return name, None
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"expected name:key=value,..., got {text!r}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, options


@dataclass(frozen=True)
class Bench:
    """One data set, partition and scale.

    Attributes:
        name: of the data set, as in ``--data``.
        partition: options of the data set.
        root: folder with its files.
        scale: size of a run.
        summation, threads, personalise: of the jobs.
    """

    name: str
    partition: Mapping[str, Any]
    root: Path | None
    scale: Scale
    summation: str = "secure"
    threads: int = 1
    personalise: bool = False

    def silos(self, seed: int) -> dict[str, SiloData]:
        """Return the silos' records; each seed has its own partition, which all methods share."""
        if self.name == HAM:
            assert self.root is not None
            return isic.silos(self.root, 32)
        return open_silos(self.name, root=self.root, **self.dataset_options(seed))

    def dataset_options(self, seed: int) -> dict[str, Any]:
        """Return the data set's options in the jobs of a seed."""
        if self.name == HAM:
            return {"image_size": 32}
        options: dict[str, Any] = {**self.partition, "partition_seed": seed, "test": "own"}
        subsets = ("subset",) if self.name in DERIVED else ("subset", "test_subset")
        return options | {key: value for key in subsets if (value := getattr(self.scale, key)) is not None}

    def job(
        self, method: str, options: Mapping[str, Any], names: Sequence[str], seed: int, rules: str
    ) -> JobConfig:
        """Return a method's job, with the same training for every method."""
        scale = self.scale
        return parse_job(
            {
                "job_name": f"{method}-{self.name}".replace("_", "-"),
                "method": method,
                "method_options": dict(options),
                "dataset": "fed_isic2019" if self.name == HAM else self.name,
                "dataset_options": self.dataset_options(seed),
                "model": scale.model,
                "model_options": dict(scale.model_options),
                "sites": sorted(names),
                "min_sites": len(names),
                "rounds": scale.rounds,
                "seed": seed,
                "class_rules": rules,
                "summation": self.summation,
                "threads": self.threads,
                "personalise": self.personalise,
                "training": {
                    "epochs": scale.epochs,
                    "batch_size": scale.batch_size,
                    "learning_rate": scale.learning_rate,
                    "weight_decay": scale.weight_decay,
                    "augment": scale.augment,
                },
                "evaluation": {"models": max(20, scale.rounds + 1)},
            }
        )

    def run(self, job: JobConfig, records: Mapping[str, SiloData]) -> dict[str, Any]:
        """Train; return the measure after every round and the cost of a round, or the code of a failure."""
        try:
            outcome = federation.run_job(job, data=records).outcome
        except TightframeError as error:
            return {"seed": job.seed, "error": error.code, "reason": str(error)}
        models = [row.evaluation for row in outcome.rows if row.makes_model]
        course, validation = (
            [None if model is None else getattr(getattr(model, fold), self.scale.measure) for model in models]
            for fold in ("test", "validation")
        )
        exchanges = [row for row in outcome.rows if row.kind == "train"]
        return {
            "seed": job.seed,
            "course": course,
            "validation_course": validation,
            "seconds_a_round": sum(row.seconds for row in exchanges) / job.rounds,
            "bytes_a_round": sum(row.bytes_up + row.bytes_down for row in exchanges) / job.rounds,
            "personal": None if outcome.personal is None else outcome.personal.accuracy,
            "own_models": outcome.own_models,
            "last": comparison.rounds_that_count(job.method, self.scale.last),
            "rules": outcome.rules,
            "sums": outcome.sums,
        }


def choose(bench: Bench, method: str, seeds: Sequence[int], rules: str, log: Any) -> dict[str, Any]:
    """Search a method's declared grid on the validation folds; return every point and the choice."""
    points: list[dict[str, Any]] = [{"options": options, "scores": []} for options in GRIDS[method]]
    for seed in seeds:
        records = bench.silos(seed)
        for point in points:
            run = bench.run(bench.job(method, point["options"], list(records), seed, rules), records)
            watched = {"course": run.get("validation_course", [])}
            point["scores"].append(comparison.score(watched, bench.scale.last))
            log(
                f"grid, seed {seed}: {method} {comparison.described(point['options'])}: {point['scores'][-1]}"
            )
    for point in points:
        whole = None not in point["scores"]
        point["mean"] = statistics.fmean(point["scores"]) if whole else None
    usable = [point for point in points if point["mean"] is not None]
    if not usable:
        raise SystemExit(f"no point of the grid of {method} could be trained with every seed")
    best = max(usable, key=lambda point: point["mean"])
    return {"seeds": list(seeds), "points": points, "chosen": best["options"]}


def measure(
    bench: Bench,
    wanted: Sequence[tuple[str, dict[str, Any] | None]],
    *,
    seeds: Sequence[int],
    grid_seeds: Sequence[int],
    class_rules: Sequence[str],
    log: Any = lambda text: None,
) -> dict[str, Any]:
    """Run every method, and always FedAvg, with every seed.

    Args:
        bench: data, partition and scale.
        wanted: methods with their options; None takes the grid's choice, or the defaults.
        seeds: of the result.
        grid_seeds: of the grid; none skips the grid.
        class_rules: ``off``, ``on`` or both; methods are compared with the first one.
        log: called with a line after each run.

    Returns:
        Plain values: the settings, the grids, and every run under ``results[rules][method]``.

    Raises:
        JobError: if a method or one of its options does not exist, before anything is trained.
    """
    names = list(bench.silos(seeds[0]))
    for name, options in wanted:
        for candidate in GRIDS.get(name, [{}]) if options is None else [options]:
            prepare(bench.job(name, candidate, names, seeds[0], class_rules[0]))
    grids = {
        name: choose(bench, name, grid_seeds, class_rules[0], log)
        for name, options in wanted
        if options is None and name in GRIDS and grid_seeds
    }
    entries = [(comparison.BASELINE, "fedavg", {})]
    for name, options in wanted:
        if name == "fedavg" and not options:
            continue
        chosen = grids[name]["chosen"] if options is None and name in grids else options or {}
        title = methods.get(name).title
        entries.append((f"{title} ({comparison.described(chosen)})" if chosen else title, name, chosen))
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        rules: {title: [] for title, _, _ in entries} for rules in class_rules
    }
    folds: dict[str, Any] = {}
    for seed in seeds:
        records = bench.silos(seed)
        folds[str(seed)] = {
            name: {fold: len(silo.labels(fold)) for fold in ("train", "validation", "test")}  # type: ignore[arg-type]
            for name, silo in records.items()
        }
        for rules in class_rules:
            for title, name, chosen in entries:
                run = bench.run(bench.job(name, chosen, list(records), seed, rules), records)
                results[rules][title].append(run)
                shown = run.get("error") or comparison.score(run, bench.scale.last)
                log(f"seed {seed}, class rules {rules}: {title}: {shown}")
    spec = data.get("fed_isic2019" if bench.name == HAM else bench.name)
    title = "HAM four-centre subset" if bench.name == HAM else spec.title
    kind = comparison.described(bench.partition) if bench.partition else "natural silos"
    used = "" if bench.scale.subset is None else f", {bench.scale.subset} training images"
    return {
        "data": f"{title}, {kind}{used}",
        "seeds": len(seeds),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "settings": {
            **vars(bench.scale),
            "summation": bench.summation,
            "threads": bench.threads,
            "partition": dict(bench.partition),
        },
        "records": folds,
        "grids": grids,
        "results": results,
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [spec.name for spec in BENCHMARK_SETS]
    command.add_argument("--data", choices=[*names, HAM], default="digits")
    command.add_argument("--root", type=Path, help="folder with the files of the data set")
    command.add_argument("--partition", type=parse_partition, help="default: P10C2, or natural")
    command.add_argument(
        "--methods", nargs="+", type=parse_method, default=[(n, None) for n in DEFAULT_METHODS]
    )
    command.add_argument("--seeds", type=int, default=3, help="number of seeds of the result")
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--grid-seeds", type=int, default=2, help="0 takes a method's defaults instead")
    command.add_argument("--scale", choices=("cpu", "paper"), default="cpu")
    command.add_argument(
        "--class-rules", choices=("off", "on", "both"), default="off", help="off as in the papers"
    )
    command.add_argument("--summation", choices=("secure", "plain"), default="secure")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument(
        "--personalise", action="store_true", help="also train personal models after the last round"
    )
    command.add_argument(
        "--deterministic", action="store_true", help="bit-identical results on the same GPU, slower"
    )
    command.add_argument("--no-curves", action="store_true")
    command.add_argument("--out", type=Path, help="JSON file, curves beside it; default: benchmarks/results/")
    for name, kind in (("rounds", int), ("epochs", int), ("batch_size", int), ("subset", int), ("last", int)):
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, help="in place of the scale's value")
    for name in ("test_subset", "learning_rate", "weight_decay", "model"):
        kind = {"test_subset": int, "model": str}.get(name, float)
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, help="in place of the scale's value")
    command.add_argument("--model-options", type=json.loads, help='JSON, for example {"widths": [16, 32]}')
    return command


def bench_of(arguments: argparse.Namespace) -> Bench:
    """Return the benchmark that the command line describes."""
    scale = scale_of(arguments.data, arguments.scale)
    changes = {
        name: getattr(arguments, name) for name in vars(scale) if getattr(arguments, name, None) is not None
    }
    if "model" in changes and "model_options" not in changes:
        changes["model_options"] = {}
    scale = replace(scale, **changes)
    natural = arguments.data == HAM or arguments.data in DERIVED
    partition = arguments.partition
    if partition is None:
        partition = {} if natural else parse_partition("P10C2")
    if natural != (not partition):
        raise SystemExit(
            f"{arguments.data} has {'its own silos: omit --partition' if natural else 'no silos of its own'}"
        )
    return Bench(
        arguments.data,
        partition,
        arguments.root or ROOTS.get(arguments.data),
        replace(scale, last=min(scale.last, scale.rounds)),
        summation=arguments.summation,
        threads=arguments.threads,
        personalise=arguments.personalise,
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its results, and return the exit code."""
    arguments = parser().parse_args(given)
    if not arguments.no_curves and importlib.util.find_spec("matplotlib") is None:
        print(
            "curves need matplotlib: pip install 'tightframe[benchmarks]', or give --no-curves",
            file=sys.stderr,
        )
        return 2
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if arguments.seeds < 1 or arguments.first_seed + arguments.seeds > FIRST_GRID_SEED:
        print(
            f"expected at least 1 seed, and all below {FIRST_GRID_SEED}, the first of the grid",
            file=sys.stderr,
        )
        return 2
    rules = ["off", "on"] if arguments.class_rules == "both" else [arguments.class_rules]
    console, progress = Console(width=160), Console(stderr=True)
    bench = bench_of(arguments)
    out = arguments.out or RESULTS / ("-".join(map(str, (bench.name, *bench.partition.values()))) + ".json")
    out.parent.mkdir(parents=True, exist_ok=True)  # fails before the hours of training
    progress.print(f"results will go to {out}", highlight=False)
    report = measure(
        bench,
        arguments.methods,
        seeds=range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        grid_seeds=range(FIRST_GRID_SEED, FIRST_GRID_SEED + arguments.grid_seeds),
        class_rules=rules,
        log=partial(progress.print, highlight=False),
    )
    comparison.show(report, console)
    report["summary"] = comparison.summarise(report)
    out.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    console.print(f"written: {out}", soft_wrap=True)
    if not arguments.no_curves:
        picture = out.with_suffix(".png")
        comparison.draw(report, picture)
        console.print(f"written: {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    comparison.end(main)
