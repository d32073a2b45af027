"""What a job's exact evaluations tell of a silo's validation and test records, in bits.

A score histogram or a confusion matrix is linear in the table that says how many records have each possible
row. Of yes/no columns all rows can be written down, and integer programming finds the table: 83 of 83 test
records of seven columns from the eleven evaluations of one honest job, all of ten columns from two jobs that
differ in the seed. No rule on a single number sees that: what is told by all of them counts.

So each evaluation costs the logarithm of how many answers it could have, with the numbers of records of each
class as known, and a fold holds the logarithm of how many tables of rows it could be (``record_values`` says
how many bits a row has). While less than half of that is opened (``evaluated_share``), the best programme
finds hardly more records than a guess from what all know: none of it could tell which; with one to three
times as much it finds all. The site adds up shares, in its ledger, over all jobs. In a table of many numbers
a hospital that steers the model reads one record long before: against that counts the number of models
(``max_evaluations``), starts among them: an author chooses seeds.

All is about one site's own records, and known before a job runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.config.policy import Policy
from tightframe.data.base import class_counts
from tightframe.learning.few_records.record_values import NUMBER_BITS
from tightframe.learning.one_sum import temperature
from tightframe.phases import Field, Fold
from tightframe.rounds.order import Place
from tightframe.rounds.phases import personal
from tightframe.rounds.riders import evaluation
from tightframe.rounds.setup import JobSetup
from tightframe.securesum.errors import EvaluationsError
from tightframe.securesum.site.journal import PARTS, Evaluated, History, Most, opened

PIXEL_BITS = 8
ALL = 10**3 * PARTS


@dataclass(frozen=True)
class Told:
    """What is told: of how many models, and how many bits of each fold."""

    models: int = 0
    validation: float = 0.0
    test: float = 0.0

    def __add__(self, other: Told) -> Told:
        return Told(self.models + other.models, self.validation + other.validation, self.test + other.test)


@dataclass(frozen=True)
class Evaluations:
    """The exact evaluations that a job plans at a site, and what the site lets all jobs open.

    Attributes:
        told: by place in the plan; only those that tell anything.
        held: bits that the site's folds hold.
        most: the site's limits over all jobs.
        config: SHA-256 of the job.
        smaller: what is left -> words for a job that would fit.
        withheld: folds that a withdrawal evaluates no more, because the limits leave no room for them.
    """

    told: Mapping[Place, Told]
    held: Told
    most: Most
    config: bytes
    smaller: Callable[[Most], str] = lambda left: ""
    withheld: tuple[Fold, ...] = ()

    @property
    def in_all(self) -> Told:
        """What the whole job tells."""
        return sum(self.told.values(), Told())

    def parts(self, told: Told) -> tuple[int, int, int]:
        """Return models and parts of what each fold holds, rounded up, as a journal has them."""
        return told.models, _parts(told.validation, self.held.validation), _parts(told.test, self.held.test)

    @property
    def wanted(self) -> tuple[int, int, int]:
        """What the entries of all sums of the job add up to."""
        models, validation, test = zip(*map(self.parts, (Told(), *self.told.values())), strict=True)
        return sum(models), sum(validation), sum(test)

    def in_words(self) -> tuple[str, ...]:
        """Say what the whole job tells of what has a limit, with the limit."""
        pairs = zip(opened(self.wanted), opened(self.most), strict=True)
        return tuple(f"{now} (at most {most.partition(' ')[0]} over all jobs)" for now, most in pairs if most)

    def fits(self, left: Most) -> bool:
        """Check whether the whole job fits into what is left."""
        return all(most is None or number <= most for number, most in zip(self.wanted, left, strict=True))

    def check(self, dataset: str, job: str, history: History) -> None:
        """Refuse a job that tells more than a site's limits leave.

        Raises:
            EvaluationsError: TF-627, with a smaller one that would fit.
        """
        try:
            history.check_evaluations(self.entry(dataset, job), self.most)
        except EvaluationsError as error:
            fits = self.smaller(history.left(dataset, self.most))
            found = f"{error.found}: {fits}"
            raise EvaluationsError(error.what, expected=error.expected, found=found) from None

    def entry(self, dataset: str, job: str, place: Place | None = None) -> Evaluated:
        """Return a journal entry of what a sum tells; without a place one to check a whole job with."""
        kind, number, index = place or ("job", 0, 0)
        numbers = self.wanted if place is None else self.parts(self.told[place])
        return Evaluated(dataset, job, number, f"{kind}-{index}", self.config, *numbers)


def of_job(
    setup: JobSetup,
    policy: Policy,
    labels: Mapping[Fold, NDArray[np.int64]],
    values: NDArray[np.float64] | None,
    untold: Iterable[str] = (),
) -> Evaluations:
    """Return what a job without privacy evaluates exactly at a site.

    Args:
        labels: of the validation and test records.
        values: unknown numbers of a record of each class (``record_values.count_values``); None of pictures.
        untold: folds that the site leaves out.
    """
    left_out, told = set(untold), dict[Place, Told]()
    for exchange in setup.plan:
        phase, found = exchange.phases[0], Told()
        for item in phase.schema.fields:
            found += _of_field(item, setup, labels, left_out)
        if found != Told():
            told[exchange.place] = found
    bits = _bits_of_rows(setup, values)
    held = Told(0, _held(setup, labels["validation"], bits), _held(setup, labels["test"], bits))
    return Evaluations(told, held, most(policy), bytes.fromhex(setup.job.sha256()))


def most(policy: Policy) -> Most:
    """Return a site's limits over all jobs."""
    share = None if policy.evaluated_share is None else int(policy.evaluated_share * PARTS)
    return Most(policy.max_evaluations, share, share)


def _parts(told: float, held: float) -> int:
    """Return the parts of what a fold holds that are told, at most as many as no limit allows."""
    return min(ALL, math.ceil(told / max(held, 1.0) * PARTS)) if told else 0


def answers(records: int, cells: int) -> float:
    """Return the bits of a histogram: the logarithm of how many ways there are to fill it.

    >>> round(answers(2, 2), 6), round(answers(41, 32))
    (1.584963, 68)
    """
    if records < 1 or cells < 2:
        return 0.0
    return (math.lgamma(records + cells) - math.lgamma(cells) - math.lgamma(records + 1)) / math.log(2)


def _of_field(
    item: Field, setup: JobSetup, labels: Mapping[Fold, NDArray[np.int64]], left_out: set[str]
) -> Told:
    """Return what one field of a sum tells."""
    if item.name == temperature.LOSSES:
        records, classes = len(labels["validation"]), setup.dataset.num_classes
        return Told(
            validation=0.0 if "validation" in left_out else temperature.reported_bits(records, classes)
        )
    if item.name in (personal.ACCURACY, personal.VALID_CLASSES, personal.LABEL_SHARE):
        return Told(test=0.0 if "test" in left_out else math.log2(2**personal.FRACTION_BITS + 1))
    if not item.name.startswith("evaluation/"):
        return Told()
    _, fold, kind = item.name.split("/", 2)
    if fold not in evaluation.FOLDS:
        raise ValueError(f"Expected an evaluation of {evaluation.FOLDS}, but got {item.name!r}.")
    bits = 0.0 if fold in left_out else _of_evaluation(kind, item, setup, labels[fold])
    first = fold == evaluation.FOLDS[0] and kind == "confusion"
    return Told(int(first), **{fold: bits})


def _of_evaluation(kind: str, item: Field, setup: JobSetup, labels: NDArray[np.int64]) -> float:
    """Return the bits of one field of an evaluation.

    With an even number of bins an answer of yes or no follows from the scores. Of two classes, so do the
    second one's scores.
    """
    bins, findings = setup.job.evaluation.score_bins, setup.dataset.multi_label
    if kind == "loss":
        return math.log2(len(labels) * evaluation.MOST_LOSS // evaluation.loss_step(bins) + 2)
    parts = _sizes(setup, labels)
    if kind == "confusion":
        if bins % 2 == 0 and (findings or len(parts) == 2):
            return 0.0
        cells = 2 if findings else len(parts)
        return sum(answers(own, cells) + findings * answers(other, cells) for own, other in parts)
    if kind == "scores":
        told = parts if findings or len(parts) != 2 else parts[:1]
        return sum(answers(own, bins) + answers(other, bins) for own, other in told)
    if kind == "records":  # which the records themselves count, too
        return 0.0
    raise ValueError(f"Expected an evaluation's field whose bits are known, but got {item.name!r}.")


def _sizes(setup: JobSetup, labels: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return of each class its records and all others, or of each finding those with and without it."""
    if labels.ndim == 2:
        return [(int((column == 1).sum()), int((column == 0).sum())) for column in labels.T]
    counts = class_counts(labels, setup.dataset.num_classes)
    return [(int(own), len(labels) - int(own)) for own in counts]


def _bits_of_rows(setup: JobSetup, values: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the bits of a record of each class; a picture's are its values, as far as they are counted."""
    classes: Any = setup.dataset.num_classes
    if values is None:
        return np.full(classes, float(setup.most_values * PIXEL_BITS))
    return np.asarray(values, np.float64) * NUMBER_BITS


def _held(setup: JobSetup, labels: NDArray[np.int64], bits: NDArray[np.float64]) -> float:
    """Return the bits that a fold holds: the logarithm of how many tables of rows it could be.

    >>> import types
    >>> two = types.SimpleNamespace(dataset=types.SimpleNamespace(num_classes=2))
    >>> round(_held(two, np.array([0] * 41 + [1] * 42), np.array([7.0, 7.0])))
    264
    """
    if labels.ndim == 2:  # what a record's findings are is counted by each
        return _tables(len(labels), float(bits.min(initial=0.0)))
    counts = class_counts(labels, setup.dataset.num_classes)
    return sum(_tables(int(number), float(each)) for number, each in zip(counts, bits, strict=True))


def _tables(records: int, bits: float) -> float:
    """Return the bits of so many rows without their order, of 2^bits possible rows."""
    steps = np.arange(records, dtype=np.float64)
    return float((np.logaddexp2(bits, np.log2(np.maximum(steps, 1e-300))) - np.log2(steps + 1)).sum())
