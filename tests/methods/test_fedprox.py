"""FedProx: against a loop by hand, and where it is FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.methods import by_hand

from tightframe.methods import fedavg
from tightframe.methods.fedprox import METHOD, FedProxConfig


def test_two_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedProxConfig(mu=by_hand.FedProx.mu))
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.FedProx(setting).run(2))
    assert not any(kept.values()) and not state.extra, "nobody keeps anything"
    # The term matters at the accuracy of the comparison.
    without = by_hand.ByHand(setting).run(2)
    assert any((state.model[name] - without[name]).abs().max() > 1e-3 for name in without)


def test_without_a_weight_it_is_fedavg(open_sum: Callable[..., Any]) -> None:
    found, _ = by_hand.federate(METHOD, by_hand.setting_of(METHOD, FedProxConfig(mu=0.0)), 2, open_sum)
    plain = by_hand.setting_of(fedavg.METHOD, fedavg.FedAvgConfig())
    expected, _ = by_hand.federate(fedavg.METHOD, plain, 2, open_sum)
    assert all(torch.equal(found.model[name], expected.model[name]) for name in expected.model)
