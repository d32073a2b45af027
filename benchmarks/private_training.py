"""What each lever gives to private deep training: batches, momentum, mean of models, views, start, noise.

    python benchmarks/private_training.py --data digits --epsilon 8 2 --seeds 5 --out digits.json
    python benchmarks/private_training.py --data ham --levers views1 views2 --epsilon 8 --seeds 3 --out F.json

A lever is a change of one job: FedAvg with the network and the training of ``one_sum_cases.py``. Constants
were chosen with seeds from 101 on; tables have seeds from 0. The file is written after each run; a second
call with the same file repeats none. Measures are of all silos' test records, which only a simulation may
pool; silos' shares of noise are those of a secure sum. Noise has no seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from one_sum import DEFAULT_DATA, MEASURES, run
from one_sum_cases import CASES, Case

from tightframe.config.job import JobConfig, parse_job
from tightframe.privacy.training import portions
from tightframe_app.jobs.recipes import set_value

Changes = Mapping[str, Any]

NO_SPARE = {"privacy.spare_rounds": 0}
NO_MOMENTUM = {"training.momentum": 0.0, "training.learning_rate": 2.0}
MEAN = {"average_last": 5}
START = {"start": "fed3r"}
FEDSGD = {
    "method": "fedsgd",
    "training.epochs": 1,
    "privacy.noise": "shared",
    "summation": "secure",
    **NO_SPARE,
}

LEVERS: Mapping[str, Changes] = {
    "as it is": {},
    "no spare round": NO_SPARE,
    "batches of half": {"training.batch_size": 150},
    "full batches": {"training.batch_size": 300},
    "no momentum": NO_MOMENTUM,
    "mean of 5 models": MEAN,
    "fed3r start": START,
    "no spare, mean": {**NO_SPARE, **MEAN},
    "no spare, mean, no momentum": {**NO_SPARE, **MEAN, **NO_MOMENTUM},
    "no spare, mean, start": {**NO_SPARE, **MEAN, **START},
    "fedsgd": FEDSGD,
    "fedsgd, mean": {**FEDSGD, "average_last": 10},
    **{
        f"views{number}": {**NO_SPARE, "training.augment": True, "privacy.views": number}
        for number in (1, 2, 4, 8)
    },
    "views1, mean": {**NO_SPARE, **MEAN, "training.augment": True},
    "views4, mean": {**NO_SPARE, **MEAN, "training.augment": True, "privacy.views": 4},
}
FEDSGD_ROUNDS: Mapping[float, int] = {8.0: 100, 2.0: 40}


def job_of(
    case: Case, lever: str, epsilon: float, names: Sequence[str], seed: int, further: Changes
) -> JobConfig:
    """Return the job of a lever; ``further`` changes come last."""
    partition = "even4" if case.divided else "natural"
    values = case.job("fedavg", {}, names, partition, seed, epsilon, "own", "plain").model_dump(mode="json")
    changes = {**LEVERS[lever], **further}
    if changes.get("method") == "fedsgd":
        values["rounds"], values["method_options"] = FEDSGD_ROUNDS.get(epsilon, 100), {"learning_rate": 1.0}
    for key, value in changes.items():
        set_value(values, key, value)
    return parse_job(values)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return mean and standard deviation of each lever at each epsilon."""
    cells: dict[tuple[str, float, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["lever"], row["epsilon"], json.dumps(row["set"])), []).append(row)
    lines = []
    for (lever, epsilon, further), found in cells.items():
        done = [item for item in found if "error" not in item]
        shown = [f"{len(done)} of {len(found)} seeds"]
        for name in MEASURES:
            values = [item[name] for item in done if name in item]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                shown.append(f"{name} {statistics.fmean(values):.3f} ± {spread:.3f}")
        lines.append(
            f"epsilon {epsilon:g}, {lever}{'' if further == '{}' else ' ' + further}: {', '.join(shown)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is asked and not in the file yet."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--data", choices=("digits", "mnist", "ham"), default="digits")
    command.add_argument("--levers", nargs="+", choices=list(LEVERS), default=list(LEVERS)[:12])
    command.add_argument("--epsilon", nargs="+", type=float, default=[8.0, 2.0])
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--set", type=json.loads, default={}, help="further changes, JSON by dotted key")
    command.add_argument(
        "--engine", choices=("loop", "vmap", "hooks"), default="vmap", help="all give the same"
    )
    command.add_argument(
        "--root", type=Path, default=Path(os.environ.get("TIGHTFRAME_TEST_DATA", DEFAULT_DATA))
    )
    command.add_argument("--out", type=Path, required=True)
    given = command.parse_args()
    torch.set_num_threads(1)
    portions.CHOSEN_ON_CPU = given.engine
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    case = CASES[given.data](given.root)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        records = case.silos("even4" if case.divided else "natural", seed)
        for epsilon in given.epsilon:
            for lever in given.levers:
                place = {
                    "data": given.data,
                    "lever": lever,
                    "epsilon": epsilon,
                    "set": given.set,
                    "seed": seed,
                }
                if any(all(row[key] == value for key, value in place.items()) for row in rows):
                    continue
                found = run(job_of(case, lever, epsilon, sorted(records), seed, given.set), records)
                rows.append({**found, **place})
                given.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
                print(
                    f"{place}: {found.get('accuracy', found.get('reason'))} in {found.get('seconds')} s",
                    flush=True,
                )
    print(table(rows))


if __name__ == "__main__":
    main()
