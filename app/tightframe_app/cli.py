"""The ``tightframe`` command."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightframe import __version__
from tightframe.errors import TightframeError
from tightframe_app import (
    data,
    federations,
    ledgers,
    method_table,
    pairs,
    reports,
    sites,
    transcripts,
    watch,
)

LOG_MODES = ("concise", "msg_only", "full", "verbose")

app = typer.Typer(
    help="Privacy-hardened federated learning for hospitals, on NVIDIA FLARE.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
jobs = typer.Typer(help="List, export and check job folders.", no_args_is_help=True)
app.add_typer(jobs, name="jobs")
app.add_typer(data.app, name="data")
app.add_typer(federations.app, name="federation")
app.add_typer(sites.app, name="site")
app.add_typer(transcripts.app, name="transcript")
app.add_typer(ledgers.app, name="ledger")
app.command("report")(reports.report)
app.command("watch")(watch.watch)
app.command("methods")(method_table.methods)
# What is printed holds paths and values of users: "[x]" and ":x:" in them are no markup.
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=True)


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


@jobs.command("list")
def jobs_list() -> None:
    """The jobs that can be exported, and their presets."""
    from tightframe_app import recipes

    table = Table("job", "what it trains", "presets", "default sites")
    for recipe in recipes.RECIPES:
        table.add_row(recipe.name, recipe.title, ", ".join(recipe.presets), ", ".join(recipe.sites))
    Console(highlight=False, markup=False, emoji=False).print(table)


@jobs.command("export")
def jobs_export(
    name: Annotated[
        str | None, typer.Argument(help="A job of `tightframe jobs list`; or --method and --data.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="In place of NAME: a method of `tightframe methods` ...")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--data", help="... on fed_isic2019, eicu or fed_heart_disease.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="rehearsal (minutes on a CPU) or full (GPU, paper scale).")
    ] = "rehearsal",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Job folder to write, free or an earlier export of this job; exported/NAME by default.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(help="Write the folder also if it holds something else, which is kept as *.before."),
    ] = False,
    sites: Annotated[str | None, typer.Option(help="Silo names, separated by commas.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Training rounds.")] = None,
    min_sites: Annotated[int | None, typer.Option(help="Fewer contributions than this end the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random stream.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs that each silo must have free (engine's resource_spec); 1 for full, else 0."),
    ] = None,
    gpu_memory: Annotated[int, typer.Option(help="GiB of memory on each of those GPUs.")] = 8,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help='Change any job value: --set training.epochs=2 --set method_options.intra_form="official"',
        ),
    ] = None,
    committed: Annotated[
        bool, typer.Option("--committed", help="Write jobs/NAME as it is committed (for developers).")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the stopped run whose results at the server lie in this folder."),
    ] = None,
) -> None:
    """Write a job folder: configuration only, no code.

    Where --set names another method, dataset or model, the recipe's options of the old one are
    dropped, and the command says which. With --resume the job is the stopped one, unchanged, and NAME its
    name or recipe; only --output, --force, --gpus and --gpu-memory go with it.
    """
    from tightframe.report.words import plural
    from tightframe_app import job_folders

    if (name is None) == (method is None or dataset is None) or (name and (method or dataset)):
        raise typer.BadParameter("expected a job's NAME, or --method and --data", param_hint="NAME")
    if resume is not None and name is None:
        raise typer.BadParameter("goes with the stopped job's NAME", param_hint="--resume")
    if resume is not None and name is not None:
        others: dict[str, Any] = {
            "--sites": sites,
            "--rounds": rounds,
            "--min-sites": min_sites,
            "--seed": seed,
        }
        others |= {"--set": change, "--committed": committed or None}
        others |= {"--preset": None if preset == "rehearsal" else preset}
        _resume(name, resume, output, others, gpus=gpus or 0, gpu_memory=gpu_memory, force=force)
        return
    recipe = _recipe(name) if name is not None else pairs.pair(str(method), str(dataset))
    name = recipe.name
    if preset not in recipe.presets:
        raise typer.BadParameter(
            f"expected one of {list(recipe.presets)}, got {preset!r}", param_hint="--preset"
        )
    changes: dict[str, Any] = {}
    changes |= {
        key: value
        for key, value in (("rounds", rounds), ("min_sites", min_sites), ("seed", seed))
        if value is not None
    }
    for item in change or []:
        key, separator, value = item.partition("=")
        if not separator:
            raise typer.BadParameter(f"expected KEY=VALUE, got {item!r}", param_hint="--set")
        changes[key] = _plain(value)
    names = None if sites is None else [part.strip() for part in sites.split(",") if part.strip()]
    if names == []:
        raise typer.BadParameter("expected silo names separated by commas, got none", param_hint="--sites")
    job = recipe.job(preset, sites=names, changes=changes)
    wanted = gpus if gpus is not None else int(preset == "full")
    files = job_folders.job_files(job, gpus=wanted, gpu_memory=gpu_memory)
    folder = Path("jobs", name) if committed else output or Path("exported", name)
    if told := job_folders.write_job(files, folder, force=force, anew=committed):
        err.print(told)
    for kind, keys in recipe.dropped(preset, changes).items():
        err.print(f"{kind} is {changes[kind]} now; options of the recipe's own dropped: {', '.join(keys)}")
    what = recipe.described(job, preset)
    out.print(
        f"{folder}: {what}; {preset}, {plural(job.rounds, 'round')}, "
        f"{plural(len(job.sites), 'site')}: {', '.join(job.sites)}"
    )
    if what != recipe.title and "job_name" not in changes:
        out.print(f"its outcome will call it {job.job_name}; --set job_name=NAME gives it a name of its own")
    out.print(f"run it here:  tightframe simulate {shlex.quote(str(folder))}")
    out.print(f"or at a federation:  nvflare job submit -j {shlex.quote(str(folder))}")


def _resume(
    name: str,
    stopped: Path,
    output: Path | None,
    others: dict[str, Any],
    *,
    gpus: int,
    gpu_memory: int,
    force: bool,
) -> None:
    """Export the job that goes on with a stopped run."""
    from tightframe_app import resuming

    if given := [option for option, value in others.items() if value is not None]:
        raise typer.BadParameter(
            f"a resumed job is the stopped one, unchanged: leave out {', '.join(given)}",
            param_hint="--resume",
        )
    folder = output or Path("exported", f"{name}-resumed")
    told, lines = resuming.export(name, stopped, folder, gpus=gpus, gpu_memory=gpu_memory, force=force)
    if told:
        err.print(told)
    for line in lines:
        out.print(line)


@jobs.command("check")
def jobs_check(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Job folders to validate; without any: the committed ones.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Root of the repository.")] = Path("."),
) -> None:
    """Prove that job folders hold what their recipes give, and nothing else.

    A given folder is compared with what the job in it gives, and what a silo's line has to carry is
    told. Without folders the committed ones are checked, and the simulator's allow list is restored
    if a crash has lost it.
    """
    from tightframe_app import job_folders, recipes

    if not folders:
        problems = _check_committed(root)
        _report(problems, "tightframe jobs export NAME --committed")
        out.print(f"{len(recipes.RECIPES)} job folders are in sync with their recipes")
        return
    problems = []
    for folder in folders:
        found = job_folders.check_folder(folder)
        problems += found
        if not found:
            out.print(f"{folder}: valid")
            out.print(f"{folder}: {job_folders.traffic(folder)}")
    _report(problems, "tightframe jobs export NAME --set KEY=VALUE -o FOLDER")


def _check_committed(root: Path) -> list[str]:
    from tightframe.flare import simulator
    from tightframe_app import job_folders, recipes

    if not (root / "jobs").is_dir():
        raise FileNotFoundError(
            f"Expected to be at the root of the repository, but {root / 'jobs'} does not exist."
        )
    problems: list[str] = []
    for recipe in recipes.RECIPES:
        problems += job_folders.out_of_sync(job_folders.job_files(recipe.job()), root / "jobs" / recipe.name)
    known = {recipe.name for recipe in recipes.RECIPES}
    problems += [
        f"{path} belongs to no recipe" for path in sorted((root / "jobs").iterdir()) if path.name not in known
    ]
    allow_list = root / "simulator_workspace" / "local" / "resources.json"
    if not allow_list.is_file():
        simulator.prepare_workspace(root / "simulator_workspace")
        out.print(f"restored {allow_list}")
    elif allow_list.read_text(encoding="utf-8") != simulator.allow_list_text():
        problems.append(f"{allow_list} is not the allow list: delete it, and check again to have it restored")
    return problems


def _report(problems: list[str], mend: str) -> None:
    """Show problems and stop with 1; return if there is none."""
    if problems:
        for problem in problems:
            err.print(f"out of sync: {problem}")
        err.print(f"write a job folder anew with:  {mend}")
        raise typer.Exit(1)


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


def _recipe(name: str) -> Any:
    from tightframe_app import recipes

    try:
        return recipes.get(name)
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0]), param_hint="NAME") from None


def _plain(text: str) -> Any:
    """A value as JSON where it is JSON, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
