"""Accuracy at each epsilon: every method and seed, with noise from the real mechanisms.

With differential privacy nothing exact leaves a silo, not even a metric. Here each silo's own report is
read and the hits are added up, which only a simulation may do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privacy_attacks import CLASSES, stacked
from scales import HAM, Scale

import methods as methods_benchmark
from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.data.arrays import ArrayData
from tightframe.data.base import SiloData
from tightframe.errors import TightframeError
from tightframe.phases import Fold
from tightframe.results.local_report import SiloReport
from tightframe.results.parts.evaluation import FoldMetrics

METHODS = ("fedavg", "fedetf", "fedmr")
EPSILONS: tuple[float | None, ...] = (None, 8.0, 4.0, 2.0, 1.0)
LEARNING_RATES = (0.05, 0.2, 0.5)
FIRST_GRID_SEED = methods_benchmark.FIRST_GRID_SEED

# Large batches, because the noise of a step does not grow with its records; few epochs, because a step
# processes its records one by one. A grid gives the learning rate.
SCALES = {
    "digits": Scale("small_cnn", {"widths": [16, 32]}, 10, 2, 64, 0.2, measure="accuracy", last=1),
    # After half as many rounds and epochs FedAvg is near chance even without privacy; with these at 0.31.
    HAM: Scale("small_cnn", {"widths": [16, 32]}, 20, 4, 64, 0.2, measure="balanced_accuracy", last=1),
}
PARTITION = "IIDx4"


@dataclass(frozen=True)
class Study:
    """Settings of the runs.

    Attributes:
        bench: data, partition and scale.
        delta: of the jobs with privacy.
    """

    bench: methods_benchmark.Bench
    delta: float = 1e-5

    def silos(self, seed: int) -> Mapping[str, SiloData]:
        """Return the silos of a seed; in an IID partition all have one size, so that noise is solved once."""
        silos = self.bench.silos(seed)
        if self.bench.partition.get("partition") != "iid":
            return silos
        size = min(len(silo.labels("train")) for silo in silos.values()) // 10 * 10
        return {name: cut(silo, size) for name, silo in silos.items()}

    def job(
        self,
        method: str,
        epsilon: float | None,
        names: Sequence[str],
        seed: int,
        learning_rate: float | None = None,
    ) -> JobConfig:
        """Return the job at an epsilon, None for no privacy: always equal weights and no class rules."""
        values = self.bench.job(method, {}, names, seed, "off").model_dump()
        if learning_rate is not None:
            values["training"]["learning_rate"] = learning_rate
        values["weights"] = "uniform"
        values["privacy"] = None if epsilon is None else {"epsilon": epsilon, "delta": self.delta}
        return parse_job(values)

    def run(self, job: JobConfig, records: Mapping[str, SiloData]) -> dict[str, Any]:
        """Train; return the last model's metrics from the silos' reports, or the code of a failure."""
        began = time.monotonic()
        common = {"method": job.method, "seed": job.seed, "learning_rate": job.training.learning_rate}
        common["epsilon"] = None if job.privacy is None else job.privacy.epsilon
        with tempfile.TemporaryDirectory() as folder:
            try:
                federation.run_job(job, data=records, folder=Path(folder))
            except TightframeError as error:
                return {**common, "error": error.code, "reason": str(error)}
            reports = [SiloReport.read(Path(folder) / name) for name in records]
        spent = [report.privacy.epsilon for report in reports if report.privacy]
        return common | {
            **{
                fold: pooled([getattr(report.final, fold) for report in reports])
                for fold in ("validation", "test")
            },
            "spent": max(spent, default=None),
            "seconds": time.monotonic() - began,
        }


def cut(silo: SiloData, size: int) -> SiloData:
    """Return the silo with its first ``size`` training records, which are not sorted by class."""
    folds: dict[Fold, Any] = {fold: stacked(silo, fold) for fold in ("train", "validation", "test")}
    folds["train"] = tuple(item[:size] for item in folds["train"])
    return ArrayData(folds, source=silo.source, num_classes=CLASSES)


def pooled(parts: Sequence[FoldMetrics]) -> dict[str, Any]:
    """Return accuracy and balanced accuracy over all silos, from each one's recall and records per class."""
    hits: dict[str, int] = {}
    counts: dict[str, int] = {}
    for part in parts:
        for name, count in part.class_records.items():
            counts[name] = counts.get(name, 0) + count
            hits[name] = hits.get(name, 0) + round((part.recall[name] or 0.0) * count)
    present = [name for name, count in counts.items() if count]
    records = sum(counts.values())
    if not records:
        return {"records": 0, "accuracy": None, "balanced_accuracy": None}
    return {
        "records": records,
        "accuracy": sum(hits.values()) / records,
        "balanced_accuracy": statistics.fmean(hits[name] / counts[name] for name in present),
    }


def study_of(data: str, partition: str | None, root: Path | None, **changes: Any) -> Study:
    """Return the study of a data set, with some values in place of the scale's."""
    scale = replace(SCALES[data], **{name: value for name, value in changes.items() if value is not None})
    parsed = {} if data == HAM else methods_benchmark.parse_partition(partition or PARTITION)
    return Study(methods_benchmark.Bench(data, parsed, root or methods_benchmark.ROOTS.get(data), scale))


def choose(
    study: Study,
    epsilons: Sequence[float | None],
    rates: Sequence[float],
    seeds: Sequence[int],
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Choose each epsilon's learning rate, FedAvg's best on the validation folds; return every point.

    A run that fails has the score 0.
    """
    measure, choices = study.bench.scale.measure, []
    for epsilon in epsilons:
        points = [{"learning_rate": rate, "scores": [], "failed": []} for rate in rates]
        for seed in seeds:
            records = study.silos(seed)
            for point in points:
                run = study.run(
                    study.job("fedavg", epsilon, list(records), seed, point["learning_rate"]), records
                )
                point["scores"].append(run.get("validation", {}).get(measure, 0.0))
                point["failed"] += [run["error"]] if "error" in run else []
                log(f"grid: epsilon {epsilon}, {point['learning_rate']:g}: {point['scores'][-1]:.3f}")
        best = max(points, key=lambda point: statistics.fmean(point["scores"]))
        choices.append({"epsilon": epsilon, "points": points, "chosen": best["learning_rate"]})
    return choices


def measure(
    study: Study,
    *,
    methods: Sequence[str] = METHODS,
    epsilons: Sequence[float | None] = EPSILONS,
    seeds: Sequence[int],
    grid_seeds: Sequence[int],
    rates: Sequence[float] = LEARNING_RATES,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run every method at every epsilon with every seed.

    Args:
        study: data and scale.
        methods: their names.
        epsilons: None for no privacy.
        seeds: of the result.
        grid_seeds: of the learning rates; with none, the scale's rate is used.
        rates: learning rates to choose from.
        log: called with a line after each run.
    """
    grid = choose(study, epsilons, rates, grid_seeds, log) if grid_seeds else []
    chosen = {point["epsilon"]: point["chosen"] for point in grid}
    runs = []
    for seed in seeds:
        records = study.silos(seed)
        for epsilon in epsilons:
            for method in methods:
                job = study.job(method, epsilon, list(records), seed, chosen.get(epsilon))
                runs.append(study.run(job, records))
                shown = runs[-1].get("error") or f"{runs[-1]['test'][study.bench.scale.measure]:.3f}"
                log(f"seed {seed}, epsilon {epsilon}: {method}: {shown}")
    first = study.silos(seeds[0])
    return {
        "data": study.bench.name,
        "settings": {
            **vars(study.bench.scale),
            "partition": dict(study.bench.partition),
            "delta": study.delta,
        },
        "records": {
            name: {fold: len(silo.labels(fold)) for fold in ("train", "validation", "test")}  # type: ignore[arg-type]
            for name, silo in first.items()
        },
        "seeds": list(seeds),
        "grid_seeds": list(grid_seeds),
        "grid": grid,
        "runs": runs,
    }
