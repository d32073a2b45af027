from __future__ import annotations

import numpy as np
import pytest

from tightframe.data.eicu import EicuOptions
from tightframe.data.eicu.folds import (
    Folds,
    HospitalSplit,
    Place,
    Stays,
    of_hospitals,
    of_region,
    silo_folds,
    split_hospitals,
)
from tightframe.errors import DataError

REGIONS = {1: "South", 2: "West", 3: "South", 4: "West", 5: "South", 6: "South", 7: "West"}
SPLIT = HospitalSplit(train=(1, 2, 3), other=(4, 5, 6, 7), smallest=20)


def stays(hospitals: dict[int, int], *, deaths: int = 5, patient: dict[int, int] | None = None) -> Stays:
    """So many stays of each hospital, every ``deaths``-th a death; ``patient`` renames those of some rows."""
    hospital = np.repeat(list(hospitals), list(hospitals.values()))
    patients = np.arange(len(hospital))
    for row, other in (patient or {}).items():
        patients[row] = patients[other]
    label = (np.arange(len(hospital)) % deaths == 0).astype(np.int64)
    return Stays(label, hospital, np.arange(len(hospital)) + 9000, patients)


def folds(table: Stays, place: Place, split: HospitalSplit = SPLIT, **options: bool) -> Folds:
    return silo_folds(table, split, place, EicuOptions.model_validate(options))


def test_the_largest_train_and_the_smaller_id_wins_a_tie() -> None:
    split = split_hospitals({9: 5, 4: 7, 2: 7, 8: 30, 1: 7}, 3)
    assert split == HospitalSplit(train=(8, 1, 2), other=(4, 9), smallest=7)


def test_someone_must_be_out_of_distribution() -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*more than 3 hospitals .* but got 3"):
        split_hospitals({1: 5, 2: 6, 3: 7}, 3)


def test_shares_are_dealt_by_size_and_cover_all() -> None:
    split = HospitalSplit(tuple(range(20)), tuple(range(100, 224)), 1)
    shares = [split.share(hospital) for hospital in split.train]
    assert sorted(other for share in shares for other in share) == list(range(100, 224))
    assert {len(share) for share in shares} == {6, 7}
    assert shares[3] == (103, 123, 143, 163, 183, 203, 223)


def test_a_region_has_its_own_hospitals() -> None:
    assert of_region(SPLIT, REGIONS, "South") == Place((1, 3), (5, 6))
    assert of_region(SPLIT, REGIONS, "West") == Place((2,), (4, 7))


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (HospitalSplit((1, 3, 5), (2, 4, 6, 7), 1), "Expected a training hospital .* South: 3, West: 0"),
        (HospitalSplit((1, 2, 4, 7), (3, 5, 6), 1), "out-of-distribution hospital .* South: 3, West: 0"),
    ],
)
def test_a_region_without_one_of_both_is_refused(split: HospitalSplit, said: str) -> None:
    with pytest.raises(DataError, match=rf"^TF-208: [\s\S]*{said}"):
        of_region(split, REGIONS, "West")


def test_hospitals_have_their_shares() -> None:
    assert of_hospitals(SPLIT, [2]) == Place((2,), (5,))
    assert of_hospitals(SPLIT, [1, 3]) == Place((1, 3), (4, 7, 6))


def test_only_training_hospitals_are_silos() -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*among the 3 that train \(1, 2, 3\), but got \[5, 99\]"):
        of_hospitals(SPLIT, [1, 5, 99])
    with pytest.raises(DataError, match="only 1 for 3 that train"):
        of_hospitals(HospitalSplit((1, 2, 3), (4,), 5), [2])


def test_folds_share_no_row_and_validation_is_about_15_percent() -> None:
    table = stays({1: 60, 2: 50, 3: 40, 4: 10, 5: 10, 6: 10, 7: 10})
    found = folds(table, Place((1, 3), (5, 6)))
    assert set(table.hospital[found.train]) | set(table.hospital[found.validation]) == {1, 3}
    assert len(found.train) + len(found.validation) == 100
    assert not set(found.train) & set(found.validation)
    # 15 % of 80 survivors and of 20 deaths.
    assert np.bincount(table.label[found.validation]).tolist() == [12, 3]
    assert sorted(set(table.hospital[found.test])) == [5, 6]
    assert len(found.test) == 20
    assert found.left_out == 0


def test_no_patient_is_in_two_folds() -> None:
    # Rows 0-59 hospital 1, 60-109 hospital 2, 110-149 hospital 3, 150-159 hospital 4 (tested).
    again = {row: row - 1 for row in range(1, 40, 2)}  # twins within hospital 1
    across = {60 + row: 20 + row for row in range(40)}  # hospital 2 has 40 patients of hospital 1
    tested = {150: 5, 151: 65, 152: 112}  # patients of each of the training hospitals
    table = stays({1: 60, 2: 50, 3: 40, 4: 10, 5: 10, 6: 10, 7: 10}, patient={**again, **across, **tested})
    silos = [folds(table, place) for place in (Place((1,), (4, 7)), Place((2,), (5,)), Place((3,), (6,)))]
    where = {
        name: {int(p) for found in silos for p in table.patient[getattr(found, name)]}
        for name in ("train", "validation", "test")
    }
    assert where["validation"]
    assert not where["train"] & where["validation"]
    assert not where["train"] & where["test"]
    assert not where["validation"] & where["test"]
    assert [found.left_out for found in silos] == [3, 0, 0]
    plain = stays({1: 60, 2: 50, 3: 40, 4: 10, 5: 10, 6: 10, 7: 10})
    mixed = {int(table.patient[row]) for row in folds(plain, Place((1,), (4, 7))).train} & {
        int(table.patient[row]) for row in folds(plain, Place((1,), (4, 7))).validation
    }
    assert mixed, "without grouping some patients must be in both, or this test shows nothing"


def test_equal_sizes_cut_every_hospital() -> None:
    table = stays({1: 60, 2: 50, 3: 20, 4: 10, 5: 10, 6: 10, 7: 10})
    place = Place((1, 2, 3), (4, 5, 6, 7))
    found = folds(table, place, equal_sizes=True)
    kept = np.concatenate([found.train, found.validation])
    assert np.bincount(table.hospital[kept]).tolist() == [0, 20, 20, 20]
    assert len(found.test) == 40
    first = set(kept[table.hospital[kept] == 1])
    assert first != set(range(20)), "the hash, not the order, decides who is kept"
    # The same stays in another silo of the same table.
    alone = folds(table, Place((1,), (4,)), equal_sizes=True)
    assert set(np.concatenate([alone.train, alone.validation])) == first


def test_the_rarer_class_is_repeated_in_training_only() -> None:
    table = stays({1: 60, 2: 50, 3: 40, 4: 10, 5: 10, 6: 10, 7: 10})
    place = Place((1,), (4, 7))
    plain, more = folds(table, place), folds(table, place, oversample_minority=True)
    died, survived = (table.label[more.train] == label for label in (1, 0))
    assert died.sum() == survived.sum() == (table.label[plain.train] == 0).sum()
    assert set(more.train) == set(plain.train)
    assert more.train[: len(plain.train)].tolist() == plain.train.tolist()
    times = np.bincount(more.train)[np.unique(more.train[died])]
    assert times.max() - times.min() <= 1, "every death is repeated as often as another, give or take one"
    assert more.validation.tolist() == plain.validation.tolist()
    assert more.test.tolist() == plain.test.tolist()


def test_survivors_may_be_the_rarer_class() -> None:
    table = stays({1: 40, 2: 10, 3: 10, 4: 10, 5: 1, 6: 1, 7: 1})
    table = Stays(1 - table.label, table.hospital, table.stay, table.patient)
    more = folds(table, Place((1,), (4,)), oversample_minority=True)
    counts = np.bincount(table.label[more.train])
    assert counts[0] == counts[1]


def test_a_silo_of_one_class_stays_as_it_is() -> None:
    table = stays({1: 30, 2: 10, 3: 10, 4: 10, 5: 1, 6: 1, 7: 1})
    table = Stays(np.zeros_like(table.label), table.hospital, table.stay, table.patient)
    place = Place((1,), (4,))
    assert folds(table, place, oversample_minority=True).train.tolist() == folds(table, place).train.tolist()


def test_an_empty_fold_is_refused() -> None:
    # All patients of hospital 4 were in hospital 1, too.
    table = stays({1: 20, 2: 20, 3: 20, 4: 2, 5: 1, 6: 1, 7: 1}, patient={60: 0, 61: 1})
    with pytest.raises(DataError, match=r"^TF-208: .*stays in the test fold"):
        folds(table, Place((1,), (4,)))
    with pytest.raises(DataError, match="stays in the training fold"):
        folds(table, Place((99,), (5,)))
