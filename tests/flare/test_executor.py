"""The executor answers whatever happens, and says no more than a code."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from tests.support.made_isic import write_centre

from tightframe import __version__
from tightframe.config.job import parse_job
from tightframe.errors import RunError
from tightframe.files import waits
from tightframe.flare import CODE, MESSAGE, doors, executor
from tightframe.flare.executor import SiloExecutor
from tightframe.flare.simulation.simulator import PREVIOUS_RUN
from tightframe.rounds.context import Message
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import SECURE, Accept
from tightframe.rounds.sums.simulated_identity import simulated_anchor
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe.securesum.messages import Advertisement, Params

JOB_ID = "job"


class _Workspace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_site_config_dir(self) -> str:
        return str(self._folder / "local")

    def get_run_dir(self, job_id: str) -> str:
        return str(self._folder / job_id)

    def get_startup_kit_dir(self) -> str:
        return str(self._folder / "startup")

    def get_app_dir(self, job_id: str) -> str:
        return str(self._folder / job_id / "app")


class _Context(FLContext):
    def __init__(self, folder: Path, site: str, secure: bool | None) -> None:
        super().__init__()
        self._folder, self._site = folder, site
        self.set_prop(FLContextKey.WORKSPACE_ROOT, str(folder), private=True, sticky=True)
        if secure is not None:
            self.set_prop(FLContextKey.SECURE_MODE, secure, private=True, sticky=True)

    def get_engine(self) -> Any:  # the executor asks it for the workspace only
        return self

    def get_workspace(self) -> _Workspace:
        return _Workspace(self._folder)

    def get_identity_name(self, default: str = "") -> str:
        return self._site

    def get_job_id(self, default: Any = None) -> str:
        return JOB_ID


def _run(
    job: dict[str, Any],
    folder: Path,
    message: Any,
    *,
    site: str = "site-1",
    secure: bool | None = False,
    task: str = "enroll",
) -> Shareable:
    request = Shareable()
    request[MESSAGE] = message
    return SiloExecutor(**job).execute(task, request, _Context(folder, site, secure), Signal())


class _FirstRequest:
    """A transport that keeps what the server asks first, and ends the run."""

    def __init__(self) -> None:
        self.requests: dict[str, Message] = {}

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        assert task == "enroll"
        self.requests.update(requests)
        raise RunError("seen enough", code="TF-504")


def _hello(job: dict[str, Any], folder: Path) -> Message:
    """What the server asks site-1 at enrolment."""
    identity = ServerIdentity(JOB_ID, simulated_anchor(JOB_ID, production=False), simulated=True)
    first = _FirstRequest()
    with pytest.raises(RunError, match="seen enough"):
        Coordinator(prepare(job), folder / "server", identity=identity).run(first)
    return first.requests["site-1"]


def _declared(reply: Shareable, hello: Message) -> dict[str, Any]:
    """What a silo says of itself in its signed advertisement."""
    slots = Params.from_bytes(hello[SECURE]).slots
    said: dict[str, Any] = json.loads(
        Advertisement.from_bytes(reply[MESSAGE][SECURE], slots=slots).application
    )
    return said


@pytest.mark.parametrize(("site", "told"), [("site-1", False), ("site-9", True)])
def test_a_site_that_the_job_is_not_for_says_so_when_it_starts(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, site: str, told: bool
) -> None:
    """It is asked for nothing, so that no task would."""
    for event in (EventType.ABOUT_TO_START_RUN, EventType.START_RUN, EventType.END_RUN):
        SiloExecutor(**small).handle_event(event, _Context(tmp_path, site, True))
    assert (
        caplog.text.count("TF-101") == caplog.text.count("site-9, which is not among the job's sites") == told
    )


@pytest.mark.parametrize("summation", ["plain", "secure"])
def test_enrolment_answers_the_declaration_and_nothing_more(
    small: dict[str, Any], tmp_path: Path, summation: str
) -> None:
    job = small | {"summation": summation}
    hello = _hello(job, tmp_path)
    reply = _run(job, tmp_path, hello)
    assert reply.get_return_code() == ReturnCode.OK
    if summation == "plain":
        assert set(reply[MESSAGE]) == {"declaration"}
        said = json.loads(reply[MESSAGE]["declaration"])
    else:
        assert set(reply[MESSAGE]) == {SECURE}
        said = _declared(reply, hello)
    assert said == {
        "weight": 290.0,
        "synthetic": True,
        "profile": "research",
        "min_class_count": 1,
        "any_static_cohort": False,
        "untold": [],
    }


@pytest.mark.parametrize("secure", [True, None], ids=["secure", "unknown"])
def test_production_never_gets_the_twin(small: dict[str, Any], tmp_path: Path, secure: bool | None) -> None:
    reply = _run(small, tmp_path, _hello(small, tmp_path), secure=secure)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION and reply[CODE] == "TF-201"
    assert MESSAGE not in reply


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"job": {"bogus": 1}}, "TF-101"),
        ({"site": "stranger"}, "TF-101"),
        ({"message": {"job_sha256": "other", "version": __version__}}, "TF-505"),
        ({"message": None}, "TF-604"),
        ({"changed": {SECURE: None}}, "TF-604"),
        ({"changed": {SECURE: b"\x00"}}, "TF-604"),
        ({"task": "unknown"}, "TF-505"),
    ],
)
def test_every_failure_is_an_answer_with_a_code(
    small: dict[str, Any], tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    hello = _hello(small, tmp_path) | changes.get("changed", {})
    reply = _run(
        small | changes.get("job", {}),
        tmp_path,
        changes.get("message", hello),
        site=changes.get("site", "site-1"),
        task=changes.get("task", "enroll"),
    )
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reply[CODE] == code
    assert MESSAGE not in reply


def test_what_a_failing_silo_says_is_in_no_part_of_its_answer(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tightframe.data.isic.twin import TwinData

    def broken(*_: Any) -> None:
        raise OSError("/hospital/patient-4711.jpg is gone")

    monkeypatch.setattr(TwinData, "check", broken)
    reply = _run(small, tmp_path, _hello(small, tmp_path))
    assert reply[CODE] == "TF-503"
    assert "4711" not in repr(dict(reply))
    assert "4711" in caplog.text, "the silo's own log has it"


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """A production site with records and a state folder, but without a startup kit."""
    records = tmp_path / "records"
    write_centre(records, 40, 50)
    local = tmp_path / "local"
    local.mkdir()
    data = {"fed_isic2019": {"root": str(records), "center": 3}}
    (local / "tightframe.json").write_text(
        json.dumps(
            {
                "state_dir": str(tmp_path / "state"),
                "device": "cpu",
                "data": data,
                "policy": {"egress_guard": False, "signed_jobs": False},
            }
        )
    )
    (local / "resources.json").write_text(json.dumps({"allow_log_streaming": False}))
    (tmp_path / "startup").mkdir()
    return tmp_path


@pytest.mark.parametrize("secure", [True, None], ids=["secure", "unknown"])
def test_production_without_a_kit_says_so_and_never_simulates(
    small: dict[str, Any],
    hospital: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    secure: bool | None,
) -> None:
    small |= {"update_norm": 100.0}  # as the policy of production asks
    hello = _hello(small, hospital)

    def simulated(*_: Any, **__: Any) -> Any:
        raise AssertionError("a simulated identity was asked for")

    monkeypatch.setattr(executor, "simulated_identity", simulated)
    monkeypatch.setattr(doors, "require", lambda _: None)  # tests/flare/test_doors.py
    limited: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: limited.append((what, limits[0])))
    with caplog.at_level(logging.INFO):
        reply = _run(small, hospital, hello, secure=secure)
    assert limited == [(resource.RLIMIT_CORE, 0)], "what dies leaves none of its memory on a disk"
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reply[CODE] == "TF-615" and MESSAGE not in reply
    assert "checking every record" not in caplog.text, "the ledger comes first, and needs the key"
    assert str(hospital / "startup" / "fed_client.json") in caplog.text
    assert not list((hospital / "state").rglob("ledger.sqlite")), "nothing was advertised"


@pytest.mark.parametrize(("secure", "waited"), [(True, True), (None, True), (False, False)])
def test_production_waits_for_the_disk(
    small: dict[str, Any],
    hospital: Path,
    monkeypatch: pytest.MonkeyPatch,
    secure: bool | None,
    waited: bool,
) -> None:
    """Before a term leaves, its charge is on the disk."""
    asked: list[bool] = []
    monkeypatch.setattr(doors, "require", lambda _: None)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(SiloSession, "handle", lambda *_: asked.append(waits()) or {})
    if secure is False:
        path = hospital / "local" / "tightframe.json"
        path.write_text(json.dumps({"sites": {"site-1": json.loads(path.read_text())}}))
    small |= {"update_norm": 100.0}
    _run(small, hospital, {}, secure=secure)
    assert asked == [waited] and waits()


def test_in_production_nothing_is_answered_without_the_guard_that_the_policy_wants(
    small: dict[str, Any], hospital: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As above, but for the rule that lets this site do without it."""
    path = hospital / "local" / "tightframe.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "policy": {}}))
    reply = _run(small, hospital, _hello(small, hospital), secure=True)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reply[CODE] == "TF-202" and MESSAGE not in reply
    assert "Expected the egress guard" in caplog.text and "checking every record" not in caplog.text


def test_the_same_site_enrols_in_a_simulation(small: dict[str, Any], hospital: Path) -> None:
    """So that the refusal above is about the kit, and about nothing else."""
    entry = json.loads((hospital / "local" / "tightframe.json").read_text())
    (hospital / "local" / "tightframe.json").write_text(json.dumps({"sites": {"site-1": entry}}))
    hello = _hello(small, hospital)
    reply = _run(small, hospital, hello, secure=False)
    assert reply.get_return_code() == ReturnCode.OK
    said = _declared(reply, hello)
    assert said["synthetic"] is False and said["min_class_count"] == 5


def test_where_a_silos_state_of_the_job_before_lies(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In production under the site's own folder, whatever the environment says."""
    resume = {"lineage": "first", "previous": "second", "after_round": 1, "checkpoint_sha256": "0" * 64}
    job, state, old = parse_job(small | {"resume": resume}), tmp_path / "state", tmp_path / "old"
    place = executor._previous_state
    assert place(job, "site-1", None, production=False) is None
    monkeypatch.setenv(PREVIOUS_RUN, str(old))
    found = place(job, "site-1", state, production=True)
    assert found == state / "second" / "site-1" / "silo_state"
    assert place(job, "site-1", None, production=False) == old / "site-1" / "second" / "silo_state"
    assert place(parse_job(small), "site-1", state, production=True) is None, "it begins anew"
