"""Fishr against golden values and gradients, against single records' gradients, and chunk by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.methods.fedilc.fishr import (
    GradientMoments,
    SiloPenalty,
    fishr_penalty,
    gradient_moments,
    gradient_variance,
)

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "golden" / "fedilc.npz")
CASES = range(int(GOLDEN["n_fishr"]))
PARAMETERS = ("body_W", "body_b", "clf_W", "clf_b")
Silos = list[tuple[torch.Tensor, torch.Tensor]]


def _golden(index: int) -> tuple[dict[str, torch.Tensor], Silos]:
    parameters = {name: torch.tensor(GOLDEN[f"f{index}_{name}"]).requires_grad_() for name in PARAMETERS}
    silos: Silos = []
    while f"f{index}_k{len(silos)}_x" in GOLDEN:
        place = f"f{index}_k{len(silos)}"
        silos.append((torch.tensor(GOLDEN[f"{place}_x"]), torch.tensor(GOLDEN[f"{place}_y"])))
    return parameters, silos


def _features(parameters: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.linear(inputs, parameters["body_W"], parameters["body_b"]))


def _variance(parameters: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return gradient_variance(_features(parameters, inputs), labels, parameters["clf_W"], parameters["clf_b"])


def _close(found: torch.Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("index", CASES)
def test_variances_and_penalty_of_the_authors(index: int) -> None:
    parameters, silos = _golden(index)
    variances = []
    for place, (inputs, labels) in enumerate(silos):
        weight, bias = _variance(parameters, inputs, labels)
        assert weight.shape == parameters["clf_W"].shape and bias.shape == parameters["clf_b"].shape
        _close(weight.reshape(-1), GOLDEN[f"f{index}_k{place}_var_weight"])
        _close(bias, GOLDEN[f"f{index}_k{place}_var_bias"])
        variances.append(torch.cat([bias, weight.reshape(-1)]))
    stacked = torch.stack(variances)
    loss = fishr_penalty(stacked)
    _close(loss, GOLDEN[f"f{index}_fishr_loss"])
    _close(stacked.sum(0), GOLDEN[f"f{index}_sum_v"])
    _close(stacked.square().sum(0), GOLDEN[f"f{index}_sum_v2"])
    # The value from two sums, as a server could know it.
    from_sums = stacked.square().sum() - stacked.sum(0).square().sum() / len(silos)
    _close(from_sums, GOLDEN[f"f{index}_fishr_from_sums"])
    loss.backward()
    for name, tensor in parameters.items():
        _close(tensor.grad, GOLDEN[f"f{index}_fishr_grad_{name}"])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("index", CASES)
def test_two_phases_in_chunks_give_the_authors_gradient(index: int, size: int) -> None:
    """Each silo alone, each mini-batch alone: the sum is the gradient through all silos' graphs."""
    parameters, silos = _golden(index)
    parts = []
    for inputs, labels in silos:
        batches = list(zip(inputs.split(size), labels.split(size), strict=True))
        moments = [
            gradient_moments(_features(parameters, x).detach(), y, parameters["clf_W"], parameters["clf_b"])
            for x, y in batches
        ]
        parts.append((batches, sum(moments[1:], moments[0])))
    mean_weight, mean_bias = (
        torch.stack([moments.variance()[place].detach() for _, moments in parts]).mean(0) for place in (0, 1)
    )
    value = 0.0
    for batches, moments in parts:
        assert moments.batches == len(batches) and moments.records == sum(len(y) for _, y in batches)
        with torch.no_grad():
            penalty = SiloPenalty.of(moments, mean_weight, mean_bias)
        value += float(penalty.value)
        for inputs, labels in batches:
            features = _features(parameters, inputs)
            penalty.share(features, labels, parameters["clf_W"], parameters["clf_b"]).backward()
    np.testing.assert_allclose(value, GOLDEN[f"f{index}_fishr_loss"], rtol=1e-9)
    for name, tensor in parameters.items():
        _close(tensor.grad, GOLDEN[f"f{index}_twophase_grad_{name}"])
        _close(tensor.grad, GOLDEN[f"f{index}_fishr_grad_{name}"])


def _records(seed: int, classes: int, *, count: int = 11, width: int = 4) -> tuple[torch.Tensor, ...]:
    stream = torch.Generator().manual_seed(seed)
    features = torch.relu(torch.randn(count, width, generator=stream, dtype=torch.float64))
    features[:, 1] = 0  # a dead unit
    weight = torch.randn(1 if classes == 2 else classes, width, generator=stream, dtype=torch.float64)
    bias = torch.randn(len(weight), generator=stream, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=stream)
    return features, labels, weight, bias


def _one_by_one(features: Any, labels: Any, weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The variance of gradients that torch makes for each record of its own."""
    weight, bias = (item.clone().requires_grad_() for item in (weight, bias))
    slopes = []
    for feature, label in zip(features, labels, strict=True):
        logits = torch.nn.functional.linear(feature, weight, bias)
        if len(weight) == 1:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[0], label.double())
        else:
            loss = torch.nn.functional.cross_entropy(logits, label)
        slopes.append(torch.autograd.grad(loss, [weight, bias]))
    return tuple(torch.stack(part).var(0, correction=0) for part in zip(*slopes, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_variance_is_that_of_single_records_gradients(classes: int) -> None:
    records = _records(classes, classes)
    for found, expected in zip(gradient_variance(*records), _one_by_one(*records), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert not gradient_variance(*records)[0][:, 1].any(), "a dead unit's gradient has no variance at all"


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("classes", [2, 4])
def test_chunks_give_the_gradient_of_the_whole_set(classes: int, with_bias: bool) -> None:
    features, labels, weight, bias = _records(10 + classes, classes)
    leaves = [item.clone().requires_grad_() for item in (features, weight, bias)]
    target = [torch.rand_like(weight) / 9, torch.rand_like(bias) / 9 if with_bias else torch.zeros_like(bias)]
    variances = gradient_variance(leaves[0], labels, leaves[1], leaves[2] if with_bias else None)
    whole = sum((v - t).square().sum() for v, t in zip(variances, target, strict=True))
    expected = torch.autograd.grad(whole, leaves, materialize_grads=True, allow_unused=True)
    kept = bias if with_bias else None
    moments = gradient_moments(features, labels, weight, kept)
    penalty = SiloPenalty.of(moments, *target)
    torch.testing.assert_close(penalty.value, whole.detach(), rtol=1e-12, atol=0.0)  # type: ignore[union-attr]
    fresh = [item.clone().requires_grad_() for item in (features, weight, bias)]
    for rows in (slice(0, 4), slice(4, 5), slice(5, None)):
        share = penalty.share(fresh[0][rows], labels[rows], fresh[1], fresh[2] if with_bias else None)
        share.backward()
    for leaf, slope in zip(fresh, expected, strict=True):
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(found, slope, rtol=1e-9, atol=1e-13)
    assert with_bias or not variances[1].any()


def test_gradients_by_differences() -> None:
    for classes in (2, 3):
        features, labels, weight, bias = _records(20, classes, count=5, width=3)
        inputs = [item.requires_grad_() for item in (features, weight, bias)]
        assert torch.autograd.gradcheck(
            lambda f, w, b, y=labels: gradient_variance(f, y, w, b)[0].square().sum(), inputs
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_record_has_no_variance(dtype: torch.dtype) -> None:
    features, labels, weight, bias = _records(30, 3)
    for row in range(len(features)):
        one = [item.to(dtype) for item in (features[row : row + 1], weight, bias)]
        leaves = [item.clone().requires_grad_() for item in one]
        moments = gradient_moments(one[0], labels[row : row + 1], one[1], one[2])
        assert not any(part.any() for part in moments.variance())
        penalty = SiloPenalty.of(moments, torch.ones_like(one[1]), torch.ones_like(one[2]))
        assert float(penalty.value) == weight.numel() + bias.numel()
        for scalar in (
            penalty.share(leaves[0], labels[row : row + 1], leaves[1], leaves[2]),
            sum(part.sum() for part in gradient_variance(leaves[0], labels[row : row + 1], *leaves[1:])),
        ):
            slopes = torch.autograd.grad(scalar, leaves)  # type: ignore[arg-type]
            assert not any(slope.any() for slope in slopes)


def test_moments_of_parts_add_up() -> None:
    features, labels, weight, bias = _records(40, 3)
    whole = gradient_moments(features, labels, weight, bias)
    parts: GradientMoments = gradient_moments(features[:7], labels[:7], weight, bias)
    parts = parts + gradient_moments(features[7:], labels[7:], weight, bias)
    assert parts.records == whole.records == 11 and (parts.batches, whole.batches) == (2, 1)
    for found, expected in zip(parts.variance(), whole.variance(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_equal_silos_have_no_penalty() -> None:
    variances = torch.rand(1, 6, dtype=torch.float64).repeat(4, 1)
    assert float(fishr_penalty(variances)) < 1e-30
    assert float(fishr_penalty(variances[:1])) == 0
