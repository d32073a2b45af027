"""The exchanges of a withdrawal by themselves: what a silo's term is, and when it gives none."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tightframe.errors import RunError
from tightframe.learning.one_sum.feature_sums import COUNTS, RECORDS, SUMS, FeatureSums, sum_fields
from tightframe.learning.one_sum.withdrawal import (
    ASKED,
    CLASSES,
    LEFT,
    NAMED,
    OWN_SHA256,
    SILOS,
    TOTAL,
    check_rule,
    kept_total,
    own_state,
    phases,
    records_in,
    stored_total,
)
from tightframe.phases import Cohort, Phase, ServerState, SiloView, Withdrawal

START = "ab" * 32
ASK = Withdrawal(START, least=4, by_class=True)
CLASSES_OF_ALL, WIDTH = 3, 5


class Silo:
    """Ten records at a silo, of which it withdraws some."""

    device = torch.device("cpu")
    offers_prototypes = True

    class Setting:
        num_classes = CLASSES_OF_ALL

    setting = Setting()

    def __init__(self, leaving: list[int]) -> None:
        draw = np.random.default_rng(3)
        self.features = torch.from_numpy(draw.normal(size=(10, WIDTH)))
        self.labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
        self.stay = torch.tensor([place not in leaving for place in range(10)])

    def load(self, tensors: Any) -> nn.Module:
        model = nn.Sequential()
        model.features = nn.Identity()
        model.add_module("head", nn.Linear(WIDTH, CLASSES_OF_ALL))
        return model

    def encoded_before(self, model: nn.Module) -> Any:
        for part in (slice(0, 6), slice(6, 10)):
            yield self.features[part], self.labels[part], self.stay[part]

    def sums(self, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        own = FeatureSums(CLASSES_OF_ALL, WIDTH, products=True)
        own.add(self.features[keep], self.labels[keep])
        return own.tensors()


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightframe.learning.one_sum.withdrawal.feature_width", lambda model: WIDTH)


def exchange(index: int, solved: Any = None) -> Phase:
    return phases(CLASSES_OF_ALL, WIDTH, ASK, solved or (lambda state, total: state), products=True)[index]


def asked(sha256: str = START) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)


def contribute(silo: Silo, index: int, received: dict[str, torch.Tensor], state: Any) -> Any:
    return exchange(index).contribute(cast("SiloView", silo), received, state)


def committed(silo: Silo, admitted: list[bool]) -> dict[str, torch.Tensor]:
    """What the silo has kept of the run."""
    classes = torch.tensor(admitted)
    return own_state(silo.sums(classes[silo.labels]), classes)


def test_a_term_is_minus_the_sum_over_the_withdrawn_records() -> None:
    silo = Silo([0, 5, 9])
    made = contribute(silo, 1, {ASKED: asked()}, committed(silo, [True] * 3))
    gone = silo.sums(~silo.stay)
    for name in gone:
        assert torch.equal(made.tensors[LEFT + name], -gone[name]), name
    assert made.tensors[LEFT + COUNTS].tolist() == [-1, -1, -1] and made.tensors[LEFT + RECORDS] == -3
    after = own_state(silo.sums(silo.stay), torch.ones(3, dtype=torch.bool))
    assert torch.equal(made.proposed_state[OWN_SHA256], after[OWN_SHA256])


def test_of_a_class_that_was_withheld_nothing_is_subtracted() -> None:
    silo = Silo([0, 5, 9])
    made = contribute(silo, 1, {ASKED: asked()}, committed(silo, [True, True, False]))
    # All of class 2 that stays is new then, but the total says that it has none of it, so that it stays out.
    known = torch.tensor([1, 1, 0], dtype=torch.uint8)
    received = {ASKED: asked(), TOTAL + COUNTS: known}
    made = contribute(silo, 1, received, committed(silo, [True, True, False]))
    assert made.tensors[LEFT + COUNTS].tolist() == [-1, -1, 0]
    assert not made.tensors[LEFT + SUMS][2].any()
    counted = contribute(silo, 0, {}, committed(silo, [True, True, False])).tensors
    assert float(counted[NAMED]) == 2 and counted[CLASSES].tolist() == [1, 1, 0]


def test_a_number_is_told_as_far_as_the_rule_needs_it() -> None:
    many, none = Silo(list(range(7))), Silo([])
    told = contribute(many, 0, {}, committed(many, [True] * 3)).tensors
    assert float(told[NAMED]) == ASK.least and float(told[SILOS]) == 1 and not told[COUNTS].any()
    told = contribute(none, 0, {}, committed(none, [True] * 3)).tensors
    assert not any(item.any() for item in told.values())


@pytest.mark.parametrize("received", [{}, {ASKED: asked("cd" * 32)}], ids=["never", "of another withdrawal"])
def test_without_the_number_asked_first_nothing_is_given(received: dict[str, torch.Tensor]) -> None:
    silo = Silo([0])
    with pytest.raises(RunError, match="asked first") as caught:
        contribute(silo, 1, received, committed(silo, [True] * 3))
    assert caught.value.code == "TF-523"


@pytest.mark.parametrize("index", [0, 1])
def test_a_silo_whose_sums_are_others_by_now_gives_nothing(index: int) -> None:
    silo = Silo([0])
    kept = committed(silo, [True] * 3)
    silo.features[3, 2] += 1e-6
    with pytest.raises(RunError, match="other ones by now") as caught:
        contribute(silo, index, {ASKED: asked()}, kept)
    assert caught.value.code == "TF-522"
    with pytest.raises(RunError, match="does not"):
        contribute(silo, index, {ASKED: asked()}, {})


def totals(named: float, silos: float, classes: list[float]) -> dict[str, Any]:
    return {NAMED: np.float64(named), SILOS: np.float64(silos), CLASSES: np.array(classes)}


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
    with pytest.raises(RunError, match=match) as caught:
        check_rule(found, ASK)
    assert caught.value.code == "TF-523"


def test_what_the_opening_rule_lets_through() -> None:
    check_rule(totals(4, 3, [3, 0, 4]), ASK)
    check_rule(totals(4, 3, [1, 2, 0]), Withdrawal(START, 4, by_class=False))


def test_a_silo_that_is_missing_or_failed_ends_it() -> None:
    counted = totals(8, 3, [3, 0, 0])
    state = ServerState({})
    whole = Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3)
    assert ASKED in exchange(0).update(state, counted, whole).extra
    for short in (
        Cohort(0, {"a": 1, "b": 1}, 1, enrolled=3),
        Cohort(0, {"a": 1, "b": 1, "c": 1}, 1, enrolled=3, failed=1),
    ):
        for index in (0, 1):
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
    made = contribute(silo, 1, {ASKED: asked()}, committed(silo, [True] * 3)).tensors
    told = {name: item.numpy() for name, item in made.items()}
    solved: list[Any] = []
    phase = exchange(1, lambda state, total: solved.append((state, total)) or state)
    cohort = Cohort(0, {"a": 1}, 1, enrolled=1)
    base = silo.sums(torch.ones(10, dtype=torch.bool))
    right = ServerState({}, {**kept_total({k: v.numpy() for k, v in base.items()}), ASKED: asked()})
    phase.update(right, told, cohort)
    state, total = solved[0]
    assert ASKED not in state.extra and np.array_equal(total[SUMS], silo.sums(silo.stay)[SUMS])
    other = silo.sums(torch.tensor([True] * 9 + [False]))
    wrong = ServerState({}, kept_total({k: v.numpy() for k, v in other.items()}))
    with pytest.raises(RunError, match="records that stay to be those of the total"):
        phase.update(wrong, told, cohort)
