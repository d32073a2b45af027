"""Going on with a stopped run: what the server keeps for it after each round, and how it is taken up again.

The engine does not resume a job. A resumed run is a new job that names the old one, with the old one's
checkpoint beside its configuration; everything else of it is as it was.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from safetensors.torch import load_file

from tightframe import __version__
from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import JobError, RunError
from tightframe.phases import ServerState
from tightframe.results.exchanges import Row, write_rows
from tightframe.results.files import BEST
from tightframe.results.model_card import InitialModel
from tightframe.rounds import checkpoint
from tightframe.rounds.checkpoint import Checkpoint
from tightframe.rounds.riders import class_rules, epsilon
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.sums.declaration import Declaration


class Kept(BaseModel):
    """The run so far, as plain values in a checkpoint.

    Attributes:
        job: values of the job, without what it went on with itself.
        job_id: the engine's id of the job that wrote it.
        lineage: of the first job of its chain.
        version: of the package.
        weights: declared weights of the silos enrolled; ``absent`` has those that were not, with codes.
        static_cohort: for whom counts were asked for.
        opened: every sum opened so far with its cohort.
        holders: of each class, in the last opened sum; of checkpoints that do not have them in the state.
        rows: of metrics; checkpoints of format 2 have them in another form.
        best: score and round of the best model by validation; ``judges`` and ``others`` counted it and the
            latest model.
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

    @field_validator("rows", mode="before")
    @classmethod
    def _of_format_2(cls, rows: Any) -> Any:
        """Bring the rows of an older checkpoint into today's form."""
        return [_brought_up(row) for row in rows] if isinstance(rows, list) else rows


def _brought_up(row: Any) -> Any:
    """Return a row of format 2 with today's keys; any other as it is.

    Raises:
        ValueError: if what it says of epsilon cannot be read.
    """
    if not isinstance(row, dict) or "format" in row:
        return row
    values = {**row, "static_opened": not row.get("shut", False)}
    if isinstance(seconds := row.get("seconds"), float):
        values["seconds"] = round(seconds, 3)
    if (spent := values.pop("spent", None)) is not None:
        keys = ("round", "promised", "delta", "silos", "bins", "shown")
        try:
            values["privacy"] = epsilon.spent(*(spent[key] for key in keys))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"of round {row.get('round')}: {type(error).__name__}") from None
    return values


def save(
    record: RunRecord,
    state: ServerState,
    number: int,
    *,
    job_id: str,
    static_cohort: tuple[str, ...] | None,
    opened: list[tuple[str, list[str]]],
) -> None:
    """Checkpoint a run after a round, with everything that going on from there needs."""
    job = record.job
    kept = Kept(
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
    run = kept.model_dump(mode="json", by_alias=True)
    checkpoint.save_state(
        record.folder, state, round_number=number, job_sha256=job.sha256(), run=run, best=best
    )


def restore(record: RunRecord, found: Checkpoint, kept: Kept, log: logging.Logger) -> None:
    """Give a record what the jobs before have put into theirs; say what goes on."""
    done, rounds = record.job.done, record.job.rounds
    log.info("going on after round %d of %d of job %s (lineage %s)", done, rounds, kept.job_id, kept.lineage)
    if kept.version != __version__:
        log.warning(
            "the checkpoint is of tightframe %s, this is %s: an unbroken run may end otherwise",
            kept.version,
            __version__,
        )
    record.rows = list(kept.rows)
    record.rounds_done = int(found.described["after_round"])
    record.initial_model = kept.initial_model
    record.absent = dict(kept.absent)
    record.best, record.judges = kept.best, frozenset(kept.judges)
    record.others = None if kept.others is None else frozenset(kept.others)
    if kept.best is not None:
        checkpoint.save_tensors(record.folder / BEST, found.best)
    write_rows(record.folder, record.rows)


def read(path: Path) -> tuple[Checkpoint, Kept]:
    """A checkpoint and the run that it is of.

    Raises:
        RunError: TF-507 if it is torn, TF-521 if it is of another version or has no run to go on with.
    """
    found = checkpoint.load_state(path)
    try:
        kept = Kept.model_validate(found.described.get("run"))
        parse_job(kept.job)
        done = found.described.get("after_round")
        if type(done) is not int or done < 1:
            raise ValueError("after_round")
    except (ValidationError, JobError, ValueError) as error:
        wrong = (
            [str(item["loc"][0]) for item in error.errors() if item["loc"]]
            if isinstance(error, ValidationError)
            else [str(error)]
        )
        raise RunError(
            f"Expected {path} to hold a run that can go on, but these values are wrong: "
            f"{', '.join(dict.fromkeys(wrong)) or 'all'}. Another version of tightframe wrote it.",
            code="TF-521",
        ) from None
    return found, kept


def continued(job: JobConfig, path: Path | None) -> tuple[Checkpoint, Kept] | None:
    """What a job goes on with; None for a job that begins anew.

    Args:
        job: validated.
        path: of the checkpoint that came with it.

    Raises:
        RunError: TF-507, or TF-521 if it is not the checkpoint that the job names or not of this job.
    """
    resume = job.resume
    if resume is None:
        return None
    if path is None or not path.is_file():
        raise RunError(
            f"Expected the checkpoint of job {resume.previous} with a job that goes on with it, but got "
            f"none{'' if path is None else f' at {path}'}.",
            code="TF-521",
        )
    found = file_sha256(path)
    if found != resume.checkpoint_sha256:
        raise RunError(
            f"Expected the checkpoint with SHA-256 {resume.checkpoint_sha256} that the job names, but {path} "
            f"has {found}: export the job again.",
            code="TF-521",
        )
    loaded, kept = read(path)
    if kept.holders is not None:
        loaded = replace(loaded, state=class_rules.remembering(loaded.state, np.array(kept.holders)))
    pairs = {
        "lineage": (resume.lineage, kept.lineage),
        "previous": (resume.previous, kept.job_id),
        "after_round": (resume.after_round, loaded.described["after_round"]),
        "job": (job.anew.sha256(), parse_job(kept.job).sha256()),
    }
    for key, (expected, got) in pairs.items():
        if expected != got:
            raise RunError(
                f"Expected a checkpoint whose {key} is the resumed job's, {expected}, but got {got}: "
                "a resumed job is the stopped one, unchanged.",
                code="TF-521",
            )
    return loaded, kept


def next_job(path: Path) -> JobConfig:
    """The job that goes on from a checkpoint.

    Raises:
        RunError: TF-507, TF-521; see ``read``.
        JobError: if the job that wrote it had no id by which silos could find their state.
    """
    found, kept = read(path)
    resume = {
        "lineage": kept.lineage,
        "previous": kept.job_id,
        "after_round": found.described["after_round"],
        "checkpoint_sha256": file_sha256(path),
    }
    return parse_job({**kept.job, "resume": resume})


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def changed_weights(kept: Kept, declared: Mapping[str, Declaration]) -> list[str]:
    """Silos that declare another weight than in the jobs before: their records are others."""
    return sorted(
        site for site, item in declared.items() if kept.weights.get(site, item.weight) != item.weight
    )
