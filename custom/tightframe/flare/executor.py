"""NVFlare executor that runs a silo's part of every method; no method subclasses it.

It works with one OS process per task: nothing that a later task needs is kept in memory alone. Only
tasks that train import torch.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.log_utils import ConciseLogFilter

from tightframe.config.job import JobConfig, parse_job
from tightframe.config.refusals import REFUSALS, BelowPolicyError
from tightframe.config.site import SiteEntry, site_entry
from tightframe.errors import JobError, TightframeError, failure_code
from tightframe.files import waiting
from tightframe.flare import CODE, MESSAGE, guard
from tightframe.flare.accounts import permissions
from tightframe.flare.identity import site_identity
from tightframe.flare.simulation.simulator import PREVIOUS_RUN
from tightframe.flare.simulation.workspace import AtWork, check_run
from tightframe.flare.submitter import job_submitter, signed_submitter
from tightframe.report import writing
from tightframe.rounds.context import SiloContext
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.site_ledger import journal_folder
from tightframe.rounds.state_files import STATE
from tightframe.rounds.sums.simulated_identity import simulated_identity
from tightframe.securesum.identity import Anchor, KeySigner

_NAMED = {"enroll": "enrolling", "contribute": "preparing", "baseline": "local baseline"}
"""Progress text at the start of each task."""


class SiloExecutor(Executor):
    """Runs a silo's part of a job. The arguments are the values of ``config.job.JobConfig``."""

    def __init__(self, **job: Any) -> None:
        super().__init__()
        self._values = job
        self._session: SiloSession | None = None
        self._one_at_a_time = threading.Lock()
        self._abort_signal: Signal | None = None
        self._at_work = AtWork("")
        _quieten_simulator_worker()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log that a job was started at a site that it is not for; delete at its end what is for the run."""
        if event_type == EventType.END_RUN:
            self._end(fl_ctx)
        if event_type != EventType.START_RUN:
            return
        sites, name = self._values.get("sites"), fl_ctx.get_identity_name()
        if isinstance(sites, list) and name not in sites:
            self.logger.error("%s", JobError([f"this silo is {name}, which is not among the job's sites"]))

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer one task; turn every failure into a return code and a reason's code.

        Raises nothing, because in production a client process that dies fails the whole job.
        """
        with self._one_at_a_time:
            if self._session is None:
                self._at_work = AtWork(fl_ctx.get_identity_name())
            try:
                self._abort_signal = abort_signal
                check_run()
                self._at_work(_NAMED.get(task_name, "secure sum"))
                session = self._session or self._open(fl_ctx)
                self._session = session
                reply = make_reply(ReturnCode.OK)
                with waiting(session.context.production):
                    reply[MESSAGE] = session.handle(task_name, shareable[MESSAGE])
                return reply
            except TightframeError as error:
                self.logger.error("%s", error)
                return _failure(error)
            except Exception as error:
                self.logger.exception("the task %s failed", task_name)
                return _failure(error)
            finally:
                self._at_work.end()

    def _end(self, fl_ctx: FLContext) -> None:
        """Delete what this site keeps for the run only.

        In the simulator the process that is told of the end may have had no task.
        """
        try:
            session = self._session or self._open(fl_ctx)
        except (TightframeError, OSError) as error:  # as at every task before: nothing was kept
            self.logger.debug("nothing to delete at the end: %s", error)
        else:
            with waiting(session.context.production):
                session.end()

    def _open(self, fl_ctx: FLContext) -> SiloSession:
        workspace = fl_ctx.get_engine().get_workspace()
        name = fl_ctx.get_identity_name()
        production = bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))
        job_id = fl_ctx.get_job_id()
        job = parse_job(self._values)
        local, startup = Path(workspace.get_site_config_dir()), Path(workspace.get_startup_kit_dir())
        entry = site_entry(local, name, production=production, alone=len(job.sites) == 1)
        if production:  # memory has records, keys and what masks terms: none of it on a disk if this dies
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if production and entry is not None:
            guard.require(fl_ctx, entry.policy.resolve(production=True))
            permissions.require(startup.parent, entry)
        # In the simulator state lasts one run, and every task may run in a process of its own.
        outliving = Path(entry.state_dir) if production and entry is not None and entry.state_dir else None
        policy = (entry or SiteEntry()).policy.resolve(production=production)
        identity = partial(_identity, startup, name, job_id, production, policy.central_provisioning)
        if production and outliving is not None:
            submitter = signed_submitter(fl_ctx, job, policy, lambda: identity()[1], outliving)
        else:
            submitter = job_submitter(fl_ctx, production=production)
        return SiloSession(
            SiloContext(
                name,
                job,
                entry,
                run_dir=Path(workspace.get_run_dir(job_id)),
                state_dir=None if outliving is None else outliving / job_id / name,
                previous_state=_previous_state(job, name, outliving, production=production),
                job_id=job_id,
                submitter=submitter,
                production=production,
                memory_only=production,
                journal_dir=None if outliving is None else journal_folder(outliving, name),
                ledger_dir=outliving,
                kit=startup.parent,
                identity=identity,
                write_page=writing.leave,
                at_work=self._at_work,
                stopped=lambda: self._abort_signal is not None and self._abort_signal.triggered,
                log=self.logger,
            )
        )


def _previous_state(job: JobConfig, name: str, outliving: Path | None, *, production: bool) -> Path | None:
    """Return the path of this silo's state in the job that this one continues; None if there is none.

    A simulation keeps no state between runs, so there the caller names the earlier workspace.
    """
    if job.continues is None:
        return None
    if production:
        return None if outliving is None else outliving / job.continues.previous / name / STATE
    earlier = os.environ.get(PREVIOUS_RUN)
    return Path(earlier) / name / job.continues.previous / STATE if earlier else None


def _identity(
    startup: Path, name: str, job_id: str, production: bool, central: bool
) -> tuple[KeySigner, Anchor]:
    """Return the provisioned identity in the engine's secure mode, the simulated one outside of it."""
    if production:
        return site_identity(startup, name, production=True, missing_role=central)
    return simulated_identity(job_id, name, production=False)


def _failure(error: BaseException) -> Shareable:
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply[CODE] = failure_code(error)
    if isinstance(error, BelowPolicyError) and (refusals := error.outside()):
        reply[REFUSALS] = refusals
    return reply


def _quieten_simulator_worker() -> None:
    """Keep lines of the simulator's worker off a *concise* console; log files keep everything.

    The worker script runs as ``__main__``, which the engine's concise filter takes for an
    application, and logs three lines for every task of every silo.
    """
    for handler in logging.getLogger().handlers:
        if any(isinstance(item, ConciseLogFilter) for item in handler.filters):
            handler.addFilter(_not_the_worker)


def _not_the_worker(record: logging.LogRecord) -> bool:
    name = getattr(record, "fullName", record.name)
    return record.levelno > logging.INFO or not name.startswith("__main__.")
