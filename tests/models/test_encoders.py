"""Backbones without parameters, and MONAI's networks: features against libraries and formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.datasets import load_digits
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics.pairwise import rbf_kernel

from tightframe import models
from tightframe.models.backbones import scattering
from tightframe.models.backbones.monai import Network

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "scattering.npz")
SMALL_VIT = {"hidden_size": 48, "mlp_dim": 64, "num_layers": 2, "num_heads": 4}
PICTURE, VOLUME = (3, 32, 32), (1, 32, 32, 32)


def build(name: str, shape: tuple[int, ...], classes: int = 3, **options: Any) -> Any:
    spec = models.get(name)
    return spec.build(spec.options.model_validate(options), shape, classes).eval()


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("identity", (7,), {}),
        ("identity", (2, 4, 4), {}),
        ("random_features", (7,), {"width": 16}),
        ("scattering", PICTURE, {"J": 2, "L": 4}),
    ],
)
def test_nothing_but_the_head_is_state(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """What a record's features need is public, so that it neither travels nor is stored."""
    assert models.get(name).frozen
    torch.manual_seed(1)
    first = build(name, shape, **options)
    torch.manual_seed(2)
    second = build(name, shape, **options)
    assert list(first.state_dict()) == ["head.weight", "head.bias"]
    assert not list(first.backbone.parameters())
    inputs = torch.randn(3, *shape)
    assert torch.equal(first.features(inputs), second.features(inputs)), "no draw of a global stream"
    assert first.features(inputs).shape == (3, models.feature_width(first))
    assert torch.equal(first(inputs), first.head(first.features(inputs)))


def test_identity() -> None:
    model = build("identity", (2, 3), standardise=True)
    inputs = torch.randn(4, 2, 3)
    assert torch.equal(model.features(inputs), inputs.flatten(1))
    with torch.no_grad():
        model.standardise.mean.fill_(1.0)
        model.standardise.std.fill_(2.0)
    assert torch.allclose(model.features(inputs), (inputs.flatten(1) - 1) / 2)
    with pytest.raises(ValueError, match="at least one value"):
        build("identity", ())


def test_random_features_are_those_of_scikit_learn() -> None:
    """The formula by RBFSampler, given our draws; the kernel by ``rbf_kernel``."""
    model = build("random_features", (5,), width=64, bandwidth=1.5, seed=3)
    records = np.random.default_rng(0).normal(size=(6, 5))
    sampler = RBFSampler(gamma=1 / (2 * 1.5**2), n_components=64).fit(records)
    sampler.random_weights_ = model.backbone.weight.double().numpy().T
    sampler.random_offset_ = model.backbone.offset.double().numpy()
    found = model.features(torch.from_numpy(records).float()).numpy()
    assert np.allclose(found, sampler.transform(records), atol=1e-5)
    wide = build("random_features", (5,), width=40_000, bandwidth=1.5)
    features = wide.features(torch.from_numpy(records).float()).numpy()
    assert np.abs(features @ features.T - rbf_kernel(records, gamma=1 / (2 * 1.5**2))).max() < 0.03
    assert not torch.equal(model.backbone.weight, build("random_features", (5,), width=64).backbone.weight)


def test_the_bandwidth_fits_standardised_inputs() -> None:
    plain = build("random_features", (4, 4), width=8).backbone.weight
    assert torch.equal(plain, build("random_features", (16,), width=8, bandwidth=4.0).backbone.weight)


def _scattering_by_hand(paths: np.ndarray) -> np.ndarray:
    """Features of one record from kymatio's paths (C, K, h, w)."""
    moments = np.concatenate([paths.mean((2, 3)), paths.std((2, 3))], axis=1).ravel()
    compressed = np.sign(moments) * np.log(1 + 300 * np.abs(moments))
    centred = compressed - compressed.mean()
    return centred / np.linalg.norm(centred)


def test_scattering_features_from_kymatios_paths() -> None:
    """Three grey pictures of the golden file as the three channels of one."""
    image, paths = torch.from_numpy(GOLDEN["c0_x"]).float()[None], GOLDEN["c0_s"].astype(np.float64)
    model = build("scattering", PICTURE, J=2, L=8, colours="rgb", width=None)
    assert models.feature_width(model) == 2 * 3 * 81
    expected = _scattering_by_hand(paths)
    assert np.abs(model.features(image)[0].numpy() - expected).max() < 1e-4
    projected = build("scattering", PICTURE, J=2, L=8, colours="rgb", width=32, seed=5)
    matrix = projected.backbone.projection.double().numpy()
    assert matrix.shape == (32, 2 * 3 * 81) and abs(matrix.std() * math.sqrt(32) - 1) < 0.02
    assert np.abs(projected.features(image)[0].numpy() - matrix @ expected).max() < 1e-3


def test_maps_keep_where_a_path_is_strong_and_not_how_strong_paths_are() -> None:
    """By kymatio's paths; twice the contrast changes no more than what is faint."""
    image, paths = torch.from_numpy(GOLDEN["c0_x"]).float()[None], GOLDEN["c0_s"].astype(np.float64)
    model = build("scattering", PICTURE, J=2, L=8, colours="rgb", width=None, keep="maps", length=8)
    places = paths.shape[2] * paths.shape[3]
    assert models.feature_width(model) == paths.size == 3 * 81 * places
    flat = paths.reshape(3 * 81, places)
    relative = (flat - flat.mean(1, keepdims=True)) / (np.sqrt((flat**2).mean(1, keepdims=True)) + 1e-3)
    expected = 8 * relative.ravel() / np.linalg.norm(relative)
    found = model.features(image)[0].numpy()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert float(found @ model.features(2 * image)[0].numpy()) > 0.98 * 8**2
    wide = build("scattering", (1, 50, 37), J=3, L=4, width=None, keep="maps")
    assert wide.features(torch.rand(2, 1, 50, 37)).shape == (2, models.feature_width(wide))
    assert torch.isfinite(model.features(torch.zeros_like(image))).all()


@pytest.mark.whole
def test_what_pictures_have_in_common_with_public_noise_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From digits, which are not noise: their features point in more directions than before.

    A run builds a model at each silo in each round: the noise is transformed for the first one alone.
    """
    pictures = torch.from_numpy(load_digits().images[:200] / 8 - 1).float()[:, None]
    found = {}
    for reference in ("none", "noise"):
        model = build("scattering", (1, 8, 8), J=2, L=4, width=None, reference=reference)
        features = model.features(pictures)
        assert torch.allclose(features.norm(dim=1), torch.ones(200), atol=1e-5)
        found[reference] = float(features.mean(0).norm())
    assert found["noise"] < found["none"] - 0.05, found
    with monkeypatch.context() as patched:
        patched.setattr(scattering, "scattering2d", None)
        again = build("scattering", (1, 8, 8), J=2, L=4, width=None, reference="noise")
    assert torch.equal(again.features(pictures), features)
    with pytest.raises(ValueError, match="nothing in common"):
        build("scattering", PICTURE, J=2, keep="maps", reference="noise")


def test_opponent_colours() -> None:
    """A grey picture has none; one of another number of channels stays as it is."""
    model = build("scattering", PICTURE, J=2, L=4, width=None)
    turn = model.backbone.colours.double()
    assert torch.allclose(turn @ turn.T, torch.eye(3, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(turn @ torch.ones(3, dtype=torch.float64), torch.tensor([0, 0, 3**0.5]).double())
    image = torch.rand(2, 3, 32, 32)
    turned = torch.stack([(image * row.float()[:, None, None]).sum(1) for row in turn], dim=1)
    rgb = build("scattering", PICTURE, J=2, L=4, width=None, colours="rgb")
    assert torch.allclose(model.features(image), rgb.features(turned), atol=1e-4)
    assert build("scattering", (1, 32, 32), J=2, L=4).backbone.colours is None
    last = image.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(model.features(last), model.features(image), atol=1e-5)
    assert torch.isfinite(model.features(torch.zeros_like(image))).all()


def test_scattering_refuses_what_is_no_picture() -> None:
    for shape in ((3, 15, 32), (7,)):
        with pytest.raises(ValueError, match="16 x 16"):
            build("scattering", shape)


def _original(network: str, shape: tuple[int, ...]) -> Any:
    """MONAI's own network, and the name of its last linear layer."""
    from monai.networks import nets

    common: dict[str, Any] = {"spatial_dims": len(shape) - 1}
    if network == "ViT":
        options = {"img_size": shape[1:], "patch_size": 16, "classification": True, "post_activation": None}
        return nets.ViT(in_channels=shape[0], num_classes=3, **options, **SMALL_VIT, **common)
    if network.startswith("Eff"):
        name = network.lower()
        return nets.EfficientNetBN(name, pretrained=False, in_channels=shape[0], num_classes=3, **common)
    if network.startswith("Res"):
        return getattr(nets, network.lower())(n_input_channels=shape[0], num_classes=3, **common)
    if network.startswith("SE"):
        return getattr(nets, network)(in_channels=shape[0], num_classes=3, **common)
    return getattr(nets, network)(in_channels=shape[0], out_channels=3, **common)


@pytest.mark.whole
@pytest.mark.parametrize("shape", [PICTURE, VOLUME])
@pytest.mark.parametrize(
    ("network", "last"),
    [
        ("DenseNet121", "class_layers.out"),
        ("ResNet10", "fc"),
        ("SEResNet50", "last_linear"),
        ("ViT", "classification_head"),
        ("EfficientNet-b0", "_fc"),
    ],
)
def test_features_feed_monais_own_last_layer(network: str, last: str, shape: tuple[int, ...]) -> None:
    """With MONAI's weights under `backbone.` its logits are its last layer on our features."""
    if network == "ViT":
        pytest.importorskip("einops")
    torch.manual_seed(0)
    whole = _original(network, shape).eval()
    options = SMALL_VIT if network == "ViT" else {}
    with torch.device("meta"):
        ours = build("monai", shape, network=network, **options)
    weights = {name: item for name, item in whole.state_dict().items() if not name.startswith(f"{last}.")}
    ours.backbone.load_state_dict(weights, assign=True)
    inputs = torch.randn(1, *shape)
    with torch.no_grad():
        logits = whole(inputs)
        logits = logits[0] if network == "ViT" else logits
        layer = whole.get_submodule(last)
        features = ours.features(inputs)
        assert features.shape == (1, models.feature_width(ours))
        assert torch.allclose(layer(features), logits, rtol=1e-5, atol=1e-5)


QUICK = ("ResNet10", "ViT")


@pytest.mark.parametrize(
    "network",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.whole) for name in get_args(Network)],
)
def test_every_network_of_the_list(network: str) -> None:
    """Built without memory: its head fits its features, and its momentum is the option's."""
    if network == "ViT":
        pytest.importorskip("einops")
    with torch.device("meta"):
        model = build("monai", PICTURE, network=network, bn_momentum=0.25, **SMALL_VIT)
        features = model.features(torch.randn(2, *PICTURE))
    assert features.shape == (2, model.head.in_features)
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert all(layer.momentum == 0.25 for layer in norms)


def test_what_monai_refuses() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        build("monai", (3, 16, 32))
    with pytest.raises(ValueError, match="images"):
        build("monai", (13,))
    with pytest.raises(ValueError, match="patch_size"):
        build("monai", (3, 40, 40), network="ViT")
    spec = models.get("monai")
    for options in ({"network": "UNet"}, {"network": "ViT", "num_heads": 5}):
        with pytest.raises(ValidationError):
            spec.options.model_validate(options)
