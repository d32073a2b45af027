"""Epsilon by round, as far as silos tell it: in ranges, never one silo's own number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tightframe.report.drawing import plots
from tightframe.report.drawing.markup import Markup, figure
from tightframe.report.drawing.plots import Series


def epsilons(
    ranges: Mapping[int, tuple[float, float]], promised: Mapping[int, float], note: str = ""
) -> Markup:
    """Draw both ends of what silos tell, and the promise.

    Args:
        ranges: round -> the lowest and the highest epsilon that silos tell.
        promised: round -> the job's own.
        note: what the caption adds.
    """
    xs = sorted({*ranges, *promised})
    ends = [ranges.get(x, (None, None)) for x in xs]
    chart = partial(
        plots.lines,
        "Epsilon spent by round",
        xs,
        [
            Series("told at most", [high for _, high in ends], 0),
            Series("told at least", [low for low, _ in ends], 1),
            Series("promised", [promised.get(x) for x in xs], 2),
        ],
        x_name="round",
        low=0.0,
    )
    said = (
        "Epsilon that the silos have spent on this job up to each round: ends of the ranges that they tell."
    )
    return figure(chart, f"{said} {note}".strip())
