"""Records in arrays: what is wrong with them is named before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.data.arrays import FOLDS, ArrayData
from tightframe.errors import DataError


def arrays(**changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for fold, count in zip(FOLDS, (6, 0, 3), strict=True):
        found |= {f"x_{fold}": random.normal(size=(count, 2, 4)), f"y_{fold}": np.arange(count) % 3}
    return found | changes


def opened(folder: Path, **changes: Any) -> ArrayData:
    np.savez(folder / "site.npz", **arrays(**changes))
    return ArrayData.read(folder / "site.npz", source="vital signs", num_classes=3)


def test_records_are_the_arrays(tmp_path: Path) -> None:
    data = opened(tmp_path)
    data.check()
    assert (data.source, data.synthetic) == ("vital signs", False)
    for fold in FOLDS:
        records = data.records(fold)
        labels = arrays()[f"y_{fold}"]
        assert data.labels(fold).tolist() == labels.tolist()
        assert data.labels(fold).dtype == np.int64
        assert len(records) == len(labels)  # type: ignore[arg-type]
    values = torch.stack([value for value, _ in data.records("train")])  # type: ignore[attr-defined]
    assert values.dtype == torch.float32
    assert np.array_equal(values.numpy(), arrays()["x_train"].astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"x_test": np.full((3, 2, 4), np.inf)}, "TF-206"),
        ({"x_test": np.full((3, 2, 4), "text")}, "TF-206"),
        ({"y_train": np.arange(5) % 3}, "TF-206"),
        ({"y_train": np.array([0, 1, 2, 3, 0, 1])}, "TF-207"),
        ({"y_train": np.array([0, 1, 2, -1, 0, 1])}, "TF-207"),
        ({"y_train": np.linspace(0, 2, 6)}, "TF-207"),
        ({"x_test": np.zeros((0, 2, 4)), "y_test": np.zeros(0, np.int64)}, "TF-208"),
    ],
)
def test_wrong_records_are_named_by_the_check(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(DataError, match=rf"^{code}: .*vital signs in the t"):
        opened(tmp_path, **changes).check()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    def code(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            ArrayData.read(path, source="vital signs", num_classes=3)
        return caught.value.code

    assert code(tmp_path / "nowhere.npz") == "TF-205"
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", **arrays(x_train=np.array([{}], dtype=object)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:-20])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("no numbers")
    for name in ("other.npz", "one.npy", "objects.npz", "cut.npz", "empty.npz", "text.npz"):
        assert code(tmp_path / name) == "TF-206", name
