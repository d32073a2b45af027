"""What a silo refuses of a server before it reads a record, plans a sum or changes its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tests.support.runs import FOUR, JOB_ID, contexts, job

from tightframe import __version__
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.errors import ContributionError, DataError, JobError, PolicyError, RunError, SecureSumError
from tightframe.learning.few_records.products import Sizes
from tightframe.rounds.context import NEEDS_STATE
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import contribute
from tightframe.rounds.silo import session as module
from tightframe.rounds.silo.own_state import NeedsStateError
from tightframe.rounds.silo.session import TASKS, SiloSession
from tightframe.rounds.state_files import DECLARATION
from tightframe.rounds.sums.common import SEAL, Peers
from tightframe.rounds.sums.parameters import epoch_params
from tightframe.rounds.sums.secure_silo import SecureSite
from tightframe.securesum.messages import SumId, Total

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
    with pytest.raises(RunError, match=r"^TF-505: "):
        session.handle("enroll", {"job_sha256": of.sha256(), "version": __version__, **other})


def test_a_silo_answers_no_task_but_those_of_its_own_jobs(tmp_path: Path) -> None:
    context = contexts(job(), tmp_path)["site-1"]
    with pytest.raises(RunError, match=r"^TF-505: .*Expected a task"):
        SiloSession(context).handle("erase", {})
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
        with pytest.raises(SecureSumError, match=r"^TF-601: "):
            site.enroll(params.to_bytes(), unexpected, plan)
    site.enroll(honest.to_bytes(), lambda again: declaration(), lambda: setup)
    with pytest.raises(SecureSumError, match=r"^TF-608: "):
        site.enroll(fewer.to_bytes(), unexpected, lambda: setup)


def declaration(weight: float = 7.0) -> Declaration:
    return Declaration(
        weight=weight,
        synthetic=True,
        profile="research",
        min_class_count=1,
        any_static_cohort=False,
        untold=(),
    )


EICU = {
    "dataset": "eicu",
    "dataset_options": {"drugs": 60, "twin_scale": 0.02, "window": "stay"},
    "model": "mlp",
    "model_options": {"widths": [6]},
}
LOOP = {"method": "fedavg", "training": {"learning_rate": 0.1, "loop": "theirs"}}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("changes", [EICU, LOOP], ids=["records", "loop"])
def test_before_every_task_the_site_asks_for_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, changes: dict[str, Any]
) -> None:
    """A server that skips enrolment gets no further."""
    monkeypatch.setattr(module.requests, "check", unexpected)
    of = job(**changes)
    entry = SiteEntry(policy=PolicyBlock(class_rules_off=False))
    context = replace(contexts(job(), tmp_path)["site-1"], job=of, entry=entry)
    with pytest.raises(PolicyError, match=r"^TF-614: "):
        SiloSession(context).handle(task, {})


@pytest.mark.parametrize("task", ["enroll", "contribute"])
def test_a_malformed_request_is_refused_before_anything_is_done(tmp_path: Path, task: str) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    session._training = session._check_job = unexpected  # type: ignore[method-assign,assignment]
    with pytest.raises(RunError, match=r"^TF-604: .*Field required"):
        session.handle(task, {})


def test_a_process_plans_a_job_once(tmp_path: Path) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    assert session._training() is session._training()


def of_spies(session: SiloSession) -> list[str]:
    """Put spies for the secure sums and the training of a session; return what they note."""
    called: list[str] = []

    def secure(name: str) -> Any:
        return lambda *_: called.append(name) or name.encode()

    session._secure = SimpleNamespace(**{task: secure(task) for task in TASKS})  # type: ignore[assignment]
    training = SimpleNamespace(baseline=lambda: {"baseline": True})
    session._training = lambda: called.append("training") or training  # type: ignore[method-assign,func-returns-value]
    return called


def test_a_task_goes_to_its_own_part_and_a_revealed_sum_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    called = of_spies(session)
    monkeypatch.setattr(module.unproven, "publish", lambda context: called.append("published"))
    assert session.handle("baseline", {}) == {"baseline": True}
    for task in ("confirm", "agree", "reveal"):
        assert session.handle(task, {"secure": b""}) == {"secure": task.encode()}
    assert called == ["training", "confirm", "agree", "reveal", "published"]


@pytest.mark.parametrize("task", ["confirm", "agree", "reveal"])
def test_a_plain_sum_has_no_protocol(tmp_path: Path, task: str) -> None:
    session = SiloSession(contexts(job(summation="plain"), tmp_path)["site-1"])
    with pytest.raises(RunError, match=r"^TF-505: .*Expected a task"):
        session.handle(task, {"secure": b""})


@pytest.mark.parametrize("memory_only", [True, False])
def test_what_the_method_sums_is_checked_at_enrolment_where_the_policy_asks_for_it(
    tmp_path: Path, memory_only: bool
) -> None:
    """And only then, or in a process that trains too, does enrolment import torch."""
    given: list[Any] = []
    for profile, planned in (("research", []), ("standard", ["training"])):
        entry = SiteEntry(policy=PolicyBlock(profile=profile, require_secure_sum=True))
        of = job(method="fedavg")
        context = contexts(of, tmp_path / profile, memory_only=memory_only)["site-1"]
        session = SiloSession(replace(context, entry=entry, production=False))
        called = of_spies(session)
        session._secure.enroll = lambda raw, declare, setup: given.append(setup)  # type: ignore[union-attr,method-assign]
        if profile == "standard":
            assert session.context.policy.asks_of_method(of)
        session.handle("enroll", {"job_sha256": of.sha256(), "version": __version__, "secure": b""})
        assert called == planned
        assert (given[-1] is not None) is memory_only


def test_records_are_read_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    folder, read = session.context.state_folder, iter((declaration(1), declaration(2)))
    monkeypatch.setattr(session, "_read_records", lambda: next(read))
    assert session._declare(again=True).weight == 1.0, "nothing is stored yet"
    assert (folder / "run.json").is_file()
    assert session._declare(again=True).weight == 1.0
    (folder / "of the run before").touch()
    assert session._declare(again=False).weight == 2.0
    assert session._declare(again=True).weight == 2.0
    assert not (folder / "of the run before").exists()


def test_a_declaration_comes_after_the_budget_and_the_names_that_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    called: list[str] = []

    def budget() -> Any:
        return SimpleNamespace(check_budget=lambda: called.append("budget"))

    monkeypatch.setattr(session, "_read_records", lambda: called.append("records") or declaration())
    monkeypatch.setattr(session, "_training", budget)
    monkeypatch.setattr(
        module.own_state, "begin", lambda context: context.state_folder.mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr(
        type(session.context), "withdrawn", SimpleNamespace(begin=lambda: called.append("names"))
    )
    cases: tuple[tuple[dict[str, bool], list[str]], ...] = (
        ({}, ["records"]),
        ({"privacy": True}, ["records", "budget"]),
        ({"withdraw": True}, ["names", "records"]),
        ({"withdraw": True, "resume": True}, ["records"]),  # its names are in the state that it continues
    )
    for has, expected in cases:
        called.clear()
        values = {name: has.get(name) for name in ("privacy", "withdraw", "resume")}
        session.context = replace(session.context, job=SimpleNamespace(**values))
        session._declare(again=False)
        assert called == expected


class Clock:
    """Time of which only waiting takes any."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.1, "short enough to see that the run is aborted"
        self.now += seconds


@pytest.mark.parametrize(
    ("task", "grid", "took", "aborted", "left"),
    [
        ("contribute", 4.0, 0.5, None, 4.0),
        ("baseline", 4.0, 4.5, None, 8.0),
        ("contribute", 4.0, 4.0, None, 4.0),
        ("agree", 4.0, 0.5, None, 0.5),
        ("contribute", 0.0, 0.5, None, 0.5),
        ("contribute", 4.0, 0.5, 0.0, 1.0),
        ("contribute", 4.0, 0.5, 1.5, 2.0),
        ("contribute", 4.0, 0.97, 0.0, 1.0),
        ("contribute", 0.25, 0.5, 0.0, 0.5),
    ],
)
def test_an_answer_leaves_at_a_whole_number_of_the_grid(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    grid: float,
    took: float,
    aborted: float | None,
    left: float,
) -> None:
    """At a whole second once the run is aborted, whatever the silo was doing."""
    clock = Clock(100.0)
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    monkeypatch.setattr(module, "time", clock)
    asked: Iterator[None] = iter([None])

    def answer(*_: Any) -> NoReturn:
        next(asked)
        clock.now += took
        raise RunError("of whatever kind", code="TF-503")

    monkeypatch.setattr(session, "_answer", answer)
    session.context = SimpleNamespace(  # type: ignore[assignment]
        answer_grid=grid, stopped=lambda: aborted is not None and clock.now >= 100.0 + aborted
    )
    with pytest.raises(RunError, match="whatever kind"):
        session.handle(task, {})
    assert clock.now == pytest.approx(100.0 + left)


@pytest.mark.parametrize(("device", "chosen"), [("cpu", []), ("auto", []), ("cuda:1", ["cuda:1"])])
def test_only_a_named_gpu_is_looked_for_at_enrolment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[str]
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(contribute, "choose_device", looked.append)
    context = replace(contexts(job(), tmp_path)["site-1"], entry=SiteEntry(device=device))
    SiloSession(context)._read_records()
    assert looked == chosen


def test_records_of_another_form_are_refused_at_enrolment(tmp_path: Path) -> None:
    context = contexts(job(dataset_options={"image_size": 24}), tmp_path)["site-1"]
    with pytest.raises(DataError, match=r"^TF-212: "):
        SiloSession(context)._read_records()


@pytest.mark.parametrize(
    ("text", "withdraws", "said"),
    [
        ("record,train-0\nrecord,test-1\n", False, "2 records that `withdrawn` names"),
        ("record,train-0\n", True, ""),
        ("", False, ""),
        ("something else", False, "TF-214"),
        (None, False, ""),
    ],
)
def test_records_that_a_sites_file_withdraws_and_a_job_uses_are_named_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, withdraws: bool, said: str
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "withdrawn.csv"
    if text is not None:
        path.write_text(text)
    of = job()
    entry = SiteEntry(
        withdrawn={} if text is None else {of.dataset: str(path)},
        policy=PolicyBlock(full_batches=text is None),
    )
    context = replace(contexts(of, tmp_path)["site-1"], entry=entry)
    session = SiloSession(context)
    if withdraws:
        session.context = SimpleNamespace(  # type: ignore[assignment]
            site=entry, job=SimpleNamespace(dataset=of.dataset, withdraw=True), log=context.log
        )
        session._tell_still_there()
    else:
        session._read_records()
        assert ("is drawn anew" in caplog.text) is context.draws_batches
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(said) and all(said in text for text in warned)


def test_a_withdrawal_declares_the_weight_of_the_run_before(tmp_path: Path) -> None:
    """One of its own would tell how many records leave."""
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    previous = tmp_path / "previous"
    previous.mkdir()
    cases = ((None, previous, 2.0), (True, None, 2.0), (True, previous, 7.0))
    for withdraw, folder, weight in cases:
        session.context = SimpleNamespace(  # type: ignore[assignment]
            name="site-1", job=SimpleNamespace(withdraw=withdraw, weights="exact"), previous_state=folder
        )
        if weight == 7.0:
            with pytest.raises(RunError, match=r"^TF-522: "):
                session._weight(2)
            (previous / DECLARATION).write_bytes(declaration(7.0).to_bytes())
        assert session._weight(2) == weight


def test_declared_sizes_are_checked_where_the_site_has_the_rule(tmp_path: Path) -> None:
    for rule, checked in ((0, []), (2, [Sizes(3.0, 1.0)])):
        entry = SiteEntry(policy=PolicyBlock(records_per_feature=rule))
        session = SiloSession(replace(contexts(job(), tmp_path)["site-1"], entry=entry))
        found: list[Sizes] = []
        session._training = lambda to=found: SimpleNamespace(check_sizes=to.append)  # type: ignore[method-assign,misc]
        session._check_sizes(Sizes(3.0, 1.0))
        assert found == checked


def plain(tmp_path: Path, **changes: Any) -> tuple[SiloSession, dict[str, bytes]]:
    """A session of plain sums that has declared 7 records, and the declarations of all."""
    session = SiloSession(contexts(job(summation="plain", weights="exact", **changes), tmp_path)["site-1"])
    session.context.state_folder.mkdir(parents=True)
    write = declaration().to_bytes()
    (session.context.state_folder / DECLARATION).write_bytes(write)
    return session, dict.fromkeys(FOUR, write)


def test_a_plain_sums_weights_are_those_declared_and_capped(tmp_path: Path) -> None:
    session, declared = plain(tmp_path, max_weight_share=0.5)
    assert session._plain_weights(declared | {"site-2": declaration(900.0).to_bytes()}) == {
        "site-1": 7.0,
        "site-2": 21.0,
        "site-3": 7.0,
        "site-4": 7.0,
    }
    mine, strange = declaration(8.0).to_bytes(), declaration().to_bytes()
    for other in (None, [b""], {"site-2": strange}, declared | {"site-1": mine}, declared | {"x": strange}):
        with pytest.raises(RunError, match=r"^TF-505: "):
            session._plain_weights(other)
    with pytest.raises(ContributionError, match=r"^TF-631: "):
        session._plain_weights(declared | {"site-2": declaration(7.5).to_bytes()})


def test_a_request_of_a_plain_sum_is_trained_on_or_asks_for_the_state(tmp_path: Path) -> None:
    session, declared = plain(tmp_path)
    told = Total(0, SumId(1, "train-0", 0), "a schema", tuple(FOUR), {}, bytes(32))
    given: list[Any] = []

    def contribute(message: Any, peers: Peers, *, total: Any) -> Any:
        given.append((total, peers.sizes))
        if total is None:
            raise NeedsStateError
        return SimpleNamespace(term={"x": 1})

    session._training = lambda: SimpleNamespace(contribute=contribute)  # type: ignore[method-assign,assignment,return-value]
    assert session._contribute({"declared": declared, "total": told.to_bytes()}) == {"term": {"x": 1}}
    assert session._contribute({"declared": declared, "total": b""}) == {NEEDS_STATE: True}
    assert given == [(told, Sizes(7.0, 0.0)), (None, Sizes(7.0, 0.0))]


def test_a_seal_is_followed_and_not_trained_on(tmp_path: Path) -> None:
    session = SiloSession(contexts(job(), tmp_path)["site-1"])
    training = SimpleNamespace(seal=lambda *_, **__: "followed", contribute=lambda *_, **__: "trained")
    session._training = lambda: training  # type: ignore[method-assign,assignment,return-value]
    for kind, made in ((SEAL, "followed"), ("train", "trained")):
        term = session._term({"kind": kind})
        assert term(Peers({}, 3, {}, Sizes(1, 0)), total=None, check=unexpected) == made  # type: ignore[comparison-overlap]
