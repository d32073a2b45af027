"""Clipping: of each record's gradient, or of each patient's, who may have several records.

The clipped unit is the one that noise hides. At patient level it is the *mean* of the gradients of all of a
patient's records, the gradient of the patient's mean loss::

    g_p = (1 / n_p) sum_(i of p) g_i,    total = sum_p g_p min(1, C / |g_p|)

For any number and content of a patient's records, leaving the patient out changes the total by at most C. The
mean keeps a patient's gradient at the size of one record's, so that the same C fits both levels; a sum would
be longer for patients with more records, and would be clipped more. The price is a weight of 1 / n_p for each
record: patients count alike, records do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


def clipped_sum(group: Sequence[torch.Tensor], clip_norm: float) -> torch.Tensor:
    """Return the sum over records of ``g min(1, C / |g|)``, with |g| over all parameters together.

    A gradient that is not finite counts as zero: it must not spoil the sum for everybody, and an error would
    disclose a single record.

    Args:
        group: per parameter, gradients of b records, (b, *shape).
        clip_norm: C.

    Returns:
        All parameters' sums, concatenated, (P,) float64.

    >>> group = [torch.tensor([[3.0], [0.25]]), torch.tensor([[4.0], [0.5]])]
    >>> [round(float(item), 6) for item in clipped_sum(group, 1.0)]
    [0.85, 1.3]
    """
    wide = rows(group)
    norms = torch.linalg.vector_norm(wide, dim=1)
    finite = norms.isfinite()
    if not bool(finite.all()):
        wide = torch.where(finite[:, None], wide, 0.0)
        norms = torch.where(finite, norms, 0.0)
    factors = torch.where(norms > clip_norm, clip_norm / norms, 1.0)
    if len(wide) == 1:
        return wide[0].mul_(factors)
    return factors @ wide


def rows(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each record's gradient as one row: (b, P) float64, from (b, *shape) of each parameter."""
    return torch.cat([item.detach().reshape(len(item), -1) for item in group], 1).double()


class PatientMeans:
    """Computes patients' mean gradients from gradients of records in any portions.

    Args:
        sizes: records of each patient, in the order in which the records come.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = iter(sizes)
        self._sum: torch.Tensor | None = None
        self._size = self._left = 0

    def add(self, gradients: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the mean (1, P) of each patient whose last record is in this portion, (b, P) float64."""
        start = 0
        while start < len(gradients):
            if self._sum is None:
                self._size = self._left = next(self._sizes)
                self._sum = torch.zeros_like(gradients[0])
            part = gradients[start : start + self._left]
            self._sum += part.sum(0)
            start += len(part)
            self._left -= len(part)
            if not self._left:
                # A mean that is not finite counts as zero, for all of the patient's records together.
                yield (self._sum / self._size)[None]
                self._sum = None


class PatientSum:
    """Adds the patients' clipped mean gradients to a total, from gradients of records in any portions.

    Args:
        total: (P,) float64, added to in place.
        sizes: records of each patient, in the order in which the records come.
        clip_norm: C.

    >>> total = torch.zeros(1, dtype=torch.float64)
    >>> patients = PatientSum(total, [3, 1], 1.0)
    >>> patients.add(torch.tensor([[9.0], [0.0]], dtype=torch.float64))
    >>> patients.add(torch.tensor([[-7.5], [0.25]], dtype=torch.float64))
    >>> total
    tensor([0.7500], dtype=torch.float64)
    """

    def __init__(self, total: torch.Tensor, sizes: Sequence[int], clip_norm: float) -> None:
        self._total, self._clip_norm = total, clip_norm
        self._means = PatientMeans(sizes)

    def add(self, gradients: torch.Tensor) -> None:
        """Add the next records' gradients, (b, P) float64; a patient counts once all of theirs are added."""
        for mean in self._means.add(gradients):
            self._total += clipped_sum([mean], self._clip_norm)


@dataclass(frozen=True)
class Members:
    """The records of each patient, by their places in the data set.

    Attributes:
        places: of each patient's records; every patient has at least one.
    """

    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, patients: NDArray[np.int64], count: int) -> Members:
        """Make the index from each record's patient, (n,).

        Raises:
            ValueError: if there is not one patient per record.
        """
        if patients.shape != (count,):
            raise ValueError(f"Expected one patient for each of {count} records, but got {patients.shape}.")
        order = np.argsort(patients, kind="stable")
        starts = np.flatnonzero(np.diff(patients[order])) + 1
        return cls(tuple(tuple(part.tolist()) for part in np.split(order, starts)))

    def __len__(self) -> int:
        return len(self.places)

    def records(self, chosen: Sequence[int]) -> list[int]:
        """Return places of all records of these patients, patient by patient."""
        return [place for patient in chosen for place in self.places[patient]]

    def sizes(self, chosen: Sequence[int]) -> list[int]:
        """Return numbers of their records."""
        return [len(self.places[patient]) for patient in chosen]
