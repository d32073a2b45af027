"""Where a run stands, for whoever watches it while it runs: a value without engine and without torch.

Only totals and facts of the protocol: of a single silo its name, and why it is not there, as a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tightframe.rounds.dropouts import Lost
from tightframe.rounds.sums.plain import LATE

if TYPE_CHECKING:
    from tightframe.rounds.riders.epsilon import Spent
    from tightframe.rounds.rows import Row

State = Literal["starting", "enrolling", "summing", "trained", "stopped"]


@dataclass(frozen=True)
class Status:
    """One moment of a run; whoever changes it replaces it, so that it may be read from another thread.

    Attributes:
        job_name, rounds: of the job.
        promised: (epsilon, delta) that the job promises each silo; None without privacy.
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
        interval: limits of the balanced accuracy without the noise; None where there is none.
        classes: how many classes it is over, and of how many; None without noise.
        one_answer: the class that the model answers whatever the record, see ``report.words.one_answer``.
        unmeasured: the first of the rounds up to now without loss and metrics, as silos are missing.
        spent: what silos tell of the epsilon that the job has cost them so far.
        seconds, bytes_down, bytes_up: of all sums so far.
    """

    job_name: str
    rounds: int
    promised: tuple[float, float] | None = None
    state: State = "starting"
    reason: str | None = None
    kind: str | None = None
    round: int = 0
    phase: int = 0
    phases: int = 0
    waiting: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    answered: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, Lost] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loss: float | None = None
    balanced_accuracy: float | None = None
    evaluated_round: int | None = None
    noisy: bool = False
    interval: tuple[float, float] | None = None
    classes: tuple[int, int] | None = None
    one_answer: Mapping[str, Any] | None = None
    unmeasured: int | None = None
    spent: Spent | None = None
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0

    def enrolling(self, waiting: Iterable[str]) -> Status:
        """Silos are asked whether they take part."""
        return replace(self, state="enrolling", waiting=tuple(sorted(waiting)))

    def heard(self, site: str, code: str | None = None) -> Status:
        """One of them is no longer waited for: it answered, or is left out with a code."""
        refused = self.refused if code is None else {**self.refused, site: code}
        return replace(self, waiting=tuple(name for name in self.waiting if name != site), refused=refused)

    def enrolled(self, joined: Iterable[str], refused: Mapping[str, str]) -> Status:
        """Who takes part, and who does not."""
        return replace(self, waiting=(), joined=tuple(sorted(joined)), refused=dict(refused))

    def summing(self, kind: str, number: int, phase: int, phases: int) -> Status:
        """Silos are asked for their terms; ``phase`` counts from 0.

        Who was missing in the sum before stays told: the next one follows at once, before anybody could look.
        """
        return replace(
            self, state="summing", kind=kind, round=number, phase=phase + 1, phases=phases, answered=()
        )

    def answer(self, site: str) -> Status:
        """One more term has come."""
        return replace(self, answered=tuple(sorted({*self.answered, site})))

    def without(
        self, lost: Mapping[str, Lost], notes: Iterable[str], unmeasured: int | None = None
    ) -> Status:
        """Who is missing now, told as soon as the server knows it."""
        return replace(self, lost=dict(lost), notes=tuple(notes), unmeasured=unmeasured)

    def summed(self, row: Row) -> Status:
        """A sum was opened, or had too few silos."""
        return replace(
            self,
            answered=tuple(row.silos),
            late=tuple(sorted(site for site, code in row.dropped.items() if code == LATE)),
            dropped={site: code for site, code in sorted(row.dropped.items()) if code != LATE},
            loss=row.training.get("loss", self.loss),
            spent=row.spent or self.spent,
            seconds=self.seconds + row.seconds,
            bytes_down=self.bytes_down + row.bytes_down,
            bytes_up=self.bytes_up + row.bytes_up,
        )

    def evaluated(self, row: Row) -> Status:
        """The model that a row made was evaluated."""
        test = (row.evaluation or {}).get("test", {})
        limits, number = test.get("balanced_accuracy_interval"), test.get("classes_told")
        return replace(
            self,
            balanced_accuracy=test.get("balanced_accuracy"),
            evaluated_round=row.round,
            noisy=bool(test.get("noisy")),
            interval=None if limits is None else (limits[0], limits[1]),
            classes=None if number is None else (number, test["classes"]),
            one_answer=test.get("one_answer"),
        )

    def ended(self, *, trained: bool, reason: str | None) -> Status:
        """The run is over; of its reason the code alone is kept."""
        code = None if reason is None else reason.partition(":")[0]
        return replace(self, state="trained" if trained else "stopped", reason=code, waiting=())

    def as_json(self) -> dict[str, Any]:
        """Plain values. ``epsilon`` is the upper end of the range of what silos tell."""
        spent = None if self.spent is None else self.spent.as_json()
        found = None if self.spent is None else self.spent.range
        return {
            "job_name": self.job_name,
            "state": self.state,
            "reason": self.reason,
            "kind": self.kind,
            "round": self.round,
            "rounds": self.rounds,
            "phase": self.phase,
            "phases": self.phases,
            "waiting": list(self.waiting),
            "joined": list(self.joined),
            "refused": dict(self.refused),
            "answered": list(self.answered),
            "late": list(self.late),
            "dropped": dict(self.dropped),
            "lost": {site: item.as_json() for site, item in sorted(self.lost.items())},
            "notes": list(self.notes),
            "loss": self.loss,
            "balanced_accuracy": self.balanced_accuracy,
            "evaluated_round": self.evaluated_round,
            "noisy": self.noisy,
            "balanced_accuracy_interval": None if self.interval is None else list(self.interval),
            "classes": None if self.classes is None else list(self.classes),
            "one_answer": None if self.one_answer is None else dict(self.one_answer),
            "unmeasured_since": self.unmeasured,
            "epsilon": None if found is None else found[1],
            "epsilon_promised": None if self.promised is None else self.promised[0],
            "delta": None if self.promised is None else self.promised[1],
            "privacy": spent,
            "seconds": round(self.seconds, 3),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
        }
