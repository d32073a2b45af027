"""Frozen encoders: the same tensors and features, and nothing of the encoder moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tightframe import models
from tightframe.models.frozen import FrozenEncoder, encoder_sha256, freeze, is_frozen


def _model(name: str = "resnet20", **options: Any) -> Any:
    spec = models.get(name)
    torch.manual_seed(0)
    return spec.build(spec.options.model_validate(options), (3, 16, 16), 4)


def _step(model: Any) -> None:
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.1)
    logits = model(torch.randn(6, 3, 16, 16))
    nn.functional.cross_entropy(logits, torch.arange(6) % 4).backward()
    optimizer.step()


def test_names_shapes_and_features_stay() -> None:
    plain, frozen = _model(), freeze(_model())
    inputs = torch.randn(5, 3, 16, 16)
    plain.eval()
    assert list(plain.state_dict()) == list(frozen.state_dict())
    assert isinstance(frozen, type(plain)) and is_frozen(frozen) and not is_frozen(plain)
    with torch.no_grad():
        assert torch.equal(plain.features(inputs), frozen.train().features(inputs)), "not of the batch"
        assert torch.equal(plain(inputs), frozen.eval()(inputs))
    assert not frozen.features(inputs.requires_grad_()).requires_grad
    assert freeze(frozen) is frozen and type(frozen).__mro__.count(FrozenEncoder) == 1


@pytest.mark.parametrize("copied", [False, True])
def test_only_the_head_moves(copied: bool) -> None:
    model = freeze(_model(dropout=0.5))
    model = copy.deepcopy(model) if copied else model
    before = copy.deepcopy(model.state_dict())
    model.train()
    assert model.training and model.head.training
    assert not any(part.training for part in model.backbone.modules())
    _step(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}
    assert {name for name, item in model.named_parameters() if item.requires_grad} == changed


def test_a_module_beside_the_encoder_trains() -> None:
    """Methods add heads of their own beside the model while they train it."""
    model = freeze(_model())
    model.add_module("beside", nn.Dropout())
    assert model.train().beside.training
    assert not model.backbone.training


def test_features_computed_before_pass_through() -> None:
    model = freeze(_model()).eval()
    inputs = torch.randn(3, 3, 16, 16)
    features = model.encode(inputs)
    model.takes_features = True
    assert model.features(features) is features
    with torch.no_grad():
        assert torch.equal(model(features), model.head(features))
    assert torch.equal(model.encode(inputs), features), "encoding does not depend on it"


def test_the_hash_is_of_the_encoder_alone() -> None:
    model = _model()
    state = model.state_dict()
    known = encoder_sha256(state)
    assert encoder_sha256({name: state[name] for name in reversed(state)}) == known
    assert encoder_sha256({**state, "head.bias": torch.ones(4)}) == known
    for name in ("backbone.0.weight", next(name for name in state if name.endswith("running_var"))):
        assert encoder_sha256({**state, name: state[name] + 1e-3}) != known


def test_a_model_with_another_forward() -> None:
    """The interface of an extension's backbone: features, a head, and forward = head(features)."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.head = nn.Linear(3, 2)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.scale * x, 0.5, self.training)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x))

    model: Any = freeze(Own()).train()
    assert torch.equal(model.features(torch.ones(2, 3)), torch.full((2, 3), 2.0)), "its own dropout is off"
    assert model.training and not model.scale.requires_grad
