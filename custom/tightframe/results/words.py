"""Texts for numbers, exchanges and the content of a silo's terms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightframe.results.parts.evaluation import FoldMetrics, OneAnswer
    from tightframe.results.statistics import Count


def rounded_up(value: float, digits: int = 3) -> str:
    """Round a cost up, for display.

    >>> rounded_up(5.81234), rounded_up(8.0)
    ('5.813', '8.000')
    """
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING))


def rounded_down(value: float, digits: int = 3) -> str:
    """Round the rest of a budget down, for display."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))


def shown(value: float | None, digits: int = 3) -> str:
    """Return a number as text; ``-`` for None.

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
    """Return a metric with its interval and the number of classes that it is over, if it has them.

    >>> with_interval(0.578, [0.412, 0.721], (3, 8)), with_interval(0.578), with_interval(None, None, (0, 8))
    ('0.578 [0.412, 0.721], 3 of 8 classes', '0.578', '-, 0 of 8 classes')
    """
    text = shown(value, digits)
    if interval is not None and value is not None:
        text += f" [{shown(interval[0], digits)}, {shown(interval[1], digits)}]"
    return text if over is None else f"{text}, {over[0]} of {over[1]} classes"


_COUNTED = {"balanced_accuracy": "classes_told", "auroc": "auroc_classes"}


def count_in_words(count: Count) -> str:
    """Return a number of records with its withheld part, which is never shown as zero.

    >>> from tightframe.results.statistics import Count
    >>> count_in_words(Count(value=12)), count_in_words(Count(value=12, withheld=1))
    ('12', '12 + withheld at 1 silo')
    >>> count_in_words(Count(value=None, withheld=2)), count_in_words(Count(value=None))
    ('withheld', 'withheld')
    >>> count_in_words(Count(value=9, interval=(4, 14)))
    '9 [4, 14]'
    """
    if count.value is None:
        return "withheld"
    if count.interval is not None:
        return f"{count.value} [{count.interval[0]}, {count.interval[1]}]"
    return str(count.value) + (f" + withheld at {plural(count.withheld, 'silo')}" if count.withheld else "")


def metric(fold: FoldMetrics, name: str, digits: int = 3) -> str:
    """Return a fold's metric; a noisy one with its interval and classes.

    >>> from tightframe.results.parts.evaluation import FoldMetrics
    >>> metric(FoldMetrics(records=2, accuracy=0.5), "accuracy")
    '0.500'
    """
    number = getattr(fold, _COUNTED[name]) if name in _COUNTED else None
    classes = fold.classes or len(fold.recall)
    over = (number, classes) if fold.noisy and number is not None else None
    return with_interval(getattr(fold, name), getattr(fold, f"{name}_interval", None), over, digits)


def one_answer(answer: OneAnswer | None) -> str | None:
    """Describe a model that gives one answer to every record; None for any other.

    >>> from tightframe.results.parts.evaluation import OneAnswer
    >>> one_answer(OneAnswer(of_class="nv", share=1.0))
    'the model gives one answer: nv, for all records'
    """
    if answer is None:
        return None
    if answer.interval is None:
        how = "all" if answer.share == 1.0 else "nearly all"
        return f"the model gives one answer: {answer.of_class}, for {how} records"
    share = with_interval(answer.share, answer.interval, digits=2)
    if answer.certain:
        return (
            f"by noisy counts the model gives one answer: {answer.of_class}, also for {share} of the other "
            "classes' records"
        )
    return (
        f"the noise leaves open whether the model ever answers anything but {answer.of_class} (given for "
        f"{share} of the other classes' records)"
    )


def untested(recall: Mapping[str, float | None]) -> str | None:
    """Name the classes without an exactly counted record; None if there are none.

    >>> untested({"a": 0.5, "b": 1.0, "c": None})
    'no counted test record is of c: balanced accuracy is the mean over 2 of 3 classes'
    >>> untested({"a": 0.5, "b": 1.0})
    """
    missing = [name for name, value in recall.items() if value is None]
    if not missing:
        return None
    over = f"{len(recall) - len(missing)} of {len(recall)} classes"
    return f"no counted test record is of {sentence(missing)}: balanced accuracy is the mean over {over}"


def without_others(epsilon: float) -> str:
    """State the epsilon without the other hospitals' noise."""
    return (
        "This counts on the noise of other hospitals in the joint sums. If none of them added any, it would "
        f"be epsilon {rounded_up(epsilon)}."
    )


NOT_COUNTED = (
    "Not counted: the exact totals of {} at this hospital. Whoever sees those, too, can become surer than "
    "that: of exact totals no limit is proved."
)


def in_their_case(name: str, names: Collection[str]) -> str:
    """Return the only name that equals this one but for case; the name itself if there is none.

    >>> in_their_case("mel", ["MEL", "NV"]), in_their_case("x", ["X", "x"]), in_their_case("y", ["X"])
    ('MEL', 'x', 'y')
    """
    near = [other for other in names if other.casefold() == name.casefold()]
    return near[0] if len(near) == 1 else name


def plural(number: int, noun: str) -> str:
    """Count a noun: ``1 round``, ``2 rounds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def megabytes(number: int) -> str:
    """Return bytes in MB, for a table.

    >>> megabytes(1_234_567)
    '1.23'
    """
    return f"{number / 1e6:.2f}"


def sentence(items: Sequence[str]) -> str:
    """Join names with commas and `and`.

    >>> sentence(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def dotted(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values under dotted keys; an empty mapping is a value.

    >>> dict(dotted({"rounds": 4, "training": {"epochs": 1}, "privacy": {}}))
    {'rounds': 4, 'training.epochs': 1, 'privacy': {}}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def exchange_name(kind: str, number: int, phase: int | None = None) -> str:
    """Name an exchange: its kind or round, and its phase if there are several.

    >>> exchange_name("train", 3, 1), exchange_name("closing", 4)
    ('round 3, phase 2', 'closing')
    """
    name = f"round {number}" if kind == "train" else kind
    return name if phase is None else f"{name}, phase {phase + 1}"


def absent_classes(
    classes: Sequence[str], *, in_sums_only: bool, least: Sequence[int], holders: int, noisy: bool = False
) -> str:
    """Name the classes that the class rules left out of a model, why, and what to change.

    Args:
        in_sums_only: the model is trained and lacks only their class sums; otherwise it is one sum's, and
            never answers them.
        least: each silo's minimum of patients of a class; empty without the class rules.
        holders: least number of silos.
        noisy: the sum has the noise of differential privacy.

    >>> absent_classes(["nv"], in_sums_only=False, least=[5, 5], holders=3).split(". ")[0]
    'nv is not in the model, which never answers it: fewer than 3 silos have 5 patients of it'
    """
    named, one = sentence(classes), len(classes) == 1
    it, verb = ("it", "is") if one else ("them", "are")
    what = f"{named} {verb} not in the model, which never answers {it}:"
    if in_sums_only:
        what = f"no class sum of {named} was used, because"
    if noisy:
        return f"{what} the noisy sum has too few records of {it}. Take more records, or fedavg."
    if not least:
        return f"{what} no silo gave a training record of {it}."
    low, high = min(least), max(least)
    patients = f"{low}" if low == high else f"{low} to {high}"
    ways = f"Take more silos that have {it}" + (" or" if in_sums_only else ", another method (fedavg) or")
    return (
        f"{what} fewer than {holders} silos have {patients} patients of "
        f"{it if one else 'each of them'}. {ways} class_rules=off, with which a class sum can be one silo's."
    )


SUMS: Mapping[str, str] = {
    "statistics": "statistics, before round 1",
    "before": "before round 1",
    "train": "training rounds",
    "after": "after the last round",
    "closing": "closing, on the last model",
    "personal": "personal models",
}
"""Kind of sums -> text."""
TERMS: Mapping[str, str] = {
    "classes": "flags of the classes that it holds",
    "closing": "a note that it has closed the run",
    "evaluation": "counts of right and wrong answers and histograms of scores, by class",
    "frozen": "sums of frozen features and of their products, counts of records, by class",
    "gradient": "gradients of the model",
    "moments": "means and variances of features, by class",
    "own": "a constant in place of an update",
    "failed": "a flag that it could not contribute",
    "norms": "the range of its update's norm",
    "personal": "accuracies of its personal model, in steps of 1/32",
    "privacy": "its range of spent epsilon",
    "prototype": "sums of features, by class",
    "prototypes": "sums of features, by class",
    "released": "products of features, sums of features and counts of records, by class",
    "statistics": "counts of records, moments of inputs",
    "temperature": "losses of validation records at several temperatures",
    "training": "training losses",
    "update": "changes of the model",
}
"""First part of a field's name -> meaning; other fields are a method's own and shown by name."""


def described(numbers: Mapping[str, int], times: int = 1, terms_with: Mapping[str, int] | None = None) -> str:
    """Describe the numbers in a term.

    Args:
        numbers: by the first part of the fields' names.
        times: number of such terms.
        terms_with: number of terms with these numbers, by name; all by default.

    >>> described({"update": 1226, "failed": 1}, 20, {"update": 20, "failed": 2})
    'changes of the model (1,226); a flag that it could not contribute, in 2 of them (1)'
    """
    terms = {name: times for name in numbers} | dict(terms_with or {})
    notes = {name: f", in {terms[name]} of them" if terms[name] < times else "" for name in numbers}
    return "; ".join(f"{TERMS.get(name, name)}{notes[name]} ({n:,})" for name, n in numbers.items())
