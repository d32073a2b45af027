"""The balanced softmax against golden values and gradients, and against its formula; distances of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tightframe.learning.losses import balanced_softmax_loss, half_squared_distance

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "fedetf.npz")
CASES = range(int(GOLDEN["n_cases"]))
TYPES = [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-4, 1e-6)]


def _case(index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.tensor(GOLDEN[f"c{index}_logits"], dtype=dtype).requires_grad_()
    return logits, torch.tensor(GOLDEN[f"c{index}_labels"]), torch.tensor(GOLDEN[f"c{index}_counts_raw"])


def _close(found: torch.Tensor, expected: Any, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("index", CASES)
def test_golden_values_and_gradients(index: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    """The raw counts under ``clamp`` are the authors' counts, in which every zero is a one."""
    logits, labels, counts = _case(index, dtype)
    for reduction in ("none", "mean", "sum"):
        loss = balanced_softmax_loss(logits, labels, counts, reduction=reduction)  # type: ignore[arg-type]
        assert loss.dtype == dtype
        _close(loss, GOLDEN[f"c{index}_bal_{reduction}"], rtol, atol)
    balanced_softmax_loss(logits, labels, counts).backward()
    _close(logits.grad, GOLDEN[f"c{index}_bal_mean_grad_logits"], rtol, atol)
    for gamma in (0.0, 0.5, 1.0, 2.0):
        loss = balanced_softmax_loss(logits, labels, counts, gamma=gamma)
        _close(loss, GOLDEN[f"c{index}_bal_gamma{gamma}_mean"], rtol, atol)
    loss = balanced_softmax_loss(logits, labels, counts, zero_counts="exclude")
    _close(loss, GOLDEN[f"c{index}_bal_paper_zero_counts_mean"], rtol, atol)


def test_excluded_classes_get_no_gradient_and_clamped_ones_do() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, counts = torch.tensor([0, 2, 0, 0, 2]), torch.tensor([3, 0, 2, 0])
    loss = balanced_softmax_loss(logits, labels, counts, gamma=0.7, zero_counts="exclude")
    loss.backward()
    # The written fraction over the classes that are there.
    powers = torch.tensor([3.0, 2.0]) ** 0.7 * logits.detach()[:, [0, 2]].exp()
    chosen = (labels == 2).long()[:, None]
    expected = -(powers.gather(1, chosen)[:, 0] / powers.sum(1)).log().mean()
    torch.testing.assert_close(loss.detach(), expected)
    assert not logits.grad[:, [1, 3]].any()
    logits.grad = None
    balanced_softmax_loss(logits, labels, counts, gamma=0.7).backward()
    assert (logits.grad[:, [1, 3]] > 0).all()


def test_without_its_exponent_it_is_the_cross_entropy() -> None:
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 0, 1, 1, 0, 1])
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.equal(balanced_softmax_loss(logits, labels, torch.tensor([9, 2, 0]), gamma=0.0), plain)
    without = torch.nn.functional.cross_entropy(logits[:, :2], labels)  # the absent class stays away
    excluded = balanced_softmax_loss(
        logits, labels, torch.tensor([9, 2, 0]), gamma=0.0, zero_counts="exclude"
    )
    torch.testing.assert_close(excluded, without)


def test_a_silo_with_one_class() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), requires_grad=True)
    labels, counts = torch.ones(4, dtype=torch.int64), torch.tensor([0, 4, 0])
    loss = balanced_softmax_loss(logits, labels, counts, zero_counts="exclude")
    loss.backward()
    assert float(loss.detach()) == 0
    assert not logits.grad.any()
    # One record of its class against two absent classes counted as one.
    bare = balanced_softmax_loss(torch.zeros(1, 3), torch.tensor([1]), counts)
    assert float(bare) == pytest.approx(np.log(6 / 4))


def test_a_record_of_an_excluded_class_is_not_hidden() -> None:
    counts = torch.tensor([4, 0])
    loss = balanced_softmax_loss(
        torch.zeros(2, 2), torch.tensor([0, 1]), counts, zero_counts="exclude", reduction="none"
    )
    assert loss.tolist() == [0.0, float("inf")]


def test_half_precision_is_widened() -> None:
    logits = torch.tensor([[2.0, -3.0]], dtype=torch.bfloat16)
    loss = balanced_softmax_loss(logits, torch.tensor([1]), torch.tensor([100_000, 7]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(np.log1p(np.exp(5) * 100_000 / 7), rel=1e-6)


def test_wrong_arguments_are_refused() -> None:
    logits, labels, counts = torch.zeros(1, 2), torch.tensor([0]), torch.ones(2)
    with pytest.raises(ValueError, match="'clamp' or 'exclude', but got 'drop'"):
        balanced_softmax_loss(logits, labels, counts, zero_counts="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none', but got 'max'"):
        balanced_softmax_loss(logits, labels, counts, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2,\), but got \(3,\)"):
        balanced_softmax_loss(logits, labels, torch.ones(3))


def test_the_distance_is_to_the_anchors_that_exist() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0]]))
        model.bias.fill_(7.0)
    distance = half_squared_distance(model, {"weight": torch.tensor([[0.0, 4.0]])})
    assert float(distance.detach()) == 12.5
    distance.backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[3.0, -4.0]]
    assert model.bias.grad is None
