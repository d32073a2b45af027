"""What ``site check --job`` says would leave is what a run's own reports say has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightframe import federation
from tightframe_app.jobs import recipes
from tightframe_app.site.checks.job import terms, would_leave


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"privacy.epsilon": 4},
        {"method": "fedavg", "rounds": 2, "evaluation.models": 2},
        {
            "method": "local_only",
            "rounds": 3,
            "evaluation.models": 2,
            "model_options": {},
            "personalise": True,
        },
    ],
)
def test_it_is_what_leaves_in_the_run(changes: dict[str, Any], tmp_path: Path) -> None:
    job = recipes.get("fedncm_heart").job(
        sites=["a", "b", "c", "d"], changes={"summation": "plain", **changes}
    )
    federation.run_job(job, folder=tmp_path)
    report = json.loads((tmp_path / "a" / "local_report.json").read_bytes())
    kinds = report["disclosed"]["sent"]
    sent = {item["kind"]: (item["times"], item["numbers"], item["terms_with"]) for item in kinds}
    assert terms(job) == sent
    (finding,) = would_leave(job)
    if job.method == "local_only":
        assert "- training rounds, 3 sums: a constant in place of an update (1); " in finding.text
    if job.rounds == 2:  # one model within a round, the last one at the closing
        assert "histograms of scores, by class, in 1 of them (" in finding.text
    noise = "exact" if job.privacy is None else "with noise"
    assert f"terms of sums over 4 sites, as they are, for the server to see, {noise}" in finding.text
