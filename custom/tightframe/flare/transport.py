"""Transport of ``rounds`` messages as NVFlare tasks, with our own deadlines.

Each silo gets its own task (``send`` to one target), because requests differ between silos. A silo's
clock starts when it fetches its task. Silos that have not fetched share one clock, which runs only
while no silo is working and restarts at every sign of progress, so that a simulation which runs silos
one after the other times out no silo that waits for its turn. A silo that did not fetch its last task
gets the next one too, but is waited for only a short grace period beyond the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from tightframe.config.refusals import BELOW_POLICY, REFUSALS, in_words
from tightframe.errors import LATE, REASONS, RunError, TightframeError, failure_code, outside_code
from tightframe.flare import CODE, MESSAGE
from tightframe.rounds.context import Message
from tightframe.rounds.sums.common import Accept, Failed

POLL_SECONDS = 0.05
FAILED, ABORTED, STOPPED = "TF-503", "TF-504", "TF-730"


@dataclass
class _Waiting:
    """One silo's task in one exchange."""

    task: Task
    fetched: float | None = None
    done: bool = False
    code: str | None = None

    def finish(self, code: str | None) -> None:
        self.done = True
        self.code = code

    @property
    def dead(self) -> bool:
        """Check whether the engine itself has given the task up (its client is gone)."""
        return self.task.completion_status not in (None, TaskCompletionStatus.OK)


@dataclass
class _Pending:
    accept: Accept
    lock: threading.Lock = field(default_factory=threading.Lock)
    progress: float = field(default_factory=lambda: time.monotonic())
    waiting: dict[str, _Waiting] = field(default_factory=dict)


class FlareTransport:
    """``rounds.server.coordinator.Transport`` over a controller.

    Args:
        fl_ctx: of ``control_flow``.
        abort_signal: of ``control_flow``.
        site_timeout: seconds a silo may work on one task, from fetching it.
        fetch_timeout: seconds to wait for silos that have not fetched, while nobody works.
        log: gets a line for each silo that is left out, and why.
        absent_grace: seconds to wait for silos that did not fetch their task in the last exchange.
        failed: called for every silo that is left out, as soon as it is.
        check: raises if the run cannot go on for a reason outside of the exchange.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort_signal: Signal,
        *,
        site_timeout: float,
        fetch_timeout: float,
        log: logging.Logger,
        absent_grace: float = 10.0,
        failed: Failed | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._controller = controller
        self._fl_ctx = fl_ctx
        self._abort_signal = abort_signal
        self._site_timeout = site_timeout
        self._fetch_timeout = fetch_timeout
        self._absent_grace = min(absent_grace, fetch_timeout)
        self._log = log
        self._failed = failed
        self._absent: set[str] = set()

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Send a request to each silo, wait for the answers, and return the codes of silos that failed.

        Raises:
            RunError: TF-504 if the run is aborted while waiting; otherwise whatever ``check`` raises.
        """
        self._check()
        state = _Pending(accept)
        for site, request in sorted(requests.items()):
            state.waiting[site] = _Waiting(self._make_task(task, site, request, state))
        for site, waiting in state.waiting.items():
            self._controller.send(task=waiting.task, fl_ctx=self._fl_ctx, targets=[site])
        try:
            self._wait(state)
        finally:
            for waiting in state.waiting.values():
                if not waiting.done or waiting.code == LATE:
                    self._controller.cancel_task(waiting.task, fl_ctx=self._fl_ctx)
        with state.lock:
            for site, waiting in state.waiting.items():
                if not waiting.done:  # a result that arrives from now on is not accepted
                    self._leave_out(site, waiting, f"it did not fetch its task ({task}): is it connected?")
            # Silos without a request in this exchange (only survivors reveal shares) keep their state.
            self._absent -= state.waiting.keys()
            self._absent |= {site for site, waiting in state.waiting.items() if waiting.fetched is None}
            return {site: waiting.code for site, waiting in state.waiting.items() if waiting.code is not None}

    def _make_task(self, name: str, site: str, request: Message, state: _Pending) -> Task:
        data = Shareable()
        data[MESSAGE] = request

        def fetched(client_task: ClientTask, fl_ctx: FLContext) -> None:
            waiting = state.waiting[site]
            if waiting.fetched is None:
                waiting.fetched = state.progress = time.monotonic()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._receive(site, client_task, state)

        return Task(name=name, data=data, after_task_sent_cb=fetched, result_received_cb=received)

    def _receive(self, site: str, client_task: ClientTask, state: _Pending) -> None:
        result, client_task.result = client_task.result, None  # free each term once it is added
        with state.lock:
            waiting = state.waiting[site]
            if waiting.done:
                return
            state.progress = time.monotonic()
            code: str | None = None
            try:
                self._accept(site, result, state)
            except TightframeError as error:
                code = failure_code(error)
                self._log.error("%s left out: %s", site, error)
            except Exception:
                code = FAILED
                self._log.exception("%s left out: its answer could not be read", site)
            waiting.finish(code)
            if code is not None:
                refusals = result.get(REFUSALS) if code in BELOW_POLICY and result is not None else None
                self._report(site, code, in_words(refusals))

    def _leave_out(self, site: str, waiting: _Waiting, why: str) -> None:
        """Finish a silo's task as late."""
        waiting.finish(LATE)
        self._log.warning("%s left out: %s", site, why)
        self._report(site, LATE, ())

    def _report(self, site: str, code: str, rules: Sequence[str]) -> None:
        if self._failed is not None:
            self._failed(site, code, rules)

    def _accept(self, site: str, result: Shareable | None, state: _Pending) -> None:
        answer = Shareable() if result is None else result
        code, message = answer.get(CODE), answer.get(MESSAGE)
        if answer.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR:
            code = STOPPED  # the site's guard adds no code of its own to the engine's filter error
        if code is not None or message is None or answer.get_return_code() != ReturnCode.OK:
            # A silo that answers is not late, and may report documented codes only.
            reported = FAILED if code == LATE else outside_code(code)
            refusals = "; ".join(in_words(answer.get(REFUSALS)))
            raise RunError(
                f"no result, because: {REASONS[reported]}{f' ({refusals})' if refusals else ''}; the details "
                "are in the silo's own log",
                code=reported,
            )
        state.accept(site, message)

    def _wait(self, state: _Pending) -> None:
        """Wait until every silo has answered or is finished as late."""
        while True:
            if self._abort_signal.triggered:
                awaited = [site for site, waiting in state.waiting.items() if not waiting.done]
                raise RunError(
                    f"the run was aborted before its end, while {', '.join(awaited) or 'no silo'} had "
                    "still to answer: by a person, or by the engine, which fails a job when a silo's process "
                    "dies; the server's log says which.",
                    code=ABORTED,
                )
            self._check()
            with state.lock:
                if not self._still_expected(state, time.monotonic()):
                    return
            time.sleep(POLL_SECONDS)

    def _still_expected(self, state: _Pending, now: float) -> bool:
        """Finish the silos that are overdue; return whether to wait for any other."""
        working = False
        patience: float | None = None
        for site, waiting in state.waiting.items():
            if waiting.done:
                continue
            if waiting.dead or (waiting.fetched and now - waiting.fetched > self._site_timeout):
                self._leave_out(site, waiting, "gone" if waiting.dead else "late")
                state.progress = now  # silos that waited for its place get the full time again
            elif waiting.fetched:
                working = True
            else:
                wait = self._absent_grace if site in self._absent else self._fetch_timeout
                patience = max(wait, patience or 0.0)
        if working:
            return True
        return patience is not None and now - state.progress <= patience
