"""The patient of each record: an optional part of a data set. Torch-free.

A job that protects patients needs it. Unknown patients are refused and not guessed: if each record counted
as a patient of its own, the guarantee for patients would be that for single records only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import SiloData
from tightframe.errors import DataError
from tightframe.phases import Fold

UNKNOWN = "TF-210"


def record_patients(data: SiloData, fold: Fold) -> NDArray[np.int64]:
    """Return the patient of each record of a fold, in record order, (n,) int64.

    A data set whose source knows patients has a method ``groups(fold)``, which returns them as integers
    (n,), or None. The numbers have no meaning outside the silo, and are the same in all folds. A negative
    number means that the patient is unknown; records with the same negative number are not one patient.

    Raises:
        DataError: TF-210 if the patient of any record is unknown; TF-206 if ``groups`` does not return one
            integer for each record.
    """
    groups = getattr(data, "groups", None)
    given = None if groups is None else groups(fold)
    if given is None:
        raise patients_unknown(data.source, "its source does not name patients")
    patients, count = np.asarray(given), len(data.labels(fold))
    if patients.shape != (count,) or not np.issubdtype(patients.dtype, np.integer):
        raise DataError(
            f"Expected `groups` of {data.source} to give one integer for each record of the {fold} fold, but "
            f"got {patients.dtype} of shape {patients.shape} for {count} records: correct the data set.",
            code="TF-206",
        )
    if unknown := int((patients < 0).sum()):
        reason = f"{unknown} of the {count} records of its {fold} fold have a negative patient number"
        raise patients_unknown(data.source, reason)
    return patients.astype(np.int64)


def patients_unknown(source: str, reason: str) -> DataError:
    """Return the error for records whose patients are unknown."""
    return DataError(
        f"Expected to know the patient of each record of {source}, because the job protects patients, but "
        f'{reason}: use `"neighbours": "record"` in the job\'s `privacy`, or records whose patients are '
        "known.",
        code=UNKNOWN,
    )
