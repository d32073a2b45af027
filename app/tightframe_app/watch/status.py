"""A watcher's values of a run, and the verdict at its end; without engine or terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightframe.errors import REASONS, TightframeError
from tightframe.files import quoted
from tightframe.results.files import OUTCOME, ResultsError, parsed, read_bytes
from tightframe.results.outcome import Outcome
from tightframe.results.status import Status
from tightframe.results.words import metric, one_answer

COMPLETED = "FINISHED:COMPLETED"
OVER = "FINISHED"
"""Prefix of the engine's statuses of finished jobs."""
WAITING: Mapping[str, str] = {
    "SUBMITTED": "waiting to be sent to its sites",
    "APPROVED": "waiting to be sent to its sites",
    "DISPATCHED": "being sent to its sites",
    "RUNNING": "starting",
}
"""Engine's status -> our words, for a job without its own status."""
ENDS: Mapping[str, tuple[str, str]] = {
    "FINISHED:ABORTED": ("ABORTED", "somebody, or the engine, ended it before it was done"),
    "FINISHED:EXECUTION_EXCEPTION": ("STOPPED", "it could not go on"),
    "FINISHED:ABNORMAL": ("DIED", "its process at the server ended without a word"),
    "FINISHED:CAN_NOT_SCHEDULE": ("NOT STARTED", "the engine did not find the sites that it needs"),
    "FINISHED:FAILED_TO_RUN": ("NOT STARTED", "it could not be sent to its sites, or not be started there"),
    "FINISHED:ABANDONED": ("ABANDONED", "the server was restarted while it ran"),
}
"""Engine's status of an end without success -> our word and its meaning."""
NEVER_BEGAN = ("FINISHED:CAN_NOT_SCHEDULE", "FINISHED:FAILED_TO_RUN")
"""Ends of jobs that have no result."""
OF_A_RUN: Mapping[str, str] = {
    "TF-500": "the server failed with an error of its own",
    "TF-501": "too few silos",
    "TF-506": "synthetic and real records are mixed",
    "TF-507": "a checkpoint is torn",
    "TF-510": "statistics could not be opened",
}
"""Meaning of codes with which a run stops, and which no silo sends."""
FETCHED = Path("results")
"""Default folder of `tightframe jobs fetch`."""
TRAINED, NOT_TRAINED, NOT_KNOWN = 0, 1, 3
"""Exit codes; 2 is for errors and wrong arguments."""


class WatchError(TightframeError):
    """A run cannot be watched.

    TF-811 no startup kit, TF-812 no connection, TF-813 no such job, TF-814 not allowed,
    TF-815 not understood, TF-817 a result with paths outside of its folder.
    """

    code = "TF-812"


class LostError(Exception):
    """The server did not answer this time; a retry may help."""


class NoOutcomeError(Exception):
    """The outcome of a finished run cannot be read; the message says why.

    Args:
        allowed: whether this person may fetch the result at all.
    """

    def __init__(self, message: str, *, allowed: bool = True) -> None:
        super().__init__(message)
        self.allowed = allowed


@dataclass(frozen=True)
class Seen:
    """The server's answer about a job.

    Attributes:
        engine: the engine's status of the job.
        told: the engine's reasons why it still waits, or was not sent to its sites.
        status: the run's own; None before it has begun and after it is over.
        silent: awaited silo that the server does not hear from -> its last message, in seconds of the
            server's clock; None if it is not registered any more.
    """

    engine: str
    name: str
    told: tuple[str, ...] = ()
    status: Status | None = None
    silent: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Check whether the status is final."""
        return self.engine.startswith(OVER)


@dataclass(frozen=True)
class Verdict:
    """End of a run: the exit code, a title, and lines of detail."""

    code: int
    title: str
    lines: tuple[str, ...]


def read_status(values: Mapping[str, Any]) -> Status:
    """Read the status that the server sent.

    Raises:
        WatchError: TF-815, if this version does not know its form.
    """
    try:
        return Status.checked(dict(values), "the server's answer")
    except ResultsError as error:
        raise WatchError(
            f"{error.args[0]} Use the server's version of Tightframe here.", code="TF-815"
        ) from None


def read_outcome(folder: Path) -> Outcome:
    """Read the outcome of a downloaded result.

    Raises:
        NoOutcomeError: if it cannot be read.
    """
    try:
        return Outcome.checked(parsed(read_bytes(folder / OUTCOME), OUTCOME), OUTCOME)
    except ResultsError as error:
        raise NoOutcomeError(f"its outcome cannot be read: {error.args[0]}") from None


def meaning(code: str) -> str:
    """Return a code with its meaning.

    >>> meaning("TF-502"), meaning("TF-501"), meaning("?")
    ('TF-502 (late)', 'TF-501 (too few silos)', '?')
    """
    words = {**REASONS, **OF_A_RUN}
    return f"{code} ({words[code]})" if code in words else code


def judge(
    job_id: str,
    answer: Seen,
    last: Status | None,
    result: Outcome | NoOutcomeError,
    results: Path | None = None,
) -> Verdict:
    """Judge how a run ended.

    The engine's status is not enough: any job without an error is ``FINISHED:COMPLETED``, and one that has
    trained is ``FINISHED:ABNORMAL`` if a silo's client died. So the run's own outcome decides.

    Args:
        answer: the server's last answer.
        last: the run's own last status, if any.
        result: the run's outcome, or why it could not be read.
        results: folder into which the caller fetches the result of a finished run.
    """
    outcome = result if isinstance(result, Outcome) else None
    allowed = isinstance(result, Outcome) or result.allowed
    into = "" if results is None else f" -o {quoted(results)}"
    by_hand = (f"its result: tightframe jobs fetch {job_id}{into}",) if allowed else ()
    fetch = by_hand if results is None else ()
    if outcome is not None and outcome.trained:
        done = f"{outcome.length} in {outcome.seconds:.0f} s"
        title = outcome.ended.upper()
        lines = (*_reason(outcome, last), *outcome.notes, *_metrics(outcome), *_after(answer), *fetch)
        return Verdict(TRAINED, f"{title}, {done}", lines)
    if answer.engine != COMPLETED:
        on = () if outcome is None else _go_on(job_id, outcome, results)
        return _failed(answer, last, outcome, (*fetch, *on))
    if outcome is not None:
        done = f"{outcome.length} in {outcome.seconds:.0f} s"
        lines = (*_reason(outcome, last), *outcome.notes, *fetch, *_go_on(job_id, outcome, results))
        return Verdict(NOT_TRAINED, f"{outcome.ended.upper()}, {done}", lines)
    if last is not None and last.state in ("trained", "stopped"):
        trained = last.state == "trained"
        note = (f"by the run's own last status; its outcome was not read: {result}",)
        title, code = ("TRAINED", TRAINED) if trained else ("NOT TRAINED", NOT_TRAINED)
        return Verdict(code, title, (*_reason(None, last), *note, *fetch))
    return Verdict(
        NOT_KNOWN,
        "OVER; whether it trained is not known here",
        (f"the engine says {COMPLETED}, which alone does not mean that it trained", str(result), *by_hand),
    )


def _failed(answer: Seen, last: Status | None, outcome: Outcome | None, fetch: tuple[str, ...]) -> Verdict:
    title, means = ENDS.get(answer.engine, (answer.engine, "the engine ended it"))
    lines = [f"{answer.engine}: {means}", *answer.told, *_reason(outcome, last)]
    if outcome is not None:
        lines += [f"{outcome.length} done", *outcome.notes]
    return Verdict(NOT_TRAINED, title, (*lines, *(() if answer.engine in NEVER_BEGAN else fetch)))


def _after(answer: Seen) -> tuple[str, ...]:
    """Describe what the engine did after the run's end, unless it just ended the job."""
    if answer.engine == COMPLETED:
        return ()
    _, means = ENDS.get(answer.engine, ("", "the engine ended it"))
    if answer.engine == "FINISHED:ABNORMAL":
        means = "a client did not report the end of the job"
    return (f"after that the engine called the job {answer.engine} ({means}); its outcome counts",)


def _go_on(job_id: str, outcome: Outcome, results: Path | None) -> tuple[str, ...]:
    """Say how to resume a run that stopped after a complete round."""
    if not outcome.rounds_done:
        return ()
    folder = quoted((results or FETCHED) / job_id)
    command = f"tightframe jobs export {outcome.job_name} --resume {folder} -o resumed"
    once = ", once it is fetched" if results is None else ""
    return (f"to go on after round {outcome.rounds_done}{once}: {command}",)


def _reason(outcome: Outcome | None, last: Status | None) -> list[str]:
    """Say why the run stopped, by its own reason, else by its last code."""
    if outcome is not None:
        return [] if outcome.reason is None else [f"reason: {outcome.reason}"]
    return [] if last is None or last.reason is None else [f"reason: {meaning(last.reason)}"]


def _metrics(outcome: Outcome) -> list[str]:
    lines = []
    test = None if outcome.evaluation is None else outcome.evaluation.test
    if test is not None and test.balanced_accuracy is not None:
        noisy = " (noisy, with differential privacy; in brackets its 95 % interval)" if test.noisy else ""
        lines.append(f"balanced accuracy on the test records: {metric(test, 'balanced_accuracy')}{noisy}")
    if test is not None and (answer := one_answer(test.one_answer)) is not None:
        lines.append(answer)
    if outcome.synthetic:
        lines.append("on the SYNTHETIC TWIN, generated records; no claim about a method is made on it")
    return lines
