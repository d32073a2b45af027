"""How long the engine's server waits for clients after a job: by its own job runner, with made clients."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.private.fed.server.job_runner import JobRunner
from tests.support import ROOT

from tightframe.flare.job_ending import WAIT, JobEnding

JOB = "a-job"


class Engine:
    """The parts of the server's engine that are asked; the job runner is the engine's own."""

    def __init__(self, runner: JobRunner | None) -> None:
        self.runner = runner
        self.clients = {name: SimpleNamespace(name=name, token=f"first {name}") for name in ("a", "b")}
        started = {client.token: SimpleNamespace(**vars(client)) for client in self.clients.values()}
        self.run_processes: dict[str, Any] = {JOB: {RunProcessKey.PARTICIPANTS: started}}

    def get_component(self, name: str) -> Any:
        assert name == SystemComponents.JOB_RUNNER
        return self.runner

    def get_client_from_name(self, name: str) -> Any:
        return self.clients.get(name)


def told(ending: JobEnding, engine: Engine, event: str) -> None:
    context = FLContext()
    context.get_engine = lambda *_, **__: engine  # type: ignore[method-assign]
    context.set_prop(FLContextKey.EVENT_DATA, {"job_id": JOB}, private=True, sticky=False)
    ending.handle_event(event, context)


@pytest.fixture
def runner(tmp_path: Any) -> JobRunner:
    made = JobRunner(str(tmp_path))
    made._pending_client_outcomes[JOB] = {"a", "b"}
    return made


def test_it_waits_seconds_and_not_a_quarter_of_an_hour(runner: JobRunner) -> None:
    assert runner.client_outcome_wait_timeout == 900, "what the engine does by itself"
    told(JobEnding(), Engine(runner), EventType.SYSTEM_START)
    assert runner.client_outcome_wait_timeout == WAIT <= 20


def test_a_client_that_was_started_anew_is_not_waited_for(runner: JobRunner) -> None:
    """Also after the job's own process has ended at the server, where the engine would call it a failure."""
    engine, ending = Engine(runner), JobEnding()
    told(ending, engine, EventType.JOB_STARTED)
    told(ending, engine, EventType.CLIENT_REGISTER_PROCESSED)
    assert runner.is_client_outcome_pending(JOB, "a") and runner.is_client_outcome_pending(JOB, "b")
    del engine.clients["b"]  # gone, and not back: the wait has its end
    engine.clients["a"] = SimpleNamespace(name="a", token="second a")  # noqa: S106 - made up
    engine.run_processes.clear()
    told(ending, engine, EventType.CLIENT_REGISTER_PROCESSED)
    assert not runner.is_client_outcome_pending(JOB, "a") and runner.is_client_outcome_pending(JOB, "b")


def test_a_job_that_is_over_is_forgotten(runner: JobRunner) -> None:
    engine, ending = Engine(runner), JobEnding()
    told(ending, engine, EventType.JOB_STARTED)
    told(ending, engine, EventType.JOB_COMPLETED)
    engine.clients["a"] = SimpleNamespace(name="a", token="second a")  # noqa: S106 - made up
    told(ending, engine, EventType.CLIENT_REGISTER_PROCESSED)
    assert runner.is_client_outcome_pending(JOB, "a")


def test_in_a_job_s_own_process_it_does_nothing() -> None:
    told(JobEnding(), Engine(None), EventType.SYSTEM_START)


@pytest.mark.parametrize("wait", [0, -1.0, 901, float("nan")])
def test_a_wait_that_makes_no_sense_is_refused(wait: float) -> None:
    with pytest.raises(ValueError, match="Expected wait to be more than 0"):
        JobEnding(wait)


def test_the_server_of_the_guide_has_it() -> None:
    resources = json.loads((ROOT / "provisioning" / "server" / "resources.json").read_text())
    paths = [item["path"] for item in resources["components"]]
    assert f"{JobEnding.__module__}.{JobEnding.__name__}" in paths
