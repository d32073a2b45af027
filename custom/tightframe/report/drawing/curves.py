"""Curves over shares: a calibration curve with its bins, and a decision curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightframe.report.drawing.frame import (
    NARROW,
    label,
    legend,
    line,
    marker,
    number,
    said,
    svg,
    ticks,
    widest,
    within,
)
from tightframe.report.drawing.markup import DESK, Markup, Part, tag
from tightframe.report.drawing.plots import Series

_HEIGHT, _TOP, _BOTTOM, _RIGHT = 290.0, 36.0, 44.0, 16.0
Bin = tuple[float, float, float, float, float]
"""Point of a calibration curve: least and largest score, share of positives, and limits of the share."""
Place = Callable[[float], float]


def calibration(title: str, bins: Sequence[Bin], *, width: float = DESK) -> Markup:
    """Draw the share of positives in each bin, with its interval; dashed: perfect calibration.

    Args:
        title: of the picture.
        bins: those with records.
    """
    entries = [("share among the records, with interval", 0), ("as the score says", 2)]
    at_x, at_y, height, parts = _axes(width, entries, 0.0, 1.0, "score of the model", "share of the class")
    parts.append(line(at_x(0), at_y(0), at_x(1), at_y(1), "l s2"))
    for low, high, share, least, most in bins:
        middle = (low + high) / 2
        tooltip = f"scores {low:.3g} to {high:.3g}: share {share:.3f} [{least:.3f}, {most:.3f}]"
        parts += [
            line(at_x(middle), at_y(least), at_x(middle), at_y(most), "grid ink"),
            line(at_x(low), at_y(share), at_x(high), at_y(share), "l s0"),
            marker(at_x(middle), at_y(share), 0, tooltip),
        ]
    words = f"Calibration curve of {len(bins)} bins. The dashed line is a model whose scores are shares."
    return svg(width, height, title, words, *parts)


def decision(
    title: str, thresholds: Sequence[float], series: Sequence[Series], *, width: float = DESK
) -> Markup:
    """Draw net benefit over the threshold; values below the picture are left out.

    Args:
        title: of the picture.
        thresholds: rising, in [0, 1).
        series: lines over them.
    """
    top = max((item for of in series for item in of.values if item is not None), default=0.0)
    high = max(top, 0.01)
    entries = [(item.name, item.kind) for item in series]
    at_x, at_y, height, parts = _axes(
        width, entries, -0.25 * high, high, "threshold of the score", "net benefit"
    )
    parts.append(line(at_x(0), at_y(0), at_x(1), at_y(0), "grid ink"))
    for item in series:
        pieces: list[list[str]] = [[]]
        for x, value in zip(thresholds, item.values, strict=True):
            if value is None or value < -0.25 * high:
                pieces.append([])
            else:
                pieces[-1].append(f"{number(at_x(x))},{number(at_y(value))}")
        parts += [
            tag("polyline", points=" ".join(piece), class_=f"l s{item.kind}")
            for piece in pieces
            if len(piece) > 1
        ]
    words = f"Net benefit of {', '.join(item.name for item in series)}, over thresholds from 0 to 1."
    return svg(width, height, title, words, *parts)


def _axes(
    width: float, entries: Sequence[tuple[str, int]], y_low: float, y_high: float, x_name: str, y_name: str
) -> tuple[Place, Place, float, list[Part]]:
    """Return the scales of x (0 to 1) and y, the picture's height, and its axes and legend."""
    marks = ticks(y_low, y_high, 5)
    left = 14 + widest([said(mark) for mark in marks])
    keys, more = legend(entries, 6 if width < NARROW else 44, width - 6)
    height, top = _HEIGHT + more, _TOP + more

    def at_x(x: float) -> float:
        return left + 8 + (width - left - _RIGHT - 16) * x

    def at_y(y: float) -> float:
        return height - _BOTTOM - (height - top - _BOTTOM) * (y - marks[0]) / (marks[-1] - marks[0])

    parts: list[Part] = [keys]
    for mark in marks:
        parts.append(line(left, at_y(mark), width - _RIGHT, at_y(mark), "grid"))
        parts.append(label(left - 6, at_y(mark) + 4, said(mark), anchor="end"))
    for mark in ticks(0.0, 1.0, 5 if width < NARROW else 10):
        parts.append(label(at_x(mark), height - _BOTTOM + 18, said(mark), anchor="middle"))
    words = f"{x_name} (upwards: {y_name})"
    parts.append(within((left + width - _RIGHT) / 2, height - 6, words, width))
    return at_x, at_y, height, parts
