"""A server calls a living hospital dead in one of two rounds with one model, and subtracts the totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import Federation, Records, hearts, model_broadcast

from tightframe.config.policy import PolicyBlock
from tightframe.data.arrays import ArrayData

VICTIM = "hospital-2"
WHOLE = {"batch_size": 65_536, "epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 1e-5}
FIRST = "backbone.1.weight"


def both_totals(federation: Federation) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Totals of two rounds with one broadcast: over all hospitals, and over all but the victim."""
    federation.enroll()
    broadcast = model_broadcast(federation.model())
    broadcast["model/head.weight"] = broadcast["model/head.weight"] * 0.02  # raw columns are large
    extra = federation.setup.plan.round(1)[0].phase.broadcast(federation.setup.initial_state())
    broadcast.update({name: item for name, item in extra.items() if not name.startswith("model/")})
    full = federation.sum("train", 1, broadcast=broadcast, schema=federation.train_schema(1))
    less = federation.sum("train", 2, broadcast=broadcast, schema=federation.train_schema(2), dead={VICTIM})
    return full, less


def own_update(federation: Federation, records: Records) -> np.ndarray:
    """The victim's update of the first layer, if it takes one step over all of its records."""
    model: Any = federation.setup.setting.build_model()
    model.load_state_dict(dict(federation.model()))
    with torch.no_grad():
        model.head.weight.mul_(0.02)
    inputs, labels = torch.tensor(records.raw("train")), torch.tensor(records.labels("train"))
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    return -WHOLE["learning_rate"] * np.asarray(model.backbone[1].weight.grad)


@pytest.mark.whole
@pytest.mark.parametrize(("full_batches", "batch_size"), [(True, 65_536), (False, 65_536), (False, 16)])
def test_the_difference_is_not_the_hospitals_own_update(
    tmp_path: Path, full_batches: bool, batch_size: int
) -> None:
    """Whole batches, where a site's policy accepts them, are the control: there it is, exactly."""
    data = hearts(6)
    policy = PolicyBlock(profile="standard", full_batches=full_batches)
    values = {
        "rounds": 2,
        "weights": "uniform",
        "training": {**WHOLE, "batch_size": batch_size},
        "model_options": {"widths": [16]},
    }
    federation = Federation(values, data, state=tmp_path, policy=policy)
    full, less = both_totals(federation)
    difference, true = full[f"update/{FIRST}"] - less[f"update/{FIRST}"], own_update(federation, data[VICTIM])
    # Of several small steps it is as many gradients' sum.
    length = float((difference * true).sum() / np.square(true).sum())
    error = float(np.linalg.norm(difference - length * true) / np.linalg.norm(length * true))
    assert error < 0.01 if full_batches else error > 0.1


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "shut"),
    [("fednova", "normaliser"), ("fedcurv", f"fisher/{FIRST}")],
    ids=["fednova", "fedcurv"],
)
def test_what_hardly_depends_on_the_training_stays_shut(tmp_path: Path, method: str, shut: str) -> None:
    values = {"method": method, "rounds": 2, "weights": "uniform", "training": WHOLE}
    full, less = both_totals(Federation(values, hearts(6), state=tmp_path))
    assert shut in full and shut not in less
    assert any(name.endswith(FIRST) for name in less), "the rest is opened"


@pytest.mark.whole
def test_running_statistics_stay_shut(tmp_path: Path) -> None:
    rng, data = np.random.default_rng(103), {}
    for index in range(4):
        folds = {
            fold: (rng.normal(size=(size, 1, 8, 8)).astype(np.float32), np.arange(size) % 10)
            for fold, size in (("train", 20), ("validation", 10), ("test", 10))
        }
        data[f"hospital-{index + 1}"] = Records(ArrayData(folds, source="pictures", num_classes=10))
    values = {"dataset": "digits", "model": "resnet20", "model_options": {"bn_momentum": 1.0}, "rounds": 2}
    full, less = both_totals(Federation({**values, "training": WHOLE}, data, state=tmp_path))
    buffers = {name for name in full if name.startswith("buffer/")}
    assert buffers and not buffers & set(less)
    assert {name for name in less if name.startswith("update/")}
