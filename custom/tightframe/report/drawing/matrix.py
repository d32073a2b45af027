"""Plots in cells: a confusion matrix, and silos by exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightframe.report.drawing.frame import (
    CHARACTER,
    NARROW,
    in_rows,
    label,
    rect,
    short,
    svg,
    widest,
    within,
)
from tightframe.report.drawing.markup import DESK, Markup, Part, tag
from tightframe.report.drawing.plots import spread

MOST_NAMED = 24
"""Most classes of a matrix with names and, where they fit, counts in its cells."""
_SLANT = 0.72
"""Sine and cosine of the angle of names above a matrix, rounded up."""
_NARROW = 5.0
"""Width of a column in pixels below which equal neighbours are drawn as one."""


def confusion(
    title: str, classes: Sequence[str], counts: Sequence[Sequence[int]], *, width: float = DESK
) -> Markup:
    """Draw a confusion matrix: rows are true classes, colour is a cell's share of its row.

    Args:
        title: of the picture.
        counts: (C, C).
        width: of the picture; a narrow one may not name every class.
    """
    named = len(classes) <= MOST_NAMED
    most = 12 if width >= NARROW else 8
    left = 30 + (widest(classes, most) if named else 6)
    top = 26.0 + (widest(classes, most) * _SLANT + 8 if named else 6)
    # The last name extends beyond the matrix.
    right = max(16.0, widest(classes[-1:], most) * _SLANT + 4) if named else 16.0
    cell = min(46.0, (width - left - right) / max(len(classes), 1))
    size = cell * len(classes)
    several = range(0, len(classes), math.ceil(18 / cell)) if named else range(0)
    fits = named and max((count for row in counts for count in row), default=0) < 10 ** int(cell / CHARACTER)
    parts: list[Part] = [
        label(left + size / 2, 14, "predicted class", anchor="middle", class_="note"),
        tag(
            "g",
            label(0, 0, "true class", anchor="middle", class_="note"),
            transform=f"translate(12,{top + size / 2:.1f}) rotate(-90)",
        ),
    ]
    for i, row in enumerate(counts):
        records = sum(row)
        if i in several:
            y = top + (i + 0.5) * cell + 4
            brief = short(classes[i], most)
            parts.append(tag("g", tag("title", classes[i]), label(left - 6, y, brief, anchor="end")))
            parts.append(_slanted(left + (i + 0.4) * cell, top - 6, classes[i], brief))
        for j, count in enumerate(row):
            share = count / records if records else 0.0
            tooltip = f"{classes[i]} taken for {classes[j]}: {count} of {records}"
            x, y = left + j * cell, top + i * cell
            parts.append(rect(x, y, cell - 1, cell - 1, "cell"))
            if count:
                parts.append(
                    rect(
                        x,
                        y,
                        cell - 1,
                        cell - 1,
                        "heat",
                        fill_opacity=f"{0.06 + 0.94 * share:.3f}",
                        title=tooltip,
                    )
                )
            if fits and (count or i == j):
                middle = (x + cell / 2, y + cell / 2 + 4)
                parts.append(label(*middle, str(count), anchor="middle", class_="count"))
    description = (
        f"{len(classes)} by {len(classes)} counts, rows true classes; stronger is a larger share of its row."
    )
    return svg(max(left + size + right, 240), top + size + 10, title, description, *parts)


@dataclass(frozen=True)
class Cell:
    """One silo in one exchange: the style's class ``kind``, the text ``sign`` and the tooltip ``told``."""

    kind: str
    sign: str
    told: str


FAILED, ABSENT = "\N{MULTIPLICATION SIGN}", "-"

KINDS = (
    ("in", "", "answered"),
    ("late", "L", "late"),
    ("refused", "R", "refused"),
    ("out", FAILED, "failed"),
    ("idle", "", "not asked"),
    ("absent", ABSENT, "not enrolled"),
)
"""Kinds of cells: class, sign, meaning."""


def grid(
    title: str,
    silos: Sequence[str],
    exchanges: Sequence[str],
    cells: Sequence[Sequence[Cell]],
    *,
    width: float = DESK,
) -> Markup:
    """Draw the silos that took part, by row, in each exchange, by column.

    Args:
        title: of the picture.
        exchanges: short names of the columns.
        cells: a row for each silo.
    """
    most = 18 if width >= NARROW else 12
    left, high = 14 + widest(silos, most), 22.0
    wide = min(34.0, (width - left - 12) / max(len(exchanges), 1))
    places = in_rows([of for *_, of in KINDS], left if width >= NARROW else 6, width - 6, 18)
    top = 34 + places[-1][1]
    parts: list[Part] = []
    for (kind, sign, meaning), (x, y) in zip(KINDS, places, strict=True):
        parts += [
            rect(x, y + 6, 13, 13, f"p {kind}"),
            label(x + 6.5, y + 17, sign, anchor="middle", class_=f"sign {kind}"),
            label(x + 18, y + 17, meaning),
        ]
    for i, name in enumerate(silos):
        y = top + i * high
        parts.append(tag("g", tag("title", name), label(left - 8, y + 15, short(name, most), anchor="end")))
        for first, last in _runs(cells[i], apart=wide >= _NARROW):
            cell, at, long = cells[i][first], left + first * wide, (last - first + 1) * wide
            tooltip = (
                cell.told
                if first == last
                else f"{name}, {exchanges[first]} to {exchanges[last]}: {cell.kind}"
            )
            parts.append(
                rect(at, y, long - (2 if wide >= _NARROW else 0), high - 2, f"p {cell.kind}", title=tooltip)
            )
            if cell.sign and wide >= 12:
                at += (wide - 2) / 2
                parts.append(label(at, y + 14.5, cell.sign, anchor="middle", class_=f"sign {cell.kind}"))
    below = top + len(silos) * high + 14
    legend = max(x + 18 + widest([of], 40) for (*_, of), (x, _) in zip(KINDS, places, strict=True))
    total = max(legend + 6, left + wide * len(exchanges) + 8)
    room = max(int(wide * len(exchanges) / (widest(exchanges, 8) + 6)), 1)
    for j in spread(range(len(exchanges)), room):
        parts.append(within(left + j * wide + (wide - 2) / 2, below, short(exchanges[j], 8), total))
    description = f"{len(silos)} silos over {len(exchanges)} exchanges; the tables have the same in words."
    return svg(total, below + 8, title, description, *parts)


def _runs(cells: Sequence[Cell], *, apart: bool) -> list[tuple[int, int]]:
    """Return first and last index of each rectangle: a cell, or neighbours of one kind."""
    runs: list[tuple[int, int]] = []
    for i, cell in enumerate(cells):
        if runs and not apart and cells[i - 1].kind == cell.kind:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def _slanted(x: float, y: float, name: str, brief: str) -> Markup:
    return tag(
        "g",
        tag("title", name),
        label(0, 0, brief),
        transform=f"translate({x:.1f},{y:.1f}) rotate(-45)",
    )
