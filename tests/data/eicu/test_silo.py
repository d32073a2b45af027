from __future__ import annotations

import csv
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from tests.support.made_eicu import clinic
from torch.utils.data import DataLoader

from tightframe.data.base import record_patients
from tightframe.data.eicu import REGIONS, EicuOptions, EicuSite, vocabulary_sha256
from tightframe.data.eicu.matrix import vocabulary_bytes
from tightframe.data.eicu.prepare import prepare
from tightframe.data.eicu.silo import EicuData, open_site
from tightframe.errors import DataError
from tightframe.phases import Fold

FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
SMALL: dict[str, Any] = {"drugs": 14, "train_hospitals": 4}
CODES = [*range(101, 109), 200, *range(300, 305)]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return clinic(tmp_path / "tables")


@pytest.fixture(scope="module")
def demo(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published demo's 48-hour matrix."""
    folder = tmp_path_factory.mktemp("demo")
    prepare(real_data / "eicu_demo", folder, window="48h")
    return folder


@pytest.fixture
def prepared(tables: Path, tmp_path: Path) -> Path:
    prepare(tables, tmp_path / "prepared", window="48h")
    return tmp_path / "prepared"


def opened(root: Path, options: dict[str, Any] | None = None, **site: Any) -> EicuData:
    values = {"root": str(root)} | (site or {"region": "Midwest"})
    return open_site(EicuSite.model_validate(values), EicuOptions.model_validate(SMALL | (options or {})))


def test_a_region_from_the_tables_and_prepared(tables: Path, prepared: Path) -> None:
    one, other = opened(tables), opened(prepared)
    for data in (one, other):
        data.check()
        assert not data.synthetic
        assert data.source == "eICU stays (48h), region Midwest"
    for fold in FOLDS:
        assert np.array_equal(one.matrix.stay[one.rows(fold)], other.matrix.stay[other.rows(fold)])
        assert np.array_equal(one.labels(fold), other.labels(fold))
    hospitals = {fold: set(one.matrix.hospital[one.rows(fold)].tolist()) for fold in FOLDS}
    assert hospitals == {"train": {1, 3}, "validation": {1, 3}, "test": {5, 7}}
    assert [len(one.labels(fold)) for fold in FOLDS] == [51, 9, 20]
    assert one.labels("test").sum() == 4


def test_hospitals_have_their_shares_of_the_others(prepared: Path) -> None:
    data = opened(prepared, {"silos": "hospitals"}, hospitals=[2, 3])
    assert data.source == "eICU stays (48h), hospitals 2, 3"
    assert set(data.matrix.hospital[data.rows("train")].tolist()) == {2, 3}
    assert set(data.matrix.hospital[data.rows("test")].tolist()) == {6, 7}


def test_stays_are_grouped_by_the_demos_own_patients(real_data: Path, demo: Path) -> None:
    """Against the `uniquepid` of the published table, read by itself."""
    with gzip.open(real_data / "eicu_demo" / "patient.csv.gz", "rt", newline="") as stream:
        named = {int(row["patienthealthsystemstayid"]): row["uniquepid"] for row in csv.DictReader(stream)}
    several = 0
    for region in REGIONS:
        data = opened(demo, {"drugs": 920, "train_hospitals": 20}, region=region)
        for fold in FOLDS:
            groups = data.groups(fold).tolist()
            names = [named[stay] for stay in data.matrix.stay[data.rows(fold)].tolist()]
            pairs = set(zip(groups, names, strict=True))
            assert len(pairs) == len(set(groups)) == len(set(names))
            several += len(groups) - len(pairs)
    assert several > 100


def test_stays_without_a_patient_are_told_apart_and_not_guessed(tables: Path, tmp_path: Path) -> None:
    path = tables / "patient.csv"
    text = path.read_text()
    assert ",p-1003," in text or ",p-1003" in text
    path.write_text(text.replace("p-1003", "").replace("p-5001", ""))
    prepare(tables, tmp_path / "again", window="48h")
    data = opened(tmp_path / "again")
    folds = {fold: data.rows(fold) for fold in FOLDS}
    lacking = [fold for fold, rows in folds.items() if (data.matrix.patient[rows] < 0).any()]
    assert len(lacking) == 2 and "test" in lacking
    for fold in FOLDS:
        if fold in lacking:
            with pytest.raises(DataError, match=r"TF-210.* 1 of the \d+ records .* have none"):
                record_patients(data, fold)
        else:
            assert len(record_patients(data, fold)) == len(data.labels(fold))
    assert (opened(tables).matrix.patient == data.matrix.patient).all()


def test_records_are_the_stays_drugs(prepared: Path) -> None:
    data = opened(prepared)
    records: Any = data.records("train")
    assert len(records) == 51
    for index, row in enumerate(data.rows("train").tolist()):
        values, label = records[index]
        assert (values.dtype, values.shape) == (torch.float32, (14,))
        number = int(data.matrix.stay[row]) % 1000
        hospital = int(data.matrix.stay[row]) // 1000
        given = {100 + hospital, 200, 300 + number % 5}
        assert {CODES[column] for column in values.nonzero()[:, 0].tolist()} == given
        assert label == int(number % 5 == 0)
    with pytest.raises(IndexError):
        records[51]


def test_loaders_batches_are_the_records(prepared: Path) -> None:
    records: Any = opened(prepared).records("test", augment_seed=4)
    copy = pickle.loads(pickle.dumps(records))  # noqa: S301 -- our own bytes
    for source in (records, copy):
        inputs = torch.cat([x for x, _ in DataLoader(source, batch_size=8)])
        assert torch.equal(inputs, torch.stack([records[index][0] for index in range(len(records))]))


def test_the_papers_steps(prepared: Path) -> None:
    data = opened(prepared, {"oversample_minority": True})
    counts = np.bincount(data.labels("train"))
    assert counts[0] == counts[1]
    assert len(data.records("train")) == counts.sum()
    plain = opened(prepared)
    assert np.bincount(data.labels("test")).tolist() == np.bincount(plain.labels("test")).tolist()


def test_a_vocabulary_of_the_federation(prepared: Path, tables: Path, tmp_path: Path) -> None:
    codes = [101, 200, 999]
    path = tmp_path / "drugs.json"
    path.write_bytes(vocabulary_bytes(codes))
    asked = {"drugs": 3, "vocabulary": vocabulary_sha256(codes)}
    for root in (prepared, tables):
        data = opened(root, asked, region="Midwest", vocabulary=str(path))
        inputs = torch.stack([x for x, _ in data.records("train")])
        assert inputs.shape == (51, 3)
        assert inputs[:, 1].min() == 1  # code 200 is given everywhere
        assert inputs[:, 2].max() == 0  # code 999 nowhere
        # Code 101 is given in hospital 1.
        hospital = torch.from_numpy(data.matrix.hospital[data.rows("train")])
        assert torch.equal(inputs[:, 0] == 1, hospital == 1)


def test_a_vocabulary_that_is_not_the_jobs_is_refused(prepared: Path, tables: Path) -> None:
    for root in (prepared, tables):
        with pytest.raises(DataError, match=r"Expected 13 drugs.*has 14 .*export the job with `drugs` 14"):
            opened(root, {"drugs": 13})
        other = "0" * 64
        with pytest.raises(DataError, match=rf"^TF-209: .*SHA-256 {other}.*{vocabulary_sha256(CODES)}"):
            opened(root, {"vocabulary": other})
        opened(root, {"vocabulary": vocabulary_sha256(CODES)})


def test_the_kind_of_silo_must_be_the_jobs(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*Expected `hospitals` .*got region Midwest"):
        opened(prepared, {"silos": "hospitals"})
    with pytest.raises(DataError, match=r"Expected `region` .*got hospital 3"):
        opened(prepared, hospitals=[3])


@pytest.mark.parametrize(
    ("options", "site", "said"),
    [
        ({}, {"region": "West"}, "training hospital in the region West.*Midwest: 2, South: 2, West: 0"),
        ({"silos": "hospitals"}, {"hospitals": [8]}, r"that train \(1, 2, 3, 4\), but got \[8\]"),
        ({"train_hospitals": 8}, {"region": "South"}, "more than 8 hospitals .*got 8"),
    ],
)
def test_an_unknown_place_is_refused(
    prepared: Path, options: dict[str, Any], site: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"^TF-208: [\s\S]*{said}"):
        opened(prepared, options, **site)


def test_what_is_not_there_is_named(prepared: Path, tables: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-203: .*no such folder"):
        opened(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"^TF-205: .*tightframe data prepare eicu"):
        opened(tmp_path / "empty")
    (tables / "hospital.csv").unlink()
    with pytest.raises(DataError, match=r"^TF-205: .*\['hospital'\] are missing"):
        opened(tables)
    with pytest.raises(DataError, match=r"^TF-205: .*window stay .* only \['48h'\]"):
        opened(prepared, {"window": "stay"})
    (prepared / "vocabulary_48h.json").unlink()
    with pytest.raises(DataError, match=r"^TF-204: .*vocabulary_48h\.json cannot be read"):
        opened(prepared)


def test_a_prepared_file_that_was_changed_is_found_before_training(prepared: Path) -> None:
    path = prepared / "vocabulary_48h.json"
    path.write_text(path.read_text() + "\n")  # the same codes, other bytes
    data = opened(prepared)
    with pytest.raises(DataError, match=r"^TF-206: .*as it was prepared"):
        data.check()


def test_the_demos_regions(demo: Path) -> None:
    """Counts of the published demo: 20 largest hospitals train, the other 124 are tested."""
    options = EicuOptions(drugs=920)
    silos = {region: open_site(EicuSite(root=demo, region=region), options) for region in REGIONS}
    trained = {r: len(s.labels("train")) + len(s.labels("validation")) for r, s in silos.items()}
    assert trained == {"Midwest": 131, "South": 110, "West": 39, "Northeast": 14, "unknown": 13}
    assert sum(trained.values()) == 307
    lines: list[str] = []
    for silo in silos.values():
        silo.check(lines.append)
    assert len(lines) == sum(silo.folds.left_out > 0 for silo in silos.values())
    tested = sum(len(silo.labels("test")) + silo.folds.left_out for silo in silos.values())
    assert tested == 1555 - 307
    hospitals = {int(h) for s in silos.values() for h in s.matrix.hospital[s.rows("test")]}
    assert len(hospitals) == 124


def test_the_demos_hospitals_learn_what_the_reference_does(demo: Path) -> None:
    """Pooled logistic regression, 20 largest to the other 124: AUROC 0.752, resampling sd 0.03."""
    options = EicuOptions(drugs=920, silos="hospitals")
    first = open_site(EicuSite(root=demo, hospitals=(146,)), options)
    ids, sizes = np.unique(first.matrix.hospital, return_counts=True)
    largest = sorted(zip((-sizes).tolist(), ids.tolist(), strict=True))[:20]
    whole = open_site(EicuSite(root=demo, hospitals=tuple(identifier for _, identifier in largest)), options)
    train = np.concatenate([whole.rows("train"), whole.rows("validation")])
    assert (len(train), len(set(whole.matrix.hospital[whole.rows("test")].tolist()))) == (307, 124)
    model = LogisticRegression(C=0.1, max_iter=500)
    model.fit(whole.matrix.dense(train.tolist()), whole.matrix.label[train])
    scores = model.decision_function(whole.matrix.dense(whole.rows("test").tolist()))
    assert 0.70 <= roc_auc_score(whole.labels("test"), scores) <= 0.82
