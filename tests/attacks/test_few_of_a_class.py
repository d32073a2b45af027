"""Totals over all of a hospital's records, less those by class, which leave a class of few out.

What is left is the few records' own: their number, and of one record all its values. Whoever reads the totals
of one job has both, a malicious server or any hospital, with nobody lying.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.test_false_flags import Some
from tests.attacks.test_products import totals
from tests.support.attacks.malicious_server import ANY_WIDTH, Federation, Records, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.rounds.silo.view import LocalSilo, RequestedSum

VICTIM, RARE = "hospital-2", 1
JOB: dict[str, Any] = {
    "method": "ccvr",
    "method_options": {"covariance": "shared"},
    "model": "identity",
    "model_options": {"standardise": True},
    "min_sites": 4,
}


def with_few(few: int, holders: int = 4) -> dict[str, Records]:
    """Four hospitals, of which one has so few records of a class, and so many have any."""
    held = {VICTIM: few} | dict.fromkeys(["hospital-1", "hospital-4", "hospital-5"][: 4 - holders], 0)
    places = (1, 2, 4, 5)
    every = hearts(max(places))
    names = [f"hospital-{place}" for place in places]
    return {name: Some(every[name], {0: 40, RARE: held.get(name, 40)}) for name in names}


def federation(data: dict[str, Records], state: Path, **values: Any) -> Federation:
    return Federation({**JOB, **values}, data, state=state, policy=PolicyBlock(profile="standard")).enroll()


def moments_and_class_sums(run: Federation) -> tuple[float, np.ndarray, np.ndarray]:
    """Open both, as an honest server does.

    Returns:
        The number of records in moments; the numbers in class sums, (C,); the columns' sums in moments less
        those of all classes, (D,).
    """
    moments = totals(run, "statistics/sums")
    values, inputs = float(moments["statistics/values"]), moments["statistics/sums"]
    mean = inputs / values
    deviation = np.sqrt(moments["statistics/squares"] / values - mean**2)
    sums = [run.sum(*each.place) for each in list(run.setup.plan)[2:] if each.place[0] != "closing"][-1]
    counts = sums["moments/counts"]
    return values, counts, inputs - (sums["moments/sums"].sum(0) * deviation + counts.sum() * mean)


def read(left: np.ndarray, data: Records, place: int) -> int:
    """Return how many values other than zero of a training record are in the open."""
    record = np.asarray(data.records("train")[place][0])
    return int((np.isclose(left, record, atol=0.01) & (record != 0)).sum())


@pytest.mark.whole
def test_moments_of_inputs_less_class_sums_are_not_the_one_record_of_a_class(tmp_path: Path) -> None:
    run = federation(with_few(1), tmp_path, weights="power_of_two")
    values, counts, left = moments_and_class_sums(run)
    assert not read(left, run.data[VICTIM], 40)
    assert values == counts.sum()


@pytest.mark.whole
def test_nor_the_sum_of_a_class_that_two_hospitals_have(tmp_path: Path) -> None:
    """Of which there is no class sum: one of the two knows its own part, and so the other's."""
    run = federation(with_few(30, holders=2), tmp_path)
    values, (common, rare), _ = moments_and_class_sums(run)
    assert rare == 0 < common == values, "70 more of the class before"


@pytest.mark.parametrize("weights", ["exact", "power_of_two"])
def test_nor_do_public_weights_tell_how_many_there_are(weights: str, tmp_path: Path) -> None:
    """Exact ones of all hospitals, less class counts, were the number of a class of few."""
    run = federation(with_few(4), tmp_path, weights=weights)
    assert run.weights()[VICTIM] == {"exact": 40, "power_of_two": 32}[weights]


def test_nor_does_how_many_steps_they_are_trained_in(tmp_path: Path) -> None:
    """FedNova sums the steps: with batches of one, as many as records."""
    values = {"method": "fednova", "method_options": {}, "model": "mlp", "model_options": {"widths": [2]}}
    values["training"] = {"batch_size": 1, "weight_decay": 0.0}
    run = Federation({**JOB, **values}, with_few(4), state=tmp_path)
    silo = LocalSilo(run.sessions[VICTIM].context, run.setup, torch.device("cpu"), 1)
    steps = sum(1 for _ in silo.batches("train", augment=False, shuffle=True))
    assert steps == 40


def test_class_means_of_the_last_epoch_are_of_the_records_that_it_draws(tmp_path: Path) -> None:
    """FedAvg_ETF took an epoch for all records: with 24 of 64 in a class of few, it counted none of three."""
    values = {"method": "fedavg_etf", "model": "mlp", "model_options": {"widths": [4]}, "rounds": 4}
    values |= {"method_options": {"mu_divisor": "count_weighted", "measure": "last_epoch", "warm_up": 1}}
    values |= {"training": {"epochs": 3, "batch_size": 8}}
    policy = ANY_WIDTH.model_copy(update={"min_class_count": 25})
    run = Federation(values, with_few(24), state=tmp_path, policy=policy).enroll()
    counted = totals(run, "memory/denominator")["memory/denominator"]
    declared = run.weights()
    full = sum(weight for weight in declared.values() if weight > 40)
    assert sorted(declared.values()) == [40, 40, 80, 80]
    assert full + 30 < counted.sum() <= full + 80, "of the two with a class of few, those of the other"


@pytest.mark.whole
def test_nor_does_a_jobs_cap_on_weights_choose_a_record_that_moments_lack(tmp_path: Path) -> None:
    """With a weight of half of its records less a half, its first record was class sums less moments."""
    data = with_few(40)
    data = {name: data[name] if name == VICTIM else Some(data[name], {0: 15, RARE: 15}) for name in data}
    own, others = (
        sum(len(data[name].labels("train")) for name in data if (name == VICTIM) == is_own)
        for is_own in (True, False)
    )
    share = (own - 1) / 2 / (others + (own - 1) / 2)
    run = federation(data, tmp_path, max_weight_share=share)
    values, counts, left = moments_and_class_sums(run)
    assert not read(-left, data[VICTIM], 0)
    assert counts.sum() - values == own / 2


@pytest.mark.parametrize("weight", [40.0, 39.5, 30.0, 8.0])
def test_nor_do_moments_leave_out_some_of_a_hospitals_records(weight: float, tmp_path: Path) -> None:
    """A job's cap on weights chose how many: of 80 records at weight 39.5 the first, less class sums."""
    run = Federation(JOB, with_few(40), state=tmp_path)
    requested = RequestedSum(sorted(run.data), weight=weight)
    silo = LocalSilo(run.sessions[VICTIM].context, run.setup, torch.device("cpu"), 1, requested)
    times = silo.times_in_moments(None)
    assert len(set(times.tolist())) == 1 and 0 < times.sum() <= 2 * weight


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("identity", "ccvr", True),
        ("identity", "fedavg", False),
        ("mlp", "fedmr", False),
        ("identity", "fedmr", True),
    ],
)
def test_moments_have_columns_as_sums_of_the_columns_have_them(
    model: str, method: str, expected: bool, tmp_path: Path
) -> None:
    """A column that few patients make counts as its median elsewhere: the difference was a hospital's own."""
    job = {**JOB, "method": method, "model": model, "method_options": {}}
    run = Federation(job, with_few(40), state=tmp_path)
    silo = LocalSilo(run.sessions[VICTIM].context, run.setup, torch.device("cpu"), 1)
    assert silo.sums_columns == expected
