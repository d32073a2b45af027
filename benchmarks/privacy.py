"""Differential privacy: its cost in accuracy and time, and what attackers gain with and without it.

Four parts, each with a flag; at least one is needed. Each prints a table with notes on what it shows, and
writes every number as ``privacy-PART.json`` into ``--out`` (by default ``benchmarks/results/``).

    python benchmarks/privacy.py --utility                 accuracy against epsilon, digits over four silos
    python benchmarks/privacy.py --utility --data ham      the HAM four-centre subset of the test data
    python benchmarks/privacy.py --cost                    a step of DP-SGD against a plain one
    python benchmarks/privacy.py --inversion               does a class mean show one of its records?
    python benchmarks/privacy.py --inference               does a release reveal who took part?

Epsilon is each silo's for a whole job at ``--delta``, for one record more or less; ``inf`` is the same job
without privacy. Learning rates are chosen for each epsilon by FedAvg's validation score, with seeds from
1000 on, which are in no result; no epsilon accounts for that search, as it would have to with real
records. The noise has no seed: two calls with the same seeds differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comparison
import privacy_attacks
import privacy_cost
import privacy_tables
import privacy_utility
import torch
from privacy_utility import EPSILONS, FIRST_GRID_SEED, METHODS
from rich.console import Console

from tightframe.privacy.training import portions
from tightframe.rounds.setup import set_threads

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("utility", "cost", "inversion", "inference")
SITE_RECORDS = 10
"""Records of a class that a site has, whose participation --inference tests."""
INFERENCE_EPSILONS: tuple[float | None, ...] = (None, 8.0, 1.0)
Log = Callable[[str], None]

NOTES = {
    "utility": (
        "Shows each method's accuracy under the real mechanisms at this size: a few hundred records per "
        "silo. The noise of a step does not grow with the data, so silos with more records lose less; these "
        "numbers do not show how much less. At `inf` FedMR has its paper's terms, with privacy their "
        "per-record form. No epsilon accounts for the search of the rates."
    ),
    "cost": (
        "Shows the ratio of whole training steps with equally many records, including loader, clipping, "
        "noise and optimiser, in turns within one run. Plain steps keep the network's own normalisation. Not "
        "included: Poisson batches, whose size varies, and the probe and accounting at a job's start. "
        "Seconds are of this machine."
    ),
    "inversion": (
        "Shows whether a class mean looks more like a record in it than like other records of its class: "
        "`beyond` is at most 0.05 if nothing is revealed. `centred` is for an attacker who knows the class's "
        "mean and number. A high cosine alone means nothing: compare the null. The comparison is of "
        "features; how much of an image they hold is not measured. Without noise the class rules (off here) "
        "withhold small classes."
    ),
    "inference": (
        "Shows two attacks on class sums, the first of which is the strongest possible, for one record and "
        "for all records that a site has of a class, which epsilon does not promise to hide; and one on the "
        "final model by the loss of mislabelled canaries. `at most` bounds every attack's expected AUC at "
        "that epsilon. An AUC near 0.5 from the model does not show that a stronger attack would fail; the "
        "bound does."
    ),
}


def epsilon_of(text: str) -> float | None:
    """Parse an epsilon; None for ``inf``."""
    value = float(text)
    return None if value == float("inf") else value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in PARTS:
        command.add_argument(f"--{part}", action="store_true")
    command.add_argument("--data", choices=sorted(privacy_utility.SCALES), default="digits")
    command.add_argument("--root", type=Path, help="folder with the files of the data set")
    command.add_argument("--partition", help="partition of the digits, as in methods.py; default: IIDx4")
    command.add_argument("--methods", nargs="+", default=list(METHODS))
    command.add_argument(
        "--epsilons",
        nargs="+",
        type=epsilon_of,
        help="inf for no privacy; default: inf 8 4 2 1, for --inference inf 8 1",
    )
    command.add_argument("--delta", type=float, default=1e-5)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--grid-seeds", type=int, default=1, help="0 uses --learning-rate instead")
    command.add_argument(
        "--learning-rates", nargs="+", type=float, default=list(privacy_utility.LEARNING_RATES)
    )
    command.add_argument(
        "--learning-rate", type=float, help="learning rate without a grid, and for --inference"
    )
    for name in ("rounds", "epochs", "batch_size"):
        command.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the scale's value")
    command.add_argument("--model-options", type=json.loads, help='JSON, for example {"widths": [8, 16]}')
    command.add_argument(
        "--trials", type=int, default=2000, help="trials for each cell of --inversion and --inference"
    )
    command.add_argument(
        "--records", nargs="+", type=int, default=[1, 2, 5, 20], help="records of a class, for --inversion"
    )
    command.add_argument(
        "--canaries", type=int, default=20, help="mislabelled records per silo, for --inference"
    )
    command.add_argument("--turns", type=int, help="turns of --cost, in place of each case's")
    command.add_argument("--device", default="cpu", help="of --cost, for example cuda")
    command.add_argument("--size", type=int, help="pixels of --cost, in place of each case's")
    command.add_argument("--cases", nargs="+", choices=[case.model for case in privacy_cost.CASES])
    command.add_argument(
        "--engine",
        choices=("loop", "vmap", "hooks", "fastest"),
        help="per-sample gradients of whole runs; all give equal results. Default: as in jobs, loop on a CPU",
    )
    command.add_argument("--out", type=Path, help="folder for the JSON files")
    return command


def study_of(arguments: argparse.Namespace, **defaults: Any) -> privacy_utility.Study:
    """Return the study that the command line describes."""
    names = ("rounds", "epochs", "batch_size", "learning_rate", "model_options")
    changes = {
        name: defaults.get(name) if getattr(arguments, name) is None else getattr(arguments, name)
        for name in names
    }
    study = privacy_utility.study_of(arguments.data, arguments.partition, arguments.root, **changes)
    return privacy_utility.Study(study.bench, arguments.delta)


def seeds_of(arguments: argparse.Namespace) -> range:
    """Return the seeds of the results."""
    return range(arguments.first_seed, arguments.first_seed + arguments.seeds)


def utility(arguments: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Run part (a): accuracy at each epsilon."""
    return privacy_utility.measure(
        study_of(arguments),
        methods=arguments.methods,
        epsilons=arguments.epsilons or EPSILONS,
        seeds=seeds_of(arguments),
        grid_seeds=range(FIRST_GRID_SEED, FIRST_GRID_SEED + arguments.grid_seeds),
        rates=arguments.learning_rates,
        log=log,
    )


def cost(arguments: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Run part (b): time of a step."""
    cases = privacy_cost.cases_of(arguments.cases, arguments.turns)
    if arguments.size or arguments.batch_size:
        cases = [
            replace(case, size=arguments.size or case.size, batch=arguments.batch_size or case.batch)
            for case in cases
        ]
    return privacy_cost.measure(cases, log=log, device=arguments.device)


def inversion(arguments: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Run part (c): inversion of class means."""
    rows = []
    for seed in seeds_of(arguments):
        pool = privacy_attacks.digits_pool(seed)
        for epsilon in arguments.epsilons or EPSILONS:
            for records in arguments.records:
                rows.append(
                    {"seed": seed}
                    | privacy_attacks.invert(
                        pool, epsilon, records, seed=seed, trials=arguments.trials, delta=arguments.delta
                    )
                )
        log(f"seed {seed} done")
    return {"width": pool.features.shape[1], "rows": rows}


def inference(arguments: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Run part (d): inference of participation."""
    epsilons, seeds = arguments.epsilons or INFERENCE_EPSILONS, seeds_of(arguments)
    # More epochs than for the utility; with fewer, nothing is memorised, with or without privacy.
    study = study_of(arguments, epochs=6, batch_size=32, learning_rate=0.1)
    rows = []
    for seed in seeds:
        pool = privacy_attacks.digits_pool(seed)
        for epsilon in epsilons:
            for together in (1, SITE_RECORDS):
                settings = {"seed": seed, "together": together, "trials": arguments.trials}
                attacks = privacy_attacks.infer_from_sums(pool, epsilon, delta=arguments.delta, **settings)
                rows += [{"seed": seed} | row for row in attacks]
    for epsilon in epsilons:
        row = privacy_attacks.infer_from_models(
            lambda seed, epsilon, names: study.job("fedavg", epsilon, names, seed),
            study.silos,
            epsilon,
            seeds=seeds,
            canaries=arguments.canaries,
            delta=arguments.delta,
        )
        rows.append({"seed": "all"} | row)
        log(f"epsilon {epsilon}: global model: AUC {row['auc']:.3f}")
    return {"settings": vars(study.bench.scale), "rows": rows}


def main(given: Sequence[str] | None = None) -> int:
    """Run the chosen parts, print and write their results, and return the exit code."""
    arguments = parser().parse_args(given)
    wanted = [part for part in PARTS if getattr(arguments, part)]
    if not wanted:
        print(f"expected one or more of {', '.join('--' + part for part in PARTS)}", file=sys.stderr)
        return 2
    if arguments.seeds < 1 or seeds_of(arguments).stop > FIRST_GRID_SEED:
        print(
            f"expected at least 1 seed, and all below {FIRST_GRID_SEED}, the first of the grid",
            file=sys.stderr,
        )
        return 2
    if "inference" in wanted and arguments.data != "digits":
        print("expected --data digits with --inference", file=sys.stderr)
        return 2
    if arguments.engine is not None:
        portions.CHOSEN_ON_CPU = None if arguments.engine == "fastest" else arguments.engine
    out = arguments.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    set_threads(1)
    console = Console(width=150)
    log = partial(Console(stderr=True).print, highlight=False)
    parts = {"utility": utility, "cost": cost, "inversion": inversion, "inference": inference}
    for part in wanted:
        report = parts[part](arguments, log) | {
            "part": part,
            "note": NOTES[part],
            "engine": arguments.engine or "as jobs do",
            "torch": torch.__version__,
            "load": os.getloadavg(),
        }
        privacy_tables.SHOW[part](report, console)
        console.print(NOTES[part], highlight=False)
        path = out / f"privacy-{part}{'-ham' if part == 'utility' and arguments.data == 'ham' else ''}.json"
        path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
        console.print(f"written: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    comparison.end(main)
