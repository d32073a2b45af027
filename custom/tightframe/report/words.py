"""Numbers and places of a run in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tightframe.report.values import Exchange


def shown(value: float | None, digits: int = 3) -> str:
    """A number for people; ``-`` where there is none.

    >>> shown(0.12345), shown(None)
    ('0.123', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def plural(number: int, noun: str) -> str:
    """``1 round``, ``2 rounds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def megabytes(number: int) -> str:
    """Bytes in MB, as a table shows them.

    >>> megabytes(1_234_567)
    '1.23'
    """
    return f"{number / 1e6:.2f}"


def sentence(items: Sequence[str]) -> str:
    """Names as they stand in a sentence.

    >>> sentence(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def dotted(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted keys, one by one; an empty mapping is a value.

    >>> dict(dotted({"rounds": 4, "training": {"epochs": 1}, "privacy": {}}))
    {'rounds': 4, 'training.epochs': 1, 'privacy': {}}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def exchange_name(kind: str, number: int, phase: int | None = None) -> str:
    """What one exchange is called: its kind, or its round, and its place where there are several.

    >>> exchange_name("train", 3, 1), exchange_name("closing", 4)
    ('round 3, phase 2', 'closing')
    """
    name = f"round {number}" if kind == "train" else kind
    return name if phase is None else f"{name}, phase {phase + 1}"


_SHORT = {"statistics": "stat", "before": "pre", "after": "post", "closing": "close", "personal": "own"}


def names(rows: Iterable[Exchange]) -> list[tuple[str, str]]:
    """A name and a short one for each exchange: its round, its phase where it has more, which try it is."""
    found = list(rows)
    phased = {(row.kind, row.round) for row in found if row.phase}
    seen: Counter[tuple[str, int, int]] = Counter()
    named = []
    for row in found:
        several = (row.kind, row.round) in phased
        name = exchange_name(row.kind, row.round, row.phase if several else None)
        brief = str(row.round) if row.kind == "train" else _SHORT.get(row.kind, row.kind)
        brief += f".{row.phase + 1}" if several else ""
        place = (row.kind, row.round, row.phase)
        seen[place] += 1
        if seen[place] > 1:
            name = f"{name}, try {seen[place]}"
        named.append((name, brief))
    return named
