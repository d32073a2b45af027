"""Whose record each is: an optional part of what a data set says of its records. Torch-free.

A job that hides patients needs it. Who does not know says so; a guess (each record a patient of its own)
would promise patients what holds for records only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import SiloData
from tightframe.errors import DataError
from tightframe.phases import Fold

UNKNOWN = "TF-210"


def record_patients(data: SiloData, fold: Fold) -> NDArray[np.int64]:
    """The patient of each record of a fold, in record order.

    A data set whose source knows patients has a method ``groups(fold)``, which gives them as whole numbers
    (n,), or None. Numbers mean nothing outside of the silo, and are the same in all folds. One below 0 says
    that nobody knows whose this record is: all such records together are no patient.

    Raises:
        DataError: TF-210 if they are not known, of any record; TF-206 if they are not one whole number a
            record.
    """
    groups = getattr(data, "groups", None)
    found = None if groups is None else groups(fold)
    if found is None:
        raise patients_unknown(data.source, "its source does not say")
    patients, count = np.asarray(found), len(data.labels(fold))
    if patients.shape != (count,) or not np.issubdtype(patients.dtype, np.integer):
        raise DataError(
            f"Expected one whole number a record from `groups` of {data.source} in the {fold} fold, but got "
            f"{patients.dtype} of shape {patients.shape} for {count} records: correct the data set.",
            code="TF-206",
        )
    if nameless := int((patients < 0).sum()):
        reason = f"{nameless} of the {count} records of its {fold} fold have a patient below 0"
        raise patients_unknown(data.source, reason)
    return patients.astype(np.int64)


def patients_unknown(source: str, reason: str) -> DataError:
    """The refusal of records whose patients are not known."""
    return DataError(
        f"Expected to know whose each record of {source} is, because the job hides patients, but {reason}: "
        'use `"neighbours": "record"` in the job\'s `privacy`, or records whose patients are known.',
        code=UNKNOWN,
    )
