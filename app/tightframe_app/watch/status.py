"""What a watcher knows of a run, and what that means at its end: values, without engine or terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tightframe.errors import REASONS, TightframeError
from tightframe.report.words import metric, one_answer, plural

COMPLETED = "FINISHED:COMPLETED"
OVER = "FINISHED"
"""How the engine's words for a job that is over begin."""
WAITING: Mapping[str, str] = {
    "SUBMITTED": "waiting to be sent to its sites",
    "APPROVED": "waiting to be sent to its sites",
    "DISPATCHED": "being sent to its sites",
    "RUNNING": "starting",
}
"""The engine's words for a job of which no status is told yet, and ours."""
ENDS: Mapping[str, tuple[str, str]] = {
    "FINISHED:ABORTED": ("ABORTED", "somebody, or the engine, ended it before it was done"),
    "FINISHED:EXECUTION_EXCEPTION": ("STOPPED", "it could not go on"),
    "FINISHED:ABNORMAL": ("DIED", "its process at the server ended without a word"),
    "FINISHED:CAN_NOT_SCHEDULE": ("NOT STARTED", "the engine did not find the sites that it needs"),
    "FINISHED:FAILED_TO_RUN": ("NOT STARTED", "it could not be sent to its sites, or not be started there"),
    "FINISHED:ABANDONED": ("ABANDONED", "the server was restarted while it ran"),
}
"""The engine's words for an end without success: ours, and what they mean."""
NEVER_BEGAN = ("FINISHED:CAN_NOT_SCHEDULE", "FINISHED:FAILED_TO_RUN")
"""Ends of jobs that have no result."""
OF_A_RUN: Mapping[str, str] = {
    "TF-500": "the server failed with an error of its own",
    "TF-501": "too few silos",
    "TF-506": "synthetic and real records are mixed",
    "TF-507": "a checkpoint is torn",
    "TF-510": "statistics could not be opened",
}
"""What the codes mean that a run stops with and a silo does not say."""
TRAINED, NOT_TRAINED, NOT_KNOWN = 0, 1, 3
"""Exit codes; 2 is that of errors and wrong arguments."""


class WatchError(TightframeError):
    """A run cannot be watched.

    TF-811 no startup kit, TF-812 no connection, TF-813 no such job, TF-814 not allowed,
    TF-815 not understood.
    """

    code = "TF-812"


class LostError(Exception):
    """The server did not answer this time; asking again may help."""


class NoOutcomeError(Exception):
    """The outcome of a run that is over cannot be read; the message says why.

    Args:
        message: why.
        allowed: whether this person may fetch the result at all.
    """

    def __init__(self, message: str, *, allowed: bool = True) -> None:
        super().__init__(message)
        self.allowed = allowed


class _Read(BaseModel):
    # A server of a later version may tell more.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Range(_Read):
    """How many silos have spent an epsilon of at most ``up_to``."""

    up_to: float
    silos: int


class Spent(_Read):
    """What silos tell of epsilon, as ``rounds.riders.epsilon.Spent.as_json`` says it."""

    promised: float
    delta: float
    histogram: tuple[Range, ...]
    untold: int
    shown: dict[str, float]

    def __str__(self) -> str:
        """One line for people."""
        told = [f"{plural(item.silos, 'silo')} up to epsilon {item.up_to:g}" for item in self.histogram]
        told = told or ["not told"]
        told += [f"{site} shows {value:.3f}" for site, value in sorted(self.shown.items())]
        if self.untold and self.histogram:
            told.append(f"{plural(self.untold, 'silo')} told nothing")
        return f"{', '.join(told)}; at most {self.promised:g} promised, delta {self.delta:g}"


class Lost(_Read):
    """Since when a silo is missing, as ``rounds.dropouts.Lost`` says it."""

    kind: str
    round: int
    at: str
    code: str


class OneAnswer(_Read):
    """A model that gives one answer, as ``rounds.riders.evaluation.one_answer`` says it."""

    of_class: str = Field(alias="class")
    share: float | None
    interval: tuple[float, float] | None
    certain: bool


class RunStatus(_Read):
    """One moment of a run, as ``rounds.status.Status.as_json`` says it."""

    job_name: str
    state: str
    reason: str | None
    kind: str | None
    round: int
    rounds: int
    phase: int
    phases: int
    waiting: tuple[str, ...] = ()
    joined: tuple[str, ...]
    refused: dict[str, str]
    answered: tuple[str, ...]
    late: tuple[str, ...]
    dropped: dict[str, str]
    lost: dict[str, Lost] = {}
    notes: tuple[str, ...] = ()
    loss: float | None
    balanced_accuracy: float | None
    evaluated_round: int | None
    noisy: bool
    balanced_accuracy_interval: tuple[float, float] | None = None
    classes: tuple[int, int] | None = None
    one_answer: OneAnswer | None = None
    unmeasured_since: int | None = None
    epsilon_promised: float | None
    delta: float | None
    privacy: Spent | None
    seconds: float
    bytes_down: int
    bytes_up: int


class Outcome(_Read):
    """Of ``outcome.json``, what a watcher says at the end."""

    job_name: str
    trained: bool
    reason: str | None
    rounds_done: int
    rounds: int
    synthetic: bool
    seconds: float
    evaluation: dict[str, Any] | None
    status: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What the server told of a job when it was asked.

    Attributes:
        engine: the engine's word for where the job stands.
        name: of the job.
        told: of the engine's: why it still waits, or why it was not sent to its sites.
        status: the run's own; None before it has begun and after it is over.
        silent: silos that are waited for and of which the server hears nothing: when it heard of each last,
            in seconds of its clock; None of one that is not registered there any more.
    """

    engine: str
    name: str
    told: tuple[str, ...] = ()
    status: RunStatus | None = None
    silent: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return self.engine.startswith(OVER)


@dataclass(frozen=True)
class Verdict:
    """How a run ended: the exit code, a word for it, what is known."""

    code: int
    title: str
    lines: tuple[str, ...]


def read_status(values: Mapping[str, Any]) -> RunStatus:
    """The status in what the server told.

    Raises:
        WatchError: TF-815, if it is none that this version knows.
    """
    try:
        return RunStatus.model_validate(values)
    except ValidationError as error:
        wrong = ", ".join(".".join(str(part) for part in item["loc"]) for item in error.errors())
        raise WatchError(
            f"Expected the server to tell a run's status as this version of Tightframe does, but cannot "
            f"read: {wrong}. Use the server's version here.",
            code="TF-815",
        ) from None


def read_outcome(text: str) -> Outcome:
    """The values of an ``outcome.json``.

    Raises:
        NoOutcomeError: if they are not those of one.
    """
    try:
        return Outcome.model_validate_json(text)
    except ValidationError as error:
        raise NoOutcomeError(
            f"its outcome.json is not one of this version ({error.error_count()} values do not fit)"
        ) from None


def meaning(code: str) -> str:
    """A code with its meaning.

    >>> meaning("TF-502"), meaning("TF-501"), meaning("?")
    ('TF-502 (late)', 'TF-501 (too few silos)', '?')
    """
    words = {**REASONS, **OF_A_RUN}
    return f"{code} ({words[code]})" if code in words else code


def judge(job_id: str, seen: Seen, last: RunStatus | None, found: Outcome | NoOutcomeError) -> Verdict:
    """Tell how a run ended, from what is known and nothing else.

    The engine's word alone is not enough: it calls any job without an error ``FINISHED:COMPLETED``, and one
    that has trained ``FINISHED:ABNORMAL`` where a silo's client died. So the run's own outcome decides.

    Args:
        job_id: of the run.
        seen: the server's last answer.
        last: the run's own last status, if any was seen.
        found: what the run left behind, or why that could not be read.
    """
    outcome = found if isinstance(found, Outcome) else None
    allowed = isinstance(found, Outcome) or found.allowed
    fetch = (f"its result: nvflare job download {job_id}",) if allowed else ()
    if outcome is not None and outcome.trained:
        done = f"{outcome.rounds_done} of {plural(outcome.rounds, 'round')} in {outcome.seconds:.0f} s"
        title = (outcome.status or "trained").upper()
        told = (*_reason(outcome, last), *outcome.notes, *_metrics(outcome), *_after(seen), *fetch)
        return Verdict(TRAINED, f"{title}, {done}", told)
    if seen.engine != COMPLETED:
        on = () if outcome is None else _go_on(job_id, outcome)
        return _failed(seen, last, outcome, (*fetch, *on))
    if outcome is not None:
        done = f"{outcome.rounds_done} of {plural(outcome.rounds, 'round')} in {outcome.seconds:.0f} s"
        told = (*_reason(outcome, last), *outcome.notes, *fetch, *_go_on(job_id, outcome))
        return Verdict(NOT_TRAINED, f"NOT TRAINED, {done}", told)
    if last is not None and last.state in ("trained", "stopped"):
        trained = last.state == "trained"
        said = (f"by the run's own last status; its outcome was not read: {found}",)
        title, code = ("TRAINED", TRAINED) if trained else ("NOT TRAINED", NOT_TRAINED)
        return Verdict(code, title, (*_reason(None, last), *said, *fetch))
    return Verdict(
        NOT_KNOWN,
        "OVER; whether it trained is not known here",
        (f"the engine says {COMPLETED}, which alone does not mean that it trained", str(found), *fetch),
    )


def _failed(seen: Seen, last: RunStatus | None, outcome: Outcome | None, fetch: tuple[str, ...]) -> Verdict:
    title, means = ENDS.get(seen.engine, (seen.engine, "the engine ended it"))
    lines = [f"{seen.engine}: {means}", *seen.told, *_reason(outcome, last)]
    if outcome is not None:
        lines += [f"{outcome.rounds_done} of {plural(outcome.rounds, 'round')} done", *outcome.notes]
    return Verdict(NOT_TRAINED, title, (*lines, *(() if seen.engine in NEVER_BEGAN else fetch)))


def _after(seen: Seen) -> tuple[str, ...]:
    """What the engine did once the run was over, where it did not just end the job."""
    if seen.engine == COMPLETED:
        return ()
    _, means = ENDS.get(seen.engine, ("", "the engine ended it"))
    if seen.engine == "FINISHED:ABNORMAL":
        means = "a client did not report the end of the job"
    return (f"after that the engine called the job {seen.engine} ({means}); its outcome counts",)


def _go_on(job_id: str, outcome: Outcome) -> tuple[str, ...]:
    """How a run goes on that was stopped after a round was done."""
    if not outcome.rounds_done:
        return ()
    made = f"tightframe jobs export {outcome.job_name} --resume {job_id} -o resumed"
    return (f"to go on after round {outcome.rounds_done}, once it is downloaded: {made}",)


def _reason(outcome: Outcome | None, last: RunStatus | None) -> list[str]:
    """Why it stopped: at best in the run's own words, else the code that was seen."""
    if outcome is not None:
        return [] if outcome.reason is None else [f"reason: {outcome.reason}"]
    return [] if last is None or last.reason is None else [f"reason: {meaning(last.reason)}"]


def _metrics(outcome: Outcome) -> list[str]:
    test = (outcome.evaluation or {}).get("test", {})
    lines = []
    if test.get("balanced_accuracy") is not None:
        noisy = (
            " (noisy, with differential privacy; in brackets its 95 % interval)" if test.get("noisy") else ""
        )
        lines.append(f"balanced accuracy on the test records: {metric(test, 'balanced_accuracy')}{noisy}")
    if (answer := one_answer(test.get("one_answer"))) is not None:
        lines.append(answer)
    if outcome.synthetic:
        lines.append("on the SYNTHETIC TWIN, generated records; no claim about a method is made on it")
    return lines
