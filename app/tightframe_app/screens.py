"""What commands print on a terminal, in one form."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def console(most: int, *, stderr: bool = False) -> Console:
    """A console as wide as the terminal, and ``most`` columns at the most."""
    width = min(most, shutil.get_terminal_size((most, 24)).columns)
    return Console(highlight=False, markup=False, emoji=False, width=width, stderr=stderr)


def lines(*, stderr: bool = False) -> Console:
    """A console for lines of any length, as paths and commands are, to be copied whole.

    What is printed holds paths and values of users: "[x]" and ":x:" in them are no markup.
    """
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)


def shown(text: str) -> str:
    """Text of a file, in which nothing can steer a terminal."""
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


def print_list(out: Console, title: str, said: Sequence[str]) -> None:
    """A title, and a point for each sentence."""
    out.print()
    out.print(Text(title, style="bold"))
    points = Table.grid(padding=(0, 1))
    for text in said:
        points.add_row("-", text)
    out.print(Padding(points, (0, 0, 0, 2)))
