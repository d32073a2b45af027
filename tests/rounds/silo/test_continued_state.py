"""Which files of a silo's own state a continued job begins with, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.runs import contexts, job

from tightframe.errors import RunError
from tightframe.privacy.ledger.entries import LostError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import RESUMED, VERIFIED, WITHDRAWS, Notes, summed_word
from tightframe.rounds.silo import own_state
from tightframe.rounds.silo.own_state import LOST, RUN, TOOK_PART, SiloStateStore, begin
from tightframe.rounds.state_files import (
    BEFORE_REQUEST,
    COMMITTED,
    DECLARATION,
    EARLIER,
    FOLLOWED,
    PROPOSED,
    REHEARSAL,
    SALT,
    START,
    TOLD,
)
from tightframe.rounds.withdrawn_list import LIST, LIST_LOCK, NAMES
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import Advertised, Revealed, SlotUsed, StateMasked, StateSummed

RESUME = {"lineage": "job-a", "previous": "job-b", "after_round": 2, "checkpoint_sha256": "0" * 64}
WITHDRAW = {"lineage": "job-a", "previous": "job-a", "checkpoint_sha256": "0" * 64, "state_sha256": "0" * 64}

ONE_SUM = {
    "method": "fedncm",
    "model": "random_features",
    "model_options": {"width": 4},
    "rounds": 1,
    "weights": "exact",
    "withdraw": WITHDRAW,
}


def context_of(folder: Path, **changes: Any) -> SiloContext:
    return replace(contexts(job(**changes), folder)["site-1"], previous_state=folder / "previous")


def stored(path: Path, sum_id: str | None, value: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.tensor(value)}, path, None if sum_id is None else {"sum_id": sum_id})
    return path


def previous_of(context: SiloContext, **described: Any) -> Path:
    """Leave the state folder of the job before."""
    folder = context.previous_state
    assert folder is not None
    folder.mkdir(parents=True)
    values = {"job_sha256": context.job.origin.sha256(), "lineage": "job-a", **described}
    (folder / RUN).write_text(json.dumps(values))
    return folder


def refused(call: Any, code: str) -> str:
    with pytest.raises(RunError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


def test_a_new_job_begins_with_nothing(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    folder = context.state_folder
    for path in (folder / COMMITTED, folder.with_name(f"{folder.name}.partial") / COMMITTED):
        stored(path, "1/train-0/0")
    begin(context)
    assert [path.name for path in folder.iterdir()] == [RUN] and folder.stat().st_mode & 0o077 == 0
    described = json.loads((folder / RUN).read_text())
    assert described == {"job_sha256": context.job.sha256(), "lineage": context.job_id}
    assert not folder.with_name(f"{folder.name}.partial").exists()


OF_ONE_JOB = (SALT, DECLARATION, FOLLOWED, LIST, LIST_LOCK, TOLD, f"{REHEARSAL}-1", BEFORE_REQUEST)


@pytest.mark.parametrize(
    ("changes", "kept", "noted"),
    [
        ({"resume": RESUME}, {NAMES, START, PROPOSED}, [RESUMED]),
        (
            {"method": "fedncm", "rounds": 1, "withdraw": WITHDRAW, "weights": "exact"},
            set(),
            [WITHDRAWS, RESUMED],
        ),
    ],
    ids=["resume", "withdraw"],
)
@pytest.mark.parametrize("verified", [True, False])
def test_a_continued_job_takes_what_lasts(
    tmp_path: Path, changes: dict[str, Any], kept: set[str], noted: list[str], verified: bool
) -> None:
    """Not the salt: no two jobs repeat a silo's updates bit for bit."""
    context = context_of(tmp_path, **changes)
    folder = previous_of(context)
    for name in (*OF_ONE_JOB, NAMES, START, "noise"):
        (folder / name).touch()
    if verified:
        (folder / VERIFIED).write_text("of before\n")
    stored(folder / PROPOSED, "1/train-0/0")
    stored(folder / COMMITTED, "1/train-0/0")
    begin(context)
    names = {path.name for path in context.state_folder.iterdir()}
    assert names == {RUN, "noise", COMMITTED, *kept, *([VERIFIED] if verified else [])}
    if verified:
        assert (context.state_folder / VERIFIED).read_text().split()[2:] == noted


def test_a_resumed_job_goes_back_to_the_round_of_the_checkpoint(tmp_path: Path) -> None:
    context = context_of(tmp_path, resume={**RESUME, "after_round": 1})
    stored(previous_of(context) / COMMITTED, "2/train-0/0")
    begin(context)
    assert not (context.state_folder / COMMITTED).exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_withdrawal_without_the_state_is_refused(tmp_path: Path, there: bool) -> None:
    context = context_of(tmp_path, **ONE_SUM)
    if there:
        context.previous_state.mkdir()  # type: ignore[union-attr]
    else:
        context = replace(context, previous_state=None)
    refused(lambda: begin(context), "TF-522")


@pytest.mark.parametrize(
    ("summation", "entries", "lost"),
    [
        ("plain", [], b""),
        ("secure", [], TOOK_PART),
        ("secure", "known", None),
        ("secure", "summed", TOOK_PART),
    ],
)
def test_a_resumed_silo_without_its_state_notes_whether_it_took_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summation: str, entries: Any, lost: bytes | None
) -> None:
    known = Advertised("job-b", 0, bytes(32), bytes(32))
    summed = entry(StateSummed, lineage="job-a", basis=bytes([7] * 32), round=1)
    journal = {"known": [known], "summed": [known, summed]}.get(entries if entries else "", [])
    monkeypatch.setattr(own_state, "_journal", lambda context: journal)
    context = context_of(tmp_path, resume=RESUME, summation=summation)
    begin(context)
    path = context.state_folder / LOST
    assert (path.read_bytes() if path.exists() else None) == lost
    notes = context.state_folder / VERIFIED
    words = [bytes([7] * 32).hex()] if entries == "summed" else []
    assert (notes.read_text().split() if notes.exists() else None) == (
        [*words, RESUMED] if summation == "secure" else None
    )


def test_only_a_site_that_never_had_a_ledger_has_no_journal(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    assert own_state._journal(context) == []
    paths = replace(context.earlier_ledger, jobs=tmp_path)
    paths.lock.parent.mkdir(parents=True, exist_ok=True)
    paths.lock.touch()
    lost: Any = SimpleNamespace(earlier_ledger=paths)
    with pytest.raises(LostError):
        own_state._journal(lost)


@pytest.mark.parametrize("key", ["job_sha256", "lineage"])
def test_the_state_of_another_job_is_refused(tmp_path: Path, key: str) -> None:
    context = context_of(tmp_path, resume=RESUME)
    previous_of(context, **{key: "another"})
    assert key in refused(lambda: begin(context), "TF-521")


@pytest.mark.parametrize("raw", ["nonsense", "[]"])
def test_a_folder_that_does_not_say_of_which_job_it_is_is_damaged(tmp_path: Path, raw: str) -> None:
    context = context_of(tmp_path, resume=RESUME)
    (previous_of(context) / RUN).write_text(raw)
    refused(lambda: begin(context), "TF-522")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, None, None), (None, None, None)),
        ((2, 1, 2), (2, 1, 2)),
        ((2, 1, 3), (2, 1, None)),
        ((3, 2, None), (2, None, None)),
        ((3, None, None), (None, None, None)),
        ((1, None, 3), (1, None, None)),
    ],
)
def test_later_states_are_dropped_by_a_rewind_to_round_2(
    tmp_path: Path, before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> None:
    names = (COMMITTED, EARLIER, PROPOSED)
    for name, number in zip(names, before, strict=True):
        if number is not None:
            stored(tmp_path / name, f"{number}/train-0/0")
    own_state._rewind(tmp_path, 2)
    for name, number in zip(names, after, strict=True):
        assert (tmp_path / name).exists() == (number is not None)
        if number is not None:
            assert own_state.proposed_in(tmp_path / name) == f"{number}/train-0/0"


def test_a_rewind_past_the_earliest_state_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / COMMITTED, "4/train-0/0")
    stored(tmp_path / EARLIER, "3/train-0/0")
    assert "resume from a later checkpoint" in refused(lambda: own_state._rewind(tmp_path, 2), "TF-522")


@pytest.mark.parametrize(
    ("first", "second", "earlier"),
    [(None, "1/train-0/0", None), ("1/train-0/0", "2/train-0/0", 1.0), ("2/train-0/0", "2/train-1/0", None)],
)
def test_the_state_of_the_round_before_is_kept(
    tmp_path: Path, first: str | None, second: str, earlier: float | None
) -> None:
    if first is not None:
        stored(tmp_path / COMMITTED, first, 1.0)
    own_state._commit(tmp_path, stored(tmp_path / PROPOSED, second, 2.0))
    assert load_file(tmp_path / COMMITTED)["x"] == 2.0 and not (tmp_path / PROPOSED).exists()
    assert (tmp_path / EARLIER).exists() == (earlier is not None)
    assert earlier is None or load_file(tmp_path / EARLIER)["x"] == earlier


@pytest.mark.parametrize("sum_id", [None, "", "1", "x/train-0/0", "no file"])
def test_a_state_that_names_no_sum_is_damaged(tmp_path: Path, sum_id: str | None) -> None:
    path = tmp_path / PROPOSED
    if sum_id == "no file":
        path.write_bytes(b"nonsense")
    else:
        stored(path, sum_id)
    refused(lambda: own_state.proposed_in(path), "TF-522")


def test_a_damaged_state_is_no_empty_one(tmp_path: Path) -> None:
    store = SiloStateStore(tmp_path, "site-1")
    assert store.committed() == {}
    for name in (COMMITTED, TOLD):
        (tmp_path / name).write_bytes(b"nonsense")
        assert str(tmp_path / name) in refused(store.committed, "TF-522")
    refused(lambda: own_state.confirm_told(tmp_path, "digest"), "TF-522")
    stored(tmp_path / TOLD, None)
    own_state.confirm_told(tmp_path, "digest")  # it counts with no total
    assert (tmp_path / TOLD).exists()


def test_only_a_state_is_proposed_and_none_where_the_one_before_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store, sum_id, state = SiloStateStore(folder, "site-1"), SumId(1, "train-0", 0), {"x": torch.zeros(1)}
    store.propose(sum_id, {})
    assert not folder.exists()
    store.propose(sum_id, state)
    assert folder.stat().st_mode & 0o077 == 0 and own_state.proposed_in(folder / PROPOSED) == "1/train-0/0"
    (folder / LOST).touch()
    store.propose(sum_id, {})
    assert "an empty one would change" in refused(lambda: store.propose(sum_id, state), "TF-522")


def slot(number: int, name: str = "train-0", of: str = "job-b", place: int = 0) -> SlotUsed:
    return SlotUsed(of, 0, place, SumId(number, name), bytes(32), bytes(32))


def entry(kind: type, **values: Any) -> Any:
    """An entry of which only these values are read."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


KNOWN = entry(Advertised, job="job-b")


@pytest.mark.parametrize(
    ("entries", "none"),
    [
        ([], False),
        ([entry(Advertised, job="strange")], False),
        ([entry(SlotUsed, job="job-b", sum_id=SumId(9, "train-0"))], False),
        ([KNOWN], True),
        ([KNOWN, slot(2)], False),
        ([KNOWN, slot(3)], True),
        ([KNOWN, slot(0, "statistics-0")], True),
        ([KNOWN, slot(1, "after-0")], True),
        ([KNOWN, slot(2, of="strange")], True),
        ([KNOWN, entry(StateMasked, lineage="job-a", round=2)], False),
        ([KNOWN, entry(StateSummed, lineage="job-a", round=1)], False),
        ([KNOWN, entry(StateSummed, lineage="strange", round=1)], True),
        ([KNOWN, entry(StateSummed, lineage="job-a", round=3)], True),
    ],
)
def test_a_silo_had_no_part_if_its_journal_knows_the_job_and_no_term(entries: list[Any], none: bool) -> None:
    assert own_state._had_no_part(entries, {"job-a", "job-b"}, "job-a", 2) is none


def test_a_journal_says_which_states_were_summed_and_for_which_sums() -> None:
    def summed(of: str, basis: int) -> Any:
        return entry(StateSummed, lineage=of, basis=bytes([basis]))

    def revealed(place: int) -> Any:
        return entry(Revealed, job="job-b", epoch=0, slot=place)

    journal = [
        slot(1, place=0),
        summed("job-a", 1),
        revealed(0),
        revealed(0),  # a second one follows no state
        summed("strange", 2),
        revealed(0),
        summed("job-a", 3),
        revealed(5),  # of a slot that is not known
    ]
    words = list(own_state._summed(journal, "job-a"))
    assert words == ["01", summed_word("01", SumId(1, "train-0")), "03"]


def test_a_folder_without_a_run_is_no_state(tmp_path: Path) -> None:
    context = context_of(tmp_path, resume=RESUME, summation="plain")
    assert context.previous_state is not None
    stored(context.previous_state / COMMITTED, "1/train-0/0")
    begin(context)
    assert {path.name for path in context.state_folder.iterdir()} == {RUN, LOST}


def proposed(folder: Path, sum_id: str, **described: str) -> SiloStateStore:
    """A secure store with a state proposed for a sum of which this silo gave no shares."""
    folder.mkdir(exist_ok=True)
    metadata = {"sum_id": sum_id, "basis": "0" * 64, "jobs": "0", **described}
    save_file({"x": torch.zeros(1)}, folder / PROPOSED, metadata)
    return SiloStateStore(folder, "site-1", secure=True)


@pytest.mark.parametrize(
    ("cohort", "told", "digest", "counts"),
    [
        (["site-1"], "1/train-0/0", "d", True),
        (["site-2"], "1/train-0/0", "d", False),
        (["site-1"], "2/train-0/0", "d", False),
        (["site-1"], "1/train-0/0", None, False),
    ],
)
def test_a_proposal_counts_with_the_very_total_that_it_is_in(
    tmp_path: Path, cohort: list[str], told: str, digest: str | None, counts: bool
) -> None:
    proposed(tmp_path, "1/train-0/0").settle({"1/train-0/0": cohort}, told, digest)
    assert (tmp_path / TOLD).exists() is counts
    assert not (tmp_path / PROPOSED).exists() and not (tmp_path / COMMITTED).exists()


def test_what_a_seal_proves_commits_the_proposal_of_its_sum_alone(tmp_path: Path) -> None:
    for number, (sum_id, cohort) in enumerate((("2/train-0/0", ["site-1"]), ("1/train-0/0", ["site-2"]))):
        folder = tmp_path / str(number)
        proposed(folder, "1/train-0/0").commit(sum_id, cohort, "d")
        assert {path.name for path in folder.iterdir()} == {PROPOSED}
    proposed(tmp_path / "2", "1/train-0/0").commit("1/train-0/0", ["site-1"], "d")
    assert {path.name for path in (tmp_path / "2").iterdir()} == {TOLD}
    SiloStateStore(tmp_path / "2", "site-1", secure=True).commit("1/train-0/0", ["site-1"], "other")
    assert {path.name for path in (tmp_path / "2").iterdir()} == {TOLD}, "nothing is proposed"


def test_a_state_that_counts_with_no_total_told_is_dropped_even_if_damaged(tmp_path: Path) -> None:
    (tmp_path / TOLD).write_bytes(b"nonsense")
    SiloStateStore(tmp_path, "site-1").settle({})
    assert not (tmp_path / TOLD).exists()


def test_a_proposal_of_a_job_that_the_notes_do_not_know_is_not_committed(tmp_path: Path) -> None:
    for jobs in (len(Notes.read(tmp_path).jobs), 7):
        proposed(tmp_path, "1/train-0/0", jobs=str(jobs)).settle({"1/train-0/0": ["site-1"]})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sum_id", "cohort", "took_part"),
    [
        ("1/train-0/0", ["site-1", "site-2"], True),
        ("1/train-0/0", ["site-2"], False),
        ("0/statistics-0/0", ["site-1"], False),
    ],
)
def test_in_plain_sums_the_first_request_says_who_took_part(
    tmp_path: Path, sum_id: str, cohort: list[str], took_part: bool
) -> None:
    path = tmp_path / LOST
    path.touch()
    store = SiloStateStore(tmp_path, "site-1")
    store.settle({sum_id: cohort})
    assert (path.read_bytes() if path.exists() else None) == (TOOK_PART if took_part else None)
    store.settle({"0/statistics-0/0": ["site-1"]})
    assert path.exists() is took_part, "no later one does"
