"""Status of a running job, for its watchers.

It has only totals and facts of the protocol: of a single silo the name, and the code of why it is missing.
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
"""Most rounds of a course; of more, every second, fourth, ... is kept."""


class Moment(Values):
    """Totals of one round, also in ``metrics.jsonl``; None if a round has none.

    Attributes:
        round: of the sum, and of the model that it made.
        loss: of local training.
        balanced_accuracy: of the round's model on the test records.
        balanced_accuracy_interval: its limits without the noise; None without noise.
        epsilon: open lower and closed upper end of all reported epsilons.
    """

    round: int
    loss: float | None = None
    balanced_accuracy: float | None = None
    balanced_accuracy_interval: tuple[float, float] | None = None
    epsilon: tuple[float, float] | None = None


class Status(ResultFile):
    """Immutable state of a run; changes replace it, so that other threads may read it.

    Attributes:
        job_name, rounds: of the job.
        state: ``summing`` while silos are asked, ``trained`` or ``stopped`` at the end.
        reason: code of why it stopped.
        kind: of the sum: ``train``, ``closing``, ...
        round: of the sum.
        phase, phases: its number from 1 among the phases of its round.
        waiting: silos whose answer to enrolment is awaited.
        joined: the enrolled silos.
        refused: silo -> code of those not enrolled.
        answered: silos whose terms have arrived in this sum, or are in the last one.
        late: silos too late for the last finished sum.
        dropped: silo -> code of the others missing from it.
        lost: silo -> since when it is missing from all sums.
        notes: the consequences, in sentences.
        loss: of local training in the last round that reported one.
        balanced_accuracy: of the last evaluated model, on the test records.
        evaluated_round: the round of that model.
        noisy: whether that evaluation had the noise of differential privacy.
        balanced_accuracy_interval: its limits without the noise; None without noise.
        classes: number of classes that it is over, and of all; None without noise.
        one_answer: set if the model gives one answer to every record.
        unmeasured_since: the first round of those without loss and metrics, as silos are missing.
        epsilon: upper end of the range of all reported epsilons.
        epsilon_promised, delta: promised to each silo; None without privacy.
        privacy: epsilon that silos report as spent on the job so far.
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
        """Wait for silos to answer the enrolment."""
        return self._with(state="enrolling", waiting=tuple(sorted(waiting)))

    def heard(self, site: str, code: str | None = None) -> Self:
        """Stop waiting for a silo, which answered or is left out with a code."""
        refused = self.refused if code is None else {**self.refused, site: code}
        return self._with(waiting=tuple(name for name in self.waiting if name != site), refused=refused)

    def enrolled(self, joined: Iterable[str], refused: Mapping[str, str]) -> Self:
        """Set the enrolled silos, and the others with codes."""
        return self._with(waiting=(), joined=tuple(sorted(joined)), refused=dict(refused))

    def summing(self, kind: str, number: int, phase: int, phases: int) -> Self:
        """Start a sum; ``phase`` counts from 0.

        Silos missing from the previous sum stay listed, as this one follows at once.
        """
        return self._with(
            state="summing", kind=kind, round=number, phase=phase + 1, phases=phases, answered=()
        )

    def answer(self, site: str) -> Self:
        """Add a silo whose term arrived."""
        return self._with(answered=tuple(sorted({*self.answered, site})))

    def without(self, lost: Mapping[str, Lost], notes: Iterable[str], unmeasured: int | None = None) -> Self:
        """Set the silos that are now missing."""
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
        """Set the metrics of a row's model."""
        test = row.test
        if test is None:
            return self
        classes = None if test.classes_told is None else (test.classes_told, test.classes or len(test.recall))
        return self.noted(row)._with(
            balanced_accuracy=test.balanced_accuracy,
            evaluated_round=row.round,
            noisy=test.noisy,
            balanced_accuracy_interval=test.balanced_accuracy_interval,
            classes=classes,
            one_answer=test.one_answer,
        )

    def noted(self, row: Row) -> Self:
        """Merge a row's known values of its round into the course."""
        test = row.test
        values = {
            "loss": row.training.get("loss"),
            "balanced_accuracy": None if test is None else test.balanced_accuracy,
            "balanced_accuracy_interval": None if test is None else test.balanced_accuracy_interval,
            "epsilon": None if row.privacy is None else row.privacy.range,
        }
        values = {name: value for name, value in values.items() if value is not None}
        if not values:
            return self
        moments = {item.round: item for item in self.course}
        moments[row.round] = moments.get(row.round, Moment(round=row.round)).model_copy(update=values)
        course, step = [moments[key] for key in sorted(moments)], 1
        evaluated = {item.round for item in course if item.balanced_accuracy is not None}
        evaluated = evaluated if len(evaluated) <= MOST_MOMENTS // 4 else set()  # only if few are
        while len(course) > MOST_MOMENTS:
            step *= 2  # the last two rounds are not complete yet
            first = course[0].round
            kept = [
                item for item in course[:-2] if item.round in evaluated or (item.round - first) % step == 0
            ]
            course = [*kept, *course[-2:]]
        return self._with(course=tuple(course))

    def ended(self, *, trained: bool, reason: str | None) -> Self:
        """End the run, keeping only its reason's code."""
        code = None if reason is None else reason.partition(":")[0]
        return self._with(state="trained" if trained else "stopped", reason=code, waiting=())
