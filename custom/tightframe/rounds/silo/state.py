"""What a silo takes over of a stopped job's state when another job goes on with it.

A run begins with no state of its own. A resumed one begins with that of the job it continues: the
method's own (control variates, the last model, a personal head), the noise that was solved and drawn
once. Nothing here needs torch, because it happens at enrolment.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.rounds.context import COMMITTED, DECLARATION, EARLIER, PROPOSED, SALT, SiloContext

RUN = "run.json"
"""Which job a folder of state is of."""
LOST = "lost"
"""Marks a resumed run without the state of the one before; empty until the server tells who took part."""


def begin(context: SiloContext) -> None:
    """Give a run its state folder: empty, or with what the job that it continues has left here.

    Raises:
        RunError: TF-521 if what lies there is of another job, TF-522 if it is of later rounds only.
    """
    folder, resume = context.state_folder, context.job.resume
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    if resume is not None:
        before = context.previous_state
        if before is not None and (before / RUN).is_file():
            _check(context, before)
            # The salt is not: no two jobs repeat a silo's updates bit for bit.
            left_out = shutil.ignore_patterns(SALT, DECLARATION, RUN)
            shutil.copytree(before, partial, ignore=left_out, dirs_exist_ok=True)
            _rewind(partial, resume.after_round)
            context.log.info("%s: took over this silo's state of job %s", context.name, resume.previous)
        else:
            write_atomically(partial / LOST, b"", mode=0o600)
            context.log.warning(
                "%s: no state of job %s lies here: refused if this silo was in it and the method keeps some",
                context.name,
                resume.previous,
            )
    values = {"job_sha256": context.job.anew.sha256(), "lineage": context.job.lineage(context.job_id)}
    write_atomically(partial / RUN, json.dumps(values).encode(), mode=0o600)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def place_of(sum_id: str) -> int:
    """The number of rounds that must be done before a sum is; 0 for all before round 1.

    Raises:
        ValueError: if it is no sum's name.

    >>> place_of("0/before-0/0"), place_of("3/train-1/0"), place_of("4/after-0/0")
    (0, 3, 5)
    """
    number, kind, _ = sum_id.split("/")
    return int(number) + (kind.partition("-")[0] not in ("statistics", "before", "train"))


def trains(sum_id: str) -> bool:
    """Whether a sum is of a training round."""
    return sum_id.split("/")[1].startswith("train-")


def sum_of(path: Path) -> str:
    """The sum with which a stored state was proposed.

    Raises:
        RunError: TF-522 if the file is torn or says none.
    """
    try:
        with safe_open(path, "numpy") as stream:
            sum_id = str((stream.metadata() or {}).get("sum_id"))
        place_of(sum_id)
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise torn(path, error) from None
    return sum_id


def torn(path: Path, error: Exception) -> RunError:
    """What is said of a state that cannot be read."""
    return RunError(
        f"Expected this silo's own state in {path}, but it is torn or none ({type(error).__name__}): restore "
        "it from a backup, or run the job anew.",
        code="TF-522",
    )


def _check(context: SiloContext, before: Path) -> None:
    """What is taken over must be of the same job and chain: a resumed job changes nothing."""
    try:
        found = json.loads((before / RUN).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise torn(before / RUN, error) from None
    if not isinstance(found, dict):
        raise torn(before / RUN, TypeError())
    expected = {"job_sha256": context.job.anew.sha256(), "lineage": context.job.lineage(context.job_id)}
    for key, value in expected.items():
        if found.get(key) != value:
            raise RunError(
                f"Expected this silo's state in {before} to have the {key} {value} of the resumed job, but "
                f"got {str(found.get(key))[:64]}: a resumed job is the stopped one, unchanged.",
                code="TF-521",
            )


def _rewind(folder: Path, after_round: int) -> None:
    """Bring the state to where the server's checkpoint is; what came later is dropped.

    Raises:
        RunError: TF-522 if that state is no more.
    """
    committed, earlier, proposed = (folder / name for name in (COMMITTED, EARLIER, PROPOSED))
    if proposed.is_file() and place_of(sum_of(proposed)) > after_round:
        proposed.unlink()
    if not committed.is_file() or place_of(sum_of(committed)) <= after_round:
        return
    if not earlier.is_file():
        committed.unlink()  # it was this silo's first
        return
    kept = sum_of(earlier)
    if place_of(kept) > after_round:
        raise RunError(
            f"Expected a state of round {after_round} at most, where the checkpoint is, but the earliest "
            f"kept is of the sum {kept}: go on with a later checkpoint.",
            code="TF-522",
        )
    os.replace(earlier, committed)
