"""A job of a federation, live in the terminal until it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tightframe.results.outcome import Outcome
from tightframe.results.parts.dropouts import NOT_MEASURED
from tightframe.results.status import Status
from tightframe_app import formats
from tightframe_app.screens import Terminal, shown
from tightframe_app.watch import silos
from tightframe_app.watch.status import (
    NEVER_BEGAN,
    NOT_KNOWN,
    TRAINED,
    LostError,
    NoOutcomeError,
    Seen,
    Verdict,
    WatchError,
    judge,
)
from tightframe_app.watch.view import (
    ENDED,
    LIVE,
    OVER_EARLY,
    View,
    accuracy_words,
    clock_words,
    cost_words,
    done,
    loss_words,
    privacy_words,
    round_words,
    standing,
)

if TYPE_CHECKING:
    from tightframe_app.outputs import Watched as WatchLine
    from tightframe_app.watch.web import WatchPage

INTERRUPTED = 130
UNBROKEN = 100_000
"""Columns where there is no terminal: lines are for programs, too."""
QUIET = 30.0
"""Seconds after which a line is said again where nothing has changed, so that a log shows that it lives."""
FETCHES = 3
"""Number of times that the outcome is asked for if the connection is lost just then."""


class Watched(Protocol):
    """Questions that a watcher asks a server; ``monitoring.Server`` answers them."""

    def look(self, job_id: str) -> Seen:
        """Ask where a job stands."""

    def outcome(self, job_id: str) -> Outcome:
        """Return the outcome of a run that is over."""


def screen(view: View) -> RenderableType:
    """Draw the live view: a pure function of what is known."""
    seen, status = view.seen, view.last
    name = seen.name if seen is not None else view.job_id if status is None else status.job_name
    engine = "" if seen is None else shown(seen.engine)
    title = Text.assemble((shown(name), "bold"), (f"  {engine}  {clock_words(view.elapsed)}", "cyan"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("job", view.job_id)
    final = status is None or status.state in ENDED
    grid.add_row("state", standing(view) if final or seen is None or not seen.over else OVER_EARLY)
    if seen is not None and seen.told:
        grid.add_row("engine", shown("; ".join(seen.told)))
    if status is not None:
        _rows(grid, status, {} if seen is None else seen.silent)
    if view.lost is not None:
        grid.add_row(Text("lost", style="bold yellow"), Text(_lost(view), style="yellow"))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def _rows(grid: Table, status: Status, silent: Mapping[str, float | None]) -> None:
    bar = Table.grid(padding=(0, 2))
    bar.add_row(round_words(status), ProgressBar(total=1.0, completed=done(status), width=24))
    grid.add_row("round", bar)
    for name, text, style in silos.rows(status, silent):
        grid.add_row(name, Text(text, style=style))
    grid.add_row("loss", loss_words(status))
    grid.add_row("accuracy", accuracy_words(status))
    grid.add_row("privacy", privacy_words(status))
    grid.add_row("so far", cost_words(status))


def _lost(view: View) -> str:
    since = f"no answer for {clock_words(view.lost or 0.0)}"
    return shown(f"{since}, trying again; the job does not need this watch ({view.why})")


def line(view: View) -> str:
    """Describe a view in one line, for files and pipes, without time and bytes, which only count on."""
    if view.lost is not None:
        return f"{view.job_id}: {shown(view.why)}; trying again"
    if view.seen is None:
        return f"{view.job_id}: {standing(view)}"
    parts = [f"{view.seen.engine}: {standing(view)}", *view.seen.told]
    status = view.last
    if status is None or view.seen.engine != LIVE:
        return "; ".join(shown(part) for part in parts)
    if status.kind is not None:
        parts.append(f"round {round_words(status)}")
    if status.joined or status.refused or status.waiting:
        parts += [f"{name} {text}" for name, text, _ in silos.rows(status, view.seen.silent, brief=True)]
    if status.kind is not None:
        parts += [f"loss {loss_words(status)}", f"accuracy {accuracy_words(status)}"]
        if status.epsilon_promised is not None:
            parts.append(privacy_words(status))
    return "; ".join(shown(part) for part in parts)


def follow(
    server: Watched,
    job_id: str,
    show: Callable[[View], None],
    *,
    every: float,
    patience: float,
    results: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Ask until the job is over, and say how it ended.

    Args:
        server: whom to ask.
        show: called with each new view.
        every: seconds between questions.
        patience: seconds without any answer after which it is given up.
        results: folder into which the caller then fetches the result.
        clock: seconds.

    Raises:
        WatchError: if it cannot be watched, or not any more (TF-812).
    """
    began = answered = clock()
    view = View(job_id)
    show(view)
    while True:
        try:
            seen = server.look(job_id)
        except LostError as error:
            lost = clock() - answered
            if view.seen is None or lost > patience:
                raise WatchError(_unreachable(view, str(error), lost)) from None
            view = replace(view, elapsed=clock() - began, lost=lost, why=str(error))
        else:
            answered = clock()
            view = View(job_id, seen, seen.status or view.last, answered - began)
        show(view)
        if view.lost is None and view.seen is not None and view.seen.over:
            ran = view.seen.engine not in NEVER_BEGAN
            found = _outcome(server, job_id, sleep, every) if ran else NoOutcomeError("it never began")
            return judge(job_id, view.seen, view.last, found, results)
        sleep(every)


def _unreachable(view: View, error: str, lost: float) -> str:
    if view.seen is None:
        return (
            f"Expected to reach the federation's server, but: {error}. See that it runs, that its name and "
            "port are reachable from here, and that the kit is of this federation (--kit)."
        )
    return (
        f"Expected the server to answer again, but it has not for {clock_words(lost)}: {error}. "
        f"The job may go on without it being watched; last seen: {standing(view)}."
    )


def _outcome(
    server: Watched, job_id: str, sleep: Callable[[float], None], every: float
) -> Outcome | NoOutcomeError:
    """Return what the run left behind, or why that cannot be read."""
    why = ""
    for _ in range(FETCHES):
        try:
            return server.outcome(job_id)
        except NoOutcomeError as error:
            return error
        except LostError as error:
            why = f"the connection was lost: {error}"
        sleep(every)
    return NoOutcomeError(why)


def closing_words(verdict: Verdict) -> RenderableType:
    """Draw how the run ended, as the last thing on the screen."""
    said = [Text(shown(item)) for line in verdict.lines for item in line.split("\n")]
    lines = [Padding(item, (0, 0, 0, 2), expand=False) for item in said]
    style = {TRAINED: "bold green", NOT_KNOWN: "bold yellow"}.get(verdict.code, "bold red")
    if verdict.title.startswith(NOT_MEASURED.upper()):
        style = "bold yellow"
    return Group(Text(shown(verdict.title), style=style), *lines)


@contextmanager
def _shower(out: Console) -> Iterator[Callable[[View], None]]:
    """Give what shows a view: live on a terminal, elsewhere a line for each change and every half minute."""
    if not out.is_terminal:
        said, when = "", 0.0

        def say(view: View) -> None:
            nonlocal said, when
            text, still = line(view), time.monotonic() - when >= QUIET
            if text != said or still:
                again = "still " if text == said else ""
                said, when = text, time.monotonic()
                out.print(f"{time.strftime('%H:%M:%S')} {again}{text}", soft_wrap=True)

        yield say
        return
    # The engine prints into what stands for stdout; this console has the terminal itself.
    with Screen(console=out, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield lambda view: live.update(screen(view), refresh=True)


def look_once(server: Watched, job_id: str, *, as_json: bool) -> None:
    """Print where a job stands.

    Raises:
        WatchError: TF-812 if the server does not answer.
    """
    began = time.monotonic()
    try:
        seen = server.look(job_id)
    except LostError as error:
        raise WatchError(_unreachable(View(job_id), str(error), 0.0)) from None
    view = View(job_id, seen, seen.status, time.monotonic() - began)
    if as_json:
        formats.show(told(view), line=True)
    else:
        typer.echo(line(view))


def told(view: View, verdict: Verdict | None = None) -> WatchLine:
    """Return a view as a line of JSON."""
    from tightframe_app.outputs import End
    from tightframe_app.outputs import Watched as WatchLine

    seen = view.seen
    known: dict[str, Any] = {}
    if seen is not None:
        known = {"engine": seen.engine, "told": seen.told, "silent": dict(seen.silent)}
    return WatchLine(
        job_id=view.job_id,
        seconds=round(view.elapsed, 1),
        standing=standing(view),
        lost=view.lost,
        status=view.last,
        end=None if verdict is None else End.model_validate(verdict),
        **known,
    )


def told_until_over(server: Watched, job_id: str, *, every: float, patience: float) -> Verdict:
    """Print a line of JSON for each change of a job until it is over, and one with its end.

    Raises:
        typer.Exit: with code 130 after Ctrl-C; the job goes on.
        WatchError: if it cannot be watched, or not any more.
    """
    last, said = View(job_id), ""

    def show(view: View) -> None:
        nonlocal last, said
        last = view
        if (text := line(view)) != said:
            said = text
            formats.show(told(view), line=True)

    try:
        verdict = follow(server, job_id, show, every=every, patience=patience)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    formats.show(told(last, verdict), line=True)
    return verdict


def until_over(
    server: Watched,
    job_id: str,
    *,
    every: float = 2.0,
    patience: float = 600.0,
    results: Path | None = None,
    web: bool = False,
    port: int | None = None,
) -> Verdict:
    """Show a job until it is over, and print how it ended; ``results`` as in ``follow``.

    Raises:
        typer.Exit: with code 130 after Ctrl-C; the job goes on.
        WatchError: if it cannot be watched, or not any more.
    """
    width = None if sys.stdout.isatty() else UNBROKEN
    out = Terminal(file=sys.stdout, width=width)
    try:
        with _page(job_id, port, out) if web else nullcontext(None) as page:
            with _shower(out) as show:
                both = _also(show, page)
                verdict = follow(server, job_id, both, every=every, patience=patience, results=results)
            out.print(closing_words(verdict))
            if page is not None:
                page.end(verdict)
    except KeyboardInterrupt:
        out.print(f"no longer watching; the job goes on. Again: tightframe watch {job_id}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    return verdict


def _page(job_id: str, port: int | None, out: Console) -> AbstractContextManager[WatchPage]:
    """Serve the page, and print its link."""
    from tightframe_app.watch.web import watch_page

    return watch_page(job_id, port, out)


def _also(show: Callable[[View], None], page: WatchPage | None) -> Callable[[View], None]:
    """Show each view on the page, too, if there is one."""
    if page is None:
        return show

    def both(view: View) -> None:
        show(view)
        page.show(view)

    return both
