"""``tightframe jobs``: list, export and check job folders."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tightframe_app.jobs import pairs
from tightframe_app.screens import lines

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe_app.jobs.recipes import Recipe

app = typer.Typer(help="List, export and check job folders.", no_args_is_help=True)
out = lines()
err = lines(stderr=True)


@app.command("list")
def list_jobs() -> None:
    """The jobs that can be exported, and their presets."""
    from tightframe_app.jobs import recipes

    table = Table("job", "what it trains", "presets", "default sites")
    for recipe in recipes.RECIPES:
        table.add_row(recipe.name, recipe.title, ", ".join(recipe.presets), ", ".join(recipe.sites))
    Console(highlight=False, markup=False, emoji=False).print(table)


# What a job is made with, as options of the command line.
_Name = Annotated[str | None, typer.Argument(help="A job of `tightframe jobs list`; or --method and --data.")]
_Method = Annotated[str | None, typer.Option(help="In place of NAME: a method of `tightframe methods` ...")]
_Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="... on fed_isic2019, eicu or fed_heart_disease. Others: NAME and --set dataset=digits, say.",
    ),
]
_Preset = Annotated[str, typer.Option(help="rehearsal (minutes on a CPU) or full (GPU, paper scale).")]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Job folder to write, free or an earlier export of this job; exported/NAME by default.",
    ),
]
_Force = Annotated[
    bool, typer.Option(help="Write the folder also if it holds something else, which is kept as *.before.")
]
_Sites = Annotated[str | None, typer.Option(help="Silo names, separated by commas.")]
_Rounds = Annotated[int | None, typer.Option(help="Training rounds.")]
_MinSites = Annotated[int | None, typer.Option(help="Fewer contributions than this end the run.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of every random stream.")]
_Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs that each silo must have free (engine's resource_spec); 1 for full, else 0."),
]
_GpuMemory = Annotated[int, typer.Option(help="GiB of memory on each of those GPUs.")]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help='Change any job value: --set training.epochs=2 --set method_options.intra_form="official"',
    ),
]
_Committed = Annotated[
    bool, typer.Option("--committed", help="Write jobs/NAME as it is committed (for developers).")
]
_Resume = Annotated[
    Path | None,
    typer.Option(help="Go on with the stopped run whose results at the server lie in this folder."),
]


@app.command()
def export(
    name: _Name = None,
    method: _Method = None,
    dataset: _Data = None,
    preset: _Preset = "rehearsal",
    output: _Output = None,
    force: _Force = False,
    sites: _Sites = None,
    rounds: _Rounds = None,
    min_sites: _MinSites = None,
    seed: _Seed = None,
    gpus: _Gpus = None,
    gpu_memory: _GpuMemory = 8,
    change: _Set = None,
    committed: _Committed = False,
    resume: _Resume = None,
) -> None:
    """Write a job folder: configuration only, no code.

    Where --set names another method, dataset or model, the recipe's options of the old one are
    dropped, and the command says which. With --resume the job is the stopped one, unchanged, and NAME its
    name or recipe; only --output, --force, --gpus and --gpu-memory go with it.
    """
    from tightframe_app.jobs import folders as job_folders

    if (name is None) == (method is None or dataset is None) or (name and (method or dataset)):
        raise typer.BadParameter("expected a job's NAME, or --method and --data", param_hint="NAME")
    numbers = {"rounds": rounds, "min_sites": min_sites, "seed": seed}
    if resume is not None:
        others: dict[str, Any] = {f"--{key.replace('_', '-')}": value for key, value in numbers.items()}
        others = {"--sites": sites} | others | {"--set": change, "--committed": committed or None}
        others |= {"--preset": None if preset == "rehearsal" else preset}
        _resume(name, resume, output, others, gpus=gpus or 0, gpu_memory=gpu_memory, force=force)
        return
    recipe = _recipe(name) if name is not None else pairs.pair(str(method), str(dataset))
    if preset not in recipe.presets:
        raise typer.BadParameter(
            f"expected one of {list(recipe.presets)}, got {preset!r}", param_hint="--preset"
        )
    changes = {key: value for key, value in numbers.items() if value is not None} | _changes(change or [])
    job = recipe.job(preset, sites=_names(sites), changes=changes)
    wanted = gpus if gpus is not None else int(preset == "full")
    files = job_folders.job_files(job, gpus=wanted, gpu_memory=gpu_memory)
    folder = Path("jobs", recipe.name) if committed else output or Path("exported", recipe.name)
    if told := job_folders.write_job(files, folder, force=force, anew=committed):
        err.print(told)
    _tell(recipe, job, preset, changes, folder)


def _changes(items: list[str]) -> dict[str, Any]:
    """The values of ``--set KEY=VALUE``."""
    changes: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise typer.BadParameter(f"expected KEY=VALUE, got {item!r}", param_hint="--set")
        changes[key] = _plain(value)
    return changes


def _names(sites: str | None) -> list[str] | None:
    """The silos of ``--sites``."""
    names = None if sites is None else [part.strip() for part in sites.split(",") if part.strip()]
    if names == []:
        raise typer.BadParameter("expected silo names separated by commas, got none", param_hint="--sites")
    return names


def _tell(recipe: Recipe, job: JobConfig, preset: str, changes: dict[str, Any], folder: Path) -> None:
    """Say what was written, and how to run it."""
    from tightframe.results.words import plural

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
    quoted = shlex.quote(str(folder))
    out.print(f"or at a federation:  tightframe jobs sign {quoted} && nvflare job submit -j {quoted}")


def _resume(
    name: str | None,
    stopped: Path,
    output: Path | None,
    others: dict[str, Any],
    *,
    gpus: int,
    gpu_memory: int,
    force: bool,
) -> None:
    """Export the job that goes on with a stopped run."""
    from tightframe_app.jobs import resuming

    if name is None:
        raise typer.BadParameter("goes with the stopped job's NAME", param_hint="--resume")
    if given := [option for option, value in others.items() if value is not None]:
        raise typer.BadParameter(
            f"a resumed job is the stopped one, unchanged: leave out {', '.join(given)}",
            param_hint="--resume",
        )
    folder = output or Path("exported", f"{name}-resumed")
    told, said = resuming.export(name, stopped, folder, gpus=gpus, gpu_memory=gpu_memory, force=force)
    if told:
        err.print(told)
    for line in said:
        out.print(line)


@app.command()
def check(
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
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

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
            out.print(f"{folder}: {job_folders.signature(folder)}")
    _report(problems, "tightframe jobs export NAME --set KEY=VALUE -o FOLDER")


@app.command()
def sign(
    folder: Annotated[Path, typer.Argument(help="The job folder to sign; it must pass `jobs check`.")],
    kit: Annotated[
        Path | None,
        typer.Option(
            help="Startup kit of the lead. By default the one of `nvflare config use`, else the only one of "
            "a person below kits/."
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="For how long sites may take the job up.")] = 14,
) -> None:
    """Sign a job with the lead's key, as production sites ask for: its files, values, sites and time.

    A signature is good for one submission; sign again before another one.
    """
    from tightframe.flare.identity import person_identity
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.watch import monitoring

    folder_of_kit = monitoring.find_kit(kit)
    startup = folder_of_kit if folder_of_kit.name == "startup" else folder_of_kit / "startup"
    signer, _ = person_identity(startup)
    made = job_folders.sign(folder, signer, days=days)
    out.print(
        f"{folder}: signed by {made.signer} for {', '.join(made.sites)}, to be taken up until {made.expires}"
    )
    out.print(f"submit it, once:  nvflare job submit -j {shlex.quote(str(folder))}")


def _check_committed(root: Path) -> list[str]:
    from tightframe.flare import simulator
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

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


def _recipe(name: str) -> Recipe:
    from tightframe_app.jobs import recipes

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
