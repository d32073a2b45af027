"""How good a model is at each epsilon: every method, seed and epsilon, with noise from the real mechanisms.

With differential privacy nothing exact leaves a silo, no metric either. Here each silo's own report is
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
from tightframe.results.evaluation import FoldMetrics
from tightframe.results.local_report import SiloReport

METHODS = ("fedavg", "fedetf", "fedmr")
EPSILONS: tuple[float | None, ...] = (None, 8.0, 4.0, 2.0, 1.0)
LEARNING_RATES = (0.05, 0.2, 0.5)
FIRST_GRID_SEED = methods_benchmark.FIRST_GRID_SEED

# Large batches, because the noise of a step does not grow with the records in it; few epochs, because a step
# treats its records one by one. The learning rate is a grid's.
SCALES = {
    "digits": Scale("small_cnn", {"widths": [16, 32]}, 10, 2, 64, 0.2, measure="accuracy", last=1),
    # After half as many rounds and epochs FedAvg is near chance even without privacy; with these at 0.31.
    HAM: Scale("small_cnn", {"widths": [16, 32]}, 20, 4, 64, 0.2, measure="balanced_accuracy", last=1),
}
PARTITION = "IIDx4"


@dataclass(frozen=True)
class Study:
    """What is trained.

    Attributes:
        bench: data, partition and scale.
        delta: of the jobs with privacy.
    """

    bench: methods_benchmark.Bench
    delta: float = 1e-5

    def silos(self, seed: int) -> Mapping[str, SiloData]:
        """The silos of a seed; of an IID partition all of one size, whose noise is solved once."""
        found = self.bench.silos(seed)
        if self.bench.partition.get("partition") != "iid":
            return found
        size = min(len(silo.labels("train")) for silo in found.values()) // 10 * 10
        return {name: cut(silo, size) for name, silo in found.items()}

    def job(
        self,
        method: str,
        epsilon: float | None,
        names: Sequence[str],
        seed: int,
        learning_rate: float | None = None,
    ) -> JobConfig:
        """The same job at every epsilon, None for no privacy: equal weights, no class rules."""
        values = self.bench.job(method, {}, names, seed, "off").model_dump()
        if learning_rate is not None:
            values["training"]["learning_rate"] = learning_rate
        values["weights"] = "uniform"
        values["privacy"] = None if epsilon is None else {"epsilon": epsilon, "delta": self.delta}
        return parse_job(values)

    def run(self, job: JobConfig, records: Mapping[str, SiloData]) -> dict[str, Any]:
        """Train; what the silos' reports say of the last model. A failure is a result, too."""
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
    """The silo with the first ``size`` of its training records, which are not sorted by class."""
    folds: dict[Fold, Any] = {fold: stacked(silo, fold) for fold in ("train", "validation", "test")}
    folds["train"] = tuple(item[:size] for item in folds["train"])
    return ArrayData(folds, source=silo.source, num_classes=CLASSES)


def pooled(parts: Sequence[FoldMetrics]) -> dict[str, Any]:
    """Accuracy and balanced accuracy over all silos, from each one's recall and records of every class."""
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


def study_of(data: str, partition: str | None, root: Path | None, **asked: Any) -> Study:
    """The study of a data set, with some values instead of the scale's."""
    scale = replace(SCALES[data], **{name: value for name, value in asked.items() if value is not None})
    parsed = {} if data == HAM else methods_benchmark.parse_partition(partition or PARTITION)
    return Study(methods_benchmark.Bench(data, parsed, root or methods_benchmark.ROOTS.get(data), scale))


def choose(
    study: Study,
    epsilons: Sequence[float | None],
    rates: Sequence[float],
    seeds: Sequence[int],
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The learning rate of each epsilon: FedAvg's best on the validation folds; every point is kept.

    A run that fails has the score 0.
    """
    measure, found = study.bench.scale.measure, []
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
                tell(f"grid: epsilon {epsilon}, {point['learning_rate']:g}: {point['scores'][-1]:.3f}")
        best = max(points, key=lambda point: statistics.fmean(point["scores"]))
        found.append({"epsilon": epsilon, "points": points, "chosen": best["learning_rate"]})
    return found


def measure(
    study: Study,
    *,
    methods: Sequence[str] = METHODS,
    epsilons: Sequence[float | None] = EPSILONS,
    seeds: Sequence[int],
    grid_seeds: Sequence[int],
    rates: Sequence[float] = LEARNING_RATES,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every method at every epsilon with every seed.

    Args:
        study: data and scale.
        methods: their names.
        epsilons: None is no privacy.
        seeds: of the result.
        grid_seeds: of the learning rates; none takes the scale's.
        rates: learning rates to choose from.
        tell: gets a line after each run.
    """
    grid = choose(study, epsilons, rates, grid_seeds, tell) if grid_seeds else []
    chosen = {point["epsilon"]: point["chosen"] for point in grid}
    runs = []
    for seed in seeds:
        records = study.silos(seed)
        for epsilon in epsilons:
            for method in methods:
                job = study.job(method, epsilon, list(records), seed, chosen.get(epsilon))
                runs.append(study.run(job, records))
                shown = runs[-1].get("error") or f"{runs[-1]['test'][study.bench.scale.measure]:.3f}"
                tell(f"seed {seed}, epsilon {epsilon}: {method}: {shown}")
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
