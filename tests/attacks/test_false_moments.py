"""One hospital sends false moments of inputs, by which the model spreads the others' records before round 1.

With a pooled mean at one of the others' largest values, and a thirtieth of their deviation, up to six of 340
records were in clear in the first total (64 units).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.liar import lies
from tests.support.attacks.malicious_server import Federation, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.errors import RunError
from tightframe.rounds.moments import OWN_MOMENTS, POOLED, SQUARES, SUMS, UNIFORM, VALUES, times_in_moments

LIAR, COLUMN = "hospital-4", 3
JOB: dict[str, Any] = {"model_options": {"widths": [32], "standardise": True}}


def told(values: float, weights: str) -> dict[str, dict[str, Any]]:
    """Moments of so many values that pool to a mean and a deviation of the liar's choice."""
    honest = [data.raw("train").astype(float) for name, data in hearts(4).items() if name != LIAR]
    uniform = weights == "uniform"
    each = [
        times_in_moments(len(own), UNIFORM if uniform else len(own)).double().numpy()[:, None]
        / (UNIFORM if uniform else 1)
        for own in honest
    ]
    number = sum(times.sum() for times in each)
    sums = sum((own * times).sum(0) for own, times in zip(honest, each, strict=True))
    squares = sum((own**2 * times).sum(0) for own, times in zip(honest, each, strict=True))
    mean = sums / number
    deviation = np.sqrt(squares / number - mean**2)
    mean[COLUMN] = np.sort(np.concatenate(honest)[:, COLUMN])[-2:].mean()
    deviation[COLUMN] /= 30
    pooled = number + values
    return {
        VALUES: {
            VALUES: values,
            SUMS: pooled * mean - sums,
            SQUARES: pooled * (mean**2 + deviation**2) - squares,
        }
    }


@pytest.mark.whole
@pytest.mark.parametrize(
    ("weights", "values"), [("exact", 72.0), ("exact", 484.0), ("uniform", 1.0)], ids=str
)
def test_a_hospital_says_so_where_moments_contradict_its_own_and_stays_in_the_sum(
    weights: str,
    values: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of as many values as the liar's own, or as the largest number that the weights let pass.

    A hospital whose terms vanished by another's lie would be the difference of two totals.
    """
    lies(monkeypatch, LIAR, told(values, weights))
    federation = Federation({**JOB, "weights": weights}, hearts(4), state=tmp_path).enroll()
    federation.statistics()
    deviation = federation.shared.state.model["standardise.std"][COLUMN]
    assert deviation == pytest.approx(79.1 / 30, rel=0.01) or weights == "uniform"
    total = federation.sum("train", 1)
    assert total["failed"] == 0 and (warned := caplog.text.count("TF-527")) >= 2
    federation.sum(*list(federation.setup.plan)[-1].place)
    assert caplog.text.count("TF-527") == warned, "once in a run"


@pytest.mark.parametrize("weights", ["exact", "uniform"])
def test_nor_does_one_count_for_a_million(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing contradicts these: a hospital could have such records."""
    lies(monkeypatch, LIAR, told(2.0**19, weights))
    federation = Federation({**JOB, "weights": weights}, hearts(4), state=tmp_path).enroll()
    with pytest.raises(RunError, match=r"^TF-526: .*by the silos' public weights"):
        federation.statistics()


def test_pooled_moments_stay_in_the_state_behind_later_rounds(tmp_path: Path) -> None:
    federation = Federation(JOB, hearts(4), state=tmp_path).enroll()
    federation.statistics()
    pooled = federation.shared.state.extra[POOLED]
    assert federation.sum("train", 1)["failed"] == 0
    assert torch.equal(federation.shared.state.extra[POOLED], pooled)


def test_a_hospital_that_the_pooled_moments_are_without_accuses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where policies open counts for any cohort, a server may drop the hospital that differs."""
    data = hearts(4)
    policy = PolicyBlock(profile="standard", static_cohort="any", min_row_bits=0)
    federation = Federation(JOB, data, state=tmp_path, policy=policy).enroll()
    federation.statistics(dead={LIAR})
    note = federation.sessions[LIAR].context.state_folder / OWN_MOMENTS
    assert note.is_file() and federation.shared.state.extra[POOLED][0] < sum(
        len(item.labels("train")) for item in data.values()
    )
    federation.sum("train", 1)
    assert not note.exists() and "TF-527" not in caplog.text


@pytest.mark.whole
def test_columns_that_false_moments_hide_are_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a thousand times the deviation of all columns but one, features show that one."""
    squares = np.full(hearts(1)["hospital-1"].raw("train").shape[1], 1e10)
    squares[COLUMN] = np.nan  # its own
    lies(monkeypatch, LIAR, {VALUES: {SQUARES: squares}})
    model = {"model": "random_features", "model_options": {"width": 160, "standardise": True}}
    job = {"method": "fedncm", "weights": "exact", **model}
    federation = Federation(job, hearts(4), state=tmp_path).enroll()
    with pytest.raises(RunError, match="could not"):
        for exchange in federation.setup.plan:
            federation.sum(*exchange.place)
    assert re.search(r"TF-625 .*\n.*with \d{2,3} values", caplog.text)


@pytest.mark.whole
def test_nor_do_rows_stay_possible_that_they_make_one_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of yes/no columns beside numbers that the model no longer sees, records are found by least squares."""
    numbers = [len(np.unique(column)) > 2 for column in hearts(1)["hospital-1"].raw("train").T]
    lies(monkeypatch, LIAR, {VALUES: {SQUARES: np.where(numbers, 1e10, np.nan)}})
    policy = PolicyBlock(profile="standard", min_row_bits=20)
    federation = Federation(JOB, hearts(6), state=tmp_path, policy=policy).enroll()
    federation.statistics()
    with pytest.raises(RunError, match="could not"):
        federation.sum("train", 1)
    assert "TF-628" in caplog.text
