"""Silos of a watched run: those that answered, are missing (and why), or are silent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tightframe.errors import LATE
from tightframe.results.status import Status
from tightframe.results.words import exchange_name
from tightframe_app.screens import shown
from tightframe_app.watch.status import meaning

Silent = Mapping[str, float | None]
"""Silent site -> time of its last message to the server; None if it is not connected."""
SILENCE = 30.0
"""Seconds of silence after which a site's engine is shown as silent; it sends a heartbeat every ten."""


class Silences:
    """Sites that the server has not heard from for a while.

    The server reports the time of each site's last message by its own clock, which may differ from the one
    here. So such a time is only compared with other sites', and timed here while it stays the same.
    """

    def __init__(self) -> None:
        self._last_heard: dict[str, tuple[float, float]] = {}

    def of(self, names: Iterable[str], heard: Mapping[str, float], now: float) -> dict[str, float | None]:
        """Return silent site -> when the server last heard from it, or None.

        Args:
            names: of the sites to check.
            heard: registered site -> time of its last message, by the server's clock.
            now: seconds, by a clock here.
        """
        newest = max(heard.values(), default=0.0)
        for name, last in heard.items():
            if self._last_heard.get(name, (None, 0.0))[0] != last:
                self._last_heard[name] = (last, now)
        silent: dict[str, float | None] = {}
        for name in names:
            if name not in heard:
                silent[name] = None
            elif max(newest - heard[name], now - self._last_heard[name][1]) >= SILENCE:
                silent[name] = heard[name]
        return silent


def missing(status: Status) -> list[str]:
    """Return the silos that enrolment or the current sum still waits for."""
    if status.state == "enrolling":
        return list(status.waiting)
    if status.state != "summing":
        return []
    return [name for name in status.joined if name not in status.answered]


def rows(
    status: Status, silent: Mapping[str, float | None], *, brief: bool = False
) -> list[tuple[str, str, str]]:
    """Return the non-empty rows (what, silos and reasons, style); that of joined silos is always there.

    Args:
        silent: silos that the server does not hear from, and since when.
        brief: leave out the notes on consequences of missing silos.
    """
    names = ", ".join(status.joined)
    table = [("joined", shown(f"{len(status.joined)}: {names}" if names else "none yet"), "")]
    awaited = missing(status)
    if status.state == "enrolling" and awaited:
        table.append(("waiting for", shown(", ".join(awaited)), ""))
    if status.joined and status.kind is not None:
        waiting = f"; not yet: {', '.join(awaited)}" if status.answered and awaited else ""
        table.append(("answered", shown(f"{len(status.answered)} of {len(status.joined)}{waiting}"), ""))
    if gone := {name: silent[name] for name in awaited if name in silent}:
        why = "stopped, cut off, or misspelt" if status.state == "enrolling" else "stopped, or cut off"
        table.append(("silent", shown(f"{_silent(gone)}: {why}"), "yellow"))
    if late := [name for name in status.late if name not in status.lost]:
        table.append(("late", shown(f"{', '.join(late)}: not in the last sum"), "yellow"))
    if dropped := {name: code for name, code in status.dropped.items() if name not in status.lost}:
        table.append(("dropped", shown(f"{_by_code(dropped)}: not in the last sum"), "yellow"))
    table += [("note", shown(line), "yellow") for line in status.notes[: len(status.lost) if brief else None]]
    absent = {name: code for name, code in status.refused.items() if code == LATE}
    if absent:
        table.append(("absent", shown(_by_code(absent)), "yellow"))
    if refused := {name: code for name, code in status.refused.items() if name not in absent}:
        table.append(("refused", shown(_by_code(refused)), "red"))
    if status.reason is not None:
        table.append(("reason", shown(meaning(status.reason)), "bold red"))
    return table


def each(status: Status, silent: Silent) -> list[tuple[str, str, str]]:
    """Return each known silo, its state and a note, missing ones first.

    Args:
        silent: silos that the server does not hear from, and since when.
    """
    awaited, everyone = missing(status), {*status.joined, *status.waiting, *status.refused, *status.lost}
    silos = []
    for name in everyone:
        notes = []
        if name in status.refused:
            now = "absent" if status.refused[name] == LATE else "refused"
            notes.append(meaning(status.refused[name]))
        elif name in awaited:
            trains = status.state == "summing" and status.kind == "train" and name not in silent
            now = "training" if trains and not status.answered else "waited for"
        else:
            now = "answered" if name in status.answered else "joined"
        if name in status.lost:
            gone = status.lost[name]
            now = "missing" if name not in status.answered else now
            notes.append(f"since {exchange_name(gone.kind, gone.round)}: {meaning(gone.code)}")
        elif name in status.dropped:
            notes.append(f"not in the last sum: {meaning(status.dropped[name])}")
        elif name in status.late:
            notes.append("late: not in the last sum")
        if name in awaited and name in silent:
            notes.append(_silent({name: silent[name]}).partition(", ")[2])
        silos.append((name, now, "; ".join(notes)))
    order = ("missing", "refused", "absent", "waited for", "training", "joined", "answered")
    return sorted(silos, key=lambda item: (order.index(item[1]), item[0]))


def _silent(gone: Mapping[str, float | None]) -> str:
    """Say since when silos are silent, as a time, which stays the same, not a duration."""
    parts = [
        f"{name}, not connected"
        if last is None
        else f"{name}, nothing heard since {time.strftime('%H:%M:%S', time.localtime(last))}"
        for name, last in gone.items()
    ]
    return "; ".join(parts)


def _by_code(silos: Mapping[str, str]) -> str:
    """List silos by code, with its meaning."""
    codes: dict[str, list[str]] = {}
    for name, code in sorted(silos.items()):
        codes.setdefault(code, []).append(name)
    return "; ".join(f"{', '.join(names)} {meaning(code)}" for code, names in codes.items())
