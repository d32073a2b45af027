"""Which values of findings are in a silo's exact counts.

How many values of a finding are unknown follows from exact counts: all records less the known ones. So a
silo counts unknown values in steps, as a cell that is too small is not told by itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.phases import UNKNOWN


def in_steps(labels: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Return findings of which 0, ``step``, 2 ``step``, ... are unknown: known ones fill up to the next step.

    These are spread evenly over the records, so that no kind of them is lost.

    Args:
        labels: 1, 0 or ``UNKNOWN``, (n, K).
        step: least number of unknown values of a finding that is told.

    >>> in_steps(np.array([[1, 1], [0, 1], [1, -1], [0, 1]]), 2).tolist()
    [[1, 1], [0, -1], [1, -1], [0, 1]]
    """
    told = labels.copy()
    for place in range(told.shape[1]):
        known = np.flatnonzero(told[:, place] != UNKNOWN)
        more = min(-(len(told) - len(known)) % step, len(known))
        told[known[(2 * np.arange(more) + 1) * len(known) // max(1, 2 * more)], place] = UNKNOWN
    return told


def too_few(labels: NDArray[np.int64], least: int) -> list[int]:
    """Return the findings of which fewer than ``least`` values are known, by their place.

    >>> too_few(np.array([[1, -1], [0, 1]]), 2)
    [1]
    """
    return np.flatnonzero((labels != UNKNOWN).sum(axis=0) < least).tolist()
