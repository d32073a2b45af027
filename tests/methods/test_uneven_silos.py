"""Methods with silos that have one class, one record or many: nothing of theirs is undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand
from tests.support.methods.silo import FakeSilo

from tightframe import methods
from tightframe.phases import stream_seed

LABELS = {"site-1": [0] * 9, "site-2": [1], "site-3": [1] * 4 + [2] * 6 + [0] * 7}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedrs", {"form": "soft"}),
        ("fedrs", {"alpha": 0.0}),
        ("feddyn", {}),
        ("feddc", {}),
        ("fedproc", {"projection_width": 4}),
        ("fedmmd", {"weight": 1.0}),
        ("fedaws", {}),
        ("fedcurv", {"weight": 0.1}),
    ],
)
def test_three_rounds_end_in_finite_numbers_that_every_silo_has_moved(
    name: str, options: dict[str, Any], open_sum: Callable[..., Any]
) -> None:
    """Site-1 has one class, site-2 one record; site-3's term of round 2 is lost."""
    method = methods.get(name)
    setting = by_hand.setting_of(method, method.config(**options), momentum=0.0)
    silos = {}
    for site, labels in LABELS.items():
        stream = torch.Generator().manual_seed(stream_seed(2, site))
        silos[site] = FakeSilo(
            site, setting, torch.randn(len(labels), 6, generator=stream), torch.tensor(labels)
        )
    lost = {(2, "site-3")}
    state, kept = by_hand.federate(method, setting, 3, open_sum, lost=lost, silos=silos)
    tensors = [
        *state.model.values(),
        *state.extra.values(),
        *(x for own in kept.values() for x in own.values()),
    ]
    assert all(bool(item.isfinite().all()) for item in tensors)
    # Every silo's term is there: without any one of them the model would be another.
    for site in silos:
        gone = {(number, site) for number in (1, 2, 3)}
        other, _ = by_hand.federate(method, setting, 3, open_sum, lost=lost | gone, silos=silos)
        assert any(not torch.equal(other.model[key], item) for key, item in state.model.items()), site
