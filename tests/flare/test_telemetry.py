"""TensorBoard events and StatsD datagrams of a run, by the engine's receiver and reporter, read by others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import EventScope, FLContextKey, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.fuel.data_event.data_bus import DataBus
from pydantic import ValidationError
from tests.flare.test_guard import RESEARCH, SECRET, HandMade
from tests.flare.test_monitor import Engine
from tests.support.flare.boards import Daemon, expected_points, listening, read_events
from tests.support.flare.client import Site
from tests.support.results.building import evaluated, row, spent
from tests.support.results.building import status as begun

from tightframe import federation
from tightframe.config.site import ServerEntry, StatsD
from tightframe.data.image_sets import open_silos
from tightframe.errors import RunError, SiteConfigError
from tightframe.flare import MESSAGE, doors
from tightframe.flare.controller import FederationController
from tightframe.flare.monitoring import boards as telemetry
from tightframe.flare.monitoring.boards import Telemetry
from tightframe.results.files import EVENTS
from tightframe.results.rows import Row
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.silo.session import SiloSession

OPTIONS = {"partition": "iid", "silos": 4, "test": "own"}


class Server(Engine):
    """The engine with a workspace; ``controller`` is its only handler."""

    def __init__(self, folder: Path) -> None:
        self.controller = FederationController()
        super().__init__(self.controller)
        self.folder = folder

    def get_workspace(self) -> Any:
        folder = str(self.folder)
        return SimpleNamespace(get_run_dir=lambda job_id: folder, get_site_config_dir=lambda: folder)


@contextmanager
def told(folder: Path, entry: ServerEntry) -> Iterator[tuple[Telemetry, Server]]:
    """The controller's telemetry between a run's start and its end."""
    engine = Server(folder)
    with engine.new_context() as context:
        engine.controller._telemetry = made = Telemetry(engine.controller, entry, "a-job", context)
    try:
        yield made, engine
    finally:
        with engine.new_context() as context:
            engine.controller.stop_controller(context)
            engine.fire_event(EventType.END_RUN, context)
    assert not DataBus().subscribers.get(ReservedTopic.APP_METRICS), "nobody listens after the end"


def simulated(folder: Path, least: int = 3) -> federation.Result:
    return federation.run(
        "fedavg",
        open_silos("digits", **OPTIONS),
        2,
        dataset="digits",
        dataset_options=OPTIONS,
        model_options={"widths": [8, 8]},
        training={"batch_size": 64},
        summation="plain",
        min_sites=least,
        folder=folder,
    )


@contextmanager
def seen(folder: Path) -> Iterator[Daemon]:
    """A real run in this process, told to both; silo-3 fails in round 2."""
    run, handle = Coordinator.run, SiloSession.handle

    def handling(self: SiloSession, task: str, message: Any) -> Any:
        if self.context.name == "silo-3" and (message.get("kind"), message.get("round")) == ("train", 2):
            raise RunError("no power", code="TF-503")
        return handle(self, task, message)

    with listening() as daemon, pytest.MonkeyPatch.context() as patch:
        entry = ServerEntry(
            tensorboard=True, statsd=StatsD(port=daemon.port), mlflow=f"file://{folder}/mlruns"
        )
        with told(folder, entry) as (made, _):

            def running(self: Coordinator, transport: Any) -> Any:
                made.watch(self.record)
                return run(self, transport)

            patch.setattr(Coordinator, "run", running)
            patch.setattr(SiloSession, "handle", handling)
            yield daemon


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Daemon]:
    folder = tmp_path_factory.mktemp("run")
    with seen(folder) as daemon:
        simulated(folder)
    return folder, daemon


def _rows(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_events_are_those_of_the_metrics_file(watched: tuple[Path, Daemon]) -> None:
    folder, _ = watched
    expected = expected_points(_rows(folder))
    found = read_events(folder / EVENTS)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-6, abs=6e-4)  # seconds are rounded in the file
    assert expected["tightframe/silos_dropped", 2] == 1 and ("tightframe/recall/9", 2) in expected
    assert [path.name for path in (folder / EVENTS).iterdir()] == ["server"], "nobody else writes any"


def test_mlflow_has_one_run_with_the_same_points(watched: tuple[Path, Daemon]) -> None:
    """As its own client reads them from its folder."""
    from mlflow.tracking import MlflowClient

    folder, _ = watched
    client = MlflowClient(f"file://{folder}/mlruns")
    (experiment,) = [one for one in client.search_experiments() if one.name == "tightframe"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["job_name"] == "a-job"
    found = {
        (name, point.step): point.value
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    }
    expected = expected_points(_rows(folder))
    assert found == pytest.approx(expected, rel=1e-6, abs=6e-4)


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "http://me:secret@host", "file://host/x", "/x", "http://"])
def test_what_is_no_address_of_mlflow_is_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="Expected"):
        ServerEntry(mlflow=uri)


def test_the_last_gauges_are_where_the_run_ended(watched: tuple[Path, Daemon]) -> None:
    folder, daemon = watched
    rows = _rows(folder)
    last = next(row for row in reversed(rows) if row["balanced_accuracy"] is not None)
    gauges = daemon.gauges()
    recall = {name: value for (measure, name), value in gauges.items() if measure == "tightframe_recall"}
    assert recall == pytest.approx(last["recall"])
    assert {name: value for (name, of_class), value in gauges.items() if of_class is None} == pytest.approx(
        {
            "tightframe_running": 0,
            "tightframe_trained": 1,
            "tightframe_round": 2,
            "tightframe_rounds": 2,
            "tightframe_evaluated_round": 2,
            "tightframe_silos_joined": 4,
            "tightframe_silos_refused": 0,
            "tightframe_silos_lost": 0,
            "tightframe_one_answer": float(last["one_answer"] is not None),
            "tightframe_silos_answered": 4,
            "tightframe_silos_late": 0,
            "tightframe_silos_dropped": 0,
            "tightframe_left_out": 1,
            "tightframe_loss": rows[-2]["training"]["loss"],
            **{f"tightframe_{name}": last[name] for name in ("accuracy", "balanced_accuracy", "auroc")},
            "tightframe_average_precision": last["average_precision"],
            "tightframe_run_seconds": sum(row["seconds"] for row in rows),
            "tightframe_run_bytes_down": sum(row["bytes_down"] for row in rows),
            "tightframe_run_bytes_up": sum(row["bytes_up"] for row in rows),
        },
        abs=3e-3,  # seconds are rounded in the file
    )


def test_the_gauges_followed_the_run(watched: tuple[Path, Daemon]) -> None:
    _, daemon = watched
    course: dict[str, list[float]] = {}
    for name, _, value, tags in daemon.own():
        assert tags.items() >= {"job_id": "the-job", "job_name": "a-job"}.items()
        values = course.setdefault(name, [])
        if not values or values[-1] != value:
            values.append(value)
    assert course["tightframe_running"] == [1, 0] and course["tightframe_round"] == [0, 1, 2]
    assert course["tightframe_silos_dropped"] == [0, 1, 0] and course["tightframe_left_out"] == [0, 1]
    # Each of a sum's terms as it comes.
    assert course["tightframe_silos_answered"] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_no_silo_is_named_anywhere(watched: tuple[Path, Daemon]) -> None:
    folder, daemon = watched
    assert "silo-" not in "".join(daemon.lines)
    assert os.environ["DD_ORIGIN_DETECTION_ENABLED"] == "false", "else each line may name the container"
    for path in (folder / EVENTS).rglob("events.out.*"):
        assert b"silo-" not in path.read_bytes()


def test_a_run_that_stops_is_told_as_stopped(tmp_path: Path) -> None:
    with seen(tmp_path) as daemon, pytest.raises(RunError, match="TF-501"):
        simulated(tmp_path, least=4)
    gauges = daemon.gauges()
    assert gauges["tightframe_running", None] == 0 and gauges["tightframe_trained", None] == 0
    assert gauges["tightframe_silos_dropped", None] == 1
    assert read_events(tmp_path / EVENTS) == pytest.approx(
        expected_points(_rows(tmp_path)), abs=6e-4, rel=1e-6
    )


def record(*rows: Row, epsilon: float | None = None) -> Any:
    """A run's record with the rows that it has come to; the last one tells of epsilon."""
    *before, last = rows
    if epsilon is not None:
        last = last.model_copy(update={"privacy": spent(1, 1, epsilon, a=epsilon - 0.5)})
    return SimpleNamespace(status=begun("job", 3, (8.0, 1e-5)), rows=[*before, last], watcher=None)


def test_noisy_values_have_other_names_and_negative_ones_arrive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = evaluated(noisy=True, balanced_accuracy=0.5, auroc=None, recall={"no disease": 0.25, "b": None})
    first = row(1, "train", ["a"], {"b": "TF-502"}, training={"loss": -0.25}, evaluation=found)
    with listening() as daemon:
        entry = ServerEntry(tensorboard=True, statsd=StatsD(host="localhost", port=daemon.port))
        with told(tmp_path, entry) as (made, _):
            one = record(first, epsilon=4.0)
            made.watch(one)
            one.watcher()
            assert read_events(tmp_path / EVENTS)["tightframe/loss", 1] == -0.25, (
                "on disk while the run goes on"
            )
            one.rows[-1] = one.rows[-1].model_copy(update={"training": {"loss": -0.5}})
            one.watcher()
    assert "agent" not in caplog.text, "the client library looks for one"
    gauges = daemon.gauges()
    assert gauges["tightframe_loss", None] == -0.5, "no difference to the value before"
    assert (
        gauges["tightframe_recall_noisy", "no_disease"] == 0.25 and gauges["tightframe_silos_late", None] == 1
    )
    assert (gauges["tightframe_epsilon", None], gauges["tightframe_epsilon_promised", None]) == (4.0, 8.0)
    names = {name for name, _ in gauges}
    assert "tightframe_balanced_accuracy_noisy" in names and "tightframe_balanced_accuracy" not in names
    assert "3.5" not in "".join(daemon.lines), "a silo's own epsilon"
    points = read_events(tmp_path / EVENTS)
    assert points["tightframe/recall_noisy/no disease", 1] == 0.25 and points["tightframe/epsilon", 1] == 4.0


def test_what_a_silo_fires_is_not_written(tmp_path: Path) -> None:
    """The guard keeps federated events at a site; one that comes all the same finds no receiver."""
    dxo = create_analytic_dxo("of-a-site", 0.5, AnalyticsDataType.SCALAR, global_step=1)
    with told(tmp_path, ServerEntry(tensorboard=True)) as (_, engine):
        for event, scope in ((f"fed.{ANALYTIC_EVENT_TYPE}", EventScope.FEDERATION), ("fed.other", "local")):
            with engine.new_context() as context:
                data = dxo.to_shareable()
                data.set_peer_props({"__identity_name__": "site-1"})
                context.set_prop(FLContextKey.EVENT_DATA, data, private=True, sticky=False)
                context.set_prop(FLContextKey.EVENT_SCOPE, scope, private=True, sticky=False)
                engine.fire_event(event, context)
    assert not list((tmp_path / EVENTS).rglob("events.*"))


def test_nothing_is_written_or_sent_unasked(tmp_path: Path) -> None:
    with told(tmp_path, ServerEntry()) as (made, _):
        one = record(row(1, "train", ["a"], training={"loss": 0.5}))
        made.watch(one)
        one.watcher()
        assert not DataBus().subscribers.get(ReservedTopic.APP_METRICS)
    assert not list(tmp_path.iterdir())


def test_a_board_that_cannot_be_drawn_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with told(tmp_path, ServerEntry(tensorboard=True)) as (made, _):
        one = record(row(1, "train", ["a"]))
        made.watch(one)
        monkeypatch.setattr(telemetry, "send_analytic_dxo", lambda *args: 1 / 0)
        one.watcher()
    assert "the run's telemetry is incomplete" in caplog.text


@pytest.mark.parametrize(
    ("asked", "package"),
    [({"tensorboard": True}, "tensorboard"), ({"statsd": {"port": 1}}, "datadog")],
)
def test_a_missing_package_ends_the_run_before_any_task(
    asked: dict[str, Any],
    package: str,
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or "_receiver" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "nvflare.fuel_opt.statsd.statsd_reporter", raising=False)
    monkeypatch.delitem(sys.modules, "nvflare.app_opt.tracking.tb.tb_event_writer", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "tightframe.json").write_text(json.dumps({"server": asked}))
    monkeypatch.setattr(doors, "require", lambda kind: None)  # this process has no engine above it
    controller = FederationController(**small)
    panics: list[str] = []
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: panics.append(reason))
    with Server(tmp_path).new_context() as context:
        context.set_prop(FLContextKey.SECURE_MODE, True, private=True, sticky=True)
        controller.start_controller(context)
        controller.control_flow(None, context)
    (reason,) = panics
    assert reason.startswith("TF-211") and package in reason and "monitoring" in reason


def test_what_cannot_be_written_or_sent_is_named(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text("in the way")
    context: FLContext
    with Server(tmp_path).new_context() as context:
        for entry, named in (
            (ServerEntry(tensorboard=True), EVENTS),
            (ServerEntry(statsd=StatsD(host="no such host")), "'no such host'"),
            (ServerEntry(mlflow="http://127.0.0.1:9"), "MLflow at http"),
        ):
            with pytest.raises(SiteConfigError, match=f"TF-202.*{named}"):
                Telemetry(FederationController(), entry, "a-job", context)


def test_analytics_events_of_a_silo_stay_there(tmp_path: Path) -> None:
    """What an executor would use to fill the server's TensorBoard itself; without the guard it gets out."""

    def logs(executor: HandMade, context: FLContext) -> Any:
        dxo = create_analytic_dxo("loss", SECRET, AnalyticsDataType.SCALAR, global_step=1)
        send_analytic_dxo(executor, dxo, context, fire_fed_event=True)
        reply = make_reply(ReturnCode.OK)
        reply[MESSAGE] = {}
        return reply

    loose = Site(tmp_path / "loose", "site-1", HandMade(logs), config=RESEARCH, guarded=False)
    loose.answer("baseline", {})
    assert str(SECRET) in repr(loose.other_ways())
    guarded = Site(tmp_path / "guarded", "site-1", HandMade(logs), config=RESEARCH)
    assert guarded.answer("baseline", {}).get_return_code() == ReturnCode.OK
    assert guarded.other_ways() == []
