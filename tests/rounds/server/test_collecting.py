"""One sum at the server: whom it asks, what it tells each silo, when it asks again, and what it records."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import ContributionError, TooFewError
from tightframe.phases import Field, Phase, Schema, ServerState
from tightframe.results.parts.dropouts import Lost
from tightframe.results.status import Status
from tightframe.results.words import sentence
from tightframe.rounds.context import NEEDS_STATE
from tightframe.rounds.plan import Exchange
from tightframe.rounds.run_state import state_bytes
from tightframe.rounds.server.collecting import Collector, SharedState, enroll
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.sums.common import Accept, Collected, Enrolled, RefusedError

SILOS = ("a", "b", "c", "d")
SCHEMA = Schema((Field("counts", (2,), ring=64, bound=100.0, bits=0, static=True),))
STATE = ServerState({"weight": torch.ones(2)})
SHARED = SharedState(STATE, before="b" * 64)


def unused(*_: Any) -> Any:
    raise AssertionError("Expected no call.")


PHASE = Phase("count", SCHEMA, unused, unused, unused)
Answer = Callable[[Mapping[str, Any]], Any]


def exchange(kind: Any, number: int = 1) -> Exchange:
    return Exchange(kind, number, PHASE)


def job(**changes: Any) -> JobConfig:
    return parse_job(
        {
            "job_name": "exchanges",
            "method": "fedavg",
            "dataset": "digits",
            "dataset_options": {"partition": "iid", "silos": 4},
            "model": "small_cnn",
            "sites": list(SILOS),
            "min_sites": 3,
            "rounds": 3,
        }
        | changes
    )


class Record:
    """What exchanges tell the record of a run."""

    def __init__(self, made: JobConfig) -> None:
        self.job, self.weights = made, dict.fromkeys(SILOS, 1.0)
        self.status = Status(job_name="exchanges", rounds=3)
        self.lost: dict[str, Lost] = {}
        self.refused_rules = {"b": ["a rule"]}
        self.rows: list[tuple[str, int, list[str], dict[str, str]]] = []
        self.heard: list[str] = []
        self.absent: dict[str, str] = {}

    def answered(self, site: str) -> None:
        self.heard.append(site)

    def dropped(self, kind: str, number: int, silos: list[str], failed: Mapping[str, str]) -> None:
        self.rows.append((kind, number, silos, dict(failed)))

    def not_enrolled(self, absent: Mapping[str, str]) -> None:
        self.absent |= absent


class Sums:
    """Sums that hand out what they are told to, one entry an attempt: silos that fail, or too few."""

    def __init__(self, *failing: Mapping[str, str] | TooFewError, shut: Sequence[bool] = ()) -> None:
        self.failing, self.shut = list(failing) or [{}], list(shut)
        self.requests: list[dict[str, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.weights = dict.fromkeys(SILOS, 2.0)
        self.opens = True

    def collect(self, transport: Any, sum_id: Any, schema: Schema, requests: Any, accepted: Any) -> Collected:
        self.asked.append(str(sum_id))
        self.requests.append({site: dict(request) for site, request in requests.items()})
        number = len(self.requests) - 1
        failed = self.failing[min(number, len(self.failing) - 1)]
        if isinstance(failed, TooFewError):
            raise failed
        cohort = sorted(set(requests) - set(failed))
        for site in cohort:
            accepted(site)
        totals = {"counts": np.array([3, 4], np.uint64)} if self.opens else {}
        shut = self.shut[number] if number < len(self.shut) else bool(failed)
        return Collected(cohort, dict(failed), totals, shut, bytes_down=7, bytes_up=9 if cohort else 0)


def made(*failing: Any, shut: Sequence[bool] = (), **changes: Any) -> tuple[Collector, Sums, Record]:
    sums, record = Sums(*failing, shut=shut), Record(job(**changes))
    return Collector(record.job, sums, record, logging.getLogger("test")), sums, record  # type: ignore[arg-type]


def too_few(cohort: Sequence[str] = ("a",)) -> TooFewError:
    failed = dict.fromkeys(sorted(set(SILOS) - set(cohort)), "TF-502")
    return TooFewError("too few", cohort, failed)


# What a request says ----------------------------------------------------------------------------


def test_a_request_names_the_sum_and_the_state() -> None:
    collector, sums, record = made()
    row, totals = collector.collect(None, exchange("train", 2), PHASE, SHARED)  # type: ignore[arg-type]
    assert totals["counts"].tolist() == [3, 4]
    for request in sums.requests[0].values():
        assert request == {
            "kind": "train",
            "round": 2,
            "phase": 0,
            "attempt": 0,
            "state": SHARED.sha256,
            "before": "b" * 64,
            "opened": {},
        }
    assert (row.round, row.kind, row.silos, row.dropped) == (2, "train", list(SILOS), {})
    assert (row.bytes_down, row.bytes_up, row.static_opened) == (7, 9, True)
    assert row.seconds >= 0
    assert record.weights == dict.fromkeys(SILOS, 2.0) and record.heard == list(SILOS)
    assert (record.status.state, record.status.round, record.status.phase) == ("summing", 2, 1)


def test_a_pretrained_start_is_sent_until_a_sum_has_been_opened() -> None:
    start = SharedState(STATE, start=b"weights")
    assert start.named() == {"start": b"weights", "state": start.sha256, "before": ""}
    later = start.after(ServerState({"weight": torch.zeros(2)}))
    assert later.named() == {"state": later.sha256, "before": start.sha256}


def test_each_silo_is_told_the_sums_that_it_may_not_know_of() -> None:
    collector, sums, _ = made({}, {"d": "TF-502"}, {})
    for number in (1, 2, 3):
        collector.collect(None, exchange("train", number), PHASE, SHARED)  # type: ignore[arg-type]
    told = {site: list(request["opened"]) for site, request in sums.requests[2].items()}
    first, second = (str(item) for item, _ in collector.opened[:2])
    assert told == {"a": [second], "b": [second], "c": [second], "d": [first, second]}
    assert sums.requests[2]["d"]["opened"][second] == ["a", "b", "c"]


def test_a_sum_of_which_nothing_was_opened_is_not_told() -> None:
    collector, sums, _ = made()
    sums.opens = False
    collector.collect(None, exchange("train"), Phase("none", Schema(()), unused, unused, unused), SHARED)  # type: ignore[arg-type]
    assert collector.opened == []


def test_at_the_closing_silos_learn_who_dropped_out_and_at_no_other() -> None:
    collector, sums, record = made()
    record.lost["d"] = Lost(kind="train", round=1, at="2026-01-01T00:00:00Z", code="TF-502")
    collector.collect(None, exchange("train", 2), PHASE, SHARED)  # type: ignore[arg-type]
    collector.collect(None, exchange("closing", 3), PHASE, SHARED)  # type: ignore[arg-type]
    assert "lost" not in sums.requests[0]["a"]
    assert sums.requests[1]["a"]["lost"] == {"d": record.lost["d"].as_json()}


# Whom it asks -----------------------------------------------------------------------------------


def test_silos_are_drawn_for_a_training_round_only() -> None:
    collector, sums, _ = made(sites_per_round=2, summation="plain", min_sites=2)
    drawn = []
    for number in range(1, 9):
        collector.collect(None, exchange("train", number), PHASE, SHARED)  # type: ignore[arg-type]
        drawn.append(tuple(sums.requests[-1]))
    assert {len(names) for names in drawn} == {2} and len(set(drawn)) > 1
    assert all(list(names) == sorted(names) for names in drawn)
    collector.collect(None, exchange("closing", 3), PHASE, SHARED)  # type: ignore[arg-type]
    assert tuple(sums.requests[-1]) == SILOS


def test_drawn_silos_that_are_not_asked_are_recorded() -> None:
    collector, sums, record = made({}, too_few())
    row, _ = collector.collect(None, exchange("train"), PHASE, SHARED, among=["a", "b", "c"])  # type: ignore[arg-type]
    assert list(sums.requests[0]) == ["a", "b", "c"] and row.dropped == {"d": "TF-511"}
    with pytest.raises(TooFewError):
        collector.collect(None, exchange("train", 2), PHASE, SHARED, among=["a", "b", "c"])  # type: ignore[arg-type]
    # What a silo failed with in the sum counts, whatever was known of it before.
    assert record.rows == [("train", 2, ["a"], {"b": "TF-502", "c": "TF-502", "d": "TF-502"})]


# When it asks again -----------------------------------------------------------------------------


def counts(collector: Collector, kind: str, number: int) -> Any:
    return collector.collect_counts(None, exchange(kind, number), PHASE, SHARED)  # type: ignore[arg-type]


def test_counts_that_stay_shut_are_asked_for_once_more(caplog: pytest.LogCaptureFixture) -> None:
    collector, sums, record = made({"d": "TF-502"}, {})
    row, _ = counts(collector, "before", 0)
    assert len(sums.asked) == 2 and len(set(sums.asked)) == 2
    assert (row.silos, row.static_opened) == (list(SILOS), True)
    assert record.rows == [("before", 0, ["a", "b", "c"], {"d": "TF-502"})]
    assert "before: counts are opened for all silos only, but d" in caplog.text


@pytest.mark.parametrize(
    ("failing", "shut"),
    [({}, [False]), ({}, [True]), ({"d": "TF-502"}, [False])],
    ids=["all", "shut", "open"],
)
def test_they_are_not_if_all_came_or_they_were_opened_without(
    failing: dict[str, str], shut: list[bool]
) -> None:
    collector, sums, record = made(failing, shut=shut)
    counts(collector, "before", 0)
    assert len(sums.asked) == 1 and record.rows == []


def test_after_the_rounds_they_are_asked_for_again_even_by_too_few() -> None:
    collector, sums, record = made(too_few(), {})
    row, totals = counts(collector, "closing", 3)
    assert len(sums.asked) == 2 and row.static_opened and totals["counts"].tolist() == [3, 4]
    # The sum itself has put the first attempt on record; nothing does it twice.
    assert record.rows == [("closing", 3, ["a"], dict.fromkeys("bcd", "TF-502"))]


@pytest.mark.parametrize(("kind", "changes"), [("before", {}), ("closing", {"summation": "plain"})])
def test_too_few_end_it_before_the_first_round_and_in_plain_sums(kind: str, changes: dict[str, str]) -> None:
    collector, sums, _ = made(too_few(), {}, **changes)
    with pytest.raises(TooFewError):
        counts(collector, kind, 0 if kind == "before" else 3)
    assert len(sums.asked) == 1


def lost(kind: str, number: int) -> Lost:
    return Lost(kind=kind, round=number, at="2026-01-01T00:00:00Z", code="TF-502")


@pytest.mark.parametrize(
    ("gone", "kind", "attempts"),
    [
        ({"d": lost("train", 1)}, "closing", 1),
        ({"d": lost("train", 3)}, "closing", 2),  # in the last round: it may be back
        ({"d": lost("closing", 1)}, "closing", 2),
        ({"c": lost("train", 1)}, "closing", 2),  # another one
        ({}, "closing", 2),
        ({"d": lost("train", 1)}, "after", 2),
    ],
    ids=["long gone", "last round", "not in training", "another", "unknown", "not the closing"],
)
def test_nobody_waits_twice_for_silos_that_went_long_before_the_closing(
    gone: dict[str, Lost], kind: str, attempts: int
) -> None:
    collector, sums, record = made({"d": "TF-502"})
    record.lost |= gone
    counts(collector, kind, 3)
    assert len(sums.asked) == attempts


def test_too_few_with_silos_long_gone_end_it_at_the_closing() -> None:
    collector, sums, record = made(too_few(["a", "b", "c"]), {})
    record.lost["d"] = lost("train", 1)
    with pytest.raises(TooFewError):
        counts(collector, "closing", 3)
    assert len(sums.asked) == 1


# Silos that cannot compute the state ------------------------------------------------------------


class Line:
    """A transport to silos that answer as they are told to."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers, self.sent, self.times = answers, list[tuple[str, Mapping[str, Any]]](), 0

    def exchange(self, task: str, requests: Mapping[str, Any], accept: Accept) -> dict[str, str]:
        failed = {}
        self.times += 1
        for site, request in requests.items():
            self.sent.append((site, request))
            answer = self.answers[site](request)
            if isinstance(answer, str):
                failed[site] = answer
                continue
            try:
                accept(site, answer)
            except ContributionError as error:
                failed[site] = error.code
        return failed


def sealed(line: Line, start: bytes | None = None) -> tuple[dict[str, Any], Mapping[str, str]]:
    """What is accepted, and who failed, if all are asked for a seal."""
    collector, sums, _ = made()
    collector.start = lambda: start
    accepted: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def seal(transport: Any, common: Mapping[str, Any], *, last: bool) -> None:
        def accept(site: str, answer: Mapping[str, Any]) -> None:
            if answer.get(NEEDS_STATE):
                raise ContributionError("Expected a term, but the silo asks for the state again.")
            accepted[site] = answer

        requests = {site: {**common, "own": site} for site in line.answers}
        failed.update(transport.exchange("contribute", requests, accept))

    sums.seal = seal  # type: ignore[attr-defined]
    collector.seal(line, SHARED)
    return accepted, failed


def test_a_silo_that_needs_the_state_is_sent_it_with_the_same_request() -> None:
    def asking(request: Mapping[str, Any]) -> Any:
        return {"term": 2} if "state_bytes" in request else {NEEDS_STATE: True}

    line = Line({"a": lambda request: {"term": 1}, "b": asking, "c": lambda request: "TF-502"})
    accepted, failed = sealed(line)
    assert accepted == {"a": {"term": 1}, "b": {"term": 2}} and failed == {"c": "TF-502"}
    common = {"opened": {}, "state": SHARED.sha256, "before": "b" * 64}
    assert line.sent[-1] == ("b", {**common, "own": "b", "state_bytes": state_bytes(STATE)})
    assert [site for site, _ in line.sent] == ["a", "b", "c", "b"]


def test_and_the_pretrained_start_that_it_may_have_missed() -> None:
    line = Line({"b": lambda request: {"term": 1} if "start" in request else {NEEDS_STATE: True}})
    assert sealed(line, start=b"weights")[0] == {"b": {"term": 1}}
    assert line.sent[-1][1]["start"] == b"weights" and "start" not in line.sent[0][1]


def test_silos_that_can_are_asked_once() -> None:
    line = Line({site: lambda request: {"term": 1} for site in SILOS})
    assert set(sealed(line)[0]) == set(SILOS) and line.times == 1


def test_a_second_answer_to_one_request_is_no_other_question_for_the_state() -> None:
    class Twice(Line):
        def exchange(self, task: str, requests: Mapping[str, Any], accept: Accept) -> dict[str, str]:
            super().exchange(task, requests, accept)
            return super().exchange(task, requests, accept)

    accepted, failed = sealed(Twice({"b": lambda request: {NEEDS_STATE: True}}))
    assert accepted == {} and list(failed) == ["b"]
    collector, sums, _ = made()
    sums.seal = lambda transport, common, last: transport.exchange(  # type: ignore[attr-defined]
        "contribute", {"b": {}}, lambda site, answer: got.append(answer)
    )
    got: list[Any] = []
    collector.seal(Twice({"b": lambda request: {NEEDS_STATE: True}}), SHARED)
    assert got == [{NEEDS_STATE: True}] * 3, "all but the first go to who asked"


def test_it_is_sent_once() -> None:
    line = Line({"b": lambda request: {NEEDS_STATE: True}})
    accepted, failed = sealed(line)
    assert accepted == {} and list(failed) == ["b"] and len(line.sent) == 2


def test_only_true_asks_for_it() -> None:
    line = Line({"b": lambda request: {NEEDS_STATE: 1}})
    assert list(sealed(line)[1]) == ["b"] and len(line.sent) == 1


def test_one_that_fails_the_second_time_has_failed() -> None:
    line = Line({"b": lambda request: "TF-502" if "state_bytes" in request else {NEEDS_STATE: True}})
    assert sealed(line) == ({}, {"b": "TF-502"}) and len(line.sent) == 2


# Enrolment --------------------------------------------------------------------------------------


def enrolling(line: Line, end: Exception | None = None, **changes: Any) -> tuple[Record, Any]:
    """Enrol all over a line, and end as told."""
    record, came = Record(job(**changes)), list[str]()

    def ask(transport: Any, request: Mapping[str, Any], roster: Sequence[str]) -> Enrolled:
        transport.exchange("enroll", dict.fromkeys(roster, request), lambda site, answer: came.append(site))
        if end is not None:
            raise end
        return Enrolled({})

    sums: Any = SimpleNamespace(enroll=ask)
    try:
        found: Any = enroll(sums, line, {}, list(line.answers), record)  # type: ignore[arg-type]
    except (RefusedError, TooFewError) as error:
        found = error
    assert came == [site for site, answer in line.answers.items() if answer is joins]
    return record, found


def joins(request: Mapping[str, Any]) -> Any:
    return {}


def late(request: Mapping[str, Any]) -> Any:
    return "TF-502"


def test_an_enrolment_records_who_answers() -> None:
    record, found = enrolling(Line({"a": joins, "b": joins, "c": joins, "d": late}))
    assert found == Enrolled({}) and record.absent == {}
    assert record.status.waiting == () and record.status.refused == {"d": "TF-502"}


def test_too_few_leave_all_that_were_lost_on_record() -> None:
    end = too_few()
    record, found = enrolling(Line({"a": joins, "b": late, "c": late, "d": late}), end)
    assert found is end and record.absent == dict.fromkeys("bcd", "TF-502")


@pytest.mark.parametrize(
    ("silent", "changes", "spare"),
    [
        ((), {"min_sites": 4}, False),
        ((), {"min_sites": 3}, True),
        ((), {"min_sites": 3, "colluders": 2}, False),  # a sum of three would be of one honest silo
        (("c",), {"min_sites": 3}, False),
        ((), {"min_sites": 3, "summation": "plain"}, True),
        (("c", "d"), {"min_sites": 2, "summation": "plain"}, False),
        (("c",), {"min_sites": 2, "summation": "plain"}, True),
    ],
)
def test_a_refusal_names_all_that_are_missing_and_whether_enough_are_left(
    silent: Sequence[str], changes: dict[str, Any], spare: bool
) -> None:
    line = Line({site: late if site in (*silent, "b") else joins for site in SILOS})
    record, found = enrolling(line, RefusedError({"b": "TF-801"}), **changes)
    assert isinstance(found, RefusedError) and found.refused == {"b": "TF-801"}
    assert record.absent == dict.fromkeys(sorted([*silent, "b"]), "TF-502")
    assert ("without those silos" in str(found)) == spare
    assert not silent or f"{sentence(silent)} did not answer" in str(found)
    assert "b did not answer" not in str(found), "it refused"


def test_what_comes_after_the_run_has_ended_is_not_noted() -> None:
    def ending(request: Mapping[str, Any]) -> Any:
        record.status = ended
        return {}

    record, ended = Record(job()), Status(job_name="ended", rounds=3, waiting=("a",))
    sums: Any = SimpleNamespace(
        enroll=lambda transport, request, roster: transport.exchange(
            "enroll", {"a": {}}, lambda site, answer: None
        )
    )
    enroll(sums, Line({"a": ending}), {}, ["a"], record)  # type: ignore[arg-type]
    assert record.status is ended


def test_a_named_start_that_is_not_there_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, weights = tmp_path / "pretrained.safetensors", b"weights"
    job = SimpleNamespace(initial_model_sha256=hashlib.sha256(weights).hexdigest())
    log = logging.getLogger("test")
    server: Any = SimpleNamespace(
        setup=SimpleNamespace(job=job), _initial_model=str(path), _warned=False, log=log
    )
    assert Coordinator._named_start(server) is None
    path.write_bytes(b"others")
    assert Coordinator._named_start(server) is None
    (said,) = caplog.messages
    assert job.initial_model_sha256 in said and str(path) in said and "TF-505" in said
    path.write_bytes(weights)
    assert Coordinator._named_start(server) == weights
