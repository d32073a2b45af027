"""FedMR's terms for single records against autograd, torch.corrcoef and the batch forms."""

from __future__ import annotations

import pytest
import torch

from tightframe.methods.fedmr import inter_class_loss
from tightframe.methods.fedmr.private import (
    clipped,
    frozen_inter_loss,
    frozen_intra_loss,
    frozen_statistics,
    moments,
)

WIDTH, CLASSES = 5, 3


def _records(seed: int, count: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) @ mixing
    return features, torch.arange(count) % CLASSES


def _statistics(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    means = torch.stack([moments(features[labels == c]).mean(0) for c in range(CLASSES)])
    return frozen_statistics(means, WIDTH)


def test_moments_have_the_norm_that_clipping_bounds() -> None:
    features, _ = _records(1)
    short = clipped(features, 1.5)
    norms = torch.linalg.vector_norm(short, dim=1)
    assert float(norms.max()) <= 1.5 + 1e-12
    untouched = torch.linalg.vector_norm(features, dim=1) <= 1.5
    assert torch.equal(short[untouched], features[untouched])
    found = torch.linalg.vector_norm(moments(short), dim=1)
    torch.testing.assert_close(found, (norms**2 + norms**4).sqrt())


def test_statistics_are_those_of_torch() -> None:
    features, labels = _records(2)
    mean, deviation, correlation = _statistics(features, labels)
    for c in range(CLASSES):
        own = features[labels == c]
        torch.testing.assert_close(mean[c], own.mean(0))
        torch.testing.assert_close(deviation[c], own.std(0, correction=0))
        torch.testing.assert_close(correlation[c], torch.corrcoef(own.T))


def test_noise_leaves_deviations_positive_and_correlations_correlations() -> None:
    generator = torch.Generator().manual_seed(3)
    noisy = torch.randn(CLASSES, WIDTH + WIDTH * (WIDTH + 1) // 2, generator=generator)
    for means in (noisy, torch.zeros_like(noisy)):
        mean, deviation, correlation = frozen_statistics(means, WIDTH, least=0.1)
        assert bool((deviation >= 0.1 - 1e-6).all()) and float(correlation.abs().max()) <= 1 + 1e-5
        assert bool((torch.linalg.eigvalsh(correlation) > 0).all())
        torch.testing.assert_close(correlation.diagonal(dim1=1, dim2=2), torch.ones(CLASSES, WIDTH))
        assert all(bool(torch.isfinite(item).all()) for item in (mean, deviation, correlation))


@pytest.mark.parametrize("mean", [False, True], ids=["all entries", "mean off the diagonal"])
def test_the_frozen_term_has_the_gradient_of_the_squared_correlations(mean: bool) -> None:
    features, labels = _records(4)
    statistics = _statistics(features, labels)
    chosen = labels == 0  # one class, so that both weigh it alike
    own, count = features[chosen], int(chosen.sum())
    standardised = ((own - statistics[0][0]) / statistics[1][0]).requires_grad_()
    correlations = standardised.T @ standardised / (count - 1)
    off_diagonal = ~torch.eye(WIDTH, dtype=torch.bool)
    term = correlations[off_diagonal].square().mean() if mean else correlations.square().sum()
    (expected,) = torch.autograd.grad(term, standardised)
    # The frozen statistics divide by N where the paper's unbiased ones divide by N - 1.
    frozen = (torch.zeros(CLASSES, WIDTH), torch.ones(CLASSES, WIDTH), statistics[2])
    value = frozen_intra_loss(
        standardised,
        labels[chosen],
        tuple(item.double() for item in frozen),
        torch.ones(CLASSES).bool(),
        mean=mean,
    )
    (found,) = torch.autograd.grad(value, standardised)
    torch.testing.assert_close(found * (count / (count - 1)) ** 2, expected)


@pytest.mark.parametrize("label", range(CLASSES))
def test_the_inter_term_is_the_batch_form_where_a_batch_has_one_class(label: int) -> None:
    features, _ = _records(5, 16)
    prototypes, _ = _records(6, CLASSES)
    labels = torch.full((16,), label)
    for valid in ([True] * 3, [True, True, False], [False, True, True]):
        mask = torch.tensor(valid)
        found = frozen_inter_loss(features, labels, prototypes, mask)
        expected = inter_class_loss(features, labels, prototypes, mask, support="all")
        torch.testing.assert_close(found, expected.to(found.dtype))


def test_both_are_means_of_single_records_losses() -> None:
    features, labels = _records(7, 12)
    prototypes, _ = _records(8, CLASSES)
    statistics, valid = _statistics(*_records(9)), torch.tensor([True, False, True])
    for loss in (
        lambda x, y: frozen_inter_loss(x, y, prototypes, valid),
        lambda x, y: frozen_intra_loss(x, y, statistics, valid),
    ):
        together = loss(features, labels)
        alone = torch.stack([loss(features[i : i + 1], labels[i : i + 1]) for i in range(12)])
        torch.testing.assert_close(together, alone.mean())
        assert float(together) > 0
