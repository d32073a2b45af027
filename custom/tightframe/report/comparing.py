"""Comparison of runs: values in which their jobs differ, last metrics, paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightframe.metrics import clinical, noise_intervals
from tightframe.report.reading import ServerResults, only_run, read
from tightframe.results.files import ResultsError
from tightframe.results.parts.evaluation import Finding, FoldMetrics
from tightframe.results.rows import Row, last_spent
from tightframe.results.words import dotted, one_answer

MEASURES = ("balanced_accuracy", "accuracy", "auroc", "average_precision")
NOT_THE_ARM = ("job_name", "seed")
"""Job values that may differ between repeats of one setting."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: in the comparison.
        last: line of ``metrics.jsonl`` with the last evaluated model; None without one.
        values: of the job, defaults included, by dotted keys.
    """

    name: str
    folder: Path
    found: ServerResults
    last: Row | None
    values: dict[str, Any]

    @property
    def test(self) -> FoldMetrics | None:
        """Metrics of the last model on the test records."""
        evaluation = self.found.outcome.evaluation
        return None if evaluation is None else evaluation.test

    @property
    def seed(self) -> Any:
        """The job's seed."""
        return self.values.get("seed")

    @property
    def arm(self) -> tuple[tuple[str, str], ...]:
        """Return the job's values without name and seed, which repeats share."""
        return tuple(
            sorted((key, repr(value)) for key, value in self.values.items() if key not in NOT_THE_ARM)
        )

    @property
    def epsilon(self) -> str:
        """Return the promised epsilon, and the highest that silos last reported as spent."""
        privacy = self.found.outcome.privacy
        if privacy is None:
            return "none"
        spent = last_spent(self.found.rows)
        spent_note = "" if spent is None or spent.range is None else f", spent up to {spent.range[1]:g}"
        return f"{privacy.get('epsilon', '?')} promised{spent_note}"

    def interval(self, measure: str) -> tuple[float, float] | None:
        """Return a measure's 95 % limits: for noise, or for the number of test records if counts are exact.

        Accuracy has Wilson's limits, balanced accuracy those of the mean over classes (MOVER); areas have
        none without noise. Findings share their records, so the limits of their mean are the mean of their
        limits, valid under any dependence.
        """
        test = self.test
        if test is None or getattr(test, measure) is None:
            return None
        if test.noisy:
            limits: tuple[float, float] | None = getattr(test, f"{measure}_interval", None)
            return limits
        outcome = self.found.outcome
        copies = max(1, len(outcome.evaluated_by)) if outcome.test_shared else 1
        if test.findings is not None:
            return _of_findings(test.findings.values(), measure, copies)
        if measure == "accuracy" and test.accuracy is not None and test.records:
            share = clinical.wilson(test.accuracy * test.records / copies, test.records / copies)
            return share.low, share.high
        if measure != "balanced_accuracy":
            return None
        shares = [
            clinical.wilson(recall * test.class_records[name] / copies, test.class_records[name] / copies)
            for name, recall in test.recall.items()
            if recall is not None and test.class_records.get(name)
        ]
        value, low, high = (
            np.array([getattr(item, end) for item in shares]) for end in ("value", "low", "high")
        )
        return noise_intervals.cut(*noise_intervals.mean(value, low, high)) if shares else None


def _of_findings(findings: Iterable[Finding], measure: str, copies: int) -> tuple[float, float] | None:
    """Return the mean over findings of Wilson limits of accuracy, or of sensitivity and specificity."""
    rows: list[tuple[int, int]] = []
    for table in (item.confusion for item in findings if item.confusion is not None):
        (absent, false), (missed, hits) = table
        if measure == "accuracy":
            rows.append((absent + hits, false + missed))
        elif measure == "balanced_accuracy" and all(map(any, table)):
            rows += [(absent, false), (hits, missed)]
    limits = [clinical.wilson(right / copies, (right + wrong) / copies) for right, wrong in rows]
    if not limits:
        return None
    return statistics.fmean(item.low for item in limits), statistics.fmean(item.high for item in limits)


@dataclass(frozen=True)
class Paired:
    """Differences of two settings, seed by seed.

    Attributes:
        names: of the setting's runs.
        base: names of the runs that they are compared with.
        differences: in balanced accuracy, one per seed.
        limits: of the mean at 95 %, by Student's t over seeds.
    """

    names: tuple[str, ...]
    base: tuple[str, ...]
    seeds: tuple[Any, ...]
    differences: tuple[float, ...]
    mean: float
    limits: tuple[float, float]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs to compare.

    Raises:
        ResultsError: TF-801, TF-802 (see ``reading.read``); TF-804 if one is a silo's, a run is named twice,
            or runs are of different data or classes.
    """
    runs: list[Run] = []
    for folder in map(only_run, folders):
        results = read(folder)
        if not isinstance(results, ServerResults):
            raise ResultsError(
                f"Expected results of a run's server, but {folder} has a silo's own.", code="TF-804"
            )
        if any(folder.resolve() == run.folder.resolve() for run in runs):
            raise ResultsError(f"Expected each run once, but {folder} is named twice.", code="TF-804")
        outcome = results.outcome
        last = next((row for row in reversed(results.rows) if row.evaluation is not None), None)
        values = dict(dotted(outcome.effective or outcome.job))
        runs.append(Run(outcome.job_name, folder, results, last, values))
    for run in runs[1:]:
        _check_alike(runs[0], run)
    names = [run.name for run in runs]
    return [
        run
        if names.count(run.name) == 1
        else Run(f"{run.name} ({number})", run.folder, run.found, run.last, run.values)
        for number, run in enumerate(runs, 1)
    ]


def _check_alike(first: Run, other: Run) -> None:
    def differs(what: str, one: Any, two: Any) -> ResultsError:
        return ResultsError(
            f"Expected runs of the same {what}, but {first.folder} has {one} and {other.folder} has {two}.",
            code="TF-804",
        )

    if first.found.outcome.job.get("dataset") != other.found.outcome.job.get("dataset"):
        raise differs("data set", *(run.found.outcome.job.get("dataset") for run in (first, other)))
    if first.found.outcome.synthetic != other.found.outcome.synthetic:
        raise differs(
            "kind of records (synthetic: true or false)",
            first.found.outcome.synthetic,
            other.found.outcome.synthetic,
        )
    one, two = first.test, other.test
    if one is None or two is None:
        return
    if list(one.recall) != list(two.recall):
        raise differs("classes", ", ".join(one.recall) or "none", ", ".join(two.recall) or "none")
    if not one.noisy and not two.noisy and one.class_records != two.class_records:
        raise differs("test records by class", one.class_records, two.class_records)


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the values in which the jobs differ: key -> one value per run, None where it lacks the key.

    An option's default is not listed if other runs' method, data set or model has no such option.
    """
    keys = sorted({key for run in runs for key in run.values if not _implied(runs, key)})
    by_key = {key: [run.values.get(key) for run in runs] for key in keys}
    return {key: values for key, values in by_key.items() if any(value != values[0] for value in values)}


def _implied(runs: Sequence[Run], key: str) -> bool:
    """Check whether some runs lack an option and no job sets it in the others."""
    with_it = [run for run in runs if key in run.values]
    jobs = [dict(dotted(run.found.outcome.job)) for run in with_it]
    return "_options." in key and len(with_it) < len(runs) and not any(key in values for values in jobs)


FEW_POSITIVES = 10
"""Positive records of a finding below which its AUROC says little."""


def positives(runs: Sequence[Run]) -> dict[str, int | None]:
    """Return each finding's number of positive test records, None if withheld; empty without findings."""
    test = next((run.test for run in runs if run.test is not None and run.test.findings), None)
    return {} if test is None else {name: test.class_records.get(name) for name in test.findings or {}}


def few_positives(runs: Sequence[Run]) -> str:
    """Name the findings with few positive records that a mean AUROC includes; empty if there are none."""
    counts = positives(runs).items()
    rare = [f"{name} {count}" for name, count in counts if count is not None and count < FEW_POSITIVES]
    return f"AUROC is a mean over findings, some of few positive records: {', '.join(rare)}" if rare else ""


def absent_classes(runs: Sequence[Run]) -> list[str]:
    """Name the classes that each run lacks, and where."""
    lines = []
    for run in runs:
        if lacks := run.found.outcome.absent_classes:
            where = "model" if run.found.outcome.one_sum is not None else "class sums"
            lines.append(f"{run.name}: not in the {where}, because too few silos have it: {', '.join(lacks)}")
    return lines


def one_answers(runs: Sequence[Run]) -> list[str]:
    """Say of each run whose last model gives one answer that it does."""
    answers = {run.name: None if run.test is None else one_answer(run.test.one_answer) for run in runs}
    return [f"{name}: {answer}" for name, answer in answers.items() if answer is not None]


def unopened(runs: Sequence[Run]) -> str:
    """Name the private runs whose results stayed at the silos, and how to open them; empty for none."""
    names = [run.name for run in runs if run.test is None and run.values.get("privacy.evaluation") == "local"]
    how = "in each silo's local_report.json; --set privacy.evaluation=noisy opens them with noise"
    return f"test results of {', '.join(names)}: {how}" if names else ""


def settings(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Return the settings, each with a distinct name and its runs (seeds).

    The name lists the values in which the settings differ; a single setting has its first run's name.
    """
    arms: dict[Any, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    firsts = [group[0] for group in arms.values()]
    keys = [key for key in differing(firsts) if key not in NOT_THE_ARM]
    if "method" in keys:
        keys = ["method", *(key for key in keys if key != "method" and not key.startswith("method_options."))]
    result: list[tuple[str, list[Run]]] = []
    for first, group in zip(firsts, arms.values(), strict=True):
        values = [f"{key.rpartition('.')[2]} {first.values.get(key)}" for key in keys[:2]]
        name = ", ".join(values).removeprefix("method ") or first.name
        if len(keys) > 2 or name in [other for other, _ in result]:
            name = first.name
        result.append((name, group))
    return result


def paired(runs: Sequence[Run]) -> list[Paired]:
    """Compare each setting of several seeds with the first run's, over their common seeds."""
    arms: dict[Any, dict[Any, Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, {}).setdefault(run.seed, run)
    base, *others = arms.values()
    comparisons = []
    for arm in others:
        pairs = [
            (seed, run, base[seed])
            for seed, run in arm.items()
            if seed in base and None not in (_score(run), _score(base[seed]))
        ]
        if len(pairs) < 2:
            continue
        differences = [(_score(run) or 0.0) - (_score(of) or 0.0) for _, run, of in pairs]
        mean = statistics.fmean(differences)
        half = t_quantile(len(pairs) - 1) * statistics.stdev(differences) / math.sqrt(len(pairs))
        comparisons.append(
            Paired(
                tuple(run.name for _, run, _ in pairs),
                tuple(of.name for _, _, of in pairs),
                tuple(seed for seed, _, _ in pairs),
                tuple(differences),
                mean,
                (mean - half, mean + half),
            )
        )
    return comparisons


def _score(run: Run) -> float | None:
    return None if run.test is None else run.test.balanced_accuracy


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t distribution with whole degrees of freedom.

    By bisection of its closed form (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(t_quantile(1), 3), round(t_quantile(9), 3)
    (12.706, 2.262)
    """

    def within(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        cosine, term, total = math.cos(angle), 1.0, 0.0
        if freedom % 2 == 0:
            for k in range(freedom // 2):
                total += term
                term *= cosine**2 * (2 * k + 1) / (2 * k + 2)
            return math.sin(angle) * total
        for k in range((freedom - 1) // 2):
            total += term * cosine
            term *= cosine**2 * (2 * k + 2) / (2 * k + 3)
        return 2 / math.pi * (angle + math.sin(angle) * total)

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return high


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the comparison as plain values."""
    return {
        "format": 1,
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "ended": run.found.outcome.ended,
                "rounds_done": run.found.outcome.rounds_done,
                "noisy": run.test is not None and run.test.noisy,
                "epsilon": run.epsilon,
                "absent_classes": run.found.outcome.absent_classes,
                **{name: None if run.test is None else getattr(run.test, name) for name in MEASURES},
                **{f"{name}_interval": run.interval(name) for name in MEASURES},
            }
            for run in runs
        ],
        "differing": differing(runs),
        "paired_differences": [
            {
                "runs": item.names,
                "against": item.base,
                "seeds": item.seeds,
                "differences": item.differences,
                "mean": item.mean,
                "interval": item.limits,
            }
            for item in paired(runs)
        ],
    }
