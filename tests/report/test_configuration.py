"""The configuration on a server's page, where results or the job leave something out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.report.conftest import Page, said, values

from tightframe.config.job import JobConfig, Privacy
from tightframe.report.pages.record import UNSET
from tightframe.report.writing import write

Copied = Callable[[str], Path]


def test_what_earlier_results_do_not_have_the_configuration_says(copied: Copied) -> None:
    folder = copied("server")
    outcome = values(folder / "outcome.json")
    del outcome["effective"]
    (folder / "outcome.json").write_text(json.dumps(outcome))
    write(folder)
    page = Page.of(folder)
    (table,) = page.tables("Configuration")
    assert "method_options.intra_form" not in {row["key"] for row in table}
    assert "take where it says nothing, these results do not tell" in said(page.section("Configuration"))


def test_a_value_without_a_default_is_told_in_words() -> None:
    """Of each value that a job may leave out the page knows what that means."""
    for prefix, model in (("", JobConfig), ("privacy.", Privacy)):
        unset = {f"{prefix}{name}" for name, field in model.model_fields.items() if field.default is None}
        assert {key for key in UNSET if key.startswith(prefix) and ("." in key) == bool(prefix)} == unset
