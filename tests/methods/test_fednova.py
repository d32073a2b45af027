"""FedNova: rounds by hand with unequal steps, and where it is FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.methods.fednova import METHOD, FedNovaConfig
from tightframe.rounds.setup import prepare


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_are_those_of_a_loop_by_hand(momentum: float, open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedNovaConfig(), momentum=momentum)
    lost = {(2, "site-1")}
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum, lost=lost)
    expected = by_hand.FedNova(setting, lost=lost).run(2)
    by_hand.assert_models_agree(state.model, expected, atol=5e-6)
    plain = by_hand.ByHand(setting, lost=lost).run(2)
    assert any((plain[name] - expected[name]).abs().max() > 1e-3 for name in plain), "normalising matters"
    # Running statistics are averaged as they are.
    one_round, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    buffers = by_hand.ByHand(setting).run(1)
    for name in ("backbone.1.running_mean", "backbone.1.running_var"):
        torch.testing.assert_close(one_round.model[name], buffers[name], rtol=0, atol=1e-6)


def test_with_equal_steps_it_is_fedavg(open_sum: Callable[..., Any]) -> None:
    """At batches of 32 every silo takes one step an epoch, whatever its size."""
    setting = by_hand.setting_of(METHOD, FedNovaConfig(), batch_size=32, epochs=3)
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.ByHand(setting).run(2), atol=5e-6)


def test_what_leaves_a_silo_is_a_mean_gradient(open_sum: Callable[..., Any]) -> None:
    """One step of plain SGD: the direction is the gradient, and its weight is one."""
    local = {"batch_size": 32, "epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "augment": False}
    setting = by_hand.setting_of(METHOD, FedNovaConfig(), **local)
    (phase,) = METHOD.plan(setting, 1, 1)
    silo = by_hand.silos_of(setting)["site-2"]
    tensors = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, by_hand.SEED)), {}).tensors
    model = by_hand.start(setting).train()
    by_hand.cross_entropy(model, silo.inputs, silo.labels).backward()
    assert float(tensors["normaliser"]) == 1.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            tensors[f"direction/{name}"].float(), parameter.grad, rtol=1e-4, atol=2e-6, msg=name
        )
    assert not any(name.startswith("update/") for name in tensors)


def test_after_a_drop_out_it_steps_by_the_normaliser_that_was_opened_last(
    open_sum: Callable[..., Any],
) -> None:
    """A secure sum then opens directions alone; before the first full sum the model waits."""
    setting = by_hand.setting_of(METHOD, FedNovaConfig())
    (phase,) = METHOD.plan(setting, 1, 2)
    assert phase.schema["normaliser"].static
    before = METHOD.init_server(setting, by_hand.SEED)
    silos = by_hand.silos_of(setting)
    terms = {
        name: (len(silo.labels), phase.contribute(silo, phase.broadcast(before), {}).tensors)
        for name, silo in silos.items()
    }
    full, cohort = open_sum(phase.schema, terms)
    left = dict(list(terms.items())[1:])
    fewer, rest = open_sum(phase.schema, left)
    updates = {item.name for item in phase.schema.fields if not item.static}
    shut = {name: total for name, total in fewer.items() if name in updates}
    assert phase.update(before, shut, rest) is before
    after = phase.update(before, full, cohort)
    moved = phase.update(after, shut, rest)
    reach = setting.local.learning_rate * float(full["normaliser"]) / cohort.total_weight
    for name in by_hand.trained_names(by_hand.start(setting)):
        step = torch.as_tensor(fewer[f"direction/{name}"]) * (-reach / rest.total_weight)
        torch.testing.assert_close(moved.model[name], (after.model[name].double() + step).float())
    assert torch.equal(moved.extra["normaliser_mean"], after.extra["normaliser_mean"])


def test_the_norm_of_the_job_bounds_the_direction() -> None:
    setting = replace(by_hand.setting_of(METHOD, FedNovaConfig()), update_norm=0.5)
    (phase,) = METHOD.plan(setting, 1, 1)
    normed = {item.name for item in phase.schema.fields if item.norm == 0.5}
    assert normed == {f"direction/{name}" for name in by_hand.trained_names(by_hand.start(setting))}
    assert phase.schema["normaliser"].norm is None and phase.schema["normaliser"].weighted


def test_a_personal_model_is_the_final_one_after_one_more_round(open_sum: Callable[..., Any]) -> None:
    """Made from the silo's own training, as what it sends is no difference of models."""
    setting = by_hand.setting_of(METHOD, FedNovaConfig())
    state, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    silo = by_hand.silos_of(setting)["site-2"]
    silo.round = 1
    assert METHOD.personalise is not None
    personal = METHOD.personalise(silo, state.model, {})
    expected = setting.build_model()
    expected.load_state_dict(dict(state.model))
    by_hand.train(expected, silo, 1)
    by_hand.assert_models_agree(personal.state_dict(), expected.state_dict())
    assert not torch.equal(personal.head.weight, state.model["head.weight"])  # type: ignore[union-attr, arg-type]


def test_other_optimisers_are_refused(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    job = parse_job(small | {"method": "fednova", "training": small["training"] | {"optimizer": "adam"}})
    with pytest.raises(JobError, match=r"TF-101[\s\S]*FedNova's normaliser.*'adam'"):
        prepare(job)
