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


def with_interval(
    value: float | None,
    interval: Sequence[float] | None = None,
    over: tuple[int, int] | None = None,
    digits: int = 3,
) -> str:
    """A metric with the interval of its noise and the classes that it is over, where it has them.

    >>> with_interval(0.578, [0.412, 0.721], (3, 8)), with_interval(0.578), with_interval(None, None, (0, 8))
    ('0.578 [0.412, 0.721], 3 of 8 classes', '0.578', '-, 0 of 8 classes')
    """
    text = shown(value, digits)
    if interval is not None and value is not None:
        text += f" [{shown(interval[0], digits)}, {shown(interval[1], digits)}]"
    return text if over is None else f"{text}, {over[0]} of {over[1]} classes"


_COUNTED = {"balanced_accuracy": "classes_told", "auroc": "auroc_classes"}


def metric(told: Mapping[str, Any], name: str, digits: int = 3) -> str:
    """A metric of a fold, as result files have it: with noise never without its interval and classes.

    >>> metric({"accuracy": 0.5}, "accuracy")
    '0.500'
    """
    number = told.get(_COUNTED.get(name, ""))
    classes = told.get("classes") or len(told.get("recall") or ())
    over = (number, classes) if told.get("noisy") and number is not None else None
    return with_interval(told.get(name), told.get(f"{name}_interval"), over, digits)


def one_answer(told: Mapping[str, Any] | None) -> str | None:
    """Words for a model that gives one answer, whatever the record; None for any other.

    Args:
        told: ``one_answer`` of a fold's metrics: ``class``, ``share`` of the other classes' records that have
            this answer, too, the share's ``interval`` where counts are noisy, and whether it is ``certain``.

    >>> one_answer({"class": "nv", "share": 1.0, "interval": None, "certain": True})
    'the model gives one answer: nv, for all records'
    """
    if told is None:
        return None
    if told.get("interval") is None:
        how = "all" if told["share"] == 1.0 else "nearly all"
        return f"the model gives one answer: {told['class']}, for {how} records"
    share = with_interval(told.get("share"), told["interval"], digits=2)
    if told.get("certain"):
        return (
            f"by noisy counts the model gives one answer: {told['class']}, also for {share} of the other "
            "classes' records"
        )
    return (
        f"the noise leaves open whether the model ever answers anything but {told['class']} (given for "
        f"{share} of the other classes' records)"
    )


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
