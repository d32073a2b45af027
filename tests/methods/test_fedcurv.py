"""FedCurv: penalty and Fisher information by autograd, rounds by hand, the own part when terms are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand, lossy
from torch import nn

from tightframe import methods
from tightframe.errors import TrainingError
from tightframe.learning.model_update import broadcast_model
from tightframe.methods.fedcurv import (
    METHOD,
    SCALE,
    FedCurvConfig,
    curvature_penalty,
    diagonal_fisher,
    local_rule,
    others_curvature,
    own_part,
)
from tightframe.phases import Tensors


def fisher_by_vmap(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean over records of squared gradients of the log-likelihood, all records at once."""
    parameters = {name: item.detach() for name, item in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def likelihood(values: Any, record: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, (values, buffers), (record[None],))
        return torch.log_softmax(logits, 1)[0].gather(0, label[None])[0]

    each = torch.func.vmap(torch.func.grad(likelihood), (None, 0, 0))(parameters, inputs, labels)
    return {name: item.double().square().mean(0) for name, item in each.items()}


class FedCurv(by_hand.ByHand):
    """Every silo is given the others' w_j and F_j of the last round, as the paper has it."""

    weight = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.others: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
        self.arrived: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        others = [item for site, item in self.others.items() if site != name]

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = by_hand.cross_entropy(model, inputs, labels)
            for places, bends in others:
                for key, parameter in model.named_parameters():
                    # A sum of curvatures above 1 counts as 1.
                    most = torch.stack([bend[key] for _, bend in others]).sum(0).clamp_min(1)
                    each = bends[key] / most * (parameter - places[key]) ** 2
                    loss = loss + self.weight * each.sum().float()
            return loss

        return objective

    def seen(self, name: str, trained: nn.Module, moved: Any, steps: int) -> None:
        trained.eval()
        silo = self.silos[name]
        places = {key: item.detach().clone().double() for key, item in trained.named_parameters()}
        self.arrived[name] = (places, fisher_by_vmap(trained, silo.inputs, silo.labels))

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        self.others, self.arrived = self.arrived, {}
        return super().step(moves, steps, weights)


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """Site-2's term of round 2 is lost: in round 3 it has nothing of its own to subtract."""
    setting = by_hand.setting_of(METHOD, FedCurvConfig(weight=FedCurv.weight), momentum=0.0)
    lost = {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = FedCurv(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3), atol=1e-5)
    for name, (_, bends) in loop.others.items():
        for key, item in bends.items():
            found = kept[name]["fisher/" + key] / SCALE
            torch.testing.assert_close(found, item, rtol=2e-3, atol=1e-6)
    plain = by_hand.ByHand(setting, lost=lost).run(3)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-3 for name in plain), "the penalty matters"


def test_without_a_weight_it_is_fedavg(open_sum: Callable[..., Any]) -> None:
    by_hand.assert_is_fedavg(METHOD, FedCurvConfig(weight=0.0), open_sum)


def test_no_step_is_undone_by_more_than_the_weight_says() -> None:
    """Of curvature 400, as of inputs of about 40, and of one below 0, which only a liar sends."""
    setting = by_hand.setting_of(METHOD, FedCurvConfig(weight=0.3), momentum=0.0)
    silo, start = by_hand.silos_of(setting)["site-1"], by_hand.start(setting)
    received = {name: item.clone() for name, item in start.state_dict().items()}
    known = torch.tensor([400.0, 0.25, -400.0])
    sums = {"fisher_sums": torch.ones((), dtype=torch.int64)}
    for name, item in start.named_parameters():
        bends = known.repeat(item.numel())[: item.numel()].view(item.shape).double()
        sums["fisher/" + name] = SCALE * bends
        sums["fisher_times_model/" + name] = SCALE * bends * (item.detach() - 0.1)
    rule = local_rule(FedCurvConfig(weight=0.3))
    (term,) = rule.objective(silo, broadcast_model(received) | sums, {}).parameter_terms
    slopes = []
    for away in (0.0, 1.0):
        with torch.no_grad():
            for item in start.parameters():
                item.add_(away)
        slopes.append(torch.autograd.grad(term.weight * term.fn(start), list(start.parameters())))
    for at, beyond in zip(*slopes, strict=True):
        drawn = (beyond - at).flatten()[:3]
        torch.testing.assert_close(drawn, rule.pull * torch.tensor([1.0, 0.25, 0.0])[: len(drawn)])
        towards = 2 * 0.3 * 0.1 * torch.tensor([1.0, 0.25, -1.0])
        torch.testing.assert_close(at.flatten()[:3], towards[: len(drawn)], rtol=1e-4, atol=1e-6)


def test_the_penalty_is_the_written_formula_by_autograd() -> None:
    """``sum over j of (v - w_j)^T diag(F_j) (v - w_j)``, up to a constant."""
    stream = torch.Generator().manual_seed(8)
    model = nn.Linear(5, 3).double()

    def drawn() -> dict[str, torch.Tensor]:
        return {
            name: torch.randn(item.shape, generator=stream).double()
            for name, item in model.named_parameters()
        }

    anchors, places = drawn(), [drawn() for _ in range(4)]
    bends = [{name: item.square() for name, item in drawn().items()} for _ in places]
    total = {name: torch.stack([bend[name] for bend in bends]).sum(0) for name in anchors}
    products = {
        name: torch.stack([bend[name] * place[name] for bend, place in zip(bends, places, strict=True)]).sum(
            0
        )
        for name in anchors
    }
    slopes = {name: total[name] * anchors[name] - products[name] for name in anchors}

    def formula() -> torch.Tensor:
        return torch.stack(
            [
                (bend[name] * (item - place[name]) ** 2).sum()
                for bend, place in zip(bends, places, strict=True)
                for name, item in model.named_parameters()
            ]
        ).sum()

    for _ in range(2):
        found = torch.autograd.grad(
            curvature_penalty(model, anchors, total, slopes), list(model.parameters())
        )
        expected = torch.autograd.grad(formula(), list(model.parameters()))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            for item in model.parameters():
                item.add_(1.0)


def test_the_fisher_information_is_that_of_single_records() -> None:
    """Not of batches: squares of mean gradients would be others. With BatchNorm, by running statistics."""
    setting = by_hand.setting_of(METHOD, FedCurvConfig())
    silo, model = by_hand.silos_of(setting)["site-1"], by_hand.start(setting).eval()
    expected = fisher_by_vmap(model, silo.inputs, silo.labels)
    found = diagonal_fisher(silo, model)
    assert list(found) == list(expected)
    for name, item in found.items():
        torch.testing.assert_close(item, expected[name], rtol=1e-4, atol=1e-9)
        assert bool((item >= 0).all())
    assert {(asked["augment"], asked["shuffle"]) for asked in silo.asked} == {(False, False)}
    with torch.no_grad():
        model.head.weight.fill_(torch.inf)  # type: ignore[union-attr, operator]
    with pytest.raises(TrainingError, match="gradients of single records"):
        diagonal_fisher(silo, model)


def _summed(states: list[Tensors], name: str) -> torch.Tensor:
    return torch.stack([state[name] for state in states]).sum(0)


@pytest.mark.whole
def test_nothing_of_the_own_part_is_left_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, through the codec: the sums less a silo's own part are the others' parts.

    Of plain sums, in which a sum with a drop-out is opened as well.
    """
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    lost = {(2, "site-1"), (3, "site-4")}
    state, kept = lossy.run("fedcurv", tmp_path, lost, update_norm=0.05, summation="plain")
    assert int(state.extra["fisher_sums"]) == 3
    there = [site for site in kept if site != "site-4"]
    for site in kept:
        bends, products = others_curvature(state.extra, kept[site])
        others = [kept[other] for other in there if other != site]
        assert len(others) == (3 if site == "site-4" else 2)
        for name, bend in bends.items():
            assert torch.equal(bend * SCALE, _summed(others, "fisher/" + name))
            assert torch.equal(products[name] * SCALE, _summed(others, "fisher_times_model/" + name))
            assert bool((bend >= 0).all())
    assert int(kept["site-4"]["fisher_sums"]) == 2, "it keeps the part of the sum that it was in last"
    assert max(float(item.abs().max()) for item in bends.values()) > 1e-6


@pytest.mark.whole
@pytest.mark.parametrize(("rounds", "opened"), [(3, 1), (4, 2)])
def test_after_drop_outs_the_sums_and_each_silos_part_of_them_are_those_opened_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, opened: int
) -> None:
    """Through codec and masks. Rounds 2 and 3 open updates alone, of silos that keep what they sent."""
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    lost = {(2, "site-1"), (3, "site-4")}
    state, kept = lossy.run("fedcurv", tmp_path, lost, update_norm=0.05, rounds=rounds)
    assert int(state.extra["fisher_sums"]) == opened and len(kept) == 4
    parts = {site: own_part(state.extra, states) for site, states in kept.items()}
    for site in kept:
        assert int(parts[site]["fisher_sums"]) == opened
        bends, products = others_curvature(state.extra, kept[site])
        others = [parts[other] for other in kept if other != site]
        for name, bend in bends.items():
            assert torch.equal(bend * SCALE, _summed(others, "fisher/" + name))
            assert torch.equal(products[name] * SCALE, _summed(others, "fisher_times_model/" + name))


def test_the_first_round_and_a_personal_model_have_no_penalty(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedCurvConfig(weight=10.0))
    state, kept = by_hand.federate(METHOD, setting, 1, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.ByHand(setting).run(1))
    silo = by_hand.silos_of(setting)["site-1"]
    assert METHOD.personalise is not None
    personal = METHOD.personalise(silo, state.model, kept["site-1"])
    expected = setting.build_model()
    expected.load_state_dict(dict(state.model))
    by_hand.train(expected, silo, 1)
    by_hand.assert_models_agree(personal.state_dict(), expected.state_dict())


def test_silos_receive_the_sums_and_no_other_part_of_the_servers_state() -> None:
    setting = by_hand.setting_of(METHOD, FedCurvConfig())
    (phase,) = METHOD.plan(setting, 2, 3)
    state = METHOD.init_server(setting, 1)
    told = {**state.extra, "fisher/head.weight": torch.zeros(3, 4)}
    known = {**told, "statistics/feature_mean": torch.zeros(6)}
    sent = {name for name in phase.broadcast(state.evolve(extra=known)) if not name.startswith("model/")}
    assert sent == set(told)
