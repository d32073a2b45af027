"""Parts common to all plots: the frame of an SVG, labels that fit, round ticks on an axis.

Colours are classes of the page's style, so that a plot follows a dark or light page and print; series
also differ in dash and marker, for readers who do not see the colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightframe.report.drawing.markup import Markup, Part, tag

CHARACTER = 7.0
"""Approximate width of a character, in pixels."""
NARROW = 500
"""Width of a picture in pixels below which names stand above their row, not beside it."""
ROW = 18.0
"""Height of a legend's row, in pixels."""
SERIES = 4
"""Number of series that the style distinguishes."""


def svg(width: float, height: float, title: str, description: str, *parts: Part) -> Markup:
    """Return a picture, described for screen readers, that shrinks with the window and never grows."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=number(width),
        height=number(height),
        role="img",
    )


def number(value: float) -> str:
    """Return a coordinate with at most one decimal.

    >>> number(3.0), number(2.346)
    ('3', '2.3')
    """
    return f"{value:.1f}".removesuffix(".0")


def label(x: float, y: float, text: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """Return text in a picture."""
    return tag("text", text, x=number(x), y=number(y), text_anchor=anchor, class_=class_)


def short(name: str, most: int = 16) -> str:
    """Shorten a name; the full one belongs in a tooltip and the table beside.

    >>> short("a" * 40, 8)
    'aaaaaaa…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return tag("line", x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, **more: object) -> Markup:
    """Return a rectangle, with a tooltip if ``title`` is among ``more``."""
    title = more.pop("title", None)
    return tag(
        "rect",
        None if title is None else tag("title", str(title)),
        x=number(x),
        y=number(y),
        width=number(max(width, 0.0)),
        height=number(max(height, 0.0)),
        class_=class_,
        **more,
    )


def marker(x: float, y: float, series: int, title: str, *, hollow: bool = False) -> Markup:
    """Return a point in the shape of its series."""
    r = 3.4
    shape = (
        f"M{number(x - r)},{number(y)} a{r},{r} 0 1,0 {2 * r},0 a{r},{r} 0 1,0 {-2 * r},0z",
        f"M{number(x - r)},{number(y - r)} h{2 * r} v{2 * r} h{-2 * r}z",
        f"M{number(x)},{number(y - 1.3 * r)} l{1.2 * r:.1f},{2.2 * r:.1f} h{-2.4 * r:.1f}z",
        f"M{number(x)},{number(y - 1.4 * r)} l{1.4 * r:.1f},{1.4 * r:.1f} l{-1.4 * r:.1f},{1.4 * r:.1f} "
        f"l{-1.4 * r:.1f},{-1.4 * r:.1f}z",
    )[series % SERIES]
    return tag(
        "path", tag("title", title), d=shape, class_=f"m s{series % SERIES}" + (" hollow" if hollow else "")
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers that cover a range in at most ``most`` steps.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3.0, 4.0, 2)
    [3.0, 3.5, 4.0]
    """
    if high <= low:
        high = low + 1.0
    if high - low < most * 1e-9 * max(abs(low), abs(high)):
        return [low, high]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(i * step, digits) for i in range(first, last + 1)]


def said(value: float) -> str:
    """Return a number as an axis label.

    >>> said(0.25), said(1200.0), said(3.0)
    ('0.25', '1200', '3')
    """
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"


def widest(names: Sequence[str], most: int = 16) -> float:
    """Return the width of the longest name, in pixels."""
    return max((len(short(name, most)) for name in names), default=0) * CHARACTER


def within(x: float, y: float, text: str, width: float, class_: str | None = None) -> Markup:
    """Return text centred at ``x``, moved to stay within the picture's edges."""
    half = min(len(text) * CHARACTER / 2 + 2, width / 2)
    return label(min(max(x, half), width - half), y, text, anchor="middle", class_=class_)


def in_rows(names: Sequence[str], left: float, right: float, sign: float) -> list[tuple[float, float]]:
    """Return x and y of a legend's entries, in as many rows as they need.

    Args:
        left: where a row starts.
        sign: pixels from an entry's x to its name.

    >>> in_rows(["one", "two"], 0, 60, 20)
    [(0, 0.0), (0, 18.0)]
    """
    places, x, y = [], left, 0.0
    for name in names:
        wide = sign + len(name) * CHARACTER
        if x > left and x + wide > right:
            x, y = left, y + ROW
        places.append((x, y))
        x += wide + 18
    return places


def legend(names: Sequence[tuple[str, int]], left: float, right: float) -> tuple[Markup, float]:
    """Return a legend of lines, and its height beyond one row."""
    places = in_rows([name for name, _ in names], left, right, 28)
    parts: list[Part] = []
    for (name, kind), (x, y) in zip(names, places, strict=True):
        parts += [
            line(x, y + 12, x + 22, y + 12, f"l s{kind}"),
            marker(x + 11, y + 12, kind, name),
            label(x + 28, y + 16, name),
        ]
    return tag("g", *parts), max((y for _, y in places), default=0.0)


def keys(names: Sequence[str], left: float, right: float) -> tuple[Markup, float]:
    """Return a legend of colours, and its height beyond one row."""
    places = in_rows(names, left, right, 18)
    parts: list[Part] = []
    for kind, (name, (x, y)) in enumerate(zip(names, places, strict=True)):
        parts += [rect(x, y + 7, 12, 12, f"b s{kind}"), label(x + 18, y + 17, name)]
    return tag("g", *parts), max((y for _, y in places), default=0.0)
