"""Records and methods handed to ``federation.run`` as objects: same bits as by name, and honest records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import tightframe
from tightframe import data, federation, methods
from tightframe.errors import DataError, JobError, ModelError

SILOS = ["a", "b", "c"]
SMALL: dict[str, Any] = {
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [4]},
    "training": {"epochs": 1, "batch_size": 16},
    "seed": 3,
}
WITHOUT = {key: value for key, value in SMALL.items() if key != "dataset"}
PLAIN = {"summation": "plain"}
"""Which gives the bits of ``by_name``'s secure sums."""


def _twin(index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    spec = data.get("fed_heart_disease")
    assert spec.twin is not None
    twin = spec.twin(index, spec.options())
    folds = {}
    for fold in data.base.FOLDS:
        records: Any = twin.records(fold)
        items = [records[place] for place in range(len(records))]
        values = torch.stack([x for x, _ in items]) if items else torch.zeros(0, 13)
        folds[fold] = (values, torch.tensor([int(y) for _, y in items], dtype=torch.int64))
    return folds


@pytest.fixture(scope="module")
def by_name() -> federation.Result:
    return federation.run("fedavg", SILOS, 2, **SMALL)


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    return {site: _twin(index) for index, site in enumerate(SILOS)}


def _equal(a: federation.Result, b: federation.Result) -> bool:
    one, other = a.state.model, b.state.model
    same = list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    first, second = (item.outcome.final() for item in (a, b))
    assert first is not None and second is not None
    return same and first.as_json()["balanced_accuracy"] == second.as_json()["balanced_accuracy"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["torch", "numpy", "Dataset"])
@pytest.mark.parametrize("named", [True, False], ids=["in the form of a set", "alone"])
def test_arrays_of_a_registered_set_give_the_same_bits(
    by_name: federation.Result, arrays: dict[str, Any], kind: str, named: bool
) -> None:
    make: Any = {
        "torch": lambda pair: pair,
        "numpy": lambda pair: (pair[0].double().numpy(), pair[1].numpy().astype(np.uint8)),
        "Dataset": lambda pair: TensorDataset(*pair),
    }[kind]
    silos = {
        site: {fold: make(pair) for fold, pair in folds.items() if len(pair[1])}
        for site, folds in arrays.items()
    }
    assert _equal(by_name, federation.run("fedavg", silos, 2, **(SMALL if named else WITHOUT), **PLAIN))


@pytest.mark.whole
def test_a_method_object_gives_the_bits_of_the_registered_one(by_name: federation.Result) -> None:
    mine = replace(methods.get("fedavg"), name="my own", title="mine")
    result = federation.run(mine, SILOS, 2, **SMALL, **PLAIN)
    assert _equal(by_name, result)
    assert result.outcome.job["method"].startswith("object:my_own:")
    other = replace(methods.get("fedprox"), name="fedavg")
    pulled = federation.run(other, SILOS, 2, **SMALL, **PLAIN, method_options={"mu": 5.0})
    assert not _equal(by_name, pulled), "the object runs, not the registered method of its name"
    registered = federation.run(methods.get("fedavg"), SILOS, 2, **SMALL)
    assert registered.outcome.job == by_name.outcome.job, "a registered object is its name"


def test_the_record_says_that_objects_are_of_this_process(
    arrays: dict[str, Any], tmp_path: Path, by_name: federation.Result
) -> None:
    mine = replace(methods.get("fedavg"), title="mine")
    for place in ("first", "second"):
        federation.run(mine, arrays, 1, folder=tmp_path / place, **WITHOUT)
    first, second = (
        json.loads((tmp_path / place / "server" / "model.json").read_text()) for place in ("first", "second")
    )
    assert first["job"]["method"].startswith("object:fedavg:") and first["method"]["name"] != "fedavg"
    assert first["job"]["dataset"].startswith("object:records:")
    assert "no registered data set" in first["data"]
    assert first["model_sha256"] == second["model_sha256"], "the same records and seed"
    assert first["job_sha256"] != second["job_sha256"], "but no job that could be run again"
    with pytest.raises(JobError, match=r"TF-101(.|\n)*was an object of the process"):
        tightframe.prepare(first["job"])
    with pytest.raises(ModelError, match="was an object of the process"):
        tightframe.load_model(tmp_path / "first" / "server")
    assert "object:" not in json.dumps(by_name.outcome.job)


def test_no_job_folder_is_exported_for_an_object() -> None:
    from tightframe_app.jobs import recipes

    with pytest.raises(JobError, match=r"dataset.*was an object of the process"):
        recipes.get("fedavg_isic").job(changes={"dataset": "object:records:0123abcd"})


def test_objects_are_known_during_their_run_only(arrays: dict[str, Any]) -> None:
    seen: list[str] = []
    result = federation.run("fedavg", arrays, 1, on_round=lambda row: seen.append(row.kind), **WITHOUT)
    assert seen
    with pytest.raises(JobError, match="was an object"):
        data.get(result.outcome.job["dataset"])


def test_the_split_is_a_fixed_hash_of_each_record(tmp_path: Path) -> None:
    """The folds' sizes equal those of the written formula, for one order of the records and another."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 5)).astype(np.float32)
    labels = rng.integers(0, 2, 300)
    order = rng.permutation(300)

    def share(row: np.ndarray, label: int) -> float:
        name = hashlib.sha256(row.astype("<f4").tobytes() + int(label).to_bytes(4, "little")).hexdigest()[:24]
        from tightframe.data.table.silo import SALT

        return int.from_bytes(hashlib.sha256(f"{SALT}/{name}".encode()).digest()[:8], "big") / 2**64

    shares = np.array([share(row, label) for row, label in zip(values, labels, strict=True)])
    expected = [shares < 0.7, (shares >= 0.7) & (shares < 0.85), shares >= 0.85]
    from tightframe.data.objects import from_objects

    _, opened = from_objects({"a": (values, labels), "b": (values[order], labels[order])}, "object:x:1")
    for fold, chosen in zip(data.base.FOLDS, expected, strict=True):
        assert np.array_equal(opened["a"].labels(fold), labels[chosen])
        assert np.array_equal(opened["b"].labels(fold), labels[order][chosen[order]])


X, Y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ((np.ones((60, 5)), Y), "TF-212", r"\(4,\), as a has them.*of c, but got \(5,\)"),
        ((X.astype(str), Y), "TF-212", "c, but got <U"),
        ((X[:, 0], Y), "TF-212", r"shape \(60,\)"),
        ((X, Y[:-1]), "TF-213", r"60 records of c, but got int64 of shape \(59,\)"),
        ((X, Y.astype(float)), "TF-213", "got float64"),
        ((X, Y - 1), "TF-213", "count from 0 in c, but got -1"),
        ((X, Y[:, None]), "TF-213", r"shape \(60, 1\).*`y.ravel\(\)`"),
        ((X, Y * 2), "TF-213", "got 0, 1, 2, 4"),
        ((np.where(X > 2, np.nan, X), Y), "TF-206", "records of c.*finite"),
        ((X * 1e300, Y), "TF-206", "finite"),
        ((X[:0], Y[:0]), "TF-208", "records of c.*got none"),
        ({"train": (X, Y)}, "TF-208", "folds train, test"),
        ([[X[0], 0], [X[1][:2], 1], [X[2], 0]], "TF-212", "record 1 has"),
        (X, "TF-212", "got ndarray"),
        (iter([]), "TF-212", "map-style"),
    ],
)
def test_records_that_do_not_fit_are_named_before_anything_runs(
    wrong: Any, code: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"{code}.*{said}"):
        federation.run("fedavg", {"a": (X, Y), "b": (X, Y), "c": wrong}, 1, folder=tmp_path, model="mlp")
    assert list(tmp_path.iterdir()) == []


def test_labels_beyond_the_given_classes_and_the_named_sets_shape() -> None:
    silos = dict.fromkeys(SILOS, (X, Y))
    with pytest.raises(DataError, match=r"TF-213.*labels 0 to 1 .*of a, but record"):
        federation.run("fedavg", silos, 1, class_names=["no", "yes"], model="mlp")
    with pytest.raises(DataError, match=r"TF-212.*\(13,\), as the data set has them"):
        federation.run("fedavg", silos, 1, **SMALL)


@pytest.mark.parametrize(
    ("silos", "values", "said"),
    [
        (SILOS, {}, "dataset: Expected the name"),
        (SILOS, {"dataset": "fed_heart_disease", "class_names": ["a", "b"]}, "class_names"),
        (dict.fromkeys(SILOS, (X, Y)), {"dataset_options": {"image_size": 3}}, "dataset_options"),
        (dict.fromkeys(SILOS, (X, Y)), {"dataset": "fed_heart_disease", "class_names": ["a"]}, "class_names"),
        (dict.fromkeys(SILOS, (X, Y)), {"dataset": "nothing"}, "dataset: Expected a data set of"),
    ],
)
def test_calls_that_mean_nothing_are_refused(silos: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        federation.run("fedavg", silos, 1, model="mlp", **values)
