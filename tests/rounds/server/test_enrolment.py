"""Who is left out of an enrolment is named with code and rules: in the reason, the outcome, the status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.pages import Page

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.image_sets import open_silos
from tightframe.errors import RunError
from tightframe.federation import LocalTransport
from tightframe.results.status import Status
from tightframe.rounds.server.coordinator import Coordinator

SILOS = ["silo-0", "silo-1", "silo-2", "silo-3"]
DIVIDED = {"partition": "iid", "silos": 4}
Change = Callable[[str, str, dict[str, Any]], dict[str, Any] | None]


def _job(**changes: Any) -> JobConfig:
    return parse_job(
        {
            "job_name": "enrolled",
            "method": "fedavg",
            "dataset": "digits",
            "dataset_options": DIVIDED,
            "model": "small_cnn",
            "sites": SILOS,
            "min_sites": 3,
            "rounds": 1,
        }
        | changes
    )


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Change], list[Status]]:
    """What happens on the way to a silo (None: it never answers), and the status after each exchange."""
    changes: list[Change] = []
    made: list[Coordinator] = []
    seen: list[Status] = []
    exchange, run = LocalTransport.exchange, Coordinator.run

    def through(self: LocalTransport, task: str, requests: Any, accept: Any) -> Any:
        seen.append(made[0].record.status)
        changed = {site: changes[0](task, site, dict(request)) for site, request in requests.items()}
        found = exchange(self, task, {s: item for s, item in changed.items() if item is not None}, accept)
        seen.append(made[0].record.status)
        return {**found, **{site: "TF-502" for site, item in changed.items() if item is None}}

    def running(self: Coordinator, transport: Any) -> Any:
        made.append(self)
        try:
            return run(self, transport)
        finally:
            seen.append(self.record.status)

    monkeypatch.setattr(LocalTransport, "exchange", through)
    monkeypatch.setattr(Coordinator, "run", running)
    return changes, seen


def _ended(job: JobConfig, folder: Path, **entries: Any) -> tuple[str, dict[str, Any]]:
    """Why the run ended, and its outcome."""
    with pytest.raises(RunError) as caught:
        federation.run_job(job, data=open_silos("digits", **DIVIDED), entries=entries, folder=folder)
    found = json.loads((folder / "server" / "outcome.json").read_text())
    assert found["reason"] == str(caught.value)
    return str(caught.value), found


def test_who_never_answers_is_named_first_where_another_silo_refuses_then(
    tmp_path: Path, line: tuple[list[Change], list[Status]]
) -> None:
    """As of a site that was never provisioned, while another one does not accept the cohort without it."""

    def change(task: str, site: str, request: dict[str, Any]) -> dict[str, Any] | None:
        if site == "silo-3":
            return None
        return {**request, "version": "0"} if len(request["roster"]) == 3 and site == "silo-0" else request

    changes, seen = line
    changes.append(change)
    reason, found = _ended(_job(), tmp_path)
    assert reason == (
        "TF-509: before any training, silo-3 did not answer: TF-502 (late); silo-0 refused: TF-505 (job or "
        "version differs from the server's). The details are in each silo's own log; mend them."
    ), "the job cannot go without both: two would be left, of at least three"
    assert found["not_enrolled"] == {"silo-0": "TF-505", "silo-3": "TF-502"}
    assert found["not_enrolled_rules"] == {}
    asked, answered, again, refused, last = seen
    assert {item.state for item in seen[:-1]} == {"enrolling"}
    assert (asked.waiting, asked.refused) == (tuple(SILOS), {})
    assert (answered.waiting, answered.refused) == (("silo-3",), {})
    assert (again.waiting, again.refused) == (tuple(SILOS[:3]), {"silo-3": "TF-502"})
    assert (refused.waiting, refused.refused) == ((), found["not_enrolled"])
    assert (last.state, last.waiting, last.refused) == ("stopped", (), found["not_enrolled"])


@pytest.mark.usefixtures("pages")
def test_rules_that_a_site_tells_are_in_reason_outcome_and_report(
    tmp_path: Path, line: tuple[list[Change], list[Status]]
) -> None:
    changes, seen = line
    changes.append(lambda task, site, request: None if site == "silo-3" else request)
    strict = SiteEntry(policy=PolicyBlock(require_secure_sum=True))
    quiet = SiteEntry(policy=PolicyBlock(require_secure_sum=True, tell_refusals=False))
    job = _job(summation="plain", min_sites=1)
    reason, found = _ended(job, tmp_path, **{"silo-1": strict, "silo-2": quiet})
    (told,) = found["not_enrolled_rules"]["silo-1"]
    assert told.startswith("require_secure_sum: asked ") and ", required " in told
    assert f"; silo-1 refused: TF-614 (below the site's policy; {told}); " in reason
    assert "; silo-2 refused: TF-614 (below the site's policy). " in reason
    assert reason.endswith("or export the job without those silos."), "one is left, and one is enough"
    assert found["not_enrolled_rules"].keys() == {"silo-1"}
    assert found["not_enrolled"] == {"silo-1": "TF-614", "silo-2": "TF-614", "silo-3": "TF-502"}
    assert seen[1].waiting == ("silo-3",), "who refused is not waited for"
    page = Page.of(tmp_path / "server")
    assert reason in page.text and "silos enrolled" not in page.text
    (table,) = page.tables("Silos")
    assert [(row["silo"], row["code"], row["meaning"]) for row in table] == [
        ("silo-0", "-", "neither refused nor failed to answer"),
        ("silo-1", "TF-614", f"below the site's policy; {told}"),
        ("silo-2", "TF-614", "below the site's policy"),
        ("silo-3", "TF-502", "late"),
    ]


def test_too_few_that_answer_are_on_record_by_name(
    tmp_path: Path, line: tuple[list[Change], list[Status]]
) -> None:
    line[0].append(lambda task, site, request: None if site in SILOS[2:] else request)
    reason, found = _ended(_job(), tmp_path)
    assert reason.startswith("TF-501: too few silos in enrolment") and "silo-3: TF-502" in reason
    assert found["not_enrolled"] == dict.fromkeys(SILOS[2:], "TF-502")
