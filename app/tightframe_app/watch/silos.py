"""Silos of a run as a watcher sees them: who answered, who is missing and why, who is not heard of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tightframe.errors import LATE
from tightframe.results.status import Status
from tightframe.results.words import exchange_name
from tightframe_app.screens import shown
from tightframe_app.watch.status import meaning

Silent = Mapping[str, float | None]
"""Sites of which the server hears nothing: when it heard of each last; None if it is not connected."""
SILENCE = 30.0
"""Seconds of silence after which a site's engine is shown as silent; it sends a heartbeat every ten."""


class Silences:
    """Sites that the server has not heard of for a while.

    The server tells when it heard of each site last, by its own clock, which may be another than the one
    here. So that time is only compared with those of other sites; and that it stays the same is timed here.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def of(self, names: Iterable[str], heard: Mapping[str, float], now: float) -> dict[str, float | None]:
        """Return those of some sites that are silent: when the server last heard of each, or None.

        Args:
            heard: when the server heard last of each site that is registered there, by its clock.
            now: seconds, by a clock here.
        """
        newest = max(heard.values(), default=0.0)
        for name, last in heard.items():
            if self._seen.get(name, (None, 0.0))[0] != last:
                self._seen[name] = (last, now)
        silent: dict[str, float | None] = {}
        for name in names:
            if name not in heard:
                silent[name] = None
            elif max(newest - heard[name], now - self._seen[name][1]) >= SILENCE:
                silent[name] = heard[name]
        return silent


def missing(status: Status) -> list[str]:
    """Return the silos that enrolment, or a sum which is being made, still waits for."""
    if status.state == "enrolling":
        return list(status.waiting)
    if status.state != "summing":
        return []
    return [name for name in status.joined if name not in status.answered]


def rows(
    status: Status, silent: Mapping[str, float | None], *, brief: bool = False
) -> list[tuple[str, str, str]]:
    """Return rows (what, which silos and why, style), without those that are empty but for the joined silos.

    Args:
        silent: silos of which the server hears nothing, and since when.
        brief: of the notes only who is missing, not what that means.
    """
    names = ", ".join(status.joined)
    told = [("joined", shown(f"{len(status.joined)}: {names}" if names else "none yet"), "")]
    waited = missing(status)
    if status.state == "enrolling" and waited:
        told.append(("waiting for", shown(", ".join(waited)), ""))
    if status.joined and status.kind is not None:
        waiting = f"; not yet: {', '.join(waited)}" if status.answered and waited else ""
        told.append(("answered", shown(f"{len(status.answered)} of {len(status.joined)}{waiting}"), ""))
    if gone := {name: silent[name] for name in waited if name in silent}:
        why = "stopped, cut off, or misspelt" if status.state == "enrolling" else "stopped, or cut off"
        told.append(("silent", shown(f"{_silent(gone)}: {why}"), "yellow"))
    if late := [name for name in status.late if name not in status.lost]:
        told.append(("late", shown(f"{', '.join(late)}: not in the last sum"), "yellow"))
    if dropped := {name: code for name, code in status.dropped.items() if name not in status.lost}:
        told.append(("dropped", shown(f"{_by_code(dropped)}: not in the last sum"), "yellow"))
    told += [("note", shown(line), "yellow") for line in status.notes[: len(status.lost) if brief else None]]
    absent = {name: code for name, code in status.refused.items() if code == LATE}
    if absent:
        told.append(("absent", shown(_by_code(absent)), "yellow"))
    if refused := {name: code for name, code in status.refused.items() if name not in absent}:
        told.append(("refused", shown(_by_code(refused)), "red"))
    if status.reason is not None:
        told.append(("reason", shown(meaning(status.reason)), "bold red"))
    return told


def each(status: Status, silent: Silent) -> list[tuple[str, str, str]]:
    """Return each silo that is known, what it does now, and what is to be said of it; who is missing first.

    Args:
        silent: silos of which the server hears nothing, and since when.
    """
    waited, everyone = missing(status), {*status.joined, *status.waiting, *status.refused, *status.lost}
    told = []
    for name in everyone:
        notes = []
        if name in status.refused:
            now = "absent" if status.refused[name] == LATE else "refused"
            notes.append(meaning(status.refused[name]))
        elif name in waited:
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
        if name in waited and name in silent:
            notes.append(_silent({name: silent[name]}).partition(", ")[2])
        told.append((name, now, "; ".join(notes)))
    order = ("missing", "refused", "absent", "waited for", "training", "joined", "answered")
    return sorted(told, key=lambda item: (order.index(item[1]), item[0]))


def _silent(gone: Mapping[str, float | None]) -> str:
    """Say since when nothing was heard of silos: a time and no duration, so that it stays the same."""
    parts = [
        f"{name}, not connected"
        if last is None
        else f"{name}, nothing heard since {time.strftime('%H:%M:%S', time.localtime(last))}"
        for name, last in gone.items()
    ]
    return "; ".join(parts)


def _by_code(silos: Mapping[str, str]) -> str:
    """Name silos with the same code together, and what the code means."""
    codes: dict[str, list[str]] = {}
    for name, code in sorted(silos.items()):
        codes.setdefault(code, []).append(name)
    return "; ".join(f"{', '.join(names)} {meaning(code)}" for code, names in codes.items())
