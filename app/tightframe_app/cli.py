"""The ``tightframe`` command."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tightframe import __version__
from tightframe.errors import TightframeError
from tightframe_app.on_demand import MARKUP, Part, group_of
from tightframe_app.screens import lines

LOG_MODES = ("concise", "msg_only", "full", "verbose")

PARTS = {
    name: Part(f"tightframe_app.{place}", text)
    for name, place, text in (
        ("report", "reports:report", "Write report.html of a run's results: one file that opens offline."),
        (
            "predict",
            "use:predict",
            "Write a trained model's answer for each input, with the probability of each class and the "
            "model's hash.",
        ),
        (
            "export",
            "use:export",
            "Write a trained model as ONNX, TorchScript or a MONAI bundle, and check that it gives the same "
            "answers.",
        ),
        (
            "compare",
            "reports:compare",
            "Compare runs of the same data: last values, curves, paired differences, and where their jobs "
            "differ.",
        ),
        (
            "watch",
            "watch.commands:watch",
            "Show a job of a federation live until it is over, and say how it ended.",
        ),
        (
            "methods",
            "jobs.method_table:methods",
            "List the methods: the fields that a silo contributes to their sums, and the number of bytes.",
        ),
        (
            "explain",
            "explain.command:explain",
            "Explain an error code, a value of a job or site, or the options of a method, model or data set.",
        ),
        (
            "schema",
            "formats:schema",
            "Print the JSON schema (draft 2020-12) of what a command prints with `--format json`.",
        ),
        ("simulate", "cli:simulate", "Run a job folder in the engine's simulator on this machine."),
        ("jobs", "jobs.commands:app", "List, export, check, sign, submit and fetch jobs."),
        ("data", "data.commands:app", "A site's own tables, and downloaded data sets."),
        ("federation", "federation.commands:app", "Set a federation up: request files, startup kits, pins."),
        (
            "site",
            "site.commands:app",
            "Run a hospital's own site: join, check, start, stop, leave; decide how its sums may be formed.",
        ),
        ("provisioning", "provisioning:app", "Files that configure sites, servers and boards."),
        ("transcript", "transcripts:app", "Check the record of a run's secure sums."),
        (
            "ledger",
            "ledger.commands:app",
            "Show and verify how this site's privacy budget was spent.",
        ),
    )
}
"""Commands in the order of the list, with the first line of each function's own help."""

app = typer.Typer(
    cls=group_of(PARTS),
    help="Privacy-hardened federated learning for hospitals, on NVIDIA FLARE.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=MARKUP,
)
out = lines()
err = lines(stderr=True)
STORAGE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
)
"""Errors of a full, read-only or forbidden place, which are no bugs."""


def main() -> None:
    """Run the command line; errors of data or disk give a message and exit code 2, bugs a traceback."""
    try:
        app()
    except TightframeError as error:
        _fail(str(error))
        err.print(f"more: tightframe explain {error.code}")
        sys.exit(2)
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, FileExistsError)) and error.errno not in STORAGE:
            raise
        place = "" if error.filename is None else f": {error.filename}"
        _fail(f"{error.strerror}{place}" if error.strerror else str(error))
        sys.exit(2)


def _fail(text: str) -> None:
    err.print(Text.assemble(("error:", "bold red"), " ", text))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"tightframe {__version__}")
        raise typer.Exit()


def simulate(
    job: Annotated[Path, typer.Argument(help="A job folder.")],
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", help="Number of silos that run at the same time; all by default."),
    ] = None,
    workspace: Annotated[
        Path,
        typer.Option("--workspace", "-w", help="Working folder; an earlier run is moved to WORKSPACE.runs."),
    ] = Path("simulator_workspace"),
    site_config: Annotated[
        Path | None,
        typer.Option(
            "--site-config", "-s", help="Site configuration with the location of each silo's records."
        ),
    ] = None,
    previous_run: Annotated[
        Path | None,
        typer.Option(
            help="For a job that resumes or withdraws from a run: workspace of that simulation, which has "
            "the silos' state."
        ),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of earlier runs to keep in WORKSPACE.runs; those without a finished round go first, "
            "then the oldest. 0 wipes the last one.",
        ),
    ] = 5,
    gpu: Annotated[
        str | None, typer.Option(help="GPU ids for the silos, in the engine's notation: 0,1 or [0,1]")
    ] = None,
    log: Annotated[str, typer.Option("--log", "-l", help="concise, msg_only, full or verbose.")] = "concise",
) -> None:
    """Run a job folder in the engine's simulator on this machine.

    The exit code is 0 only if the run trained. Without a site configuration every silo trains on the
    synthetic twin (or on real records if the data set needs no files), and the log says so. With one,
    all sites' records are opened before the engine starts, so that a wrong folder is reported at once.
    """
    from tightframe.config.site import parse_site_file, read_object
    from tightframe.flare.simulation import simulator
    from tightframe.flare.simulation.workspace import hold
    from tightframe.results.words import plural
    from tightframe.rounds.setup import prepare
    from tightframe_app.jobs import at_work, simulation
    from tightframe_app.jobs import folders as job_folders

    if threads is not None and threads < 1:
        raise typer.BadParameter(f"expected at least 1, got {threads}", param_hint="--threads")
    if log not in LOG_MODES and not Path(log).is_file():
        raise typer.BadParameter(
            f"expected one of {list(LOG_MODES)} or a file, got {log!r}", param_hint="--log"
        )
    simulator.check_workspace(workspace)
    setup = prepare(job_folders.read_job(job))
    values, sites = setup.job, setup.job.roster
    if site_config is not None:
        if not site_config.is_file():
            raise FileNotFoundError(
                f"Expected a site configuration at {site_config}, but there is no such file."
            )
        parse_site_file(read_object(site_config), str(site_config))
    if threads is not None and threads > len(sites):
        out.print(f"threads: {len(sites)} instead of {threads}, because the job has only so many sites")
    command = [
        sys.executable,
        "-m",
        simulator.__name__,
        str(job),
        "-w",
        str(workspace),
        "-l",
        log,
    ]
    command += ["-t", str(min(threads or len(sites), len(sites)))]
    if gpu is not None:
        command += ["--gpu", gpu]
    with hold(workspace, values.job_name), simulator.site_configuration(workspace, site_config) as config:
        out.print(simulation.records(workspace / "local", config, values))
        simulation.check_start(workspace / "local", setup)
        moved = simulation.keep(workspace, keep, out.print)
        previous = simulation.set_previous(previous_run, workspace, moved)
        stopped, code = None, 0
        out.print(
            f"starting a server and {plural(len(sites), 'silo')}; without a terminal, a line every minute"
        )
        try:
            with at_work.shown(out) as relay:
                code = simulator.run_apart(command, *([] if relay is None else [relay]))
        except (KeyboardInterrupt, SystemExit) as signal:
            by_hand = isinstance(signal, KeyboardInterrupt)
            stopped = "Ctrl-C" if by_hand else "a signal"
            code = simulator.INTERRUPTED if by_hand else int(signal.args[0])
            err.print("interrupted: the run was stopped, and all its processes have ended")
        if code:
            typed = [("--site-config", site_config), ("--threads", threads), ("--gpu", gpu)]
            words = [word for name, value in typed if value is not None for word in (name, str(value))]
            for line in simulation.left_behind(setup, workspace, job, stopped, words, previous):
                err.print(line)
        elif (hint := simulation.one_answer_hint(setup, workspace)) is not None:
            err.print(hint)
    raise typer.Exit(code)
