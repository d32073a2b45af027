"""Carries messages of ``rounds`` as NVFlare tasks, with our own deadlines.

One task per silo (``send`` to one target): a silo's request is its own. A silo's clock starts
when it fetches its task. Silos that have not fetched share one clock, which runs only while no
silo is at work and starts anew at every sign of progress, so that a simulation which runs silos
one after the other times out nobody who is waiting for its turn. A silo that did not even fetch
its task when it was last asked is asked again, but waited for only a short grace beyond the others.
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

from tightframe.config.refusals import REFUSALS, in_words
from tightframe.errors import LATE, REASONS, RunError, TightframeError, outside_code
from tightframe.flare.wire import CODE, MESSAGE
from tightframe.rounds.server.coordinator import Accept, Message
from tightframe.rounds.silo.session import failure_code
from tightframe.rounds.sums.plain import Failed

POLL_SECONDS = 0.05
FAILED, ABORTED, STOPPED, BELOW_POLICY = "TF-503", "TF-504", "TF-730", "TF-614"


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
        """Whether the engine itself has given the task up (its client is gone)."""
        return self.task.completion_status not in (None, TaskCompletionStatus.OK)


@dataclass
class _Exchange:
    accept: Accept
    lock: threading.Lock = field(default_factory=threading.Lock)
    progress: float = field(default_factory=time.monotonic)
    waiting: dict[str, _Waiting] = field(default_factory=dict)


class FlareTransport:
    """``rounds.server.coordinator.Transport`` over a controller.

    Args:
        controller: sends the tasks.
        fl_ctx: of ``control_flow``.
        abort_signal: of ``control_flow``.
        site_timeout: seconds a silo may work on one task, from fetching it.
        fetch_timeout: seconds to wait for silos that have not fetched, while nobody works.
        log: for what is left out, and why.
        absent_grace: seconds that silos have which did not fetch their task in the last exchange.
        failed: told of every silo that is left out, as soon as it is.
        check: raises if the run cannot go on for a reason outside of it.
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
        """Send, wait, report who failed and why.

        Raises:
            RunError: TF-504 if the run is aborted while waiting; what ``check`` raises.
        """
        self._check()
        state = _Exchange(accept)
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
            # Who was not asked (only survivors are asked for shares) stays what it was.
            self._absent -= state.waiting.keys()
            self._absent |= {site for site, waiting in state.waiting.items() if waiting.fetched is None}
            return {site: waiting.code for site, waiting in state.waiting.items() if waiting.code is not None}

    def _make_task(self, name: str, site: str, request: Message, state: _Exchange) -> Task:
        data = Shareable()
        data[MESSAGE] = request

        def fetched(client_task: ClientTask, fl_ctx: FLContext) -> None:
            waiting = state.waiting[site]
            if waiting.fetched is None:
                waiting.fetched = state.progress = time.monotonic()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._receive(site, client_task, state)

        return Task(name=name, data=data, after_task_sent_cb=fetched, result_received_cb=received)

    def _receive(self, site: str, client_task: ClientTask, state: _Exchange) -> None:
        result, client_task.result = client_task.result, None  # a term is added and forgotten
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
                told = result.get(REFUSALS) if code == BELOW_POLICY and result is not None else None
                self._tell(site, code, in_words(told))

    def _leave_out(self, site: str, waiting: _Waiting, why: str) -> None:
        """Finish one that is late."""
        waiting.finish(LATE)
        self._log.warning("%s left out: %s", site, why)
        self._tell(site, LATE, ())

    def _tell(self, site: str, code: str, rules: Sequence[str]) -> None:
        if self._failed is not None:
            self._failed(site, code, rules)

    def _accept(self, site: str, result: Shareable | None, state: _Exchange) -> None:
        answer = Shareable() if result is None else result
        code, message = answer.get(CODE), answer.get(MESSAGE)
        if answer.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR:
            code = STOPPED  # the engine says so for the site's guard, which leaves no code of its own
        if code is not None or message is None or answer.get_return_code() != ReturnCode.OK:
            # A silo that answers is not late, and what it says is one of the documented codes.
            said = FAILED if code == LATE else outside_code(code)
            told = "; ".join(in_words(answer.get(REFUSALS)))
            raise RunError(
                f"no result, because: {REASONS[said]}{f' ({told})' if told else ''}; the details are in the "
                "silo's own log",
                code=said,
            )
        state.accept(site, message)

    def _wait(self, state: _Exchange) -> None:
        """Return when nobody is left to wait for; those who were too slow are finished as late."""
        while True:
            if self._abort_signal.triggered:
                awaited = [site for site, waiting in state.waiting.items() if not waiting.done]
                raise RunError(
                    f"the run was aborted before it was done, while {', '.join(awaited) or 'nobody'} had "
                    "still to answer: by a person, or by the engine, which fails a job when a silo's process "
                    "dies; the server's own log says which.",
                    code=ABORTED,
                )
            self._check()
            with state.lock:
                if not self._still_expected(state, time.monotonic()):
                    return
            time.sleep(POLL_SECONDS)

    def _still_expected(self, state: _Exchange, now: float) -> bool:
        """Finish who is overdue, and tell whether to go on waiting for anybody."""
        working = False
        patience: float | None = None
        for site, waiting in state.waiting.items():
            if waiting.done:
                continue
            if waiting.dead or (waiting.fetched and now - waiting.fetched > self._site_timeout):
                self._leave_out(site, waiting, "gone" if waiting.dead else "late")
                state.progress = now  # those who waited for its place have a clock of their own
            elif waiting.fetched:
                working = True
            else:
                wait = self._absent_grace if site in self._absent else self._fetch_timeout
                patience = max(wait, patience or 0.0)
        if working:
            return True
        return patience is not None and now - state.progress <= patience
