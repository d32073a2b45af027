"""A run as a server tells of it while somebody watches."""

from __future__ import annotations

import json
from typing import Any

from tests.support.results.building import evaluated, row, spent
from tests.support.results.building import status as begun

from tightframe.results.status import Status
from tightframe_app.watch.status import read_status

JOB = "3ff24333-53bb-41ff-845a-c6426a480901"
SPENT = spent(2, 3, 2.0, 4.0, **{"hospital-1": 3.214})
RUN = begun("fedmr_isic", 4, (8.0, 1e-5)).enrolled(
    ["hospital-1", "hospital-2", "hospital-3"], {"hospital-4": "TF-612", "hospital-5": "TF-612"}
)
OUTCOME: dict[str, Any] = {
    "job_name": "fedmr_isic",
    "trained": True,
    "reason": None,
    "rounds_done": 4,
    "rounds": 4,
    "synthetic": False,
    "seconds": 53.2,
    "evaluation": evaluated(balanced_accuracy=0.41234, noisy=False).as_json(),
    "method": "fedmr",
    "roster": ["hospital-1", "hospital-2", "hospital-3"],
    "summation": "secure",
    "sums": "secure",
    "rules": [],
}


def status(value: Status) -> Status:
    """As it comes over the wire."""
    return read_status(json.loads(json.dumps(value.as_json())))


def trained_so_far() -> Status:
    """Two rounds behind it, the second without two silos, and the third under way."""
    last = row(
        2,
        "train",
        ["hospital-1"],
        {"hospital-2": "TF-502", "hospital-3": "TF-301"},
        31.5,
        10**6,
        2 * 10**6,
        training={"loss": 0.71349},
        privacy=SPENT,
        evaluation=evaluated(balanced_accuracy=0.512, noisy=True),
    )
    return RUN.summed(last).evaluated(last).summing("train", 3, 0, 2).answer("hospital-1")
