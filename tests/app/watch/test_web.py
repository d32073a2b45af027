"""The page of a watched run: what is on it, whose words they are, and the command that serves it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.support.live_pages import Visitor, check_basics
from tests.support.pages import SVG, Page, said
from tests.support.results.building import evaluated, row, spent
from tests.support.results.building import status as begun
from tests.support.watched_jobs import JOB, OUTCOME, RUN, status, trained_so_far

from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import tag
from tightframe.results.outcome import Outcome
from tightframe.results.parts.dropouts import Lost
from tightframe.results.status import Status
from tightframe_app.live.server import Content
from tightframe_app.watch import web
from tightframe_app.watch.status import NoOutcomeError, Seen, judge
from tightframe_app.watch.view import View

COMPLETED = "FINISHED:COMPLETED"


def view_of(value: Status, **changes: Any) -> View:
    return replace(View(JOB, Seen("RUNNING", "fedmr_isic", status=value), status(value)), **changes)


def page_of(content: Content) -> Page:
    return Page(layout.page("Job", web.KIND, tag("p", content.said), content.parts))


def drawn(view: View, verdict: Any = None) -> Page:
    page = page_of(web.content(view, verdict))
    check_basics(page)
    return page


def whole_run() -> Status:
    """Three rounds with differential privacy and noisy evaluation, and the fourth under way."""
    now = RUN
    for number in range(4):
        if number:
            ends = {1: (2.0,), 2: (2.0, 4.0), 3: (4.0,)}[number]
            told = row(number, "train", list(RUN.joined), privacy=spent(number, 3, *ends))
            now = now.summing("train", number, 0, 1).summed(told)
        value = evaluated(
            balanced_accuracy=0.25 + number / 10,
            balanced_accuracy_interval=(0.2 + number / 10, 0.3 + number / 10),
            noisy=True,
            classes_told=2,
            classes=8,
        )
        now = now.evaluated(row(number, "train", [], evaluation=value))
    return now.summing("train", 4, 0, 1).answer("hospital-2")


def test_rounds_silos_and_who_is_waited_for() -> None:
    seen = Seen("RUNNING", "fedmr_isic", silent={"hospital-3": None}, status=trained_so_far())
    page = drawn(View(JOB, seen, status(trained_so_far())))
    (progress,) = page.tree.iter("progress")
    assert float(progress.get("value", "")) == pytest.approx(2 / 4), "two of four rounds are done"
    assert "round 3 of 4, phase 1 of 2" in page.text and f"fedmr_isic ({JOB})" in page.text
    (table,) = page.tables("Silos")
    assert [(row["silo"], row["now"]) for row in table] == [
        ("hospital-4", "refused"),
        ("hospital-5", "refused"),
        ("hospital-2", "waited for"),
        ("hospital-3", "waited for"),
        ("hospital-1", "answered"),
    ]
    notes = {row["silo"]: row["note"] for row in table}
    assert notes["hospital-4"].startswith("TF-612 (") and notes["hospital-1"] == "none"
    assert notes["hospital-2"] == "late: not in the last sum"
    assert notes["hospital-3"].startswith("not in the last sum: TF-301 (")
    assert notes["hospital-3"].endswith("; not connected")
    assert "Waiting for 2 silos: hospital-2, hospital-3." in page.text


def test_while_all_train_nobody_is_waited_for() -> None:
    page = drawn(view_of(RUN.summing("train", 1, 0, 1)))
    (table,) = page.tables("Silos")
    assert {row["now"] for row in table} == {"training", "refused"} and "Waiting for" not in page.text


def test_a_lost_silo_is_named_with_since_when() -> None:
    gone = Lost(kind="train", round=2, at="2026-11-22T21:42:10Z", code="TF-502")
    now = RUN.summing("train", 3, 0, 1).without(
        {"hospital-3": gone}, ["hospital-3 is missing: what that means"]
    )
    (table,) = drawn(view_of(now)).tables("Silos")
    assert table[0] == {"silo": "hospital-3", "now": "missing", "note": "since round 2: TF-502 (late)"}
    assert "what that means" in drawn(view_of(now)).text


def test_enrolment_shows_whom_it_waits_for() -> None:
    now = begun("job", 4).enrolling(["hospital-1", "hospital-2"]).heard("hospital-2", "TF-502")
    page = drawn(view_of(now))
    (table,) = page.tables("Silos")
    assert [(row["silo"], row["now"]) for row in table] == [
        ("hospital-2", "absent"),
        ("hospital-1", "waited for"),
    ]
    assert "silos are being enrolled" in page.text


def test_curves_have_each_round_and_the_noise() -> None:
    now = whole_run()
    page = drawn(view_of(now))
    picture = page.picture("Balanced accuracy by round")
    points = [said(item) for item in picture.iter(f"{SVG}path")]
    assert [point for point in points if point.startswith("test, ")] == [
        f"test, {number}: {0.25 + number / 10:.4g}" for number in range(4)
    ]
    assert "lower end of the noise, 3: 0.5" in points and "upper end of the noise, 3: 0.6" in points
    (table,) = page.tables("Course of training")
    assert [row["test balanced accuracy"] for row in table][-1] == "0.550 [0.500, 0.600]"
    assert [row["training loss"] for row in table] == ["none"] * 4
    reasons = [item.get("title") for item in page.section("Course of training").iter("abbr")]
    assert reasons == ["round 0 is the model before training", *["losses stay at the silos"] * 3]


def test_epsilon_is_told_as_ranges_and_no_silo_s_own_number() -> None:
    page = drawn(view_of(whole_run()))
    (table,) = page.tables("Privacy spent")
    assert [row["epsilon of the silos"] for row in table] == ["1 to 2", "1 to 4", "2 to 4"]
    text = said(page.section("Privacy spent"))
    assert "at most 8 promised, delta 1e-05" in text and "shows" not in text
    assert "reported at least" in text and "reported at most" in text
    assert not [name for name in RUN.joined if name in text], "a range is nobody's"
    assert "no differential privacy" in drawn(view_of(begun("job", 2).enrolling([]))).text


def test_the_loss_of_a_run_without_privacy_is_drawn() -> None:
    now = begun("job", 3).enrolled(["a", "b", "c"], {})
    for number, loss in ((1, 0.9), (2, None), (3, 0.5)):
        training = {} if loss is None else {"loss": loss}
        now = now.summing("train", number, 0, 1).summed(row(number, "train", ["a"], training=training))
    page = drawn(view_of(now))
    tips = [said(item) for item in page.picture("Loss by round").iter(f"{SVG}path")]
    assert tips[1:] == ["training, 1: 0.9", "training, 3: 0.5"], "the first is the legend's"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "good"),
        ({"status": "trained, not measured"}, "warn"),
        ({"trained": False}, "bad"),
        (None, "warn"),
    ],
)
def test_the_end_is_told_and_nothing_follows(changes: dict[str, Any] | None, kind: str) -> None:
    found = (
        NoOutcomeError("nobody knows") if changes is None else Outcome.model_validate({**OUTCOME, **changes})
    )
    verdict = judge(JOB, Seen(COMPLETED, "fedmr_isic"), None, found)
    view = View(JOB, Seen(COMPLETED, "fedmr_isic"), status(whole_run()))
    content = web.content(view, verdict)
    assert content.over and not web.content(view).over
    assert content.said == f"fedmr_isic: {verdict.title}" and content.title.startswith(verdict.title)
    page = page_of(content)
    notice = next(item for item in page.tree.iter("div") if "said" in (item.get("class") or ""))
    assert notice.get("class") == f"said {kind}" and verdict.title in said(notice)
    assert all(line in page.text for line in verdict.lines)


def test_a_server_that_is_lost_is_told() -> None:
    page = drawn(view_of(whole_run(), lost=12.0, why="cannot connect"))
    assert "The server does not answer." in page.text and "cannot connect" in page.text


def test_before_the_first_answer_there_is_a_page_already() -> None:
    page = drawn(View(JOB))
    assert "asking the server" in page.text and JOB in page.text


def test_what_is_said_aloud_is_one_sentence_and_changes_with_the_round_only() -> None:
    now = whole_run()
    first = web.content(view_of(now)).said
    assert first == "fedmr_isic: training, round 4 of 4"
    assert web.content(view_of(now.answer("hospital-1"))).said == first
    assert web.content(view_of(now.summing("closing", 4, 0, 1))).said != first


def test_names_of_jobs_and_silos_are_text() -> None:
    nasty = "<img src=x onerror=y()>"
    now = begun(nasty, 2).enrolled([nasty], {f"{nasty}2": "TF-<b>"}).summing("train", 1, 0, 1)
    now = now.without({nasty: Lost(kind="train", round=1, at="2026-11-22T21:42:10Z", code="<i>")}, [nasty])
    seen = Seen("RUNNING", nasty, (nasty,), now, {nasty: None})
    page = drawn(View(JOB, seen, now, lost=1.0, why=nasty))
    assert not list(page.tree.iter("img")) and "<img" not in page.source and nasty in page.text


def test_the_parts_have_places_by_which_the_script_puts_in_what_has_changed() -> None:
    content = web.content(view_of(whole_run()))
    tops = re.findall(r'<(?:div|section) id="([^"]+)"', content.parts)
    assert tops == ["top", "silos", "course-of-training", "privacy-spent"]


def test_the_page_follows_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    with web.watch_page(JOB, None, Console()) as page:
        visitor = Visitor(page.live)
        link = page.live.link
        visitor.opened()
        state = visitor.path + "state"
        assert "asking the server" in visitor.ask(state).body
        page.show(view_of(whole_run()))
        assert "hospital-2" in visitor.ask(state).body
        page.end(judge(JOB, Seen(COMPLETED, "fedmr_isic"), None, Outcome.model_validate(OUTCOME)))
        last = json.loads(visitor.ask(state).body)
    assert last["over"] and "TRAINED, 4 of 4" in last["content"] and "hospital-2" in last["content"]
    out, err = capsys.readouterr()
    assert (
        out == "" and err.startswith(f"page: {link}\n") and "the page was opened; its link is used up" in err
    )
