"""Pooled moments held against a silo's own: no honest total contradicts any silo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.jobs import SMALL

from tightframe.phases import Field
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.moments import (
    MOMENT_BOUND,
    OWN_MOMENTS,
    SQUARES,
    SUMS,
    UNIFORM,
    VALUES,
    check_moments,
    contradicted,
    note_moments,
    packed,
    settle_moments,
    times_in_moments,
)
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import own_state
from tightframe.securesum.messages import SumId, Total

OWN = {VALUES: torch.tensor(2.0), SUMS: torch.tensor([4.0]), SQUARES: torch.tensor([10.0])}
TRUE, FALSE = torch.tensor([3.0, 6.0, 14.0]), torch.tensor([3.0, 9.0, 34.0])


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


@pytest.mark.parametrize("others", [[0.0, 0.0, -1.0], [-1.0, 0.0, 0.0], [-1.0, -2.0, -5.0], [1.0, 3.0, 8.0]])
def test_no_others_have_a_negative_number_square_or_variance(others: list[float]) -> None:
    """Each by itself would make the pooled deviation of a silo's own records a liar's choice."""
    own = torch.tensor([2.0, 4.0, 10.0])
    assert contradicted(own + torch.tensor(others), own, 1e-6) == [0]


def silo_of(context: SiloContext, pooled: torch.Tensor | None) -> Any:
    """A silo, asked on a state with these pooled moments."""
    return SimpleNamespace(context=context, pooled=pooled, cohort=["a", "b", "c"])


def test_a_silo_says_once_that_pooled_moments_contradict_its_own_also_in_a_job_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(context: SiloContext, pooled: torch.Tensor | None) -> bool:
        caplog.clear()
        check_moments(silo_of(context, pooled))
        return "TF-527" in caplog.text

    values = {**SMALL, "sites": ["a", "b", "c"], "rounds": 4}
    context = SiloContext("a", prepare(values).job, None, tmp_path, job_id="job-a")
    own_state.begin(context)
    kept = context.state_folder / OWN_MOMENTS
    note_moments(silo_of(context, None), {SUMS: torch.zeros(1)})
    assert not kept.exists(), "this sum is none of moments"
    assert not warned(context, FALSE), "it adds nothing to them"
    note_moments(silo_of(context, None), OWN)
    assert not warned(context, None) and not warned(context, TRUE)
    where = {"lineage": "job-a", "previous": "job-a", "after_round": 2, "checkpoint_sha256": "0" * 64}
    job = prepare({**values, "resume": where}).job
    for name, said in (("job-b", False), ("job-c", True)):
        folder, before = tmp_path / name, context.state_folder
        then = SiloContext("a", job, None, folder, job_id=name, previous_state=before)
        own_state.begin(then)
        assert warned(then, FALSE) != said and not warned(then, FALSE)
        if not said:
            assert warned(context, FALSE)
    statistics, train = SumId(0, "statistics-0"), SumId(1, "train-0")
    for sum_id, survivors in ((train, ("b", "c")), (statistics, ("a", "b", "c")), (None, ())):
        settle_moments(context, None if sum_id is None else Total(0, sum_id, "", survivors, {}, bytes(32)))
        assert kept.exists(), "its own are in the moments"
    for _ in range(2):
        settle_moments(context, Total(0, statistics, "", ("b", "c"), {}, bytes(32)))
        assert not kept.exists() and not warned(context, FALSE)
