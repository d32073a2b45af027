"""Job folders: write, read and check a job in the engine's form, with a checkpoint if it continues a run.

A folder holds configuration as plain JSON, no code.
"""

from __future__ import annotations

import difflib
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig
from tightframe.errors import JobError, JobFolderError, ManifestError, RunError
from tightframe.files import each_once
from tightframe.results.files import CHECKPOINT
from tightframe.results.words import dotted, megabytes
from tightframe.securesum.identity import Signer
from tightframe_app.federation.kits import BEFORE

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup

CONTROLLER = "tightframe.flare.controller.FederationController"
EXECUTOR = "tightframe.flare.executor.SiloExecutor"
SERVER_FILE = "config/config_fed_server.json"
APPS = ("app_server", "app")
"""Folders of the apps, the silos' last."""
SCRIPT = "job.py"
"""Script that runs the job as a recipe; only in committed folders, and never sent to a party."""
CHECKPOINT_FILE = f"app_server/config/{CHECKPOINT}"
"""Path of a continued run's checkpoint, in the server's app, which silos do not get."""
LINE = 10.0
"""Assumed bandwidth of a silo's line, in Mbit/s."""
UNSEEN = 64 * 2**20
"""Bytes of an answer that the engine sends before it waits for an acknowledgement."""


def prepared(values: dict[str, Any]) -> JobConfig:
    """Return the validated job of plain values; imports torch, which listing recipes must not."""
    from tightframe.rounds.setup import prepare

    return prepare(values).job


def job_files(
    job: JobConfig, *, gpus: int = 0, gpu_memory: int = 8, checkpoint: bytes | None = None
) -> dict[str, str | bytes]:
    """Return the files of a job folder: relative path -> text or bytes.

    Args:
        checkpoint: of the run that the job continues.
        gpus: GPUs that must be free at every silo before the job starts there.
        gpu_memory: GiB of memory on each of them.
    """
    if (job.continues is None) != (checkpoint is None):
        raise ValueError("Expected a checkpoint for a job that continues a run, and for no other.")
    arguments = job.model_dump(mode="json")
    apps = ("app",) if job.continues is None else ("app_server", "app")
    resources = {"num_of_gpus": gpus, "mem_per_gpu_in_GiB": gpu_memory}
    meta = {
        "name": job.job_name,
        "resource_spec": {site: dict(resources) for site in job.sites} if gpus else {},
        "min_clients": job.min_sites,
        "deploy_map": (
            {"app": ["server", *job.sites]}
            if job.continues is None
            else {apps[0]: ["server"], "app": list(job.sites)}
        ),
    }
    server = {
        "format_version": 2,
        "server": {"task_request_interval": 0.1},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [
            {
                "id": "federation",
                "path": CONTROLLER,
                "args": arguments,
            }
        ],
    }
    from tightframe.rounds.silo.session import TASKS  # imports the protocol, which listing does not need

    resend = resend_after(job)
    client = {
        "format_version": 2,
        "get_task_timeout": resend,
        "submit_task_result_timeout": resend,
        "executors": [
            {
                "tasks": list(TASKS),
                "executor": {"path": EXECUTOR, "args": arguments},
            }
        ],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    files: dict[str, str | bytes] = {"meta.json": _json(meta)}
    files[f"{apps[0]}/{SERVER_FILE}"] = _json(server)
    files["app/config/config_fed_client.json"] = _json(client)
    if checkpoint is not None:
        files[CHECKPOINT_FILE] = checkpoint
    return files


def committed_files(job: JobConfig) -> dict[str, str | bytes]:
    """Return the files of a committed folder: the job's, and the script that runs it as a recipe."""
    return {**job_files(job), SCRIPT: script(job.job_name)}


def script(name: str) -> str:
    """Return the script that runs a named job as a recipe of the engine."""
    return f'''"""Run {name} as a recipe: ``python jobs/{name}/job.py [--export --export-dir FOLDER]``."""

from nvflare.recipe import SimEnv

from tightframe_app.recipes import Recipe

if __name__ == "__main__":
    recipe = Recipe("{name}")
    run = recipe.execute(SimEnv(clients=list(recipe.job.sites)))
    print("results:", run.get_result())
'''


def write_job(
    files: Mapping[str, str | bytes], folder: Path, *, force: bool = False, anew: bool = False
) -> str:
    """Write a job folder; replace an earlier export of the same job, and nothing else.

    Args:
        files: relative path -> text or bytes.
        force: write it even if the folder holds something else, which is kept beside it.
        anew: replace the files of a generated folder, such as a committed one, without reporting it.

    Returns:
        A description of replaced or moved content, to print; empty if there was none.

    Raises:
        JobFolderError: TF-102, without changes, if the folder holds anything else and ``force`` is not given,
            if its content cannot be kept, or if it is the current folder or one above it.
    """
    replaced = ""
    if folder.is_symlink() or folder.exists():
        if Path.cwd().is_relative_to(folder.resolve()):
            raise JobFolderError(
                f"Expected a folder other than the current one and those above it, but got {folder}, which "
                "cannot be replaced from within: run the command elsewhere. Nothing was written."
            )
        if other := _in_the_way(files, folder, anew=anew):
            if not force:
                raise JobFolderError(
                    f"Expected {folder} to be free or an earlier export of the same job, but it {other}. "
                    "Nothing was written: choose another folder with --output, or give --force, which keeps "
                    f"the present content as {_aside(folder)}."
                )
            replaced = f"{folder} {other}: it is kept as {_move_aside(folder)}"
        else:
            replaced = "" if anew else _replaced(files, folder)
            shutil.rmtree(folder)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bytes(content))
    return replaced


def out_of_sync(files: Mapping[str, str | bytes], folder: Path, *, source: str = "its recipe") -> list[str]:
    """Describe the differences between a folder and the files that it should hold.

    Args:
        files: relative path -> text or bytes.
        source: origin of the files, for the messages.
    """
    problems = []
    for name, content in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.read_bytes() != _bytes(content):
            problems.append(f"{path} differs from {source}")
    problems += [f"{folder / name} does not belong to {source}" for name in _unlisted(files, folder)]
    return problems


def check_folder(folder: Path, *, to_sign: bool = False) -> list[str]:
    """Describe the files of an exported job folder that differ from an export of its own job.

    The job is read from the server's file and the GPUs from ``meta.json``, and exported again in memory. This
    detects silos with other values, another class, and added files.

    Args:
        to_sign: also refuse the script of a committed folder, as a signed folder is submitted whole.

    Raises:
        JobFolderError: TF-106 if there is no such folder.
        JobError: if it is not a job folder of this package, or if its values are wrong.
    """
    job = prepared(read_job(folder))
    gpus, gpu_memory = _resources(folder / "meta.json")
    files = job_files(job, gpus=gpus, gpu_memory=gpu_memory, checkpoint=_checkpoint(job, folder))
    if not to_sign and (folder / SCRIPT).is_file():
        files[SCRIPT] = script(job.job_name)
    return out_of_sync(files, folder, source="an export of the server's job")


def traffic(folder: Path) -> Traffic:
    """Return a silo's network traffic in a folder's job."""
    from tightframe.rounds.setup import prepare

    return Traffic.of(prepare(read_job(folder)))


def read_job(folder: Path) -> dict[str, Any]:
    """Return a job folder's job values, as the server reads them.

    Raises:
        JobFolderError: TF-106 if there is no such folder, or no job in it.
        JobError: if it is not a job folder of this package.
    """
    path = folder / "app_server" / SERVER_FILE
    path = path if path.is_file() else folder / "app" / SERVER_FILE
    if not path.is_file():
        raise no_job(folder)
    return _arguments(_read_object(path), path)


def no_job(folder: Path) -> JobFolderError:
    """Return the error for a folder without a job, with the closest match."""
    what = (
        "it has no job in it" if folder.is_dir() else "it is a file" if folder.exists() else "there is none"
    )
    places = dict.fromkeys((folder.parent, Path("jobs"), Path("exported")))
    jobs = [path for place in places if place.is_dir() for path in sorted(place.iterdir()) if _has_job(path)]
    inside = [path for path in sorted(folder.iterdir()) if _has_job(path)] if folder.is_dir() else []
    names = {path.name: path for path in reversed(jobs)}
    near = inside or [names[name] for name in difflib.get_close_matches(folder.name, list(names), n=1)]
    suggestion = f" Did you mean {near[0]}?" if near else ""
    listing = f" Known: {', '.join(str(path) for path in jobs[:12])}." if jobs and not inside else ""
    return JobFolderError(
        f"Expected a job folder at {folder}, but {what}.{suggestion}{listing} "
        "`tightframe jobs export NAME` writes one.",
        code="TF-106",
    )


def _has_job(folder: Path) -> bool:
    return any((folder / app / SERVER_FILE).is_file() for app in APPS)


def _arguments(server: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """Return the job values in the content of a server's file.

    Raises:
        JobError: if it has none.
    """
    workflows = server.get("workflows", [])
    for workflow in workflows if isinstance(workflows, list) else []:
        if isinstance(workflow, dict) and workflow.get("path") == CONTROLLER:
            arguments = workflow.get("args", {})
            if isinstance(arguments, dict):
                return arguments
    raise JobError([f"Expected {path} to have a workflow {CONTROLLER} with its arguments, but got none."])


def _checkpoint(job: JobConfig, folder: Path) -> bytes | None:
    """Return the checkpoint in the folder of a job that continues a run; None for a new job.

    Raises:
        JobError: if it is missing, not the job's, or of another job.
    """
    if job.continues is None:
        return None
    from tightframe.rounds.server import resume

    try:
        resume.continued(job, folder / CHECKPOINT_FILE)
    except RunError as error:
        raise JobError([str(error)]) from None
    return (folder / CHECKPOINT_FILE).read_bytes()


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def _resources(path: Path) -> tuple[int, int]:
    """Return the GPUs that ``meta.json`` asks for, and the GiB of memory on each; (0, 8) for none."""
    wanted = _read_object(path).get("resource_spec") if path.is_file() else None
    for entry in wanted.values() if isinstance(wanted, dict) else []:
        if isinstance(entry, dict):
            gpus, memory = entry.get("num_of_gpus"), entry.get("mem_per_gpu_in_GiB")
            if isinstance(gpus, int) and isinstance(memory, int) and gpus > 0 and memory > 0:
                return gpus, memory
    return 0, 8


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=each_once)
    except (OSError, ValueError) as error:
        raise JobError([f"{path} is not readable JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise JobError([f"Expected {path} to hold a JSON object, but got {type(values).__name__}."])
    return values


def _in_the_way(files: Mapping[str, str | bytes], folder: Path, *, anew: bool) -> str:
    """Say why a folder is not an earlier export of these files' job; empty if it is one."""
    if folder.is_symlink() or not folder.is_dir():
        return "is a link" if folder.is_symlink() else "is a file"
    if unlisted := _unlisted(files, folder):
        more = "" if len(unlisted) <= 3 else f" and {len(unlisted) - 3} more"
        return f"also holds {unlisted[:3]}{more}"
    if not any(path.is_file() for path in folder.rglob("*")):
        return ""
    try:
        present = read_job(folder)  # any engine's job may have files of these names
        present_name = _read_object(folder / "meta.json").get("name")
    except (JobFolderError, JobError):
        return "holds no complete job export"
    expected = _values(files)
    if present_name != expected["job_name"]:
        return f"holds the job {present_name!r}, not {expected['job_name']!r}"
    for key in () if anew else ("method", "dataset"):
        if present.get(key) != expected[key]:
            return f"holds a job {present_name!r} with the {key} {present.get(key)!r}, not {expected[key]!r}"
    if not anew and _edited(folder):
        return f"holds files of the job {present_name!r} that were edited, or written by another version"
    return ""


def _edited(folder: Path) -> bool:
    """Check whether an export differs from a new export of its own job."""
    try:
        return bool(check_folder(folder))
    except JobError:
        return True


def _replaced(files: Mapping[str, str | bytes], folder: Path) -> str:
    """Describe the values that a new export of the same job changes; empty if none."""
    if not out_of_sync(files, folder):
        return ""
    try:
        before, after = dict(dotted(read_job(folder))), dict(dotted(_values(files)))
    except JobFolderError:
        return ""  # empty folders
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    changed = [f"{key} was {json.dumps(before.get(key))}, is {json.dumps(after.get(key))}" for key in keys]
    what = "; ".join(changed) or "the same values, other resources or another checkpoint"
    return f"replaced the earlier export in {folder}: {what}"


def _values(files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return the job values in the files of a job folder."""
    ((name, server),) = (item for item in files.items() if item[0].endswith(SERVER_FILE))
    return _arguments(json.loads(server), name)


def _aside(folder: Path) -> Path:
    """Return the path beside a folder to which its present content is moved."""
    return folder.absolute().with_name(f"{folder.absolute().name}{BEFORE}")


def _move_aside(folder: Path) -> Path:
    """Move a folder's present content aside, and return its new path.

    Raises:
        JobFolderError: TF-102, if it cannot be moved.
    """
    aside = _aside(folder)
    if aside.is_symlink() or aside.exists():
        raise JobFolderError(
            f"Expected to move the content of {folder} to {aside}, but that exists already: move it away. "
            "Nothing was written."
        )
    try:
        folder.absolute().rename(aside)
    except OSError as error:
        raise JobFolderError(
            f"Expected to move the content of {folder} to {aside}, but got: {error.strerror}. Nothing was "
            "written: give the account the right to move it, or choose another folder with --output."
        ) from None
    return aside


def _unlisted(files: Mapping[str, str | bytes], folder: Path) -> list[str]:
    """Return the entries of a folder other than these files and their folders."""
    expected = {Path(name) for name in files}
    expected |= {parent for name in expected for parent in name.parents}
    expected |= {Path(app) / job_manifest.PLACE for app in APPS if (folder / app).is_dir()}
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink()
        or not (path.relative_to(folder) in expected or path.name in job_manifest.ENGINE_FILES)
    )


def sign(folder: Path, signer: Signer, *, days: int = job_manifest.DAYS) -> job_manifest.Manifest:
    """Sign a job folder that matches an export of its job; replace an earlier signature.

    Args:
        signer: the lead's identity.
        days: number of days in which sites may accept the job.

    Raises:
        JobFolderError, JobError: see ``check_folder``; JobError also lists differing files.
        ManifestError: TF-634, TF-635; see ``job_manifest.sign``.
    """
    if problems := check_folder(folder, to_sign=True):
        raise JobError([f"{problem}: nothing was signed" for problem in problems])
    job, nonce, now = prepared(read_job(folder)), secrets.token_hex(16), datetime.now(UTC)
    apps = [folder / app for app in APPS if (folder / app).is_dir()]
    signed = [job_manifest.sign(app, job, signer, days=days, nonce=nonce, now=now) for app in apps]
    return signed[-1]


def signature(folder: Path) -> str:
    """Describe a job folder's signature: signer and expiry, not verified against any root certificate."""
    try:
        manifest = job_manifest.read(folder / "app")
    except ManifestError as error:
        if error.code == "TF-633":
            return "not signed; production sites require it: tightframe jobs sign FOLDER"
        return str(error)
    return f"signed by {manifest.signer}, valid until {manifest.expires}"


def _json(values: Any) -> str:
    return json.dumps(values, indent=2) + "\n"


def resend_after(job: JobConfig) -> int:
    """Return the seconds after which a silo resends an answer lost with its connection.

    The engine's default of 300 s can exceed a silo's time for the whole task.
    """
    return max(5, job.site_timeout // 3)


@dataclass(frozen=True)
class Traffic:
    """Network traffic of one task of a silo.

    Attributes:
        down: bytes of the largest total, from which a silo computes the run's next state.
        up: bytes of the largest term.
        site_timeout: seconds that the silo has for the task.
        again: seconds after which it resends its answer.
    """

    down: int
    up: int
    site_timeout: int
    again: int

    @classmethod
    def of(cls, setup: JobSetup) -> Traffic:
        """Return a job's traffic from its declared schemas, with evaluation, without a few KB of protocol."""
        sizes = [
            sum(item.bytes for item in phase.schema.fields)
            for exchange in setup.plan
            for phase in exchange.phases
        ]
        return cls(
            down=max(sizes),
            up=max(sizes),
            site_timeout=setup.job.site_timeout,
            again=resend_after(setup.job),
        )

    def seconds(self, line: float = LINE) -> float:
        """Return the seconds of a task's transfers on a line of ``line`` Mbit/s."""
        return 8 * (self.down + self.up) / (line * 1e6)

    @property
    def slowest(self) -> float:
        """Return the least bandwidth of a line, in Mbit/s.

        On a slower one the transfer takes more than half of the silo's time, or the silo takes its answer for
        lost and resends it.
        """
        resent = min(self.up, UNSEEN) / self.again
        return 8 * max(resent, 2 * (self.down + self.up) / self.site_timeout) / 1e6

    def __str__(self) -> str:
        """Describe the traffic in one line."""
        moves = f"a task moves up to {megabytes(self.down)} MB to a silo and {megabytes(self.up)} MB back"
        takes = f"{self.seconds():.1f} s of its {self.site_timeout} s on a line of {LINE:g} Mbit/s"
        text = f"{moves}: {takes}"
        if self.slowest > LINE / 2:
            text += f"; raise `site_timeout`, or ensure that no line is slower than {self.slowest:.1f} Mbit/s"
        return text
