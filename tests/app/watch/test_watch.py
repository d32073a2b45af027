"""What a person who watches a job sees, and how it ends: from values, without engine and server."""

from __future__ import annotations

import inspect
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.support.outputs import checked
from tests.support.results.building import row
from tests.support.results.building import status as begun
from tests.support.watched_jobs import JOB, OUTCOME, RUN, SPENT, status, trained_so_far

from tightframe.errors import REASONS
from tightframe.results.outcome import Outcome
from tightframe.results.parts.dropouts import Lost
from tightframe.results.status import Status
from tightframe_app.jobs.commands import fetch
from tightframe_app.watch import terminal
from tightframe_app.watch import view as words
from tightframe_app.watch.silos import SILENCE, Silences
from tightframe_app.watch.status import (
    FETCHED,
    NOT_KNOWN,
    LostError,
    NoOutcomeError,
    Seen,
    WatchError,
    judge,
    read_outcome,
    read_status,
)


def drawn(view: terminal.View, width: int = 80) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    out.print(terminal.screen(view))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(row) for row in text.splitlines()) <= width
    return str(text)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_has_everything_that_is_known(width: int) -> None:
    view = terminal.View(JOB, Seen("RUNNING", "fedmr_isic"), status(trained_so_far()), elapsed=3671)
    text = flat(drawn(view, width))
    for expected in (
        "fedmr_isic RUNNING 1:01:11",
        f"job {JOB}",
        "state training",
        "round 3 of 4, phase 1 of 2",
        "joined 3: hospital-1, hospital-2, hospital-3",
        "answered 1 of 3; not yet: hospital-2, hospital-3",
        "late hospital-2: not in the last sum",
        f"dropped hospital-3 TF-301 ({REASONS['TF-301']}): not in the last sum",
        f"refused hospital-4, hospital-5 TF-612 ({REASONS['TF-612']})",
        "loss 0.713",
        "accuracy 0.512 balanced, model of round 2, noisy",
        "privacy 1 silo up to epsilon 2, 1 silo up to epsilon 4, hospital-1 shows 3.214, 1 silo "
        "reported nothing; at most 8 promised, delta 1e-05",
        "so far 31.5 s in sums, 1.00 MB down, 2.00 MB up",
    ):
        assert expected in text, text
    assert "lost" not in text and "reason" not in text


def test_silence_is_counted_without_trusting_that_two_clocks_agree() -> None:
    silences = Silences()
    ahead = 10_000.0
    heard = {"a": ahead, "b": ahead + 4, "c": ahead - SILENCE}
    assert silences.of(["a", "b", "c"], heard, now=0) == {"c": ahead - SILENCE}, "the others are heard of"
    # Nothing changes any more: the server itself is cut off from all, and no time is later than another.
    assert silences.of(["a", "b"], {"a": ahead, "b": ahead + 4}, now=SILENCE - 1) == {}
    assert silences.of(["a", "b"], {"a": ahead, "b": ahead + 9}, now=SILENCE) == {"a": ahead}
    assert silences.of(["a", "b"], {"a": ahead + 40, "b": ahead + 41}, now=SILENCE + 1) == {}, "back"
    assert silences.of(["a", "d"], {}, now=SILENCE + 2) == {"a": None, "d": None}


def test_silence_is_told_of_silos_that_are_waited_for_only() -> None:
    seen = Seen("RUNNING", "fedmr_isic", silent={"hospital-1": 0.0, "hospital-3": None})
    view = terminal.View(JOB, seen, status(trained_so_far()))
    assert "silent hospital-3, not connected: stopped, or cut off" in flat(drawn(view))
    over = replace(view, last=status(trained_so_far().ended(trained=False, reason="TF-501")))
    assert "silent" not in drawn(over)


def test_whom_enrolment_waits_for_is_shown_with_who_is_not_connected() -> None:
    now = begun("job", 4).enrolling(["hospital-1", "hospital-2", "hospital-9"]).heard("hospital-2")
    seen = Seen("RUNNING", "job", silent={"hospital-9": None, "hospital-2": None})
    view = terminal.View(JOB, seen, status(now))
    text = flat(drawn(view))
    assert "state silos are being enrolled" in text
    assert "waiting for hospital-1, hospital-9 silent hospital-9, not connected: stopped, cut off" in text
    assert "; waiting for hospital-1, hospital-9; silent hospital-9, not connected" in terminal.line(view)
    later = now.heard("hospital-9", "TF-502").heard("hospital-1", "TF-612")
    text = flat(drawn(replace(view, last=status(later))))
    late, refused = (f"{code} ({REASONS[code]})" for code in ("TF-502", "TF-612"))
    assert f"absent hospital-9 {late} refused hospital-1 {refused}" in text and "waiting for" not in text


def test_privacy_is_told_as_the_run_itself_tells_it() -> None:
    """The run's own words for people are the oracle: the same parts, in another order."""
    told = status(trained_so_far()).privacy
    wanted = r"\d silos? up to epsilon \d|hospital-1 shows \S+\d|\d silo reported nothing|delta \S+\d"
    parts = re.findall(wanted, str(SPENT))
    assert len(parts) == 5, SPENT
    assert told is not None and all(part in words.spent_words(told) for part in parts)


@pytest.mark.parametrize(
    ("engine", "value", "expected"),
    [
        ("SUBMITTED", None, "waiting to be sent to its sites"),
        ("APPROVED", None, "waiting to be sent to its sites"),
        ("DISPATCHED", None, "being sent to its sites"),
        ("RUNNING", None, "starting"),
        ("RUNNING", begun("job", 4), "starting"),
        ("RUNNING", begun("job", 4).enrolling([]), "silos are being enrolled"),
        ("RUNNING", RUN.summing("statistics", 0, 0, 1), "statistics before round 1"),
        ("RUNNING", RUN.summing("closing", 4, 0, 1), "the last model is evaluated"),
        ("RUNNING", RUN.ended(trained=True, reason=None), "trained"),
        ("RUNNING", RUN.ended(trained=False, reason="TF-501: too few"), "stopped"),
        ("FINISHED:COMPLETED", RUN.ended(trained=True, reason=None), "over"),
        ("FINISHED:COMPLETED", RUN.summing("train", 3, 0, 1), "over"),
    ],
)
def test_every_state_has_words(engine: str, value: Status | None, expected: str) -> None:
    last = None if value is None else status(value)
    seen = Seen(engine, "job", ("sites are missing",), None if engine != "RUNNING" else last)
    view = terminal.View(JOB, seen, last)
    early = "; what follows is what was seen last" if value is not None and value.state == "summing" else ""
    late = early if seen.over else ""
    assert f"state {expected}{late} engine sites are missing" in flat(drawn(view))
    assert terminal.line(view).startswith(f"{engine}: {expected}; sites are missing")
    assert ("reason TF-501 (" in flat(drawn(view))) == (expected == "stopped")


def test_rounds_that_are_done_count_by_phases_and_end_at_one() -> None:
    def done(value: Status) -> float:
        return words.done(status(value))

    assert done(RUN) == 0 == done(RUN.summing("statistics", 0, 0, 1)) == done(RUN.summing("train", 1, 0, 2))
    assert done(RUN.summing("train", 3, 1, 2)) == 2.5 / 4
    assert done(RUN.summing("closing", 4, 0, 1)) == 1 == done(RUN.ended(trained=True, reason=None))


def test_names_and_messages_of_others_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x07bad"
    run = begun(evil, 2).enrolled([evil, "b", "c"], {evil: evil})
    view = terminal.View(
        JOB, Seen("RUNNING", evil, (evil,)), status(run.summing("train", 1, 0, 1)), lost=3, why=evil
    )
    verdict = judge(JOB, Seen("FINISHED:ABORTED", evil, (evil,)), None, NoOutcomeError(evil))
    out = Console(file=io.StringIO(), width=80, highlight=False, markup=False, emoji=False)
    out.print(terminal.closing_words(verdict))
    for text in (
        drawn(view),
        terminal.line(view),
        terminal.line(replace(view, lost=None)),
        out.file.getvalue(),
    ):  # type: ignore[attr-defined]
        assert "bad" in text and "\x1b" not in text and "\x07" not in text


def test_a_status_of_another_version_is_named() -> None:
    values = {**RUN.as_json(), "later": 1}
    assert read_status(values).rounds == 4
    with pytest.raises(WatchError, match=r"TF-815: .* rounds: .*; joined: .* Use the server's version"):
        read_status({**values, "rounds": "many", "joined": 3})


COMPLETED, NOTHING = "FINISHED:COMPLETED", NoOutcomeError("nobody knows")
FORBIDDEN = NoOutcomeError("member may not download it", allowed=False)
FETCH = f"its result: tightframe jobs fetch {JOB}"


@pytest.mark.parametrize(
    ("engine", "last", "changes", "code", "expected"),
    [
        (COMPLETED, None, {}, 0, ["TRAINED, 4 of 4 rounds in 53 s", "test records: 0.412", FETCH]),
        (
            COMPLETED,
            None,
            {"status": "trained, not measured", "notes": ["a is missing", "b"], "evaluation": None}
            | {"synthetic": True},
            0,
            ["TRAINED, NOT MEASURED, 4 of 4", "\n  a is missing\n  b\n", "SYNTHETIC TWIN"],
        ),
        (
            COMPLETED,
            None,
            {"trained": False, "reason": "TF-504: aborted"},
            1,
            ["NOT TRAINED", "reason: TF-504"],
        ),
        # What the run said last does not outweigh what it left behind.
        (COMPLETED, RUN.ended(trained=True, reason=None), {"trained": False}, 1, ["NOT TRAINED"]),
        (COMPLETED, RUN.ended(trained=True, reason=None), FORBIDDEN, 0, ["TRAINED", "may not download"]),
        (
            COMPLETED,
            RUN.ended(trained=False, reason="TF-501: x"),
            NOTHING,
            1,
            ["NOT TRAINED", "TF-501 (", FETCH],
        ),
        (COMPLETED, RUN.summing("closing", 4, 0, 1), NOTHING, 3, ["not known here", "nobody knows", FETCH]),
        (
            COMPLETED,
            None,
            FORBIDDEN,
            3,
            ["not known here", "does not mean that it trained", "may not download"],
        ),
        (
            "FINISHED:EXECUTION_EXCEPTION",
            None,
            {"trained": False, "rounds_done": 1, "reason": "TF-501: too few\nsite-3 refused: TF-602"},
            1,
            ["STOPPED", "TF-501: too few", "  site-3 refused: TF-602", "1 of 4 rounds done", FETCH],
        ),
        ("FINISHED:ABORTED", RUN, NOTHING, 1, ["ABORTED", FETCH]),
        (
            "FINISHED:ABORTED",
            None,
            {},
            0,
            ["TRAINED, 4 of 4 rounds", "after that the engine called the job FINISHED:ABORTED"],
        ),
        (
            "FINISHED:ABNORMAL",
            None,
            {},
            0,
            ["TRAINED", "FINISHED:ABNORMAL (a client did not report"],
        ),
        (
            "FINISHED:ABORTED",
            None,
            {"trained": False, "reason": "TF-504: aborted", "notes": ["a is missing"]},
            1,
            ["ABORTED", "TF-504", "a is missing"],
        ),
        ("FINISHED:ABNORMAL", None, NOTHING, 1, ["DIED"]),
        ("FINISHED:CAN_NOT_SCHEDULE", None, NOTHING, 1, ["NOT STARTED", "did not find the sites"]),
        ("FINISHED:FAILED_TO_RUN", None, NOTHING, 1, ["NOT STARTED", "server: BYOC not permitted"]),
        ("FINISHED:ABANDONED", None, NOTHING, 1, ["ABANDONED", "restarted"]),
        ("FINISHED:SOMETHING_NEW", None, NOTHING, 1, ["FINISHED:SOMETHING_NEW: the engine ended it"]),
    ],
)
def test_how_it_ended(engine: str, last: Status | None, changes: Any, code: int, expected: list[str]) -> None:
    told = ("server: BYOC not permitted",) if "FAILED" in engine else ()
    found = changes if isinstance(changes, NoOutcomeError) else Outcome.model_validate({**OUTCOME, **changes})
    verdict = judge(JOB, Seen(engine, "job", told), None if last is None else status(last), found)
    out = Console(file=io.StringIO(), width=100, highlight=False, markup=False, emoji=False)
    out.print(terminal.closing_words(verdict))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    title = text.splitlines()[0]
    assert verdict.code == code and all(item in text for item in expected), text
    assert (FETCH in text) == (found is not FORBIDDEN and title != "NOT STARTED")
    again = judge(JOB, Seen(engine, "job", told), None if last is None else status(last), found, Path("a b"))
    suggested = [line for line in again.lines if "jobs fetch" in line]
    unknown = code == NOT_KNOWN and found is not FORBIDDEN
    assert suggested == ([f"{FETCH} -o 'a b'"] if unknown else []), "whoever submitted has the rest already"


def test_a_stopped_run_goes_on_from_where_its_result_is() -> None:
    assert inspect.signature(fetch).parameters["output"].default == FETCHED
    found = Outcome.model_validate({**OUTCOME, "trained": False, "rounds_done": 1, "reason": "TF-501: few"})
    for results, folder, once in (
        (None, f"results/{JOB}", ", once it is fetched"),
        (Path("r"), f"r/{JOB}", ""),
    ):
        lines = judge(JOB, Seen(COMPLETED, "job"), None, found, results).lines
        command = f"tightframe jobs export {found.job_name} --resume {folder} -o resumed"
        assert lines[-1] == f"to go on after round 1{once}: {command}"


class Script:
    """A server that answers as written: a value is an answer, an exception is raised."""

    def __init__(self, *answers: Any, found: tuple[Any, ...] = ()) -> None:
        self.answers, self.found = list(answers), list(found)
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, job_id: str) -> Seen:
        return self._next(self.answers)

    def outcome(self, job_id: str) -> Outcome:
        return self._next(self.found)

    @staticmethod
    def _next(left: list[Any]) -> Any:
        item = left.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    def follow(self, patience: float = 60) -> tuple[terminal.Verdict, list[terminal.View]]:
        views: list[terminal.View] = []
        verdict = terminal.follow(
            self,
            JOB,
            views.append,
            every=10,
            patience=patience,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        return verdict, views


RUNNING, DONE = Seen("RUNNING", "fedmr_isic", status=status(trained_so_far())), Seen(COMPLETED, "fedmr_isic")
TRAINED = Outcome.model_validate(OUTCOME)


def test_a_connection_that_is_lost_for_a_while_is_told_and_found_again() -> None:
    gone = LostError("cannot connect to server for 10 seconds")
    # Also at the very end, where the outcome is read.
    script = Script(RUNNING, gone, gone, replace(RUNNING, status=None), DONE, found=(gone, TRAINED))
    verdict, views = script.follow()
    assert verdict.code == 0
    assert [view.lost for view in views] == [None, None, 10, 20, None, None]
    assert "no answer for 0:00:20, trying again" in flat(drawn(views[3]))
    assert "cannot connect" in terminal.line(views[3])
    assert views[4].last == RUNNING.status, "what was seen last stays on the screen"
    assert [view.elapsed for view in views] == [0, 0, 10, 20, 30, 40]


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    gone = LostError("cannot connect")
    script = Script(RUNNING, gone, DONE, found=(TRAINED,))
    verdict = terminal.told_until_over(script, JOB, every=0, patience=60)
    lines = [checked("watch", line) for line in capsys.readouterr().out.splitlines()]
    assert verdict.code == 0 and lines[-1]["end"]["code"] == 0 and lines[0]["standing"] == "asking the server"
    assert lines[1]["status"] == json.loads(json.dumps(trained_so_far().as_json()))
    assert all(line["end"] is None for line in lines[:-1])
    terminal.look_once(Script(RUNNING), JOB, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert checked("watch", line)["engine"] == "RUNNING"
    with pytest.raises(WatchError, match="TF-812"):
        terminal.look_once(Script(gone), JOB, as_json=True)


def test_a_server_that_never_answers_or_stays_away_is_an_error() -> None:
    gone = LostError("cannot connect")
    with pytest.raises(WatchError, match=r"TF-812: Expected to reach .*, but: cannot connect"):
        Script(gone).follow()
    with pytest.raises(WatchError, match=r"TF-812: .* has not for 0:01:10: .*; last seen: training"):
        Script(RUNNING, *[gone] * 9).follow()


def test_an_outcome_that_cannot_be_fetched_is_asked_for_thrice() -> None:
    gone = LostError("cut off")
    script = Script(DONE, found=(gone, gone, gone, TRAINED))
    verdict, _ = script.follow()
    assert verdict.code == 3 and "the connection was lost: cut off" in verdict.lines
    assert script.found == [TRAINED]


def test_a_terminal_is_drawn_anew_each_time() -> None:
    out = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    with terminal._shower(out) as show:
        show(terminal.View(JOB, RUNNING, RUNNING.status))
        show(terminal.View(JOB, DONE, RUNNING.status))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "training" in text and text.index("training") < text.index("over")
    assert "\x1b[2K" in text, "lines are erased"


LOST = RUN.without(
    {"hospital-3": Lost(kind="train", round=3, at="2026-11-22T21:42:10Z", code="TF-502")},
    ["3 is missing since"],
)


def test_a_lost_silo_is_noted_and_not_called_late_as_well() -> None:
    third = row(3, "train", ["hospital-1"], {"hospital-2": "TF-502", "hospital-3": "TF-502"})
    view = terminal.View(JOB, RUNNING, status(LOST.summed(third).summing("train", 4, 0, 1)))
    text = flat(drawn(view))
    assert "late hospital-2: not in the last sum" in text and "note 3 is missing since" in text
    assert "note 3 is missing since" in terminal.line(view)


def test_a_run_that_is_over_while_the_engine_still_waits_is_told_of() -> None:
    """Its process answers no more; the engine has the job until every client has reported."""
    silent = replace(RUNNING, status=None)
    over = terminal.View(JOB, silent, status(LOST.summing("closing", 4, 0, 1)))
    assert "state the run's process has ended; the engine waits" in flat(drawn(over))
    assert "the engine waits until every client has reported" in terminal.line(over)
    assert "training" in terminal.line(replace(over, last=RUNNING.status)), "one answer that did not come"


def test_where_there_is_no_terminal_a_line_is_said_again_after_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((100.0, 129.0, 130.0, 135.0, 160.5))
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now, strftime=time.strftime))
    out = Console(file=io.StringIO(), width=terminal.UNBROKEN, highlight=False)
    with terminal._shower(out) as show:
        for now in clock:  # noqa: B007 - the clock above reads it
            show(terminal.View(JOB, RUNNING, RUNNING.status))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    said = [line.split(" ", 1)[1].split(":")[0] for line in lines]
    assert said == ["RUNNING", "still RUNNING", "still RUNNING"]


def test_an_outcome_is_read_as_a_run_writes_it(tmp_path: Path) -> None:
    TRAINED.write(tmp_path)
    assert read_outcome(tmp_path) == TRAINED
    (tmp_path / "outcome.json").write_text("[")
    with pytest.raises(NoOutcomeError, match=r"Expected JSON in outcome\.json"):
        read_outcome(tmp_path)


def test_a_status_or_an_outcome_of_a_later_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(WatchError, match=r"TF-815: .* of format 9: a later version .* Use the server's"):
        read_status({**RUN.as_json(), "format": 9})
    written = {**OUTCOME, "format": 9, "versions": {"tightframe": "3.1.4"}}
    (tmp_path / "outcome.json").write_text(json.dumps(written))
    with pytest.raises(NoOutcomeError, match=r"of format 9: Tightframe 3\.1\.4 wrote it"):
        read_outcome(tmp_path)
    written["versions"] = {"tightframe": "\x1b[2J"}
    (tmp_path / "outcome.json").write_text(json.dumps(written))
    with pytest.raises(NoOutcomeError, match="a later version of Tightframe wrote it"):
        read_outcome(tmp_path)
