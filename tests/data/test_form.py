"""Records of another shape or with other labels than the job's model takes are found at enrolment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe import data, federation
from tightframe.data.arrays import FOLDS, ArrayData
from tightframe.data.base import check_form
from tightframe.data.heart import HeartOptions
from tightframe.errors import DataError, RunError

HEART = data.get("fed_heart_disease")


def arrays(width: int = 13, label: int = 1) -> ArrayData:
    made = {fold: (np.ones((20, width)), np.arange(20) % 2) for fold in FOLDS}
    made["test"][1][3] = label
    return ArrayData(made, source="my ward", num_classes=9)


class Own:
    """A data set of somebody's own, which does not tell its shape."""

    source, synthetic = "my own", False

    def __init__(self, record: Any = None, labels: Any = (0, 1), count: int = 2) -> None:
        self._records = [(torch.zeros(13) if record is None else record, 0)] * count
        self._labels = np.array(labels)

    def labels(self, fold: str) -> Any:
        return self._labels

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return self._records


@pytest.mark.parametrize(
    ("made", "code", "said"),
    [
        (arrays(width=12), "TF-212", r"my ward, train fold .* shape \(13,\).* got float32 of shape \(12,\)"),
        (
            arrays(label=2),
            "TF-213",
            r"labels 0 to 1 \(no disease, disease\) in my ward, test fold.*record 3 has 2",
        ),
        (Own(torch.zeros(3, 13)), "TF-212", r"got float32 of shape \(3, 13\)"),
        (Own(torch.zeros(13, dtype=torch.float64)), "TF-212", "got float64"),
        (Own(count=5), "TF-213", "got 2 for 5"),
        (Own(labels=[0.0, 1.0]), "TF-213", "got float64"),
        (Own(labels=[[0, 1]]), "TF-213", r"shape \(1, 2\)"),
        (Own(labels=[0, -1]), "TF-213", "record 1 has -1"),
    ],
)
def test_a_mistake_names_fold_record_and_both_forms(made: Any, code: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        check_form(made, HEART, HeartOptions())


def test_records_that_fit_pass() -> None:
    for made in (arrays(), Own()):
        check_form(made, HEART, HeartOptions())  # type: ignore[arg-type]


def test_nothing_is_trained_on_records_of_another_shape(tmp_path: Path) -> None:
    silos = {"a": arrays(), "b": arrays(), "c": arrays(width=5)}
    with pytest.raises(RunError, match=r"^TF-509: .*c refused: TF-212 \(records of another shape"):
        federation.run("fedavg", silos, 1, dataset="fed_heart_disease", model="mlp", folder=tmp_path)
    assert not (tmp_path / "server" / "metrics.jsonl").exists()
