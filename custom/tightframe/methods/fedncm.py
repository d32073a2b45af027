"""FedNCM: the nearest class mean of frozen features, from one sum.

Source: Legate, Bernier, Page-Caccia, Oyallon and Belilovsky, Guiding The Last Layer in Federated Learning
with Pre-Trained Models, NeurIPS 2023: class means over all silos' records as the classifier, and as the start
of a head that is then trained::

    m_c = B_c / n_c      score_c = m_c^T phi - |m_c|^2 / 2

The largest score is the smallest Euclidean distance to a mean. It needs no second moments: of the three
closed forms it sends the least, C x d numbers.
"""

from __future__ import annotations

import torch

from tightframe.learning.one_sum import one_sum_method
from tightframe.learning.one_sum.closed_form import class_means
from tightframe.learning.one_sum.feature_sums import FrozenSums
from tightframe.options import StrictModel


class FedNCMConfig(StrictModel):
    """FedNCM has no options."""


def solve(config: FedNCMConfig, pooled: FrozenSums, bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (C, d) and bias (C,) of the nearest class mean."""
    assert bias  # noqa: S101  (``needs_bias``)
    return class_means(pooled.sums, pooled.counts)


METHOD = one_sum_method(
    name="fedncm",
    title="FedNCM",
    paper="Legate et al., Guiding The Last Layer in Federated Learning with Pre-Trained Models, NeurIPS 2023",
    config=FedNCMConfig,
    findings=lambda config: "its head answers the nearest mean of a class",
    solve=solve,
    products=False,
    needs_bias=True,
    follows=("The head answers the class whose mean B_c / n_c is nearest to the features of a record."),
)
