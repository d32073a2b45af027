"""Lines, bars and a forest plot of a report, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tightframe.report.drawing.frame import (
    CHARACTER,
    NARROW,
    keys,
    label,
    legend,
    line,
    marker,
    number,
    rect,
    said,
    short,
    svg,
    ticks,
    widest,
    within,
)
from tightframe.report.drawing.markup import DESK, Markup, Part, figure, tag

_MOST_MARKERS = 60
Place = Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """One line: a value for each x, None where it is missing.

    Attributes:
        values: one per x.
        kind: colour, dash and marker, from 0 to 3.
        hollow: points drawn hollow, of partial counts.
        label: in descriptions and tooltips, if several lines share a name in the legend.
        skipped: points that were not planned, across which the line goes on.
    """

    name: str
    values: Sequence[float | None]
    kind: int
    hollow: Sequence[bool] = ()
    label: str = ""
    skipped: Sequence[bool] = ()


def lines(
    title: str,
    xs: Sequence[int],
    series: Sequence[Series],
    *,
    x_name: str,
    low: float | None = None,
    high: float | None = None,
    width: float = DESK,
) -> Markup:
    """Draw lines over whole numbers; a missing value interrupts its line.

    Args:
        title: of the picture.
        xs: of the values, rising.
        low: end of the y axis; by default the least value, or 0.
        high: likewise.
    """
    bottom, right = 44.0, 16.0
    values = [value for item in series for value in item.values if value is not None]
    marks = ticks(min([*values, 0.0]) if low is None else low, max([*values, 0.0]) if high is None else high)
    left = 14 + widest([said(mark) for mark in marks])
    start = 6 if width < NARROW else left
    named, more = legend([*dict.fromkeys((item.name, item.kind) for item in series)], start, width - 6)
    top, height = 36 + more, 270 + more
    first, span = min(xs, default=0), max(xs, default=0) - min(xs, default=0)

    def at_x(x: float) -> float:
        return left + 8 + (width - left - right - 16) * ((x - first) / span if span else 0.5)

    def at_y(y: float) -> float:
        return height - bottom - (height - top - bottom) * (y - marks[0]) / (marks[-1] - marks[0])

    parts: list[Part] = [named]
    for mark in marks:
        parts.append(line(left, at_y(mark), width - right, at_y(mark), "grid"))
        parts.append(label(left - 6, at_y(mark) + 4, said(mark), anchor="end"))
    for x in spread(xs, min(14, _room(width - left, [str(x) for x in xs]))):
        parts.append(label(at_x(x), height - bottom + 18, str(x), anchor="middle"))
    parts.append(within((left + width - right) / 2, height - 6, x_name, width))
    for item in series:
        parts += _run(item, xs, at_x, at_y)
    return svg(width, height, title, _in_words(series, x_name), *parts)


def bars(
    title: str,
    rows: Sequence[tuple[str, str]],
    series: Sequence[tuple[str, Sequence[float | None]]],
    *,
    width: float = DESK,
) -> Markup:
    """Draw horizontal bars of shares in [0, 1]: in each row one per series.

    Args:
        title: of the picture.
        rows: name and note (number of records) of each.
        series: name, and a value for each row; None is drawn as a dash.
        width: of the picture; in a narrow one a row's name stands above its bars.
    """
    above = 18.0 if width < NARROW else 0.0
    thick, gap, right = 13.0 if len(series) > 1 else 16.0, 9.0, 52.0
    left = 14 + widest([name for name, _ in rows]) + widest([note for _, note in rows]) + 14
    left, notes_x = (6.0, width - 8) if above else (left, left - 8)
    several = [name for name, _ in series] if len(series) > 1 else []
    named, more = keys(several, left, width - 6)
    top = 34 + more if several else 10.0
    row_height = above + thick * len(series) + gap
    height = top + row_height * len(rows) + 26

    def at(value: float) -> float:
        return left + (width - left - right) * min(max(value, 0.0), 1.0)

    parts: list[Part] = [named] if several else []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(line(at(mark), top - 4, at(mark), height - 22, "grid"))
        parts.append(within(at(mark), height - 6, said(mark), width))
    most = 16 if not above else int((width - 28 - widest([note for _, note in rows])) / CHARACTER)
    for i, (name, note) in enumerate(rows):
        y = top + i * row_height + above
        middle = y - 5 if above else y + (row_height - gap) / 2 + 4
        parts.append(tag("g", tag("title", name), label(6, middle, short(name, most))))
        parts.append(label(notes_x, middle, note, anchor="end", class_="note"))
        for kind, (of, values) in enumerate(series):
            value, at_y = values[i], y + kind * thick
            tooltip = f"{name}, {of}: {'missing' if value is None else f'{value:.3f}'}"
            if value is not None:
                parts.append(rect(left, at_y, at(value) - left, thick - 2, f"b s{kind}", title=tooltip))
            end = at(value or 0.0) + 5
            parts.append(
                label(end, at_y + thick - 4, "-" if value is None else f"{value:.2f}", class_="note")
            )
    description = (
        f"Bars of {', '.join(name for name, _ in series)} for {len(rows)} rows; the table has the values."
    )
    return svg(width, height, title, description, *parts)


def columns(
    title: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    x_name: str,
    width: float = DESK,
) -> Markup:
    """Draw columns, stacked by series.

    Args:
        title: of the picture.
        series: name -> a value of at least 0 for each column.
    """
    bottom, right = 44.0, 16.0
    heights = [sum(values[i] for values in series.values()) for i in range(len(names))]
    marks = ticks(0.0, max(heights, default=1.0), 4)
    left = 14 + widest([said(mark) for mark in marks])
    several = list(series) if len(series) > 1 else []
    named, more = keys(several, 6 if width < NARROW else left, width - 6)
    top, height = (36 + more, 210 + more) if several else (14.0, 210.0)
    column_width = (width - left - right) / max(len(names), 1)
    thick = min(0.7 * column_width, 44.0)

    def at_y(y: float) -> float:
        return height - bottom - (height - top - bottom) * y / marks[-1]

    parts: list[Part] = [named] if several else []
    for mark in marks:
        parts.append(line(left, at_y(mark), width - right, at_y(mark), "grid"))
        parts.append(label(left - 6, at_y(mark) + 4, said(mark), anchor="end"))
    fitting = int((column_width - 4) / CHARACTER)
    briefs = [short(name, max(min(fitting, 16), 6)) if fitting > 4 else short(name) for name in names]
    shown = set(spread(range(len(names)), _room(width - left - right, briefs)))
    for i, name in enumerate(names):
        middle, below = left + (i + 0.5) * column_width, 0.0
        for kind, (of, values) in enumerate(series.items()):
            upper = below + values[i]
            tooltip = f"{name}, {of}: {said(values[i])}"
            parts.append(
                rect(
                    middle - thick / 2,
                    at_y(upper),
                    thick,
                    at_y(below) - at_y(upper),
                    f"b s{kind}",
                    title=tooltip,
                )
            )
            below = upper
        if i in shown:
            parts.append(within(middle, height - bottom + 18, briefs[i], width))
    parts.append(within((left + width - right) / 2, height - 6, x_name, width))
    description = f"Columns of {', '.join(series)}; the table has the values."
    return svg(width, height, title, description, *parts)


def spread(xs: Sequence[int], most: int = 14) -> list[int]:
    """Return at most ``most`` of the values, evenly spaced, with the first and the last.

    >>> spread(range(31), 6), spread(range(30), 6)
    ([0, 6, 12, 18, 24, 30], [0, 6, 12, 18, 29])
    """
    if len(xs) <= most or most < 2:
        return list(xs)[: max(most, 1)]
    last = len(xs) - 1
    step = -(-last // (most - 1))
    return [*xs[0 : last - step + 1 : step], xs[last]]


def epsilons(
    ranges: Mapping[int, tuple[float, float]], promised: Mapping[int, float], note: str = ""
) -> Markup:
    """Draw both ends of the epsilons that silos report, and the promised one.

    Args:
        ranges: round -> lowest and highest epsilon that silos report.
        promised: round -> the job's epsilon.
        note: appended to the caption.
    """
    xs = sorted({*ranges, *promised})
    ends = [ranges.get(x, (None, None)) for x in xs]
    chart = partial(
        lines,
        "Epsilon spent by round",
        xs,
        [
            Series("reported at most", [high for _, high in ends], 0),
            Series("reported at least", [low for low, _ in ends], 1),
            Series("promised", [promised.get(x) for x in xs], 2),
        ],
        x_name="round",
        low=0.0,
    )
    caption = (
        "Epsilon that the silos have spent on this job up to each round: ends of the ranges that they report."
    )
    return figure(chart, f"{caption} {note}".strip())


Row = tuple[str, float, tuple[float, float], Sequence[float]]
"""Name, mean, the mean's limits, and the single values."""


def forest(title: str, rows: Sequence[Row], x_name: str, *, width: float = DESK) -> Markup:
    """Draw the rows; the line at zero means no difference, and in a narrow picture names stand above."""
    above = 18.0 if width < NARROW else 0.0
    row_height, top = 34.0 + above, 12.0
    height = top + row_height * len(rows) + 48
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
    for place, (name, mean, (low, high), singles) in enumerate(rows):
        y = top + place * row_height + (row_height + above) / 2
        parts.append(tag("g", tag("title", name), label(6, y - 14 if above else y + 4, short(name, most))))
        parts.append(line(at(low), y, at(high), y, "l s0"))
        parts += [marker(at(value), y, 2, f"{value:+.4f}", hollow=True) for value in singles]
        parts.append(marker(at(mean), y, 1, f"{name}: {mean:+.4f} [{low:+.4f}, {high:+.4f}]"))
    return svg(width, height, title, f"Mean differences of {len(rows)} settings; the table has them.", *parts)


def _room(width: float, names: Sequence[str]) -> int:
    """Return how many names fit beside each other."""
    return max(int(width / (widest(names) + 14)), 1)


def _run(item: Series, xs: Sequence[int], at_x: Place, at_y: Place) -> list[Part]:
    """Draw a series' line, interrupted at missing values, and its points."""
    pieces: list[list[str]] = [[]]
    points: list[Part] = []
    marked = {*spread([i for i, value in enumerate(item.values) if value is not None], _MOST_MARKERS)}
    for i, (x, value) in enumerate(zip(xs, item.values, strict=True)):
        if value is None:
            if not (item.skipped and item.skipped[i]):
                pieces.append([])
            continue
        pieces[-1].append(f"{number(at_x(x))},{number(at_y(value))}")
        hollow = bool(item.hollow) and item.hollow[i]
        if i in marked or hollow:
            points.append(
                marker(
                    at_x(x),
                    at_y(value),
                    item.kind,
                    f"{item.label or item.name}, {x}: {value:.4g}",
                    hollow=hollow,
                )
            )
    drawn = [
        tag("polyline", points=" ".join(piece), class_=f"l s{item.kind}")
        for piece in pieces
        if len(piece) > 1
    ]
    return [*drawn, *points]


def _in_words(series: Sequence[Series], x_name: str) -> str:
    courses = []
    for item in series:
        present = [value for value in item.values if value is not None]
        course = f"from {present[0]:.3g} to {present[-1]:.3g}" if present else "missing throughout"
        courses.append(f"{item.label or item.name} {course}")
    return f"Over {x_name}: {'; '.join(courses)}. The table has the values."
