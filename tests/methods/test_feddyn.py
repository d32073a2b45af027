"""FedDyn: rounds by hand, where it ends, what alpha near zero leaves of it, its sums when silos are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.methods import by_hand, lossy, quadratic
from torch import nn

from tightframe import methods
from tightframe.methods import fedavg
from tightframe.methods.feddyn import METHOD, FedDynConfig, regulariser
from tightframe.rounds.setup import prepare


class FedDyn(by_hand.ByHand):
    """With h_k and h as the paper has them."""

    alpha = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uniform = True
        names = by_hand.trained_names(self.model)
        zeros = {name: 0.0 * item for name, item in by_hand.flat(self.model).items() if name in names}
        self.common = dict(zeros)
        self.own = {name: dict(zeros) for name in self.silos}

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        anchors = {key: item.detach().clone() for key, item in received.named_parameters()}
        own = {key: item.float() for key, item in self.own[name].items()}

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = by_hand.cross_entropy(model, inputs, labels)
            for key, parameter in model.named_parameters():
                loss = loss - (own[key] * parameter).sum()
                loss = loss + self.alpha / 2 * ((parameter - anchors[key]) ** 2).sum()
            return loss

        return objective

    def seen(self, name: str, trained: nn.Module, moved: dict[str, torch.Tensor], steps: int) -> None:
        self.own[name] = {key: self.own[name][key] - self.alpha * move for key, move in moved.items()}

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        for key in self.common:
            total = torch.stack([move[key] for move in moves]).sum(0)
            self.common[key] = self.common[key] - self.alpha * total / len(self.silos)
        mean = super().step(moves, steps, weights)
        return {key: value - self.common[key] / self.alpha for key, value in mean.items()}


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """Three rounds; site-2's term is lost in the second, after it was made."""
    setting = by_hand.setting_of(METHOD, FedDynConfig(alpha=FedDyn.alpha), learning_rate=0.05, momentum=0.5)
    lost = {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = FedDyn(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3), atol=1e-5)
    for site, own in loop.own.items():
        for key, item in own.items():
            torch.testing.assert_close(-FedDyn.alpha * kept[site]["drift/" + key], item, rtol=0, atol=2e-6)
    for key, item in loop.common.items():
        mean = -FedDyn.alpha * state.extra["drift/" + key] / 3
        torch.testing.assert_close(mean, item, rtol=0, atol=2e-6)
    plain = by_hand.ByHand(setting, uniform=True, lost=lost).run(3)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-2 for name in plain), "it is not FedAvg"


@pytest.mark.whole
def test_on_quadratic_silos_it_ends_at_the_optimum_and_averaging_does_not(
    open_sum: Callable[..., Any],
) -> None:
    assert quadratic.distance_to_optimum(METHOD, FedDynConfig(alpha=0.5), open_sum) < 2e-3
    assert quadratic.distance_to_optimum(fedavg.METHOD, fedavg.FedAvgConfig(), open_sum) > 0.05


def test_near_alpha_zero_silos_train_as_in_fedavg_and_the_server_adds_what_it_has_summed(
    open_sum: Callable[..., Any],
) -> None:
    """The paper's server has no limit that is FedAvg: h / alpha is the same for every alpha."""
    setting = by_hand.setting_of(METHOD, FedDynConfig(alpha=1e-30))
    first, kept = by_hand.federate(METHOD, setting, 1, open_sum)
    start = by_hand.start(setting).state_dict()
    once = by_hand.ByHand(setting, uniform=True).run(1)
    for name in by_hand.trained_names(by_hand.start(setting)):
        expected = start[name] + 2 * (once[name].double() - start[name].double())
        torch.testing.assert_close(first.model[name].double(), expected.double(), rtol=0, atol=2e-6)
    # From a model that both receive, with a state of earlier rounds, a silo sends what FedAvg's sends.
    silo = by_hand.silos_of(setting)["site-1"]
    silo.round = 2
    (phase,) = METHOD.plan(setting, 2, 2)
    (plain,) = fedavg.METHOD.plan(by_hand.setting_of(fedavg.METHOD, fedavg.FedAvgConfig()), 2, 2)
    ours = phase.contribute(silo, phase.broadcast(first), kept["site-1"]).tensors
    silo.setting = by_hand.setting_of(fedavg.METHOD, fedavg.FedAvgConfig())
    theirs = plain.contribute(silo, plain.broadcast(first), {}).tensors
    for name, item in theirs.items():
        if name.startswith("update/"):
            torch.testing.assert_close(ours[name], item.double(), rtol=0, atol=2.0**-24)
    with pytest.raises(ValidationError, match="greater than 0"):
        FedDynConfig(alpha=0.0)


def test_the_regulariser_is_the_papers_by_autograd() -> None:
    stream = torch.Generator().manual_seed(2)
    model = nn.Linear(4, 3).double()
    anchors, own = (
        {name: torch.randn(item.shape, generator=stream).double() for name, item in model.named_parameters()}
        for _ in range(2)
    )
    alpha = 0.3
    drifts = {name: -item / alpha for name, item in own.items()}
    found = torch.autograd.grad(alpha * regulariser(model, anchors, drifts), list(model.parameters()))
    for (name, parameter), slope in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(slope, -own[name] + alpha * (parameter - anchors[name]).detach())


@pytest.mark.whole
def test_the_server_has_the_sum_of_what_silos_keep_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, through codec and masks, where the job shortens updates."""
    norm = 0.05
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    lost = {(2, "site-1"), (3, "site-4")}
    state, kept = lossy.run("feddyn", tmp_path, lost, method_options={"alpha": 0.1}, update_norm=norm)
    assert len(kept) == 4 and int(state.extra["drift_silos"]) == 4
    for name in kept["site-1"]:
        assert torch.equal(state.extra[name], torch.stack([own[name] for own in kept.values()]).sum(0))
    squares = torch.stack([item.square().sum() for item in kept["site-2"].values()]).sum()
    assert float(squares.sqrt()) > 1e-3
    assert float(squares.sqrt()) <= 3 * norm, "three updates, each of at most the norm"


def test_under_privacy_all_that_leaves_is_the_update() -> None:
    """What is kept and summed are functions of updates that DP-SGD made."""
    setup = prepare(
        {
            **{"job_name": "private", "method": "feddyn", "dataset": "fed_isic2019", "rounds": 3},
            **{"dataset_options": {"image_size": 16}, "model": "small_cnn", "weights": "uniform"},
            **{"sites": ["a", "b", "c", "d", "e", "f"], "min_sites": 5, "privacy": {"epsilon": 4.0}},
        }
    )
    for phase in setup.training_phases(2):
        assert {item.mechanism for item in phase.schema.fields} <= {"training", "charges"}
