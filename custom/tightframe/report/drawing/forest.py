"""A forest plot: a mean with its limits and what it is the mean of, row by row, around zero."""

from __future__ import annotations

from collections.abc import Sequence

from tightframe.report.drawing.frame import (
    CHARACTER,
    NARROW,
    label,
    line,
    marker,
    said,
    short,
    svg,
    ticks,
    widest,
    within,
)
from tightframe.report.drawing.markup import DESK, Markup, Part, tag

Row = tuple[str, float, tuple[float, float], Sequence[float]]
"""Name, mean, its limits, and the single values."""


def forest(title: str, rows: Sequence[Row], x_name: str, *, width: float = DESK) -> Markup:
    """Draw the rows; the line at zero is no difference, and where it is narrow, names stand above."""
    above = 18.0 if width < NARROW else 0.0
    each, top = 34.0 + above, 12.0
    height = top + each * len(rows) + 48
    ends = [end for _, _, limits, singles in rows for end in (*limits, *singles)]
    marks = ticks(min([*ends, 0.0]), max([*ends, 0.0]), 6)
    left, right = 20.0 if above else 20 + widest([name for name, *_ in rows], 24), 20.0
    most = int((width - 12) / CHARACTER) if above else 24

    def at(value: float) -> float:
        return left + (width - left - right) * (value - marks[0]) / (marks[-1] - marks[0])

    parts: list[Part] = []
    for mark in marks:
        parts.append(line(at(mark), top, at(mark), height - 44, "grid"))
        parts.append(within(at(mark), height - 28, said(mark), width))
    parts.append(line(at(0), top, at(0), height - 44, "grid ink"))
    parts.append(within((left + width - right) / 2, height - 8, x_name, width))
    for number, (name, mean, (low, high), singles) in enumerate(rows):
        y = top + number * each + (each + above) / 2
        parts.append(tag("g", tag("title", name), label(6, y - 14 if above else y + 4, short(name, most))))
        parts.append(line(at(low), y, at(high), y, "l s0"))
        parts += [marker(at(value), y, 2, f"{value:+.4f}", hollow=True) for value in singles]
        parts.append(marker(at(mean), y, 1, f"{name}: {mean:+.4f} [{low:+.4f}, {high:+.4f}]"))
    return svg(width, height, title, f"Mean differences of {len(rows)} settings; the table has them.", *parts)
