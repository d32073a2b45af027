"""Withdraw records from a finished run whose model is a function of one sum.

Such a model is a function of G, B and n (``feature_sums``), which are sums of integers. So the stored total
plus each silo's ``sums without the records - sums of the run`` is, bit for bit, the total of a run without
them, and so is everything computed from it. There are three exchanges::

    asked      how many records of each fold are withdrawn, at how many silos
    classes    each class at how many silos; who holds which
    withdraw   the differences of G, B and n -> the total, and the head in closed form

A silo first recomputes its sums of the run and compares them with the SHA-256 that it kept: what it takes out
must be what is in the total. Sums without the records follow the class rules anew: a class of which a silo
now has too few records leaves the total with all of that silo's records, as in a run without them.

**What the difference of both totals tells** is the sum of the withdrawn records by class. So it is opened
only if

- enough records are withdrawn, at three silos or more, and of each class at none or at three or more;
- each silo withdraws none, or enough by its own rule: sums of a few records' features, or of products, tell
  these records (``learning.few_records.products``), and what others withdraw a silo knows only from them;
- enough records stay: the second exchange counts all that leave before the sums are requested. Classes are
  requested only once the numbers are verified to be enough: of a single record they would tell its class.

**Colluding silos** can send any numbers. So whatever totals say, a silo takes records out only if of no class
fewer than its own ``min_class_count`` would leave, nor fewer patients where they are known (``check_own``):
the opened difference is then of that many, even if it is of nobody else's.

**Evaluations** before and after a withdrawal differ in the same way. So a fold of which some records are
withdrawn, but too few by the same rule, is no longer evaluated, in this run and in those that continue from
it (``withheld``). Without validation records the head keeps its temperature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.errors import RunError
from tightframe.learning import model_update
from tightframe.learning.few_records.distinct_rows import (
    BITS,
    DistinctRows,
    count_fields,
    counted,
    opened_counts,
    own_rows,
)
from tightframe.learning.few_records.products import (
    LEAVING,
    LOSING,
    ClassSums,
    Products,
)
from tightframe.learning.few_records.record_values import MOST
from tightframe.learning.one_sum import temperature
from tightframe.learning.one_sum.feature_sums import (
    COUNTS,
    RECORD_BOUND,
    RECORDS,
    SUMS,
    admitted_classes,
    counts_field,
    frozen,
    no_sums,
    sum_fields,
)
from tightframe.models import feature_width
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Fold,
    Phase,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
    Withdrawal,
)

TOTAL = "total/"
"""Prefix of the opened total's names in ``ServerState.extra``, int64 in multiples of 2^-24."""
OWN_SHA256, OWN_ADMITTED = "sums/sha256", "sums/admitted"
"""In a silo's own state: SHA-256 of its term of the total (32,), and the classes in it (C,); uint8."""
ASKED, CLEARED = "withdrawn/asked", "withdrawn/cleared"
"""Names in ``ServerState.extra`` of the SHA-256 of the state that the withdrawal began with, uint8 (32,):
once the numbers, and once the classes, have passed."""
EVALUATED: tuple[Fold, ...] = ("validation", "test")
WITHHELD = "withdrawn/withheld"
"""Name in ``ServerState.extra`` of a mask of the ``EVALUATED`` folds that are not evaluated, uint8 (2,)."""
NAMED, SILOS, CLASSES = "withdrawn/named", "withdrawn/silos", "withdrawn/classes"
NUMBER = "withdrawn/number"
FOLD_NAMED, FOLD_SILOS, FOLD_SHORT, FOLD_CLASSES = (
    {fold: f"withdrawn/{fold}/{name}" for fold in EVALUATED}
    for name in ("named", "silos", "short", "classes")
)
"""The same for each fold, and the number of silos at which too few of its records leave or stay."""
LEFT, STAY = "withdrawn/", "stay/"
MIN_SILOS = 3
"""Least number of silos that must withdraw records, as of holders of a class."""
REFUSED = "TF-523"
Solved = Callable[[ServerState, Totals], ServerState]


@dataclass(frozen=True)
class _Terms:
    """A silo's sums before and after a withdrawal.

    Attributes:
        before, after: tensors of ``feature_sums.sum_fields``.
        changed: rows that leave the sums or join them.
        staying: rows of all records that stay.
    """

    before: Tensors
    after: Tensors
    changed: DistinctRows
    staying: DistinctRows

    @property
    def width(self) -> int:
        """Feature width d."""
        return self.before[SUMS].shape[1]


def kept_total(totals: Totals) -> dict[str, torch.Tensor]:
    """Return the opened total as integers for the state, the same on every machine."""
    return {
        TOTAL + name: (torch.as_tensor(total, dtype=torch.float64) * 2.0**BITS).round().to(torch.int64)
        for name, total in totals.items()
    }


def stored_total(state: ServerState) -> dict[str, torch.Tensor]:
    """Return the total that a state keeps, by field name, float64; empty if it keeps none."""
    return {
        name.removeprefix(TOTAL): item.to(torch.float64) / 2.0**BITS
        for name, item in state.extra.items()
        if name.startswith(TOTAL)
    }


def records_in(state: ServerState) -> int | None:
    """Return the number of records in the total that a state keeps; None if it keeps none."""
    total = stored_total(state)
    return round(float(total[RECORDS])) if RECORDS in total else None


def own_state(sums: Tensors, admitted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the digest and the classes of a silo's term, which it keeps for a later withdrawal.

    Args:
        sums: of ``sum_fields``.
        admitted: classes in it, bool (C,).
    """
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(name.encode() + b"\0" + sums[name].detach().cpu().double().numpy().tobytes())
    return {
        OWN_SHA256: torch.tensor(list(digest.digest()), dtype=torch.uint8),
        OWN_ADMITTED: admitted.detach().cpu().to(torch.uint8),
    }


def withheld(state: ServerState) -> tuple[Fold, ...]:
    """Return the folds that are not evaluated because too few of their records were withdrawn."""
    flags = state.extra.get(WITHHELD)
    return () if flags is None else tuple(fold for fold, flag in zip(EVALUATED, flags, strict=True) if flag)


def phases(
    classes: int, width: int, withdrawal: Withdrawal, solved: Solved, *, products: bool
) -> tuple[Phase, Phase, Phase]:
    """Return the three exchanges.

    Args:
        width: feature width d.
        withdrawal: as the job asks for it.
        solved: (state, total) -> the state with the closed form's head and the kept total.
        products: whether G is summed.
    """
    return (
        _asked(withdrawal, products=products),
        _classes(classes, withdrawal),
        _withdraw(classes, width, withdrawal, solved, products=products),
    )


def _asked(withdrawal: Withdrawal, *, products: bool) -> Phase:
    numbers = [NAMED, *FOLD_NAMED.values()]
    flags = [SILOS, *FOLD_SILOS.values(), *FOLD_SHORT.values()]
    fields = (
        *(Field(name, (), bound=float(withdrawal.least), static=True, bits=0) for name in numbers),
        *(Field(name, (), bound=1.0, static=True, bits=0) for name in flags),
    )

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        terms = _terms(silo, received, state, products=products)  # refuses if its sums are others by now
        check_own(silo, state, withdrawal)
        check_products(silo, terms.changed, terms.width, products=products)
        # No larger than the rule needs: a refused withdrawal tells no silo's whole number.
        count = _leaving(silo, state).sum().clamp(max=withdrawal.least)
        tensors = {NAMED: count, SILOS: (count > 0).double()}
        for fold in EVALUATED:
            labels, _ = silo.withdrawn_from(fold)
            gone = torch.tensor(float(min(len(labels), withdrawal.least)), dtype=torch.float64)
            tensors |= {FOLD_NAMED[fold]: gone, FOLD_SILOS[fold]: (gone > 0).double()}
            short = _few_of_own_fold(silo, fold, withdrawal)
            tensors[FOLD_SHORT[fold]] = torch.tensor(float(short), dtype=torch.float64)
        return Contribution(tensors, None)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        _check_all(cohort)
        cohort.check_flags(totals, (SILOS, *FOLD_SILOS.values(), *FOLD_SHORT.values()))
        cohort.check_flags(totals, numbers, each=withdrawal.least)
        check_numbers(totals, withdrawal)
        kept = withheld(state)  # its last counts opened are of an earlier run
        few = [fold in kept or few_of_fold(totals, fold, withdrawal) for fold in EVALUATED]
        flags = torch.tensor(few, dtype=torch.uint8)
        return state.evolve(extra={**state.extra, ASKED: _as_bytes(withdrawal.start), WITHHELD: flags})

    return Phase("asked", Schema(fields), model_update.broadcast_of, contribute, update)


def _classes(classes: int, withdrawal: Withdrawal) -> Phase:
    # Of the class rules' field only the flags are needed: who holds a class now. With a bound of 1 a silo
    # that fails sends no numbers of records in it, either.
    names = [CLASSES, *FOLD_CLASSES.values()]
    flags = tuple(Field(name, (classes,), bound=1.0, static=True, bits=0) for name in names)

    def broadcast(state: ServerState) -> Tensors:
        return {name: state.extra[name] for name in (ASKED, WITHHELD) if name in state.extra}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        _check_passed(received, ASKED, withdrawal)
        none = torch.zeros(classes, dtype=torch.float64)
        counts = {CLASSES: _leaving(silo, state)} if withdrawal.by_class else {}
        for fold, few in zip(EVALUATED, received[WITHHELD], strict=True):
            if withdrawal.by_class and not few:
                labels, _ = silo.withdrawn_from(fold)
                counts[FOLD_CLASSES[fold]] = torch.bincount(labels, minlength=classes)
        flags = {name: (counts.get(name, none) > 0).double() for name in names}
        return Contribution({COUNTS: none, NUMBER: _leaving_in_all(silo, state, withdrawal), **flags}, None)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        _check_all(cohort)
        cohort.check_flags(totals, names)
        cohort.check_flags(totals, [NUMBER], each=RECORD_BOUND)
        check_classes(totals, withdrawal)
        few = [
            bool(flag) or (withdrawal.by_class and bool(_at_few(totals[FOLD_CLASSES[fold]])))
            for fold, flag in zip(EVALUATED, state.extra[WITHHELD], strict=True)
        ]
        extra = {name: item for name, item in state.extra.items() if name not in (ASKED, WITHHELD)}
        if any(few):
            extra[WITHHELD] = torch.tensor(few, dtype=torch.uint8)
        extra[LEAVING] = torch.as_tensor(totals[NUMBER], dtype=torch.float64)
        loses = torch.as_tensor(totals[CLASSES]) > 0.5
        extra[LOSING] = loses if withdrawal.by_class else torch.ones_like(loses)
        return state.evolve(extra={**extra, CLEARED: _as_bytes(withdrawal.start)})

    counts = replace(counts_field(classes), bound=1.0)
    number = Field(NUMBER, (), bound=RECORD_BOUND, static=True, bits=0)
    return Phase("classes", Schema((counts, number, *flags)), broadcast, contribute, update)


def _withdraw(classes: int, width: int, withdrawal: Withdrawal, solved: Solved, *, products: bool) -> Phase:
    # Differences are sent for every class, also where a silo now has too few records of it. The class rules
    # look at the numbers of records that stay.
    differences = tuple(
        replace(item, name=LEFT + item.name, per_class=False)
        for item in sum_fields(classes, width, products=products)
    )
    counts = counts_field(classes)
    counted_anew = count_fields(replace(counts, name=STAY + counts.name))
    schema = Schema((counts, *counted_anew.values(), *differences))

    def broadcast(state: ServerState) -> Tensors:
        asked = {CLEARED: state.extra[CLEARED]} if CLEARED in state.extra else {}
        known = (stored_total(state)[COUNTS] > 0).to(torch.uint8)
        return {**model_update.broadcast_model(state.model), **asked, TOTAL + COUNTS: known}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        _check_passed(received, CLEARED, withdrawal)
        terms = _terms(silo, received, state, products=products)
        check_products(silo, terms.changed, terms.width, products=products)  # a whole class may leave now
        differences = {LEFT + name: terms.after[name] - terms.before[name] for name in terms.before}
        admitted = _admitted_now(silo, received)
        recounted = counted(own_rows(terms.staying, silo.record_values(staying=True)), width).items()
        stay = {counted_anew[key].name: number for key, number in recounted}
        tensors = {COUNTS: terms.after[COUNTS], **stay, **differences}
        return Contribution(tensors, own_state(terms.after, admitted))

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        _check_all(cohort)
        before = stored_total(state)
        after = {name: (item + torch.as_tensor(totals[LEFT + name])).numpy() for name, item in before.items()}
        if not bool((torch.as_tensor(after[COUNTS]) == torch.as_tensor(totals[COUNTS])).all()):
            raise RunError(
                "Expected the records that stay to be those of the total less the withdrawn ones, but a "
                "class lost a holder while they were summed: start the job again.",
                code=REFUSED,
            )
        if float(before[RECORDS]) > RECORD_BOUND:
            raise RunError(
                f"Expected a total of at most {RECORD_BOUND:.0f} records, which is exact, but it is of "
                f"{float(before[RECORDS]):.0f}: start a new job without these records.",
                code=REFUSED,
            )
        extra = {name: item for name, item in state.extra.items() if name not in (CLEARED, LEAVING, LOSING)}
        extra |= opened_counts(counted_anew, totals, cohort)
        new_state = solved(state.evolve(extra=extra), after)
        if "validation" not in withheld(state):
            return new_state  # the next exchange scales it
        old_state = solved(state, {name: item.numpy() for name, item in before.items()})
        return temperature.scaled(new_state, temperature.between(old_state.model, state.model))

    return Phase("withdraw", schema, broadcast, contribute, update)


def check_own(
    silo: SiloView, state: Tensors, withdrawal: Withdrawal, held: Collection[Fold] = EVALUATED
) -> None:
    """Refuse to take out fewer records than this silo's own minimum, whatever others take out.

    Args:
        withdrawal: as the job asks for it.
        held: folds that are no longer evaluated, by verified totals. In the first sum this silo has asked for
            that where too few of its own records leave.

    Raises:
        RunError: TF-523.
    """
    least, gone = silo.min_class_count, _leaving(silo, state).numpy() > 0
    named, every, stay = (item.numpy() for item in silo.class_patients("train"))
    patients = np.where(gone, named, 0)
    summed = state[OWN_ADMITTED].bool().numpy()
    few = too_few(patients, every, np.where(summed, stay, np.inf), least) if withdrawal.by_class else []
    which = f", of each class, but of classes {withdrawal.named(few)}" if few else ", but"
    if few or (not withdrawal.by_class and 0 < patients.sum() < least):
        raise RunError(
            f"Expected none or at least {least} of this silo's training records (`min_class_count`), and "
            f"patients, to leave the total{which} fewer would: if others lie about theirs, the new total "
            "is of these alone. Withdraw them once they are enough (until then take their lines out of the "
            "file), or start a new job without them.",
            code=REFUSED,
        )
    shown = [fold for fold in EVALUATED if fold not in held and _few_of_own_fold(silo, fold, withdrawal)]
    if shown:
        raise RunError(
            f"Expected {' and '.join(shown)} records to be evaluated no more, because too few of this silo's "
            "leave, which it has said in the first sum, but by its total no silo has: another silo sent a "
            "false number. Nothing is taken out.",
            code=REFUSED,
        )


def too_few(patients: NDArray[Any], every: NDArray[Any], stay: NDArray[Any], least: int) -> list[int]:
    """Return the classes of which records of some patients, but fewer than ``least``, would leave the sums.

    By the class rules a class of which fewer stay leaves with all of its records.

    Args:
        patients: number of patients with withdrawn records of each class in the sums, (C,).
        every: number of patients with any, (C,).
        stay: number of patients with others, (C,); infinite of a class that is not in the sums.
        least: ``min_class_count`` of the silo.

    >>> too_few(np.array([0, 1, 5, 1, 0]), np.array([9, 9, 9, 5, 4]), np.array([9, 8, 4, 4, 4]), 5)
    [1, 4]
    """
    leave = np.where(stay < least, every, patients)
    return np.flatnonzero((leave > 0) & (leave < least)).tolist()


def _few_of_own_fold(silo: SiloView, fold: Fold, withdrawal: Withdrawal) -> bool:
    """Check whether exact counts of a fold would tell too few patients of this silo, if of no other."""
    labels, short = silo.withdrawn_from(fold)
    if short or not withdrawal.by_class:
        return short
    if not len(labels):
        return False
    gone, _, _ = silo.class_patients(fold)
    return bool(((gone > 0) & (gone < silo.min_class_count)).any())


def check_numbers(totals: Totals, withdrawal: Withdrawal) -> None:
    """Refuse a withdrawal of too few training records, or at too few silos.

    Args:
        totals: of the first exchange.
        withdrawal: as the job asks for it.

    Raises:
        RunError: TF-523; nothing but these numbers has been opened.
    """
    named, silos = round(float(totals[NAMED])), round(float(totals[SILOS]))
    got = str(named) if named < withdrawal.least else "enough"
    if named < withdrawal.least or silos < MIN_SILOS:
        raise RunError(
            f"Expected at least {withdrawal.least} withdrawn records at {MIN_SILOS} silos or more, because "
            f"the new total discloses their sum, but got {got} at {silos}: wait until more are to be "
            "withdrawn. Nothing was taken out.",
            code=REFUSED,
        )


def check_products(silo: SiloView, changed: DistinctRows, width: int, *, products: bool) -> None:
    """Refuse to take out so few records that they follow from sums of their features, or of products.

    Args:
        changed: this silo's rows that leave the sums or join them.
        width: d of the features.
        products: whether their products are summed.

    Raises:
        RunError: TF-523; the numbers stay at the silo.
    """
    least, by_class, values = silo.records_per_feature, changed.by_class, silo.record_values()
    sums, numbers = ClassSums(width, MOST), (by_class * values).tolist()
    few = [place for place, held in enumerate(numbers) if by_class[place] and not sums.allowed(held, least)]
    wanted, every = Products(width, len(values), MOST), float(changed.counts.sum())
    held = float(changed.counts @ values)
    if products and every and not wanted.allowed(every, least, held):
        asked, got = f"products of {width} features", f"{every:.0f}"
    elif few:
        asked = f"sums of {width} features by class"
        got = f"{', '.join(f'{by_class[place]:.0f} of class {place}' for place in few)}"
    else:
        return
    raise RunError(
        f"Expected this silo to withdraw no record, or enough that {asked} do not "
        f"disclose them (`records_per_feature` {least}), but it withdraws {got}: start a new job "
        "without them, best with `privacy`. Nothing is taken out.",
        code=REFUSED,
    )


def few_of_fold(totals: Totals, fold: Fold, withdrawal: Withdrawal) -> bool:
    """Check whether exact counts of a fold would tell too few withdrawn records, or one silo's part.

    Args:
        totals: of the first exchange.
        withdrawal: as the job asks for it.
    """
    named, silos, short = (
        round(float(totals[names[fold]])) for names in (FOLD_NAMED, FOLD_SILOS, FOLD_SHORT)
    )
    return short > 0 or (named > 0 and (named < withdrawal.least or silos < MIN_SILOS))


def check_classes(totals: Totals, withdrawal: Withdrawal) -> None:
    """Refuse a withdrawal in which a class loses training records at too few silos.

    Args:
        totals: of the second exchange.
        withdrawal: as the job asks for it.

    Raises:
        RunError: TF-523; no sum of records has been opened.
    """
    if withdrawal.by_class and (few := _at_few(totals[CLASSES])):
        raise RunError(
            f"Expected each class to lose records at {MIN_SILOS} silos or more, or at none, because the new "
            f"total discloses their sum by class, but classes {withdrawal.named(few)} lose some at fewer: "
            "wait until more are to be withdrawn. Nothing was taken out.",
            code=REFUSED,
        )


def _at_few(silos: NDArray[np.float64]) -> list[int]:
    """Return the classes of which one or two silos withdraw records."""
    return [place for place, held in enumerate(silos) if 0.5 < held < MIN_SILOS - 0.5]


def _check_passed(received: Tensors, marker: str, withdrawal: Withdrawal) -> None:
    """Refuse an exchange before the previous one has passed the rule."""
    if not torch.equal(received.get(marker, torch.zeros(0)), _as_bytes(withdrawal.start)):
        raise RunError(
            "Expected the numbers of withdrawn records, then their classes, to be asked first, from the "
            "state that the job names, but they were not: nothing is taken out.",
            code=REFUSED,
        )


def _check_all(cohort: Cohort) -> None:
    """Refuse a sum that is not of all silos of the run."""
    if cohort.failed or cohort.size < cohort.enrolled:
        missing = cohort.failed + cohort.enrolled - cohort.size
        raise RunError(
            f"Expected all {cohort.enrolled} silos of the run in each sum of a withdrawal, but {missing} "
            "could not contribute; which and why is in their own logs. Nothing more is opened.",
            code=REFUSED,
        )


def _terms(silo: SiloView, received: Tensors, state: Tensors, *, products: bool) -> _Terms:
    """Compute a silo's sums with and without the withdrawn records.

    Raises:
        RunError: TF-522 if this silo kept nothing of its term, or computes another one by now.
    """
    model, classes = frozen(silo, received), silo.setting.num_classes
    width = feature_width(model)
    if OWN_SHA256 not in state or OWN_ADMITTED not in state:
        raise RunError(
            "Expected this silo's own state of the run to say what its term of the total was, but it does "
            "not: start a new job without the withdrawn records.",
            code="TF-522",
        )
    admitted_before, admitted_after = (
        state[OWN_ADMITTED].bool().to(silo.device),
        _admitted_now(silo, received).to(silo.device),
    )
    before, after = (no_sums(silo, width, products=products) for _ in ("before", "after"))
    changed, staying = DistinctRows(classes), DistinctRows(classes)
    rows, read = silo.rows()[0], 0
    for features, labels, stay in silo.encoded_before(model):
        was, stays = admitted_before[labels], admitted_after[labels] & stay
        before.add(features[was], labels[was])
        after.add(features[stays], labels[stays])
        batch_rows, read = rows[read : read + len(labels)], read + len(labels)
        for rows_of, chosen in ((changed, was ^ stays), (staying, stay)):
            rows_of.add(compress(batch_rows, chosen.tolist()), labels[chosen])
    sums = before.tensors()
    if not torch.equal(own_state(sums, admitted_before)[OWN_SHA256], state[OWN_SHA256]):
        raise RunError(
            "Expected the records of the run, of which this silo's term was computed, but its sums are other "
            "ones by now: records, their folds or the machine have changed. Restore them, or start a new job "
            "without the withdrawn records.",
            code="TF-522",
        )
    return _Terms(sums, after.tensors(before.constants()), changed, staying)


def _leaving(silo: SiloView, state: Tensors) -> torch.Tensor:
    """Return the withdrawn training records of each class that are in the total, float64 (C,)."""
    labels, _ = silo.withdrawn_from("train")
    admitted = state[OWN_ADMITTED].bool()
    return torch.bincount(labels[admitted[labels]], minlength=len(admitted)).double()


def _leaving_in_all(silo: SiloView, state: Tensors, withdrawal: Withdrawal) -> torch.Tensor:
    """Return how many records leave, including all of a class of which too few stay at this silo."""
    gone, stay = _leaving(silo, state), silo.class_counts("train").double()
    _, _, patients = silo.class_patients("train")
    whole = (gone > 0) & (patients < silo.min_class_count) & withdrawal.by_class
    return torch.where(whole, gone + stay, gone).sum()


def _admitted_now(silo: SiloView, received: Tensors) -> torch.Tensor:
    """Return a mask of the classes that this silo contributes to without the withdrawn records, (C,).

    A class that is not in the total stays out.
    """
    admitted = admitted_classes(silo, received).cpu()
    known = received.get(TOTAL + COUNTS)
    return admitted if known is None else admitted & known.bool()


def _as_bytes(sha256: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)
