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
"""Columns without a terminal, as programs read the lines."""
QUIET = 30.0
"""Seconds after which an unchanged line is repeated, so that a log shows that the watch is alive."""
FETCHES = 3
"""Tries to read the outcome when the connection is lost."""


class Watched(Protocol):
    """A watcher's requests to a server, as of ``monitoring.Server``."""

    def look(self, job_id: str) -> Seen:
        """Ask for a job's state."""

    def outcome(self, job_id: str) -> Outcome:
        """Return a finished run's outcome."""


def screen(view: View) -> RenderableType:
    """Draw the live screen of a view."""
    answer, status = view.seen, view.last
    name = answer.name if answer is not None else view.job_id if status is None else status.job_name
    engine = "" if answer is None else shown(answer.engine)
    title = Text.assemble((shown(name), "bold"), (f"  {engine}  {clock_words(view.elapsed)}", "cyan"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("job", view.job_id)
    final = status is None or status.state in ENDED
    grid.add_row("state", standing(view) if final or answer is None or not answer.over else OVER_EARLY)
    if answer is not None and answer.told:
        grid.add_row("engine", shown("; ".join(answer.told)))
    if status is not None:
        _rows(grid, status, {} if answer is None else answer.silent)
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
    """Describe a view in one line, for files and pipes, without time and bytes, which always grow."""
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
    """Ask until the job is over, and return the verdict.

    Args:
        server: to ask.
        show: called with each new view.
        every: seconds between requests.
        patience: seconds without any answer before giving up.
        results: folder into which the caller then fetches the result.
        clock: seconds.

    Raises:
        WatchError: if it cannot be watched, or no longer (TF-812).
    """
    began = answered = clock()
    view = View(job_id)
    show(view)
    while True:
        try:
            answer = server.look(job_id)
        except LostError as error:
            lost = clock() - answered
            if view.seen is None or lost > patience:
                raise WatchError(_unreachable(view, str(error), lost)) from None
            view = replace(view, elapsed=clock() - began, lost=lost, why=str(error))
        else:
            answered = clock()
            view = View(job_id, answer, answer.status or view.last, answered - began)
        show(view)
        if view.lost is None and view.seen is not None and view.seen.over:
            ran = view.seen.engine not in NEVER_BEGAN
            outcome = _outcome(server, job_id, sleep, every) if ran else NoOutcomeError("it never began")
            return judge(job_id, view.seen, view.last, outcome, results)
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
    """Return the run's outcome, or why it cannot be read."""
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
    """Draw the verdict, last on the screen."""
    texts = [Text(shown(item)) for line in verdict.lines for item in line.split("\n")]
    lines = [Padding(item, (0, 0, 0, 2), expand=False) for item in texts]
    style = {TRAINED: "bold green", NOT_KNOWN: "bold yellow"}.get(verdict.code, "bold red")
    if verdict.title.startswith(NOT_MEASURED.upper()):
        style = "bold yellow"
    return Group(Text(shown(verdict.title), style=style), *lines)


@contextmanager
def _shower(out: Console) -> Iterator[Callable[[View], None]]:
    """Yield a function that shows a view: live on a terminal, else a line per change and half minute."""
    if not out.is_terminal:
        printed, when = "", 0.0

        def say(view: View) -> None:
            nonlocal printed, when
            text, still = line(view), time.monotonic() - when >= QUIET
            if text != printed or still:
                prefix = "still " if text == printed else ""
                printed, when = text, time.monotonic()
                out.print(f"{time.strftime('%H:%M:%S')} {prefix}{text}", soft_wrap=True)

        yield say
        return
    # The engine's prints go to a substitute of stdout; this console has the terminal itself.
    with Screen(console=out, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield lambda view: live.update(screen(view), refresh=True)


def look_once(server: Watched, job_id: str, *, as_json: bool) -> None:
    """Print a job's state.

    Raises:
        WatchError: TF-812 if the server does not answer.
    """
    began = time.monotonic()
    try:
        answer = server.look(job_id)
    except LostError as error:
        raise WatchError(_unreachable(View(job_id), str(error), 0.0)) from None
    view = View(job_id, answer, answer.status, time.monotonic() - began)
    if as_json:
        formats.show(watch_line(view), line=True)
    else:
        typer.echo(line(view))


def watch_line(view: View, verdict: Verdict | None = None) -> WatchLine:
    """Return a view as a line of JSON."""
    from tightframe_app.outputs import End
    from tightframe_app.outputs import Watched as WatchLine

    answer = view.seen
    fields: dict[str, Any] = {}
    if answer is not None:
        fields = {"engine": answer.engine, "told": answer.told, "silent": dict(answer.silent)}
    return WatchLine(
        job_id=view.job_id,
        seconds=round(view.elapsed, 1),
        standing=standing(view),
        lost=view.lost,
        status=view.last,
        end=None if verdict is None else End.model_validate(verdict),
        **fields,
    )


def told_until_over(server: Watched, job_id: str, *, every: float, patience: float) -> Verdict:
    """Print a line of JSON for each change of a job until it is over, and one with its end.

    Raises:
        typer.Exit: with code 130 after Ctrl-C; the job goes on.
        WatchError: if it cannot be watched, or no longer.
    """
    last, printed = View(job_id), ""

    def show(view: View) -> None:
        nonlocal last, printed
        last = view
        if (text := line(view)) != printed:
            printed = text
            formats.show(watch_line(view), line=True)

    try:
        verdict = follow(server, job_id, show, every=every, patience=patience)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    formats.show(watch_line(last, verdict), line=True)
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
    """Show each view also on the page, if there is one."""
    if page is None:
        return show

    def both(view: View) -> None:
        show(view)
        page.show(view)

    return both
