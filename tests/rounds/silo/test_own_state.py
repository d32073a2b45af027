"""A silo's own state through whole runs: committed only when its term was in the opened sum."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from tests.support.memory import write

from tightframe import methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import RunError
from tightframe.federation import LocalTransport
from tightframe.files import append_durably
from tightframe.learning.model_update import initial_model
from tightframe.phases import Cohort, Contribution, Field, Method, Phase, Schema, ServerState
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.notes import RESUMED, VERIFIED, Notes, note_verified
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.own_state import SiloStateStore, begin, confirm_told
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.state_files import TOLD
from tightframe.rounds.sums.simulated_identity import simulated_anchor, simulated_identity
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import (
    Advertised,
    Entry,
    Revealed,
    SlotUsed,
    StateMasked,
    StateSummed,
)


class NoOptions(BaseModel):
    """The counting method has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _contribute(silo: Any, broadcast: Any, state: Any) -> Contribution:
    """Send how often this silo's term was summed so far, by its own account."""
    mine = float(state["summed"]) if state else 0.0
    return Contribution({"summed": torch.tensor(mine)}, {"summed": torch.tensor(mine + 1)})


def _update(state: ServerState, totals: Any, cohort: Cohort) -> ServerState:
    return state.evolve(extra={**state.extra, f"round-{cohort.round}": torch.tensor(float(totals["summed"]))})


COUNTING = Method(
    name="counting",
    title="Counting",
    paper="none: a test of silo state",
    config=NoOptions,
    init_server=lambda setting, seed: ServerState(initial_model(setting, seed)),
    plan=lambda setting, number, rounds: (
        Phase(
            "count",
            Schema((Field("summed", ()),)),
            lambda state: {"nothing": torch.zeros(1)},
            _contribute,
            _update,
        ),
    ),
    predict=lambda model, inputs: model(inputs),
)


class _Loses(LocalTransport):
    """In some rounds one silo's request, or its answer, never arrives; round -> silo."""

    def __init__(
        self,
        sessions: Mapping[str, SiloSession],
        *,
        requests: Mapping[int, str] | None = None,
        answers: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(sessions, logging.getLogger("test"))
        self._requests, self._answers = requests or {}, answers or {}

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Any) -> Mapping[str, str]:
        number = next(iter(requests.values())).get("round", 0) if task == "contribute" else None
        unheard, unanswered = self._requests.get(number), self._answers.get(number)
        kept = {site: request for site, request in requests.items() if site != unheard}

        def maybe(site: str, answer: Message) -> None:
            if site != unanswered:
                accept(site, answer)

        lost = {site: "TF-502" for site in (unheard, unanswered) if site is not None}
        return {**super().exchange(task, kept, maybe), **lost}


def _context(site: str, job: JobConfig, folder: Path, job_id: str = "a-run", **changes: Any) -> SiloContext:
    return SiloContext(
        site,
        job,
        None,
        run_dir=folder / site,
        job_id=job_id,
        identity=partial(simulated_identity, job_id, site, production=False),
        **changes,
    )


def _run(job: JobConfig, folder: Path, transport: _Loses, job_id: str = "a-run") -> list[float]:
    """What the silos said in each round, summed."""
    identity = ServerIdentity(job_id, simulated_anchor(job_id, production=False), simulated=True)
    state = Coordinator(prepare(job), folder / "server", identity=identity).run(transport).state
    return [float(state.extra[f"round-{number}"]) for number in range(1, job.rounds + 1)]


@pytest.fixture
def counting(
    small: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> JobConfig:
    """Four rounds of the counting method; of four silos, three are enough for either kind of sums."""
    monkeypatch.setattr(methods, "METHODS", [*methods.METHODS, COUNTING])
    four = [f"site-{number}" for number in (1, 2, 3, 4)]
    changes = {"method": "counting", "rounds": 4, "sites": four, "min_sites": 3, "summation": request.param}
    return parse_job(small | changes)


BOTH_SUMS = pytest.mark.parametrize("counting", ["plain", "secure"], indirect=True)


@pytest.mark.whole
@BOTH_SUMS
@pytest.mark.parametrize("fresh_processes", [False, True])
def test_state_counts_opened_sums_only(counting: JobConfig, tmp_path: Path, fresh_processes: bool) -> None:
    class Sessions(dict[str, SiloSession]):
        def __missing__(self, site: str) -> SiloSession:
            session = SiloSession(_context(site, counting, tmp_path, memory_only=not fresh_processes))
            if not fresh_processes:
                self[site] = session
            return session

    transport = _Loses(Sessions(), answers={2: "site-1"})
    # Round 1: nobody was summed. 2: the three others once each, site-1's answer is lost.
    # 3: site-1 once (not twice: its proposal of round 2 was dropped), the others twice. 4: 2 + 3 * 3.
    assert _run(counting, tmp_path, transport) == [0.0, 3.0, 7.0, 11.0]


@BOTH_SUMS
def test_a_silo_that_misses_a_request_still_learns_that_it_was_summed(
    counting: JobConfig, tmp_path: Path
) -> None:
    sessions = {site: SiloSession(_context(site, counting, tmp_path)) for site in counting.roster}
    # site-2 was summed in round 1 and hears of it in round 3: 1 + 3 * 2, not 0 + 3 * 2.
    assert _run(counting, tmp_path, _Loses(sessions, requests={2: "site-2"})) == [0.0, 3.0, 7.0, 11.0]


@pytest.mark.whole
@BOTH_SUMS
def test_a_second_run_of_the_same_job_starts_without_state(counting: JobConfig, tmp_path: Path) -> None:
    for run in ("first", "second"):
        sessions = {
            site: SiloSession(
                _context(site, counting, tmp_path, job_id=run, state_dir=tmp_path / "state" / site)
            )
            for site in counting.roster
        }
        assert _run(counting, tmp_path, _Loses(sessions), job_id=run) == [0.0, 4.0, 8.0, 12.0]


def test_silo_state_is_committed_only_when_its_term_was_opened(tmp_path: Path) -> None:
    store = SiloStateStore(tmp_path, "a")
    store.settle({})
    assert store.committed() == {}

    store.propose(SumId(1, "train-0"), {"c": torch.tensor([1.0])})
    assert store.committed() == {}, "a proposal is not a state"
    store.settle({"1/train-0/0": ["a", "b"]})
    assert store.committed()["c"].tolist() == [1.0]

    store.propose(SumId(2, "train-0"), {"c": torch.tensor([2.0])})
    store.settle({"2/train-0/0": ["b"]})
    assert store.committed()["c"].tolist() == [1.0], "opened without this silo: dropped"

    store.propose(SumId(3, "train-0"), {"c": torch.tensor([3.0])})
    store.settle({"2/train-0/0": ["a"]})
    assert store.committed()["c"].tolist() == [1.0], "another sum is no evidence"
    store.settle({"3/train-0/0": ["a"]})
    assert store.committed()["c"].tolist() == [1.0], "what was dropped stays dropped"


def test_in_secure_sums_a_silo_commits_what_it_gave_its_shares_for(tmp_path: Path) -> None:
    store, basis = SiloStateStore(tmp_path, "a", secure=True), "b" * 64
    first, second = SumId(1, "train-0"), SumId(2, "train-0")

    store.propose(first, {"c": torch.tensor([1.0])}, basis)
    note_verified(tmp_path, bytes(32), first)  # of another state: in the job that this one resumes, say
    store.settle({str(first): ["a"]})
    assert store.committed() == {}, "the server's word alone"

    store.propose(first, {"c": torch.tensor([1.0])}, basis)
    one, other = "1" * 64, "2" * 64
    store.settle({str(first): ["a"]}, str(first), one)
    assert store.committed()["c"].tolist() == [1.0], "it is in the total told"
    store.settle({str(first): ["a"]}, str(first), one)
    assert store.committed()["c"].tolist() == [1.0], "which is told again"
    store.settle({}, str(second), other)
    assert store.committed() == {}, "and was not verified before another was told"

    store.propose(first, {"c": torch.tensor([1.0])}, basis)
    store.settle({str(first): ["a"]}, str(first), one)
    confirm_told(tmp_path, one)
    store.propose(second, {"c": torch.tensor([2.0])}, basis)
    note_verified(tmp_path, bytes.fromhex(basis), second)
    store.settle({}, str(second))
    assert store.committed()["c"].tolist() == [1.0], "verified, and the next one is not opened with it"
    store.propose(second, {"c": torch.tensor([2.0])}, basis)
    store.settle({str(second): ["a"]})
    assert store.committed()["c"].tolist() == [2.0]
    third = SumId(3, "train-0")
    store.propose(third, {"c": torch.tensor([3.0])}, basis)
    note_verified(tmp_path, bytes.fromhex(basis), third)
    store.settle({}, str(SumId(4, "train-0")), other)
    assert store.committed()["c"].tolist() == [3.0], "though the server lists no sum"
    assert not (tmp_path / TOLD).exists()


def test_shares_of_the_same_sum_in_another_job_of_the_chain_count_for_its_own_training(
    tmp_path: Path,
) -> None:
    store, basis, first = SiloStateStore(tmp_path, "a", secure=True), "b" * 64, SumId(1, "train-0")
    store.propose(first, {"c": torch.tensor([1.0])}, basis)
    note_verified(tmp_path, bytes.fromhex(basis), first)
    append_durably(tmp_path / VERIFIED, f"{RESUMED}\n".encode())
    store.settle({})
    assert store.committed()["c"].tolist() == [1.0], "trained in the job before, as its shares"
    store.propose(first, {"c": torch.tensor([2.0])}, basis)
    store.settle({str(first): ["a"]})
    assert store.committed()["c"].tolist() == [1.0], "trained again, and in no total"
    store.propose(first, {"c": torch.tensor([2.0])}, basis)
    note_verified(tmp_path, bytes.fromhex(basis), first)
    store.settle({})
    assert store.committed()["c"].tolist() == [2.0]


def test_silo_state_is_private(tmp_path: Path) -> None:
    store = SiloStateStore(tmp_path / "state", "a")
    store.propose(SumId(1, "train-0"), {"c": torch.tensor([1.0])})
    assert (tmp_path / "state" / "proposed.safetensors").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "then", ["another total of that sum", "a seal behind another", "an epoch without one"]
)
def test_a_state_counts_with_one_total_alone_whatever_the_sums_id(tmp_path: Path, then: str) -> None:
    """A sum can be asked for in two slots: its false total is told to this silo, the true one verified."""
    store, first = SiloStateStore(tmp_path, "a", secure=True), "3/train-0/0"
    false, true = "1" * 64, "2" * 64
    store.propose(SumId(3, "train-0"), {"c": torch.tensor([1.0])}, "b" * 64)
    store.settle({first: ["a"]}, first, false)
    assert store.committed()["c"].tolist() == [1.0]
    if then == "another total of that sum":
        store.settle({first: ["b", "c"]}, first, true)
    elif then == "a seal behind another":
        store.commit(first, ["b", "c"], true)
    confirm_told(tmp_path, None if then == "a new epoch" else true)
    store.settle({first: ["a"]})
    assert store.committed() == {}


def test_only_the_total_that_is_verified_makes_its_state_count(tmp_path: Path) -> None:
    store, first = SiloStateStore(tmp_path, "a", secure=True), "3/train-0/0"
    store.propose(SumId(3, "train-0"), {"c": torch.tensor([1.0])}, "b" * 64)
    store.settle({first: ["a"]}, first, "1" * 64)
    confirm_told(tmp_path, "2" * 64)
    assert not (tmp_path / "committed.safetensors").exists()
    confirm_told(tmp_path, "1" * 64)
    assert (tmp_path / "committed.safetensors").exists()


@pytest.mark.parametrize(
    ("told", "cohort", "counts"),
    [("5/closing-0/0", ["a", "b"], True), ("5/closing-0/0", ["b"], False), ("5/closing-0/1", ["a"], False)],
    ids=["in the sum of that term", "in which it is not", "another sum"],
)
def test_a_term_that_trains_nothing_keeps_what_counts_with_the_total_before(
    tmp_path: Path, told: str, cohort: list[str], counts: bool
) -> None:
    """The silo gave its shares of neither sum."""
    store, last = SiloStateStore(tmp_path, "a", secure=True), SumId(5, "train-0")
    store.propose(last, {"c": torch.tensor([1.0])}, "b" * 64)
    store.settle({str(last): ["a"]}, str(last), "1" * 64)
    store.propose(SumId(5, "closing-0"), {}, "c" * 64)
    assert store.committed()["c"].tolist() == [1.0]
    store.settle({told: cohort}, told, "2" * 64)
    assert bool(store.committed()) is counts
    confirm_told(tmp_path, "2" * 64)
    assert (tmp_path / "committed.safetensors").exists() is counts
    store.settle({told: cohort}, told, "3" * 64)
    assert bool(store.committed()) is counts, "another total of that sum changes nothing any more"


KNOWN = Advertised("first", 0, bytes(32), bytes(32))
REVEALED = Revealed("first", 0, 2, ("site-1",), ("update",))


def _masked(sum_id: SumId, job: str = "first") -> SlotUsed:
    return SlotUsed(job, 0, sum_id.round, sum_id, bytes(32), bytes(32))


@pytest.mark.parametrize("said", [{}, {"1/train-0/0": ["a"]}], ids=["had no part", "took part"])
@pytest.mark.parametrize(
    ("entries", "took_part"),
    [
        ([], True),
        ([KNOWN], False),
        ([KNOWN, _masked(SumId(0, "statistics-0"))], False),
        ([KNOWN, _masked(SumId(2, "train-0"))], True),
        ([KNOWN, _masked(SumId(3, "train-0"))], False),
        ([KNOWN, _masked(SumId(2, "train-0"), "another")], False),
        ([KNOWN, StateMasked("first", "between", 2, bytes(32))], True),  # in a job of which it says no more
        ([KNOWN, StateMasked("first", "between", 3, bytes(32))], False),
        ([KNOWN, _masked(SumId(2, "train-1")), StateSummed("first", "first", 2, bytes(32)), REVEALED], True),
        ([KNOWN, StateSummed("another", "another", 2, bytes(32)), REVEALED], False),
        ([_masked(SumId(2, "train-0"), "another")], True),
    ],
)
def test_a_resumed_silo_without_its_state_goes_by_its_journal_whatever_the_server_says(
    small: dict[str, Any],
    tmp_path: Path,
    entries: list[Entry],
    took_part: bool,
    said: dict[str, list[str]],
) -> None:
    resume = {"lineage": "first", "previous": "first", "after_round": 2, "checkpoint_sha256": "0" * 64}
    job = parse_job(small | {"summation": "secure", "rounds": 4, "resume": resume})
    silo = _context("site-1", job, tmp_path, "second", previous_state=tmp_path / "gone", ledger_dir=tmp_path)
    if entries:
        write(silo.site_ledger, entries)
    begin(silo)
    summed = any(isinstance(item, StateSummed) and item.lineage == "first" for item in entries)
    notes, state = Notes.read(silo.state_folder), bytes(32).hex()
    assert (state in notes.words) == summed
    assert notes.sums_on(state) == [SumId(2, "train-1")] * summed
    store = SiloStateStore(silo.state_folder, "site-1", secure=True)
    store.settle(said)
    if took_part:
        with pytest.raises(RunError, match=r"^TF-522: .*it is missing"):
            store.propose(SumId(3, "train-0"), {"c": torch.ones(1)})
    else:
        store.propose(SumId(3, "train-0"), {"c": torch.ones(1)})
