"""The server's optimisers against ``torch.optim`` and against the papers' formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tightframe.learning.server_optimizers import adam_step, fedopt_step, sgd_step

SHAPES: dict[str, tuple[int, ...]] = {"backbone.weight": (4, 3), "head.bias": (5,), "temperature": ()}
STEPS = 7


def _tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=stream, dtype=dtype) for name, shape in SHAPES.items()}


def _gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of several scales, one with exact zeros, as a dead column gives them."""
    found = _tensors(100 + step, dtype)
    found["backbone.weight"][:, 1] = 0
    return {name: tensor * scale for (name, tensor), scale in zip(found.items(), (1, 1e-6, 1e3), strict=True)}


def _oracle(
    make: Any, dtype: torch.dtype, gradients: Any = _gradients
) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """The parameters after each step of an optimiser of torch."""
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in _tensors(0, dtype).items()}
    optimizer = make(list(parameters.values()))
    history = []
    for step in range(1, STEPS + 1):
        for name, slope in gradients(step, dtype).items():
            parameters[name].grad = slope
        optimizer.step()
        history.append({name: item.detach().clone() for name, item in parameters.items()})
    return history, optimizer


def _close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert list(found) == list(expected)
    rtol = 1e-13 if dtype == torch.float64 else 1e-6
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.5, 0.9), 1e-3)])
def test_adam_equals_torch(
    dtype: torch.dtype, weight_decay: float, betas: tuple[float, float], eps: float
) -> None:
    settings: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    expected, _ = _oracle(lambda items: torch.optim.Adam(items, lr=0.03, foreach=False, **settings), dtype)
    parameters, moments = _tensors(0, dtype), {}
    for step in range(1, STEPS + 1):
        before = {name: tensor.clone() for name, tensor in (parameters | moments).items()}
        kept = parameters | moments
        # The totals of a sum are float64, whatever the model is.
        slopes = (
            _gradients(step, dtype)
            if step % 2
            else {n: g.double() for n, g in _gradients(step, dtype).items()}
        )
        parameters, moments = adam_step(
            parameters, slopes, moments, step=step, learning_rate=0.03, **settings
        )
        assert all(torch.equal(kept[name], tensor) for name, tensor in before.items()), "changed in place"
        _close(parameters, expected[step - 1], dtype)
    assert set(moments) == {kind + name for kind in ("first/", "second/") for name in SHAPES}


def test_adam_leaves_a_dead_column_alone() -> None:
    parameters, moments = _tensors(0), {}
    for step in range(1, STEPS + 1):
        parameters, moments = adam_step(
            parameters, _gradients(step, torch.float64), moments, step=step, learning_rate=0.03
        )
    start = _tensors(0)["backbone.weight"]
    assert torch.equal(parameters["backbone.weight"][:, 1], start[:, 1])
    assert not torch.isclose(parameters["backbone.weight"][:, 0], start[:, 0]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_sgd_equals_torch(dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
    settings: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
    expected, _ = _oracle(lambda items: torch.optim.SGD(items, lr=0.03, foreach=False, **settings), dtype)
    parameters, moments = _tensors(0, dtype), {}
    for step in range(1, STEPS + 1):
        slopes = _gradients(step, dtype)
        parameters, moments = sgd_step(parameters, slopes, moments, learning_rate=0.03, **settings)
        _close(parameters, expected[step - 1], dtype)
    assert set(moments) == ({f"momentum/{name}" for name in SHAPES} if momentum else set())


@pytest.mark.parametrize("variant", ["adam", "yogi", "adagrad"])
def test_fedopt_equals_the_papers_formula(variant: Any) -> None:
    """Algorithm 2 of Reddi et al., coordinate by coordinate in plain floats."""
    learning_rate, (b1, b2), tau = 0.1, (0.9, 0.99), 1e-3
    weights = {name: tensor.numpy().copy() for name, tensor in _tensors(0).items()}
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.full(shape, tau**2) for name, shape in SHAPES.items()}
    parameters, moments = _tensors(0), {}
    for step in range(1, STEPS + 1):
        updates = _gradients(step, torch.float64)
        parameters, moments = fedopt_step(
            parameters, updates, moments, variant=variant, learning_rate=learning_rate
        )
        for name, shape in SHAPES.items():
            for place in np.ndindex(*shape):
                change = float(updates[name].numpy()[place])
                first[name][place] = b1 * first[name][place] + (1 - b1) * change
                old = float(second[name][place])
                if variant == "adam":
                    second[name][place] = b2 * old + (1 - b2) * change**2
                elif variant == "adagrad":
                    second[name][place] = old + change**2
                elif old > change**2:
                    second[name][place] = old - (1 - b2) * change**2
                elif old < change**2:
                    second[name][place] = old + (1 - b2) * change**2
                weights[name][place] += (
                    learning_rate * first[name][place] / (second[name][place] ** 0.5 + tau)
                )
            np.testing.assert_allclose(parameters[name].numpy(), weights[name], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(moments[f"second/{name}"].numpy(), second[name], rtol=1e-12)


def test_fedadagrad_without_momentum_is_torchs_adagrad() -> None:
    """Torch's Adagrad on -D, from the accumulator tau^2 and with ``eps`` tau."""
    tau = 1e-3
    expected, _ = _oracle(
        lambda items: torch.optim.Adagrad(items, lr=0.1, eps=tau, initial_accumulator_value=tau**2),
        torch.float64,
        lambda step, dtype: {name: -item for name, item in _gradients(step, dtype).items()},
    )
    parameters, moments = _tensors(0), {}
    for step in range(1, STEPS + 1):
        updates = _gradients(step, torch.float64)
        parameters, moments = fedopt_step(
            parameters, updates, moments, variant="adagrad", learning_rate=0.1, betas=(0.0, 0.0), tau=tau
        )
        _close(parameters, expected[step - 1], torch.float64)


def test_fedopt_is_adam_without_correction_of_its_moments() -> None:
    """Torch's Adam with ``eps`` and step size scaled back, from the second moment tau^2."""
    learning_rate, betas, tau = 0.1, (0.9, 0.99), 1e-3
    parameters, moments = _tensors(0), {}
    twin, twins = _tensors(0), {}
    for step in range(1, STEPS + 1):
        updates = _gradients(step, torch.float64)
        parameters, moments = fedopt_step(
            parameters, updates, moments, learning_rate=learning_rate, betas=betas, tau=tau
        )
        if not twins:
            twins = {f"first/{name}": torch.zeros(shape).double() for name, shape in SHAPES.items()}
            twins |= {f"second/{name}": torch.full(shape, tau**2).double() for name, shape in SHAPES.items()}
        scale = (1 - betas[1] ** step) ** 0.5
        twin, twins = adam_step(
            twin,
            {name: -update for name, update in updates.items()},
            twins,
            step=step,
            learning_rate=learning_rate * (1 - betas[0] ** step) / scale,
            betas=betas,
            eps=tau / scale,
        )
        for name in SHAPES:  # powers of the betas near one lose a few digits
            torch.testing.assert_close(parameters[name], twin[name], rtol=1e-10, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    parameters = _tensors(0)
    less = {name: tensor for name, tensor in _tensors(1).items() if name != "head.bias"}
    with pytest.raises(ValueError, match=r"gradients for every parameter, but got none for \['head.bias'\]"):
        adam_step(parameters, less, {}, step=1, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"moments for every parameter, .*\['second/backbone.weight'"):
        fedopt_step(parameters, parameters, {f"first/{n}": t for n, t in parameters.items()}, learning_rate=1)
    with pytest.raises(ValueError, match=r"of shape \(5,\), but got \(1,\)"):
        sgd_step(parameters, parameters | {"head.bias": torch.zeros(1)}, {}, learning_rate=0.1)
    with pytest.raises(ValueError, match="count from 1, but got 0"):
        adam_step(parameters, parameters, {}, step=0, learning_rate=0.1)
    with pytest.raises(ValueError, match="moments of step 2, but got none"):
        adam_step(parameters, parameters, {}, step=3, learning_rate=0.1)
    with pytest.raises(ValueError, match="'adam', 'yogi' or 'adagrad', but got 'sgd'"):
        fedopt_step(parameters, parameters, {}, variant="sgd", learning_rate=0.1)  # type: ignore[arg-type]
