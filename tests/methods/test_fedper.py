"""FedPer: rounds against a loop by hand, and that the head stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.jobs import SMALL
from tests.support.methods import by_hand

from tightframe.errors import JobError
from tightframe.methods.fedper import METHOD, FedPerConfig
from tightframe.rounds.setup import prepare


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """In round 2 site-2's term is lost, so in round 3 it goes on with the head of round 1."""
    setting, lost = by_hand.setting_of(METHOD, FedPerConfig()), {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = by_hand.OwnHead(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3))
    start = METHOD.init_server(setting, by_hand.SEED).model
    assert torch.equal(state.model["head.weight"], start["head.weight"]), "the server's head never changes"
    for name, head in loop.heads.items():
        by_hand.assert_models_agree(
            kept[name], {f"head.{key}": item for key, item in head.items()}, atol=5e-6
        )
    assert (kept["site-1"]["head.weight"] - kept["site-2"]["head.weight"]).abs().max() > 1e-2
    other = by_hand.OwnHead(setting)
    other.run(3)
    assert (other.heads["site-2"]["weight"] - loop.heads["site-2"]["weight"]).abs().max() > 1e-3


def test_no_field_is_the_heads(make_setting: Callable[..., Any]) -> None:
    setting = make_setting(FedPerConfig())
    (phase,) = METHOD.plan(setting, 1, 1)
    names = {item.name for item in phase.schema.fields}
    body = {name for name in METHOD.init_server(setting, 1).model if not name.startswith("head.")}
    assert body and {name for name in names if not name.startswith("training/")} == {
        f"update/{name}" for name in body
    }


@pytest.mark.parametrize("epochs", [0, 1, None])
def test_a_personal_model_is_the_final_body_under_the_own_head(
    open_sum: Callable[..., Any], epochs: int | None
) -> None:
    setting = by_hand.setting_of(METHOD, FedPerConfig(personal_epochs=epochs))
    state, kept = by_hand.federate(METHOD, setting, 1, open_sum)
    silo = by_hand.silos_of(setting)["site-2"]
    silo.round = 2
    assert METHOD.personalise is not None
    own = METHOD.personalise(silo, state.model, kept["site-2"])
    expected = setting.build_model()
    expected.load_state_dict({**state.model, **kept["site-2"]})
    steps = 0
    if epochs is None:
        steps = by_hand.train(expected, silo, 2)
    elif epochs:
        steps = by_hand.train(expected, silo, 2, epochs=epochs)
    assert steps == {0: 0, 1: 2, None: 4}[epochs]
    by_hand.assert_models_agree(own.state_dict(), expected.state_dict())
    assert not own.training
    assert METHOD.personalise(silo, state.model, {}) is not None, "a silo that was part of no round"


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu"])
def test_a_network_without_a_body_is_refused_before_the_run(method: str) -> None:
    regression = {
        "dataset": "eicu",
        "dataset_options": {},
        "model": "mlp",
        "model_options": {"widths": []},
    }
    prepare({**SMALL, **regression})  # FedAvg takes it
    with pytest.raises(JobError, match="parameters before its head"):
        prepare({**SMALL, **regression, "method": method})
