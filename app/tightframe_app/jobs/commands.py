"""``tightframe jobs``: list, export, check, sign and submit job folders, and fetch results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table

from tightframe.files import quoted
from tightframe.results.words import plural
from tightframe_app import formats
from tightframe_app.screens import Terminal, lines, shown

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe_app.jobs.recipes import Recipe
    from tightframe_app.watch.monitoring import Server

_PAGES = {".htm", ".html", ".mht", ".mhtml", ".shtml", ".svg", ".xht", ".xhtml", ".xml"}
"""Suffixes of files that a browser may execute."""

app = typer.Typer(no_args_is_help=True)
out = lines()
err = lines(stderr=True)


@app.command("list")
def list_jobs(form: formats.Form = "text") -> None:
    """List the jobs that can be exported, and their presets."""
    from tightframe_app.jobs import recipes

    if form == "json":
        from tightframe_app.outputs import Job, Jobs

        jobs = [
            Job(name=one.name, title=one.title, presets=tuple(one.presets), sites=tuple(one.sites))
            for one in recipes.RECIPES
        ]
        formats.show(Jobs(jobs=tuple(jobs)))
        return
    table = Table("job", "what it trains", "presets", "default sites")
    for recipe in recipes.RECIPES:
        table.add_row(recipe.name, recipe.title, ", ".join(recipe.presets), ", ".join(recipe.sites))
    Terminal().print(table)


def _complete(incomplete: str) -> list[str]:
    """Return the jobs whose name has this prefix, for the shell's completion."""
    from tightframe_app.jobs import recipes

    return [recipe.name for recipe in recipes.RECIPES if recipe.name.startswith(incomplete)]


# Arguments and options of `jobs export`.
_Name = Annotated[
    str | None,
    typer.Argument(
        help="A job from `tightframe jobs list`; or give --method and --data.", autocompletion=_complete
    ),
]
_Method = Annotated[str | None, typer.Option(help="In place of NAME: a method from `tightframe methods` ...")]
_Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="... on fed_isic2019, eicu or fed_heart_disease. For others: NAME with --set dataset=digits.",
    ),
]
_Contract = Annotated[
    Path | None,
    typer.Option(
        help="... or on the sites' own tables: a data contract, as `tightframe data init` proposes it."
    ),
]
_Preset = Annotated[str, typer.Option(help="rehearsal (minutes on a CPU) or full (GPU, paper scale).")]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Job folder to write: new, or an earlier export of this job; exported/NAME by default.",
    ),
]
_Force = Annotated[
    bool, typer.Option(help="Write the folder even if it holds something else, which is kept as *.before.")
]
_Sites = Annotated[str | None, typer.Option(help="Silo names, separated by commas.")]
_Rounds = Annotated[int | None, typer.Option(help="Training rounds.")]
_MinSites = Annotated[
    int | None, typer.Option(help="Smallest number of contributions; with fewer the run ends.")
]
_Seed = Annotated[int | None, typer.Option(help="Seed of all random streams.")]
_Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs that must be free at each silo (resource_spec); by default 1 for full, else 0."),
]
_GpuMemory = Annotated[int, typer.Option(help="GiB of memory on each of those GPUs.")]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change any job value: --set training.epochs=2 --set method_options.mu_intra=0.2",
    ),
]
_Committed = Annotated[
    bool, typer.Option("--committed", help="Write the committed folder jobs/NAME (for developers).")
]
_Resume = Annotated[
    Path | None,
    typer.Option(help="Continue the stopped run whose server results are in this folder."),
]
_WithdrawFrom = Annotated[
    Path | None,
    typer.Option(
        help="Take records out of the ended run of fed3r, fedcgs or fedncm whose server results are in "
        "this folder."
    ),
]
_Evaluate = Annotated[
    Path | None,
    typer.Option(
        "--evaluate",
        help="Train nothing, and evaluate this model over all silos: a run's results, or with NAME a "
        "safetensors file for that job's network.",
    ),
]

_InitialModel = Annotated[
    Path | None,
    typer.Option(
        help="Start from this safetensors file, checked against the network: sets initial_model_sha256."
    ),
]
_Statistics = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        help="Train nothing, and sum statistics of the sites' own tables by this data contract: Table 1 and "
        "histograms by class.",
    ),
]


@app.command()
def export(
    name: _Name = None,
    method: _Method = None,
    dataset: _Data = None,
    contract: _Contract = None,
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
    withdraw_from: _WithdrawFrom = None,
    evaluate: _Evaluate = None,
    initial_model: _InitialModel = None,
    statistics: _Statistics = None,
) -> None:
    """Write a job folder: configuration only, no code.

    If --set names another method, dataset or model, the recipe's options of the old one are dropped, and
    the command lists them. With --resume the job is the stopped one, unchanged, and NAME is its name or
    recipe; only --output, --force, --gpus and --gpu-memory can be combined with it. The same holds for
    --withdraw-from, where --set withdraw.min_withdrawn=N asks for more withdrawn records. With --evaluate the
    job is the one that trained the model, without training; NAME is for a model from elsewhere. With
    --statistics there is neither method nor model; --set statistics.bins=20 sets the bins of a number,
    statistics.time_bins and statistics.time_ends those of time (`tightframe explain statistics`). A job gets
    an update_norm, as production sites require, unless --set names one or null.
    """
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

    others_of = (statistics, evaluate, resume, withdraw_from)
    if initial_model is not None and any(item is not None for item in others_of):
        raise typer.BadParameter("expected a job that begins to train", param_hint="--initial-model")
    if statistics is not None:
        wrong: dict[str, Any] = {"NAME": name, "--method": method, "--data": dataset, "--contract": contract}
        wrong |= {"--rounds": rounds, "--resume": resume, "--withdraw-from": withdraw_from}
        wrong |= {"--evaluate": evaluate, "--committed": committed or None}
        if unwanted := [option for option, value in wrong.items() if value is not None]:
            raise typer.BadParameter(
                f"nothing is trained: omit {', '.join(unwanted)}", param_hint="--statistics"
            )
        numbers = {"min_sites": min_sites, "seed": seed}
        wanted_values = {key: value for key, value in numbers.items() if value is not None}
        wanted_values |= _changes(change or [])
        _statistics(statistics, _names(sites), wanted_values, output, gpus or 0, gpu_memory, force)
        return
    if evaluate is not None:
        wrong = {"--rounds": rounds, "--resume": resume, "--withdraw-from": withdraw_from}
        wrong |= {"--committed": committed or None}
        if unwanted := [option for option, value in wrong.items() if value is not None]:
            raise typer.BadParameter(
                f"nothing is trained: omit {', '.join(unwanted)}", param_hint="--evaluate"
            )
        if name is None and method is None and (contract or dataset):
            raise typer.BadParameter("expected --method, too: that of the network", param_hint="--evaluate")
        numbers = {"min_sites": min_sites, "seed": seed}
        wanted_values = {key: value for key, value in numbers.items() if value is not None}
        wanted_values |= _changes(change or [])
        selection = None if name is None and method is None else (name, method, dataset, contract, preset)
        _evaluate(evaluate, selection, _names(sites), wanted_values, output, gpus or 0, gpu_memory, force)
        return
    sources = [item for item in (dataset, contract) if item is not None]
    if (name is None) == (method is None or len(sources) != 1) or (name and (method or sources)):
        expected = "expected a job's NAME, or --method with --data or --contract"
        raise typer.BadParameter(expected, param_hint="NAME")
    numbers = {"rounds": rounds, "min_sites": min_sites, "seed": seed}
    if resume is not None or withdraw_from is not None:
        others: dict[str, Any] = {f"--{key.replace('_', '-')}": value for key, value in numbers.items()}
        others = {"--sites": sites} | others | {"--set": change, "--committed": committed or None}
        others |= {"--preset": None if preset == "rehearsal" else preset}
        options: dict[str, Any] = {"gpus": gpus or 0, "gpu_memory": gpu_memory, "force": force}
        if resume is not None:
            _resume(name, resume, output, others | {"--withdraw-from": withdraw_from}, **options)
        elif withdraw_from is not None:
            _withdraw(name, withdraw_from, output, others, **options)
        return
    from tightframe.config.job import NAME
    from tightframe_app.jobs import pairs

    if name is not None:
        recipe = _recipe(name)
    elif contract is not None:
        recipe = pairs.pair_with_contract(str(method), contract)
        if output is not None and re.fullmatch(NAME, output.name):
            recipe = replace(recipe, name=output.name)  # several jobs of one table have their own names
        elif output is not None:
            err.print(
                f"The job's name is {recipe.name}: '{shown(output.name)}' cannot be one (letters, "
                "digits, dots, hyphens and underscores, a letter or digit first, 63 at most)."
            )
    else:
        recipe = pairs.pair(str(method), str(dataset))
    if preset not in recipe.presets:
        raise typer.BadParameter(
            f"expected one of {list(recipe.presets)}, got {preset!r}", param_hint="--preset"
        )
    changes = {key: value for key, value in numbers.items() if value is not None} | _changes(change or [])
    start = None
    if initial_model is not None:
        from tightframe.models.pretrained import read_weights

        start = read_weights(initial_model)
        changes["initial_model_sha256"] = hashlib.sha256(start).hexdigest()
    job = recipe.job(preset, sites=_names(sites), changes=changes)
    if not committed:
        job = recipes.for_production(job, changes)
    notes: Sequence[str] = ()
    if job.initial_model_sha256 is not None:
        from tightframe_app.jobs.evaluating import network

        notes = network(job, start)
    wanted = gpus if gpus is not None else int(preset == "full")
    files = job_folders.job_files(job, gpus=wanted, gpu_memory=gpu_memory)
    if committed:
        files = job_folders.committed_files(job)
    folder = Path("jobs", recipe.name) if committed else output or Path("exported", recipe.name)
    if replaced := job_folders.write_job(files, folder, force=force, anew=committed):
        err.print(replaced)
    if method is not None and (added := pairs.added(job, changes)):
        err.print(f"the method's preset has: {', '.join(recipes.assignments(added))}")
    _print_export(recipe, job, preset, changes, folder)
    if job.initial_model_sha256 is not None:
        from tightframe_app.jobs.evaluating import named_model

        out.print(f"it starts from the model with SHA-256 {job.initial_model_sha256}")
        path = initial_model or Path("/path/to/model.safetensors")
        _print_written("", [*notes, *named_model(path.absolute(), folder)])


def _evaluate(
    place: Path,
    selection: tuple[str | None, str | None, str | None, Path | None, str] | None,
    sites: list[str] | None,
    changes: dict[str, Any],
    output: Path | None,
    gpus: int,
    gpu_memory: int,
    force: bool,
) -> None:
    """Export the job that evaluates a finished model."""
    from tightframe_app.jobs import evaluating
    from tightframe_app.jobs import folders as job_folders

    if selection is None:
        evaluation = evaluating.of_run(place, sites, changes)
    else:
        name, method, dataset, contract, preset = selection
        sources = [item for item in (dataset, contract) if item is not None]
        if not place.is_file():
            raise typer.BadParameter(
                "expected a safetensors file with a job's NAME; a run's own folder says itself which job "
                "trained the model: omit NAME",
                param_hint="--evaluate",
            )
        if (name is None) == (method is None or len(sources) != 1) or (name and (method or sources)):
            expected = "expected a job's NAME, or --method with --data or --contract"
            raise typer.BadParameter(expected, param_hint="NAME")
        from tightframe_app.jobs import pairs

        if name is not None:
            recipe = _recipe(name)
        elif contract is not None:
            recipe = pairs.pair_with_contract(str(method), contract)
        else:
            recipe = pairs.pair(str(method), str(dataset))
        of_network = {key: value for key, value in changes.items() if not key.startswith("privacy")}
        job = recipe.job(preset, sites=sites, changes=of_network)
        evaluation = evaluating.of_file(place, job, changes)
    folder = output or Path("exported", evaluation.job.job_name)
    files = job_folders.job_files(evaluation.job, gpus=gpus, gpu_memory=gpu_memory)
    _print_written(job_folders.write_job(files, folder, force=force), evaluation.lines(folder))


def _statistics(
    contract: Path,
    sites: list[str] | None,
    changes: dict[str, Any],
    output: Path | None,
    gpus: int,
    gpu_memory: int,
    force: bool,
) -> None:
    """Export the job that sums statistics before training."""
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import pairs

    job = pairs.statistics_of(contract, sites, changes)
    folder = output or Path("exported", job.job_name)
    files = job_folders.job_files(job, gpus=gpus, gpu_memory=gpu_memory)
    _print_written(job_folders.write_job(files, folder, force=force), pairs.lines_of_statistics(job, folder))


def _print_written(replaced: str, lines: Iterable[str]) -> None:
    """Print the replaced folder, if any, and a summary of the exported job."""
    if replaced:
        err.print(replaced)
    for line in lines:
        out.print(line)


def _changes(items: list[str]) -> dict[str, Any]:
    """Return the job values in ``--set KEY=VALUE`` options."""
    changes: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise typer.BadParameter(f"expected KEY=VALUE, got {item!r}", param_hint="--set")
        changes[key] = _plain(value)
    return changes


def _names(sites: str | None) -> list[str] | None:
    """Return the silo names in the option ``--sites``."""
    names = None if sites is None else [part.strip() for part in sites.split(",") if part.strip()]
    if names == []:
        raise typer.BadParameter("expected silo names separated by commas, got none", param_hint="--sites")
    return names


def _one_sum(job: JobConfig) -> bool:
    """Check whether records can be withdrawn from a job's runs, apart from how its inputs are scaled."""
    from tightframe import methods

    if job.privacy is not None or job.statistics is not None or job.evaluate_only is not None:
        return False
    return methods.get(job.method).withdraw is not None


def _print_export(recipe: Recipe, job: JobConfig, preset: str, changes: dict[str, Any], folder: Path) -> None:
    """Print a summary of an exported job, and the commands that run it."""
    from tightframe.rounds.privacy_plan import HIDDEN, noise_of_scores
    from tightframe.rounds.setup import prepare
    from tightframe_app.jobs.recipes import assignments

    for kind, keys in recipe.dropped(preset, changes).items():
        err.print(f"{kind} is now {changes[kind]}; dropped options of the recipe: {', '.join(keys)}")
    if adapted := recipe.adapted(preset, changes):
        err.print(f"with privacy the preset has: {', '.join(assignments(adapted))}")
    what = recipe.described(job, preset)
    out.print(
        f"{folder}: {what}; {preset}, {plural(job.rounds, 'round')}, "
        f"{plural(len(job.sites), 'site')}: {', '.join(job.sites)}"
    )
    if what != recipe.title and "job_name" not in changes:
        out.print(f"its results will be named {job.job_name}; --set job_name=NAME gives it another name")
    if job.model_options.get("standardise") and _one_sum(job):
        err.print(
            "no record can be taken out of its model later (withdraw), because each record's features depend "
            "on the moments of all; --set model_options.standardise=false leaves that open, for a model that "
            "can be worse: wide limits then leave a column little weight"
        )
    if job.privacy is None and job.dataset == "table":
        bins, models = job.evaluation.score_bins, len(prepare(job).exactly_evaluated)
        fewer = ", or --set evaluation.models=1" if models > 1 else ""
        err.print(
            f"exact evaluations: {plural(models, 'model')}, {bins} score bins; a site with few validation or "
            "test records refuses so many numbers and says what fits (TF-627): let each run `tightframe site "
            f"check --job`{fewer}"
        )
    noisy = job.privacy is not None and job.privacy.evaluation == "noisy"
    if noisy and (plan := prepare(job).privacy) is not None and plan.evaluation is not None:
        cell, floor = noise_of_scores(job, plan)
        err.print(HIDDEN.format(cell=cell, of="of smaller classes", floor=floor))
    if job.initial_model_sha256 is not None:
        return
    where = quoted(folder)
    out.print(f"run it here:  tightframe simulate {where}")
    out.print("  (on generated records; on the sites' own with --site-config FILE)")
    out.print(f"or at a federation:  tightframe jobs submit {where}")


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
    """Export the job that continues a stopped run."""
    from tightframe_app.jobs import resuming

    if name is None:
        raise typer.BadParameter("expected the stopped job's NAME with it, got none", param_hint="--resume")
    if unwanted := [option for option, value in others.items() if value is not None]:
        raise typer.BadParameter(
            f"a resumed job is the stopped one, unchanged: omit {', '.join(unwanted)}",
            param_hint="--resume",
        )
    folder = output or Path("exported", f"{name}-resumed")
    _print_written(*resuming.export(name, stopped, folder, gpus=gpus, gpu_memory=gpu_memory, force=force))


def _withdraw(
    name: str | None,
    ended: Path,
    output: Path | None,
    others: dict[str, Any],
    *,
    gpus: int,
    gpu_memory: int,
    force: bool,
) -> None:
    """Export the job that withdraws records from an ended run."""
    from tightframe_app.jobs import resuming

    hint = "--withdraw-from"
    if name is None:
        raise typer.BadParameter("expected the ended job's NAME with it, got none", param_hint=hint)
    changes = _changes(others.pop("--set") or [])
    least = changes.pop("withdraw.min_withdrawn", None)
    unwanted = [option for option, value in others.items() if value is not None]
    if unwanted or changes:
        wrong = ", ".join([*unwanted, *(f"--set {key}" for key in changes)])
        raise typer.BadParameter(
            f"the job is the ended one, unchanged but for withdraw.min_withdrawn: omit {wrong}",
            param_hint=hint,
        )
    folder = output or Path("exported", f"{name}-withdrawn")
    _print_written(
        *resuming.export_withdrawal(
            name, ended, folder, least=least, gpus=gpus, gpu_memory=gpu_memory, force=force
        )
    )


@app.command()
def check(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Job folders to validate; the committed ones by default.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Root of the repository.")] = Path("."),
    form: formats.Form = "text",
) -> None:
    """Check that job folders are exactly what an export of their jobs writes.

    A given folder is compared with an export of the job in it; the command also prints the traffic of a
    silo and the signature. Without folders it compares the committed ones with their recipes, and
    restores the simulator's allow list if a crash has lost it.
    """
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

    if form == "json":
        _check_as_json(folders or [], root)
    if not folders:
        problems = _check_committed(root)
        _report(problems, "tightframe jobs export NAME --committed")
        out.print(f"{len(recipes.RECIPES)} job folders are in sync with their recipes")
        return
    problems = []
    for folder in folders:
        differences = job_folders.check_folder(folder)
        problems += differences
        if not differences:
            out.print(f"{folder}: valid")
            out.print(f"{folder}: {job_folders.traffic(folder)}")
            out.print(f"{folder}: {job_folders.signature(folder)}")
    _report(problems, "tightframe jobs export NAME --set KEY=VALUE -o FOLDER")


def _check_as_json(folders: list[Path], root: Path) -> NoReturn:
    """Check job folders, print the result as JSON, and end the command."""
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.outputs import JobFolder, JobFolders

    checked = []
    for folder in folders:
        problems = tuple(job_folders.check_folder(folder))
        facts = {} if problems else {"traffic": str(job_folders.traffic(folder))}
        facts |= {} if problems else {"signature": job_folders.signature(folder)}
        checked.append(JobFolder(folder=str(folder), problems=problems, **facts))
    if not folders:
        checked = [JobFolder(folder=str(root / "jobs"), problems=tuple(_check_committed(root, say=False)))]
    valid = not any(item.problems for item in checked)
    formats.show(JobFolders(valid=valid, folders=tuple(checked)))
    raise typer.Exit(0 if valid else 1)


LeadKit = Annotated[
    Path | None,
    typer.Option(
        help="Startup kit of the lead. By default the one set by `nvflare config use`, else the only "
        "person's kit below kits/."
    ),
]
Days = Annotated[int, typer.Option(help="Days in which sites may accept the job.")]


@app.command()
def sign(
    folder: Annotated[Path, typer.Argument(help="The job folder to sign; it must pass `jobs check`.")],
    kit: LeadKit = None,
    days: Days = 14,
) -> None:
    """Sign a job's files, values, sites and validity with the lead's key, as production sites require.

    A signature is valid for one submission; sign again before another one.
    """
    from tightframe_app.watch import monitoring

    _sign(folder, monitoring.find_kit(kit), days)
    out.print(f"submit it, once:  nvflare job submit -j {quoted(folder)}")


def _startup(kit: Path) -> Path:
    """Return a kit's ``startup``, which may itself be given."""
    return kit if kit.name == "startup" else kit / "startup"


def _sign(folder: Path, kit: Path, days: int) -> Path:
    """Sign a job; return the ``startup`` of the lead's kit."""
    from tightframe.flare.identity import person_identity
    from tightframe_app.jobs import folders as job_folders

    startup = _startup(kit)
    signer, _ = person_identity(startup)
    manifest = job_folders.sign(folder, signer, days=days)
    names = ", ".join(manifest.sites)
    out.print(f"{folder}: signed by {manifest.signer} for {names}, valid until {manifest.expires}")
    return startup


@app.command()
def submit(
    folder: Annotated[Path, typer.Argument(help="The job folder; it must pass `jobs check`.")],
    kit: LeadKit = None,
    days: Days = 14,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for the results: wait until the job is over, fetch them, and verify."),
    ] = None,
) -> None:
    """Sign a job and submit it; with --results also watch, fetch and verify it.

    The job's id is printed as soon as the server has taken it: from then on Ctrl-C ends the watch, and the
    job goes on. The transcript is verified against the root certificate in the lead's kit.

    Exit code 0: submitted; with --results, trained and verified. 1: it stopped, failed or was aborted, or
    it has no valid transcript of this job. 2: not submitted, or the connection was lost. 3: over, but
    whether it trained is not known here. 130: Ctrl-C.
    """
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.watch import monitoring
    from tightframe_app.watch import terminal as watch
    from tightframe_app.watch.status import LostError, WatchError

    server = monitoring.Server(monitoring.find_kit(kit))
    startup = _sign(folder, server.kit, days)
    try:
        try:
            job_id = server.submit(folder)
        except LostError as error:
            after = (
                "`nvflare job list` shows whether it has; a job that has run is signed again before it is "
                "submitted again."
                if server.reached
                else "Nothing was submitted."
            )
            raise WatchError(
                f"Expected the federation's server to take the job, but: {error}. {after}"
            ) from None
        out.print(f"job_id: {job_id}", soft_wrap=True)
        if text := _where_metrics_stay(job_folders.read_job(folder)):
            out.print(text, soft_wrap=True)
        if results is None:
            with contextlib.suppress(LostError, WatchError):  # it is submitted in any case
                for text in server.look(job_id).told:
                    out.print(shown(text), soft_wrap=True)
            out.print(f"watch it:  tightframe watch {job_id}", soft_wrap=True)
            return
        verdict = watch.until_over(server, job_id, results=results)
        if verdict.code not in (watch.TRAINED, 1):
            raise typer.Exit(verdict.code)
        place = _fetched(server, job_id, results)
    finally:
        server.close()
    if verdict.code != watch.TRAINED:
        raise typer.Exit(verdict.code)
    _verify(place, startup, job_id)


def _where_metrics_stay(values: dict[str, Any]) -> str:
    """Say where a private job's test metrics stay; empty if the server gets them."""
    privacy = values.get("privacy")
    if not isinstance(privacy, dict) or privacy.get("evaluation") == "noisy" or values.get("statistics"):
        return ""
    return (
        "test metrics stay at the silos (differential privacy), in each one's local_report.json; "
        "--set privacy.evaluation=noisy has noisy ones at the server, charged"
    )


@app.command()
def fetch(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `jobs submit` printed it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path("results"),
    kit: LeadKit = None,
) -> None:
    """Fetch the results of a job that is over, and verify its transcript.

    Nothing is written outside of the folder, whatever the server says (`nvflare job download` writes where
    the server says). The transcript is verified against the root certificate in the lead's kit.

    Exit code 0: fetched and valid; 1: there is no valid transcript of this job; 2: not fetched.
    """
    from tightframe_app.watch import monitoring
    from tightframe_app.watch.commands import id_of

    job_id = id_of(job)
    server = monitoring.Server(monitoring.find_kit(kit))
    try:
        place = _fetched(server, job_id, output)
    finally:
        server.close()
    _verify(place, _startup(server.kit), job_id)


def _verify(place: Path, startup: Path, job_id: str) -> None:
    """Verify the transcript in a job's results, which must be of that job; exit with 1 without one."""
    from tightframe.results.files import TRANSCRIPT
    from tightframe_app.transcripts import verify_of_job

    if not (transcript := place / TRANSCRIPT).is_file():
        err.print("no transcript: its sums were plain, it ended before the first one, or it was left out")
        raise typer.Exit(1)
    verify_of_job(transcript, startup / "rootCA.pem", job_id)


def _fetched(server: Server, job_id: str, into: Path) -> Path:
    """Fetch a job's results into a folder, and return where they are."""
    from tightframe_app.watch import monitoring
    from tightframe_app.watch.status import LostError, WatchError

    try:
        place = server.download(job_id, into) / monitoring.RESULTS
    except LostError as error:
        raise WatchError(
            f"Expected the server to send the results, but: {error}. If the job is over, fetch them by "
            f"`tightframe jobs fetch {job_id} -o {quoted(into)}`."
        ) from None
    out.print(f"results: {place}", soft_wrap=True)
    _replace_pages(place)
    return place


def _replace_pages(place: Path) -> None:
    """Replace the server's files for a browser, which could contain a program, by a page made here."""
    from tightframe.report import writing

    for path in place.parent.rglob("*"):
        if path.suffix.lower() in _PAGES and not path.is_dir():
            path.unlink()
    try:
        out.print(f"page: {writing.write(place)}", soft_wrap=True)
    except Exception as error:  # the server may have put anything into the files
        err.print(f"no page of these results: {error or type(error).__name__}")


def _check_committed(root: Path, *, say: bool = True) -> list[str]:
    from tightframe.flare.simulation import simulator
    from tightframe_app.jobs import folders as job_folders
    from tightframe_app.jobs import recipes

    if not (root / "jobs").is_dir():
        raise FileNotFoundError(
            f"Expected the root of the repository, but {root / 'jobs'} does not exist: run the command "
            "there, or name the root with --root."
        )
    problems: list[str] = []
    for recipe in recipes.RECIPES:
        problems += job_folders.out_of_sync(
            job_folders.committed_files(recipe.job()), root / "jobs" / recipe.name
        )
    names = {recipe.name for recipe in recipes.RECIPES}
    problems += [
        f"{path} belongs to no recipe" for path in sorted((root / "jobs").iterdir()) if path.name not in names
    ]
    allow_list = root / "simulator_workspace" / "local" / "resources.json"
    if not allow_list.is_file():
        simulator.prepare_workspace(root / "simulator_workspace")
        if say:
            out.print(f"restored {allow_list}")
    elif allow_list.read_text(encoding="utf-8") != simulator.allow_list_text():
        problems.append(f"{allow_list} is not the allow list: delete it, and check again to restore it")
    return problems


def _report(problems: list[str], mend: str) -> None:
    """Print problems and exit with 1, if there are any."""
    if problems:
        for problem in problems:
            err.print(f"out of sync: {problem}")
        err.print(f"write a job folder again with:  {mend}")
        raise typer.Exit(1)


def _recipe(name: str) -> Recipe:
    from tightframe_app.jobs import recipes

    try:
        return recipes.get(name)
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0]), param_hint="NAME") from None


def _plain(text: str) -> Any:
    """Return a value parsed as JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
