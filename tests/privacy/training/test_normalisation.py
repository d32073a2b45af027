"""Every backbone can be made private; what cannot is refused with its reason."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from opacus.validators import ModuleValidator
from tests.support.few_blocks import few_blocks
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe import models
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.normalisation import Form, FrozenNorm, make_private
from tightframe.privacy.training.per_sample import PrivacyError

BACKBONES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("small_cnn", {"widths": [8, 8]}, (3, 8, 8)),
    ("efficientnet_b0", {}, (3, 32, 32)),
    ("resnet18", {}, (3, 8, 8)),
    ("resnet20", {}, (3, 8, 8)),
    ("resnet20", {"norm": "group", "shortcut": "identity"}, (3, 8, 8)),
    ("wrn_28_10", {"widen_factor": 1}, (3, 8, 8)),
    ("vgg11", {"hidden": [16]}, (3, 32, 32)),
    ("conv2cifar", {}, (3, 16, 16)),
    ("fedilc_cnn", {}, (3, 8, 8)),
    ("mlp", {"widths": [8], "dropout": 0.3}, (5,)),
    ("mlp", {"widths": [8], "standardise": True}, (5,)),
    ("monai", {"network": "ResNet10"}, (3, 32, 32)),
    ("identity", {}, (5,)),
    ("random_features", {"width": 8}, (5,)),
    ("scattering", {"J": 2, "L": 2, "width": 8}, (3, 8, 8)),
]

WITH_BATCH_NORM = (
    "efficientnet_b0",
    "resnet20",
    "wrn_28_10",
)  # and resnet18, whose frozen form is resnet20's


def build(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> nn.Module:
    spec = models.get(name)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return spec.build(spec.options.model_validate(options), shape, 2)


def names(model: nn.Module) -> list[str]:
    return [name for name, item in model.named_parameters() if item.requires_grad]


def test_all_backbones_are_here() -> None:
    assert {name for name, _, _ in BACKBONES} == {spec.name for spec in models.BACKBONES}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "options", "shape", "form"),
    [(*case, "group") for case in BACKBONES]
    + [(*case, "frozen") for case in BACKBONES if case[0] in WITH_BATCH_NORM],
    ids=lambda x: str(x)[:24],
)
def test_every_backbone_takes_a_private_step(
    name: str, options: dict[str, Any], shape: tuple[int, ...], form: Form
) -> None:
    """Of EfficientNet, ResNets and VGG11 with fewer channels or blocks; the whole EfficientNet: below."""
    with few_blocks():
        plain = build(name, options, shape)
    model = make_private(copy.deepcopy(plain), form)
    batch_norms = {key for key, module in plain.named_modules() if isinstance(module, _BatchNorm)}
    expected = names(plain)
    if form == "frozen":
        expected = [key for key in expected if key.rpartition(".")[0] not in batch_norms]
    assert names(model) == expected
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    state = model.state_dict()  # fixed projections are buffers that are no part of it
    assert not [key for key, item in model.named_buffers() if key in state and item.is_floating_point()]

    before = copy.deepcopy(model.state_dict())
    stream = torch.Generator().manual_seed(0)
    records = [(torch.randn(shape, generator=stream), place % 2) for place in range(2)]
    report, _ = private_fit(
        model,
        lambda step: records,  # type: ignore[arg-type, return-value]
        [Stage(terms=[cross_entropy()], optimizer=OptimizerSettings(learning_rate=0.1), steps=1)],
        settings=PrivateSettings(1.0, 1.0, 1.0, 2.0),
        device="cpu",
        # Of EfficientNet once: what is slow here is the same for both forms.
        probe=(name, form) != ("efficientnet_b0", "frozen"),
        random_bytes=np.random.default_rng(0).bytes,
    )
    after = model.state_dict()
    assert report.steps == 1
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved == set(names(model))


@pytest.mark.whole
def test_group_norm_is_what_opacus_makes_but_keeps_scale_and_names() -> None:
    plain = build("efficientnet_b0", {}, (3, 32, 32))
    for module in plain.modules():
        if isinstance(module, _BatchNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    fixed = ModuleValidator.fix(plain)
    model = make_private(copy.deepcopy(plain))
    assert ModuleValidator.is_valid(model.train())
    state = plain.state_dict()
    for (name, ours), (other, theirs) in zip(model.named_modules(), fixed.named_modules(), strict=False):
        if isinstance(theirs, nn.GroupNorm):
            assert name == other and isinstance(ours, nn.GroupNorm)
            assert (ours.num_groups, ours.num_channels) == (theirs.num_groups, theirs.num_channels)
            assert ours.eps == 1e-3  # EfficientNet's own
            assert torch.equal(ours.weight, state[f"{name}.weight"])
            assert torch.equal(ours.bias, state[f"{name}.bias"])


def test_frozen_norm_is_batch_norm_in_evaluation_mode() -> None:
    model = build("resnet20", {}, (3, 8, 8))
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model.train()
    for _ in range(3):
        model(inputs)
    expected = model.eval()(inputs)
    frozen = make_private(copy.deepcopy(model), "frozen")
    assert sum(isinstance(module, FrozenNorm) for module in frozen.modules()) > 10
    torch.testing.assert_close(frozen.train()(inputs), expected, rtol=1e-4, atol=1e-5)
    ours = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(frozen.state_dict()) == ours


def test_it_is_deterministic_draws_nothing_and_may_be_repeated() -> None:
    plain = build("efficientnet_b0", {}, (3, 32, 32))
    torch.manual_seed(5)
    one = make_private(copy.deepcopy(plain))
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert drawn == torch.rand(())
    two = make_private(make_private(copy.deepcopy(plain)))
    assert str(one) == str(two)
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )


def test_layers_without_scale_and_frozen_scales() -> None:
    bare = make_private(nn.Sequential(nn.BatchNorm2d(12, affine=False)))[0]  # type: ignore[index]
    assert (bare.num_groups, bare.affine) == (4, False)
    fixed = nn.Sequential(nn.BatchNorm2d(12).requires_grad_(False))
    assert not any(item.requires_grad for item in make_private(fixed).parameters())


@pytest.mark.parametrize(
    ("layer", "form", "what"),
    [
        (nn.LSTM(3, 4), "group", r"0 \(LSTM\): .*DPLSTM"),
        (nn.MultiheadAttention(4, 2), "group", r"0 \(MultiheadAttention\): .*DPMultiheadAttention"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "group", r"0 \(InstanceNorm2d\): .*running stats"),
        (nn.BatchNorm2d(4, track_running_stats=False), "frozen", "0 keeps no running statistics"),
        (nn.LazyBatchNorm2d(), "group", "0 is a lazy layer"),
    ],
)
def test_what_is_left_is_refused_with_its_reason(layer: nn.Module, form: Form, what: str) -> None:
    with pytest.raises(PrivacyError, match=rf"^TF-712: [\s\S]*{what}"):
        make_private(nn.Sequential(layer), form)


def test_wrong_forms_and_bare_layers() -> None:
    with pytest.raises(ValueError, match="'group' or 'frozen'"):
        make_private(nn.Sequential(), "layer")  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="a BatchNorm layer itself"):
        make_private(nn.BatchNorm1d(3))
