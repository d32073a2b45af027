"""Measures of the papers' figures and fairness tables: neural collapse, cosines, sub-environments.

Sources: Papyan, Han and Donoho, PNAS 2020 (NC1 and NC2); Li et al., ICCV 2023 (cosines); Zhu et al., arXiv
2205.09305 (variance and entropy over sub-environments). What does not exist is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.data.base import SiloData

RECORDS = 400
Features = NDArray[np.float64]


def class_means(features: Features, labels: NDArray[np.int64]) -> Features:
    """Return the means of the classes that have records, in their order, (K, d)."""
    return np.stack([features[labels == label].mean(0) for label in np.unique(labels)])


def nc1(features: Features, labels: NDArray[np.int64]) -> float:
    """Return ``tr(S_W S_B^+) / C``: S_W the mean covariance within classes, S_B that of the class means.

    >>> round(nc1(np.array([[0.0], [2.0], [9.0], [11.0]]), np.array([0, 0, 1, 1])), 6)  # 1 / 4.5**2 / 2
    0.024691
    """
    means = class_means(features, labels)
    if len(means) < 2:
        return math.nan
    _, place = np.unique(labels, return_inverse=True)
    centred = means - means.mean(0)
    _, scales, directions = np.linalg.svd(centred, full_matrices=False)
    kept = scales > scales.max() * max(centred.shape) * np.finfo(np.float64).eps
    kept[len(means) - 1 :] = False
    if not kept.any():
        return math.nan
    # Along the principal directions of S_B its pseudo-inverse is diagonal.
    deviations = (features - means[place]) @ directions[kept].T
    within = (deviations**2 / np.bincount(place)[place][:, None]).sum(0) / len(means)
    return float((within / (scales[kept] ** 2 / len(means))).sum() / len(means))


def nc2(features: Features, labels: NDArray[np.int64]) -> float:
    """Return the mean over pairs of classes of ``|cos(m_c, m_c') + 1 / (C - 1)|`` of the centred means.

    >>> round(nc2(np.eye(3), np.array([0, 1, 2])), 12)
    0.0
    """
    means = class_means(features, labels)
    if len(means) < 2:
        return math.nan
    values = cosines(means - means.mean(0))[~np.eye(len(means), dtype=bool)]
    return float(np.abs(values + 1 / (len(means) - 1)).mean())


def cosines(vectors: Features) -> Features:
    """Return the cosines between rows, (K, K); a zero row has cosine 0 with all."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def variance(accuracies: Sequence[float]) -> float:
    """Return FedILC's first measure of fairness, times 1000: the variance with divisor n - 1.

    >>> round(variance([0.5, 0.7]), 6)
    20.0
    """
    return float(np.var(accuracies, ddof=1)) * 1000 if len(accuracies) > 1 else math.nan


def entropy(accuracies: Sequence[float]) -> float:
    """Return its second one, times 10: the entropy of ``a / sum a`` in nats, 10 ln n at the most.

    >>> round(entropy([0.8] * 9), 3)
    21.972
    """
    values = np.asarray(accuracies, np.float64)
    if not values.sum() > 0:
        return math.nan
    shares = values[values > 0] / values.sum()
    return float(-(shares * np.log(shares)).sum()) * 10


def sampled(records: Mapping[str, SiloData], seed: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return at most ``RECORDS`` test records of all silos, drawn by the seed: inputs and labels."""
    folds = [silo.records("test") for silo in records.values()]
    places = [(fold, index) for fold in folds for index in range(len(fold))]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:RECORDS]
    chosen = [places[int(place)][0][places[int(place)][1]] for place in order]
    return torch.stack([item[0] for item in chosen]), np.array([int(item[1]) for item in chosen])


@torch.no_grad()
def geometry(module: Any, inputs: torch.Tensor, labels: NDArray[np.int64]) -> dict[str, Any]:
    """Return ``nc1``, ``nc2`` and the mean cosine between class means; None for what there is none of."""
    features = module.eval().features(inputs).double().numpy()
    if not np.isfinite(features).all():
        return {"nc1": None, "nc2": None, "cosine": None}
    means = class_means(features, labels)
    pairs = cosines(means)[~np.eye(len(means), dtype=bool)]
    found = {"nc1": nc1(features, labels), "nc2": nc2(features, labels), "cosine": float(pairs.mean())}
    return {name: round(value, 6) if math.isfinite(value) else None for name, value in found.items()}


@torch.no_grad()
def picture(module: Any, inputs: torch.Tensor, labels: NDArray[np.int64], *, embed: bool) -> dict[str, Any]:
    """Return what a figure draws of the last model.

    Args:
        module: the model.
        inputs: of ``sampled``.
        labels: likewise.
        embed: whether to embed features wider than three by t-SNE, which takes a second.

    Returns:
        ``cosines`` between class means, ``labels`` and ``points`` in the plane: the features themselves
        where there are two, t-SNE's otherwise; empty if features are not finite.
    """
    features = module.eval().features(inputs).double().numpy()
    if not np.isfinite(features).all():
        return {}
    found: dict[str, Any] = {"cosines": np.round(cosines(class_means(features, labels)), 4).tolist()}
    if features.shape[1] == 2:
        points = features
    elif embed:
        from sklearn.manifold import TSNE

        points = TSNE(random_state=0, init="pca", perplexity=min(30, len(features) // 4)).fit_transform(
            features
        )
    else:
        return found
    return found | {"points": np.round(points, 3).tolist(), "labels": labels.tolist()}


@torch.no_grad()
def by_environment(module: Any, records: Mapping[str, SiloData]) -> list[float]:
    """Return the accuracy on each silo's validation records of each sub-environment, in order."""
    module.eval()
    values = []
    for name in sorted(records):
        silo: Any = records[name]
        fold, kinds = silo.records("validation"), silo.environments("validation")
        inputs = torch.stack([fold[place][0] for place in range(len(fold))])
        hits = module(inputs).argmax(1).numpy() == silo.labels("validation")
        values += [float(hits[kinds == kind].mean()) for kind in np.unique(kinds)]
    return values
