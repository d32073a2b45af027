"""FedOpt: its variants against the paper's formulas by hand, and where they are FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand

from tightframe.methods.fedopt import METHOD, FedOptConfig


class FedAdam(by_hand.FedOpt):
    variant = "adam"


class FedYogi(by_hand.FedOpt):
    variant = "yogi"


class FedAdagrad(by_hand.FedOpt):
    variant = "adagrad"


@pytest.mark.parametrize("loop", [FedAdam, FedYogi, FedAdagrad])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_rounds_are_those_of_a_loop_by_hand(
    loop: type[by_hand.FedOpt], weighting: Any, open_sum: Callable[..., Any]
) -> None:
    """Three rounds, one of them without a silo; v passes from below D^2 to above it and back."""
    config = FedOptConfig(variant=loop.variant, server_learning_rate=loop.learning_rate, weighting=weighting)  # type: ignore[arg-type]
    setting = by_hand.setting_of(METHOD, config)
    lost = {(2, "site-1")}
    state, _ = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    expected = loop(setting, uniform=weighting == "uniform", lost=lost)
    by_hand.assert_models_agree(state.model, expected.run(3), atol=1e-5)
    for name, second in expected.second.items():
        torch.testing.assert_close(state.extra[f"second/{name}"].double(), second, rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(
            state.extra[f"first/{name}"].double(), expected.first[name], rtol=0, atol=2e-6
        )
    assert len(state.extra) == 2 * len(expected.second), "the moments are all that the server keeps"


@pytest.mark.parametrize(("variant", "times"), [("adam", 1), ("yogi", 2), ("adagrad", 2)])
def test_where_nothing_adapts_it_is_fedavg(variant: Any, times: int, open_sum: Callable[..., Any]) -> None:
    """With a tau beside which D is nothing, sqrt(v) is tau, or 0 where v forgets it, and m is D."""
    tau = 1e6
    config = FedOptConfig(
        **{"variant": variant, "weighting": "size", "beta1": 0.0, "beta2": 0.0, "tau": tau},
        server_learning_rate=times * tau,
    )
    setting = by_hand.setting_of(METHOD, config)
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.ByHand(setting).run(2), atol=5e-6)


def test_the_paper_is_the_default() -> None:
    config = FedOptConfig()
    assert (config.beta1, config.beta2, config.tau, config.weighting) == (0.9, 0.99, 1e-3, "uniform")
