"""The order of a run's exchanges: which may come after a sum, from the plan's shape alone.

Silos refuse any other order, and a transcript with another order is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from tightframe.securesum.messages import SumId

Kind = Literal["statistics", "before", "train", "after", "closing", "personal"]
STATISTICS: Final = "statistics"
BEFORE: Final = "before"
TRAIN: Final = "train"
AFTER: Final = "after"
CLOSING: Final = "closing"
PERSONAL: Final = "personal"
KINDS: tuple[Kind, ...] = (STATISTICS, BEFORE, TRAIN, AFTER, CLOSING, PERSONAL)
MAY_STAY_SHUT = (AFTER, CLOSING)
"""Kinds of exchanges whose sum a run can do without."""

Place = tuple[str, int, int]
"""Kind, round and index of an exchange."""
Group = tuple[str, int, int]
"""Kind, round and number of the exchanges of a kind in a round."""


def place_of(sum_id: SumId) -> Place:
    """Return the place of the exchange that a sum is a try of; its index is -1 if the id names none."""
    kind, _, index = sum_id.phase.rpartition("-")
    return kind, sum_id.round, int(index) if index.isdecimal() else -1


def after(groups: Iterable[Group], last: Place | None) -> Iterator[Place]:
    """Yield the places that may come after a sum: the next one, and those behind it while it may stay shut.

    Args:
        groups: of the plan, in order; at least from the group of ``last`` on.
        last: place of the last opened sum; None if there is none.
    """
    for kind, number, count in groups:
        first = 0
        if last is not None:
            if (kind, number) != last[:2]:
                continue
            first, last = last[2] + 1, None
        for index in range(first, count):
            yield kind, number, index
            if kind not in MAY_STAY_SHUT:
                return


def position(place: Place) -> tuple[int, int, int]:
    """Return the sort key of places in a run's order."""
    kind, number, index = place
    return tuple(map(str, KINDS)).index(kind), number, index


def may_follow(schemas: Iterable[str], last: Place | None, now: Place) -> bool:
    """Check whether a sum may rest on another one, by what the names of a run's schemas tell of its plan.

    They do not tell how many exchanges a round has: each may be its last one.

    Args:
        schemas: their names begin with kind and index.
        last: the sum whose total the other rests on; None if that is the run's first.
    """
    counts = dict.fromkeys(map(str, KINDS), 0)
    for name in schemas:
        kind, _, index = name.partition("/")[0].rpartition("-")
        if kind in counts and index.isdecimal():
            counts[kind] = max(counts[kind], int(index) + 1)
    rounds = {number: index + 1 for kind, number, index in filter(None, (last, now)) if kind == TRAIN}
    first = last[1] if last is not None and last[0] == TRAIN else 1
    # No exchange of a later round may come next: a transcript's author chooses the round number.
    numbers = [number for number in (first, first + 1) if number <= now[1] and counts[TRAIN]]
    groups = [
        *((kind, 0, counts[kind]) for kind in (STATISTICS, BEFORE)),
        *((TRAIN, number, rounds.get(number, 1)) for number in numbers),
        *((kind, now[1], counts[kind]) for kind in (AFTER, CLOSING, PERSONAL)),
    ]
    return now in after(groups, last)
