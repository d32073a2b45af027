from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from tests.support.processes import printed

from tightframe.data.eicu import REGIONS, EicuOptions, twin
from tightframe.data.eicu.silo import EicuData
from tightframe.data.eicu.twin import hospital_rates, hospital_stays, open_twin, scaled_size
from tightframe.errors import DataError
from tightframe.phases import Fold

FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
PART = EicuOptions(twin_scale=0.1)


def silos(options: EicuOptions, count: int = 5) -> list[EicuData]:
    return [open_twin(silo, options) for silo in range(count)]


def pooled(members: list[EicuData], *folds: Fold) -> tuple[Any, Any]:
    inputs = [silo.matrix.dense(silo.rows(fold).tolist()) for silo in members for fold in folds]
    labels = [silo.labels(fold) for silo in members for fold in folds]
    return np.concatenate(inputs), np.concatenate(labels)


@pytest.mark.whole
def test_the_shape_is_the_papers() -> None:
    members = silos(EicuOptions())
    assert sum(len(silo.matrix) for silo in members) == 30_760
    assert {len(silo.matrix.hicl) for silo in members} == {1399}
    hospitals = [hospital for silo in members for hospital in silo.matrix.sizes()]
    assert len(hospitals) == len(set(hospitals)) == 58
    trained = {h for silo in members for h in silo.matrix.hospital[silo.rows("train")].tolist()}
    tested = {h for silo in members for h in silo.matrix.hospital[silo.rows("test")].tolist()}
    assert trained == set(range(1, 21))
    assert tested == set(range(21, 59))
    assert [silo.source for silo in members] == [f"synthetic twin of eICU, region {r}" for r in REGIONS]
    assert all(silo.synthetic for silo in members)
    labels = np.concatenate([silo.matrix.label for silo in members])
    assert 0.084 <= labels.mean() <= 0.090
    given = np.concatenate([np.diff(silo.matrix.indptr) for silo in members])
    assert 19 <= given.mean() <= 23
    assert given.min() >= 1


def test_every_region_trains_and_tests() -> None:
    for silo in silos(PART):
        assert [bool(silo.labels(fold).sum()) for fold in FOLDS] == [True, True, True]
        assert set(silo.matrix.region.tolist()) == {silo.source.split()[-1]}
        silo.check()
    trains = Counter(twin.region_of(hospital) for hospital in range(1, 21))
    others = Counter(twin.region_of(hospital) for hospital in range(21, 59))
    assert [trains[region] for region in REGIONS] == [6, 5, 4, 3, 2]
    assert [others[region] for region in REGIONS] == [12, 11, 8, 4, 3]


def test_a_part_is_the_first_of_the_whole() -> None:
    few, many = hospital_stays(3, 0, 40), hospital_stays(3, 0, 90)
    assert np.array_equal(few[0], many[0][:40])
    assert np.array_equal(few[1], many[1][:40])
    whole, cut = (open_twin(4, EicuOptions(twin_scale=0.05, drugs=drugs)) for drugs in (1399, 256))
    rows = range(len(whole.matrix))
    assert np.array_equal(whole.matrix.dense(rows)[:, :256], cut.matrix.dense(rows))
    assert np.array_equal(whole.matrix.label, cut.matrix.label)
    wide = open_twin(4, EicuOptions(twin_scale=0.05, drugs=1500)).matrix.dense(rows)
    assert np.array_equal(wide[:, :1399], whole.matrix.dense(rows))
    assert wide[:, 1399:].max() == 0
    assert [scaled_size(hospital, 1e-6) for hospital in (1, 58)] == [8, 8]


def test_formularies_leave_columns_of_zeros() -> None:
    never = [hospital_rates(hospital) == 0 for hospital in range(1, 59)]
    for hospital in (1, 20, 58):
        given, _ = hospital_stays(hospital, 0, scaled_size(hospital, 1.0))
        assert not given[:, never[hospital - 1]].any()
        assert 700 < never[hospital - 1].sum() < 1000
    assert not np.array_equal(never[0], never[1])
    # Among the 200 most frequent drugs some are unknown to a hospital, and none to all.
    top = np.stack(never)[:, :200]
    assert (top.sum(axis=1) > 10).all()
    assert not top.all(axis=0).any()


def test_prevalence_falls_as_in_the_demo(real_data: Path) -> None:
    with np.load(real_data / "eicu_demo" / "eicu_demo_drug_mortality_48h.npz", allow_pickle=True) as stored:
        share = np.bincount(stored["indices"], minlength=920) / 1555
    real = np.sort(share)[::-1]
    made = np.sort(pooled(silos(EicuOptions(twin_scale=0.3)), *FOLDS)[0].mean(axis=0))[::-1]
    for rank in (0, 4, 9, 19, 49, 99, 199, 299):
        assert 0.6 <= made[rank] / real[rank] <= 1.6, rank


@pytest.mark.parametrize("drugs", [1399, 920])
def test_a_part_is_learnt_by_logistic_regression(drugs: int) -> None:
    members = silos(EicuOptions(twin_scale=0.1, drugs=drugs))
    model = LogisticRegression(C=0.01, max_iter=100).fit(*pooled(members, "train"))
    inputs, labels = pooled(members, "test")
    assert 0.77 <= roc_auc_score(labels, model.decision_function(inputs)) <= 0.86
    # What decides is more than how many drugs were given.
    assert roc_auc_score(labels, inputs.sum(axis=1)) < 0.70


def test_hospitals_as_silos() -> None:
    options = EicuOptions(silos="hospitals", twin_scale=0.1)
    members = silos(options, 20)
    assert [silo.source for silo in members[:2]] == [
        "synthetic twin of eICU, hospital 1",
        "synthetic twin of eICU, hospital 2",
    ]
    tested = [h for silo in members for h in set(silo.matrix.hospital[silo.rows("test")].tolist())]
    assert sorted(tested) == list(range(21, 59))
    regions = silos(PART)
    by_hospital, by_region = (
        sorted(stay for silo in group for stay in silo.matrix.stay[silo.rows("test")].tolist())
        for group in (members, regions)
    )
    assert by_hospital == by_region


def test_the_papers_steps() -> None:
    options = EicuOptions(twin_scale=0.1, equal_sizes=True, oversample_minority=True)
    for silo, hospitals in zip(silos(options), (6, 5, 4, 3, 2), strict=True):
        rows = np.unique(np.concatenate([silo.rows("train"), silo.rows("validation")]))
        counts = np.unique(silo.matrix.hospital[rows], return_counts=True)[1]
        assert counts.tolist() == [scaled_size(20, 0.1)] * hospitals
        balance = np.bincount(silo.labels("train"))
        assert balance[0] == balance[1]


def test_further_silos_are_copies_with_stays_of_their_own() -> None:
    first, sixth = open_twin(0, PART), open_twin(5, PART)
    assert sixth.source == "synthetic twin of eICU, region Midwest (copy 2)"
    assert first.matrix.sizes() == sixth.matrix.sizes()
    assert not set(first.matrix.stay.tolist()) & set(sixth.matrix.stay.tolist())
    assert not np.array_equal(first.matrix.label, sixth.matrix.label)
    with pytest.raises(ValueError, match="at least 0"):
        open_twin(-1, PART)


def test_too_many_training_hospitals_leave_none() -> None:
    with pytest.raises(DataError, match=r"^TF-208: "):
        open_twin(0, EicuOptions(train_hospitals=58, twin_scale=0.01))


def test_the_twin_is_frozen() -> None:
    """Drugs and deaths of the first stays of every hospital; a change needs a new ``TWIN_VERSION``."""
    digest = hashlib.sha256()
    for hospital in range(1, 59):
        given, died = hospital_stays(hospital, 0, 20)
        digest.update(np.packbits(given).tobytes() + died.tobytes())
    assert twin.TWIN_VERSION == 1
    assert digest.hexdigest() == "f007a50f4ed868e96edb1e603333f261eaf4ea85ab3377d2e500f574580fcdf9"


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from tightframe.data.eicu import EicuOptions\n"
        "from tightframe.data.eicu.twin import open_twin\n"
        "silo = open_twin(4, EicuOptions(twin_scale=0.01, drugs=64))\n"
        "silo.check(print)\n"
        "print([len(silo.labels(fold)) > 0 for fold in ('train', 'validation', 'test')])\n"
        "print('torch' in sys.modules)\n"
    )
    assert printed(code) == ["[True, True, True]", "False"]
