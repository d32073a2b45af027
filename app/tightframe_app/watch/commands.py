"""``tightframe watch``, which imports its screen only when called."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer

from tightframe_app import formats
from tightframe_app.live import options as live
from tightframe_app.screens import shown


def id_of(job: str) -> str:
    """Return a job's id in the engine's form.

    Raises:
        typer.BadParameter: if it is not an id.
    """
    try:
        return str(uuid.UUID(job.strip()))
    except ValueError:
        raise typer.BadParameter(
            f"expected the id of a job, as `nvflare job list` shows it, got {shown(job)!r}", param_hint="JOB"
        ) from None


def watch(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The job's id, as `nvflare job submit` printed it.")
    ],
    kit: Annotated[
        Path | None,
        typer.Option(
            help="Startup kit of the person who watches. By default the one of `nvflare config use`, else "
            "the only one of a person below kits/."
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.5, max=600, help="Seconds between two requests to the server.")
    ] = 2.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds without an answer after which the watch gives up.")
    ] = 600.0,
    web: Annotated[bool, typer.Option("--web", help="Also as a page for a browser on this machine.")] = False,
    port: live.Port = None,
    once: Annotated[bool, typer.Option("--once", help="Ask once, and end with code 0.")] = False,
    form: formats.Form = "text",
) -> None:
    """Show a job of a federation live until it is over, and say how it ended.

    State, round and phase, silos that joined, answered, were late, dropped or
    refused (and why), loss, balanced accuracy, privacy spent, seconds and bytes:
    totals that the server has anyway. It only looks: Ctrl-C ends the watch, and
    the job goes on. Without a terminal a line is printed for each change, and
    every half minute. At the end the result is fetched to read its outcome, and
    thrown away. With --format json each change is an object on a line, and the
    last has the end. With --web a link is printed that opens a page with the same,
    and with curves, once, on this machine only.

    Exit code 0: it trained, by its own outcome; the last lines say if its final
    model was not measured. 1: it stopped, failed or was aborted. 2: wrong
    arguments, no connection, no such job. 3: over, but whether it trained is not
    known here (to whoever may not download the job). 130: Ctrl-C.
    """
    job_id = id_of(job)
    live.check_port(port, web=web)
    if web and (once or form == "json"):
        raise typer.BadParameter("expected neither --once nor --format json with it", param_hint="--web")
    from tightframe_app.watch import monitoring
    from tightframe_app.watch.terminal import look_once, told_until_over, until_over

    server = monitoring.Server(monitoring.find_kit(kit))
    try:
        if once:
            look_once(server, job_id, as_json=form == "json")
            return
        if form == "json":
            verdict = told_until_over(server, job_id, every=every, patience=patience)
        else:
            verdict = until_over(server, job_id, every=every, patience=patience, web=web, port=port)
    finally:
        server.close()
    raise typer.Exit(verdict.code)
