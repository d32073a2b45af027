"""Sums of frozen features under differential privacy: clip, truncate, multiply and add, in integers.

Each record's features are scaled into the unit ball and truncated towards zero to multiples of ``2**-12``, so
that no vector gets longer. From there on all numbers are integers: products of two such numbers are multiples
of ``2**-24``, the grid of ``frozen_sums_plan``, which proves how far one record, or one patient, can move the
sums. Nothing here refuses because of a record, since a refusal would disclose it: features that are not
finite count as zero. There are no class rules: every class is included, however small.
"""

from __future__ import annotations

import torch
from torch import nn

from tightframe.privacy.releases.class_sums import check_labels, clip_features, on_grid
from tightframe.privacy.releases.frozen_sums_plan import FEATURE_BITS


def whole_features(features: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    """Return ``trunc(2**12 phi)``, phi = h / max(R, |h|): int64 (B, d), of norm ``2**12`` at most.

    Args:
        features: h, (B, d).
        radius: R.

    >>> whole_features(torch.tensor([[3.0, -4.0], [0.25, 0.0], [float("inf"), 1.0]])).tolist()
    [[2457, -3276], [1024, 0], [0, 0]]
    """
    return on_grid(clip_features(features.detach().double() / radius, 1.0), FEATURE_BITS, 1.0)


class FrozenTotals:
    """A silo's sums, without noise, in units of the grid.

    Args:
        width: d.
        products: whether G is summed.
    """

    def __init__(self, classes: int, width: int, *, products: bool) -> None:
        self._classes = classes
        self._sums = torch.zeros(classes, width, dtype=torch.int64)
        self._counts = torch.zeros(classes, dtype=torch.int64)
        self._products = torch.zeros(width, width, dtype=torch.int64) if products else None

    def add(self, rows: torch.Tensor, labels: torch.Tensor, patients: torch.Tensor | None = None) -> None:
        """Add records.

        Args:
            rows: of ``whole_features``, (B, d).
            labels: (B,) int64 in [0, C).
            patients: (B,) int64, of each record, to hide patients: all records of a patient must be in one
                call.

        Raises:
            PrivacyValueError: TF-700, for an invalid label.
        """
        check_labels(labels, len(rows), self._classes)
        if patients is None:
            self._add(rows, labels, 1)
            return
        _, owner, numbers = torch.unique(patients, return_inverse=True, return_counts=True)
        owner = owner.to(rows.device)
        single = numbers.to(rows.device)[owner] == 1
        self._add(rows[single], labels[single], 1)
        for person in torch.nonzero(numbers > 1).flatten().tolist():
            mine = owner == person
            self._add(rows[mine], labels[mine], int(numbers[person]))

    def _add(self, rows: torch.Tensor, labels: torch.Tensor, records: int) -> None:
        """Add the sums over these records divided by ``records``, rounded towards zero."""
        # Float64, whose products and sums of integers are exact below 2**53: here at most 2**24 a record.
        exact = rows.to(torch.float64)
        member = nn.functional.one_hot(labels, self._classes).to(exact)
        grid = float(2**FEATURE_BITS)
        self._sums += _shared((member.T @ exact) * grid, records)
        self._counts += _shared(member.sum(0) * grid**2, records)
        if self._products is not None:
            self._products += _shared(exact.T @ exact, records)

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the release before noise, int64 on the CPU: see ``frozen_sums_plan.PARTS``."""
        parts = {"sums": self._sums, "counts": self._counts}
        if self._products is None:
            return parts
        rows, columns = torch.triu_indices(len(self._products), len(self._products), offset=1)
        return {"diagonal": self._products.diagonal(), "products": self._products[rows, columns], **parts}


def _shared(exact: torch.Tensor, records: int) -> torch.Tensor:
    return torch.div(exact.to(torch.int64), records, rounding_mode="trunc").cpu()
