"""The validation fold: a fixed part of each centre's training fold.

The choice is a pure function of the records' names, so that every process, run and method selects
models on the same records. The test fold is never used for selection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHARE = 0.15
SALT = "tightframe-validation-v1"


def group_key(group: str) -> str:
    """Return the hash by which groups are ordered: SHA-256 of the versioned salt and the id."""
    return hashlib.sha256(f"{SALT}/{group}".encode()).hexdigest()


def target_size(count: int, share: float = SHARE) -> int:
    """Return the number of records of a class that should go to validation.

    ``share`` of ``count``, rounded half up; at least 1 if there are 4 or more; never all of them.

    >>> [target_size(n) for n in (0, 1, 3, 4, 10, 20)]
    [0, 0, 0, 1, 2, 3]
    """
    if count < 4:
        return 0
    return min(max(1, int(count * share + 0.5)), count - 1)


def validation_mask(
    labels: NDArray[np.int64], groups: Sequence[str], share: float = SHARE
) -> NDArray[np.bool_]:
    """Choose the validation records of one centre's training fold.

    Stratified by class and grouped: all records of a group (a lesion) go to the same fold. In the order
    of ``group_key``, a group is taken if no class then has more than ``target_size`` records in
    validation. If a class of 4 or more records gets none that way, because all its groups are larger
    than its target, its smallest group that leaves a record of each of the group's classes for training
    is taken.

    Args:
        labels: class of each record, int64 (n,).
        groups: lesion of each record, or the record's own name where none is known.
        share: part of each class that goes to validation.

    Returns:
        True where the record is for validation, bool (n,). Every class that has a record keeps
        at least one for training.

    Raises:
        ValueError: if the two differ in length.
    """
    if len(labels) != len(groups):
        raise ValueError(
            f"Expected one group for each label, but got {len(groups)} groups and {len(labels)} labels."
        )
    if len(labels) == 0:
        return np.zeros(0, dtype=np.bool_)
    classes = int(labels.max()) + 1
    names, member = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    table = np.zeros((len(names), classes), dtype=np.int64)
    np.add.at(table, (member, labels), 1)
    order = sorted(range(len(names)), key=lambda index: group_key(str(names[index])))
    totals = table.sum(axis=0)
    targets = np.array([target_size(int(total), share) for total in totals], dtype=np.int64)
    taken = np.zeros(classes, dtype=np.int64)
    chosen: set[int] = set()
    for index in order:
        if np.all(taken + table[index] <= targets):
            taken += table[index]
            chosen.add(index)
    for label in np.flatnonzero((targets > 0) & (taken == 0)):
        if taken[label]:
            continue
        holds = table[:, label] > 0
        fitting = [
            index
            for index in order
            if holds[index] and np.all((taken + table[index] < totals) | (table[index] == 0))
        ]
        if fitting:
            best = min(fitting, key=lambda index: int(table[index].sum()))
            taken += table[best]
            chosen.add(best)
    return np.isin(member, np.fromiter(chosen, dtype=np.int64, count=len(chosen)))
