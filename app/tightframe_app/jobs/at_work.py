"""Progress of a simulation's silos: bars on a terminal, otherwise a line every minute."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tightframe.flare.simulation.workspace import AT_WORK
from tightframe_app.screens import Terminal

POLL_SECONDS = 0.25
PLAIN_SECONDS = 60.0
"""Seconds between two lines without a terminal."""


@contextmanager
def shown(out: Console) -> Iterator[Callable[[str], None] | None]:
    """Show the progress of the silos while a simulation runs.

    Args:
        out: console of the run's lines.

    Yields:
        A function that prints a line of the run above the bars; None without a terminal, where the run
        writes its lines itself.
    """
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="tightframe-") as folder:
        os.environ[AT_WORK] = folder
        bars = _Bars(Terminal()) if out.is_terminal else None
        watching = threading.Thread(target=_watch, args=(Path(folder), bars, out, ended), daemon=True)
        watching.start()
        try:
            yield None if bars is None else bars.print
        finally:
            os.environ.pop(AT_WORK, None)
            ended.set()
            watching.join()


class _Bars:
    """One progress bar for each working silo, at the bottom of the terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[batches]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def print(self, line: str) -> None:
        self._progress.console.print(Text.from_ansi(line), soft_wrap=True)

    def update(self, silos: dict[str, dict[str, Any]]) -> None:
        for silo in sorted(set(self._tasks) - set(silos)):
            self._progress.remove_task(self._tasks.pop(silo))
        for silo, values in sorted(silos.items()):
            if silo not in self._tasks:
                self._tasks[silo] = self._progress.add_task(silo, total=None, batches="")
            self._progress.update(
                self._tasks[silo],
                description=f"{silo}: {values['what']}",
                completed=values["done"],
                total=values["of"] or None,
                batches=_batches(values),
            )


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each working silo's activity (``what``) and ``done`` of ``of`` batches (0 if unknown)."""
    silos = {}
    for path in folder.glob("*.json"):
        try:
            values = json.loads(path.read_bytes())
            silos[path.stem] = {
                "what": str(values["what"]),
                "done": int(values["done"]),
                "of": int(values["of"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the silo has just ended its task
    return silos


def plain(silos: dict[str, dict[str, Any]]) -> str:
    """Describe the working silos in one line; empty if there are none."""
    busy = [f"{name}: {values['what']}{_batches(values, ', ')}" for name, values in sorted(silos.items())]
    more = f"; and {len(busy) - 4} more" if len(busy) > 4 else ""
    return f"at work: {'; '.join(busy[:4])}{more}" if busy else ""


def _batches(values: dict[str, Any], before: str = "") -> str:
    return f"{before}batch {values['done']} of {values['of']}" if values["of"] else ""


def _watch(folder: Path, bars: _Bars | None, out: Console, ended: threading.Event) -> None:
    if bars is None:
        while not ended.wait(PLAIN_SECONDS):
            if line := plain(read(folder)):
                out.print(line)
        return
    bars.start()
    while not ended.wait(POLL_SECONDS):
        bars.update(read(folder))
    bars.update({})
    bars.stop()
