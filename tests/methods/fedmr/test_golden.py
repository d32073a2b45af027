"""FedMR's terms against golden values and gradients, and against direct formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.methods.fedmr import inter_class_loss, intra_class_loss, update_prototypes
from tightframe.metrics import correlation_eigenvalues, eigenvalue_spread

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "golden" / "fedmr.npz")
CASES = range(int(GOLDEN["n_cases"]))
TYPES = [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-4, 1e-6)]


def _case(index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.tensor(GOLDEN[f"c{index}_z"], dtype=dtype).requires_grad_()
    return features, torch.tensor(GOLDEN[f"c{index}_y"])


def _close(found: torch.Tensor, expected: Any, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=rtol, atol=atol)


def _literal_factor(labels: torch.Tensor) -> dict[int, float]:
    counts = torch.bincount(labels).tolist()
    return {label: (count / (count - 1)) ** 2 for label, count in enumerate(counts) if count >= 2}


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("index", CASES)
def test_intra_official(index: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    features, labels = _case(index, dtype)
    loss = intra_class_loss(features, labels, form="official")
    loss.backward()
    _close(loss, GOLDEN[f"c{index}_intra_official"], rtol, atol)
    _close(features.grad, GOLDEN[f"c{index}_intra_official_grad_z"], rtol, atol)
    if GOLDEN[f"c{index}_intra_official_is_python_int_zero"]:
        assert float(loss.detach()) == 0
        assert not features.grad.any()


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("index", CASES)
def test_intra_paper(index: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    features, labels = _case(index, dtype)
    exact = f"c{index}_intra_paper_consistent" in GOLDEN
    suffix, eps = ("", 0.0) if exact else ("_eps1e-8", 1e-8)
    loss = intra_class_loss(features, labels, eps=eps)
    _close(loss, GOLDEN[f"c{index}_intra_paper_consistent{suffix}"], rtol, atol)
    factors = _literal_factor(labels)
    assert sorted(factors) == GOLDEN[f"c{index}_intra_classes"].tolist()
    per_class = GOLDEN[f"c{index}_intra_paper_consistent{suffix}_per_class"]
    for label, expected in zip(sorted(factors), per_class, strict=True):
        chosen = labels == label
        alone = intra_class_loss(features[chosen], labels[chosen], eps=eps)
        _close(alone, expected, rtol, atol)
    if exact:  # the printed 1/N variance is a known factor in each class
        literal = GOLDEN[f"c{index}_intra_paper_literal_per_class"]
        _close(torch.tensor(per_class), literal / [factors[label] for label in sorted(factors)], 1e-9, 1e-12)
        mean = literal.mean() if len(literal) else 0.0
        np.testing.assert_allclose(GOLDEN[f"c{index}_intra_paper_literal"], mean, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("support", ["observed", "all"])
@pytest.mark.parametrize("index", CASES)
def test_inter(index: int, support: Any, dtype: torch.dtype, rtol: float, atol: float) -> None:
    features, labels = _case(index, dtype)
    prototypes = torch.tensor(GOLDEN[f"c{index}_protos"], dtype=dtype)
    valid = torch.tensor(GOLDEN[f"c{index}_proto_valid"])
    loss = inter_class_loss(features, labels, prototypes, valid, support=support)
    loss.backward()
    _close(loss, GOLDEN[f"c{index}_inter_{support}"], rtol, atol)
    _close(features.grad, GOLDEN[f"c{index}_inter_{support}_grad_z"], rtol, atol)
    if GOLDEN[f"c{index}_inter_{support}_npairs"] == 0:
        assert float(loss.detach()) == 0


@pytest.mark.parametrize("index", CASES)
def test_eigenvalues_of_the_whole_batch(index: int) -> None:
    """Table 7's spread; and with one label for all, the paper form is the sum of squared eigenvalues."""
    features, labels = _case(index, torch.float64)
    values = features.detach().numpy()
    eigenvalues = GOLDEN[f"c{index}_top50_eigs"]
    np.testing.assert_allclose(correlation_eigenvalues(values), eigenvalues, rtol=1e-9, atol=1e-12)
    for divisor, name in ((128, "div128"), (None, "divk")):
        spread = eigenvalue_spread(values, divisor=divisor)
        np.testing.assert_allclose(spread, GOLDEN[f"c{index}_top50_var_{name}"], rtol=1e-9)
    loss = intra_class_loss(features, torch.zeros_like(labels), eps=0.0)
    every = correlation_eigenvalues(values, k=features.shape[1])
    _close(loss, (every**2).sum(), 1e-9, 1e-12)


def test_a_spread_needs_two_records() -> None:
    with pytest.raises(ValueError, match="n >= 2"):
        eigenvalue_spread(np.zeros((1, 3)))


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
def test_prototypes(dtype: torch.dtype, rtol: float, atol: float) -> None:
    counts = torch.tensor(GOLDEN["agg_counts"])
    means = torch.tensor(GOLDEN["agg_client_protos"])
    sums = (counts[:, :, None] * means).sum(0)
    _close(sums, GOLDEN["agg_sum_payload"], 1e-9, 1e-12)
    assert counts.sum(0).tolist() == GOLDEN["agg_sum_counts"].tolist()
    previous = torch.tensor(GOLDEN["agg_prev"], dtype=dtype)
    prototypes, seen = update_prototypes(previous, sums, counts.sum(0))
    assert prototypes.dtype == dtype
    assert seen.tolist() == GOLDEN["agg_valid"].tolist()
    _close(prototypes, GOLDEN["agg_global"], rtol, atol)
