"""FedRep: head first, body second, against a loop by hand; and that the head stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.methods import by_hand
from torch import nn

from tightframe.methods.fedrep import METHOD, FedRepConfig


class FedRep(by_hand.OwnHead):
    head_epochs = 3

    def learn(self, model: Any, name: str, number: int) -> int:
        silo, local = self.silos[name], self.setting.local
        silo.round = number
        steps = epoch = 0
        for trained, others, epochs in (("head", "backbone", self.head_epochs), ("backbone", "head", 2)):
            model.get_submodule(others).requires_grad_(False)
            model.get_submodule(trained).requires_grad_(True)
            optimizer = torch.optim.SGD(
                model.get_submodule(trained).parameters(),
                lr=local.learning_rate,
                momentum=local.momentum,
                weight_decay=local.weight_decay,
            )
            model.train()
            for _ in range(epochs):
                for inputs, labels in silo.batches("train", augment=True, shuffle=True, epoch=epoch):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    steps += 1
                epoch += 1
        model.requires_grad_(True)
        return steps


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    setting, lost = by_hand.setting_of(METHOD, FedRepConfig(head_epochs=3)), {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = FedRep(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3))
    start = METHOD.init_server(setting, by_hand.SEED).model
    assert torch.equal(state.model["head.weight"], start["head.weight"]), "the server's head never changes"
    for name, head in loop.heads.items():
        by_hand.assert_models_agree(
            kept[name], {f"head.{key}": item for key, item in head.items()}, atol=5e-6
        )


def test_the_body_waits_for_the_head(make_setting: Any, make_silo: Any) -> None:
    """With no epoch of the body's learning left, nothing is sent."""
    setting = make_setting(FedRepConfig(head_epochs=2), epochs=1, weight_decay=0.0)
    model = METHOD.init_server(setting, 5).model
    silo = make_silo(setting, [0, 1, 1, 2] * 3)
    (phase,) = METHOD.plan(setting, 1, 1)
    made = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 5)), {})
    assert {item.name for item in phase.schema.fields} == set(made.tensors)
    assert not any("head" in name for name in made.tensors)
    assert made.proposed_state.keys() == {"head.weight", "head.bias"}
    # The head was fitted to the body that was received, which the body's epoch does not change.
    own: Any = silo.load(model)
    from tightframe.methods.fedrep import head_stage

    silo.fit(own, [head_stage(setting)])
    assert torch.equal(own.head.weight, made.proposed_state["head.weight"])
    assert all(torch.equal(own.state_dict()[name], model[name]) for name in model if "head" not in name)


def test_a_personal_model_is_the_final_body_with_a_head_fitted_to_it(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedRepConfig(head_epochs=2))
    state, kept = by_hand.federate(METHOD, setting, 1, open_sum)
    silo = by_hand.silos_of(setting)["site-1"]
    assert METHOD.personalise is not None
    own: Any = METHOD.personalise(silo, state.model, kept["site-1"])
    weights = {name: item for name, item in own.named_parameters() if not name.startswith("head.")}
    assert weights and all(torch.equal(item.detach(), state.model[name]) for name, item in weights.items())
    assert not torch.equal(own.head.weight, kept["site-1"]["head.weight"])
    assert all(item.requires_grad for item in own.parameters()) and not own.training
