"""The configuration on a server's page, where results or the job leave something out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.pages import Page, said

from tightframe.config.job import JobConfig, Privacy
from tightframe.report.pages.record import UNSET
from tightframe.report.writing import write

EARLIER: dict[str, Any] = {
    **{"trained": False, "reason": "TF-504: aborted", "job_name": "earlier", "method": "fedmr", "rounds": 2},
    **{"rounds_done": 0, "roster": ["site-1"], "synthetic": True, "summation": "plain", "sums": "plain"},
    **{"rules": [], "seconds": 1.0, "job": {"rounds": 2, "method_options": {"mu_inter": 0.5}}},
}


def configured(folder: Path, outcome: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The table and the words of the part."""
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    (table,) = page.tables("Configuration")
    return {row["key"]: row["value"] for row in table}, said(page.section("Configuration"))


def test_what_earlier_results_do_not_have_the_configuration_says(tmp_path: Path) -> None:
    untold = "take where it says nothing, these results do not have"
    found, words = configured(tmp_path, EARLIER)
    assert found == {"rounds": "2", "method_options.mu_inter": "0.5"} and untold in words
    whole = {"rounds": 2, "method_options": {"mu_inter": 0.5, "intra_form": "paper", "lite_m": None}}
    found, words = configured(tmp_path, EARLIER | {"effective": whole})
    assert untold not in words and found == {
        **{"rounds": "2", "method_options.mu_inter": "0.5"},
        **{"method_options.intra_form": "paper", "method_options.lite_m": "not set"},
    }


def test_a_value_without_a_default_is_told_in_words() -> None:
    """Of each value that a job may leave out the page knows what that means."""
    for prefix, model in (("", JobConfig), ("privacy.", Privacy)):
        unset = {f"{prefix}{name}" for name, field in model.model_fields.items() if field.default is None}
        assert {key for key in UNSET if key.startswith(prefix) and ("." in key) == bool(prefix)} == unset


def test_what_statistics_do_not_use_is_not_called_every_value(tmp_path: Path) -> None:
    job = {"rounds": 0, "statistics": {}, "training": {"epochs": 1}, "method": "fedavg", "model": "mlp"}
    found, words = configured(tmp_path, EARLIER | {"job": job})
    assert "training.epochs" not in found and "model" not in found
    assert "but for those of training, method and model, which statistics do not use" in words
