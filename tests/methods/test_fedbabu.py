"""FedBABU: rounds are FedAvg's on the body alone, under a head that nobody trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand

from tightframe.methods.fedbabu import METHOD, FedBabuConfig


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedBabuConfig())
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.ByHand(setting).run(2))
    assert not any(kept.values()), "nobody keeps anything"
    start = METHOD.init_server(setting, by_hand.SEED).model
    changed = {name for name in start if not torch.equal(start[name], state.model[name])}
    assert {name for name in start if name.startswith("head.")} == {"head.weight", "head.bias"}
    assert changed and not any(name.startswith("head.") for name in changed)
    (phase,) = METHOD.plan(setting, 1, 1)
    assert not any("head" in item.name for item in phase.schema.fields)


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fine_tuning_changes_what_it_is_to(open_sum: Callable[..., Any], part: Any) -> None:
    """Against torch's own optimiser; the head trains here although it never did before."""
    setting = by_hand.setting_of(METHOD, FedBabuConfig(personal_epochs=3, fine_tune=part))
    state, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    silo = by_hand.silos_of(setting)["site-2"]
    assert METHOD.personalise is not None
    own: Any = METHOD.personalise(silo, state.model, {})
    expected: Any = setting.build_model()
    expected.load_state_dict(dict(state.model))
    expected.head.requires_grad_(part != "body")
    expected.backbone.requires_grad_(part != "head")
    by_hand.train(expected, silo, 1, epochs=3)
    by_hand.assert_models_agree(own.state_dict(), expected.state_dict())
    moved = {name for name, item in own.named_parameters() if not torch.equal(item, state.model[name])}
    assert any("head" in name for name in moved) is (part != "body")
    assert any("head" not in name for name in moved) is (part != "head")
    assert not own.training
