"""Of which classes enough records make a sum that weighs each by what the model answers.

Class sums of most methods weigh all records alike. CReFF's class gradients weigh one by how wrong the
re-trained head is, which the job has trained at any rate: at 1e6 wrong answers alone have a slope, and of
three hospitals' 209 records of a class one total had two, both of one hospital, as 2 / 55. FedNH's
``client_adv`` weighs one by the probability of its class, and divides by the sum of these: at ``scale`` 1000,
on raw columns, which a random network answers alike, one record made more than 0.95 of each of four
hospitals' vectors (three of four seeds).

So a part of a class's sum is of nobody unless, with ``a`` the weight of each record,

- ``(sum of a)^2 / sum of a^2``, as of units (``unit_records``), is at least ``min_class_count``;
- the records with at least 1 / ``BEHIND`` of ``sum of a^2 / sum of a`` have as many values as the rule on
  class sums in training asks of a class (``products``, 7).
"""

from __future__ import annotations

import torch

from tightframe.learning.few_records.unit_records import BEHIND, made_by_few


def backed(
    sizes: torch.Tensor,
    labels: torch.Tensor,
    *,
    repeats: torch.Tensor,
    least: float,
    values: torch.Tensor,
    needed: float,
) -> torch.Tensor:
    """Return which parts of each class's sum enough records make, bool (C, K).

    A part that no record makes is no one's, and passes.

    Args:
        sizes: weight of each record in each part, none negative, (n, K).
        labels: (n,).
        repeats: how often a record of each class is there, (C,).
        least: records.
        values: of a record of each class, (C,).
        needed: values of the records behind a part.

    >>> sizes, ones = torch.tensor([[1.0, 1.0], [1.0, 1e-3], [1.0, 0.0]]), torch.ones(1)
    >>> of = {"labels": torch.zeros(3, dtype=torch.int64), "repeats": ones, "values": ones}
    >>> backed(sizes, least=2, needed=0, **of).tolist(), backed(sizes, least=0, needed=4, **of).tolist()
    ([[True, False]], [[False, False]])
    """
    found = torch.ones(len(repeats), sizes.shape[1], dtype=torch.bool)
    sizes, labels = sizes.detach().cpu().to(torch.float64), labels.cpu()
    for place in range(len(repeats)):
        own, times = sizes[labels == place], float(repeats[place])
        own = own / own.sum(0).clamp_min(1e-300)  # whose squares could vanish
        total, squares = own.sum(0), own.square().sum(0)
        typical = squares / total.clamp_min(1e-300)
        held = (own >= typical / BEHIND).sum(0) / times * float(values[place])
        few = made_by_few(torch.stack([total, squares]), least * times) | (held < needed)
        found[place] = ~(few & (total > 0))
    return found
