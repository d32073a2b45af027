"""Job folders: what a job is to the engine, as plain JSON; with a checkpoint if it goes on with another.

A folder holds configuration only, no code; it is written, read and checked here.
"""

from __future__ import annotations

import difflib
import json
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig
from tightframe.errors import JobError, JobFolderError, ManifestError, RunError
from tightframe.results.files import CHECKPOINT
from tightframe.results.words import dotted
from tightframe.rounds.silo.session import TASKS
from tightframe.securesum.identity import Signer
from tightframe_app.federation.kits import BEFORE
from tightframe_app.jobs.traffic import Traffic, resend_after

CONTROLLER = "tightframe.flare.controller.FederationController"
EXECUTOR = "tightframe.flare.executor.SiloExecutor"
SERVER_FILE = "config/config_fed_server.json"
APPS = ("app_server", "app")
"""Folders of apps; the last one is the silos'."""
CHECKPOINT_FILE = f"app_server/config/{CHECKPOINT}"


def prepared(values: dict[str, Any]) -> JobConfig:
    """The validated job of plain values; this imports torch, which naming recipes must not."""
    from tightframe.rounds.setup import prepare

    return prepare(values).job


def job_files(
    job: JobConfig, *, gpus: int = 0, gpu_memory: int = 8, checkpoint: bytes | None = None
) -> dict[str, str | bytes]:
    """The files of a job folder: relative path -> text, or bytes where it is none.

    Args:
        job: validated.
        checkpoint: of the run that the job goes on with.
        gpus: GPUs that the engine must find free at every silo before the job starts there.
        gpu_memory: GiB of memory on each of them.
    """
    if (job.resume is None) != (checkpoint is None):
        raise ValueError("Expected a checkpoint with a job that goes on with one, and with no other.")
    arguments = job.model_dump(mode="json")
    apps = ("app",) if job.resume is None else ("app_server", "app")
    resources = {"num_of_gpus": gpus, "mem_per_gpu_in_GiB": gpu_memory}
    meta = {
        "name": job.job_name,
        "resource_spec": {site: dict(resources) for site in job.sites} if gpus else {},
        "min_clients": job.min_sites,
        "deploy_map": (
            {"app": ["server", *job.sites]}
            if job.resume is None
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
    again = resend_after(job)
    client = {
        "format_version": 2,
        "get_task_timeout": again,
        "submit_task_result_timeout": again,
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


def write_job(
    files: Mapping[str, str | bytes], folder: Path, *, force: bool = False, anew: bool = False
) -> str:
    """Write a job folder, replacing an earlier export of the same job, and nothing else.

    Args:
        files: relative path -> text or bytes.
        folder: to write.
        force: write it also where the folder holds something else, which is kept beside it.
        anew: the folder is generated, as the committed ones are: whatever its own files hold is replaced,
            without a word.

    Returns:
        What was there and is not any more, for people; empty if nothing was.

    Raises:
        JobFolderError: TF-102, if the folder holds anything else and ``force`` is not given, if what is
            there cannot be kept, or if the folder is the one that this is run in, or holds that. Nothing
            is changed then.
    """
    told = ""
    if folder.is_symlink() or folder.exists():
        if Path.cwd().is_relative_to(folder.resolve()):
            raise JobFolderError(
                f"Expected a folder other than the one that this runs in, or one above it, but got {folder}, "
                "which cannot be replaced from within. Nothing was written."
            )
        if other := _in_the_way(files, folder, anew=anew):
            if not force:
                raise JobFolderError(
                    f"Expected {folder} to be free or an earlier export of the same job, but it {other}. "
                    "Nothing was written: choose another folder with --output, or give --force, which keeps "
                    f"what is there as {_kept(folder)}."
                )
            told = f"{folder} {other}: it is kept as {_keep(folder)}"
        else:
            told = "" if anew else _replaced(files, folder)
            shutil.rmtree(folder)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bytes(content))
    return told


def out_of_sync(files: Mapping[str, str | bytes], folder: Path, *, source: str = "its recipe") -> list[str]:
    """What differs between a folder and the files that it should hold.

    Args:
        files: relative path -> text or bytes.
        folder: to look at.
        source: where the files come from, for the messages.
    """
    problems = []
    for name, content in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.read_bytes() != _bytes(content):
            problems.append(f"{path} differs from {source}")
    problems += [f"{folder / name} does not belong to {source}" for name in _strangers(files, folder)]
    return problems


def check_folder(folder: Path) -> list[str]:
    """What is wrong with an exported job folder beyond its values: each file must be what they give.

    The job is taken from the server's file and the GPUs from ``meta.json``, and the whole folder is
    written once more, in memory: silos with other values, another class or a file of somebody's own
    would otherwise pass.

    Raises:
        JobFolderError: TF-106 if there is no such folder.
        JobError: if it is none of ours, or if its values are wrong.
    """
    job = prepared(read_job(folder))
    gpus, gpu_memory = _resources(folder / "meta.json")
    files = job_files(job, gpus=gpus, gpu_memory=gpu_memory, checkpoint=_checkpoint(job, folder))
    return out_of_sync(files, folder, source="what the job of the server's file gives")


def traffic(folder: Path) -> Traffic:
    """What the job of a folder moves over a silo's line."""
    from tightframe.rounds.setup import prepare

    return Traffic.of(prepare(read_job(folder)))


def read_job(folder: Path) -> dict[str, Any]:
    """The job values of a job folder, as the server would get them.

    Raises:
        JobFolderError: TF-106 if there is no such folder, or no job in it.
        JobError: if it is not one of our job folders.
    """
    path = folder / "app_server" / SERVER_FILE
    path = path if path.is_file() else folder / "app" / SERVER_FILE
    if not path.is_file():
        raise no_job(folder)
    return _arguments(_read_object(path), path)


def no_job(folder: Path) -> JobFolderError:
    """Return what is said of a folder that holds no job, with the name that was probably meant."""
    what = (
        "it has no job in it"
        if folder.is_dir()
        else "there is a file"
        if folder.exists()
        else "there is none"
    )
    places = dict.fromkeys((folder.parent, Path("jobs"), Path("exported")))
    known = [path for place in places if place.is_dir() for path in sorted(place.iterdir()) if _has_job(path)]
    inside = [path for path in sorted(folder.iterdir()) if _has_job(path)] if folder.is_dir() else []
    names = {path.name: path for path in reversed(known)}
    near = inside or [names[name] for name in difflib.get_close_matches(folder.name, list(names), n=1)]
    meant = f" Did you mean {near[0]}?" if near else ""
    there = f" Here are {', '.join(str(path) for path in known[:12])}." if known and not inside else ""
    return JobFolderError(
        f"Expected a job folder at {folder}, but {what}.{meant}{there} "
        "`tightframe jobs export NAME` writes one.",
        code="TF-106",
    )


def _has_job(folder: Path) -> bool:
    return any((folder / app / SERVER_FILE).is_file() for app in APPS)


def _arguments(server: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """The job values in the content of a server's file.

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
    """The checkpoint of a resumed job's folder, if it is the one that the job names.

    Raises:
        JobError: if it is missing, another one, or not of this job.
    """
    if job.resume is None:
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
    """GPUs and GiB of memory on each, as ``meta.json`` asks for them; (0, 8) where it asks for none."""
    wanted = _read_object(path).get("resource_spec") if path.is_file() else None
    for entry in wanted.values() if isinstance(wanted, dict) else []:
        if isinstance(entry, dict):
            gpus, memory = entry.get("num_of_gpus"), entry.get("mem_per_gpu_in_GiB")
            if isinstance(gpus, int) and isinstance(memory, int) and gpus > 0 and memory > 0:
                return gpus, memory
    return 0, 8


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError([f"{path} is not readable JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise JobError([f"Expected {path} to hold a JSON object, but got {type(values).__name__}."])
    return values


def _in_the_way(files: Mapping[str, str | bytes], folder: Path, *, anew: bool) -> str:
    """What keeps a folder from being an earlier export of the job of these files; empty if nothing does."""
    if folder.is_symlink() or not folder.is_dir():
        return "is a link" if folder.is_symlink() else "is a file"
    if strangers := _strangers(files, folder):
        more = "" if len(strangers) <= 3 else f" and {len(strangers) - 3} more"
        return f"holds also {strangers[:3]}{more}"
    if not any(path.is_file() for path in folder.rglob("*")):
        return ""
    try:
        found = read_job(folder)  # any job of the engine's may have files of these names
        named = _read_object(folder / "meta.json").get("name")
    except (JobFolderError, JobError):
        return "holds no whole job export"
    asked = _values(files)
    if named != asked["job_name"]:
        return f"holds the job {named!r}, not {asked['job_name']!r}"
    for key in () if anew else ("method", "dataset"):
        if found.get(key) != asked[key]:
            return f"holds a job {named!r} with the {key} {found.get(key)!r}, not {asked[key]!r}"
    if not anew and _by_hand(folder):
        return f"holds files of the job {named!r} that were changed by hand, or by another version"
    return ""


def _by_hand(folder: Path) -> bool:
    """Whether an export holds anything that its own job does not give."""
    try:
        return bool(check_folder(folder))
    except JobError:
        return True


def _replaced(files: Mapping[str, str | bytes], folder: Path) -> str:
    """What is lost with an earlier export of the same job: the values that differ; empty if nothing is."""
    if not out_of_sync(files, folder):
        return ""
    try:
        before, after = dict(dotted(read_job(folder))), dict(dotted(_values(files)))
    except JobFolderError:
        return ""  # empty folders
    lost = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    told = [f"{key} was {json.dumps(before.get(key))}, is {json.dumps(after.get(key))}" for key in lost]
    what = "; ".join(told) or "the same values, other resources or another checkpoint"
    return f"replaced the earlier export in {folder}: {what}"


def _values(files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """The job values of the files of a job folder."""
    ((name, server),) = (item for item in files.items() if item[0].endswith(SERVER_FILE))
    return _arguments(json.loads(server), name)


def _kept(folder: Path) -> Path:
    """Where what is in the way goes: beside the folder itself."""
    return folder.absolute().with_name(f"{folder.absolute().name}{BEFORE}")


def _keep(folder: Path) -> Path:
    """Move what is in the way aside.

    Raises:
        JobFolderError: TF-102, if it cannot be moved.
    """
    kept = _kept(folder)
    if kept.is_symlink() or kept.exists():
        raise JobFolderError(
            f"Expected to keep what is in {folder} as {kept}, but that is there already: move it. "
            "Nothing was written."
        )
    try:
        folder.absolute().rename(kept)
    except OSError as error:
        raise JobFolderError(
            f"Expected to keep what is in {folder} as {kept}, but got: {error.strerror}. Nothing was written."
        ) from None
    return kept


def _strangers(files: Mapping[str, str | bytes], folder: Path) -> list[str]:
    """What a folder holds beside these files and their folders: files, folders and links."""
    own = {Path(name) for name in files}
    own |= {parent for name in own for parent in name.parents}
    own |= {Path(app) / job_manifest.PLACE for app in APPS if (folder / app).is_dir()}
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink()
        or not (path.relative_to(folder) in own or path.name in job_manifest.ENGINE_FILES)
    )


def sign(folder: Path, signer: Signer, *, days: int = job_manifest.DAYS) -> job_manifest.Manifest:
    """Sign a job folder that is as its values give it; an earlier signature is replaced.

    Args:
        folder: of the job.
        signer: the lead's identity.
        days: for how long sites may take the job up.

    Raises:
        JobFolderError, JobError: see ``check_folder``; JobError also lists what differs.
        ManifestError: TF-634, TF-635; see ``job_manifest.sign``.
    """
    if problems := check_folder(folder):
        raise JobError([f"{problem}: nothing was signed" for problem in problems])
    job, nonce, now = prepared(read_job(folder)), secrets.token_hex(16), datetime.now(UTC)
    apps = [folder / app for app in APPS if (folder / app).is_dir()]
    signed = [job_manifest.sign(app, job, signer, days=days, nonce=nonce, now=now) for app in apps]
    return signed[-1]


def signature(folder: Path) -> str:
    """Say whether a job folder is signed, by whom and until when, in words; not held against any root."""
    try:
        made = job_manifest.read(folder / "app")
    except ManifestError as error:
        if error.code == "TF-633":
            return "not signed; production sites ask for that: tightframe jobs sign FOLDER"
        return str(error)
    return f"signed by {made.signer}, to be taken up until {made.expires}"


def _json(values: Any) -> str:
    return json.dumps(values, indent=2) + "\n"
