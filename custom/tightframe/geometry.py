"""The geometry of classifiers: equiangular tight frames."""

from __future__ import annotations

import math

import torch


def simplex_etf(num_classes: int, dim: int, *, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Draw a random simplex equiangular tight frame.

    ``E = scale * sqrt(C / (C - 1)) * U Q^T``: the columns of Q (C, C-1) are an orthonormal basis of
    the vectors whose entries sum to zero, so ``Q Q^T = I - 11^T / C``; U (d, C-1) has orthonormal
    columns, uniformly distributed (Q factor of a Gaussian matrix with the signs of R's diagonal).
    So ``E^T E = scale^2 * (C / (C-1) I - 1 / (C-1) 11^T)``: equal norms, cosines -1 / (C - 1).
    Where ``dim >= C`` this is the usual ``sqrt(C / (C-1)) V (I - 11^T / C)`` with V = U Q^T
    completed by one more column, and it also covers ``dim = C - 1``, the smallest width.

    Source: Papyan, Han and Donoho, Prevalence of neural collapse during the terminal phase of deep
    learning training, PNAS 2020, definition 1.

    Args:
        num_classes: number of classes C, at least 2.
        dim: feature width d, at least C - 1.
        scale: norm of each class vector.

    Returns:
        Class vectors in columns, (dim, num_classes) float64.

    Raises:
        ValueError: if there are fewer than two classes, or fewer than C - 1 dimensions.

    >>> frame = simplex_etf(3, 2, seed=0)
    >>> [round(value, 6) for value in (frame.T @ frame)[0].tolist()]
    [1.0, -0.5, -0.5]
    """
    if num_classes < 2:
        raise ValueError(f"Expected `num_classes` to be at least 2, but got {num_classes}.")
    if dim < num_classes - 1:
        raise ValueError(f"Expected `dim` to be at least num_classes - 1 = {num_classes - 1}, but got {dim}.")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, num_classes - 1, generator=generator, dtype=torch.float64)
    rotation, triangle = torch.linalg.qr(gaussian)
    # QR fixes columns only up to sign, and LAPACK's choice is not uniform.
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(torch.float64)
    factor = scale * math.sqrt(num_classes / (num_classes - 1))
    return factor * (rotation * signs) @ _zero_sum_basis(num_classes).T


def _zero_sum_basis(num_classes: int) -> torch.Tensor:
    """Return an orthonormal basis (C, C-1) of the zero-sum vectors (the Helmert contrasts), float64."""
    basis = torch.zeros(num_classes, num_classes - 1, dtype=torch.float64)
    for column in range(num_classes - 1):
        size = column + 1
        norm = math.sqrt(size * (size + 1))
        basis[:size, column] = 1 / norm
        basis[size, column] = -size / norm
    return basis
