"""Texts on a watched run, for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from tightframe.results.parts.ranges import Spent
from tightframe.results.status import Status
from tightframe.results.words import megabytes, one_answer, plural, with_interval
from tightframe.results.words import shown as number
from tightframe_app.screens import shown
from tightframe_app.watch.status import WAITING, Seen

LIVE = "RUNNING"
KINDS = {
    "statistics": "statistics before round 1",
    "before": "before round 1",
    "train": "training",
    "after": "after the last round",
    "closing": "the last model is evaluated",
    "personal": "personal models are evaluated",
}
"""Purpose of a sum, by its kind."""
ENDED = ("trained", "stopped")
ENDING = "the run's process has ended; the engine waits until every client has reported the end of the job"
OVER_EARLY = "over; what follows is what was seen last"


@dataclass(frozen=True)
class View:
    """Values that a screen shows.

    Attributes:
        seen: the server's last answer; None before the first.
        last: the run's own last status, kept when an answer has none.
        elapsed: seconds since the watch began.
        lost: seconds since the server's last answer, if it does not answer.
        why: error of the last try to reach it.
    """

    job_id: str
    seen: Seen | None = None
    last: Status | None = None
    elapsed: float = 0.0
    lost: float | None = None
    why: str = ""

    @property
    def ending(self) -> bool:
        """Check whether the run is over while the engine still has the job."""
        if self.seen is None or self.last is None or self.seen.engine != LIVE:
            return False
        over = self.last.state in ENDED or self.last.kind in ("closing", "personal")
        return over and self.seen.status is None


def standing(view: View) -> str:
    """Describe a job's state."""
    if view.seen is None:
        return "asking the server"
    if view.seen.over:
        return "over"
    if view.ending:
        return ENDING
    if view.seen.engine != LIVE or view.last is None:
        return WAITING.get(view.seen.engine, shown(view.seen.engine))
    status = view.last
    if status.state != "summing":
        return "silos are being enrolled" if status.state == "enrolling" else shown(status.state)
    return KINDS.get(status.kind or "", shown(status.kind or "-"))


def round_words(status: Status) -> str:
    """Describe the round, and the phase if there are several."""
    text = f"{status.round} of {status.rounds}"
    return f"{text}, phase {status.phase} of {status.phases}" if status.phases > 1 else text


def done(status: Status) -> float:
    """Return the share of rounds done, 0 to 1; the current round counts by its phases."""
    if status.state == "trained" or status.kind in ("after", "closing", "personal"):
        return 1.0
    if status.kind != "train" or not status.rounds:
        return 0.0
    phases = max(1, status.phases)
    return min(1.0, (status.round - 1 + (status.phase - 1) / phases) / status.rounds)


def loss_words(status: Status) -> str:
    """Describe the last loss, or why there is none."""
    if status.loss is None:
        return "-" if status.epsilon_promised is None else "stays at the silos"
    since = status.unmeasured_since
    return number(status.loss) + ("" if since is None else f", none from round {since} on")


def accuracy_words(status: Status) -> str:
    """Describe the last balanced accuracy, its model and its noise."""
    if status.balanced_accuracy is None:
        return "-"
    noisy = ", noisy" if status.noisy else ""
    text = with_interval(status.balanced_accuracy, status.balanced_accuracy_interval, status.classes)
    answer = one_answer(status.one_answer)
    only = "" if answer is None else f"; {answer}"
    return shown(f"{text} balanced, model of round {status.evaluated_round}{noisy}{only}")


def privacy_words(status: Status) -> str:
    """Describe the epsilons that silos report, and the promise."""
    if status.privacy is not None:
        return shown(spent_words(status.privacy))
    if status.epsilon_promised is None:
        return "no differential privacy"
    return f"at most epsilon {status.epsilon_promised:g} promised, delta {status.delta or 0:g}; none yet"


def spent_words(spent: Spent) -> str:
    """Describe the epsilons that silos report."""
    parts = (spent.ranges() or ["not reported"]) + spent.exact()
    if spent.untold and spent.histogram:
        parts.append(f"{plural(spent.untold, 'silo')} reported nothing")
    return f"{', '.join(parts)}; at most {spent.promised:g} promised, delta {spent.delta:g}"


def cost_words(status: Status) -> str:
    """Describe seconds and bytes so far."""
    down, up = megabytes(status.bytes_down), megabytes(status.bytes_up)
    return f"{status.seconds:.1f} s in sums, {down} MB down, {up} MB up"


def clock_words(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> clock_words(3671.9)
    '1:01:11'
    """
    total = int(seconds)
    return f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
