"""What a silo refuses of a server before it reads a record, plans a sum or changes its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.runs import FOUR, JOB_ID, contexts, job

from tightframe import __version__
from tightframe.errors import JobError, RunError, SecureSumError
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.declaration import Declaration
from tightframe.rounds.sums.parameters import epoch_params
from tightframe.rounds.sums.secure_silo import SecureSite

OTHER_JOB, OTHER_VERSION = {"job_sha256": "0" * 64}, {"version": "0.0.1"}


def unexpected(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("the request was not refused at once")


@pytest.mark.parametrize("other", [OTHER_JOB, OTHER_VERSION])
def test_another_job_or_version_is_refused_before_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    of = job(summation="plain")
    session = SiloSession(contexts(of, tmp_path)["site-1"])
    monkeypatch.setattr(session, "_declare", unexpected)
    with pytest.raises(RunError) as caught:
        session.handle("enroll", {"job_sha256": of.sha256(), "version": __version__, **other})
    assert caught.value.code == "TF-505"


def test_a_silo_answers_no_task_but_those_of_its_own_jobs(tmp_path: Path) -> None:
    context = contexts(job(), tmp_path)["site-1"]
    with pytest.raises(RunError, match="Expected a task") as caught:
        SiloSession(context).handle("erase", {})
    assert caught.value.code == "TF-505"
    with pytest.raises(JobError, match="this silo is site-9"):
        SiloSession(replace(context, name="site-9"))


def test_parameters_are_refused_before_sums_are_planned_and_these_before_records_are_read(
    tmp_path: Path,
) -> None:
    """The protocol's `advertise` checks the same once more, when records have been read."""
    of = job()
    site, setup = SecureSite(contexts(of, tmp_path)["site-1"]), prepare(of)
    honest = epoch_params(setup, JOB_ID, FOUR, epoch=0, static_open=True)
    fewer = epoch_params(setup, JOB_ID, FOUR[:3], epoch=0, static_open=True)
    other_job, other_sums = replace(honest, config_sha256=bytes(32)), replace(honest, schemas={"seal": ()})
    for params, plan in ((other_job, unexpected), (other_sums, lambda: setup)):
        with pytest.raises(SecureSumError) as caught:
            site.enroll(params.to_bytes(), unexpected, plan)
        assert caught.value.code == "TF-601"
    declared = Declaration(
        weight=1.0, synthetic=True, profile="research", min_class_count=1, any_static_cohort=False, untold=()
    )
    site.enroll(honest.to_bytes(), lambda again: declared, lambda: setup)
    with pytest.raises(SecureSumError) as caught:
        site.enroll(fewer.to_bytes(), unexpected, lambda: setup)
    assert caught.value.code == "TF-608"
