"""Backbones: published sizes, and features that feed the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tightframe import models
from tightframe.errors import JobError


@pytest.mark.parametrize(
    ("name", "shape", "classes", "width", "parameters"),
    [
        # conv 3*9*32 + 32*9*64 + 64*9*128, norms 2*(32+64+128), head 128*8+8
        ("small_cnn", (3, 48, 48), 8, 128, 94_504),
        ("efficientnet_b0", (3, 64, 64), 8, 1280, 4_017_796),
        ("resnet18", (3, 32, 32), 10, 512, 11_173_962),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, width: int, parameters: int) -> None:
    spec = models.get(name)
    torch.manual_seed(0)
    model = spec.build(spec.options(), shape, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert models.feature_width(model) == width
    assert isinstance(model.head, torch.nn.Linear)
    assert {name for name in model.state_dict() if name.startswith("head.")} == {"head.weight", "head.bias"}
    inputs = torch.randn(3, *shape)
    model.eval()
    with torch.no_grad():
        features = model.features(inputs)
        assert features.shape == (3, width)
        assert torch.equal(model(inputs), model.head(features))


def test_features_of_the_small_cnn_are_not_negative() -> None:
    spec = models.get("small_cnn")
    model = spec.build(spec.options(), (3, 16, 16), 4)
    assert (model.features(torch.randn(5, 3, 16, 16)) >= 0).all()


def test_options_reach_the_network() -> None:
    spec = models.get("small_cnn")
    options = spec.options.model_validate({"widths": [8, 16], "dropout": 0.5})  # as a job's JSON gives it
    model = spec.build(options, (1, 8, 8), 2)
    assert models.feature_width(model) == 16
    features = torch.ones(1, 16)
    model.train()
    assert not torch.equal(model.head(features), model.head(features))
    model.eval()
    assert torch.equal(model.head(features), model.head(features))
    for name, shape in (("efficientnet_b0", (3, 32, 32)), ("resnet18", (3, 8, 8))):
        spec = models.get(name)
        built = spec.build(spec.options(bn_momentum=0.25), shape, 2)
        layers = [layer for layer in built.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
        assert layers
        assert all(layer.momentum == 0.25 for layer in layers)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("small_cnn", {"widths": [12]}),
        ("small_cnn", {"widths": []}),
        ("small_cnn", {"widths": ["8"]}),
        ("efficientnet_b0", {"bn_momentum": 0.0}),
        ("resnet18", {"depth": 18}),
    ],
)
def test_wrong_options_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        models.get(name).options.model_validate(wrong)


@pytest.mark.parametrize("name", ["small_cnn", "efficientnet_b0", "resnet18"])
@pytest.mark.parametrize("shape", [(10,), (3, 4, 4)])
def test_inputs_that_are_no_images_are_refused(name: str, shape: tuple[int, ...]) -> None:
    spec = models.get(name)
    with pytest.raises(ValueError, match=f"Expected {name} to get images"):
        spec.build(spec.options(), shape, 2)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"'efficientnet_b0'.*'resnet18'.*'small_cnn'.*'vgg11'.*'vgg'"):
        models.get("vgg")


def test_feature_width_needs_a_model_that_tells_it() -> None:
    with pytest.raises(TypeError, match="have its feature width"):
        models.feature_width(torch.nn.Flatten())
