"""FedCGS: Gaussian classes with one covariance, on frozen features, from one sum.

Source: Guan, Zhou and Gu, Capture Global Feature Statistics for One-Shot Federated Learning, AAAI 2025. The
pooled mean of each class and the pooled covariance within classes follow exactly from class sums, class
counts and the sum of phi phi^T, and give a linear discriminant that nobody trains::

    m_c = B_c / n_c      S = (G - sum_c B_c B_c^T / n_c) / (N - K)
    score_c = m_c^T S^-1 phi - m_c^T S^-1 m_c / 2 + log prior_c

S is shrunk towards a multiple of the identity (``shrinkage``), because features that hardly vary, or more
features than records, leave it without an inverse. The paper's personal models are here as elsewhere the
final model after a round of training at the silo.
"""

from __future__ import annotations

import torch
from pydantic import Field

from tightframe.learning.one_sum import one_sum_method
from tightframe.learning.one_sum.closed_form import Priors, discriminant
from tightframe.learning.one_sum.feature_sums import FrozenSums
from tightframe.options import StrictModel


class FedCGSConfig(StrictModel):
    """FedCGS's options.

    Attributes:
        shrinkage: s: the covariance S becomes (1 - s) S + s tr(S) / d I; more where d is not far below the
            number of records.
        priors: of the classes in the score: their shares of the records, or all alike.
    """

    shrinkage: float = Field(default=0.01, ge=0, le=1)
    priors: Priors = "observed"


def solve(config: FedCGSConfig, pooled: FrozenSums, bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (C, d) and bias (C,) of the discriminant."""
    assert pooled.gram is not None and bias  # noqa: S101  (summed for this method; ``needs_bias``)
    return discriminant(
        pooled.gram, pooled.sums, pooled.counts, config.shrinkage, config.priors, noise=pooled.noise
    )


METHOD = one_sum_method(
    name="fedcgs",
    title="FedCGS",
    paper="Guan et al., Capture Global Feature Statistics for One-Shot Federated Learning, AAAI 2025",
    config=FedCGSConfig,
    findings=lambda config: "its discriminant is of classes of which a record has one",
    solve=solve,
    products=True,
    needs_bias=True,
    follows=(
        "The head is the linear discriminant of Gaussian classes with means B_c / "
        "n_c and one covariance, which G, B and n give."
    ),
)
