"""A method's whole run is the same with plain and with secure sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.methods import by_hand
from tests.support.runs import FOUR

SITES = FOUR[:3]
RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("combine", {"head": "etf", "local": "feddc", "server": "feddc", "prototypes": "fedmr"}, {}),
    ("ditto", {}, {"momentum": 0.9}),
    ("fedcurv", {"weight": 0.1}, {"momentum": 0.9}),
    ("feddyn", {"alpha": 0.1}, {"momentum": 0.9}),
    ("fednova", {}, {"momentum": 0.9}),
    ("fedproc", {"projection_width": 6}, {"momentum": 0.9}),
    ("fedrep", {"head_epochs": 2}, {"momentum": 0.9}),
]
"""Method, its options, what training has beside the defaults: each kind of field that methods sum.

Those of CCVR, FedAvg_ETF, FedILC and the methods of one sum are in their own files, by whole runs, too.
"""


@pytest.mark.parametrize(
    ("method", "options", "training"),
    [
        ("scaffold", {"global_learning_rate": 0.8}, {}),
        *(pytest.param(*run, marks=pytest.mark.whole) for run in RUNS),
    ],
)
def test_plain_sums_are_secure_sums(method: str, options: dict[str, Any], training: dict[str, Any]) -> None:
    """Two rounds of three silos in this process, bit for bit."""
    changes = {"sites": SITES, "method_options": options, "training": {"momentum": 0.0, **training}}
    plain, secure = (by_hand.whole_run(method, summation=kind, **changes) for kind in ("plain", "secure"))
    for ours, theirs in ((plain.state.model, secure.state.model), (plain.state.extra, secure.state.extra)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [row.training for row in plain.outcome.rows] == [row.training for row in secure.outcome.rows]
    assert all(row.silos == SITES for row in plain.outcome.rows if row.kind == "train")
