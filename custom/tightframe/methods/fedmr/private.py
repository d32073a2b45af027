"""FedMR's two terms as means of one loss a record: for training with differential privacy.

As published both terms couple the records of a batch (class statistics, class counts), so that gradients of
single records, which DP-SGD clips, do not exist. Here what a record is compared with is constant: class
means, and for the intra-class term second moments, from the last noisy release.

Sources: Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping, TMLR
2023, eq. (3) and (4), for the terms; the forms for single records are our own.
"""

from __future__ import annotations

import math

import torch

from tightframe.learning.stages import BatchView, Term, at_least_float32


def clipped(features: torch.Tensor, bound: float) -> torch.Tensor:
    """Shorten each record's features (B, d) to L2 norm ``bound`` where they are longer."""
    norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features * (bound / norms.clamp_min(bound))


def moments(features: torch.Tensor) -> torch.Tensor:
    """Return each record's features and their products, ``(z, z z^T)``: (B, d) -> (B, d + d (d + 1) / 2).

    Of the symmetric product the upper triangle, the off-diagonal entries times sqrt(2), so that its L2
    norm is ``|z|^2``.
    """
    rows, columns = torch.triu_indices(features.shape[1], features.shape[1], device=features.device)
    factor = torch.where(rows == columns, 1.0, math.sqrt(2)).to(features.dtype)
    return torch.cat([features, features[:, rows] * features[:, columns] * factor], 1)


def frozen_statistics(
    means: torch.Tensor, width: int, *, least: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each class's mean, standard deviation and correlations, from its mean ``moments``.

    Noise can leave a covariance that is none: its eigenvalues are raised to ``least ** 2``.

    Args:
        means: (C, d + d (d + 1) / 2).
        width: d.
        least: the smallest standard deviation of a feature, in any direction.

    Returns:
        Means (C, d), deviations (C, d) of at least ``least``, correlations (C, d, d).
    """
    mean, packed = means[:, :width], means[:, width:]
    rows, columns = torch.triu_indices(width, width, device=means.device)
    products = means.new_zeros(len(means), width, width)
    products[:, rows, columns] = packed / torch.where(rows == columns, 1.0, math.sqrt(2)).to(means.dtype)
    products[:, columns, rows] = products[:, rows, columns]
    values, vectors = torch.linalg.eigh(products - mean[:, :, None] * mean[:, None, :])
    raised = vectors * values.clamp_min(least**2)[:, None, :]
    covariance = raised @ vectors.transpose(1, 2)
    deviation = covariance.diagonal(dim1=1, dim2=2).clamp_min(least**2).sqrt()
    return mean, deviation, covariance / (deviation[:, :, None] * deviation[:, None, :])


def frozen_intra_loss(
    features: torch.Tensor,
    labels: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    valid: torch.Tensor,
    *,
    mean: bool = False,
) -> torch.Tensor:
    """Return the intra-class term with the classes' statistics as constants: a mean of one value a record.

    With mean, deviation and correlations R_c of each class frozen, ``z^ = (z - mean_c) / deviation_c``::

        l = (1 / B) sum_i 2 z^_i^T R_c z^_i                                          (form ``paper``)
        l = (1 / B) sum_i 2 z^_i^T (R_c - diag R_c) z^_i / (d (d - 1))         (form ``correlation``)

    Were R_c the batch's own, ``2 / (N_c - 1) sum_i z^_i^T R_c z^_i`` would have the gradient of
    ``|R_c|_F^2`` in z^, and without the diagonal that of its off-diagonal entries. Classes weigh as their
    records do, not alike as in eq. (3), because the number of classes in a batch is a statistic of its
    records. Records of classes without statistics count as zero.

    Args:
        features: (B, d).
        labels: (B,) int64.
        valid: which classes have any, (C,) bool.
        mean: the form ``correlation``: a mean over off-diagonal entries.
    """
    means, deviations, correlations = statistics
    standardised = (at_least_float32(features) - means[labels]) / deviations[labels]
    entries = 1
    if mean:
        width = features.shape[1]
        correlations = correlations - torch.diag_embed(correlations.diagonal(dim1=1, dim2=2))
        entries = max(1, width * (width - 1))
    # An einsum of three searches for its order in every step, ten times as long as these products take.
    products = correlations[labels] @ standardised.unsqueeze(2)
    values = (standardised * products.squeeze(2)).sum(1)
    return 2 * (values * valid[labels]).mean() / entries


def frozen_inter_loss(
    features: torch.Tensor, labels: torch.Tensor, prototypes: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Return the inter-class term as a mean of one value a record, over all valid prototypes.

    ::

        l = (1 / B) sum_i mean over valid j != y_i of max(|z_i - G_y_i| - |z_i - G_j|, 0)

    Where all records of a batch are of one class this is ``inter_class_loss`` with support ``all``.
    Records of classes without a prototype count as zero.

    Args:
        features: (B, d).
        labels: (B,) int64.
        prototypes: (C, d).
        valid: (C,) bool.
    """
    features = at_least_float32(features)
    anchors = torch.where(valid[:, None], prototypes, 0).to(features.dtype)
    distance = torch.cdist(features, anchors, compute_mode="donot_use_mm_for_euclid_dist")
    own = labels[:, None] == torch.arange(len(valid), device=labels.device)
    margin = torch.relu(distance.gather(1, labels[:, None]) - distance) * (valid & ~own)
    others = (valid.sum() - 1).clamp_min(1)
    return (margin.sum(1) * valid[labels] / others).mean()


def frozen_terms(
    prototypes: torch.Tensor,
    valid: torch.Tensor,
    means: torch.Tensor | None,
    *,
    bound: float,
    intra: float,
    inter: float,
    mean: bool = False,
) -> tuple[Term, Term]:
    """Return both terms for local training, each of one record.

    Args:
        prototypes: (C, d).
        valid: which classes have any, (C,) bool.
        means: of the classes' ``moments``, (C, d + d (d + 1) / 2); None leaves the intra-class term out.
        bound: the L2 norm to which features are clipped.
        intra: weight of the intra-class term.
        inter: weight of the inter-class term.
        mean: whether the intra-class term is a mean over off-diagonal correlations.
    """

    def between(view: BatchView) -> torch.Tensor:
        return frozen_inter_loss(clipped(view.features, bound), view.labels, prototypes, valid)

    def within(view: BatchView) -> torch.Tensor:
        return frozen_intra_loss(clipped(view.features, bound), view.labels, statistics, valid, mean=mean)

    other = Term("inter", inter, between, per_record=True)
    if means is None:
        return Term("intra", 0.0, lambda view: view.features.new_zeros(()), per_record=True), other
    width = prototypes.shape[1]
    # A tenth of what each feature of a vector of norm ``bound`` has: less would divide by noise.
    statistics = frozen_statistics(means, width, least=0.1 * bound / math.sqrt(width))
    return Term("intra", intra, within, per_record=True), other


def summed(features: torch.Tensor, bound: float, *, second: bool) -> torch.Tensor:
    """Return each record's summed vector with privacy, of at most the norm to which features are clipped.

    Args:
        features: (B, d).
        bound: that norm.
        second: whether second moments are summed with the features, all of it over ``moment_scale``.
    """
    features = clipped(at_least_float32(features), bound)
    return moments(features) / moment_scale(bound) if second else features


def moment_scale(bound: float) -> float:
    """Return the divisor of ``moments`` of a vector of norm b: |z|^2 + |z z^T|^2 <= b^2 (1 + b^2)."""
    return math.sqrt(1 + bound**2)
