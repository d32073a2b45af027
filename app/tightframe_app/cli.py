"""The ``tightframe`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tightframe import __version__
from tightframe.errors import TightframeError
from tightframe_app import (
    data,
    federations,
    job_commands,
    ledgers,
    method_table,
    reports,
    sites,
    transcripts,
    watch,
)
from tightframe_app.screens import lines

LOG_MODES = ("concise", "msg_only", "full", "verbose")

app = typer.Typer(
    help="Privacy-hardened federated learning for hospitals, on NVIDIA FLARE.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(job_commands.app, name="jobs")
app.add_typer(data.app, name="data")
app.add_typer(federations.app, name="federation")
app.add_typer(sites.app, name="site")
app.add_typer(transcripts.app, name="transcript")
app.add_typer(ledgers.app, name="ledger")
app.command("report")(reports.report)
app.command("watch")(watch.watch)
app.command("methods")(method_table.methods)
out = lines()
err = lines(stderr=True)


def main() -> None:
    """Entry point: named errors become one message and exit code 2; anything else is a bug and shows."""
    try:
        app()
    except (TightframeError, FileNotFoundError, FileExistsError) as error:
        err.print(Text.assemble(("error:", "bold red"), " ", str(error)))
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        out.print(f"tightframe {__version__}")
        raise typer.Exit()


@app.command()
def simulate(
    job: Annotated[Path, typer.Argument(help="A job folder.")],
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", help="Silos that run at the same time; all by default.")
    ] = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", "-w", help="Working folder; wiped at start, but for its local/.")
    ] = Path("simulator_workspace"),
    site_config: Annotated[
        Path | None,
        typer.Option(
            "--site-config", "-s", help="Site configuration that says where each silo's records lie."
        ),
    ] = None,
    previous_run: Annotated[
        Path | None,
        typer.Option(
            help="For a resumed job: workspace of the stopped simulation, for the silos' own state."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU ids for the silos, as the engine writes them: 0,1 or [0,1]")
    ] = None,
    log: Annotated[str, typer.Option("--log", "-l", help="concise, msg_only, full or verbose.")] = "concise",
) -> None:
    """Run a job folder in the engine's simulator on this machine.

    Exit code 0 only if the run trained. Without a site configuration every silo trains on the
    synthetic twin (or on real records where the data set needs no files), and says so. With one, all
    sites' records are opened before the engine starts, so that a wrong folder is named at once.
    """
    from tightframe.config.site import parse_site_file, read_object
    from tightframe.flare import simulator
    from tightframe.rounds.setup import prepare
    from tightframe_app import job_folders, simulation

    if threads is not None and threads < 1:
        raise typer.BadParameter(f"expected at least 1, got {threads}", param_hint="--threads")
    if log not in LOG_MODES and not Path(log).is_file():
        raise typer.BadParameter(
            f"expected one of {list(LOG_MODES)} or a file, got {log!r}", param_hint="--log"
        )
    simulator.check_workspace(workspace)
    values = prepare(job_folders.read_job(job)).job
    sites = values.roster
    if site_config is not None:
        if not site_config.is_file():
            raise FileNotFoundError(f"Expected a site configuration at {site_config}: there is no such file.")
        parse_site_file(read_object(site_config), str(site_config))
    if threads is not None and threads > len(sites):
        out.print(f"threads: {len(sites)} instead of {threads}, because the job has no more sites")
    command = [sys.executable, "-m", "tightframe.flare.simulator", str(job), "-w", str(workspace), "-l", log]
    command += ["-t", str(min(threads or len(sites), len(sites)))]
    if gpu is not None:
        command += ["--gpu", gpu]
    if previous_run is not None:
        if previous_run.resolve() == workspace.resolve():
            raise typer.BadParameter(
                "it is the workspace of this run, too, which is wiped at start: choose another --workspace",
                param_hint="--previous-run",
            )
        os.environ[simulator.PREVIOUS_RUN] = str(previous_run.resolve())
    try:
        with simulator.site_configuration(workspace, site_config) as used:
            out.print(simulation.records(workspace / "local", used, values))
            code = simulator.run_apart(command)
    except KeyboardInterrupt:
        err.print("interrupted: the run was stopped, nothing of it goes on")
        code = simulator.INTERRUPTED
    raise typer.Exit(code)
