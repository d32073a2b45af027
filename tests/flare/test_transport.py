"""The clocks, codes and late answers of the transport, against a controller that only keeps tasks.

Time is the test's own: it passes while the transport sleeps, and what silos do falls into it. So nothing here
depends on how fast the machine is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from tightframe.config.refusals import BELOW_POLICY, REFUSALS
from tightframe.errors import ContributionError, RunError
from tightframe.flare import CODE, MESSAGE
from tightframe.flare import transport as module
from tightframe.flare.transport import FlareTransport


class _Controller:
    """Keeps what was sent; the test plays the silos."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.cancelled: list[str] = []

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str]) -> None:
        (site,) = targets
        self.tasks[site] = task

    def cancel_task(self, task: Task, fl_ctx: FLContext) -> None:
        self.cancelled += [site for site, sent in self.tasks.items() if sent is task]
        task.completion_status = TaskCompletionStatus.CANCELLED

    def fetch(self, site: str) -> ClientTask:
        client_task = ClientTask(Client(site, ""), self.tasks[site])
        self.tasks[site].after_task_sent_cb(client_task, FLContext())
        return client_task

    def answer(self, client_task: ClientTask, message: Any = None, code: Any = None) -> None:
        reply = make_reply(ReturnCode.OK if code is None else ReturnCode.EXECUTION_EXCEPTION)
        if code is not None:
            reply[CODE] = code
        else:
            reply[MESSAGE] = message
        client_task.result = reply
        client_task.task.result_received_cb(client_task, FLContext())


class _Clock:
    """Stands for ``time``; a play gives way, by ``yield``, for so many seconds."""

    def __init__(self) -> None:
        self.now, self.due = 1000.0, 0.0
        self.playing: Iterator[float] = iter(())

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.due <= until:
            self.now = self.due
            self.step()
        self.now = until

    def start(self, play: Callable[[], Iterator[float] | None]) -> None:
        def playing() -> Iterator[float]:
            yield from play() or ()

        self.playing, self.due = playing(), self.now + 0.1

    def step(self) -> None:
        try:
            self.due = self.now + next(self.playing)
        except StopIteration:
            self.due = float("inf")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def _transport(
    controller: Any,
    signal: Signal | None = None,
    *,
    site: float = 0.6,
    fetch: float = 0.6,
    grace: float = 0.2,
) -> FlareTransport:
    return FlareTransport(
        controller,
        FLContext(),
        signal or Signal(),
        site_timeout=site,
        fetch_timeout=fetch,
        log=logging.getLogger("test"),
        absent_grace=grace,
    )


def _exchange(
    transport: FlareTransport,
    play: Callable[[], Iterator[float] | None],
    sites: str = "abc",
    accept: Callable[[str, Any], None] = lambda site, message: None,
) -> tuple[dict[str, str], float]:
    """Run an exchange while ``play`` acts for the silos, from 0.1 s on; failures and seconds."""
    clock: Any = module.time
    clock.start(play)
    started = clock.now
    failed = transport.exchange("contribute", {site: {"to": site} for site in sites}, accept)
    seconds = clock.now - started
    while clock.due < float("inf"):
        clock.sleep(1.0)
    return dict(failed), seconds


def test_each_silo_gets_its_own_request_and_answers_are_accepted() -> None:
    controller = _Controller()
    got: dict[str, Any] = {}

    def play() -> None:
        for site in "cab":
            task = controller.fetch(site)
            controller.answer(task, {"echo": task.task.data[MESSAGE]["to"]})
            assert task.result is None, "a term is added and forgotten"

    failed, _ = _exchange(
        _transport(controller), play, accept=lambda site, message: got.update({site: message})
    )
    assert failed == {}
    assert got == {site: {"echo": site} for site in "abc"}


@pytest.mark.parametrize(
    ("said", "understood"),
    [
        ("TF-301", "TF-301"),
        ("patient 4711 [bold]", "TF-503"),
        ("TF-502", "TF-503"),
        (17, "TF-503"),
        ("TF-999", "TF-503"),
    ],
)
def test_only_documented_codes_are_believed(said: Any, understood: str) -> None:
    controller = _Controller()

    def play() -> None:
        controller.answer(controller.fetch("a"), code=said)
        for site in "bc":
            controller.answer(controller.fetch(site), {})

    assert _exchange(_transport(controller), play)[0] == {"a": understood}


def test_an_answer_that_is_not_accepted_fails_its_silo_only() -> None:
    controller = _Controller()

    def accept(site: str, message: Any) -> None:
        if site == "a":
            raise ContributionError("too short")
        if site == "b":
            raise KeyError("not ours")

    def play() -> None:
        for site in "abc":
            controller.answer(controller.fetch(site), {})

    assert _exchange(_transport(controller), play, accept=accept)[0] == {"a": "TF-403", "b": "TF-503"}


def test_an_empty_or_bad_reply_is_a_failure() -> None:
    controller = _Controller()

    def play() -> None:
        for site, reply in (("a", None), ("b", Shareable()), ("c", make_reply(ReturnCode.TASK_ABORTED))):
            task = controller.fetch(site)
            task.result = reply
            task.task.result_received_cb(task, FLContext())

    assert _exchange(_transport(controller), play)[0] == {site: "TF-503" for site in "abc"}


def test_a_late_answer_is_dropped() -> None:
    controller = _Controller()
    accepted: list[str] = []
    kept: list[ClientTask] = []

    def play() -> None:
        kept.append(controller.fetch("a"))
        for site in "bc":
            controller.answer(controller.fetch(site), {})

    failed, seconds = _exchange(
        _transport(controller), play, accept=lambda site, message: accepted.append(site)
    )
    assert failed == {"a": "TF-502"} and 0.7 <= seconds < 0.8
    assert controller.cancelled == ["a"]
    controller.answer(kept[0], {})
    assert accepted == ["b", "c"]


def test_a_silo_waiting_for_its_turn_is_not_timed_out() -> None:
    """One worker runs the silos one after the other; each takes most of its time."""
    controller = _Controller()

    def play() -> Iterator[float]:
        for site in "abc":
            task = controller.fetch(site)
            yield 0.45
            controller.answer(task, {})

    failed, seconds = _exchange(_transport(controller, fetch=0.3), play)
    assert failed == {} and seconds > 1.4


def test_a_stuck_silo_does_not_take_those_behind_it_along() -> None:
    controller = _Controller()

    def play() -> Iterator[float]:
        controller.fetch("a")  # and never answers
        yield 0.8
        for site in "bc":
            controller.answer(controller.fetch(site), {})

    assert _exchange(_transport(controller), play)[0] == {"a": "TF-502"}


def test_a_silo_that_never_shows_up_costs_one_wait_only_and_may_come_back() -> None:
    controller = _Controller()
    transport = _transport(controller)

    def others() -> None:
        for site in "bc":
            controller.answer(controller.fetch(site), {})

    def everybody() -> None:
        controller.answer(controller.fetch("a"), {})
        others()

    failed, seconds = _exchange(transport, others)
    assert failed == {"a": "TF-502"} and seconds >= 0.6
    failed, seconds = _exchange(transport, others)
    assert failed == {"a": "TF-502"} and seconds < 0.5, "not waited for beyond the others"
    assert _exchange(transport, everybody)[0] == {}
    failed, seconds = _exchange(transport, others)
    assert failed == {"a": "TF-502"} and seconds >= 0.6, "waited for again"


def test_who_is_not_asked_stays_absent_or_present() -> None:
    """Only survivors are asked for shares; who dropped out before must not cost a full wait afterwards."""
    controller = _Controller()
    transport = _transport(controller)

    def answer(sites: str) -> Callable[[], None]:
        def play() -> None:
            for site in sites:
                controller.answer(controller.fetch(site), {})

        return play

    assert _exchange(transport, answer("bc"))[0] == {"a": "TF-502"}
    assert _exchange(transport, answer("bc"), sites="bc")[0] == {}
    failed, seconds = _exchange(transport, answer("bc"))
    assert failed == {"a": "TF-502"} and seconds < 0.5, "still known to be absent"
    # And who was there stays so, though others are asked without it.
    assert _exchange(transport, answer("a"), sites="a")[0] == {}
    failed, seconds = _exchange(transport, answer("ab"))
    assert failed == {"c": "TF-502"} and seconds >= 0.6, "waited for, as it was never absent"


def test_a_silo_that_the_engine_gave_up_is_not_waited_for() -> None:
    controller = _Controller()

    def play() -> None:
        controller.fetch("a")
        controller.tasks["a"].completion_status = TaskCompletionStatus.CLIENT_DEAD
        for site in "bc":
            controller.answer(controller.fetch(site), {})

    failed, seconds = _exchange(_transport(controller, site=30, fetch=30), play)
    assert failed == {"a": "TF-502"} and seconds < 0.2


def test_an_abort_ends_the_wait_and_cancels_every_task() -> None:
    controller, signal = _Controller(), Signal()
    with pytest.raises(RunError, match=r"TF-504: .* while a, b, c had still to answer"):
        _exchange(_transport(controller, signal, site=30, fetch=30), lambda: signal.trigger(True))
    assert sorted(controller.cancelled) == ["a", "b", "c"]


def test_a_task_sent_again_does_not_restart_the_clock() -> None:
    """Engines resend unanswered tasks when a client asks again."""
    controller = _Controller()

    def play() -> Iterator[float]:
        for site in "bc":
            controller.answer(controller.fetch(site), {})
        for _ in range(4):
            controller.fetch("a")
            yield 0.25

    failed, seconds = _exchange(_transport(controller), play)
    assert failed == {"a": "TF-502"} and seconds < 0.8


def test_an_absent_silo_gets_its_turn_again_when_silos_run_one_after_the_other() -> None:
    """One worker: b got stuck, so c never came; from then on every swap takes a moment."""
    controller = _Controller()
    transport = _transport(controller, grace=0.5)

    def stuck() -> None:
        controller.answer(controller.fetch("a"), {})
        controller.fetch("b")

    def healthy() -> Iterator[float]:
        for site in "abc":
            yield 0.3
            controller.answer(controller.fetch(site), {})

    assert _exchange(transport, stuck)[0] == {"b": "TF-502", "c": "TF-502"}
    assert _exchange(transport, healthy)[0] == {}


@pytest.mark.parametrize("below", BELOW_POLICY)
def test_who_is_left_out_is_logged_and_told_at_once_with_the_rules_it_names(
    caplog: pytest.LogCaptureFixture, below: str
) -> None:
    controller, told = _Controller(), dict[str, tuple[str, list[str]]]()
    signal = Signal()
    transport = FlareTransport(
        controller,  # type: ignore[arg-type]
        FLContext(),
        signal,
        site_timeout=9,
        fetch_timeout=1.5,
        log=logging.getLogger("test"),
        failed=lambda site, code, rules: told.update({site: (code, list(rules))}),
    )

    def play() -> None:
        task = controller.fetch("a")
        task.result = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        task.result[CODE] = below
        task.result[REFUSALS] = [
            ["epsilon_cap", "8", "at most 4"],
            ["\x1b[2J", "1", "2"],
            ["a: asked 1); b refused", "", ""],
        ]
        task.task.result_received_cb(task, FLContext())
        assert told == {"a": (below, ["epsilon_cap: asked 8, required at most 4"])}, "at once"
        controller.answer(controller.fetch("b"), {})

    assert _exchange(transport, play)[0] == {"a": below, "c": "TF-502"}
    assert told.pop("c") == ("TF-502", []) and told.keys() == {"a"}
    assert "c left out: it did not fetch its task (" in caplog.text
