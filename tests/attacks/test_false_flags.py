"""One hospital lies in masked flags and counts, and passes by itself thresholds over all hospitals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.attacks.test_own_states import open_a_seal
from tests.attacks.test_withdrawals import VALUES, Ended
from tests.rounds import test_table_statistics as tables
from tests.support.attacks.liar import lies
from tests.support.attacks.malicious_server import Federation, Records, hearts
from torch.utils.data import Subset

from tightframe.data.table.disclosure import shapes
from tightframe.errors import RunError, TightframeError
from tightframe.learning.one_sum.feature_sums import COUNTS, SUMS
from tightframe.learning.one_sum.withdrawal import (
    CLASSES,
    FOLD_CLASSES,
    FOLD_NAMED,
    FOLD_SHORT,
    FOLD_SILOS,
    NAMED,
    SILOS,
)
from tightframe.rounds.phases.table_statistics import HOLDERS, PREFIX
from tightframe.rounds.riders import class_rules
from tightframe.rounds.riders.failures import FAILED, LACKING
from tightframe.rounds.setup import prepare

LIAR, VICTIM = "hospital-4", "hospital-2"
TEST = {name["test"]: value for name, value in ((FOLD_NAMED, 10.0), (FOLD_SILOS, 3.0), (FOLD_SHORT, -1.0))}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("others", "own", "lie", "match"),
    [
        pytest.param(
            False,
            ["record,train-50"],
            {NAMED: {NAMED: 10.0, SILOS: 3.0, FAILED: -1.0 - LACKING}, CLASSES: {CLASSES: 3.0}},
            "TF-526",
            id="a training record",
        ),
        pytest.param(
            True,
            ["record,test-5"],
            {NAMED: TEST, CLASSES: {FOLD_CLASSES["test"]: 3.0}},
            "test records to be evaluated no more",
            id="a test record",
        ),
    ],
)
def test_a_single_record_does_not_leave_behind_false_numbers(
    others: bool,
    own: list[str],
    lie: Mapping[str, Mapping[str, float]],
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was read in the clear from the difference of two totals, or its class from those of the counts.

    The hospital says inside the first sum that it has too few; the liar takes that back in the same sum.
    """
    ended = Ended(tmp_path)
    names = ended.enough() if others else {VICTIM: []}
    names[VICTIM] = [*names[VICTIM], *own]
    lies(monkeypatch, LIAR, lie)
    run = ended.withdraws("job-b", names)
    if not others:  # its numbers are random, so that the liar has to guess them
        with pytest.raises(RunError, match=match):
            run.sum("before", 0, 0)
        return
    told = run.sum("before", 0, 0)
    assert told[FAILED] == 0 and told[FOLD_SHORT["test"]] == 0
    open_a_seal(run)
    run._slot += 1
    with pytest.raises(TightframeError, match=rf"^TF-523: [\s\S]*{match}"):
        run.sum("before", 0, 1)


def alone(folder: Path, patients: int) -> Any:
    """Statistics of four sites, one of which has malignant masses, of so many patients."""
    parts = {site: part[part["diagnosis"] == "B"] for site, part in tables.PARTS.items()}
    own = tables.PARTS[tables.SITES[0]]
    malignant = own[own["diagnosis"] == "M"]["patient"].unique()[:patients]
    parts[tables.SITES[0]] = own[(own["diagnosis"] == "B") | own["patient"].isin(malignant)]
    return tables.told(tables.count(folder, parts=parts, policy={"min_class_count": 5}))


class Some(Records):
    """The first so many records of each class in each fold."""

    def __init__(self, of: Records, most: Mapping[int, int]) -> None:
        self._of, self._most, self.source = of, most, of.source

    def _places(self, fold: str) -> list[int]:
        labels = np.asarray(self._of.labels(fold))
        return [
            place for label, most in self._most.items() for place in np.flatnonzero(labels == label)[:most]
        ]

    def labels(self, fold: str) -> Any:
        return self._of.labels(fold)[self._places(fold)]

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return Subset(self._of.records(fold, augment_seed=augment_seed), self._places(fold))

    def check(self, progress: Any = None) -> None:
        self._of.check(progress)


@pytest.mark.whole
@pytest.mark.parametrize(("held", "opened"), [(20, 20), (4, 0)])
def test_a_class_of_one_hospital_has_at_least_its_own_minimum(
    held: int, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left: from five records on, the class sum that one liar has opened is that hospital's own."""
    data = {name: Some(of, {0: held if name == VICTIM else 0, 1: 20}) for name, of in hearts(4).items()}
    lies(monkeypatch, LIAR, {class_rules.HOLDERS: {class_rules.HOLDERS: np.array([2.0, np.nan])}})
    run = Federation({**VALUES, "method": "fedncm", "class_rules": "on"}, data, state=tmp_path).enroll()
    for index in (0, 1):
        run.sum("before", 0, index)
    if not opened:
        with pytest.raises(RunError, match="two classes at least"):
            run.sum("before", 0, 2)
        return
    told = run.sum("before", 0, 2)
    assert told[COUNTS][0] == opened and told[SUMS][0].any()


def holders(number: float) -> dict[str, dict[str, Any]]:
    """So many holders of each number of the second class, which three of four sites do not have."""
    false = {}
    for kind, shape in shapes(prepare(tables.job()).layout).items():
        false[f"{PREFIX}{kind}/{HOLDERS}"] = np.full(shape, np.nan)
        false[f"{PREFIX}{kind}/{HOLDERS}"][1] = number
    return dict.fromkeys(false, false)


@pytest.mark.whole
def test_statistics_of_one_hospital_are_such_as_it_could_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three holders are the liar's; its own minimum is what protects the one that is left."""
    lies(monkeypatch, tables.SITES[3], holders(2.0))
    found = alone(tmp_path / "many", 20)
    assert found.records["malignant"].value >= 20, "one hospital's own"
    cells = [cell.value for item in found.columns for cell in item.classes["malignant"].counts]
    assert any(cells) and all(value in (None, 0) or value >= 5 for value in cells)
    few = alone(tmp_path / "few", 4)
    cells = [cell.value for item in few.columns for cell in item.classes["malignant"].counts]
    assert not few.records["malignant"].value and not any(cells)


def test_more_flags_than_silos_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lies(monkeypatch, tables.SITES[3], holders(5.0))
    with pytest.raises(RunError, match=r"^TF-526: .*a silo sent a false one"):
        alone(tmp_path, 20)
