"""Linear classifiers in closed form, from sums over records: ridge, discriminant, class means.

Pure functions of G = sum phi phi^T (d, d), B with rows B_c = sum of phi over class c (C, d), and the class
counts n (C,); all float64. Scores of a record are ``weight @ phi + bias``, of which the largest wins.

Sources: Fani et al., Accelerating Heterogeneous Federated Learning with Closed-form Classifiers, ICML 2024,
for ridge regression from these sums; Golub, Heath and Wahba, Generalized Cross-Validation as a Method for
Choosing a Good Ridge Parameter, Technometrics 1979; Guan, Zhou and Gu, Capture Global Feature Statistics for
One-Shot Federated Learning, AAAI 2025, for the discriminant; Legate et al., Guiding the Last Layer in
Federated Learning with Pre-Trained Models, NeurIPS 2023, for class means.
"""

from __future__ import annotations

from typing import Literal

import torch

Priors = Literal["observed", "balanced"]

INTERCEPT = 0.3
"""Constant appended to phi for the intercept."""
ABSENT = -30.0
"""Score of a class without records. Those of the others have mean zero, so that the largest is above it."""
STEPS_A_DECADE, SMALLEST, LARGEST = 4, -6, 3
"""Grid of the ridge weight: decades of the mean eigenvalue of G."""
RIDGE_NOISE = 1.0
SCATTER_NOISE = (0.4, 5.0)
"""Shares of the spectral norm of G's noise that ridge weight and covariance get, the latter also of its
square over the trace; chosen on digits, in other splits than those of the benchmarks (docs/decisions.md)."""
FLAT = 1e-6
"""Relative difference of two criteria that counts as none."""


def with_intercept(
    gram: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor, constant: float = INTERCEPT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return G (d + 1, d + 1) and B (C, d + 1) of ``[phi, constant]``, which follow from G, B and n.

    >>> gram, sums = with_intercept(torch.tensor([[5.0]]), torch.tensor([[3.0]]), torch.tensor([2.0]), 1.0)
    >>> gram.tolist(), sums.tolist()  # of 1 and 2
    ([[5.0, 3.0], [3.0, 2.0]], [[3.0, 2.0]])
    """
    column = constant * sums.sum(0)
    corner = (constant**2 * counts.sum()).reshape(1, 1)
    wide = torch.cat([torch.cat([gram, column[:, None]], 1), torch.cat([column[None], corner], 1)])
    return wide, torch.cat([sums, constant * counts[:, None]], 1)


def target_weights(counts: torch.Tensor, priors: Priors) -> torch.Tensor:
    """Return the value of a record's own target, by class (C,): 1, or N / (K n_c) with balanced priors.

    Args:
        counts: n, (C,); classes without records count for nothing, K are the others.
        priors: ``balanced`` gives each class the same sum of targets.
    """
    if priors == "observed":
        return torch.ones_like(counts)
    held = counts >= 0.5
    return torch.where(held, counts.sum() / (held.sum() * counts.clamp_min(1)), 0.0)


def ridge(gram: torch.Tensor, sums: torch.Tensor, lam: float) -> torch.Tensor:
    """Return the ridge regression's weights ``W = B (G + lam I)^-1``, (C, d), one row a class.

    They minimise ``sum_i |W phi_i - y_i|^2 + lam |W|^2`` with one-hot (or weighted) targets y.

    Args:
        gram: G, (d, d).
        sums: B, (C, d).
        lam: weight of the penalty, positive.

    >>> ridge(torch.tensor([[2.0]]), torch.tensor([[3.0]]), 1.0).tolist()
    [[1.0]]
    """
    if lam <= 0:
        raise ValueError(f"Expected argument `lam` to be positive, but got {lam}.")
    values, vectors = _eigen(gram)
    return (sums.to(vectors.dtype) @ vectors / (values + lam)) @ vectors.T


def generalised_cross_validation(
    gram: torch.Tensor, sums: torch.Tensor, records: float, squares: float
) -> float:
    """Return the ridge weight with the least generalised cross-validation error, from the sums alone.

    With the eigenvalues s_j and eigenvectors u_j of G and ``a_j = |B u_j|^2``::

        RSS(lam) = sum |y|^2 - sum_j a_j (s_j + 2 lam) / (s_j + lam)^2
        edf(lam) = sum_j s_j / (s_j + lam)
        GCV(lam) = (RSS / N) / (1 - edf / N)^2

    on a grid of four a decade, from 1e-6 to 1e3 times G's mean eigenvalue. Of weights whose errors differ by
    less than a millionth the largest is taken, so that rounding never decides.

    Args:
        gram: G, (d, d).
        sums: B, (C, d).
        records: N.
        squares: sum of |y|^2 over the records; N for one-hot targets.
    """
    values, vectors = _eigen(gram)
    energy = (sums.to(vectors.dtype) @ vectors).square().sum(0)
    scale = max(float(values.mean()), 1e-12)
    steps = range(STEPS_A_DECADE * SMALLEST, STEPS_A_DECADE * LARGEST + 1)
    grid = [scale * 10.0 ** (step / STEPS_A_DECADE) for step in steps]
    errors = []
    for lam in grid:
        residual = squares - float((energy * (values + 2 * lam) / (values + lam).square()).sum())
        free = 1 - float((values / (values + lam)).sum()) / records
        # With as many degrees of freedom as records nothing is left to judge by.
        errors.append(max(residual, 0.0) / records / free**2 if free > 1e-3 else float("inf"))
    least = min(errors)
    return max(lam for lam, error in zip(grid, errors, strict=True) if error <= least * (1 + FLAT))


def discriminant(
    gram: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
    shrinkage: float,
    priors: Priors,
    *,
    noise: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (C, d) and bias (C,) of Gaussian classes with one covariance.

    ::

        m_c = B_c / n_c      S = (G - sum_c B_c B_c^T / n_c) / (N - K)      S' = (1 - s) S + s tr(S) / d I
        weight_c = S'^-1 m_c      bias_c = -m_c^T S'^-1 m_c / 2 + log prior_c

    Scores are logarithms of posterior probabilities, up to a number that all classes share.

    Args:
        gram: G, (d, d).
        sums: B, (C, d).
        counts: n, (C,); rows of classes without records mean nothing. K are the others.
        shrinkage: s, from 0 to 1. Eigenvalues of S' below 1e-9 of the largest are raised to that.
        priors: of the classes: n_c / N, or 1 / K.
        noise: spectral norm of G's noise. Negative eigenvalues become zero, a share of it over the records
            (``SCATTER_NOISE``) is added to all, since below it nothing is known of a variance, and all are
            scaled to the trace of S.
    """
    held = counts >= 0.5
    records = counts.clamp_min(1)[:, None]
    means = sums / records
    free = max(float(counts.sum()) - int(held.sum()), 1.0)
    scatter = (gram - sums.T @ (sums / records)) / free
    width = len(gram)
    spread = scatter.diagonal().sum() / width
    eye = torch.eye(width, dtype=gram.dtype)
    values, vectors = _eigen((1 - shrinkage) * scatter + shrinkage * spread * eye)
    values = values.clamp_min(1e-9 * max(float(values.max()), 1e-12))
    if noise > 0:
        # The trace is hardly noisy. Kept, it leaves priors their weight beside the means.
        trace, edge = width * max(float(spread), 1e-12), noise / free
        values = values + (SCATTER_NOISE[0] + SCATTER_NOISE[1] * edge / trace) * edge
        values = values * trace / values.sum()
    weight = (means @ vectors / values) @ vectors.T
    shares = counts / counts.sum() if priors == "observed" else held / held.sum()
    prior = torch.where(held, shares, 1.0).to(gram.dtype).log()
    return weight, prior - (weight * means).sum(1) / 2


def class_means(sums: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (C, d) and bias (C,) whose largest score is the nearest class mean's.

    ``|phi - m|^2 = |phi|^2 - 2 (m phi - |m|^2 / 2)``, so ``weight = m`` and ``bias = -|m|^2 / 2``.

    Args:
        sums: B, (C, d).
        counts: n, (C,); rows of classes without records are zero.
    """
    means = sums / counts.clamp_min(1)[:, None]
    return means, -means.square().sum(1) / 2


def centred(
    weight: torch.Tensor, bias: torch.Tensor, known: torch.Tensor, absent: float = ABSENT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same classifier with scores of mean zero over the known classes; others do not win.

    What all scores share changes neither the largest of them nor their softmax.

    Args:
        weight: (C, d).
        bias: (C,).
        known: which classes have records, (C,) bool.
        absent: score of the others; from 0, the mean, training soon brings such a class in.
    """
    weight = torch.where(known[:, None], weight - weight[known].mean(0), 0.0)
    return weight, torch.where(known, bias - bias[known].mean(), absent)


def _eigen(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues (d,), at least zero, and eigenvectors (d, d) in columns, float64."""
    values, vectors = torch.linalg.eigh(symmetric.to(torch.float64))
    return values.clamp_min(0), vectors
