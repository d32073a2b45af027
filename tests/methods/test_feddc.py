"""FedDC: rounds by hand, where it ends, what momentum does to its states, its sums when silos are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand, lossy, quadratic
from torch import nn

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.learning.exact_updates import mean_of_all
from tightframe.methods.feddc import GRADIENT, METHOD, SILOS, FedDCConfig
from tightframe.rounds.setup import prepare


class FedDC(by_hand.ByHand):
    """With h_k, g_k and g as the paper has them."""

    alpha = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uniform = True
        names = by_hand.trained_names(self.model)
        zeros = {name: 0.0 * item for name, item in by_hand.flat(self.model).items() if name in names}
        self.drifts = {name: dict(zeros) for name in self.silos}
        self.gradients = {name: dict(zeros) for name in self.silos}
        self.common = dict(zeros)
        self.changes: list[dict[str, torch.Tensor]] = []

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        anchors = {
            key: item.detach() - self.drifts[name][key].float() for key, item in received.named_parameters()
        }
        slopes = {key: (item - self.gradients[name][key]).float() for key, item in self.common.items()}

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = by_hand.cross_entropy(model, inputs, labels)
            for key, parameter in model.named_parameters():
                loss = loss + self.alpha / 2 * ((parameter - anchors[key]) ** 2).sum()
                loss = loss + (parameter * slopes[key]).sum()
            return loss

        return objective

    def seen(self, name: str, trained: nn.Module, moved: dict[str, torch.Tensor], steps: int) -> None:
        rate, own = self.setting.local.learning_rate, self.gradients[name]
        new = {key: own[key] - self.common[key] - move / (rate * steps) for key, move in moved.items()}
        self.changes.append({key: new[key] - own[key] for key in new})
        self.gradients[name] = new
        self.drifts[name] = {key: self.drifts[name][key] + move for key, move in moved.items()}

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        for key in self.common:
            total = torch.stack([change[key] for change in self.changes]).sum(0)
            self.common[key] = self.common[key] + total / len(self.silos)
        self.changes = []
        mean = super().step(moves, steps, weights)
        return {
            key: value + torch.stack([own[key] for own in self.drifts.values()]).mean(0)
            for key, value in mean.items()
        }


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """Three rounds; site-2's term is lost in the second, after it was made."""
    setting = by_hand.setting_of(METHOD, FedDCConfig(alpha=FedDC.alpha), learning_rate=0.05, momentum=0.0)
    lost = {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = FedDC(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3), atol=2e-5)
    for key, item in loop.common.items():
        found = mean_of_all(state, GRADIENT, SILOS)["gradient/" + key]
        torch.testing.assert_close(found.double(), item, rtol=0, atol=1e-4)
        for site in loop.silos:
            drift, gradient = kept[site]["drift/" + key], kept[site]["gradient/" + key]
            torch.testing.assert_close(drift, loop.drifts[site][key], rtol=0, atol=1e-5)
            torch.testing.assert_close(gradient, loop.gradients[site][key], rtol=0, atol=1e-4)
    plain = by_hand.ByHand(setting, uniform=True, lost=lost).run(3)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-2 for name in plain), "it is not FedAvg"


def test_on_quadratic_silos_it_ends_at_the_optimum_in_closed_form(open_sum: Callable[..., Any]) -> None:
    """Where h_k no longer changes w_k is w, and then the mean of the silos' gradients is zero."""
    assert quadratic.distance_to_optimum(METHOD, FedDCConfig(alpha=0.5), open_sum) < 1e-4


@pytest.mark.whole
def test_the_server_has_the_sums_of_what_silos_keep_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, through codec and masks, where the job shortens updates."""
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    lost = {(2, "site-1"), (3, "site-4")}
    state, kept = lossy.run("feddc", tmp_path, lost, method_options={"alpha": 0.1}, update_norm=0.05)
    assert len(kept) == 4 and int(state.extra["drift_silos"]) == 4
    assert {name.partition("/")[0] for name in kept["site-1"]} == {"drift", "gradient"}
    for name, item in kept["site-1"].items():
        assert torch.equal(state.extra[name], torch.stack([own[name] for own in kept.values()]).sum(0))
        assert item.abs().max() > 0


@pytest.mark.parametrize(("momentum", "times"), [("normalise", 1.0), ("ignore", None)])
def test_with_momentum_a_gradient_state_is_a_gradient_or_as_large_as_ignored(
    momentum: Any, times: float | None
) -> None:
    """Steps so short that the gradient stays what it is."""
    local = {"momentum": 0.9, "learning_rate": 1e-4, "batch_size": 64, "epochs": 6, "augment": False}
    setting = by_hand.setting_of(METHOD, FedDCConfig(momentum=momentum), weight_decay=0.0, **local)
    times = by_hand.weight_of_gradients(6, 1e-4, 0.9, 0.0) / 6 if times is None else times
    by_hand.assert_is_a_gradient(METHOD, setting, "gradient/", times, rtol=0.03, atol=4e-3)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"momentum": 0.9}, r"`training.momentum` to be 0.*but got 0\.9.*'normalise'"),
        ({"momentum": 0.0, "optimizer": "adam"}, r"`training.optimizer` to be 'sgd'.*FedDC.*'adam'"),
    ],
)
def test_what_breaks_its_formula_is_refused_before_anything_runs(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    with pytest.raises(JobError, match=rf"TF-101[\s\S]*{message}"):
        prepare(parse_job(small | {"method": "feddc", "training": small["training"] | training}))


def test_a_personal_model_is_trained_towards_the_silos_own_place(open_sum: Callable[..., Any]) -> None:
    """By the quadratic term around w - h_k alone, because g is not known then."""
    setting = by_hand.setting_of(METHOD, FedDCConfig(alpha=FedDC.alpha), learning_rate=0.05, momentum=0.0)
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum)
    silo = by_hand.silos_of(setting)["site-1"]
    silo.round = 2
    assert METHOD.personalise is not None
    personal = METHOD.personalise(silo, state.model, kept["site-1"])
    expected = setting.build_model()
    expected.load_state_dict(dict(state.model))
    loop = FedDC(setting)
    loop.drifts["site-1"] = {name: kept["site-1"]["drift/" + name] for name in loop.common}
    loss = loop.loss("site-1", expected)
    by_hand.train(expected, silo, 2, loss)
    by_hand.assert_models_agree(personal.state_dict(), expected.state_dict(), atol=5e-6)
