"""A resumed job that goes back to an older state, or begins with one state again and again.

Each time it would give one more total of updates from that state, over silos of the server's choice.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.attacks.malicious_server import Federation, hearts
from tests.support.jobs import HEART

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import TightframeError
from tightframe.results.files import CHECKPOINT
from tightframe.results.rows import Row
from tightframe.rounds.context import SiloContext
from tightframe.rounds.server import resume
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import MAX_JOBS_OF_STATE, StateMasked

OWN_SCALE = {"widths": [4], "standardise": False}
JOB = {**HEART, "job_name": "stopped", "method": "fedavg", "model_options": OWN_SCALE, "rounds": 6}


class PulledPlugError(Exception):
    """The server's process ends."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The runs that are stopped here on purpose fill no screen."""
    for name in ("tightframe.run", "tightframe.silo"):
        caplog.set_level(logging.CRITICAL, logger=name)


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers outlive a run, as in production; the simulator has a ledger for each."""
    made = federation.SiloContext

    def context(*arguments: Any, **values: Any) -> SiloContext:
        return made(*arguments, **values, ledger_dir=tmp_path / "ledgers")

    monkeypatch.setattr(federation, "SiloContext", context)


def stopping(folder: Path, number: int) -> Callable[[Row], None]:
    """Stop a run in a round, once its sum is opened; each checkpoint on the way is kept."""

    def stop(row: Row) -> None:
        path = folder / "server" / CHECKPOINT
        if path.is_file():
            kept = folder / f"after-{resume.read(path)[0].described['after_round']}"
            kept.mkdir(exist_ok=True)
            shutil.copy(path, kept / CHECKPOINT)
        if row.kind == "train" and row.round == number:
            raise PulledPlugError

    return stop


def stopped(
    folder: Path, number: int = 5, *, job: JobConfig | None = None, before: Path | None = None
) -> None:
    with pytest.raises(PulledPlugError):
        federation.run_job(
            job or parse_job(JOB), folder=folder, stopped=before, on_round=stopping(folder, number)
        )


def from_round(folder: Path, number: int, to: Path) -> tuple[JobConfig, Path]:
    """The stopped run as of an earlier round, as a lying server shows it, and the job that resumes it."""
    shutil.copytree(folder, to)
    shutil.copy(folder / f"after-{number}" / CHECKPOINT, to / "server" / CHECKPOINT)
    return resume.next_job(to / "server" / CHECKPOINT), to


@pytest.mark.whole
@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_job_does_not_go_back_to_an_older_round(tmp_path: Path, after: int) -> None:
    """Silos verified that state, and gave shares of later ones. The job says so, and a lead has signed it."""
    stopped(tmp_path / "run")
    job, before = from_round(tmp_path / "run", after, tmp_path / "shown")
    assert job.done == after
    with pytest.raises(TightframeError, match="TF-608"):
        federation.run_job(job, folder=tmp_path / "resumed", stopped=before)


@pytest.mark.whole
def test_else_it_would_be_summed_once_more(tmp_path: Path) -> None:
    """Sites that remember nothing, as in the simulator: the round's second total, from the same state."""
    stopped(tmp_path / "run")
    job, before = from_round(tmp_path / "run", 1, tmp_path / "shown")
    found = federation.run_job(job, folder=tmp_path / "resumed", stopped=before)
    assert [row.round for row in found.outcome.rows if row.kind == "train"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.whole
@pytest.mark.usefixtures("lasting")
def test_nor_is_an_older_state_shown_as_that_of_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that the lead signed resumes after the last round; the server begins with another state."""
    stopped(tmp_path / "run")
    job, before = from_round(tmp_path / "run", 4, tmp_path / "shown")
    older = resume.read(tmp_path / "run" / "after-1" / CHECKPOINT)[0].state
    honest = resume.continued

    def lying(*arguments: Any) -> Any:
        stored, saved = honest(*arguments)  # type: ignore[misc]
        return replace(stored, state=older), saved

    monkeypatch.setattr(resume, "continued", lying)
    with pytest.raises(TightframeError, match="TF-608"):
        federation.run_job(job, folder=tmp_path / "lie", stopped=before)
    monkeypatch.setattr(resume, "continued", honest)
    found = federation.run_job(job, folder=tmp_path / "resumed", stopped=before)
    assert found.outcome.rounds_done == 6


@pytest.mark.whole
@pytest.mark.usefixtures("lasting")
def test_a_server_that_lost_its_last_checkpoint_goes_on(tmp_path: Path) -> None:
    """It may stop between the opening of a sum and the checkpoint of the state that it rests on."""
    stopped(tmp_path / "run")
    job, before = from_round(tmp_path / "run", 3, tmp_path / "shown")
    found = federation.run_job(job, folder=tmp_path / "resumed", stopped=before)
    assert found.outcome.rounds_done == 6
    assert "have not verified" not in found.outcome.sums


@pytest.mark.whole
@pytest.mark.usefixtures("lasting")
def test_one_state_is_not_resumed_from_without_end(tmp_path: Path) -> None:
    """The server stops, each time, after the sum that rests on the checkpoint's state, and resumes again."""
    stopped(tmp_path / "run")
    job, before = from_round(tmp_path / "run", 4, tmp_path / "shown")
    for number in range(1, MAX_JOBS_OF_STATE):
        stopped(tmp_path / f"again-{number}", job=job, before=before)
    with pytest.raises(TightframeError, match="TF-608"):
        federation.run_job(job, folder=tmp_path / "once more", stopped=before)


@pytest.mark.whole
def test_nor_in_jobs_whose_terms_are_masked_before_any_is_opened(tmp_path: Path) -> None:
    """The server has jobs resumed at once, and asks for shares once it has all terms."""
    hospitals = hearts(4)
    values = {"rounds": 3, "model_options": {"widths": [4]}, "training": {"learning_rate": 1e-6}}
    run = Federation(values, hospitals, state=tmp_path).enroll()
    run.sum("train", 1)
    begins_with = run.shared
    run.sum("train", 2)
    resumed = {"lineage": "job-a", "previous": "job-a", "after_round": 1, "checkpoint_sha256": "0" * 64}

    def again(number: int) -> Federation:
        job = Federation(
            {**values, "resume": resumed},
            hospitals,
            state=tmp_path,
            job_id=f"again-{number}",
            previous="job-a",
        ).enroll()
        job.shared = begins_with
        session = job.sessions["hospital-1"]
        answer = session.handle

        def masks_only(task: str, message: Any) -> Any:
            if task == "reveal":
                raise PulledPlugError
            return answer(task, message)

        session.handle = masks_only  # type: ignore[method-assign]
        return job

    def masks(job: Federation) -> None:
        with pytest.raises(PulledPlugError):
            job.sum("train", 2)

    *before, last, beside = (again(number) for number in range(MAX_JOBS_OF_STATE))
    for job in before:
        masks(job)
    first = last.sessions["hospital-1"]
    training = first._training()
    honest = training.contribute

    def slowly(*arguments: Any, **options: Any) -> Any:
        made = honest(*arguments, **options)
        masks(beside)
        return made

    training.contribute = slowly  # type: ignore[method-assign]
    with pytest.raises(TightframeError, match="one more job"):
        last.sum("train", 2)
    entries = read_journal(first.context.ledger_paths, check=None)
    begun = {item.job for item in entries if isinstance(item, StateMasked) and item.round == 2}
    assert begun == {"job-a", "again-0", "again-1", beside.job_id}
