"""The ``tightframe`` command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tightframe import __version__
from tightframe.errors import TightframeError

app = typer.Typer(
    help="Privacy-hardened federated learning for hospitals, on NVIDIA FLARE.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
jobs = typer.Typer(help="List, export and check job folders.", no_args_is_help=True)
app.add_typer(jobs, name="jobs")
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: named errors become one message and exit code 2."""
    try:
        app()
    except (TightframeError, FileNotFoundError, FileExistsError, ValueError) as error:
        err.print(f"[bold red]error:[/] {error}", markup=True)
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
    Console(highlight=False).print(table)


@jobs.command("export")
def jobs_export(
    name: Annotated[str, typer.Argument(help="A job of `tightframe jobs list`.")],
    preset: Annotated[
        str, typer.Option(help="rehearsal (minutes on a CPU) or full (GPU, paper scale).")
    ] = "rehearsal",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Job folder to write; exported/NAME by default."),
    ] = None,
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
) -> None:
    """Write a job folder: configuration only, no code."""
    from tightframe_app import recipes

    recipe = _recipe(name)
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
    names = [part.strip() for part in sites.split(",") if part.strip()] if sites else None
    job = recipe.job(preset, sites=names, changes=changes)
    wanted = gpus if gpus is not None else int(preset == "full")
    files = recipes.job_files(job, gpus=wanted, gpu_memory=gpu_memory)
    folder = Path("jobs", name) if committed else output or Path("exported", name)
    recipes.write_job(files, folder)
    out.print(f"{folder}: {recipe.title}; {preset}, {job.rounds} rounds, sites {', '.join(job.sites)}")
    out.print(f"run it here:  tightframe simulate {folder}")


@jobs.command("check")
def jobs_check(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Job folders to validate; without any: the committed ones.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Root of the repository.")] = Path("."),
) -> None:
    """Prove that the committed job folders match their recipes, or validate any job folder.

    Without folders it also restores the simulator's allow list if a crash has lost it.
    """
    from tightframe.rounds.setup import prepare
    from tightframe_app import recipes

    problems: list[str] = []
    if folders:
        for folder in folders:
            prepare(recipes.read_job(folder))
            out.print(f"{folder}: valid")
        return
    if not (root / "jobs").is_dir():
        raise FileNotFoundError(
            f"Expected to be at the root of the repository, but {root / 'jobs'} does not exist."
        )
    for recipe in recipes.RECIPES:
        problems += recipes.out_of_sync(recipes.job_files(recipe.job()), root / "jobs" / recipe.name)
    known = {recipe.name for recipe in recipes.RECIPES}
    problems += [
        f"{path} belongs to no recipe" for path in sorted((root / "jobs").iterdir()) if path.name not in known
    ]
    allow_list = root / "simulator_workspace" / "local" / "resources.json"
    if not allow_list.is_file():
        from tightframe.flare.simulator import prepare_workspace

        prepare_workspace(root / "simulator_workspace")
        out.print(f"restored {allow_list}")
    if problems:
        for problem in problems:
            err.print(f"out of sync: {problem}")
        err.print("mend it with:  tightframe jobs export NAME --committed")
        raise typer.Exit(1)
    out.print(f"{len(recipes.RECIPES)} job folders are in sync with their recipes")


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
    gpu: Annotated[
        str | None, typer.Option(help="GPU ids for the silos, as the engine writes them: 0,1 or [0,1]")
    ] = None,
    log: Annotated[str, typer.Option("--log", "-l", help="concise, msg_only, full or verbose.")] = "concise",
) -> None:
    """Run a job folder in the engine's simulator on this machine.

    Exit code 0 only if the run trained. Without a site configuration every silo trains on the
    synthetic twin, and says so.
    """
    from tightframe.config.site import parse_site_file
    from tightframe.rounds.setup import prepare
    from tightframe_app import recipes

    setup = prepare(recipes.read_job(job))
    if site_config is not None:
        parse_site_file(_read_json(site_config), str(site_config))
    command = [sys.executable, "-m", "tightframe.flare.simulator", str(job), "-w", str(workspace), "-l", log]
    command += ["-t", str(min(threads or len(setup.job.sites), len(setup.job.sites)))]
    if site_config is not None:
        command += ["--site-config", str(site_config)]
    if gpu is not None:
        command += ["--gpu", gpu]
    raise typer.Exit(subprocess.call(command))  # noqa: S603 - our own module, arguments as a list


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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"Expected the site configuration at {path}, but there is no such file.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"Expected {path} to hold a JSON object.")
    return values
