"""SCAFFOLD: rounds by hand, the invariant of its control variates when terms are lost, where it leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods import by_hand, quadratic
from tests.support.methods.lossy import LosesAnswers
from tests.support.runs import FOUR, contexts, coordinator, job
from torch import nn

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.learning.exact_updates import mean_of_all, silos_ever
from tightframe.methods import fedavg, scaffold
from tightframe.methods.scaffold import CONTROL, METHOD, SILOS, ScaffoldConfig, control_change
from tightframe.models import Classifier
from tightframe.phases import Cohort, Setting, Tensors
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.own_state import SiloStateStore
from tightframe.rounds.silo.session import SiloSession
from tightframe.securesum import encoding
from tightframe.securesum.messages import SumId


def _setting(config: ScaffoldConfig | None = None, **local: Any) -> Setting:
    config = config or ScaffoldConfig(global_learning_rate=by_hand.Scaffold.global_learning_rate)
    return by_hand.setting_of(METHOD, config, **{"momentum": 0.0, **local})


def _summed(states: Mapping[str, Tensors]) -> dict[str, torch.Tensor]:
    """Sum over silos of c_k."""
    names = {name for state in states.values() for name in state}
    return {
        name: torch.stack([state[name] for state in states.values() if name in state]).sum(0)
        for name in names
    }


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """Three rounds; site-2's term is lost in the second, after it was made."""
    setting = _setting()
    lost = {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = by_hand.Scaffold(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3), atol=5e-6)
    for name, common in mean_of_all(state, CONTROL, SILOS).items():
        key = name.removeprefix("control/")
        torch.testing.assert_close(common.double(), loop.common[key], rtol=0, atol=2e-5)
        for site, own in loop.own.items():
            torch.testing.assert_close(kept[site][name], own[key], rtol=0, atol=2e-5)
    assert all(torch.equal(state.extra[name], total) for name, total in _summed(kept).items())
    plain = by_hand.ByHand(setting, uniform=True, lost=lost).run(3)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-2 for name in plain), "it is not FedAvg"


LOSSES: dict[str, dict[str, Any]] = {
    "after-contribute": {"lost": {(2, "site-1"), (3, "site-4")}},
    "never-there": {"lost": {(number, "site-3") for number in (1, 2, 3)}},
    # Its term was summed, though it is not heard of again in that round.
    "at-the-reveal": {
        "lost": set(),
        "silent": lambda task, site, request: task == "reveal" and site == "site-2",
    },
}


@pytest.mark.whole
@pytest.mark.parametrize("summation", ["plain", "secure"])
@pytest.mark.parametrize("losses", LOSSES)
def test_c_is_the_mean_of_all_silos_control_variates_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summation: str, losses: str
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    proposed: dict[tuple[str, str], Tensors] = {}
    propose = SiloStateStore.propose

    def watched(self: SiloStateStore, sum_id: Any, state: Tensors, start: Any) -> None:
        proposed[self._silo, str(sum_id)] = state
        propose(self, sum_id, state, start)

    monkeypatch.setattr(SiloStateStore, "propose", watched)
    training = {"epochs": 1, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.0}
    of = job(method="scaffold", rounds=3, summation=summation, training=training)
    silos = contexts(of, tmp_path)
    line = LosesAnswers({site: SiloSession(context) for site, context in silos.items()}, **LOSSES[losses])
    state = coordinator(of, tmp_path).run(line).state

    counts = {site: SiloStateStore(item.state_folder, site).committed() for site, item in silos.items()}
    kept = {site: state for site, state in counts.items() if state}
    assert set(kept) == set(FOUR) - ({"site-3"} if losses == "never-there" else set())
    for name, total in _summed(kept).items():
        assert torch.equal(state.extra[name], total), name  # to the last bit
        assert torch.equal(mean_of_all(state, CONTROL, SILOS)[name], (total / 4).float())
    assert int(state.extra["control_silos"]) == 4
    # What was lost had been proposed, and would have made a difference.
    for number, site in LOSSES[losses]["lost"]:
        gone = proposed[site, str(SumId.of("train", number, 0, 0))]
        assert any(item.abs().max() > 1e-4 for item in gone.values())
        assert all(not torch.equal(gone[name], kept[site][name]) for name in gone if site in kept)


def test_a_change_is_summed_as_the_silo_keeps_it() -> None:
    stream = torch.Generator().manual_seed(0)
    update, common = torch.randn(500, generator=stream), torch.randn(500, generator=stream)
    change = control_change(update, common, learning_rate=3e-3, weight=7.0)
    torch.testing.assert_close(change, -update.double() / 0.021 - common.double(), rtol=0, atol=2.0**-25)
    sent = encoding.encode(change.numpy(), ring=64, bits=24, bound=1e6, name="control")
    assert np.array_equal(encoding.decode(sent, ring=64, bits=24), change.numpy())


def _softmax_regression(method: Any, config: Any) -> Setting:
    """Strongly convex, full batches, many local steps: silos drift far apart."""
    local = {"momentum": 0.0, "weight_decay": 0.5, "batch_size": 64, "epochs": 5, "augment": False}
    setting = by_hand.setting_of(method, config, learning_rate=0.2, **local)
    return replace(setting, build_model=lambda: Classifier(nn.Identity(), 6, 3))


def _slope(setting: Setting, model: Tensors) -> float:
    """Length of the gradient of the mean of the silos' objectives."""
    found = by_hand.start(setting)
    found.load_state_dict(dict(model))
    silos = by_hand.silos_of(setting).values()
    loss = torch.stack([by_hand.cross_entropy(found, silo.inputs, silo.labels) for silo in silos]).mean()
    loss = loss + 0.25 * sum(parameter.square().sum() for parameter in found.parameters())
    return float(
        torch.stack([item.norm() for item in torch.autograd.grad(loss, list(found.parameters()))]).norm()
    )


@pytest.mark.whole
def test_it_ends_at_the_optimum_of_the_mean_objective_and_averaging_does_not(
    open_sum: Callable[..., Any],
) -> None:
    """What the paper proves; no formula of the method is used here."""
    ours = _softmax_regression(METHOD, ScaffoldConfig())
    state, _ = by_hand.federate(METHOD, ours, 40, open_sum)
    theirs = _softmax_regression(fedavg.METHOD, fedavg.FedAvgConfig())
    averaged, _ = by_hand.federate(fedavg.METHOD, theirs, 40, by_hand.equal_sizes(open_sum))
    assert _slope(ours, state.model) < 1e-4
    assert _slope(theirs, averaged.model) > 1e-2


def test_on_quadratic_silos_it_ends_at_the_optimum_in_closed_form(open_sum: Callable[..., Any]) -> None:
    assert quadratic.distance_to_optimum(METHOD, ScaffoldConfig(), open_sum) < 1e-4


@pytest.mark.parametrize(("momentum", "times"), [("normalise", 1.0), ("ignore", None)])
def test_with_momentum_a_control_variate_is_a_gradient_or_as_large_as_ignored(
    momentum: Any, times: float | None
) -> None:
    """Steps so short that the gradient stays what it is."""
    local = {"momentum": 0.9, "learning_rate": 1e-4, "batch_size": 64, "epochs": 6, "augment": False}
    setting = replace(_softmax_regression(METHOD, ScaffoldConfig(momentum=momentum)))
    setting.local.__dict__.update(local, weight_decay=0.0)
    if times is None:
        times = by_hand.weight_of_gradients(6, 1e-4, 0.9, 0.0) / 6
        assert times > 2
    by_hand.assert_is_a_gradient(METHOD, setting, "control/", times, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"momentum": 0.9}, r"`training.momentum` to be 0.*but got 0\.9.*'normalise'"),
        ({"momentum": 0.0, "optimizer": "adam"}, r"`training.optimizer` to be 'sgd'.*SCAFFOLD.*'adam'"),
    ],
)
def test_what_breaks_its_formula_is_refused_before_anything_runs(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    values = small | {"method": "scaffold", "training": small["training"] | training}
    with pytest.raises(JobError, match=rf"TF-101[\s\S]*{message}"):
        prepare(parse_job(values))
    if "optimizer" not in training:
        prepare(parse_job(values | {"method_options": {"momentum": "normalise"}}))


def test_a_personal_model_is_trained_without_the_correction(open_sum: Callable[..., Any]) -> None:
    setting = _setting()
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum)
    silo = by_hand.silos_of(setting)["site-1"]
    silo.round = 2
    assert METHOD.personalise is not None and kept["site-1"]
    personal = METHOD.personalise(silo, state.model, kept["site-1"])
    expected = setting.build_model()
    expected.load_state_dict(dict(state.model))
    by_hand.train(expected, silo, 2)
    by_hand.assert_models_agree(personal.state_dict(), expected.state_dict())


def test_a_cohort_that_does_not_tell_who_is_enrolled_is_refused(open_sum: Callable[..., Any]) -> None:
    state = METHOD.init_server(_setting(), 0)
    with pytest.raises(ValueError, match="enrolled"):
        silos_ever(state.extra[scaffold.SILOS], Cohort(1, {"a": 1.0, "b": 1.0}, 1.0, enrolled=1))
