"""Pooled moments held against a silo's own: no honest total contradicts any silo."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tightframe.phases import Field
from tightframe.rounds import codec
from tightframe.rounds.phases.statistics import MOMENT_BOUND, UNIFORM, packed, times_in_moments
from tightframe.rounds.riders.moments import contradicted


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("parties", [3, 250])
def test_honest_moments_contradict_nobody_whatever_the_columns_are(uniform: bool, parties: int) -> None:
    """Columns of each scale, far from zero, constant at all silos or all but one; in steps of the codec."""
    rng = np.random.default_rng(3)
    scales = np.repeat([1e-4, 1.0, 300.0], 3)
    offsets = np.tile([0.0, 0.1, 10.0], 3) * scales
    step = 2.0 ** -codec.bits_of(Field("sums", (), bound=MOMENT_BOUND), parties)
    terms = []
    for place in range(parties):
        number = int(rng.integers(1, 40))
        spread = 0.0 if place else 1.0
        moving = rng.normal(size=(number, 9)) * scales + offsets
        still = rng.normal(size=(number, 9)) * scales * spread + offsets
        rows = (
            torch.as_tensor(np.hstack([moving, still, np.full((number, 9), 0.1) * scales])).float().double()
        )
        times = times_in_moments(number, UNIFORM if uniform else number).double()[:, None]
        sums = [(times * power).sum(0) for power in (rows, rows.square())]
        terms.append((packed(times.sum(), *sums) / step).round() * step)
    pooled = torch.stack(terms).sum(0)
    exact = parties * step
    assert [contradicted(pooled, own, exact) for own in terms] == [[]] * parties
    lie = pooled.clone()
    lie[1 + 27 :] -= 3 * terms[0][1 + 27 :].abs().max() + 1.0  # squares below any
    assert contradicted(lie, terms[0], exact)
