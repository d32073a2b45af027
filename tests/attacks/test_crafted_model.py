"""A server that chooses the model which silos train ("Robbing the Fed", Fowl et al. 2022, arXiv:2110.13057).

Every hidden unit is the same direction with another threshold, so that the gradients of two neighbouring
units differ by the records between their thresholds alone; where that is one record, the quotient of the
weights' and the bias' difference is the record.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import Federation, Records, hearts, model_broadcast

UNITS = 1024
# Public knowledge of the thirteen columns: typical values and spreads, of nobody's records.
_MEAN = np.array([53, 0.7, 131, 220, 0.15, 142, 0.35, 1, 0.2, 0.25, 0.45, 0.1, 0.2])
_SPREAD = np.array([9, 0.46, 17, 90, 0.36, 24, 0.48, 1, 0.4, 0.43, 0.5, 0.3, 0.4])
_SCALE = np.array([50, 1, 130, 240, 1, 140, 1, 1, 1, 1, 1, 1, 1])


def _crafted(federation: Federation) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(101)
    direction = rng.normal(size=13) / _SCALE * 1e-3
    middle, spread = float(direction @ _MEAN), float(np.linalg.norm(direction * _SPREAD))
    thresholds = torch.linspace(middle - 3 * spread, middle + 3 * spread, UNITS)
    model = {name: torch.zeros_like(tensor) for name, tensor in federation.model().items()}
    model["backbone.1.weight"] = torch.tensor(direction, dtype=torch.float32).repeat(UNITS, 1)
    model["backbone.1.bias"] = -thresholds
    model["head.weight"][0], model["head.weight"][1] = 0.05, -0.05
    return model


def _read_records(federation: Federation, data: dict[str, Records]) -> set[int]:
    """Return which records of all hospitals one total gives away, each value within one half."""
    broadcast = model_broadcast(_crafted(federation))
    totals = federation.sum("train", 1, broadcast=broadcast, schema=federation.train_schema())
    weights, biases = totals["update/backbone.1.weight"], totals["update/backbone.1.bias"]
    true = np.concatenate([records.raw("train") for records in data.values()])
    read = set()
    for weight, bias in zip(weights[:-1] - weights[1:], biases[:-1] - biases[1:], strict=True):
        if abs(bias) > 1e-6:
            distance = np.abs(true - weight / bias).max(axis=1)
            if distance.min() < 0.5:
                read.add(int(distance.argmin()))
    return read


def test_without_privacy_one_total_gives_records_to_a_server_that_chose_the_model(tmp_path: Path) -> None:
    data = hearts(6)
    federation = Federation({"model_options": {"widths": [UNITS]}}, data, state=tmp_path).enroll()
    assert len(_read_records(federation, data)) > 50  # of 727: documented as open


@pytest.mark.whole
def test_with_privacy_the_same_model_gives_none(tmp_path: Path) -> None:
    data = hearts(6)
    private = {
        "model_options": {"widths": [UNITS]},
        "weights": "uniform",
        "privacy": {"epsilon": 8.0},
        "update_bound": 1e4,
    }
    federation = Federation(private, data, state=tmp_path).enroll()
    assert not _read_records(federation, data)
