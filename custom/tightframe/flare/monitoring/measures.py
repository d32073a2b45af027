"""A run in numbers, for boards that draw curves: TensorBoard and, by way of StatsD, Prometheus and Grafana.

All of it is read from the rows of ``metrics.jsonl`` and from the run's status: totals, and how many silos.
Of a single silo there is nothing, not even its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from tightframe.errors import LATE
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.rows import Row, last_spent
from tightframe.results.status import Status

PREFIX = "tightframe"
NOISY = "_noisy"
"""Ends the name of a measure that has differential privacy's noise, so that none is drawn as an exact one."""
LIMITS = ("_low", "_high")
"""End the names of a noisy measure's limits: the exact value lies between, as far as the noise goes."""
RECALL = "recall"
EVALUATED: Mapping[str, str] = {
    "accuracy": "Accuracy on the test records",
    "balanced_accuracy": "Balanced accuracy on the test records",
    "auroc": "Area under the ROC curve on the test records, mean over classes",
    "average_precision": "Average precision on the test records, mean over classes",
    RECALL: "Recall of one class on the test records",
}
COUNTED: Mapping[str, str] = {
    "classes_told": "Classes that have enough records to be in the balanced accuracy",
    "one_answer": "1 if the model gives one answer whatever the record, or if noise leaves that open",
}
OF_SUM: Mapping[str, str] = {
    "loss": "Loss of local training",
    "epsilon": "Upper end of the range of all reported epsilons",
    "silos_answered": "Silos whose terms have come",
    "silos_late": "Silos that were too late for the last sum",
    "silos_dropped": "Silos that are not in the last sum for another reason than being late",
}
OF_ROUND: Mapping[str, str] = {
    "round_seconds": "Seconds of the round",
    "round_bytes_down": "Bytes from the server to the silos in the round",
    "round_bytes_up": "Bytes from the silos to the server in the round",
}
OF_RUN: Mapping[str, str] = {
    "running": "1 while the job runs",
    "trained": "1 once the job has trained its last round",
    "round": "Round that silos are asked for now",
    "rounds": "Training rounds of the job",
    "evaluated_round": "Round whose model the test values are of",
    "silos_joined": "Silos enrolled",
    "silos_refused": "Silos not enrolled",
    "silos_lost": "Silos enrolled that are in no sum any more",
    "left_out": "Times that a silo was not in a sum, late or for another reason",
    "epsilon_promised": "Most that the job may cost a silo",
    "run_seconds": "Seconds of all sums so far",
    "run_bytes_down": "Bytes from the server to the silos so far",
    "run_bytes_up": "Bytes from the silos to the server so far",
}

Measure = tuple[str, str | None]
"""A name, and the class that a value of it is of."""
Key = TypeVar("Key")


def of_rounds(rows: Iterable[Row]) -> dict[tuple[Measure, int], float]:
    """Return a run's curves: the value of each measure after each round.

    A round's own values are there once its last phase is; those of a model when it was evaluated, which
    round 0, the initial model, can have as well.

    Args:
        rows: of the run so far.

    Returns:
        (measure, round) -> value; what is not known is left out.
    """
    points: dict[tuple[Measure, int], float | None] = {}
    phases: list[Row] = []
    for row in rows:
        if row.test is not None:
            points |= {(measure, row.round): value for measure, value in _evaluated(row.test).items()}
        if row.kind != "train":
            continue
        phases.append(row)
        if row.makes_model:
            points |= {((name, None), row.round): value for name, value in _round(phases).items()}
            phases = []
    return _without_none(points)


def of_run(status: Status, rows: Sequence[Row]) -> dict[Measure, float]:
    """Return the last known value of each measure."""
    values: dict[str, float | None] = {
        "running": float(status.state not in ("trained", "stopped")),
        "trained": float(status.state == "trained"),
        "round": status.round,
        "rounds": status.rounds,
        "silos_joined": len(status.joined),
        "silos_refused": len(status.refused),
        "silos_lost": len(status.lost),
        "left_out": sum(len(row.dropped) for row in rows),
        "epsilon_promised": status.epsilon_promised,
        "run_seconds": sum(row.seconds for row in rows),
        "run_bytes_down": sum(row.bytes_down for row in rows),
        "run_bytes_up": sum(row.bytes_up for row in rows),
        **_sums(rows[-1:]),
        # Of the sum that goes on; who was late for it is known when it is over.
        "silos_answered": len(status.answered),
        "loss": next((row.training["loss"] for row in reversed(rows) if "loss" in row.training), None),
        "epsilon": _epsilon(rows),
    }
    measures: dict[Measure, float | None] = {(name, None): value for name, value in values.items()}
    for row in reversed(rows):
        if row.test is not None:
            measures |= {("evaluated_round", None): row.round} | _evaluated(row.test)
            break
    return _without_none(measures)


def _round(phases: Sequence[Row]) -> dict[str, float | None]:
    """Return the measures of one round, of the rows of all its phases."""
    return {
        "loss": next((row.training["loss"] for row in reversed(phases) if "loss" in row.training), None),
        "epsilon": _epsilon(phases),
        **_sums(phases),
        "round_seconds": sum(row.seconds for row in phases),
        "round_bytes_down": sum(row.bytes_down for row in phases),
        "round_bytes_up": sum(row.bytes_up for row in phases),
    }


def _sums(rows: Sequence[Row]) -> dict[str, float | None]:
    """Count the silos in the last of some sums, and those missing in any of them."""
    dropped: dict[str, str] = {}
    for row in rows:
        dropped |= row.dropped
    late = sum(code == LATE for code in dropped.values())
    return {
        "silos_answered": len(rows[-1].silos) if rows else None,
        "silos_late": late,
        "silos_dropped": len(dropped) - late,
    }


def _epsilon(rows: Sequence[Row]) -> float | None:
    spent = last_spent(rows)
    return None if spent is None or spent.range is None else spent.range[1]


def _evaluated(test: FoldMetrics) -> dict[Measure, float | None]:
    """Return what the test records say of a model."""
    ending = NOISY if test.noisy else ""
    plain = [name for name in EVALUATED if name != RECALL]
    limits: dict[Measure, float | None] = {}
    if ending:
        ranges: dict[Measure, tuple[float, float] | None] = {
            (name, None): getattr(test, f"{name}_interval", None) for name in plain
        }
        ranges |= {(RECALL, name): ends for name, ends in test.recall_interval.items()}
        for (name, of_class), ends in ranges.items():
            if ends is not None:
                limits |= {(name + ending + end, of_class): ends[i] for i, end in enumerate(LIMITS)}
    return {
        **{(name + ending, None): getattr(test, name) for name in plain},
        **{(RECALL + ending, name): value for name, value in test.recall.items()},
        **limits,
        ("classes_told" + ending, None): test.classes_told,
        # Of findings nobody judges it.
        ("one_answer", None): None if test.findings is not None else float(test.one_answer is not None),
    }


def _without_none(values: Mapping[Key, float | None]) -> dict[Key, float]:
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}
