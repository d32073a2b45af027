"""The levers of private deep training: each is a job, and a second call repeats no run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tightframe.privacy.training import portions
from tightframe.rounds.setup import prepare

pytestmark = pytest.mark.whole


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import private_training

    monkeypatch.setattr(portions, "CHOSEN_ON_CPU", portions.CHOSEN_ON_CPU)  # the command sets it
    return private_training


def test_every_lever_is_a_job_that_can_be_planned(script: Any) -> None:
    case = script.CASES["digits"](Path())
    names = [f"silo-{number}" for number in range(4)]
    for lever in script.LEVERS:
        job = script.job_of(case, lever, 8.0, names, 101, {})
        assert job.privacy is not None and job.privacy.epsilon == 8.0
        if job.privacy.views == 1:
            prepare(job)
    plain, mean = (
        script.job_of(case, lever, 2.0, names, 101, {}) for lever in ("as it is", "mean of 5 models")
    )
    assert mean == plain.model_copy(update={"average_last": 5})


def test_a_second_call_repeats_no_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "levers.json"
    base = ["--levers", "as it is", "--seeds", "1", "--epsilon", "8", "--out", str(out)]
    base += ["--set", '{"rounds": 1, "training.epochs": 1, "privacy.spare_rounds": 0}']
    monkeypatch.setattr(sys, "argv", ["private_training", *base])
    script.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert 0 <= row["accuracy"] <= 1 and (row["lever"], row["seed"], row["epsilon"]) == ("as it is", 0, 8.0)
    monkeypatch.setattr(script, "run", lambda *_: pytest.fail("run again"))
    script.main()
    assert f"accuracy {row['accuracy']:.3f}" in capsys.readouterr().out
