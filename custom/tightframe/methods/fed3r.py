"""Fed3R: ridge regression on frozen features, from one sum; AFL has the same solution.

Source: Fani, Camoriano, Caputo and Ciccone, Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers, ICML 2024, eq. (3) to (6)::

    silo:    A_k = sum phi phi^T      b_k = sum phi y^T              over its records; phi has a constant 0.3
    server:  W = (sum_k A_k + lambda I)^-1 sum_k b_k

He et al., AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models, CVPR 2025,
merge silos' solutions one by one and take the regularisation of each out afterwards: the same W. From sums
there is nothing to merge.

The features are the model's own, frozen as the run begins with them, so a pretrained start
(``initial_model``) decides how good they are. lambda is chosen by generalised cross-validation, from the sums
alone. W solves the problem of all records together: how classes are spread over silos changes no bit of it.
The paper's Fed3R-RF is this method on random features, its Fed3R+FT any other method with ``start: fed3r``.
"""

from __future__ import annotations

import torch
from pydantic import Field

from tightframe.learning.one_sum import one_sum_method
from tightframe.learning.one_sum.closed_form import (
    INTERCEPT,
    RIDGE_NOISE,
    Priors,
    generalised_cross_validation,
    ridge,
    target_weights,
    with_intercept,
)
from tightframe.learning.one_sum.feature_sums import FrozenSums
from tightframe.options import StrictModel


class Fed3RConfig(StrictModel):
    """Fed3R's options.

    Attributes:
        ridge: lambda; None chooses it by generalised cross-validation.
        priors: ``observed`` takes records as they are, ``balanced`` gives each class the same sum of targets,
            for few records of what matters.
    """

    ridge: float | None = Field(default=None, gt=0)
    priors: Priors = "observed"


def solve(config: Fed3RConfig, pooled: FrozenSums, bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (C, d) and bias (C,) of the ridge regression of class labels on ``[phi, 0.3]``."""
    assert pooled.gram is not None  # noqa: S101  (summed for this method)
    gram, sums = pooled.gram, pooled.sums
    if bias:
        gram, sums = with_intercept(gram, sums, pooled.counts)
    targets = target_weights(pooled.counts, config.priors)
    sums = targets[:, None] * sums
    lam = config.ridge
    if lam is None and pooled.noise > 0:
        lam = RIDGE_NOISE * pooled.noise
    if lam is None:
        squares = float((pooled.counts * targets.square()).sum())
        lam = generalised_cross_validation(gram, sums, pooled.records, squares)
    weight = ridge(gram, sums, lam)
    if not bias:
        return weight, torch.zeros_like(pooled.counts)
    return weight[:, :-1], INTERCEPT * weight[:, -1]


METHOD = one_sum_method(
    name="fed3r",
    title="Fed3R (AFL)",
    paper=(
        "Fani et al., Accelerating Heterogeneous Federated Learning with Closed-form Classifiers, ICML 2024"
    ),
    config=Fed3RConfig,
    findings=lambda config: "its class rules take each record's sums out with its one class",
    solve=solve,
    intercepts=lambda config: config.priors,
    products=True,
    needs_bias=False,
    follows=("The head is the ridge regression of the classes on the features, W = B (G + lambda I)^-1."),
)
