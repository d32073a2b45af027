"""Resuming a stopped run: the server saves it after each round, and a later job continues from there.

The engine cannot resume a job. A resumed run is a new job that names the old one, with the old one's
checkpoint beside its configuration; everything else is unchanged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file

from tightframe import __version__
from tightframe.config.job import JobConfig, Resume, parse_job
from tightframe.errors import JobError, RunError
from tightframe.files import file_sha256
from tightframe.learning.one_sum.withdrawal import records_in
from tightframe.phases import ServerState
from tightframe.results.files import BEST
from tightframe.results.model_card import InitialModel
from tightframe.results.rows import Row, write_rows
from tightframe.rounds import checkpoint
from tightframe.rounds.checkpoint import Checkpoint
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.riders import class_rules
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.server.record import RunRecord


class SavedRun(BaseModel):
    """The run so far, as plain values in a checkpoint.

    Attributes:
        job: values of the job, without its own ``resume``.
        job_id: the engine's id of the job that wrote the checkpoint.
        lineage: id of the first job in its chain of resumed jobs.
        version: of the package.
        weights: declared weights of the enrolled silos.
        absent: silo -> code of the silos that did not enrol.
        static_cohort: the cohort for which counts were requested; None before.
        opened: every sum opened so far with its cohort.
        holders: holders of each class in the last opened sum, in old checkpoints whose state lacks them.
        rows: of metrics.
        best: score and round of the best model by validation.
        judges: the silos that evaluated the best model.
        others: the silos that evaluated the latest model, if they are others.
        initial_model: of a pretrained start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    job: dict[str, Any]
    job_id: str
    lineage: str
    version: str
    weights: dict[str, float]
    absent: dict[str, str]
    static_cohort: tuple[str, ...] | None
    opened: list[tuple[str, list[str]]]
    holders: list[float] | None = None
    rows: list[Row]
    best: tuple[float, int] | None
    judges: list[str]
    others: list[str] | None
    initial_model: InitialModel | None


def checkpoint_of(
    record: RunRecord,
    state: ServerState,
    number: int,
    *,
    job_id: str,
    static_cohort: tuple[str, ...] | None,
    opened: list[tuple[str, list[str]]],
) -> Callable[[], None]:
    """Return a writer of a run's checkpoint after a round, with everything that resuming needs.

    Args:
        job_id: the engine's id of this job.
        static_cohort: the cohort for which counts were requested; None before.
        opened: every sum opened so far with its cohort.

    Returns:
        A function that writes the run's current state, even if the run has moved on by then.
    """
    job = record.job
    saved = SavedRun(
        job=job.anew.model_dump(mode="json"),
        job_id=job_id,
        lineage=job.lineage(job_id),
        version=__version__,
        weights={site: record.declared[site].weight for site in record.weights},
        absent=record.absent,
        static_cohort=static_cohort,
        opened=opened,
        rows=list(record.rows),
        best=record.best,
        judges=sorted(record.judges),
        others=None if record.others is None else sorted(record.others),
        initial_model=record.initial_model,
    )
    best = None if record.best is None else load_file(record.folder / BEST)
    run = saved.model_dump(mode="json", by_alias=True)
    return functools.partial(
        checkpoint.save_state,
        record.folder,
        state,
        round_number=number,
        job_sha256=job.sha256(),
        run=run,
        best=best,
    )


def restore(record: RunRecord, stored: Checkpoint, saved: SavedRun, log: logging.Logger) -> None:
    """Fill the record of a resumed run from the stopped one, and log where it continues."""
    done, rounds = record.job.done, record.job.rounds
    log.info(
        "resuming after round %d of %d of job %s (lineage %s)", done, rounds, saved.job_id, saved.lineage
    )
    if saved.version != __version__:
        log.warning(
            "the checkpoint is of tightframe %s, this is %s: the result may differ from an unbroken run's",
            saved.version,
            __version__,
        )
    record.rows = list(saved.rows)
    for row in record.rows:
        record.status = record.status.noted(row)
    record.rounds_done = int(stored.described["after_round"])
    record.initial_model = saved.initial_model
    record.absent = dict(saved.absent)
    record.best, record.judges = saved.best, frozenset(saved.judges)
    record.others = None if saved.others is None else frozenset(saved.others)
    if saved.best is not None:
        checkpoint.save_tensors(record.folder / BEST, stored.best)
    write_rows(record.folder, record.rows)


def read(path: Path) -> tuple[Checkpoint, SavedRun]:
    """Read a checkpoint and its run.

    Raises:
        RunError: TF-507 if it is damaged, TF-521 if another version wrote it or it has no run to resume.
    """
    stored = checkpoint.load_state(path)
    try:
        saved = SavedRun.model_validate(stored.described.get("run"))
        parse_job(saved.job)
        done = stored.described.get("after_round")
        if type(done) is not int or done < 1:
            raise ValueError("after_round")
    except (ValidationError, JobError, ValueError) as error:
        fields = (
            [str(item["loc"][0]) for item in error.errors() if item["loc"]]
            if isinstance(error, ValidationError)
            else [str(error)]
        )
        raise RunError(
            f"Expected {path} to hold a run that can be resumed, but these values are wrong: "
            f"{', '.join(dict.fromkeys(fields)) or 'all'}. Another version of tightframe wrote it.",
            code="TF-521",
        ) from None
    return stored, saved


def continued(job: JobConfig, path: Path | None) -> tuple[Checkpoint, SavedRun] | None:
    """Read the checkpoint and run that a job resumes, or withdraws records from; None for a new job.

    Args:
        path: of the checkpoint that came with the job.

    Raises:
        RunError: TF-507, or TF-521 if it is not the checkpoint that the job names or not of this job.
    """
    resume = job.continues
    if resume is None:
        return None
    if path is None or not path.is_file():
        raise RunError(
            f"Expected the checkpoint of job {resume.previous} with the job that continues it, but got "
            f"none{'' if path is None else f' at {path}'}.",
            code="TF-521",
        )
    sha256 = file_sha256(path)
    if sha256 != resume.checkpoint_sha256:
        raise RunError(
            f"Expected the checkpoint with SHA-256 {resume.checkpoint_sha256} that the job names, but {path} "
            f"has {sha256}: export the job again.",
            code="TF-521",
        )
    stored, saved = read(path)
    if saved.holders is not None:
        stored = replace(stored, state=class_rules.with_holders(stored.state, np.array(saved.holders)))
    done, run = stored.described["after_round"], parse_job(saved.job)
    pairs: dict[str, tuple[Any, Any]] = {
        "lineage": (resume.lineage, saved.lineage),
        "previous": (resume.previous, saved.job_id),
    }
    if isinstance(resume, Resume):
        pairs |= {"after_round": (resume.after_round, done), "job": (job.anew.sha256(), run.sha256())}
    else:
        pairs |= {"after_round": (job.rounds, done), "job": (job.origin.sha256(), run.origin.sha256())}
        pairs["state_sha256"] = (resume.state_sha256, state_sha256(stored.state))
    for key, (expected, got) in pairs.items():
        if expected != got:
            raise RunError(
                f"Expected a checkpoint whose {key} is {expected}, as of the job that continues it, but got "
                f"{got}: a job continues one that is the same but for `resume` and `withdraw`.",
                code="TF-521",
            )
    return stored, saved


def next_job(path: Path) -> JobConfig:
    """Return the job that resumes from a checkpoint.

    Raises:
        RunError: TF-507, TF-521; see ``read``.
        JobError: if the job that wrote it had no id, by which silos find their state.
    """
    stored, saved = read(path)
    resume = {
        "lineage": saved.lineage,
        "previous": saved.job_id,
        "after_round": stored.described["after_round"],
        "checkpoint_sha256": file_sha256(path),
    }
    return parse_job({**saved.job, "resume": resume})


def withdrawal_job(path: Path, least: int | None = None) -> JobConfig:
    """Return the job that withdraws records from the run of a checkpoint.

    Args:
        least: the least number of withdrawn records; None for the default.

    Raises:
        RunError: TF-507, TF-521; see ``read``. TF-521 too if the run keeps no total.
        JobError: if the run has not ended.
    """
    stored, saved = read(path)
    job = parse_job(saved.job)
    require_total(stored.state, str(path))
    if (done := stored.described["after_round"]) != job.rounds:
        raise JobError(
            [f"withdraw: Expected an ended run, but it stopped after round {done} of {job.rounds}"]
        )
    withdraw = {
        "lineage": saved.lineage,
        "previous": saved.job_id,
        "checkpoint_sha256": file_sha256(path),
        "state_sha256": state_sha256(stored.state),
        **({} if least is None else {"min_withdrawn": least}),
    }
    return parse_job({**saved.job, "withdraw": withdraw})


def require_total(state: ServerState, where: str) -> int:
    """Return the number of records in the total that a state keeps.

    Raises:
        RunError: TF-521 if it keeps none.
    """
    if (records := records_in(state)) is None:
        raise RunError(
            f"Expected {where} to hold the total of a run of one sum (fed3r, fedcgs, fedncm), but it holds "
            "none: the run has another method, or is of an earlier version of tightframe, which kept none. "
            "Start a new job without the records instead.",
            code="TF-521",
        )
    return records


def changed_weights(saved: SavedRun, declared: Mapping[str, Declaration]) -> list[str]:
    """Return the silos that declare another weight than in the stopped run: their records have changed."""
    return sorted(
        site for site, item in declared.items() if saved.weights.get(site, item.weight) != item.weight
    )
