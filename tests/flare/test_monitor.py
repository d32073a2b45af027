"""What the engine's consoles are told, through the engine's own collector, registry and tools."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.private.event import fire_event
from nvflare.private.fed.server.server_commands import AppCommandProcessor, ServerCommands
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.tool.job.job_cli import _build_monitor_key_aliases, _extract_monitor_metrics
from nvflare.widgets.info_collector import InfoCollector
from tests.support.results.building import row, spent
from tests.support.results.building import status as begun

from tightframe.flare.controller import FederationController
from tightframe.flare.monitoring import consoles as monitor
from tightframe.results.status import Status

JOB_ID = "the-job"


class Engine:
    """The engine's own contexts, events and registry, without its network."""

    def __init__(self, *handlers: Any) -> None:
        self.handlers = list(handlers)
        self.contexts = FLContextManager(self, "server", JOB_ID, {}, {})

    def new_context(self) -> FLContext:
        return self.contexts.new_context()

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        fire_event(event_type, self.handlers, fl_ctx)

    def register_app_command(self, topic: str, function: Any, *args: Any, **kwargs: Any) -> None:
        itself: Any = SimpleNamespace(logger=logging.getLogger("tests.engine"))
        ServerEngine.register_app_command(itself, topic, function)


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerCommands, "app_cmd_registry", {})
    monkeypatch.setattr(monitor, "_watched", {})
    monkeypatch.setattr(monitor, "_with_engine", [])


@pytest.fixture
def status() -> Status:
    missing = {"site-2": "TF-502"}
    last = row(2, "train", ["site-1"], missing, training={"loss": 0.7}, privacy=spent(2, 1, 4.0))
    return begun("job", 3, (8.0, 1e-5)).enrolled(["site-1", "site-2"], {}).summed(last)


@pytest.fixture
def collected() -> Iterator[tuple[Engine, InfoCollector, FederationController]]:
    controller, collector = FederationController(), InfoCollector()
    engine = Engine(controller, collector)
    with engine.new_context() as context:
        engine.fire_event(EventType.START_RUN, context)
    yield engine, collector, controller


def test_the_engines_statistics_have_the_runs_group_while_it_runs(
    collected: tuple[Engine, InfoCollector, FederationController], status: Status
) -> None:
    engine, collector, controller = collected
    assert collector.get_run_stats() == {}
    now = [begun("job", 3)]
    monitor.watch(engine, JOB_ID, lambda: now[-1])
    assert collector.get_run_stats()[monitor.GROUP]["state"] == "starting"
    now.append(status)
    found = collector.get_run_stats()
    assert found == {monitor.GROUP: status.as_json()}
    assert json.loads(json.dumps(found)) == found
    with engine.new_context() as context:
        controller.stop_controller(context)
    assert collector.get_run_stats() == {}


def test_job_monitor_finds_round_loss_and_epsilon(
    collected: tuple[Engine, InfoCollector, FederationController], status: Status
) -> None:
    engine, collector, _ = collected
    monitor.watch(engine, JOB_ID, lambda: status.summing("train", 3, 0, 1))
    names = _build_monitor_key_aliases(["epsilon", "epsilon_promised", "balanced_accuracy"])
    found = _extract_monitor_metrics({"server": collector.get_run_stats()}, names)
    assert found == {"round": 3, "loss": 0.7, "epsilon": 4.0, "epsilon_promised": 8.0}


def _command(engine: Engine, data: Any = None) -> Shareable:
    request = Shareable()
    request[ServerCommandKey.TOPIC], request[ServerCommandKey.DATA] = monitor.COMMAND, data
    with engine.new_context() as context:
        assert context.get_prop(ReservedKey.RUN_NUM) == JOB_ID
        reply = AppCommandProcessor().process(request, context)
    assert isinstance(reply, Shareable) and reply.get_return_code() == ReturnCode.OK
    return reply


def test_the_command_answers_the_same_and_a_second_run_in_the_process_takes_over(
    collected: tuple[Engine, InfoCollector, FederationController], status: Status
) -> None:
    engine, _, controller = collected
    monitor.watch(engine, JOB_ID, lambda: status)
    assert _command(engine)[ServerCommandKey.DATA] == status.as_json()
    assert _command(engine, {"site": "site-1"})[ServerCommandKey.DATA] == status.as_json()
    with engine.new_context() as context:
        controller.stop_controller(context)
    assert _command(engine)[ServerCommandKey.DATA] == {}
    monitor.watch(engine, JOB_ID, lambda: begun("again", 1))
    assert _command(engine)[ServerCommandKey.DATA]["job_name"] == "again"


def test_another_collector_than_the_engines_is_named(status: Status) -> None:
    engine = Engine()
    monitor.watch(engine, JOB_ID, lambda: status)
    with engine.new_context() as context:
        context.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, {}, private=True, sticky=False)
        with pytest.raises(TypeError, match="GroupInfoCollector, but got dict"):
            monitor.add_stats(InfoCollector.EVENT_TYPE_GET_STATS, context)
        monitor.add_stats(EventType.START_RUN, context)
