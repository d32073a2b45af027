"""Every exchange of a run, in order, from the job alone.

Server and silos both look up an exchange here: its phase, the riders that travel with it, the state after its
sum, and all sums that a run can have. To add an exchange or a rider, change this file.

    statistics, before   ->   train (each round)   ->   after   ->   closing   ->   personal
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightframe.errors import RunError
from tightframe.learning.model_update import BROADCAST
from tightframe.phases import RIDERS, Cohort, Phase, Reading, Schema, ServerState, Tensors, Totals
from tightframe.rounds import codec, order
from tightframe.rounds.codec import IntegerTotals
from tightframe.rounds.order import (
    AFTER,
    BEFORE,
    CLOSING,
    KINDS,
    PERSONAL,
    STATISTICS,
    TRAIN,
    Kind,
    Place,
)
from tightframe.rounds.phases import closing, personal
from tightframe.rounds.riders import (
    class_rules,
    epsilon,
    evaluation,
    failures,
    noisy_evaluation,
    noisy_sums,
    update_norms,
)
from tightframe.securesum.messages import SumId

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup

__all__ = ["AFTER", "BEFORE", "CLOSING", "KINDS", "PERSONAL", "STATISTICS", "TRAIN", "Exchange", "RunPlan"]


@dataclass(frozen=True)
class Exchange:
    """One exchange of a run, which ends in one sum.

    Attributes:
        kind: part of the run that it belongs to.
        round: from 1 on in training; 0 before it, the last round's after it.
        phase: with its riders, except an evaluation that only some broadcasts allow.
        evaluating: the phase with that evaluation; None where there is none.
        index: its position among the phases of its kind and round, from 0.
        of: number of these phases.
    """

    kind: Kind
    round: int
    phase: Phase
    evaluating: Phase | None = None
    index: int = 0
    of: int = 1

    def carrying(self, evaluate: bool) -> Phase:
        """Return the phase, with its evaluation if ``evaluate`` and if it has one."""
        return self.evaluating if evaluate and self.evaluating is not None else self.phase

    def phase_for(self, broadcast: Tensors) -> Phase:
        """Return the phase, with its evaluation if the broadcast has a model; the closing always has it."""
        return self.carrying(any(name.startswith(BROADCAST) for name in broadcast))

    def advance(self, state: ServerState, totals: IntegerTotals, cohort: Cohort) -> Reading:
        """Compute the next state from its sum, from public values alone: the server and every silo do.

        Args:
            state: before the exchange.
            totals: as opened; empty if the sum stayed shut.
            cohort: the silos in the sum.

        Returns:
            The next state, and the method's totals, notes and warnings of the riders.
        """
        phase = self.phase_for(self.phase.broadcast(state))
        return advance(phase, state, codec.decode(phase.schema, totals, parties=cohort.enrolled), cohort)

    def sum_id(self, attempt: int = 0) -> SumId:
        """Return the id of its sum; a further attempt has one of its own."""
        return SumId.of(self.kind, self.round, self.index, attempt)

    @property
    def place(self) -> Place:
        """Its place in the plan."""
        return self.kind, self.round, self.index

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Its phase with and without the evaluation, in this order; one if both are the same."""
        both = (self.evaluating, self.phase)
        return tuple({id(item): item for item in both if item is not None}.values())

    @property
    def before(self) -> bool:
        """Check whether it comes before the first round, where no work is lost if the run ends."""
        return self.kind in (STATISTICS, BEFORE)

    @property
    def measure(self) -> str | None:
        """Part of the run whose duration its work measures; None if it measures none."""
        if self.training:
            return str(self.index)
        return f"{self.kind}-{self.index}" if self.before else None

    @property
    def training(self) -> bool:
        """Check whether it belongs to a training round."""
        return self.kind == TRAIN

    @property
    def after(self) -> bool:
        """Check whether it is a method's own, between the last round and the closing."""
        return self.kind == AFTER

    @property
    def closing(self) -> bool:
        """Check whether it is the closing."""
        return self.kind == CLOSING

    @property
    def reported(self) -> bool:
        """Check whether a silo that took part in the closing has its own report after this exchange."""
        return self.kind in (CLOSING, PERSONAL)

    @property
    def counts_only(self) -> bool:
        """Check whether its sum has only counts, which are opened only for the whole roster."""
        last = self.kind in (CLOSING, PERSONAL)
        return last or (not self.training and bool(self.phase.schema.group("static")))

    @property
    def stream(self) -> int:
        """Round that keys a silo's random streams: for personal models the one after the last."""
        return self.round + (self.kind == PERSONAL)


def advance(phase: Phase, state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
    """Let riders read their totals, and the method update the state by the rest."""
    reading = phase.read(state, totals, cohort)
    if not reading.totals:
        return reading
    after = phase.update(reading.state, reading.totals, replace(cohort, failed=reading.failed))
    remembered = {name: item for name, item in reading.state.extra.items() if name.startswith(RIDERS)}
    return replace(reading, state=after.evolve(extra={**after.extra, **remembered}))


class RunPlan:
    """The exchanges of one job."""

    def __init__(self, setup: JobSetup) -> None:
        self._setup, self._job = setup, setup.job
        # Each request looks up the same exchanges several times; not all of a long run's are cached.
        self._lately = functools.lru_cache(maxsize=16)(self._at)

    def __iter__(self) -> Iterator[Exchange]:
        """Yield the exchanges in order, except those of the jobs that this one continues."""
        yield from self.beginning()
        for number in range(self._job.done + 1, self._job.rounds + 1):
            yield from self.round(number)
        yield from self.ending()

    def beginning(self) -> Iterator[Exchange]:
        """Yield the exchanges before the first round; none in a resumed job."""
        if self._job.resume is None:
            yield from self.at(STATISTICS, 0)
            yield from self.at(BEFORE, 0)

    def round(self, number: int) -> tuple[Exchange, ...]:
        """Return the exchanges of one training round (1-based)."""
        return self.at(TRAIN, number)

    def ending(self) -> Iterator[Exchange]:
        """Yield the exchanges after the last round."""
        for kind in (AFTER, CLOSING, PERSONAL):
            yield from self.at(kind, self._job.rounds)

    def at(self, kind: str, number: int) -> tuple[Exchange, ...]:
        """Return the exchanges of a kind in a round; empty if the job has none."""
        return self._lately(kind, number)

    def _at(self, kind: str, number: int) -> tuple[Exchange, ...]:
        job = self._job
        first, last = {
            TRAIN: (job.done + 1, job.rounds),
            STATISTICS: (0, 0 if job.resume is None else -1),
            BEFORE: (0, 0 if job.resume is None else -1),
        }.get(kind, (job.rounds, job.rounds))
        make: Callable[[int], Sequence[Exchange]] | None = {
            STATISTICS: lambda _: self._outside_rounds(STATISTICS, self._setup.statistics_phases()),
            BEFORE: lambda _: self._outside_rounds(BEFORE, self._setup.first_phases()),
            TRAIN: self._round,
            AFTER: lambda _: self._outside_rounds(AFTER, self._setup.after_phases()),
            CLOSING: lambda _: (self._closing,) if job.statistics is None else (),
            PERSONAL: lambda _: (self._personal,) if job.personalise else (),
        }.get(kind)
        return tuple(make(number)) if make is not None and first <= number <= last else ()

    def starts(self, exchange: Exchange) -> bool:
        """Check whether an exchange begins with the run's initial model, but for pooled statistics."""
        first = next(iter((*self.at(BEFORE, 0), *self.at(TRAIN, 1))), None)
        return first is not None and exchange.place == first.place

    def after(self, last: Place | None) -> Iterator[Place]:
        """Yield the places of the exchanges that may come after a sum.

        Args:
            last: place of the last sum opened; None at the job's begin.

        Raises:
            RunError: TF-505 if the job plans no such sum.
        """
        if last is not None:
            self.find(*last)
        return order.after(self._groups(last), last)

    def last_of(self, number: int) -> Place:
        """Return the place of a round's last exchange, also of an earlier job's."""
        return TRAIN, number, len(self._setup.training_phases(number)) - 1

    def _groups(self, last: Place | None) -> Iterator[order.Group]:
        """Yield the plan's groups, starting with that of a place; a long run has many."""
        job = self._job
        rounds = range(job.done + 1 if last is None else max(last[1], 1), job.rounds + 1)
        places = [(STATISTICS, 0), (BEFORE, 0)] if last is None or last[0] in (STATISTICS, BEFORE) else []
        for kind, number in (*places, *((TRAIN, number) for number in rounds)):
            yield kind, number, len(self.at(kind, number))
        for kind in (AFTER, CLOSING, PERSONAL):
            yield kind, job.rounds, len(self.at(kind, job.rounds))

    def find(self, kind: str, number: int, index: int) -> Exchange:
        """Look up the exchange that a server requests.

        Args:
            index: of the phase in that kind and round.

        Raises:
            RunError: TF-505 if the job plans no such exchange.
        """
        planned = self.at(kind, number)
        if not 0 <= index < len(planned):
            raise RunError(
                f"Expected an exchange that this job plans, but the server requests {kind!r}, round "
                f"{number}, phase {index}: {self._planned(kind)}.",
                code="TF-505",
            )
        return planned[index]

    def _planned(self, kind: str) -> str:
        """Describe the exchanges of a kind that the job plans, for an error message."""
        kinds = [item for item in KINDS if self.at(item, 0) or self.at(item, self._job.rounds)]
        if kind not in kinds:
            return f"the job has {', '.join(kinds)}"
        if kind == TRAIN:
            return f"the job's rounds are {self._job.done + 1} to {self._job.rounds}"
        number = 0 if kind in (STATISTICS, BEFORE) else self._job.rounds
        return f"the job has {len(self.at(kind, number))} of {kind!r}, in round {number}"

    def _outside_rounds(self, kind: Kind, phases: Sequence[Phase]) -> Sequence[Exchange]:
        """Return exchanges before or after the rounds, under the class rules."""
        number = 0 if kind in (STATISTICS, BEFORE) else self._job.rounds
        if (private := self._setup.privacy) is not None:
            phases = [noisy_sums.attach_frozen_sums(phase, private, self._job) for phase in phases]
        return [
            Exchange(kind, number, self._flagged(self._ruled(phase)), index=index, of=len(phases))
            for index, phase in enumerate(phases)
        ]

    def _round(self, number: int) -> Sequence[Exchange]:
        """Return a round's exchanges; the order of the riders fixes the order of the fields in a sum."""
        setup, phases = self._setup, list(self._setup.training_phases(number))
        if setup.privacy is not None:
            private = setup.privacy
            phases = [noisy_sums.attach_class_sums(phase, private, self._job) for phase in phases]
            phases = [noisy_sums.attach_gradients(phase, private, self._job) for phase in phases]
            phases = [noisy_sums.attach_frozen_sums(phase, private, self._job) for phase in phases]
            # With the last phase, so that the reported epsilon includes this round's charges.
            phases[-1] = epsilon.attach(phases[-1], self._job)
        phases = [self._flagged(self._normed(self._ruled(phase))) for phase in phases]
        return [
            Exchange(
                TRAIN,
                number,
                phase,
                self._evaluated(phase, number) if index == 0 and setup.evaluates_in(number) else None,
                index,
                len(phases),
            )
            for index, phase in enumerate(phases)
        ]

    def _ruled(self, phase: Phase) -> Phase:
        # Under privacy one record could move a class across the threshold and change its whole sum; there
        # noise protects the sums, and a floor on the noisy counts replaces the threshold.
        if self._job.class_rules == "off" or self._job.privacy is not None:
            return phase
        return class_rules.attach(phase, self._setup.dataset.num_classes, sums=self._by_class)

    @functools.cached_property
    def _by_class(self) -> bool:
        """True if the job sums by class."""
        phases = (*self._setup.statistics_phases(), *self._setup.kinds)
        return any(item.per_class for phase in phases for item in phase.schema.fields)

    def _flagged(self, phase: Phase, *, needed: bool = True) -> Phase:
        return phase if self._job.privacy is not None else failures.attach(phase, self._job, needed=needed)

    def _normed(self, phase: Phase) -> Phase:
        # Under privacy an exact norm would be a release of its own, which nothing covers.
        if self._job.update_norm is None or self._job.privacy is not None:
            return phase
        return update_norms.attach(phase, self._job.update_norm)

    def _evaluated(self, phase: Phase, number: int) -> Phase:
        return evaluation.attach(phase, self._evaluation, self._term(f"round {number} evaluation"))

    def _term(self, purpose: str) -> evaluation.Term:
        private = self._setup.privacy
        if private is None or private.evaluation is None:
            return evaluation.exact
        return noisy_evaluation.term(private, purpose)

    @functools.cached_property
    def _evaluation(self) -> Schema:
        """Fields of the evaluation of the model received."""
        private, bins = self._setup.privacy, self._job.evaluation.score_bins
        if private is not None and private.evaluation is not None:
            return private.evaluation.schema(evaluation.FOLDS, bins)
        dataset = self._setup.dataset
        return evaluation.schema(dataset.num_classes, bins, findings=dataset.multi_label)

    @functools.cached_property
    def _closing(self) -> Exchange:
        evaluated = self._evaluation if self._setup.evaluates else None
        phase = self._flagged(closing.phase(evaluated, self._term("closing evaluation")), needed=False)
        return Exchange(CLOSING, self._job.rounds, phase, phase)

    @functools.cached_property
    def _personal(self) -> Exchange:
        last = self._setup.training_phases(self._job.rounds)[-1]
        return Exchange(
            PERSONAL, self._job.rounds, self._flagged(personal.phase(self._setup, last), needed=False)
        )
