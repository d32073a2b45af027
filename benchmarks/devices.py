#!/usr/bin/env python3
"""Does every method train the same model on a GPU as on a CPU, and with silos on both?

Each case is a whole run in one process: digits, three silos, secure sums, two rounds or the method's own. It
runs on the CPU, twice on the device, and with one of the three silos there; the table shows the largest
difference of the models, relative to the CPU model's largest entry, and seconds. Noise has no seed, so for
private runs only errors and seconds say something. Then big batches are run with next to no memory of the
GPU: each must end with TF-302, and by its name.

    python benchmarks/devices.py --out devices.json
    python benchmarks/devices.py --cases fedavg "fedmr, private" --device cuda:1
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tightframe import federation, methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.errors import TightframeError

SITES = ("a", "b", "c")
PRIVATE: dict[str, dict[str, Any]] = {
    f"{method}, {noise} noise": {"method": method, "privacy": {"epsilon": 8.0, "noise": noise}}
    for method, noise in (("fedavg", "own"), ("fedmr", "own"), ("fedsgd", "shared"), ("fed3r", "own"))
}
BIG: dict[str, Any] = {
    "model_options": {"widths": [64, 128]},
    "training": {"batch_size": 512, "learning_rate": 0.05},
}
LITTLE = 1e-4
"""Part of a GPU's memory that a run with big batches may take: 14 MB of 140 GB."""


def job_of(values: dict[str, Any]) -> JobConfig:
    """Return the small job of a case, with these values."""
    rounds = methods.get(values["method"]).rounds
    return parse_job(
        {
            "job_name": "devices",
            "dataset": "digits",
            "model": "random_features" if rounds else "small_cnn",
            "model_options": {"width": 64} if rounds else {"widths": [8, 16]},
            "sites": list(SITES),
            "min_sites": 3,
            "rounds": rounds or 2,
            "training": {
                "momentum": 0.0 if values["method"] in ("scaffold", "feddc") else 0.9,
                "learning_rate": 0.05,
            },
            "weights": "uniform" if "privacy" in values else "exact",
        }
        | values
    )


def trained(values: dict[str, Any], *devices: str) -> dict[str, Any]:
    """Run a case with one device for each silo: the model, or the error that ended it; and seconds."""
    begun = time.perf_counter()
    entries = {
        site: SiteEntry(device=device, data={"digits": {"silo": silo}})
        for silo, (site, device) in enumerate(zip(SITES, devices, strict=True))
    }
    told: dict[str, Any] = {}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            result = federation.run_job(job_of(values), entries=entries)
        told["model"] = {name: tensor.double() for name, tensor in result.state.model.items()}
    except TightframeError as error:
        told["error"] = str(error)
    return told | {"seconds": round(time.perf_counter() - begun, 2)}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Return the largest difference of two models over the first's largest entry; None without two."""
    if not one.get("model") or not other.get("model"):
        return None
    largest = max(float(tensor.abs().max()) for tensor in one["model"].values())
    apart = max(float((tensor - other["model"][name]).abs().max()) for name, tensor in one["model"].items())
    return apart / largest


def compared(name: str, values: dict[str, Any], device: str) -> dict[str, Any]:
    """Run a case on the CPU, twice on the device, and with one silo there."""
    torch.set_num_threads(1)
    runs = {
        "cpu": trained(values, "cpu", "cpu", "cpu"),
        "device": trained(values, device, device, device),
        "again": trained(values, device, device, device),
        "mixed": trained(values, device, "cpu", "cpu"),
    }
    row: dict[str, Any] = {"case": name}
    if "privacy" not in values:
        row["differences"] = {
            "device": difference(runs["cpu"], runs["device"]),
            "again": difference(runs["device"], runs["again"]),
            "mixed": difference(runs["cpu"], runs["mixed"]),
        }
    row["seconds"] = {where: run["seconds"] for where, run in runs.items()}
    row["errors"] = {where: run["error"] for where, run in runs.items() if "error" in run}
    print(json.dumps(row), flush=True)
    return row


def with_little_memory(name: str, values: dict[str, Any], device: str) -> dict[str, Any]:
    """Run a case of big batches with next to no memory on the device."""
    torch.cuda.set_per_process_memory_fraction(LITTLE, torch.device(device))
    row = {
        "case": f"{name}, little memory",
        "error": trained(values | BIG, device, device, device).get("error"),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Run the cases that were asked for."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(item.name for item in methods.METHODS), *PRIVATE]
    words.add_argument("--cases", nargs="+", default=names, help="methods, by default all")
    words.add_argument("--device", default="cuda")
    words.add_argument("--workers", type=int, default=4, help="processes")
    words.add_argument("--out", type=Path, help="JSON file with all rows")
    asked = words.parse_args()
    cases = {name: PRIVATE.get(name, {"method": name}) for name in asked.cases}
    with ProcessPoolExecutor(asked.workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = [pool.submit(compared, name, values, asked.device) for name, values in cases.items()]
        if torch.device(asked.device).type == "cuda":
            waiting += [
                pool.submit(with_little_memory, name, values, asked.device)
                for name, values in cases.items()
                if "widths" in job_of(values).model_options
            ]
        rows = [one.result() for one in waiting]
    if asked.out is not None:
        asked.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
