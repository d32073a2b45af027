"""MOON: its term, and rounds against a loop by hand in which a silo's result is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand

from tightframe.methods.moon import METHOD, PREVIOUS, MoonConfig, contrastive_loss


def _features(seed: int, *shape: int) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=stream, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("tau", [0.2, 0.5, 2.0])
def test_the_term_is_equation_3(tau: float) -> None:
    features, near, far = _features(4, 7, 5)
    cosine = torch.nn.functional.cosine_similarity
    towards, away = torch.exp(cosine(features, near) / tau), torch.exp(cosine(features, far) / tau)
    expected = -torch.log(towards / (towards + away)).mean()
    torch.testing.assert_close(contrastive_loss(features, near, far, tau=tau), expected, rtol=1e-9, atol=0)
    features.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: contrastive_loss(z, near, far, tau=tau), features)


def test_a_record_without_features_breaks_nothing() -> None:
    features, near, far = (item.float() for item in _features(5, 3, 4))
    features[1] = near[2] = 0.0
    features.requires_grad_()
    loss = contrastive_loss(features, near, far)
    loss.backward()
    assert torch.isfinite(loss) and features.grad is not None
    assert not features.grad[1].any() and features.grad.abs().max() < 10
    assert contrastive_loss(features.detach().bfloat16(), near, far).dtype == torch.float32


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """In round 2 site-2's term is lost, so in round 3 its last model is that of round 1."""
    setting = by_hand.setting_of(METHOD, MoonConfig(mu=by_hand.Moon.mu, tau=by_hand.Moon.tau))
    lost = {(2, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    loop = by_hand.Moon(setting, lost=lost)
    by_hand.assert_models_agree(state.model, loop.run(3), atol=5e-6)
    for name, previous in loop.previous.items():
        own = {key.removeprefix(PREVIOUS): item for key, item in kept[name].items()}
        by_hand.assert_models_agree(own, previous.state_dict(), atol=5e-6)
    other = by_hand.Moon(setting)
    other.run(3)
    gap = other.previous["site-2"].head.weight - loop.previous["site-2"].head.weight  # type: ignore[operator, union-attr]
    assert gap.abs().max() > 1e-3, "the loss shows"


def test_the_first_round_is_plain_cross_entropy_and_reports_no_contrast(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, MoonConfig(mu=10.0))
    by_hand.assert_models_agree(
        by_hand.federate(METHOD, setting, 1, open_sum)[0].model, by_hand.ByHand(setting).run(1)
    )
    (phase,) = METHOD.plan(setting, 1, 1)
    silo = by_hand.silos_of(setting)["site-1"]
    received = phase.broadcast(METHOD.init_server(setting, 1))
    first = phase.contribute(silo, received, {})
    assert float(first.tensors["training/contrastive"]) == 0.0
    second = phase.contribute(silo, received, first.proposed_state)
    assert 0 < float(second.tensors["training/contrastive"]) < 3.0
    assert not any(name.startswith(PREVIOUS) for name in second.tensors), "the last model stays at the silo"
