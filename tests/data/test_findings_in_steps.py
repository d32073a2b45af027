"""Unknown values of findings are told in steps."""

from __future__ import annotations

import numpy as np
import pytest

from tightframe.data.base import in_steps, too_few
from tightframe.phases import UNKNOWN


@pytest.mark.parametrize("step", [1, 3, 10])
def test_the_unknown_come_in_steps_and_no_value_changes(step: int) -> None:
    labels = np.random.default_rng(0).choice([0, 1, UNKNOWN], (97, 40), p=[0.5, 0.4, 0.1])
    labels[:, 0], labels[:, 1] = 1, UNKNOWN
    labels[:-1, 2], labels[-1, 2] = 0, UNKNOWN
    told = in_steps(labels, step)
    unknown, before = (told == UNKNOWN).sum(0), (labels == UNKNOWN).sum(0)
    assert ((unknown % step == 0) | (unknown == 97)).all() and (unknown - before < step).all()
    assert unknown[0] == 0 and unknown[2] == step
    assert ((told == labels) | (told == UNKNOWN)).all()


def test_those_taken_for_unknown_are_of_all_kinds() -> None:
    """Half of the records, in order, have the finding; so do half of those that are left out."""
    labels = np.array([[1]] * 50 + [[0]] * 50 + [[UNKNOWN]])
    told = in_steps(labels, 21)
    assert [(told == there).sum() for there in (1, 0, UNKNOWN)] == [40, 40, 21]
    each, tens = np.arange(101), np.arange(101) // 10
    assert too_few(told, each, 80) == [] and too_few(told, each, 81) == [0]
    assert too_few(told, tens, 12) == [0], "records of one patient count once"
