"""Rows, statuses and evaluations of result files, with few words."""

from __future__ import annotations

from typing import Any

from tightframe.results.parts.evaluation import Evaluation
from tightframe.results.parts.ranges import Spent
from tightframe.results.rows import Row
from tightframe.results.status import Status
from tightframe.rounds.riders import epsilon


def evaluated(**test: Any) -> Evaluation:
    """Metrics of a model on its test records; there are no validation records."""
    values = {"validation": {"records": 0}, "test": {"records": 10, **test}}
    return Evaluation.model_validate(values)


def row(
    number: int,
    kind: str,
    silos: list[str],
    dropped: dict[str, str] | None = None,
    seconds: float = 1.0,
    down: int = 1,
    up: int = 1,
    **changes: Any,
) -> Row:
    return Row(
        round=number,
        kind=kind,
        silos=silos,
        dropped=dropped or {},
        seconds=seconds,
        bytes_down=down,
        bytes_up=up,
        **changes,
    )


def status(job: str, rounds: int, promised: tuple[float, float] | None = None) -> Status:
    """The status of a job before anything is asked; with the (epsilon, delta) that it promises."""
    epsilon_promised, delta = promised or (None, None)
    return Status(job_name=job, rounds=rounds, epsilon_promised=epsilon_promised, delta=delta)


def spent(number: int, silos: int, *ends: float, **shown: float) -> Spent:
    """Silos of which one lies in the range up to each end, of a job that promises epsilon 8."""
    bins = [sum(end == edge for end in ends) for edge in epsilon.EDGES]
    return epsilon.spent(number, 8.0, 1e-5, silos, bins, shown)
