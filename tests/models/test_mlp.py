"""FedILC's fully connected networks against plain torch, one logit against BCE, standardised inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from tightframe.models.backbones.mlp import MLP
from tightframe.models.heads import SingleLogit


def _build(shape: tuple[int, ...], classes: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return MLP.build(MLP.options.model_validate(options), shape, classes)


@pytest.mark.parametrize("last_activation", [True, False])
def test_the_forward_pass_is_the_formula(last_activation: bool) -> None:
    model = _build((2, 3, 2), 4, widths=[7, 5], last_activation=last_activation)
    x = torch.randn(6, 2, 3, 2)
    first, second = (layer for layer in model.backbone if isinstance(layer, nn.Linear))
    hidden = (x.reshape(6, 12) @ first.weight.T + first.bias).clamp_min(0) @ second.weight.T + second.bias
    expected = hidden.clamp_min(0) if last_activation else hidden
    torch.testing.assert_close(model.features(x), expected)
    assert bool((model.features(x) < 0).any()) is not last_activation
    torch.testing.assert_close(model(x), expected @ model.head.weight.T + model.head.bias)


def test_weights_are_xaviers() -> None:
    model = _build((300,), 2, widths=[200])
    layer = model.backbone[1]
    limit = (6 / 500) ** 0.5
    assert float(layer.weight.detach().abs().max()) <= limit
    assert float(layer.weight.detach().std()) == pytest.approx(limit / 3**0.5, rel=0.02)  # uniform
    assert not layer.bias.any() and not model.head.bias.any()
    assert float(model.head.weight.detach().abs().max()) <= (6 / 202) ** 0.5


def test_one_logit_is_binary_cross_entropy() -> None:
    """Loss and gradients of softmax over [0, z] equal those of BCE on z, also far out."""
    model = _build((6,), 2, widths=[5], single_logit=True).double()
    assert {name: tuple(item.shape) for name, item in model.head.state_dict().items()} == {
        "weight": (1, 5),
        "bias": (1,),
    }
    x = torch.randn(8, 6, dtype=torch.float64) * torch.tensor([1.0, 50.0] * 4, dtype=torch.float64)[:, None]
    y = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    logits = model(x)
    assert logits.shape == (8, 2) and not logits[:, 0].any()
    nn.functional.cross_entropy(logits, y).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    z = (model.features(x) @ model.head.weight.T + model.head.bias)[:, 0]
    expected = nn.functional.binary_cross_entropy_with_logits(z, y.double())
    torch.testing.assert_close(nn.functional.cross_entropy(logits, y), expected)
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert torch.equal(logits.argmax(1), (z > 0).long())
    torch.testing.assert_close(torch.softmax(logits, 1)[:, 1], torch.sigmoid(z))


def test_one_logit_keeps_its_dropout_for_training() -> None:
    head = SingleLogit(1000, dropout=0.5)
    features = torch.ones(1, 1000)
    head.train()
    assert not torch.equal(head(features), head(features))
    head.eval()
    assert torch.equal(head(features)[:, 1:], nn.functional.linear(features, head.weight, head.bias))


def test_standardised_inputs_equal_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 4)) * [1.0, 100.0, 0.01, 0.0] + [0.0, 5.0, -2.0, 70.0]
    scaler = StandardScaler().fit(table)
    model = _build((4,), 2, widths=[], standardise=True)
    assert [name for name, item in model.named_parameters() if not item.requires_grad] == [
        "standardise.mean",
        "standardise.std",
    ]
    x = torch.from_numpy(table).float()
    torch.testing.assert_close(model.features(x), x)  # before the moments are known
    # Of the constant column a floor and the rounding of sums may be left, never a deviation of one.
    deviation = np.maximum(np.sqrt(scaler.var_), 1e-6)
    moments = {"standardise.mean": scaler.mean_, "standardise.std": deviation}
    state = model.state_dict() | {name: torch.from_numpy(item) for name, item in moments.items()}
    model.load_state_dict(state)
    unseen = table.copy()
    unseen[:, 3] += 1.0  # a drug that no training record has
    for rows in (table, unseen):
        found = model.features(torch.from_numpy(rows).float()).detach().numpy()
        np.testing.assert_allclose(found, scaler.transform(rows), rtol=1e-4, atol=1e-4)


def test_standardised_images_are_so_by_channel() -> None:
    model = _build((2, 3, 3), 2, widths=[], standardise=True)
    mean, std = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 0.5])
    with torch.no_grad():
        model.standardise.mean.copy_(mean)
        model.standardise.std.copy_(std)
    x = torch.randn(4, 2, 3, 3)
    expected = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(2)], 1)
    torch.testing.assert_close(model.features(x), expected.flatten(1))


def test_a_network_without_standardisation_has_no_such_tensors() -> None:
    assert not [name for name in _build((4,), 2).state_dict() if "standardise" in name]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_records_without_values_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        _build(shape)


def test_one_logit_needs_two_classes() -> None:
    with pytest.raises(ValueError, match="two classes with `single_logit`, but got 3"):
        _build((4,), 3, single_logit=True)
