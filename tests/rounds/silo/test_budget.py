"""What a silo refuses to plan or to charge: by the job's promise, the site's policy and its ledger."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tables
from tests.support.ledgers import charges_in
from tests.support.runs import JOB_ID, contexts, job
from tests.support.tables import HEADER, WARD, contract, options, ward_rows, write

from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS
from tightframe.data.table.silo import open_site as open_table
from tightframe.errors import SiteConfigError
from tightframe.files import locked_folder
from tightframe.privacy.accounting import BudgetError
from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import Cap, DataNoted, DatasetError
from tightframe.rounds import site_ledger
from tightframe.rounds.privacy_plan import PrivacyPlan
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.site_ledger.known_records import check_records, fingerprint, note_records

PRIVATE = job(weights="uniform", privacy={"epsilon": 8.0, "noise_multiplier": 3.0, "evaluation": "noisy"})
SMALL, LARGE = Gaussian(6.0), Gaussian(0.6)
"""About epsilon 0.7 and 9 at delta 1e-5."""


def budget(folder: Path, entry: SiteEntry | None = None, **changes: Any) -> Budget:
    context = replace(
        contexts(PRIVATE, folder, entries={"site-1": entry or SiteEntry()})["site-1"], **changes
    )
    return Budget(context, plan(), ("site-1", "site-2"))


def plan() -> PrivacyPlan:
    made = prepare(PRIVATE).privacy
    assert made is not None
    return made


def test_records_are_known_by_their_source_and_labels() -> None:
    def printed(labels: list[int], source: str = "a folder", dataset: str = "digits") -> str:
        folds = {fold: (np.zeros((4, 1)), np.array(labels)) for fold in FOLDS}
        return fingerprint(dataset, ArrayData(folds, source=source, num_classes=2))

    one = printed([0, 1, 0, 1])
    assert one == printed([0, 1, 0, 1])
    others = printed([0, 1, 1, 0]), printed([0, 1, 0, 1], "another"), printed([0, 1, 0, 1], dataset="other")
    assert len({one, *others}) == 4


def test_what_is_planned_stays_within_promise_cap_and_number(tmp_path: Path) -> None:
    site = budget(tmp_path)
    assert site.check_against([], [SMALL])
    with pytest.raises(BudgetError, match=r"epsilon 8 that it promises .* with what is planned"):
        site.check_against([], [LARGE])
    capped = budget(tmp_path, SiteEntry(policy=PolicyBlock(epsilon_cap=0.5)))
    with pytest.raises(BudgetError, match=r"stay within epsilon 0\.5"):
        capped.check_against([], [SMALL])
    planned = plan().number_of_releases
    for most in (planned, planned - 1):
        few = budget(tmp_path, SiteEntry(policy=PolicyBlock(max_releases=most)))
        if most == planned:
            assert few.check_against([], [SMALL])
            continue
        with pytest.raises(BudgetError, match=f"at most {most} releases"):
            few.check_against([], [SMALL])


def test_the_records_of_production_have_a_name(tmp_path: Path) -> None:
    site = budget(tmp_path, production=True)
    for refused in (
        lambda: site.check_against([], [SMALL]),
        lambda: site.check([SMALL]),
        lambda: site.charge("training", [SMALL]),
    ):
        with pytest.raises(SiteConfigError, match="dataset_id"):
            refused()
    assert budget(tmp_path, SiteEntry(dataset_id="ward-7"), production=True).check_against([], [SMALL])


def test_the_cap_is_the_sites_own(tmp_path: Path) -> None:
    policy = PolicyBlock(epsilon_cap=3.0, delta_cap=1e-6, charged_retries=2, max_releases=9)
    assert budget(tmp_path, SiteEntry(policy=policy)).cap == Cap(3.0, 1e-6, 2, 9)
    assert budget(tmp_path).cap.delta == plan().privacy.delta


@pytest.mark.parametrize("task", ["check", "charge"])
def test_the_same_records_have_no_second_budget(tmp_path: Path, task: str) -> None:
    """Whether the server asks for the enrolment or skips it."""
    named = budget(tmp_path, SiteEntry(dataset_id="ward-7"))
    getattr(named, task)(*(["training"] if task == "charge" else []), [SMALL])
    (first, *_) = read_ledger(named.path, check=None).entries
    assert isinstance(first.content, DataNoted) and first.content.dataset_id == "ward-7"
    other = budget(tmp_path, SiteEntry(dataset_id="ward-8"))
    with pytest.raises(DatasetError, match="ward-7"):
        getattr(other, task)(*(["training"] if task == "charge" else []), [SMALL])


def test_nor_under_another_name_of_the_site(tmp_path: Path) -> None:
    """Whoever leads a federation calls a hospital as it likes, and so gave it an empty ledger."""
    records = open_table(tables.site(write(tmp_path / "ward.csv", ward_rows())), options())
    state = tmp_path / "state"
    entry = SiteEntry(dataset_id="ward-7", state_dir=str(state))
    known, other = (
        replace(
            contexts(PRIVATE, tmp_path / name, entries={name: entry})[name],
            records=records,
            production=True,
            ledger_dir=state,
        )
        for name in ("site-1", "site-2")
    )

    def note() -> None:
        with known.site_ledger.open() as ledger:
            note_records(known, ledger)

    with ThreadPoolExecutor() as beside:
        (state / "privacy").mkdir(parents=True, mode=0o700)
        with locked_folder(state / "privacy"):  # as another name's job does, which would not see it yet
            noting = beside.submit(note)
            with pytest.raises(TimeoutError):
                noting.result(0.3)
        noting.result(20)
    for refused in (note_records, lambda context, _: check_records(context, (), None)):
        with other.site_ledger.open() as ledger:
            with pytest.raises(DatasetError, match=r"TF-703: .* those of site-1, .* join as site-1"):
                refused(other, ledger)
            assert not ledger.entries()
    turned = [["q" + row[0], *row[1:]] for row in ward_rows()[::-1]]
    again = open_table(tables.site(write(tmp_path / "copy.csv", turned)), options())
    with other.site_ledger.open() as ledger, pytest.raises(DatasetError, match="columns hold the same"):
        note_records(replace(other, records=again), ledger)
    apart = replace(other, entry=SiteEntry(dataset_id="ward-7", state_dir=str(tmp_path / "another")))
    assert check_records(apart, (), None) == "", "it cannot know of a folder of another site's"


def test_nor_has_the_same_table_under_another_contract_path_or_order(tmp_path: Path) -> None:
    """Title, label and classes are the job's author's; the file's name and its columns' are the site's."""
    rows = ward_rows()
    first = open_table(tables.site(write(tmp_path / "ward.csv", rows)), options())
    budget(tmp_path, SiteEntry(dataset_id="ward-7"), records=first).check([SMALL])
    turned = [row[::-1] for row in rows[::-1]]
    copy = tables.site(
        write(tmp_path / "copy.csv", turned, [*HEADER[:0:-1], "name"], ";"),
        delimiter=";",
        columns={"name": "id"},
    )
    other = contract(
        title="Another study",
        columns=[item for item in WARD["columns"] if item["column"] not in ("sex", "pain")],
        label={"column": "sex", "classes": [{"code": "female"}, {"code": "male"}]},
    )
    renamed = open_table(copy, options(other))
    assert fingerprint("table", first) != fingerprint("table", renamed)
    with pytest.raises(DatasetError, match="ward-7"):
        budget(tmp_path, SiteEntry(dataset_id="study-2"), records=renamed).check([SMALL])
    write(tmp_path / "copy.csv", turned[1:], [*HEADER[:0:-1], "name"], ";")
    fewer = open_table(copy, options(other))
    with pytest.raises(DatasetError, match="ward-7"):
        budget(tmp_path, SiteEntry(dataset_id="study-2"), records=fewer).check([SMALL])
    changed = [[*row[:-1], f"n{row[-1]}"] if place % 3 else row for place, row in enumerate(turned)]
    write(tmp_path / "copy.csv", changed, [*HEADER[:0:-1], "name"], ";")
    most = open_table(copy, options(other))
    with pytest.raises(DatasetError, match=r"'ward-7'.* columns hold the same values"):
        budget(tmp_path, SiteEntry(dataset_id="study-2"), records=most).check([SMALL])
    others = [
        [f"q{n}", str(20 + 37 * n % 70), *row[2:5], f"{50 + 13 * n % 40}.5", row[6]]
        for n, row in enumerate(rows)
    ]
    write(
        tmp_path / "copy.csv", [row[::-1] for row in rows[45:] + others[:45]], [*HEADER[:0:-1], "name"], ";"
    )
    few = open_table(copy, options(other))
    budget(tmp_path, SiteEntry(dataset_id="study-2"), records=few).check([SMALL])  # most records are others
    # Once a version.
    budget(tmp_path, SiteEntry(dataset_id="ward-7"), records=first).charge("training", [SMALL])
    noted = [entry.content for entry in read_ledger(budget(tmp_path).path, check=None).entries]
    assert [item.dataset_id for item in noted if isinstance(item, DataNoted)] == ["ward-7", "study-2"]


def test_an_older_ledger_knows_records_by_their_source_and_labels(tmp_path: Path) -> None:
    records = open_table(tables.site(write(tmp_path / "ward.csv", ward_rows())), options())
    site = budget(tmp_path, SiteEntry(dataset_id="ward-7"), records=records)
    with site._open() as ledger:
        ledger.note_data("ward-7", fingerprint(PRIVATE.dataset, records))
    with pytest.raises(DatasetError, match="ward-7"):
        budget(tmp_path, SiteEntry(dataset_id="study-2"), records=records).check([SMALL])
    site.check([SMALL])
    noted = [entry.content for entry in read_ledger(site.path, check=None).entries]
    assert [item.fingerprint for item in noted if isinstance(item, DataNoted)] == [
        fingerprint(PRIVATE.dataset, records),
        site._context.content.digest,
    ]


def test_what_an_older_ledger_knows_by_whole_rows_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under another name with a column more the records pass, until the first has been used again."""
    first, more = ward_rows(), [[*row, str(place % 7)] for place, row in enumerate(ward_rows())]
    records = open_table(tables.site(write(tmp_path / "ward.csv", first)), options())
    wider = open_table(tables.site(write(tmp_path / "more.csv", more, [*HEADER, "more"])), options())
    known = budget(tmp_path, SiteEntry(dataset_id="ward-7"), records=records)
    with known._open() as ledger:
        ledger.note_data("ward-7", known._context.content.digest, known._context.content.sketch)
    other = budget(tmp_path, SiteEntry(dataset_id="study-2"), records=wider)
    with caplog.at_level("WARNING"):
        other.check([SMALL])
        other.check([SMALL])
    (said,) = [item.message for item in caplog.records if "by whole rows" in item.message]
    assert "records of ward-7" in said
    with pytest.raises(DatasetError, match="study-2"):
        known.check([SMALL])
    new = budget(tmp_path / "new", SiteEntry(dataset_id="ward-7"), records=records)
    new.check([SMALL])
    with pytest.raises(DatasetError, match="ward-7"):
        budget(tmp_path / "new", SiteEntry(dataset_id="study-2"), records=wider).check([SMALL])
    caplog.clear()
    rows = [[f"z{n}", str(20 + 37 * n % 70), *row[2:]] for n, row in enumerate(ward_rows(130)[60:])]
    others = open_table(tables.site(write(tmp_path / "others.csv", rows)), options())
    budget(tmp_path / "new", SiteEntry(dataset_id="study-3"), records=others).check([SMALL])
    assert not [item.message for item in caplog.records if "by whole rows" in item.message]


def test_each_signature_is_verified_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them anew at each charge: a run of gradient steps has hundreds."""
    verified: list[bytes] = []
    check_of = site_ledger.signature_check

    def counting(*given: Any, **named: Any) -> Any:
        check = check_of(*given, **named)
        return lambda *signed: (verified.append(signed[1]), check(*signed))[1]

    monkeypatch.setattr(site_ledger, "signature_check", counting)
    context = budget(tmp_path)._context
    for number in range(3):
        site = Budget(context, plan(), ("site-1", "site-2"))
        site.charge(f"round {number} training", [SMALL])
        site.spent_by_job(prv=False)
    assert len(charges_in(site.path)) == 3
    assert len(verified) == len(set(verified)) > 3


def test_a_charge_beyond_the_promise_or_the_cap_is_not_written(tmp_path: Path) -> None:
    site = budget(tmp_path)
    with pytest.raises(BudgetError, match="promises"):
        site.check([LARGE])
    site.charge("training", [SMALL])
    with pytest.raises(BudgetError, match=r"promises .* with class sums it comes to"):
        site.charge("class sums", [LARGE])
    capped = budget(tmp_path, SiteEntry(policy=PolicyBlock(epsilon_cap=0.8)))
    with pytest.raises(BudgetError, match=r"stay within epsilon 0\.8"):
        capped.charge("training", [SMALL])
    site.charge("training", [SMALL, SMALL])
    assert [(item.purpose, item.attempt, item.event) for item in charges_in(site.path)] == [
        ("training", number, SMALL) for number in range(3)
    ]
    assert {(item.job_id, item.cohort) for item in charges_in(site.path)} == {(JOB_ID, ("site-1", "site-2"))}
    site.charge("class sums", [SMALL])
    assert charges_in(site.path)[-1].attempt == 0, "of its own purpose"
    # Another job's charges change nothing of what this one may plan.
    entries = read_ledger(site.path, check=None).entries
    with pytest.raises(BudgetError, match="promises"):
        budget(tmp_path, job_id="another").check_against(entries, [LARGE])
    # Charged once, a job is held to its promise at each charge, and not as it is planned.
    assert not site.check_against(entries, [LARGE])
