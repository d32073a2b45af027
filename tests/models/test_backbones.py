"""The papers' other backbones: printed sizes, options, and what the head sees."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tightframe.models import feature_width
from tightframe.models import layers as shared
from tightframe.models.backbones import (
    efficientnet,
    mlp,
    resnet,
    small_cnns,
    vgg11,
    wrn_28_10,
)
from tightframe.models.base import BackboneSpec

COLOR_MNIST = {"widths": [390, 390], "single_logit": True}
EICU = {"widths": [1024, 1024, 512], "single_logit": True, "last_activation": False}
SPECS = (
    mlp.MLP,
    resnet.RESNET20,
    wrn_28_10.WRN_28_10,
    vgg11.VGG11,
    small_cnns.CONV2CIFAR,
    small_cnns.FEDILC_CNN,
)


def _build(spec: BackboneSpec, options: dict[str, Any], shape: tuple[int, ...], classes: int) -> Any:
    torch.manual_seed(0)
    return spec.build(spec.options.model_validate(options), shape, classes)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("spec", "options", "shape", "classes", "width", "parameters"),
    [
        # weights and biases, layer by layer; FedILC's Color-MNIST and eICU networks
        (mlp.MLP, COLOR_MNIST, (2, 14, 14), 2, 390, 392 * 390 + 390 + 390 * 390 + 390 + 391),
        (mlp.MLP, EICU, (1399,), 2, 512, 1399 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512 + 513),
        (mlp.MLP, {"widths": []}, (13,), 2, 13, 13 * 2 + 2),
        # He et al., table 6: 0.27 million
        (resnet.RESNET20, {"shortcut": "identity"}, (3, 32, 32), 10, 64, 269_722),
        # 1 x 1 convolutions 16-32 and 32-64 and their norms more
        (resnet.RESNET20, {}, (3, 32, 32), 10, 64, 269_722 + 512 + 64 + 2048 + 128),
        # 9,220,480 in the convolutions, 512 * 512 + 512 twice, head
        (vgg11.VGG11, {}, (3, 32, 32), 10, 512, 9_220_480 + 2 * 262_656 + 5_130),
        (vgg11.VGG11, {"hidden": []}, (3, 32, 32), 10, 512, 9_220_480 + 5_130),
        (small_cnns.CONV2CIFAR, {}, (3, 32, 32), 10, 192, 4_864 + 102_464 + 614_784 + 73_920 + 1_920),
        (small_cnns.CONV2CIFAR, {"head_bias": True}, (3, 32, 32), 10, 192, 797_952 + 10),
        (small_cnns.FEDILC_CNN, {}, (3, 16, 16), 10, 128, 1_792 + 73_856 + 147_584 + 640 + 16_512 + 1_290),
    ],
)
def test_sizes(
    spec: BackboneSpec,
    options: dict[str, Any],
    shape: tuple[int, ...],
    classes: int,
    width: int,
    parameters: int,
) -> None:
    model = _build(spec, options, shape, classes)
    assert _size(model) == parameters
    assert feature_width(model) == model.head.in_features == width
    inputs = torch.randn(2, *shape)
    model.eval()
    with torch.no_grad():
        features = model.features(inputs)
        assert features.shape == (2, width)
        assert model(inputs).shape == (2, classes)
        assert torch.equal(model(inputs), model.head(features))


def _wide(classes: int, **options: Any) -> Any:
    return _build(wrn_28_10.WRN_28_10, options, (3, 32, 32), classes)


@pytest.mark.whole
def test_sizes_of_the_original_wide_resnet() -> None:
    """Zagoruyko and Komodakis print 36.5 million."""
    assert _size(_wide(10, conv_bias=False)) == 36_479_194
    model = _wide(100, conv_bias=False)
    assert _size(model) == 36_536_884
    assert feature_width(model) == model.head.in_features == 640


def test_sizes_that_fedmr_prints() -> None:
    """11.18M, 36.565M: parameters and BatchNorm's statistics, which travel with them."""
    wide = _wide(100)
    assert sum(tensor.numel() for tensor in wide.state_dict().values()) == 36_564_957
    plain = _build(resnet.RESNET18, {}, (3, 32, 32), 10)
    statistics = sum(buffer.numel() for buffer in plain.buffers() if buffer.is_floating_point())
    assert _size(plain) == 11_173_962
    assert round((_size(plain) + statistics) / 1e6, 2) == 11.18


def test_size_that_flamby_has() -> None:
    """Parameters, other elements of the state, and its entries: spec/data.md, section 2.2."""
    model = _build(efficientnet.EFFICIENTNET_B0, {}, (3, 200, 200), 8)
    assert _size(model) == 4_017_796
    assert sum(buffer.numel() for buffer in model.buffers()) == 42_065
    assert len(model.state_dict()) == 360


def test_a_narrow_wide_resnet_for_tests() -> None:
    model = _build(wrn_28_10.WRN_28_10, {"widen_factor": 1, "norm": "group"}, (1, 8, 8), 3)
    assert feature_width(model) == 64
    assert _size(model) < 400_000
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    # Depth 28: 3 stages of 4 blocks of 2 convolutions, the stem, and one layer in every stage or head more.
    assert len([layer for layer in convolutions if layer.kernel_size == (3, 3)]) == 25
    # With a width of 1 the first stage keeps the stem's 16 channels; both others change the shape.
    assert len([layer for layer in convolutions if layer.kernel_size == (1, 1)]) == 2


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (resnet.RESNET20, {}),
        (resnet.RESNET20, {"shortcut": "identity"}),
        (wrn_28_10.WRN_28_10, {"widen_factor": 1}),
    ],
)
def test_group_normalisation_leaves_records_apart(spec: BackboneSpec, options: dict[str, Any]) -> None:
    """The gradient of one record's loss does not see the others, as DP-SGD needs; with batches it does."""
    inputs = torch.randn(3, 3, 8, 8)
    for norm, apart in (("group", True), ("batch", False)):
        model = _build(spec, {**options, "norm": norm}, (3, 8, 8), 4).train()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        assert (not list(model.buffers())) is apart
        together = model(inputs)[0]
        alone = model(torch.cat([inputs[:1], torch.zeros(2, 3, 8, 8)]))[0]
        assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5) is apart


@pytest.mark.parametrize(
    ("spec", "options", "maps"),
    [
        (resnet.RESNET20, {}, (64, 8, 8)),
        (wrn_28_10.WRN_28_10, {"widen_factor": 1}, (64, 8, 8)),
        (vgg11.VGG11, {"hidden": []}, (512, 1, 1)),
    ],
)
def test_maps_before_the_last_pooling(
    spec: BackboneSpec, options: dict[str, Any], maps: tuple[int, ...]
) -> None:
    """The published networks end in 8 x 8 maps of a 32 x 32 image, VGG11 in one pixel."""
    model = _build(spec, options, (3, 32, 32), 4).eval()
    seen = []
    pooling = next(layer for layer in model.backbone if isinstance(layer, nn.AdaptiveAvgPool2d))
    pooling.register_forward_pre_hook(lambda layer, inputs: seen.append(tuple(inputs[0].shape[1:])))
    model(torch.randn(1, 3, 32, 32))
    assert seen == [maps]


def test_momentum_and_dropout_reach_the_network() -> None:
    options = {"widen_factor": 1, "bn_momentum": 0.25, "block_dropout": 0.7}
    model = _build(wrn_28_10.WRN_28_10, options, (3, 8, 8), 4)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms and all(layer.momentum == 0.25 for layer in norms)
    dropouts = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    assert [layer.p for layer in dropouts] == [0.7] * 12
    small = _build(resnet.RESNET20, {"bn_momentum": 0.5}, (3, 8, 8), 4)
    assert {layer.momentum for layer in small.modules() if isinstance(layer, nn.BatchNorm2d)} == {0.5}
    for options, hidden, head in (
        ({}, 0.5, 0.5),
        ({"dropout": 0.25}, 0.5, 0.25),
        ({"hidden_dropout": 0.0}, 0.0, 0.5),
    ):
        deep = _build(vgg11.VGG11, {"hidden": [16, 12, 8], **options}, (3, 32, 32), 4)
        assert feature_width(deep) == 8
        assert [layer.p for layer in deep.modules() if isinstance(layer, nn.Dropout)] == [hidden] * 2
        assert deep.head.dropout == head


def test_identity_shortcut_is_every_second_pixel_and_zeros() -> None:
    x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
    y = resnet.PaddedIdentity(5)(x)
    assert y.shape == (2, 8, 2, 2)
    assert torch.equal(
        y[:, :3], nn.functional.max_pool2d(x.flip(2, 3), 2).flip(2, 3) - 5
    )  # top left of each 2 x 2
    assert not y[:, 3:].any()


@pytest.mark.parametrize(
    ("spec", "options", "shape"),
    [
        (resnet.RESNET20, {}, (3, 8, 8)),
        (wrn_28_10.WRN_28_10, {"widen_factor": 1}, (3, 8, 8)),
        (vgg11.VGG11, {}, (1, 40, 33)),
        (vgg11.VGG11, {"hidden": []}, (1, 32, 32)),
        (small_cnns.CONV2CIFAR, {}, (1, 17, 16)),
        (small_cnns.FEDILC_CNN, {}, (3, 9, 16)),
        (mlp.MLP, {"widths": [7, 5]}, (3, 2)),
    ],
)
def test_features_come_after_a_relu_and_gradients_reach_every_parameter(
    spec: BackboneSpec, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = _build(spec, options, shape, 3).train()
    features = model.features(torch.randn(6, *shape))
    assert (features >= 0).all() and features.any()
    nn.functional.cross_entropy(model.head(features), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any() or name.endswith("bias"), name


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        (mlp.MLP, {"widths": [0]}),
        (mlp.MLP, {"widths": ["8"]}),
        (mlp.MLP, {"activation": "tanh"}),
        (resnet.RESNET20, {"norm": "layer"}),
        (resnet.RESNET20, {"shortcut": "none"}),
        (wrn_28_10.WRN_28_10, {"widen_factor": 0}),
        (vgg11.VGG11, {"dropout": 1.0}),
        (vgg11.VGG11, {"hidden_dropout": 1.0}),
        (small_cnns.CONV2CIFAR, {"head_bias": 1}),
        (small_cnns.FEDILC_CNN, {"norm": "batch"}),
    ],
)
def test_wrong_options_are_refused(spec: BackboneSpec, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec.options.model_validate(wrong)


@pytest.mark.parametrize(
    ("spec", "pixels"),
    [
        (resnet.RESNET20, 8),
        (wrn_28_10.WRN_28_10, 8),
        (vgg11.VGG11, 32),
        (small_cnns.CONV2CIFAR, 16),
        (small_cnns.FEDILC_CNN, 8),
    ],
)
def test_images_that_are_too_small_are_refused(spec: BackboneSpec, pixels: int) -> None:
    for shape in ((10,), (3, pixels, pixels - 1)):
        with pytest.raises(ValueError, match=f"Expected {spec.name} to get images.*{pixels} x {pixels}"):
            spec.build(spec.options(), shape, 2)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="multiple of 8 channels"):
        shared.normalisation("group", 12, 0.1)


@pytest.mark.parametrize("module", [mlp, resnet, wrn_28_10, vgg11, small_cnns, shared])
def test_imports_are_light(module: ModuleType) -> None:
    """Every process of a job imports all of them."""
    tree = ast.parse(inspect.getsource(module))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {
        "__future__",
        "math",
        "pydantic",
        "tightframe",
        "torch",
        "typing",
    }


def test_names_are_unique() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
