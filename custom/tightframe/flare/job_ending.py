"""Prompt end of a finished job at the server although a silo's client is dead or was restarted.

The engine's server waits up to 15 minutes for a final report from every client at which a job was started.
It marks a job that trained without that client ``FINISHED:ABNORMAL`` as soon as it gives the client up (ten
minutes after its last heartbeat), or as soon as the client is back without the job. How our run ended is in
its outcome, which the controller has written by then, so the clients' reports add nothing.
"""

from __future__ import annotations

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey

WAIT = 15.0
"""Seconds that clients have to end a job after the server has ended it: twice what a slow machine needs."""


class JobEnding(FLComponent):
    """Shortens the engine's wait for clients; a component of the server's ``local/resources.json``.

    Args:
        wait: seconds that clients have to report the end of a job that has ended at the server.
    """

    def __init__(self, wait: float = WAIT) -> None:
        super().__init__()
        if not 0 < wait <= 900:
            raise ValueError(f"Expected wait to be more than 0 and at most 900 seconds, but got {wait}.")
        self._wait = float(wait)
        self._started: dict[str, dict[str, str]] = {}  # job -> client -> its process's token at the start

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Set the engine's wait for clients, and stop waiting for restarted ones."""
        engine = fl_ctx.get_engine()
        runner = None if engine is None else engine.get_component(SystemComponents.JOB_RUNNER)
        if runner is None:
            return  # in a job's process, which loads the same file
        if event_type == EventType.SYSTEM_START:
            runner.client_outcome_wait_timeout = self._wait
        elif event_type == EventType.JOB_STARTED:
            job_id = _job(fl_ctx)
            clients = engine.run_processes.get(job_id, {}).get(RunProcessKey.PARTICIPANTS) or {}
            self._started[job_id] = {client.name: token for token, client in clients.items()}
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self._started.pop(_job(fl_ctx), None)
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._forget_restarted(engine, runner)

    def _forget_restarted(self, engine: Any, runner: Any) -> None:
        """Stop waiting for clients that were restarted: their new process knows nothing of the job."""
        for job_id, tokens in list(self._started.items()):
            for name, token in list(tokens.items()):
                client = engine.get_client_from_name(name)
                if client is not None and client.token != token:
                    del tokens[name]
                    runner.resolve_client_outcome(job_id, name)
                    self.logger.info("%s was restarted; job %s no longer waits for its report", name, job_id)


def _job(fl_ctx: FLContext) -> str:
    """Return the id of the job that an event of the engine's job runner is about; "" for none."""
    data: dict[str, str] = fl_ctx.get_prop(FLContextKey.EVENT_DATA) or {}
    return data.get(JobMetaKey.JOB_ID.value, "")
