"""Ditto: the global model is FedAvg's to the bit, the personal ones are those of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.methods import by_hand
from torch import nn

from tightframe.methods import fedavg
from tightframe.methods.ditto import METHOD, PERSONAL, DittoConfig


class Ditto(by_hand.ByHand):
    """Beside FedAvg: personal models, which a lost result leaves as they were."""

    lam, rate = 0.6, 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self.personal: dict[str, nn.Module] = {}

    def personal_round(self, name: str, number: int) -> nn.Module:
        """One round of a silo's own half, near the global model as it stands."""
        model = self.setting.build_model()
        model.load_state_dict(self.personal.get(name, self.model).state_dict())
        anchors = [item.detach().clone() for item in self.model.parameters()]
        silo = self.silos[name]
        silo.round = number
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9, weight_decay=1e-3)
        model.train()
        for epoch in range(3):
            for inputs, labels in silo.batches("train", augment=True, shuffle=True, epoch=epoch):
                optimizer.zero_grad()
                distance = sum(((v - w) ** 2).sum() for v, w in zip(model.parameters(), anchors, strict=True))
                loss = nn.functional.cross_entropy(model(inputs), labels) + self.lam / 2 * distance
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return model

    def _round(self, number: int) -> None:
        made = {name: self.personal_round(name, number) for name in self.silos}
        self.personal |= {name: model for name, model in made.items() if (number, name) not in self.lost}
        super()._round(number)


CONFIG = DittoConfig(lam=Ditto.lam, personal_epochs=3, personal_learning_rate=Ditto.rate)


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    setting, lost = by_hand.setting_of(METHOD, CONFIG), {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = Ditto(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3))
    for name, personal in loop.personal.items():
        own = {key.removeprefix(PERSONAL): item for key, item in kept[name].items()}
        by_hand.assert_models_agree(own, personal.state_dict(), atol=1e-5)
        gap = own["head.weight"] - state.model["head.weight"]
        assert gap.abs().max() > 1e-2, "a personal model is not the global one"


def test_the_global_model_is_fedavgs_to_the_bit(open_sum: Callable[..., Any]) -> None:
    found, _ = by_hand.federate(METHOD, by_hand.setting_of(METHOD, CONFIG), 2, open_sum)
    plain = by_hand.setting_of(fedavg.METHOD, fedavg.FedAvgConfig())
    expected, _ = by_hand.federate(fedavg.METHOD, plain, 2, open_sum)
    assert all(torch.equal(found.model[name], expected.model[name]) for name in expected.model)


def test_nothing_of_a_personal_model_leaves(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, CONFIG)
    (phase,) = METHOD.plan(setting, 1, 3)
    silo = by_hand.silos_of(setting)["site-1"]
    received = phase.broadcast(METHOD.init_server(setting, by_hand.SEED))
    first = phase.contribute(silo, received, {})
    other = {
        name: torch.randn_like(item) if item.is_floating_point() else item
        for name, item in first.proposed_state.items()
    }
    second = phase.contribute(silo, received, other)
    assert set(first.tensors) == {item.name for item in phase.schema.fields}
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert not all(
        torch.equal(first.proposed_state[name], second.proposed_state[name]) for name in first.proposed_state
    )


def test_the_personal_model_is_one_more_round_near_the_final_one(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, CONFIG)
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum)
    loop = Ditto(setting)
    loop.run(2)
    silo = by_hand.silos_of(setting)["site-3"]
    silo.round = 3
    assert METHOD.personalise is not None
    own = METHOD.personalise(silo, state.model, kept["site-3"])
    expected = loop.personal_round("site-3", 3)
    by_hand.assert_models_agree(own.state_dict(), expected.state_dict(), atol=2e-5)
    newcomer = METHOD.personalise(silo, state.model, {})
    assert not own.training and not torch.equal(newcomer.head.weight, own.head.weight)  # type: ignore[union-attr, arg-type]


def test_the_defaults_are_those_of_the_comparison() -> None:
    assert DittoConfig().model_dump() == {
        "lam": 0.75,
        "personal_epochs": None,
        "personal_learning_rate": None,
    }
