"""Patients of a silo in a job that hides them: whose each training record is, and all records of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.config.job import Privacy
from tightframe.data.base import SiloData
from tightframe.data.patients import record_patients

Portion = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Features (B, d), labels (B,) and patients (B,) of some records."""


def hidden_patients(privacy: Privacy, data: SiloData) -> NDArray[np.int64] | None:
    """Whose each training record is, (n,), if the job hides patients; None if it hides records.

    Raises:
        DataError: TF-210 if patients are to be hidden and are not known.
    """
    return record_patients(data, "train") if privacy.neighbours == "patient" else None


def whole_patients(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], patients: torch.Tensor
) -> Iterator[Portion]:
    """The same records in the same order, cut so that all of a patient's are in one portion.

    What a patient adds to class sums is clipped as a whole, so no part of it may be released by itself. Held
    at a time are a batch and the records of one patient.

    Args:
        batches: features and labels of records in the order of ``patients``.
        patients: whose each record is, (n,), each patient's next to each other.

    Raises:
        ValueError: if a patient's records are apart, or there are not as many records as ``patients``.
    """
    if len(torch.unique_consecutive(patients)) != len(torch.unique(patients)):
        raise ValueError("Expected each patient's records next to each other, but got some that are apart.")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = end = 0
    for features, labels in batches:
        held.append((features, labels))
        end += len(labels)
        owners = patients[start:end]
        goes_on = end < len(patients) and bool(patients[end] == owners[-1])
        cut = int((owners != owners[-1]).sum()) if goes_on else len(owners)
        if cut:
            whole = torch.cat([item[0] for item in held]), torch.cat([item[1] for item in held])
            yield whole[0][:cut], whole[1][:cut], owners[:cut]
            held = [(whole[0][cut:], whole[1][cut:])]
            start += cut
    if end != len(patients) or start != end:
        raise ValueError(f"Expected {len(patients)} records, but got {end}.")
