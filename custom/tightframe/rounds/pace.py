"""Hold a silo's answers back, so that their timing discloses nothing about its records.

How long a silo works can depend on a single record (a first batch that fails, a whole training), and a server
can choose the state that one silo works on (``docs/threat-model.md``). So no answer leaves before a *floor*:
1.25 times the longest training of this silo in this run. Only trainings on a state that no server chose
count: the job's own start, states that follow from verified totals, and a rehearsal before the first work on
any other state. Work that takes longer raises the floor permanently, so few answers of a run can be late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tightframe.files import write_atomically

HEADROOM = 1.25
"""Ratio of the floor to the longest training: as much as trainings of one silo vary."""
POLL = 0.1
"""Seconds between checks whether the run was aborted, while a silo holds its answer back."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Pending(BaseModel):
    """The last work on records, whose state is not verified yet.

    Attributes:
        sum: the sum that the work was for.
        part: the part of the run whose duration it measures; None if it was not finished.
        seconds: its duration.
    """

    # Earlier versions wrote one more key.
    model_config = ConfigDict(frozen=True, extra="ignore")

    sum: str
    part: str | None
    seconds: Seconds


class _Times(BaseModel):
    """Durations of a silo's trainings, in seconds.

    Attributes:
        first: part of the run -> its first training on a verified state, in seconds.
        later: part of the run -> the longest one after that. It replaces the first, which read records from a
            cold disk.
        unverified: the longest work that raised the floor before its state was verified.
        pending: the last work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: dict[str, Seconds] = {}
    later: dict[str, Seconds] = {}
    unverified: Seconds = 0.0
    pending: _Pending | None = None

    @property
    def longest(self) -> float:
        # Work that has not raised the floor is left out: the next answer would tell how long it took.
        return max([self.unverified, *{**self.first, **self.later}.values()])

    def noting(self, part: str, seconds: float) -> _Times:
        """Return the times after work on a verified state."""
        if part not in self.first:
            return self.model_copy(update={"first": {**self.first, part: seconds}})
        longest = max(seconds, self.later.get(part, 0.0))
        return self.model_copy(update={"later": {**self.later, part: longest}})


@dataclass
class Work:
    """Work on records for one answer; its caller sets whether all of it was done."""

    whole: bool = False


class Pace:
    """Floor of one silo's answers in one run, kept in a file for the silo's next process.

    Args:
        on: whether answers are held back: for terms that others see, and not in a simulation.
        limit: seconds after which the server gives up on a silo (``site_timeout``), for a warning.
        stopped: returns True once the run is aborted; then nothing is held back any longer.
    """

    def __init__(
        self,
        path: Path,
        *,
        on: bool,
        limit: float,
        log: logging.Logger,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path, self.on, self._limit, self._log = path, on, limit, log
        self._stopped, self._clock, self._sleep = stopped, clock, sleep

    @property
    def floor(self) -> float:
        """Seconds that work on records lasts at least."""
        return HEADROOM * self._times().longest

    def lacks(self, part: str) -> bool:
        """Check whether work needs a rehearsal first.

        Args:
            part: of the run whose duration the work measures.
        """
        return self.on and part not in self._times().first

    def rehearsed(self, seconds: Mapping[str, float]) -> None:
        """Note the parts of the run that were rehearsed, with their seconds."""
        times = self._times()
        for part in sorted(set(seconds) - set(times.first)):
            times = times.noting(part, seconds[part])
        self._keep(times)

    @contextmanager
    def working(self, sum_id: str, part: str | None, *, known: bool) -> Iterator[Work]:
        """Hold work on records back until the floor, whether it succeeds or not, unless the run is aborted.

        Args:
            part: of the run whose duration it measures, if all of it is done; None if it measures none.
            known: its state is the job's start, or was verified before: no server chose it.
        """
        work = Work()
        if not self.on:
            yield work
            return
        started = self._clock()
        try:
            yield work
        finally:
            seconds = self._clock() - started
            floor = self.floor
            try:
                floor = self._note(sum_id, part if work.whole else None, seconds, known=known)
            finally:  # even if it cannot be noted, on a full disk
                self._hold(started + floor)

    def _hold(self, until: float) -> None:
        """Wait for a time, unless the run is aborted."""
        while (left := until - self._clock()) > 0 and not self._stopped():
            self._sleep(min(left, POLL))

    def verified(self, sum_id: str) -> None:
        """Note that this silo has revealed its shares of a sum, which verifies the sum's state.

        The floor stays where the work has raised it: others saw it take that long.
        """
        if not self.on:
            return
        times = self._times()
        if (pending := times.pending) is None or pending.sum != sum_id:
            return
        times = times.model_copy(update={"pending": None})
        self._keep(times if pending.part is None else times.noting(pending.part, pending.seconds))

    def _note(self, sum_id: str, part: str | None, seconds: float, *, known: bool) -> float:
        """Note work that is done; return its duration as others see it, in seconds."""
        times = self._times()
        if known:
            # The pending entry is of earlier work, perhaps of a job that this one resumes with the same sums.
            times = times.model_copy(update={"pending": None})
            self._keep(times if part is None else times.noting(part, seconds))
            return HEADROOM * times.longest
        floor, raised = HEADROOM * times.longest, HEADROOM * seconds
        pending = _Pending(sum=sum_id, part=part, seconds=seconds)
        longer = seconds if seconds > floor else times.unverified
        # On disk before anything is sent: a new process must know every duration that others have seen.
        self._keep(times.model_copy(update={"unverified": longer, "pending": pending}))
        if seconds <= floor:
            return floor
        self._log.info("work on records took %.1f s: from now on at least %.1f s", seconds, raised)
        if raised > self._limit:
            self._log.warning(
                "work on records lasts %.0f s for others, but the server gives a silo up after %.0f s: raise "
                "the job's `site_timeout`",
                raised,
                self._limit,
            )
        return raised

    def _times(self) -> _Times:
        try:
            return _Times.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Times()
        except ValidationError:
            self._log.warning("%s is damaged: trainings are timed anew, after a rehearsal", self._path)
            return _Times()

    def _keep(self, times: _Times) -> None:
        write_atomically(self._path, times.model_dump_json().encode(), mode=0o600)
