"""FedRS: its scales and loss, rounds against a loop by hand, where it is FedAvg, and its private form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand

from tightframe.errors import JobError
from tightframe.learning.stages import FitReport
from tightframe.methods.fedrs import METHOD, FedRSConfig, class_scales, restricted_loss
from tightframe.privacy.training.probe import check_per_record
from tightframe.rounds.setup import prepare


class Soft(by_hand.FedRS):
    form = "soft"


@pytest.mark.parametrize("loop", [by_hand.FedRS, Soft])
def test_rounds_are_those_of_a_loop_by_hand(loop: type[by_hand.FedRS], open_sum: Callable[..., Any]) -> None:
    """Every silo of the world lacks a class; site-3's term is lost in the first round."""
    setting = by_hand.setting_of(METHOD, FedRSConfig(alpha=loop.alpha, form=loop.form))  # type: ignore[arg-type]
    lost = {(1, "site-3")}
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum, lost=lost)
    by_hand.assert_models_agree(state.model, loop(setting, lost=lost).run(2), atol=5e-6)
    assert not any(kept.values()) and not state.extra, "nobody keeps anything"
    plain = by_hand.ByHand(setting, lost=lost).run(2)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-3 for name in plain), "scaling matters"


@pytest.mark.parametrize("form", ["binary", "soft"])
def test_with_alpha_one_it_is_fedavg(form: Any, open_sum: Callable[..., Any]) -> None:
    by_hand.assert_is_fedavg(METHOD, FedRSConfig(alpha=1.0, form=form), open_sum)


def test_absent_classes_vectors_move_by_alpha_times_as_much() -> None:
    """The paper's point: where all logits are zero, the push on an absent class's vector is alpha's share."""
    features, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0] * 5)
    pushes = []
    for alpha in (1.0, 0.5, 0.0):
        weight = torch.zeros(3, 4, requires_grad=True)
        scales = class_scales(torch.tensor([5, 1, 0]), alpha=alpha)
        restricted_loss(features @ weight.T, labels, scales).backward()
        assert weight.grad is not None
        pushes.append(weight.grad.clone())
    torch.testing.assert_close(pushes[1][2], pushes[0][2] / 2)
    assert not pushes[2][2].any()
    assert all(torch.equal(push[:2], pushes[0][:2]) for push in pushes)


def test_a_silo_of_one_class_and_one_without_records_have_scales() -> None:
    assert class_scales(torch.tensor([0, 7, 0]), alpha=0.25).tolist() == [0.25, 1.0, 0.25]
    assert class_scales(torch.tensor([0, 7, 0]), alpha=0.25, form="soft").tolist() == [0.25, 1.0, 0.25]
    assert class_scales(torch.zeros(2), alpha=0.25, form="soft").tolist() == [0.25, 0.25]


JOB: dict[str, Any] = {
    "job_name": "private",
    "method": "fedrs",
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model": "small_cnn",
    "model_options": {"widths": [8, 8]},
    "sites": ["a", "b", "c", "d", "e", "f"],
    "min_sites": 5,
    "rounds": 3,
    "weights": "uniform",
    "privacy": {"epsilon": 4.0},
}


def test_under_privacy_the_scales_are_of_noisy_counts_which_the_job_charges() -> None:
    plan = prepare({**JOB, "method_options": {"form": "soft"}}).privacy
    assert plan is not None and plan.prior and len(plan.class_events) == 1
    with pytest.raises(JobError, match=r"form 'binary' discloses which classes.*take 'soft'"):
        prepare(JOB)


def test_private_training_takes_the_soft_loss_with_constant_counts() -> None:
    """The probe of DP-SGD finds no coupling between records."""
    setup = prepare({**JOB, "method_options": {"form": "soft"}})
    seen = []

    class Silo:
        name, round, setting, device = "a", 1, setup.setting, torch.device("cpu")

        def class_counts(self, fold: str) -> torch.Tensor:
            return torch.tensor([3.5, 1.0, 40.25, 1.0, 9.0, 1.0, 2.0, 1.0], dtype=torch.float64)

        def load(self, tensors: Any) -> torch.nn.Module:
            model = self.setting.build_model()
            model.load_state_dict(dict(tensors))
            return model

        def fit(self, model: torch.nn.Module, stages: Any) -> Any:
            stream = torch.Generator().manual_seed(0)
            inputs = torch.rand(6, *self.setting.input_shape, generator=stream)
            check_per_record(model, stages, (inputs, torch.tensor([0, 1, 2, 3, 4, 5])), device="cpu")
            seen.append(stages[0].terms[0].name)
            return FitReport()

    (phase,) = METHOD.plan(setup.setting, 1, 3)
    received = phase.broadcast(METHOD.init_server(setup.setting, 1))
    phase.contribute(Silo(), received, {})  # type: ignore[arg-type]
    assert seen == ["restricted"]
