"""Status of a run, for whoever watches it while it runs.

Only totals and facts of the protocol: of a single silo its name, and why it is not there, as a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from tightframe.errors import LATE
from tightframe.results.files import ResultFile, Values
from tightframe.results.parts.dropouts import Lost
from tightframe.results.parts.evaluation import OneAnswer
from tightframe.results.parts.ranges import Spent
from tightframe.results.rows import Row

State = Literal["starting", "enrolling", "summing", "trained", "stopped"]
MOST_MOMENTS = 400
"""Rounds of a course; of more, every second, fourth, ... one is kept."""


class Moment(Values):
    """Totals of one round, as ``metrics.jsonl`` has them too; None where a round has none.

    Attributes:
        round: of the sum, and of the model that it made.
        loss: of local training.
        balanced_accuracy: of the round's model on the test records.
        balanced_accuracy_interval: its limits without the noise; None where there is no noise.
        epsilon: above what and up to what all told epsilons lie.
    """

    round: int
    loss: float | None = None
    balanced_accuracy: float | None = None
    balanced_accuracy_interval: tuple[float, float] | None = None
    epsilon: tuple[float, float] | None = None


class Status(ResultFile):
    """One moment of a run; whoever changes it replaces it, so that it may be read from another thread.

    Attributes:
        job_name, rounds: of the job.
        state: ``summing`` while silos are asked, ``trained`` or ``stopped`` at the end.
        reason: why it stopped, as a code.
        kind: what the sum is for: ``train``, ``closing``, ...
        round: of the sum.
        phase, phases: its place among the phases of its round, from 1 on.
        waiting: silos whose answer is awaited while they are enrolled.
        joined: the silos enrolled.
        refused: silo -> code of those that were not.
        answered: silos whose terms have come in this sum, or are in the last one.
        late: silos that were too late for the last sum that is over.
        dropped: silo -> code of the others that are not in it.
        lost: silo -> since when it is missing, of those that are in no sum any more.
        notes: what that means, in sentences.
        loss: of local training in the last round that told one.
        balanced_accuracy: on the test records, of the last model that was evaluated.
        evaluated_round: the round which made that model.
        noisy: whether that evaluation was one with differential privacy's noise.
        balanced_accuracy_interval: its limits without the noise; None where there is none.
        classes: how many classes it is over, and of how many; None without noise.
        one_answer: the class that the model answers whatever the record, if it is such a model.
        unmeasured_since: the first of the rounds up to now without loss and metrics, as silos are missing.
        epsilon: the upper end of the range in which all told epsilons lie.
        epsilon_promised, delta: that the job promises each silo; None without privacy.
        privacy: what silos tell of the epsilon that the job has cost them so far.
        seconds, bytes_down, bytes_up: of all sums so far.
        course: the rounds so far, for curves.
    """

    NAME = "tightframe.status"

    job_name: str
    state: State = "starting"
    reason: str | None = None
    kind: str | None = None
    round: int = 0
    rounds: int
    phase: int = 0
    phases: int = 0
    waiting: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    answered: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    dropped: dict[str, str] = {}
    lost: dict[str, Lost] = {}
    notes: tuple[str, ...] = ()
    loss: float | None = None
    balanced_accuracy: float | None = None
    evaluated_round: int | None = None
    noisy: bool = False
    balanced_accuracy_interval: tuple[float, float] | None = None
    classes: tuple[int, int] | None = None
    one_answer: OneAnswer | None = None
    unmeasured_since: int | None = None
    epsilon: float | None = None
    epsilon_promised: float | None = None
    delta: float | None = None
    privacy: Spent | None = None
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    course: tuple[Moment, ...] = ()

    def _with(self, **values: Any) -> Self:
        return self.model_copy(update=values)

    def enrolling(self, waiting: Iterable[str]) -> Self:
        """Ask silos whether they take part."""
        return self._with(state="enrolling", waiting=tuple(sorted(waiting)))

    def heard(self, site: str, code: str | None = None) -> Self:
        """Wait for a silo no longer: it answered, or is left out with a code."""
        refused = self.refused if code is None else {**self.refused, site: code}
        return self._with(waiting=tuple(name for name in self.waiting if name != site), refused=refused)

    def enrolled(self, joined: Iterable[str], refused: Mapping[str, str]) -> Self:
        """Know who takes part, and who does not."""
        return self._with(waiting=(), joined=tuple(sorted(joined)), refused=dict(refused))

    def summing(self, kind: str, number: int, phase: int, phases: int) -> Self:
        """Ask silos for their terms; ``phase`` counts from 0.

        Who was missing in the sum before stays told: the next one follows at once, before anybody could look.
        """
        return self._with(
            state="summing", kind=kind, round=number, phase=phase + 1, phases=phases, answered=()
        )

    def answer(self, site: str) -> Self:
        """Have one more term."""
        return self._with(answered=tuple(sorted({*self.answered, site})))

    def without(self, lost: Mapping[str, Lost], notes: Iterable[str], unmeasured: int | None = None) -> Self:
        """Tell who is missing now, as soon as the server knows it."""
        return self._with(lost=dict(sorted(lost.items())), notes=tuple(notes), unmeasured_since=unmeasured)

    def summed(self, row: Row) -> Self:
        """End a sum, which was opened or had too few silos."""
        spent = row.privacy or self.privacy
        return self.noted(row)._with(
            answered=tuple(row.silos),
            late=tuple(sorted(site for site, code in row.dropped.items() if code == LATE)),
            dropped={site: code for site, code in sorted(row.dropped.items()) if code != LATE},
            loss=row.training.get("loss", self.loss),
            epsilon=None if spent is None or spent.range is None else spent.range[1],
            privacy=spent,
            seconds=round(self.seconds + row.seconds, 3),
            bytes_down=self.bytes_down + row.bytes_down,
            bytes_up=self.bytes_up + row.bytes_up,
        )

    def evaluated(self, row: Row) -> Self:
        """Have the metrics of the model that a row made."""
        test = row.test
        if test is None:
            return self
        told = None if test.classes_told is None else (test.classes_told, test.classes or len(test.recall))
        return self.noted(row)._with(
            balanced_accuracy=test.balanced_accuracy,
            evaluated_round=row.round,
            noisy=test.noisy,
            balanced_accuracy_interval=test.balanced_accuracy_interval,
            classes=told,
            one_answer=test.one_answer,
        )

    def noted(self, row: Row) -> Self:
        """Take what a row knows of its round into the course; what it does not know takes nothing back."""
        test = row.test
        values = {
            "loss": row.training.get("loss"),
            "balanced_accuracy": None if test is None else test.balanced_accuracy,
            "balanced_accuracy_interval": None if test is None else test.balanced_accuracy_interval,
            "epsilon": None if row.privacy is None else row.privacy.range,
        }
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return self
        moments = {item.round: item for item in self.course}
        moments[row.round] = moments.get(row.round, Moment(round=row.round)).model_copy(update=known)
        course, step = [moments[key] for key in sorted(moments)], 1
        few = {item.round for item in course if item.balanced_accuracy is not None}
        few = few if len(few) <= MOST_MOMENTS // 4 else set()  # models that are evaluated now and then
        while len(course) > MOST_MOMENTS:
            step *= 2  # the last two rounds are not whole yet
            first = course[0].round
            kept = [item for item in course[:-2] if item.round in few or (item.round - first) % step == 0]
            course = [*kept, *course[-2:]]
        return self._with(course=tuple(course))

    def ended(self, *, trained: bool, reason: str | None) -> Self:
        """End the run; of its reason the code alone is kept."""
        code = None if reason is None else reason.partition(":")[0]
        return self._with(state="trained" if trained else "stopped", reason=code, waiting=())
