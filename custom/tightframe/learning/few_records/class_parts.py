"""Check that enough records make each part of a class's sum whose weights depend on the model's answers.

In most methods a class sum weighs all records alike. Two do not:

- CReFF's class gradients weigh a record by how wrong the re-trained head is on it, and the job chooses the
  rate of that training: at 1e6 only wrong answers have a slope, and of three hospitals' 209 records of a
  class one total held two, both of one hospital, as 2 / 55.
- FedNH's ``client_adv`` weighs a record by the probability of its class and divides by the sum of these
  weights: at ``scale`` 1000, on raw columns, for which a random network gives one answer, one record made
  more than 0.95 of each of four hospitals' vectors (three of four seeds).

So a silo withholds a part of a class's sum unless, with ``a`` the weight of each record,

- ``(sum of a)^2 / sum of a^2``, as for units (``unit_records``), with a patient's records as one, is at least
  ``min_class_count``;
- the records with at least 1 / ``BEHIND`` of ``sum of a^2 / sum of a`` have as many values as the rule on
  class sums in training asks of a class (``products``, 7).
"""

from __future__ import annotations

import torch

from tightframe.learning.few_records.unit_records import BEHIND, made_by_few


def backed(
    sizes: torch.Tensor,
    labels: torch.Tensor,
    owners: torch.Tensor,
    *,
    repeats: torch.Tensor,
    least: float,
    values: torch.Tensor,
    needed: float,
) -> torch.Tensor:
    """Return a mask of the parts of each class's sum that enough records make, bool (C, K).

    A part without any record passes: it tells of nobody.

    Args:
        sizes: weight of each record in each part, none negative, (n, K).
        labels: (n,).
        owners: number of each record's patient, from 0, (n,).
        repeats: number of copies of a record of each class, (C,).
        least: number of patients whose records must make a part.
        values: number of values of a record of each class, (C,).
        needed: number of values that the records behind a part must have.

    >>> sizes, ones = torch.tensor([[1.0, 1.0], [1.0, 1e-3], [1.0, 0.0]]), torch.ones(1)
    >>> of = {"labels": torch.zeros(3, dtype=torch.int64), "owners": torch.arange(3)}
    >>> of |= {"repeats": ones, "values": ones}
    >>> backed(sizes, least=2, needed=0, **of).tolist(), backed(sizes, least=0, needed=4, **of).tolist()
    ([[True, False]], [[False, False]])
    >>> of["owners"] = torch.zeros(3, dtype=torch.int64)
    >>> backed(sizes, least=2, needed=0, **of).tolist()
    [[False, False]]
    """
    enough = torch.ones(len(repeats), sizes.shape[1], dtype=torch.bool)
    sizes, labels = sizes.detach().cpu().to(torch.float64), labels.cpu()
    for label in range(len(repeats)):
        weights, copies = sizes[labels == label], float(repeats[label])
        weights = weights / weights.sum(0).clamp_min(1e-300)  # their squares could vanish otherwise
        total, squares = weights.sum(0), weights.square().sum(0)
        patients = torch.zeros_like(weights)
        patients.index_add_(0, owners[labels == label].unique(return_inverse=True)[1], weights)
        typical = squares / total.clamp_min(1e-300)
        held = (weights >= typical / BEHIND).sum(0) / copies * float(values[label])
        few = made_by_few(torch.stack([total, patients.square().sum(0)]), least) | (held < needed)
        enough[label] = ~(few & (total > 0))
    return enough
