"""FedMMD: its discrepancy against the kernel written out, rounds by hand, where it is FedAvg."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand
from torch import nn

from tightframe import methods
from tightframe.errors import JobError
from tightframe.methods.fedmmd import METHOD, FedMMDConfig, squared_discrepancy
from tightframe.rounds.setup import prepare


def written_out(features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The formula over all pairs, one by one, the bandwidths as constants."""
    rows = [*features.unbind(), *others.unbind()]
    apart = [
        float(((one - other) ** 2).sum().detach())
        for i, one in enumerate(rows)
        for j, other in enumerate(rows)
        if i != j
    ]
    mean = sum(apart) / len(apart)

    def kernel(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        distance = ((one - other) ** 2).sum()
        return torch.stack([torch.exp(-distance / (mean * 2.0**i)) for i in range(-2, 3)]).sum()

    def average(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.stack([kernel(one, other) for one in left for other in right]).mean()

    return average(features, features) + average(others, others) - 2 * average(features, others)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_discrepancy_and_its_gradient_are_the_kernels_written_out(offset: float) -> None:
    stream = torch.Generator().manual_seed(6)
    features = torch.randn(5, 3, generator=stream, dtype=torch.float64) + offset
    others = torch.randn(4, 3, generator=stream, dtype=torch.float64) + 0.5 + offset
    features.requires_grad_()
    found, expected = squared_discrepancy(features, others), written_out(features, others)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    slopes = [torch.autograd.grad(value, features)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-10)
    # In the precision of training, too, where the features lie far from zero.
    narrow = squared_discrepancy(features.detach().float(), others.float())
    torch.testing.assert_close(narrow.double(), expected.detach(), rtol=1e-3, atol=1e-4)


def test_it_tells_distributions_apart_and_is_zero_for_one() -> None:
    stream = torch.Generator().manual_seed(7)
    rows = torch.randn(64, 4, generator=stream)
    assert float(squared_discrepancy(rows, rows)) == pytest.approx(0.0, abs=1e-5)
    same = float(squared_discrepancy(rows, torch.randn(64, 4, generator=stream)))
    other = float(squared_discrepancy(rows, torch.randn(64, 4, generator=stream) + 1))
    assert 0 < 5 * same < other
    # A batch of one record, whose features are those of the global model: no distance at all.
    one = rows[:1].clone().requires_grad_()
    squared_discrepancy(one, rows[:1]).backward()
    assert one.grad is not None and not one.grad.any()


class FedMMD(by_hand.ByHand):
    weight = 0.5

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        received = received.eval()

        def objective(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            others = received.features(inputs).detach()  # type: ignore[operator]
            both, size = torch.cat([features, others]), len(labels)
            squares = ((both[:, None] - both[None]) ** 2).sum(2)
            mean = squares.detach().sum() / (2 * size * (2 * size - 1))
            kernel = sum(torch.exp(-squares / (mean * math.pow(2, i))) for i in range(-2, 3))
            blocks = kernel[:size, :size].mean(), kernel[size:, size:].mean(), kernel[:size, size:].mean()  # type: ignore[index]
            discrepancy = blocks[0] + blocks[1] - 2 * blocks[2]
            return nn.functional.cross_entropy(model.head(features), labels) + self.weight * discrepancy

        return objective


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, FedMMDConfig(weight=FedMMD.weight))
    lost = {(1, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 2, open_sum, lost=lost)
    by_hand.assert_models_agree(state.model, FedMMD(setting, lost=lost).run(2), atol=2e-5)
    assert not any(kept.values()) and not state.extra, "nobody keeps anything"
    plain = by_hand.ByHand(setting, lost=lost).run(2)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-3 for name in plain), "the term matters"


def test_without_a_weight_it_is_fedavg(open_sum: Callable[..., Any]) -> None:
    by_hand.assert_is_fedavg(METHOD, FedMMDConfig(weight=0.0), open_sum)


def test_it_couples_records_and_is_refused_with_privacy(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    with pytest.raises(JobError, match="fedmmd has no form for differential privacy"):
        prepare(small | {"method": "fedmmd", "weights": "uniform", "privacy": {"epsilon": 4.0}})
    setting = by_hand.setting_of(METHOD, FedMMDConfig())
    seen = []
    silo = by_hand.silos_of(setting)["site-1"]
    monkeypatch.setattr(type(silo), "fit", lambda self, model, stages: seen.append(stages) or _report())
    (phase,) = METHOD.plan(setting, 1, 1)
    phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 1)), {})
    assert [term.per_record for term in seen[0][0].terms] == [True, False]


def _report() -> Any:
    from tightframe.learning.stages import FitReport

    return FitReport()
