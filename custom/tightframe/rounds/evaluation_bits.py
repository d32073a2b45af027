"""Bits that a job's exact evaluations disclose of a silo's validation and test records.

A score histogram or a confusion matrix is linear in the table that says how many records have each possible
row. Of yes/no columns all rows can be written down, and integer programming finds the table: 83 of 83 test
records of seven columns from the eleven evaluations of one honest job, all of ten columns from two jobs that
differ in the seed. No rule on a single number prevents that: the bits of all numbers together count.

So each evaluation costs the logarithm of its number of possible answers, given the number of records of each
class, and a fold holds the logarithm of the number of tables of rows it could be (``record_values`` gives the
bits of a row). While less than half of that is opened (``evaluated_share``), the best program finds hardly
more records than a guess from public knowledge, and cannot tell which ones are right; with one to three times
as much it finds all. The site adds up shares, in its ledger, over all jobs. In a table of many numbers a
hospital that steers the model reads one record long before: against that the number of models is limited
(``max_evaluations``), initial models included, because a job's author chooses seeds.

All bits concern one site's own records, and are known before a job runs.
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
from tightframe.rounds.declaration import OWN
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
    """Bits disclosed: the number of evaluated models, and the bits of each fold."""

    models: int = 0
    validation: float = 0.0
    test: float = 0.0

    def __add__(self, other: Told) -> Told:
        return Told(self.models + other.models, self.validation + other.validation, self.test + other.test)


@dataclass(frozen=True)
class Evaluations:
    """The exact evaluations that a job plans at a site, and what the site lets all jobs open.

    Attributes:
        told: disclosed bits by place in the plan; only places that disclose any.
        held: bits that the site's folds hold.
        most: the site's limits over all jobs.
        config: SHA-256 of the job.
        smaller: remaining limits -> advice for a smaller job that would fit.
        withheld: folds that a withdrawal no longer evaluates, because the limits leave no room for them.
    """

    told: Mapping[Place, Told]
    held: Told
    most: Most
    config: bytes
    smaller: Callable[[Most], str] = lambda left: ""
    withheld: tuple[Fold, ...] = ()

    @property
    def in_all(self) -> Told:
        """Bits that the whole job discloses."""
        return sum(self.told.values(), Told())

    def parts(self, told: Told) -> tuple[int, int, int]:
        """Return models, and disclosed parts of each fold's bits, rounded up, in a journal's units."""
        return told.models, _parts(told.validation, self.held.validation), _parts(told.test, self.held.test)

    @property
    def wanted(self) -> tuple[int, int, int]:
        """Total of the entries of all sums of the job."""
        models, validation, test = zip(*map(self.parts, (Told(), *self.told.values())), strict=True)
        return sum(models), sum(validation), sum(test)

    def in_words(self) -> tuple[str, ...]:
        """Describe what the whole job discloses, where there is a limit, with the limit."""
        pairs = zip(opened(self.wanted), opened(self.most), strict=True)
        return tuple(f"{now} (at most {most.partition(' ')[0]} over all jobs)" for now, most in pairs if most)

    def fits(self, left: Most) -> bool:
        """Check whether the whole job fits into the remaining limits."""
        return all(most is None or number <= most for number, most in zip(self.wanted, left, strict=True))

    def check(self, dataset: str, job: str, history: History) -> None:
        """Refuse a job that discloses more than a site's remaining limits.

        Raises:
            EvaluationsError: TF-627, with a smaller job that would fit.
        """
        try:
            history.check_evaluations(self.entry(dataset, job), self.most)
        except EvaluationsError as error:
            fits = self.smaller(history.left(dataset, self.most))
            found = f"{error.found}: {fits}"
            raise EvaluationsError(error.what, expected=error.expected, found=found) from None

    def entry(self, dataset: str, job: str, place: Place | None = None) -> Evaluated:
        """Return the journal entry of a sum's disclosure; without a place one that checks a whole job."""
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
    """Return the exact evaluations of a job without privacy at a site.

    Args:
        labels: of the validation and test records.
        values: unknown numbers of a record of each class (``record_values.count_values``); None for pictures.
        untold: folds that the site leaves out.
    """
    left_out, by_place = set(untold), dict[Place, Told]()
    for exchange in setup.plan:
        phase, opened = exchange.phases[0], Told()
        for item in phase.schema.fields:
            opened += _of_field(item, setup, labels, left_out)
        if opened != Told():
            by_place[exchange.place] = opened
    bits = _bits_of_rows(setup, values)
    held = Told(0, _held(setup, labels["validation"], bits), _held(setup, labels["test"], bits))
    return Evaluations(by_place, held, most(policy), bytes.fromhex(setup.job.sha256()))


def most(policy: Policy) -> Most:
    """Return a site's limits over all jobs."""
    share = None if policy.evaluated_share is None else int(policy.evaluated_share * PARTS)
    return Most(policy.max_evaluations, share, share)


def _parts(bits: float, held: float) -> int:
    """Return the disclosed parts of a fold's bits, capped at a number that no limit allows."""
    return min(ALL, math.ceil(bits / max(held, 1.0) * PARTS)) if bits else 0


def answers(records: int, cells: int) -> float:
    """Return the bits of a histogram: the logarithm of the number of ways to fill it.

    >>> round(answers(2, 2), 6), round(answers(41, 32))
    (1.584963, 68)
    """
    if records < 1 or cells < 2:
        return 0.0
    return (math.lgamma(records + cells) - math.lgamma(cells) - math.lgamma(records + 1)) / math.log(2)


def _of_field(
    item: Field, setup: JobSetup, labels: Mapping[Fold, NDArray[np.int64]], left_out: set[str]
) -> Told:
    """Return the disclosure of one field of a sum."""
    if item.name == temperature.LOSSES:
        records, classes = len(labels["validation"]), setup.dataset.num_classes
        return Told(
            validation=0.0 if "validation" in left_out else temperature.reported_bits(records, classes)
        )
    if item.name in (personal.ACCURACY, personal.VALID_CLASSES, personal.LABEL_SHARE):
        return Told(test=0.0 if "test" in left_out else math.log2(2**personal.FRACTION_BITS + 1))
    if not item.name.startswith("evaluation/") or OWN in left_out:
        return Told()
    _, fold, kind = item.name.split("/", 2)
    if fold not in evaluation.FOLDS:
        raise ValueError(f"Expected an evaluation of {evaluation.FOLDS}, but got {item.name!r}.")
    bits = 0.0 if fold in left_out else _of_evaluation(kind, item, setup, labels[fold])
    first = fold == evaluation.FOLDS[0] and kind == "confusion"
    return Told(int(first), **{fold: bits})


def _of_evaluation(kind: str, item: Field, setup: JobSetup, labels: NDArray[np.int64]) -> float:
    """Return the bits of one field of an evaluation.

    With an even number of bins a yes/no answer follows from the scores. With two classes, so do the scores of
    the second.
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
        counted = parts if findings or len(parts) != 2 else parts[:1]
        return sum(answers(own, bins) + answers(other, bins) for own, other in counted)
    if kind == "records":  # included in the count of the records
        return 0.0
    raise ValueError(f"Expected an evaluation's field whose bits are known, but got {item.name!r}.")


def _sizes(setup: JobSetup, labels: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return for each class its records and all others, or for each finding those with and without it."""
    if labels.ndim == 2:
        return [(int((column == 1).sum()), int((column == 0).sum())) for column in labels.T]
    counts = class_counts(labels, setup.dataset.num_classes)
    return [(int(own), len(labels) - int(own)) for own in counts]


def _bits_of_rows(setup: JobSetup, values: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the bits of a record of each class; for a picture those of the values that are counted."""
    classes: Any = setup.dataset.num_classes
    if values is None:
        return np.full(classes, float(setup.most_values * PIXEL_BITS))
    return np.asarray(values, np.float64) * NUMBER_BITS


def _held(setup: JobSetup, labels: NDArray[np.int64], bits: NDArray[np.float64]) -> float:
    """Return the bits that a fold holds: the logarithm of the number of tables of rows it could be.

    >>> import types
    >>> two = types.SimpleNamespace(dataset=types.SimpleNamespace(num_classes=2))
    >>> round(_held(two, np.array([0] * 41 + [1] * 42), np.array([7.0, 7.0])))
    264
    """
    if labels.ndim == 2:  # each finding is counted by itself
        return _tables(len(labels), float(bits.min(initial=0.0)))
    counts = class_counts(labels, setup.dataset.num_classes)
    return sum(_tables(int(count), float(of_record)) for count, of_record in zip(counts, bits, strict=True))


def _tables(records: int, bits: float) -> float:
    """Return the bits of a number of unordered rows, of 2^bits possible rows."""
    steps = np.arange(records, dtype=np.float64)
    return float((np.logaddexp2(bits, np.log2(np.maximum(steps, 1e-300))) - np.log2(steps + 1)).sum())
