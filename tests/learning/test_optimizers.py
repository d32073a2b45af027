"""The optimisers of local training, against torch's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.processes import printed

from tightframe.learning.optimizers import OptimizerSettings

CASES = {
    "plain": (OptimizerSettings("sgd", 0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (
        OptimizerSettings("sgd", 0.05, 0.9, 1e-2),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2},
    ),
    "adam": (
        OptimizerSettings("adam", 0.02, 0.0, 1e-2),
        torch.optim.Adam,
        {"lr": 0.02, "weight_decay": 1e-2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_torch_bit_for_bit(case: str) -> None:
    settings, reference, arguments = CASES[case]
    start = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    ours = [torch.nn.Parameter(value.clone()) for value in start]
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    mine: Any = settings.build(ours)
    other: Any = reference(theirs, **arguments)
    for step in range(6):
        for optimizer, parameters in ((mine, ours), (other, theirs)):
            optimizer.zero_grad()
            # The last parameter has a gradient now and then only, like the weights of an unused branch.
            used = parameters if step in (1, 4) else parameters[:2]
            torch.stack([(item * (step + 1)).sin().sum() for item in used]).sum().backward()
            optimizer.step()
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one, two), step
    assert not torch.equal(ours[2], start[2])


def test_gradients_are_forgotten_or_set_to_zero() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = OptimizerSettings("sgd", 0.1).build([parameter])
    optimizer.zero_grad(set_to_none=False)
    parameter.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_gradient_scaler_takes_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = OptimizerSettings("sgd", 0.5).build([parameter])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.full((2,), 0.5))


@pytest.mark.whole
def test_a_step_does_not_load_the_compiler() -> None:
    """Which would cost every task of every silo in the simulator more than a second."""
    script = (
        "import sys, torch\n"
        "from tightframe.learning.optimizers import OptimizerSettings\n"
        "for name in ('sgd', 'adam'):\n"
        "    value = torch.nn.Parameter(torch.ones(2))\n"
        "    optimizer = OptimizerSettings(name, 0.1).build([value])\n"
        "    optimizer.zero_grad(); value.sum().backward(); optimizer.step()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert printed(script) == ["False"]
