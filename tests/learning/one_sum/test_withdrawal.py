"""The exchanges of a withdrawal by themselves: what a silo's term is, and when it gives none."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tightframe.errors import RunError
from tightframe.learning.few_records.distinct_rows import row_digests
from tightframe.learning.one_sum.feature_sums import COUNTS, RECORDS, SUMS, FeatureSums, sum_fields
from tightframe.learning.one_sum.withdrawal import (
    ASKED,
    CLASSES,
    CLEARED,
    FOLD_CLASSES,
    FOLD_NAMED,
    FOLD_SHORT,
    FOLD_SILOS,
    LEFT,
    NAMED,
    NUMBER,
    OWN_SHA256,
    SILOS,
    STAY,
    TOTAL,
    WITHHELD,
    check_classes,
    check_numbers,
    check_own,
    kept_total,
    own_state,
    phases,
    records_in,
    stored_total,
    withheld,
)
from tightframe.phases import Cohort, Phase, ServerState, SiloView, Withdrawal

START = "ab" * 32
CLASSES_OF_ALL, WIDTH = 3, 5
ASK = Withdrawal(START, least=4, by_class=True)


class Silo:
    """Ten records at a silo, of which it withdraws some."""

    device = torch.device("cpu")
    offers_prototypes = True
    records_per_feature = 0

    class Setting:
        num_classes = CLASSES_OF_ALL
        input_shape = (WIDTH,)

    setting = Setting()

    def __init__(
        self, leaving: list[int], tested: list[int] | None = None, short: bool = False, least: int = 1
    ) -> None:
        draw = np.random.default_rng(3)
        self.features = torch.from_numpy(draw.normal(size=(10, WIDTH)))
        self.labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
        self.stay = torch.tensor([place not in leaving for place in range(10)])
        self.tested, self.short, self.min_class_count = tested or [], short, least

    def record_values(self, *, staying: bool = False) -> torch.Tensor:
        return torch.full((CLASSES_OF_ALL,), WIDTH - 1.0 if staying else float(WIDTH), dtype=torch.float64)

    def rows(self) -> tuple[list[bytes], torch.Tensor]:
        return row_digests(self.features), self.labels

    def load(self, tensors: Any) -> nn.Module:
        model = nn.Sequential()
        model.features = nn.Identity()
        model.add_module("head", nn.Linear(WIDTH, CLASSES_OF_ALL))
        return model

    def encoded_before(self, model: nn.Module) -> Any:
        for part in (slice(0, 6), slice(6, 10)):
            yield self.features[part], self.labels[part], self.stay[part]

    def withdrawn_from(self, fold: str) -> tuple[torch.Tensor, bool]:
        if fold == "train":
            return self.labels[~self.stay], False
        own = fold == "test"
        return torch.tensor(self.tested if own else [], dtype=torch.int64), own and self.short

    def class_counts(self, fold: str) -> torch.Tensor:
        return torch.bincount(self.labels[self.stay], minlength=CLASSES_OF_ALL)

    def class_patients(self, fold: str) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.bincount(labels, minlength=CLASSES_OF_ALL)
            for labels in (self.withdrawn_from(fold)[0], self.labels, self.labels[self.stay])
        )

    def sums(self, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        own = FeatureSums(CLASSES_OF_ALL, WIDTH, products=True)
        own.add(self.features[keep], self.labels[keep])
        return own.tensors()


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightframe.learning.one_sum.withdrawal.feature_width", lambda model: WIDTH)


def asked(sha256: str = START) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)


PASSED = {ASKED: asked(), WITHHELD: torch.zeros(2, dtype=torch.uint8)}


def exchange(index: int, solved: Any = None) -> Phase:
    return phases(CLASSES_OF_ALL, WIDTH, ASK, solved or (lambda state, total: state), products=True)[index]


def contribute(silo: Silo, index: int, received: dict[str, torch.Tensor], state: Any) -> Any:
    return exchange(index).contribute(cast("SiloView", silo), received, state)


def committed(silo: Silo, admitted: list[bool]) -> dict[str, torch.Tensor]:
    """What the silo has kept of the run."""
    classes = torch.tensor(admitted)
    return own_state(silo.sums(classes[silo.labels]), classes)


def test_a_term_is_minus_the_sum_over_the_withdrawn_records() -> None:
    silo = Silo([0, 5, 9])
    made = contribute(silo, 2, {CLEARED: asked()}, committed(silo, [True] * 3))
    gone = silo.sums(~silo.stay)
    for name in gone:
        assert torch.equal(made.tensors[LEFT + name], -gone[name]), name
    assert made.tensors[LEFT + COUNTS].tolist() == [-1, -1, -1] and made.tensors[LEFT + RECORDS] == -3
    told = {name: item.tolist() for name, item in made.tensors.items() if name.startswith(STAY)}
    assert told == {
        STAY + COUNTS: [3, 2, 2],
        f"{STAY}frozen/rows": [3, 2, 2],
        f"{STAY}frozen/enough": [0] * 3,
    }
    after = own_state(silo.sums(silo.stay), torch.ones(3, dtype=torch.bool))
    assert torch.equal(made.proposed_state[OWN_SHA256], after[OWN_SHA256])


def test_of_a_class_that_was_withheld_nothing_is_subtracted() -> None:
    silo = Silo([0, 5, 9])
    made = contribute(silo, 2, {CLEARED: asked()}, committed(silo, [True, True, False]))
    # All of class 2 that stays is new then, but the total says that it has none of it, so that it stays out.
    known = torch.tensor([1, 1, 0], dtype=torch.uint8)
    received = {CLEARED: asked(), TOTAL + COUNTS: known}
    made = contribute(silo, 2, received, committed(silo, [True, True, False]))
    assert made.tensors[LEFT + COUNTS].tolist() == [-1, -1, 0]
    assert not made.tensors[LEFT + SUMS][2].any()
    counted = contribute(silo, 0, {}, committed(silo, [True, True, False])).tensors
    assert float(counted[NAMED]) == 2
    counted = contribute(silo, 1, PASSED, committed(silo, [True, True, False])).tensors
    assert counted[CLASSES].tolist() == [1, 1, 0]


def test_a_number_is_told_as_far_as_the_rule_needs_it() -> None:
    many, none = Silo(list(range(7))), Silo([])
    told = contribute(many, 0, {}, committed(many, [True] * 3)).tensors
    assert float(told[NAMED]) == ASK.least and float(told[SILOS]) == 1
    told = contribute(none, 0, {}, committed(none, [True] * 3)).tensors
    assert not any(item.any() for item in told.values())


@pytest.mark.parametrize(
    ("least", "leaving", "told"), [(0, 1, True), (2, 9, False), (1, 5, False), (1, 6, True), (2, 0, True)]
)
def test_products_of_few_withdrawn_records_are_not_told(least: int, leaving: int, told: bool) -> None:
    """Of 5 features: 10 records by a rule of 2, and by one of 1 six, as 30 numbers need 6 of 5 values."""
    silo = Silo(list(range(leaving)))
    silo.records_per_feature = least
    state = committed(silo, [True] * CLASSES_OF_ALL)
    passed = {**PASSED, CLEARED: asked()}
    for index in (0, 2):
        if told:
            assert contribute(silo, index, passed, state).tensors
            continue
        with pytest.raises(RunError, match=r"^TF-523: .*products of 5 features"):
            contribute(silo, index, passed, state)


def test_of_a_single_record_the_first_numbers_tell_no_class() -> None:
    """Not even that one silo's class has become too small: nothing there is by class."""
    first, second, third = (exchange(index).schema for index in (0, 1, 2))
    assert all(item.shape == () and not item.per_class for item in first.fields)
    assert all(
        item.per_class == (item.name == COUNTS or item.name.startswith(STAY))
        for item in (*second.fields, *third.fields)
    )
    told = [contribute(silo, 0, {}, committed(silo, [True] * 3)).tensors for silo in (Silo([0]), Silo([9]))]
    assert all(torch.equal(told[0][name], told[1][name]) for name in told[0])


@pytest.mark.parametrize("marked", [None, "cd" * 32], ids=["never", "of another withdrawal"])
@pytest.mark.parametrize(("index", "marker"), [(1, ASKED), (2, CLEARED)])
def test_without_the_number_asked_first_nothing_is_given(index: int, marker: str, marked: str | None) -> None:
    silo = Silo([0])
    received = {} if marked is None else {marker: asked(marked)}
    with pytest.raises(RunError, match=r"^TF-523: .*asked first"):
        contribute(silo, index, received, committed(silo, [True] * 3))


@pytest.mark.parametrize(
    ("leaving", "admitted", "off", "least", "refused"),
    [
        ([], [True] * 3, False, 2, False),
        ([0], [True] * 3, False, 2, True),  # three of class 0 would stay
        ([0, 1], [True] * 3, False, 2, False),
        ([0, 1, 4], [True] * 3, False, 2, True),  # of class 1 a single one
        ([0, 1, 4], [True, False, True], False, 2, False),  # which the total has none of
        ([4], [True] * 3, False, 3, False),  # two would stay, so that all three leave
        ([0, 4, 7], [True] * 3, True, 3, False),  # without class rules all count together
        ([0, 4], [True] * 3, True, 3, True),
    ],
)
def test_fewer_records_than_the_silos_own_minimum_do_not_leave_whatever_totals_say(
    leaving: list[int], admitted: list[bool], off: bool, least: int, refused: bool
) -> None:
    silo = Silo(leaving, least=least)
    rule = Withdrawal(START, ASK.least, by_class=not off)
    kept = committed(silo, admitted)
    first = phases(CLASSES_OF_ALL, WIDTH, rule, lambda state, total: state, products=True)[0]
    if not refused:
        check_own(cast("SiloView", silo), kept, rule)
        first.contribute(cast("SiloView", silo), {}, kept)
        return
    for told in (
        lambda: check_own(cast("SiloView", silo), kept, rule),
        lambda: first.contribute(cast("SiloView", silo), {}, kept),
    ):
        with pytest.raises(RunError, match=r"^TF-523: .*of this silo's training records"):
            told()


@pytest.mark.parametrize(
    ("tested", "short", "few"), [([2], False, True), ([2, 2], False, False), ([2, 2], True, True)]
)
def test_a_fold_that_loses_too_few_at_a_silo_is_held_back_by_that_silo(
    tested: list[int], short: bool, few: bool
) -> None:
    silo = Silo([], tested=tested, short=short, least=2)
    kept = committed(silo, [True] * 3)
    told = contribute(silo, 0, {}, kept).tensors
    assert bool(told[FOLD_SHORT["test"]]) == few and not told[FOLD_SHORT["validation"]]
    check_own(cast("SiloView", silo), kept, ASK, ("test",))
    if not few:
        check_own(cast("SiloView", silo), kept, ASK, ())
        return
    with pytest.raises(RunError, match="test records to be evaluated no more"):
        check_own(cast("SiloView", silo), kept, ASK, ("validation",))


@pytest.mark.parametrize(
    ("name", "number"), [(NAMED, 13), (SILOS, 4), (SILOS, -1), (FOLD_SHORT["test"], -1), (CLASSES, 4)]
)
def test_numbers_that_no_silos_have_end_it(name: str, number: float) -> None:
    cohort = Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3)
    right = totals(12, 3, [3, 0, 0])
    exchange(0).update(ServerState({}), right, cohort)
    index = 1 if name == CLASSES else 0
    wrong = {**right, name: np.array([number, 3, 0] if index else number, dtype=float)}
    state = ServerState({}, {WITHHELD: torch.zeros(2, dtype=torch.uint8)})
    with pytest.raises(RunError, match=rf"^TF-526: .*in the total {name}"):
        exchange(index).update(state, wrong, cohort)


def test_of_a_fold_that_is_not_evaluated_no_class_is_told() -> None:
    silo = Silo([0], tested=[2])
    told = contribute(silo, 0, {}, committed(silo, [True] * 3)).tensors
    assert (float(told[FOLD_NAMED["test"]]), float(told[FOLD_SILOS["test"]])) == (1, 1)
    for few, classes in ((1, [0, 0, 0]), (0, [0, 0, 1])):
        received = {ASKED: asked(), WITHHELD: torch.tensor([0, few], dtype=torch.uint8)}
        told = contribute(silo, 1, received, committed(silo, [True] * 3)).tensors
        assert told[FOLD_CLASSES["test"]].tolist() == classes


@pytest.mark.parametrize(
    ("fold", "classes", "held", "by_class"),
    [
        ((0, 0, 0), [0, 0, 0], False, True),
        ((1, 1, 0), [0, 0, 0], True, True),
        ((4, 2, 0), [0, 0, 0], True, True),
        ((4, 3, 0), [3, 0, 0], False, True),
        ((5, 3, 0), [3, 1, 0], True, True),
        ((5, 3, 0), [3, 1, 0], False, False),
        ((4, 3, 1), [3, 0, 0], True, True),  # at one silo too few of them stay
    ],
)
def test_a_fold_of_which_too_few_records_leave_is_not_evaluated(
    fold: tuple[int, int, int], classes: list[int], held: bool, by_class: bool
) -> None:
    rule = Withdrawal(START, ASK.least, by_class=by_class)
    first, second, _ = phases(CLASSES_OF_ALL, WIDTH, rule, lambda state, total: state, products=True)
    cohort = Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3)
    none = totals(8, 3, [3, 0, 0])
    numbers = {**none, FOLD_CLASSES["test"]: np.array(classes, dtype=float)}
    numbers |= {
        names["test"]: np.float64(value)
        for names, value in zip((FOLD_NAMED, FOLD_SILOS, FOLD_SHORT), fold, strict=True)
    }
    state = second.update(first.update(ServerState({}), numbers, cohort), numbers, cohort)
    assert withheld(state) == (("test",) if held else ()) and (WITHHELD in state.extra) == held
    # What continues from such a run does not open it either: it would be compared with a run before.
    again = second.update(first.update(state, none, cohort), none, cohort)
    assert withheld(again) == withheld(state)


@pytest.mark.parametrize("index", [0, 2])
def test_a_silo_whose_sums_are_others_by_now_gives_nothing(index: int) -> None:
    silo = Silo([0])
    kept = committed(silo, [True] * 3)
    silo.features[3, 2] += 1e-6
    with pytest.raises(RunError, match=r"^TF-522: .*other ones by now"):
        contribute(silo, index, {CLEARED: asked()}, kept)
    with pytest.raises(RunError, match="does not"):
        contribute(silo, index, {CLEARED: asked()}, {})


def totals(named: float, silos: float, classes: list[float]) -> dict[str, Any]:
    """Totals of training records, and none of other folds."""
    others = {
        name: np.zeros(CLASSES_OF_ALL if names is FOLD_CLASSES else ())
        for names in (FOLD_NAMED, FOLD_SILOS, FOLD_SHORT, FOLD_CLASSES)
        for name in names.values()
    }
    numbers = {NAMED: np.float64(named), NUMBER: np.float64(named), SILOS: np.float64(silos)}
    return {**others, **numbers, CLASSES: np.array(classes)}


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (totals(3, 3, [3, 0, 0]), "got 3 at 3"),
        (totals(4, 2, [0, 0, 0]), "got enough at 2"),
        (totals(8, 3, [3, 1, 0]), r"classes \[1\]"),
        (totals(8, 4, [3, 3, 2]), r"classes \[2\]"),
    ],
)
def test_the_opening_rule(found: Any, match: str) -> None:
    with pytest.raises(RunError, match=rf"^TF-523: [\s\S]*{match}"):
        check_numbers(found, ASK)
        check_classes(found, ASK)


def test_what_the_opening_rule_lets_through() -> None:
    for found, rule in (
        (totals(4, 3, [3, 0, 4]), ASK),
        (totals(4, 3, [1, 2, 0]), Withdrawal(START, 4, by_class=False)),
    ):
        check_numbers(found, rule)
        check_classes(found, rule)


def test_a_silo_that_is_missing_or_failed_ends_it() -> None:
    counted = totals(8, 3, [3, 0, 0])
    state = ServerState({})
    whole = Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3)
    assert ASKED in exchange(0).update(state, counted, whole).extra
    for short in (
        Cohort(0, {"a": 1, "b": 1}, 1, enrolled=3),
        Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3, failed=1),
    ):
        for index in (0, 1, 2):
            with pytest.raises(RunError, match="1 could not contribute"):
                exchange(index).update(state, counted, short)


def test_a_total_is_kept_as_integers_and_comes_back() -> None:
    found = {name: item.numpy() for name, item in Silo([]).sums(torch.ones(10, dtype=torch.bool)).items()}
    kept = kept_total(found)
    assert all(item.dtype == torch.int64 for item in kept.values())
    state = ServerState({}, {**kept, "other": torch.zeros(1)})
    again = stored_total(state)
    assert set(again) == set(found) and all(np.array_equal(again[name], found[name]) for name in found)
    assert records_in(state) == 10 and records_in(ServerState({})) is None
    assert {item.name for item in sum_fields(3, WIDTH, products=True)} == set(found)


def test_an_update_refuses_a_base_that_the_numbers_of_records_do_not_fit() -> None:
    silo = Silo([0, 5, 9])
    made = contribute(silo, 2, {CLEARED: asked()}, committed(silo, [True] * 3)).tensors
    told = {name: item.numpy() for name, item in made.items()}
    solved: list[Any] = []
    phase = exchange(2, lambda state, total: solved.append((state, total)) or state)
    cohort = Cohort(0, {"a": 1}, 1, enrolled=1)
    base = silo.sums(torch.ones(10, dtype=torch.bool))
    right = ServerState({}, {**kept_total({k: v.numpy() for k, v in base.items()}), CLEARED: asked()})
    phase.update(right, told, cohort)
    state, total = solved[0]
    assert CLEARED not in state.extra and np.array_equal(total[SUMS], silo.sums(silo.stay)[SUMS])
    other = silo.sums(torch.tensor([True] * 9 + [False]))
    wrong = ServerState({}, kept_total({k: v.numpy() for k, v in other.items()}))
    with pytest.raises(RunError, match="records that stay to be those of the total"):
        phase.update(wrong, told, cohort)
