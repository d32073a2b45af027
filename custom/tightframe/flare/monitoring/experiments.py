"""MLflow by the engine's receiver: one run for all silos, named after the job."""

from __future__ import annotations

import os
import re
from typing import Any

# The client would try a dead server for minutes, and the run waits for it.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")

import mlflow
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, TrackConst
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver

from tightframe.errors import SiteConfigError

EXPERIMENT = "tightframe"
_MOST = 500
"""Values of one message; MLflow takes 1000."""
_STRANGE = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in a name."""


class OneRun(MLflowReceiver):
    """The engine's receiver with one run, the server's, in place of one for each silo.

    Args:
        uri: of MLflow's tracking server or folder.
    """

    def __init__(self, uri: str, job_name: str, job_id: str) -> None:
        tags = {"job_name": job_name, "job_id": job_id}
        options = {TrackConst.EXPERIMENT_TAGS: {}, TrackConst.RUN_TAGS: tags, TrackConst.RUN_NAME: job_name}
        super().__init__(tracking_uri=uri, kw_args=options, events=[ANALYTIC_EVENT_TYPE])

    def initialize(self, fl_ctx: FLContext) -> None:
        """Make the run at MLflow."""
        mlflow.set_tracking_uri(self.tracking_uri)
        place = self._get_artifact_location(self.artifact_location, fl_ctx)
        names = [fl_ctx.get_identity_name()]
        self._mlflow_setup(place, EXPERIMENT, {}, names, fl_ctx)
        self._init_buffer(names)

    def buffer_data(self, data: Any, record_origin: str) -> None:
        """Keep a value until the next message, under a name that MLflow takes."""
        data.tag = _STRANGE.sub("_", data.tag)
        super().buffer_data(data, record_origin)
        if any(len(values) >= _MOST for values in self.buffer[record_origin].values()):
            self.flush_buffers(record_origin)

    def flush(self) -> None:
        """Send what is kept."""
        for origin in self.buffer:
            self.flush_buffers(origin)


def started(uri: str, job_name: str, fl_ctx: FLContext) -> OneRun:
    """Return the receiver, started.

    Raises:
        SiteConfigError: TF-202 if MLflow does not take the run.
    """
    if uri.startswith("file:"):  # which MLflow wants to be asked for by name
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    receiver = OneRun(uri, job_name, str(fl_ctx.get_job_id()))
    receiver.handle_event(EventType.START_RUN, fl_ctx)
    if not receiver.run_ids:  # the engine only logs the reason
        raise SiteConfigError(
            f"Expected MLflow at {uri} for server.mlflow to take a run, but it did not: the line before in "
            "this log says why."
        )
    return receiver
