"""Simplex equiangular tight frames, by their Gram matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tightframe.geometry import simplex_etf


@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (2, 5), (3, 2), (8, 7), (8, 8), (10, 512), (100, 99)])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_gram_matrix(classes: int, dim: int, scale: float) -> None:
    frame = simplex_etf(classes, dim, seed=3, scale=scale)
    assert frame.shape == (dim, classes)
    assert frame.dtype == torch.float64
    expected = scale**2 * (
        classes / (classes - 1) * np.eye(classes) - np.ones((classes, classes)) / (classes - 1)
    )
    np.testing.assert_allclose((frame.T @ frame).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(frame.sum(1).numpy(), 0, atol=1e-12)


def test_a_seed_gives_one_frame() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(simplex_etf(5, 9, seed=1), simplex_etf(5, 9, seed=1))
    assert not torch.equal(simplex_etf(5, 9, seed=1), simplex_etf(5, 9, seed=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_rotations_have_no_preferred_direction() -> None:
    """Without the sign fix the first class vector would lean to one side."""
    first = torch.stack([simplex_etf(3, 4, seed=seed)[:, 0] for seed in range(2000)])
    np.testing.assert_allclose(first.mean(0).numpy(), 0, atol=0.05)  # standard error 0.011
    np.testing.assert_allclose((first.T @ first / 2000).numpy(), np.eye(4) / 4, atol=0.03)


@pytest.mark.parametrize(("classes", "dim", "message"), [(1, 5, "at least 2"), (6, 4, "num_classes - 1 = 5")])
def test_impossible_frames_are_refused(classes: int, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simplex_etf(classes, dim, seed=0)
