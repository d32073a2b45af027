"""Uniform terminal output of the commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text


class Terminal(Console):
    """A terminal that printed text cannot control, as messages contain text of servers, peers and files.

    Markup is off, because users' paths and values may contain "[x]" and ":x:".
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters escaped, except rich's own."""
        for part in super().render(renderable, options):
            text = part.text
            if part.control or text.isprintable() or text == "\n":
                yield part
            else:
                yield Segment("\n".join(map(shown, text.split("\n"))), part.style)


def console(most: int, *, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, but at most ``most`` columns."""
    width = min(most, shutil.get_terminal_size((most, 24)).columns)
    return Terminal(width=width, stderr=stderr)


def lines(*, stderr: bool = False) -> Console:
    """Return a console that does not wrap lines, so that paths and commands can be copied."""
    return Terminal(soft_wrap=True, stderr=stderr)


def shown(text: str, *, breaks: bool = False) -> str:
    """Escape characters of a text that could control a terminal.

    Args:
        breaks: keep line breaks.
    """
    return "".join(
        part if part.isprintable() or (breaks and part == "\n") else part.encode("unicode_escape").decode()
        for part in text
    )


def print_list(out: Console, title: str, sentences: Sequence[str]) -> None:
    """Print a title, and a bullet for each sentence."""
    out.print()
    out.print(Text(title, style="bold"))
    points = Table.grid(padding=(0, 1))
    for text in sentences:
        points.add_row("-", text)
    out.print(Padding(points, (0, 0, 0, 2)))


def facts_of(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a grid of names and values, folding long ones."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in rows:
        facts.add_row(name, shown(value))
    return facts


def table_of(*columns: str) -> Table:
    """Return a table without lines, with folded cells."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
