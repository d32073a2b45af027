"""Updates that are those of a silo's last record, as later steps undo earlier ones.

FedCurv draws each weight back by how curved the other silos' losses are there, and that grows with the square
of the inputs, which a contract's ranges decide. So in four of twelve rounds of this job a unit's row of the
total was one record's, to a cosine of 0.986 to 1.000; of the others no row was more alike than 0.93.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.attacks.malicious_server import Federation, Records, in_folds

PER, COLUMNS = 40, 13
JOB: dict[str, Any] = {
    "method": "fedcurv",
    "method_options": {"weight": 1500.0},
    "weights": "exact",
    "rounds": 6,
    "seed": 2,
    "evaluation": {"models": 1},
    "training": {"learning_rate": 1e-6, "batch_size": 1, "momentum": 0.0, "weight_decay": 0.0},
    "model_options": {"widths": [8]},
}


def ward(seed: int) -> Records:
    """Numbers of one wide range, and an outcome."""
    draw = np.random.default_rng(seed)
    rows = draw.uniform(-40, 40, (PER + 40, COLUMNS)).astype(np.float32)
    risk = rows @ np.random.default_rng(0).normal(size=COLUMNS) / 40 + draw.normal(size=PER + 40)
    return in_folds(rows, (risk > 0).astype(np.int64), PER, 20)


@pytest.mark.whole
def test_no_row_of_a_total_is_a_hospitals_last_record(tmp_path: Path) -> None:
    data = {f"hospital-{place}": ward(place) for place in range(1, 5)}
    rows = np.concatenate([item.raw("train") for item in data.values()])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    federation = Federation(JOB, data, state=tmp_path).enroll()
    told = []
    for number in range(1, JOB["rounds"] + 1):
        total = federation.sum("train", number)["update/backbone.1.weight"]
        alike = np.abs(total @ rows.T) / np.linalg.norm(total, axis=1, keepdims=True).clip(1e-300)
        told.append(alike.max())
    assert max(told) < 0.96, told
