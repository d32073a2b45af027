from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from tightframe.data.heart import (
    CENTER_NAMES,
    FEATURES,
    TEST_COUNTS,
    TRAIN_COUNTS,
    HeartOptions,
    HeartSite,
    twin,
)
from tightframe.data.heart.silo import HeartData, open_site, read_center
from tightframe.data.heart.twin import open_twin
from tightframe.errors import DataError
from tightframe.phases import Fold

FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
SIZES = ((199, 104), (172, 89), (30, 16), (85, 45))
"""FLamby's, as printed in its README."""


def real(folder: Path, center: int) -> HeartData:
    site = HeartSite.model_validate({"root": str(folder / "fed_heart_disease"), "center": center})
    return open_site(site, HeartOptions())


def lines(folder: Path, center: int) -> list[list[str]]:
    """The complete records of a centre's file, read by other means."""
    path = folder / "fed_heart_disease" / f"processed.{CENTER_NAMES[center]}.data"
    with path.open() as stream:
        return [row for row in csv.reader(stream) if row and "?" not in row[:10]]


@pytest.mark.parametrize("center", range(4))
def test_the_split_is_flambys(real_data: Path, center: int) -> None:
    """By scikit-learn itself, as FLamby calls it: 66 %, random state 43, stratified where it can be."""
    data = real(real_data, center)
    sick = np.array([float(row[13]) > 0 for row in lines(real_data, center)])
    train, test = train_test_split(
        np.arange(len(sick)),
        test_size=1.0 - 0.66,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=None if CENTER_NAMES[center] == "switzerland" else sick,
    )
    assert (len(train), len(test)) == SIZES[center]
    assert data.rows("test").tolist() == sorted(test)
    assert sorted([*data.rows("train"), *data.rows("validation")]) == sorted(train)
    assert data.labels("test").tolist() == sick[np.sort(test)].astype(int).tolist()


@pytest.mark.parametrize("center", range(4))
def test_the_columns_are_flambys(real_data: Path, center: int) -> None:
    """Ten values, of which chest pain and electrocardiogram become a column for each further level."""
    features, labels = read_center(real_data / "fed_heart_disease" / f"processed.{CENTER_NAMES[center]}.data")
    rows = lines(real_data, center)
    assert features.shape == (sum(SIZES[center]), len(FEATURES))
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    names = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
    for index, row in enumerate(rows):
        value = dict(zip(names, map(float, row), strict=False))
        for level in (2, 3, 4):
            value[f"cp_{level}"] = float(value["cp"] == level)
        for level in (1, 2):
            value[f"restecg_{level}"] = float(value["restecg"] == level)
        assert features[index].tolist() == pytest.approx([value[name] for name in FEATURES])


def test_sums_as_pandas_gives_them(real_data: Path) -> None:
    """pandas 2.3.3: ``get_dummies(columns=[2, 6], drop_first=True)`` of the complete rows, summed."""
    expected = {
        "cleveland": [16495, 206, 39902, 74748, 45, 45331, 99, 315.0, 50, 86, 144, 4, 148],
        "hungarian": [12468, 192, 34619, 64943, 19, 36338, 83, 159.8, 92, 46, 113, 47, 6],
        "switzerland": [2607, 43, 6250, 0, 4, 5226, 29, 21.8, 1, 7, 37, 12, 3],
        "va": [7722, 125, 17467, 23210, 43, 15776, 85, 165.2, 7, 22, 98, 57, 18],
    }
    for name, sums in expected.items():
        features, _ = read_center(real_data / "fed_heart_disease" / f"processed.{name}.data")
        assert features.sum(axis=0, dtype=np.float64).tolist() == pytest.approx(sums, rel=1e-6)


@pytest.mark.parametrize("center", range(4))
def test_folds_and_records(real_data: Path, center: int) -> None:
    data = real(real_data, center)
    data.check()
    assert not data.synthetic
    assert data.source == f"Fed-Heart-Disease records, centre {center} ({CENTER_NAMES[center]})"
    kept = np.bincount(np.concatenate([data.labels("train"), data.labels("validation")]), minlength=2)
    assert tuple(kept.tolist()) == TRAIN_COUNTS[center]
    assert tuple(np.bincount(data.labels("test"), minlength=2).tolist()) == TEST_COUNTS[center]
    assert 0.10 <= len(data.labels("validation")) / kept.sum() <= 0.18
    for fold in FOLDS:
        records: Any = data.records(fold, augment_seed=1)
        assert [label for _, label in records] == data.labels(fold).tolist()
        assert all(x.dtype == torch.float32 and x.shape == (13,) for x, _ in records)


def test_values_are_raw(real_data: Path) -> None:
    ages = torch.stack([x for x, _ in real(real_data, 0).records("train")])[:, 0]
    assert 28 <= ages.min() < ages.max() <= 80


ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


def test_unused_columns_may_be_unknown(tmp_path: Path) -> None:
    path = tmp_path / "processed.va.data"
    path.write_text(f"{ROW}\n\n{ROW.replace('3.0,0.0,6.0,0', '?,?,?,3')}\n{ROW.replace('233.0', '?')}\n")
    features, labels = read_center(path)
    assert labels.tolist() == [0, 1]
    assert features[0].tolist() == features[1].tolist()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (ROW.replace(",0.0,6.0", ",6.0"), "TF-204", "14 values in line 2 .* got 13"),
        (ROW.replace("145.0", "high"), "TF-204", "number or .* in line 2 .*'high'"),
        (ROW.replace("145.0", "inf"), "TF-204", "number or .* in line 2 .*'inf'"),
        (ROW.replace("63.0,1.0,1.0", "63.0,1.0,5.0"), "TF-207", r"\(1, 2, 3, 4\) as value 3 .*'5.0'"),
        (ROW.replace("63.0,1.0,1.0", "63.0,2.0,1.0"), "TF-207", r"\(0, 1\) as value 2 .*'2.0'"),
        (ROW[:-1] + "5", "TF-207", "as value 14 of line 2 .*'5'"),
    ],
)
def test_a_malformed_line_is_refused(tmp_path: Path, text: str, code: str, said: str) -> None:
    path = tmp_path / "processed.va.data"
    path.write_text(f"{ROW}\n{text}\n")
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        read_center(path)


def site(folder: Path) -> HeartSite:
    return HeartSite.model_validate({"root": str(folder), "center": 2})


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "TF-203", "no such folder"),
        (lambda f: (f / "processed.switzerland.data").unlink(), "TF-205", "no such file"),
        (lambda f: (f / "processed.switzerland.data").write_bytes(b"\xff\xfe"), "TF-206", "Expected to read"),
        (lambda f: (f / "processed.switzerland.data").write_text(""), "TF-208", r"gives \(0, 0\)"),
        (lambda f: (f / "processed.switzerland.data").write_text(f"{ROW}\n"), "TF-208", "UCI's own file"),
    ],
)
def test_every_fault_has_its_code(
    tmp_path: Path, harm: Callable[[Path], object], code: str, said: str
) -> None:
    folder = tmp_path / "heart"
    folder.mkdir()
    (folder / "processed.switzerland.data").write_text(f"{ROW}\n")
    harm(folder)
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        open_site(site(folder), HeartOptions())


@pytest.mark.parametrize("wrong", [{"center": 4}, {"center": "1"}, {"root": "heart"}, {"split": "/x"}])
def test_the_site_says_nothing_else(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HeartSite.model_validate({"root": "/data", "center": 1} | wrong)
    with pytest.raises(ValidationError):
        HeartOptions.model_validate({"image_size": 32})


@pytest.mark.parametrize("center", range(4))
def test_the_twin_has_the_real_counts(center: int) -> None:
    data = open_twin(center, HeartOptions())
    data.check()
    assert data.synthetic
    assert data.source == f"synthetic twin of Fed-Heart-Disease, centre {center} ({CENTER_NAMES[center]})"
    kept = np.bincount(np.concatenate([data.labels("train"), data.labels("validation")]), minlength=2)
    assert tuple(kept.tolist()) == TRAIN_COUNTS[center]
    assert tuple(np.bincount(data.labels("test"), minlength=2).tolist()) == TEST_COUNTS[center]


def pooled(fold: Fold) -> tuple[Any, Any]:
    silos = [open_twin(center, HeartOptions()) for center in range(4)]
    inputs = np.stack([x.numpy() for silo in silos for x, _ in silo.records(fold)])
    return inputs, np.concatenate([silo.labels(fold) for silo in silos])


def test_the_twins_values_are_plausible_and_learnable(real_data: Path) -> None:
    inputs, labels = pooled("train")
    low, high = inputs.min(axis=0), inputs.max(axis=0)
    assert (low >= [28, 0, 80, 0, 0, 60, 0, 0, 0, 0, 0, 0, 0]).all()
    assert (high <= [95, 1, 210, 450, 1, 240, 1, 6, 1, 1, 1, 1, 1]).all()
    assert (inputs[:, 8:11].sum(axis=1) <= 1).all()
    assert (inputs[:, 11:13].sum(axis=1) <= 1).all()
    mean, std = inputs.mean(axis=0), inputs.std(axis=0)
    model = LogisticRegression().fit((inputs - mean) / std, labels)
    tested, truth = pooled("test")
    area = roc_auc_score(truth, model.decision_function((tested - mean) / std))
    assert 0.80 <= area <= 0.95
    # The real records, read by the same code, are about as hard.
    silos = [real(real_data, center) for center in range(4)]
    data = [(np.stack([x.numpy() for x, _ in s.records("train")]), s.labels("train")) for s in silos]
    mean, std = np.concatenate([x for x, _ in data]).mean(0), np.concatenate([x for x, _ in data]).std(0)
    model.fit((np.concatenate([x for x, _ in data]) - mean) / std, np.concatenate([y for _, y in data]))
    last = [(np.stack([x.numpy() for x, _ in s.records("test")]), s.labels("test")) for s in silos]
    scores = model.decision_function((np.concatenate([x for x, _ in last]) - mean) / std)
    assert abs(roc_auc_score(np.concatenate([y for _, y in last]), scores) - area) < 0.07


def test_the_twins_copies_have_records_of_their_own() -> None:
    first, fifth = (open_twin(silo, HeartOptions()) for silo in (0, 4))
    assert fifth.source.endswith("centre 0 (cleveland) (copy 2)")
    assert not torch.equal(first.records("test")[0][0], fifth.records("test")[0][0])
    with pytest.raises(ValueError, match="at least 0"):
        open_twin(-1, HeartOptions())


def test_the_twin_is_frozen() -> None:
    """All records of all centres; a change needs a new ``TWIN_VERSION``."""
    digest = hashlib.sha256()
    for center in range(4):
        data = open_twin(center, HeartOptions())
        for fold in FOLDS:
            for values, label in data.records(fold):  # type: ignore[attr-defined]
                digest.update(values.numpy().tobytes() + bytes([label]))
    assert twin.TWIN_VERSION == 1
    assert digest.hexdigest() == "02ed4933e32b7fa82e77990791c4ba58fe09601d52d27074f7a166ba49d3f5d7"
