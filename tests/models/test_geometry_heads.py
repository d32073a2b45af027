"""Heads with fixed class vectors: golden values and gradients, and their properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.models.geometry_heads import (
    EtfHead,
    NormalisedPrototypeHead,
    etf_logits,
    initial_prototypes,
    unit_features,
)

FOLDER = Path(__file__).resolve().parent.parent / "golden"
ETF = np.load(FOLDER / "fedetf.npz")
NH = np.load(FOLDER / "fednh.npz")
TYPES = [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-4, 1e-6)]
ZERO_ROW_CASE = 2  # its gradients through the zero row are about 1e11 in the authors' code


def _close(found: torch.Tensor, expected: Any, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=rtol, atol=atol)


def _gram(classes: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    whole = classes * np.eye(classes) - np.ones((classes, classes))
    return scale**2 * whole / (classes - 1)


def _golden_head(index: int, dtype: torch.dtype) -> EtfHead:
    dim, classes = ETF[f"c{index}_etf"].shape
    head = EtfHead(
        ETF[f"c{index}_h"].shape[1], classes, dim=dim, temperature=1.0, projection=True, normalise=True
    )
    arrays = {"etf": "etf", "beta": "beta", "projection.weight": "proj_W", "projection.bias": "proj_b"}
    head.load_state_dict({name: torch.tensor(ETF[f"c{index}_{key}"]) for name, key in arrays.items()})
    head.to(dtype)
    for name, key in arrays.items():  # `load_state_dict` rounds to float32
        head.get_parameter(name).data = torch.tensor(ETF[f"c{index}_{key}"], dtype=dtype)
    return head


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("index", range(int(ETF["n_cases"])))
def test_etf_head_golden(index: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    head = _golden_head(index, dtype)
    features = torch.tensor(ETF[f"c{index}_h"], dtype=dtype).requires_grad_()
    labels, counts = torch.tensor(ETF[f"c{index}_labels"]), torch.tensor(ETF[f"c{index}_counts_official"])
    logits = head(features)
    _close(logits, ETF[f"c{index}_etf_logits"], rtol, atol)
    projection = head.projection
    assert projection is not None and head.beta is not None
    function = etf_logits(features, projection.weight, projection.bias, head.etf, head.beta)
    assert torch.equal(function, logits)
    _close(unit_features(projection(features)), ETF[f"c{index}_mu"], rtol, atol)
    loss = torch.nn.functional.cross_entropy(logits + counts.to(dtype).log(), labels)
    _close(loss, ETF[f"c{index}_etf_loss"], rtol, atol)
    loss.backward()
    _close(head.beta.grad, ETF[f"c{index}_grad_beta"], rtol, atol)
    regular = np.linalg.norm(ETF[f"c{index}_mu"], axis=1) > 0.5
    assert (~regular).sum() == (index == ZERO_ROW_CASE)
    _close(features.grad[regular], ETF[f"c{index}_grad_h"][regular], rtol, atol)
    if index != ZERO_ROW_CASE:
        _close(projection.weight.grad, ETF[f"c{index}_grad_proj_W"], rtol, atol)
        _close(projection.bias.grad, ETF[f"c{index}_grad_proj_b"], rtol, atol)
    assert head.etf.grad is None


def test_a_feature_without_a_direction_has_no_gradient() -> None:
    head = _golden_head(ZERO_ROW_CASE, torch.float64)
    features = torch.tensor(ETF[f"c{ZERO_ROW_CASE}_h"]).requires_grad_()
    zero = np.linalg.norm(ETF[f"c{ZERO_ROW_CASE}_mu"], axis=1) == 0
    # A loss that pulls each logit on its own, the zero row's too.
    weights = torch.randn(features.shape[0], 4, generator=torch.Generator().manual_seed(0)).double()
    (head(features) * weights).sum().backward()
    assert head(features)[zero].abs().max() < 1e-8
    assert not features.grad[zero].any()
    assert features.grad.abs().max() < 1e3
    assert head.projection is not None and head.projection.weight.grad.abs().max() < 1e3


@pytest.mark.parametrize("classes", [2, 8])
def test_plain_frame_has_nothing_but_itself(classes: int) -> None:
    head = EtfHead(12, classes, scale=2.0)
    assert {name: item.requires_grad for name, item in head.named_parameters()} == {"etf": False}
    np.testing.assert_allclose((head.etf.T @ head.etf).numpy(), _gram(classes, 2.0), atol=1e-5)
    features = torch.randn(3, 12)
    assert torch.equal(head(features), features @ head.etf)
    assert head.temperature() == 1.0


def test_parts_of_the_head() -> None:
    """Names, shapes and what trains, for FedETF; the frame's width is C by default."""
    head = EtfHead(20, 6, temperature=3.0, projection=True, normalise=True)
    expected = {
        "beta": ((), True),
        "etf": ((6, 6), False),
        "projection.weight": ((6, 20), True),
        "projection.bias": ((6,), True),
    }
    found = {name: (tuple(item.shape), item.requires_grad) for name, item in head.named_parameters()}
    assert found == expected
    assert all(item.dtype == torch.float32 for item in head.parameters())
    features = torch.randn(5, 20)
    assert (head(1e3 * features).abs() <= 3.0 * (1 + 1e-5)).all()  # cosines times the temperature
    only_unit = EtfHead(20, 6, normalise=True)
    torch.testing.assert_close(only_unit(features), only_unit(7 * features))


@pytest.mark.parametrize("start", [0.01, 1.0, 10.0, 200.0])
def test_temperature_forms(start: float) -> None:
    for form in ("plain", "softplus", "clamp"):
        head = EtfHead(4, 3, temperature=start, temperature_form=form)  # type: ignore[arg-type]
        assert float(torch.as_tensor(head.temperature()).detach()) == pytest.approx(start, rel=1e-4)
        assert head.beta is not None
        with torch.no_grad():
            head.beta.fill_(-2.0)
        expected = {"plain": -2.0, "softplus": np.log1p(np.exp(-2.0)), "clamp": 1e-3}[form]
        assert float(torch.as_tensor(head.temperature()).detach()) == pytest.approx(expected, rel=1e-5)
        features = torch.ones(1, 4)
        torch.testing.assert_close(head(features), head.temperature() * (features @ head.etf))


def test_impossible_heads_are_refused() -> None:
    for options, message in (
        ({"dim": 5}, "feature width 4 without a projection, but got 5"),
        ({"dim": 1, "projection": True}, "at least num_classes - 1 = 2"),
        ({"temperature": 0.0, "temperature_form": "softplus"}, "above 0.0"),
        ({"temperature": -1.0, "temperature_form": "clamp"}, "above 0.001"),
        ({"temperature": 1.0, "temperature_form": "exp"}, "'plain', 'softplus' or 'clamp', but got 'exp'"),
    ):
        with pytest.raises(ValueError, match=message):
            EtfHead(4, 3, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        EtfHead(4, 1)
    with pytest.raises(ValueError, match="'orthonormal' or 'etf', but got 'random'"):
        NormalisedPrototypeHead(4, 3, init="random")  # type: ignore[arg-type]


def test_geometry_comes_from_the_global_stream() -> None:
    for build in (lambda: EtfHead(6, 4).etf, lambda: NormalisedPrototypeHead(6, 4).prototypes):
        torch.manual_seed(5)
        first, second = build(), build()
        torch.manual_seed(5)
        assert torch.equal(build(), first)
        assert not torch.equal(first, second)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("index", range(int(NH["n_cases"])))
def test_prototype_head_golden(index: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    prototypes = torch.tensor(NH[f"c{index}_W"], dtype=dtype)
    head = NormalisedPrototypeHead(prototypes.shape[1], prototypes.shape[0]).to(dtype)
    head.prototypes.data = prototypes
    head.scale.data = torch.tensor(float(NH[f"c{index}_scaling0"]), dtype=dtype)
    features = torch.tensor(NH[f"c{index}_hx"], dtype=dtype).requires_grad_()
    loss = torch.nn.functional.cross_entropy(head(features), torch.tensor(NH[f"c{index}_hy"]))
    loss.backward()
    _close(loss, NH[f"c{index}_hloss"], rtol, atol)
    _close(features.grad, NH[f"c{index}_hgrad_x"], rtol, atol)
    _close(head.scale.grad, NH[f"c{index}_hgrad_scaling"].item(), rtol, atol)
    assert head.prototypes.grad is None


def test_a_zero_feature_leaves_the_prototype_head_unharmed() -> None:
    head = NormalisedPrototypeHead(5, 3, scale=20.0)
    features = torch.zeros(2, 5)
    features[1, 0] = 3.0
    features.requires_grad_()
    logits = head(features)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert not logits[0].any()
    assert not features.grad[0].any()
    assert 0 < features.grad[1].abs().max() < 100


@pytest.mark.parametrize(("classes", "dim"), [(3, 3), (4, 9), (10, 128)])
def test_orthonormal_rows(classes: int, dim: int) -> None:
    rows = initial_prototypes(classes, dim, init="orthonormal", seed=1)
    assert rows.shape == (classes, dim) and rows.is_contiguous()
    np.testing.assert_allclose((rows @ rows.T).numpy(), np.eye(classes), atol=1e-12)
    head = NormalisedPrototypeHead(dim, classes, learn_scale=False)
    np.testing.assert_allclose((head.prototypes @ head.prototypes.T).numpy(), np.eye(classes), atol=1e-5)
    assert not any(item.requires_grad for item in head.parameters())
    assert [name for name, item in head.named_parameters()] == ["prototypes", "scale"]


def test_more_classes_than_dimensions() -> None:
    rows = initial_prototypes(12, 4, init="orthonormal", seed=2)
    np.testing.assert_allclose(rows.norm(dim=1).numpy(), 1, atol=1e-12)
    assert torch.unique(rows.round(decimals=6), dim=0).shape == (12, 4)
    frame = initial_prototypes(5, 4, init="etf", seed=2)
    np.testing.assert_allclose((frame @ frame.T).numpy(), _gram(5), atol=1e-12)
    with pytest.raises(ValueError, match="at least num_classes - 1"):
        NormalisedPrototypeHead(4, 6, init="etf")


def test_orthonormal_rows_have_no_preferred_direction() -> None:
    """Without the sign fix the first row would lean to one side."""
    first = torch.stack([initial_prototypes(2, 3, init="orthonormal", seed=seed)[0] for seed in range(2000)])
    np.testing.assert_allclose(first.mean(0).numpy(), 0, atol=0.05)  # standard error 0.013


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_heads_compute_in_float32_inside_autocast(half: torch.dtype) -> None:
    features = torch.randn(4, 6)
    heads = (
        EtfHead(6, 4, temperature=10.0, projection=True, normalise=True),
        EtfHead(6, 4),
        NormalisedPrototypeHead(6, 4, scale=30.0),
    )
    for head in heads:
        expected = head(features.to(half).float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = head(features.to(half))
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
