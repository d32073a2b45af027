"""What a site withdraws in several runs: one list, which grows; and what a server may begin with."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS
from tightframe.errors import DataError, RunError
from tightframe.rounds import withdrawn_list
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import Notes
from tightframe.rounds.silo.checks.request_order import check_withdrawal
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.withdrawn_list import LIST, NAMES, note_request

STATE = "a" * 64


def job(**changes: Any) -> JobConfig:
    return parse_job(
        {
            "job_name": "one-sum",
            "method": "fed3r",
            "dataset": "digits",
            "model": "mlp",
            "sites": ["a", "b", "c"],
            "min_sites": 3,
            "rounds": 1,
            "withdraw": {
                "lineage": "first",
                "previous": "first",
                "checkpoint_sha256": "0" * 64,
                "state_sha256": STATE,
            },
            **changes,
        }
    )


class Site:
    """A hospital, whose list outlives its runs."""

    def __init__(self, folder: Path, records: int = 20) -> None:
        self.folder = folder
        self.file = folder / "withdrawn.csv"
        self.file.write_text("")
        labels = np.arange(records) % 2
        self.data = ArrayData(
            {fold: (np.zeros((records, 1)), labels) for fold in FOLDS}, source="arrays", num_classes=2
        )

    def name(self, *places: int) -> None:
        self.file.write_text("".join(f"record,train-{place}\n" for place in places))

    def begin(self, run: str, *, out_of: str, least: int = 1) -> SiloContext:
        """Enrol in a run that withdraws from another one; a fold with fewer records is not counted."""
        policy = PolicyBlock(profile="research", min_test_count=least)
        context = SiloContext(
            "a",
            job(),
            SiteEntry(withdrawn={"digits": str(self.file)}, policy=policy),
            run_dir=self.folder / run,
            previous_state=self.folder / out_of / "silo_state",
            records=self.data,
            journal_dir=self.folder,
        )
        context.state_folder.mkdir(parents=True, exist_ok=True)
        context.withdrawn.begin()
        return context

    def withdraw(self, run: str, *, out_of: str) -> set[str]:
        """Let a run take its records out, and return the names that are out of its total."""
        context = self.begin(run, out_of=out_of)
        note_request(context, ("before", 2), asked=True, proven=True)
        return set(json.loads((context.state_folder / NAMES).read_text())["records"])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_two_runs_lose_the_same_records_and_no_list_differs_by_a_few(site: Site) -> None:
    """The attack: withdraw eight from one run, nine from another of the same records, and subtract."""
    site.name(0, 1)
    assert site.withdraw("one", out_of="first") == {"train-0", "train-1"}
    site.name(0, 1, 2)
    with pytest.raises(RunError, match=r"^TF-524: .*names 1 others"):
        site.begin("two", out_of="other")
    with pytest.raises(RunError, match="TF-524"):
        site.begin("two", out_of="first")
    site.name(0)
    with pytest.raises(RunError, match="1 of those not"):
        site.begin("two", out_of="other")
    site.name(0, 1)
    assert site.withdraw("two", out_of="other") == {"train-0", "train-1"}


def test_the_list_grows_from_a_run_that_has_lost_all_of_it(site: Site) -> None:
    site.name(0, 1)
    site.withdraw("one", out_of="first")
    site.name(5)  # what is out stays out, named again or not
    assert site.withdraw("two", out_of="one") == {"train-0", "train-1", "train-5"}
    site.name(0, 1)
    with pytest.raises(RunError, match="TF-524"):
        site.begin("three", out_of="first")
    site.name(0, 1, 5)
    assert len(site.withdraw("three", out_of="first")) == 3
    assert set(json.loads((site.folder / LIST).read_text())) == {SiteEntry().records_id("digits")}


def test_of_two_runs_that_were_enrolled_together_one_is_noted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run's thread comes while the first has read the list and not yet written it."""
    site.name(0, 1)
    one = site.begin("one", out_of="first")
    site.name(0, 1, 2)
    two = site.begin("two", out_of="other")
    read, refused, beside = withdrawn_list._lists, list[str](), list[threading.Thread]()

    def note() -> None:
        try:
            note_request(two, ("before", 2), asked=True, proven=True)
        except RunError as error:
            refused.append(error.code)

    def slowly(path: Path) -> dict[str, list[str]]:
        found = read(path)
        if not beside:
            beside.append(threading.Thread(target=note))
            beside[0].start()
            beside[0].join(0.2)
        return found

    monkeypatch.setattr(withdrawn_list, "_lists", slowly)
    note_request(one, ("before", 2), asked=True, proven=True)
    beside[0].join()
    assert refused == ["TF-524"]
    assert [len(names) for names in read(site.folder / LIST).values()] == [2]
    with pytest.raises(RunError, match="TF-524"):  # nor are its classes told
        note_request(two, ("before", 1), asked=False, proven=True)


def test_a_withdrawal_that_was_refused_leaves_nothing_on_the_list(site: Site) -> None:
    """Names are noted with the sums, not with the numbers and classes that are asked first."""
    site.name(0)
    context = site.begin("one", out_of="first")
    check_withdrawal(context.job, Notes(), ("before", 0, 0), STATE, None)
    # A server skips it, or sends a state of its own; in a secure sum no term of such a one is opened.
    note_request(context, ("before", 2), asked=False, proven=True)
    for exchange in (("before", 1), ("before", 2)):
        with pytest.raises(RunError, match="TF-523"):
            note_request(context, exchange, asked=True, proven=False)
    note_request(context, ("before", 1), asked=True, proven=True)
    assert not (site.folder / LIST).exists()
    site.name(0, 1)
    assert len(site.withdraw("two", out_of="first")) == 2


def test_a_file_changed_meanwhile_changes_no_run(site: Site) -> None:
    site.name(0, 1)
    context = site.begin("one", out_of="first")
    site.name(2)
    again = SiloContext(
        "a",
        context.job,
        context.entry,
        run_dir=context.run_dir,
        previous_state=context.previous_state,
        records=site.data,
        journal_dir=site.folder,
    )
    assert again.withdrawn.names == {"train-0", "train-1"}
    assert len(again.data.labels("train")) == 18 and len(again.before_withdrawal.data.labels("train")) == 20


def test_a_server_that_begins_with_another_state_is_refused(site: Site) -> None:
    context = site.begin("one", out_of="first")
    with pytest.raises(RunError, match=r"^TF-518: .*another total"):
        check_withdrawal(context.job, Notes(), ("before", 0, 0), "b" * 64, None)


def test_a_silo_does_not_withdraw_all_of_its_records(site: Site) -> None:
    site.name(*range(19))
    with pytest.raises(DataError, match="start a new job without this site"):
        site.begin("one", out_of="first")
    site.name(*range(18))
    assert len(site.begin("two", out_of="first").withdrawn.remaining.labels("train")) == 2


def test_names_that_are_lost_or_damaged_are_neither_guessed_nor_read(site: Site) -> None:
    """Another file's names, or none, would make a difference of a few records."""
    site.name(0, 1)
    resumed = site.begin("one", out_of="first")
    state, resume = resumed.state_folder, {"lineage": "first", "previous": "one", "after_round": 1}
    again = replace(
        resumed, job=job(resume={**resume, "checkpoint_sha256": "0" * 64}), run_dir=state / "again"
    )
    with pytest.raises(RunError, match=r"^TF-522: .*restore it from a backup, or withdraw them anew"):
        _ = again.withdrawn.names
    for damaged in ("{", "{}", "[]", '{"records": 1}', '{"records": ["train-0", 1]}'):
        (state / NAMES).write_text(damaged)
        with pytest.raises(RunError, match=r"^TF-522: .*damaged"):
            _ = replace(resumed).withdrawn.names
    (state / NAMES).unlink()
    for damaged in ("{", "[]", '{"digits": 1}', '{"digits": ["train-0", 1]}'):
        (site.folder / LIST).write_text(damaged)
        with pytest.raises(RunError, match=r"^TF-522: .*damaged"):
            _ = replace(resumed).withdrawn.names


def test_plain_sums_prove_nothing_and_are_withdrawn_from_all_the_same(site: Site) -> None:
    site.name(0, 1)
    context = replace(site.begin("one", out_of="first"), job=job(summation="plain"))
    note_request(context, ("before", 2), asked=True, proven=False)
    assert (site.folder / LIST).is_file()


def test_a_site_asks_for_more_withdrawn_records_than_the_job() -> None:
    for profile, least in (("standard", 10), ("strict", 20), ("research", 1)):
        policy = PolicyBlock.model_validate({"profile": profile}).resolve(production=True)
        assert policy.min_withdrawn == least
    rule = {"profile": "standard", "min_withdrawn": 15}
    policy = PolicyBlock.model_validate(rule).resolve(production=True)
    few = job(update_norm=100.0)
    with pytest.raises(BelowPolicyError, match=r"^TF-614: [\s\S]*min_withdrawn"):
        policy.check(few)
    assert few.withdraw is not None
    more = few.model_copy(update={"withdraw": few.withdraw.model_copy(update={"min_withdrawn": 15})})
    policy.check(more)


@pytest.mark.parametrize(("least", "hidden", "short"), [(1, 2, False), (19, 2, True), (21, 0, False)])
def test_records_that_no_count_contained_hide_nobody(
    least: int, hidden: int, short: bool, site: Site
) -> None:
    """Of 20 test records two are withdrawn: of a fold that was too small before, they do not count."""
    site.file.write_text("record,test-0\nrecord,test-3\n")
    context = site.begin("one", out_of="first", least=least)
    silo = SimpleNamespace(context=context, withhold=frozenset())
    labels, lost = LocalSilo.withdrawn_from(silo, "test")  # type: ignore[arg-type]
    assert (len(labels), lost) == (hidden, short)


def test_records_of_one_patient_count_once_in_a_fold(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten patients with two test records each; both records of one are withdrawn."""
    monkeypatch.setattr(site.data, "groups", lambda fold: np.arange(20) // 2, raising=False)
    assert [site.begin(f"of-{least}", out_of="first", least=least).untold() for least in (10, 11)] == [
        (),
        ("validation", "test"),
    ]
    site.file.write_text("record,test-0\nrecord,test-1\n")
    for least, short in ((1, False), (2, True)):
        context = site.begin(f"out-{least}", out_of="first", least=least)
        silo = SimpleNamespace(context=context, withhold=frozenset())
        labels, lost = LocalSilo.withdrawn_from(silo, "test")  # type: ignore[arg-type]
        assert (len(labels), lost) == (2, short)
