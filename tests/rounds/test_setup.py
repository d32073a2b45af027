"""What a job and the things it names come to: heads, standardised inputs, rounds of several phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.jobs import SMALL
from tests.support.runs import FOUR, in_round, job, run

from tightframe import data, federation
from tightframe.errors import JobError
from tightframe.learning.model_update import shared_template
from tightframe.rounds.setup import prepare

HEART: dict[str, Any] = {
    **SMALL,
    "dataset": "fed_heart_disease",
    "dataset_options": {},
    "model": "mlp",
    "model_options": {"widths": [4]},
}


@pytest.mark.parametrize("option", ["dropout", "single_logit"])
def test_options_of_a_head_that_the_method_replaces_are_refused(option: str) -> None:
    values = {**HEART, "model_options": {"widths": [4], option: 0.5 if option == "dropout" else True}}
    assert prepare({**values, "method": "fedavg"})
    with pytest.raises(JobError, match=f"model_options.{option}: fedetf has a head of its own"):
        prepare({**values, "method": "fedetf"})


def test_equal_jobs_share_the_model_that_their_sums_are_planned_by_and_no_others() -> None:
    other = {"model_options": {"widths": [5]}}
    frozen = {"encoder": "random", "method": "fed3r", "rounds": 1}
    changes = ({}, {"rounds": 3}, other, {"method": "fedetf"}, frozen)
    setups = [prepare({**HEART, "method": "fedavg", **change}) for change in changes]
    first, again, *others = [shared_template(setup.setting) for setup in setups]
    assert first is again and len({id(first), *map(id, others)}) == 4


@pytest.mark.whole
def test_a_model_that_standardises_gets_the_moments_of_all_training_folds(tmp_path: Path) -> None:
    changes = {"model_options": {"widths": [4], "standardise": True}, "summation": "secure"}
    names = ("dataset", "model", "model_options", "training", "seed", "summation")
    values = {key: value for key, value in (HEART | changes).items() if key in names}
    result = federation.run("fedavg", FOUR, 1, folder=tmp_path, **values)
    spec = data.get("fed_heart_disease")
    assert spec.twin is not None
    centres = [spec.twin(centre, spec.options()).records("train") for centre in range(4)]
    rows = [records[i][0].numpy() for records in centres for i in range(len(records))]
    pooled = np.stack(rows).astype(np.float64)
    model = result.state.model
    np.testing.assert_allclose(model["standardise.mean"], pooled.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model["standardise.std"], pooled.std(0), rtol=1e-4, atol=1e-4)
    assert [row.kind for row in result.outcome.rows if row.kind != "start"] == [
        "statistics",  # the silos' flags of classes
        "statistics",
        "train",
        "closing",
    ]
    plain = federation.run("fedavg", FOUR, 1, **{**values, "summation": "plain"}).state.model
    assert all(torch.equal(plain[name], model[name]) for name in model)


@pytest.mark.whole
def test_a_rounds_later_phases_are_for_those_in_the_earlier_ones(tmp_path: Path) -> None:
    of = job(method="fedilc", training={"epochs": 1, "batch_size": 32}, rounds=2)
    asked: list[tuple[int, int, str]] = []

    def silent(task: str, site: str, request: Any) -> bool:
        if task == "contribute" and request["kind"] == "train":
            asked.append((request["round"], request["phase"], site))
        return task == "contribute" and site == "site-2" and in_round(request, 1) and request["phase"] == 0

    result, _ = run(of, tmp_path, silent=silent)
    assert {site for number, phase, site in asked if (number, phase) == (1, 1)} == set(FOUR) - {"site-2"}
    assert {site for number, phase, site in asked if (number, phase) == (2, 1)} == set(FOUR)
    rows = {(row.round, row.phase): row for row in result.outcome.rows if row.kind == "train"}
    assert rows[1, 0].dropped == {"site-2": "TF-502"}
    assert rows[1, 1].dropped == {"site-2": "TF-511"}
    assert rows[1, 1].silos == rows[1, 0].silos == ["site-1", "site-3", "site-4"]
    assert rows[2, 0].silos == rows[2, 1].silos == FOUR
    assert rows[2, 0].evaluation is None and rows[2, 1].evaluation is not None
    assert "site-2 was left out of round 1, phase 2: TF-511" in result.outcome.screen()


@pytest.mark.whole
def test_personal_models_stay_at_the_silos_and_only_their_mean_is_told(tmp_path: Path) -> None:
    result, line = run(job(method="fedavg", rounds=1, personalise=True), tmp_path)
    reports = [json.loads((tmp_path / site / "local_report.json").read_text())["personal"] for site in FOUR]
    assert result.outcome.personal is not None
    told = np.mean([round(report["accuracy"] * 32) / 32 for report in reports])  # exact at home alone
    assert result.outcome.personal.accuracy == told
    assert result.outcome.personal.silos == 4
    for site, report in zip(FOUR, reports, strict=True):
        confusion = np.array(report["confusion"])
        assert report["accuracy"] == pytest.approx(np.trace(confusion) / confusion.sum())
        assert (tmp_path / site / "personal_model.safetensors").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "server" / "personal_model.safetensors").exists()
    assert {task for task, *_ in line.seen} == {"enroll", "confirm", "contribute", "reveal"}
