"""Telemetry of a run: TensorBoard and MLflow by the engine's receivers, StatsD by the engine's reporter.

The server's own ``local/tightframe.json`` turns them on, never a job. All values come from
``flare.monitoring.measures``: totals, and numbers of silos. Silos send nothing for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes
from nvflare.metrics.metrics_publisher import publish_app_metrics

from tightframe.config.site import ServerEntry, StatsD
from tightframe.errors import SiteConfigError
from tightframe.flare.monitoring.measures import PREFIX, Measure, of_rounds, of_run
from tightframe.results.files import EVENTS
from tightframe.rounds.server.record import RunRecord


class Telemetry:
    """Sends one run's measures to TensorBoard, MLflow and StatsD, as the server's configuration asks for.

    Args:
        sender: the controller, which fires the engine's events and hands all of them to ``handle_event``.
        entry: the server's configuration.
        fl_ctx: of the run that is about to start.

    Raises:
        SiteConfigError: TF-211 if a package that it needs is not installed, TF-202 if nothing can be written
            or sent.
    """

    def __init__(self, sender: FLComponent, entry: ServerEntry, job_name: str, fl_ctx: FLContext) -> None:
        self._sender = sender
        self._engine: Any = fl_ctx.get_engine()
        self._log: logging.Logger = sender.logger
        self._tags = {"job_id": str(fl_ctx.get_job_id()), "job_name": job_name}
        self._lock = threading.Lock()
        self._rows = 0
        self._points: dict[tuple[Measure, int], float] = {}
        self._gauges: dict[Measure, float] = {}
        self._receivers: list[Any] = [_events(fl_ctx)] if entry.tensorboard else []
        if entry.mlflow is not None:
            own = "tightframe.flare.monitoring.experiments"
            engine = _installed(own, "mlflow-skinny", key="server.mlflow", extra="mlflow")
            self._receivers.append(engine.started(entry.mlflow, job_name, fl_ctx))
        self._reporter: Any = None if entry.statsd is None else _reporter(entry.statsd)

    def watch(self, record: RunRecord) -> None:
        """Send a run's measures from now on, whenever its status changes."""

        def tell() -> None:
            try:
                self._tell(record)
            except Exception:
                # Training must not end because telemetry fails.
                self._log.exception("the run's telemetry is incomplete")

        record.watcher = tell

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass all events to the engine's receivers: they write their own kind and close at the run's end."""
        for receiver in self._receivers:
            receiver.handle_event(event_type, fl_ctx)

    def end(self) -> None:
        """Unsubscribe the reporter at the run's end."""
        if self._reporter is not None:
            DataBus().unsubscribe(ReservedTopic.APP_METRICS, self._reporter.process_metrics)

    def _tell(self, record: RunRecord) -> None:
        with self._lock:
            rows = list(record.rows)
            opened, self._rows = len(rows) != self._rows, len(rows)
            gauges = of_run(record.status, rows)
            # Datagrams get lost: after each opened sum every gauge is sent again, changed or not.
            changed = {key: value for key, value in gauges.items() if self._gauges.get(key) != value}
            self._gauges = gauges
            self._publish(gauges if opened else changed)
            if self._receivers and opened:
                self._write(of_rounds(rows))

    def _publish(self, gauges: Mapping[Measure, float]) -> None:
        """Put values on the engine's bus, for the reporter set up here or by the server's operator."""
        by_class: dict[str | None, dict[str, float]] = {}
        for (name, of_class), value in gauges.items():
            by_class.setdefault(of_class, {})[name] = value
        for of_class, values in by_class.items():
            tags = self._tags if of_class is None else self._tags | {"class": of_class}
            # StatsD adds a signed gauge to the value before it, so a negative value is sent after a zero.
            _publish({name: 0.0 for name, value in values.items() if value < 0}, tags)
            _publish(values, tags)

    def _write(self, points: Mapping[tuple[Measure, int], float]) -> None:
        """Fire the engine's event for each new point, and flush."""
        for key, value in points.items():
            if self._points.get(key) == value:
                continue
            (name, of_class), number = key
            tag = "/".join([PREFIX, name, *([] if of_class is None else [of_class])])
            dxo = create_analytic_dxo(tag, value, AnalyticsDataType.SCALAR, global_step=number)
            with self._engine.new_context() as fl_ctx:
                send_analytic_dxo(self._sender, dxo, fl_ctx)
        self._points = dict(points)
        for receiver in self._receivers:  # by themselves they wait, and a killed run would lose the points
            for flush in _flushes(receiver):
                flush()


def _publish(values: Mapping[str, float], tags: Mapping[str, str]) -> None:
    if values:
        publish_app_metrics({MetricKeys.type: MetricTypes.GAUGE, **values}, PREFIX, dict(tags), DataBus())


def _flushes(receiver: Any) -> list[Callable[[], None]]:
    """Return what flushes a receiver: ours of MLflow, or the engine's of TensorBoard."""
    if hasattr(receiver, "flush"):
        return [receiver.flush]
    return [writer.flush for writer in receiver.writers_table.values()]


def _events(fl_ctx: FLContext) -> Any:
    """Return the engine's receiver of events, started, without the federated ones that silos could send."""
    engine = _installed("nvflare.app_opt.tracking.tb.tb_receiver", "tensorboard", key="server.tensorboard")
    receiver = engine.TBAnalyticsReceiver(tb_folder=EVENTS, events=[ANALYTIC_EVENT_TYPE])
    receiver.handle_event(EventType.START_RUN, fl_ctx)
    if receiver.root_log_dir is None:  # the engine only logs the reason
        raise SiteConfigError(
            f"Expected to create the folder {EVENTS} beside the results for server.tensorboard, but could "
            "not: the line before in this log says why."
        )
    return receiver


def _reporter(where: StatsD) -> Any:
    """Return the engine's reporter, which listens on the engine's bus from now on."""
    # The client library would add the server's container id to every value, which older exporters refuse.
    os.environ.setdefault("DD_ORIGIN_DETECTION_ENABLED", "false")
    engine = _installed("nvflare.fuel_opt.statsd.statsd_reporter", "datadog", key="server.statsd")
    try:
        socket.getaddrinfo(where.host, where.port, type=socket.SOCK_DGRAM)
    except OSError as error:  # the reporter would drop every datagram silently
        raise SiteConfigError(
            f"Expected server.statsd to name a host that resolves, but got {where.host!r}: {error}. Mend "
            "the name in local/tightframe.json, or this machine's name resolution."
        ) from None
    logging.getLogger("datadog.api").setLevel(logging.ERROR)  # its warnings are about an agent not used here
    return engine.StatsDReporter(site="server", host=where.host, port=where.port)


def _installed(module: str, package: str, *, key: str, extra: str = "monitoring") -> Any:
    """Import a module of the engine that needs a package which the engine does not install.

    Raises:
        SiteConfigError: TF-211 if the package, which the setting ``key`` needs, is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SiteConfigError(
            f"Expected the package {package} to be installed, because {key} needs it, but got: {error}. "
            f"Install tightframe with its extra `{extra}` at the server, or remove the key from "
            "local/tightframe.json.",
            code="TF-211",
        ) from None
