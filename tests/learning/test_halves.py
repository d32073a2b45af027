"""The parts that baselines share."""

from __future__ import annotations

import pytest
import torch
from tests.support.methods.by_hand import weight_of_gradients

from tightframe.learning.halves import gradient_weight, next_model


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.3, 4.0])
def test_the_weight_is_how_far_torchs_sgd_gets(steps: int, momentum: float, mu: float) -> None:
    """With a gradient that is always one, in units of the learning rate."""
    found = gradient_weight(steps, momentum=momentum, proximal=0.1 * mu)
    assert found == pytest.approx(weight_of_gradients(steps, 0.1, momentum, mu), rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 25])
def test_the_weight_has_the_papers_closed_forms(steps: int) -> None:
    assert gradient_weight(steps) == steps
    rho, alpha = 0.9, 0.03
    assert gradient_weight(steps, momentum=rho) == pytest.approx(
        (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    )
    assert gradient_weight(steps, proximal=alpha) == pytest.approx((1 - (1 - alpha) ** steps) / alpha)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"momentum": 1.0}, {"proximal": 1.0}, {"proximal": -0.1}])
def test_the_weight_refuses_what_has_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="but got"):
        gradient_weight(**{"steps": 2, **wrong})  # type: ignore[arg-type]


def test_the_next_model_keeps_what_nobody_sends() -> None:
    model = {"w": torch.zeros(2), "var": torch.ones(1), "steps": torch.tensor(4), "frame": torch.ones(3)}
    found = next_model(
        model,
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"buffer/var": torch.tensor([6.0]).numpy()},
        2.0,
    )
    assert found["w"].tolist() == [1.0, 2.0] and found["w"].dtype == torch.float32
    assert found["var"].tolist() == [3.0]
    assert found["steps"] is model["steps"] and found["frame"] is model["frame"]
