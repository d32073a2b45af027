"""Reading noisy sums: against formulas of James and Stein, and what a temperature from them is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from tightframe.errors import RunError
from tightframe.learning.one_sum import noisy_sums, temperature
from tightframe.learning.one_sum.closed_form import RIDGE_NOISE, discriminant, ridge, with_intercept
from tightframe.learning.one_sum.temperature import GRID
from tightframe.methods import fed3r, fedcgs, fedncm

CLASSES, WIDTH = 4, 12


def records(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian classes in the unit ball."""
    stream = np.random.default_rng(seed)
    centres = np.random.default_rng(8).normal(size=(CLASSES, WIDTH))
    labels = stream.integers(CLASSES, size=600)
    features = centres[labels] + stream.normal(size=(600, WIDTH))
    return features / 12, labels


def totals(deviation: float, *, products: bool = True, seed: int = 1) -> dict[str, Any]:
    """What is opened, with the same deviation on every part but half the variance beside the diagonal."""
    features, labels = records()
    stream, member = np.random.default_rng(seed), np.eye(CLASSES)[labels]
    made: dict[str, Any] = {"sums": member.T @ features, "counts": member.sum(0)}
    if products:
        gram = features.T @ features
        made |= {"diagonal": np.diag(gram), "products": gram[np.triu_indices(WIDTH, 1)]}
    found = {}
    for name, item in made.items():
        own = deviation / np.sqrt(2) if name == "products" else deviation
        found[f"released/{name}"] = item + own * stream.normal(size=item.shape)
        found[f"released/{name}/deviations"] = np.array(own)
    return found


def test_without_noise_the_sums_are_what_was_summed() -> None:
    features, labels = records()
    found = noisy_sums.read(totals(0.0))
    assert found.sums.gram is not None and found.kept == 1.0 and found.sums.noise == 0.0
    np.testing.assert_allclose(found.sums.gram, features.T @ features, atol=1e-9)
    np.testing.assert_allclose(found.sums.sums, np.eye(CLASSES)[labels].T @ features, atol=1e-9)
    assert found.sums.counts.tolist() == np.bincount(labels).tolist()


def test_counts_and_means_are_drawn_towards_their_mean_as_far_as_noise_explains_it() -> None:
    """Closer to the truth than what was opened, on average, and never for want of noise."""
    features, labels = records()
    truth, means = np.bincount(labels), np.stack([features[labels == k].mean(0) for k in range(CLASSES)])
    closer, nearer = [], []
    for seed in range(60):
        opened = totals(20.0, seed=seed)
        found = noisy_sums.read(opened).sums
        raw = opened["released/counts"]
        closer.append(((found.counts.numpy() - truth) ** 2).sum() - ((raw - truth) ** 2).sum())
        drawn = (found.sums / found.counts[:, None]).numpy()
        nearer.append(
            ((drawn - means) ** 2).sum() - ((opened["released/sums"] / raw[:, None] - means) ** 2).sum()
        )
        assert float(found.counts.sum()) == pytest.approx(raw.sum(), rel=0.2)
    assert np.mean(closer) < 0 and np.mean(nearer) < 0


def test_the_norm_of_noise_is_the_edge_of_its_spectrum() -> None:
    stream, width = np.random.default_rng(2), 300
    noise = np.triu(stream.normal(size=(width, width)), 1) / np.sqrt(2)
    noise = noise + noise.T + np.diag(stream.normal(size=width))
    edge = noisy_sums._noise({"released/diagonal/deviations": np.array(1.0)}, width)
    assert edge == pytest.approx(np.linalg.norm(noise, 2), rel=0.05)


def test_a_class_that_noise_hides_is_left_out_and_one_class_is_refused() -> None:
    opened = totals(3.0)
    opened["released/counts"][2], opened["released/sums"][2] = 5.0, 0.1
    found = noisy_sums.read(opened).sums
    assert found.known.tolist() == [True, True, False, True]
    assert not found.sums[2].any() and found.counts[2] == 0
    opened["released/counts"][2], opened["released/sums"][2] = 5.0, 30.0
    assert noisy_sums.read(opened).sums.known.all(), "its class sum tells of it"
    assert float(noisy_sums.read(opened).sums.counts[2]) > 80, "and of how many records there are at least"
    opened["released/counts"][:], opened["released/sums"][:] = 1.0, 0.0
    with pytest.raises(RunError, match="noise hides all but 0"):
        noisy_sums.read(opened)


def test_the_ridge_weight_is_the_noise_and_nothing_else_unless_given() -> None:
    found = noisy_sums.read(totals(4.0)).sums
    assert found.gram is not None
    gram, sums = with_intercept(found.gram, found.sums, found.counts)
    weight, _ = fed3r.solve(fed3r.Fed3RConfig(), found, True)
    assert torch.allclose(weight, ridge(gram, sums, RIDGE_NOISE * found.noise)[:, :-1])
    given, _ = fed3r.solve(fed3r.Fed3RConfig(ridge=9.0), found, True)
    assert torch.allclose(given, ridge(gram, sums, 9.0)[:, :-1])


def test_the_covariance_keeps_its_trace_and_has_no_eigenvalue_below_the_noise() -> None:
    found = noisy_sums.read(totals(8.0)).sums
    assert found.gram is not None
    assert float(torch.linalg.eigvalsh(found.gram)[0]) < 0, "the noise is large enough to matter"
    exact = noisy_sums.read(totals(0.0)).sums
    assert exact.gram is not None
    args = (found.gram, found.sums, found.counts, 0.0, "balanced")
    noisy, _ = discriminant(*args, noise=found.noise)  # type: ignore[arg-type]
    bare, _ = discriminant(*args)  # type: ignore[arg-type]
    best, _ = discriminant(exact.gram, exact.sums, exact.counts, 0.0, "balanced")
    assert float(noisy.norm()) < 3 * float(best.norm()) < 1e3 * float(bare.norm())
    weight, bias = fedcgs.solve(fedcgs.FedCGSConfig(shrinkage=0.0, priors="balanced"), found, True)
    features, labels = records(4)
    oracle = LinearDiscriminantAnalysis().fit(*records()).score(features, labels)
    right = ((torch.from_numpy(features) @ weight.T + bias).argmax(1).numpy() == labels).mean()
    assert right > oracle - 0.12


@pytest.mark.parametrize("deviation", [0.5, 4.0])
@pytest.mark.parametrize("method", ["fed3r", "fedcgs"])
def test_the_temperature_is_near_the_best_on_other_records(method: str, deviation: float) -> None:
    found = noisy_sums.read(totals(deviation))
    module: Any = {"fed3r": fed3r, "fedcgs": fedcgs}[method]
    config = module.METHOD.config()
    weight, bias = module.solve(config, found.sums, True)
    scale, bias = temperature.of_gaussians(weight, bias, found, intercepts="observed")
    features, labels = (torch.from_numpy(item) for item in records(5))
    scores = features @ weight.T + bias
    found_loss = {
        one: float(torch.nn.functional.cross_entropy(scores / one, labels)) for one in (*GRID, scale)
    }
    assert found_loss[scale] < min(found_loss.values()) + 0.05


@pytest.mark.parametrize("spread", [0.1, 30.0, 3000.0])
def test_the_temperature_is_that_of_the_least_counted_loss(spread: float) -> None:
    points = spread * torch.randn(4, 50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares, known = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    points += spread * torch.eye(4, dtype=torch.float64)[:, None]
    counted = [
        share * temperature.losses(points[place], torch.full((50,), place), known)
        for place, share in enumerate(shares)
    ]
    assert temperature._least_loss(points, shares) == GRID[int(sum(counted).argmin())]  # type: ignore[union-attr]


def test_intercepts_give_each_class_its_share() -> None:
    found = noisy_sums.read(totals(2.0))
    weight, bias = fedncm.solve(fedncm.FedNCMConfig(), found.sums, True)
    skewed = bias + torch.tensor([0.0, 0.5, -0.5, 1.0])
    scale, plain = temperature.of_gaussians(weight, bias, found, intercepts="observed")
    other, same = temperature.of_gaussians(weight, skewed, found, intercepts="observed")
    assert scale == pytest.approx(other, rel=0.5)
    assert torch.allclose(plain - plain.mean(), same - same.mean(), atol=0.05 * scale + 0.02)
    kept = temperature.of_gaussians(weight, skewed, found)[1]
    assert kept is skewed
