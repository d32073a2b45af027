"""Export of the job that continues a run from its server's results, to resume it or to withdraw records."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tightframe.config.job import JobConfig
from tightframe.config.site import FILE_NAME, MARKER
from tightframe.errors import JobError
from tightframe.files import quoted
from tightframe.results.files import CHECKPOINT, OUTCOME
from tightframe.results.outcome import Outcome
from tightframe.results.parts.withdrawal import not_covered
from tightframe.results.words import plural
from tightframe.rounds import checkpoint
from tightframe.rounds.server import resume
from tightframe_app.jobs import folders, recipes

PLACES = (
    ".",
    "workspace",
    "server/simulate_job",
    "server",
    "app_server/config",
    "workspace/app_server/config",
)
"""Folders of a run's checkpoint: the server's results, a downloaded job, a simulator's workspace; last, that
of the checkpoint that the run itself continued, if it stopped before completing a round."""


def export(
    name: str, stopped: Path, folder: Path, *, gpus: int = 0, gpu_memory: int = 8, force: bool = False
) -> tuple[str, list[str]]:
    """Write the folder of a job that continues a stopped run.

    Args:
        name: of the job, or of its recipe, against continuing another run by mistake.
        stopped: the stopped run's server results, or a downloaded job with them.
        gpus: as in ``folders.job_files``; the stopped job's are not recorded.
        gpu_memory: likewise.
        force: as in ``folders.write_job``.

    Returns:
        A description of replaced content, possibly empty, and the lines to print about the job.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        RunError: TF-507, TF-521; see ``rounds.server.resume.read``.
        ResultsError: TF-802 if its outcome cannot be read.
        JobError: if the run is another job's, or finished.
        JobFolderError: TF-102; see ``folders.write_job``.
    """
    path = find(stopped)
    job = resume.next_job(path)
    if not _is_called(name, job):
        raise JobError([f"Expected the run in {stopped} to be of {name!r}, but it is of {job.job_name!r}"])
    if any(_finished(place) for place in (path.parent, path.resolve().parents[2])):
        raise JobError([f"there is nothing left to do: the run in {stopped} is complete"])
    workspace, site_config = _simulated(path, job)
    option = "" if site_config is None else f" --site-config {quoted(site_config)}"
    previous = "OLD_WORKSPACE" if workspace is None else quoted(workspace)
    files = folders.job_files(job, gpus=gpus, gpu_memory=gpu_memory, checkpoint=path.read_bytes())
    replaced = folders.write_job(files, folder, force=force)
    assert job.resume is not None  # noqa: S101 - set in a job that continues a run
    left = job.rounds - job.done
    where = quoted(folder)
    return replaced, [
        f"{folder}: {job.job_name} continues after round {job.done} of {job.rounds}",
        f"{plural(job.done, 'round')} done, {plural(left, 'round')} left, then the closing phase",
        f"continues job {job.resume.previous}; the first of its chain is {job.resume.lineage}",
        f"run it here:  tightframe simulate {where} --previous-run {previous}{option}",
        f"or at the consortium's server:  tightframe jobs submit {where}",
    ]


def export_withdrawal(
    name: str,
    ended: Path,
    folder: Path,
    *,
    least: int | None = None,
    gpus: int = 0,
    gpu_memory: int = 8,
    force: bool = False,
) -> tuple[str, list[str]]:
    """Write the folder of a job that withdraws records from an ended run.

    Args:
        name: as in ``export``.
        ended: the server's results of the ended run.
        least: ``withdraw.min_withdrawn``; None for the default.
        gpus: as in ``export``.
        gpu_memory: likewise.
        force: likewise.

    Returns:
        As ``export``.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        RunError: TF-507, TF-521; see ``rounds.server.resume.withdrawal_job``.
        JobError: if the run is another job's, has not ended, or does not allow withdrawals.
        JobFolderError: TF-102; see ``folders.write_job``.
    """
    path = find(ended)
    job = folders.prepared(resume.withdrawal_job(path, least).model_dump(mode="json"))
    if not _is_called(name, job):
        raise JobError([f"Expected the run in {ended} to be of {name!r}, but it is of {job.job_name!r}"])
    assert job.withdraw is not None  # noqa: S101 - set in a job that withdraws
    stored, _ = resume.read(path)
    records = resume.require_total(stored.state, str(path))
    files = folders.job_files(job, gpus=gpus, gpu_memory=gpu_memory, checkpoint=path.read_bytes())
    replaced = folders.write_job(files, folder, force=force)
    workspace, _ = _simulated(path, job)
    previous = "WORKSPACE" if workspace is None else quoted(workspace)
    where = quoted(folder)
    model = hashlib.sha256(checkpoint.tensor_bytes(stored.state.model)).hexdigest()
    others = not_covered(path.parent.parent, job.withdraw.lineage, [model], path.parent)
    return replaced, [
        f"{folder}: {job.job_name} without the records that each site names in its own file (`withdrawn`)",
        f"withdraws from job {job.withdraw.previous}, whose total is of {plural(records, 'record')}; "
        f"at least {job.withdraw.min_withdrawn} must be withdrawn, at three silos or more",
        *(f"will NOT be covered: {item.job_name} in {item.folder} ({item.how})" for item in others),
        f"run it here:  tightframe simulate {where} --previous-run {previous} --site-config FILE",
        f"or at the consortium's server:  tightframe jobs submit {where}",
    ]


def find(folder: Path) -> Path:
    """Return the checkpoint in a run's folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    for place in PLACES:
        path = folder / place / CHECKPOINT
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"Expected {folder} to hold the server's results of a run with {CHECKPOINT}, but there is none: "
        "start a run that stopped before completing its first round from the beginning."
    )


def _simulated(checkpoint: Path, job: JobConfig) -> tuple[Path | None, Path | None]:
    """Return a run's simulator workspace and site configuration.

    The engine copies the workspace's ``local`` folder to every site, with the marker that names the
    configuration. Either is None if missing, as in a consortium's run.
    """
    for folder in list(checkpoint.absolute().parents)[:5]:
        local = next(
            (folder / site / "local" for site in job.roster if (folder / site / "local").is_dir()), None
        )
        if local is None:
            continue
        workspace = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
        if not (local / FILE_NAME).is_file():
            return workspace, None
        try:
            return workspace, Path((local / MARKER).read_text(encoding="utf-8").splitlines()[1])
        except (OSError, UnicodeError, IndexError):
            return workspace, workspace / "local" / FILE_NAME  # the workspace's own
    return None, None


def _is_called(name: str, job: JobConfig) -> bool:
    if name == job.job_name:
        return True
    recipe_values = [recipe.values for recipe in recipes.RECIPES if recipe.name == name]
    return any(
        values["method"] == job.method and values["dataset"] == job.dataset for values in recipe_values
    )


def _finished(results: Path) -> bool:
    if not (results / OUTCOME).is_file():
        return False
    outcome = Outcome.read(results)
    return outcome.trained and outcome.reason is None
