"""``tightframe site page``: what a hospital sees of itself, by files that nothing of it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from tests.app.federation.test_commands import make_kit
from tests.support.browser import Browser
from tests.support.ledgers import CAP, SiteKeys, charge, open_ledger
from tests.support.live_pages import check_in_a_browser

from tightframe.config.policy import PROFILES, Policy
from tightframe.privacy.ledger.entries import Remembered
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.rounds.sums.vault import remember
from tightframe.securesum.site.journal import Evaluated, EvaluationsAccepted
from tightframe_app.federation import kits
from tightframe_app.site import page

JOB, OTHER = "7c41e0d2-53aa-4a0f-9d8e-2f0d1b6a9e10", "8c41e0d2-53aa-4a0f-9d8e-2f0d1b6a9e11"
INTERRUPTED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""What a shell starts in the background ignores an interrupt, and so do its children."""
MAIN = "from tightframe_app.cli import main\nmain()\n"
THREE, FOUR = ["a", "b", "hospital-1"], ["a", "b", "c", "hospital-1"]


def revealed(job: str, slot: int, silos: list[str], *groups: str) -> dict[str, object]:
    """A fact as the protocol writes it before it gives its shares."""
    return {
        "entry": "revealed",
        "job": job,
        "epoch": 0,
        "slot": slot,
        "survivors": silos,
        "groups": [*groups],
    }


@pytest.fixture
def kit(tmp_path: Path) -> kits.Kit:
    made = make_kit(tmp_path / "hospital-1")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    data = {"fed_isic2019": {"root": "/secret/place", "center": 0}}
    values = kits.site_configuration("standard", state, data, {"dataset_id": "skin"}, "cpu")
    values["policy"] |= {"epsilon_cap": 8.0, "delta_cap": 1e-5, "max_sites": 12}
    (made / "local" / "tightframe.json").write_text(json.dumps(values))
    path = ledger_path(state, "hospital-1")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_ledger(path, SiteKeys(), create=True) as opened:
        opened.remember(
            Remembered(({"entry": "static_masked", "dataset": "skin", "roster": THREE, "lineage": JOB},))
        )
        opened.remember(
            Remembered((revealed(JOB, 1, FOUR, "update"), revealed(JOB, 2, THREE, "static", "update")))
        )
        profile = {"features": "mlp", "own weight": "as declared"}
        used = {"entry": "profile_used", "dataset": "skin", "profile": profile, "lineage": OTHER}
        opened.remember(Remembered((used, revealed(OTHER, 1, FOUR, "update"))))
        told = Evaluated("skin", OTHER, 1, "train-0", b"c" * 32, 2, 0, 416_000)
        remember(opened, [EvaluationsAccepted("skin", b"c" * 32), told])
        opened.charge(charge("round 1", dataset_id="skin", job_id=JOB), cap=CAP)
    return kits.Kit.open(made)


def known(kit: kits.Kit, monkeypatch: pytest.MonkeyPatch) -> page.Known:
    """By hashes: this ledger's keys are not the kit's."""
    from tightframe_app.site.memory import Memory

    monkeypatch.setattr(Memory, "check", lambda self: None)
    return page.Looker(kit).look()


def test_what_left_is_what_the_ledger_has(kit: kits.Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    found = known(kit, monkeypatch)
    assert [(one.job, one.sums, one.fewest, one.groups) for one in found.released] == [
        (OTHER, 1, 4, ("features",)),
        (JOB, 2, 3, ("changes", "static")),
    ]
    assert found.cohorts == {"skin": tuple(THREE)} and not found.problems
    (spent,) = found.spendings
    shown = str(page.content(found).parts)
    assert spent.dataset_id == "skin" and "of 8" in shown and JOB in shown
    assert "the client does not run" in shown and "PRIVATE KEY" not in shown


def test_every_rule_is_told_with_what_it_means_and_what_was_changed() -> None:
    words = page.rule_words()
    assert {name for name in Policy.model_fields if name != "profile"} <= words.keys()
    assert "null sets no limit" in words["max_weight_share"] and not any(
        "None" in text for text in words.values()
    )
    assert words["max_rounds"] == "the most rounds of a job, at most 10,000."
    policy = Policy(profile="standard", **{**PROFILES["standard"], "max_sites": 12})
    shown = str(page.content(page.Known("hospital-1", Path("kit"), policy=policy)).parts)
    changed = shown[shown.index("Changed from the profile") : shown.index("<details")]
    assert re.findall("<code>([a-z_]+)</code>", changed) == ["max_sites"] and "12" in changed
    assert all(f"<code>{name}</code>" in shown for name in Policy.model_fields if name != "profile")


def test_refusals_come_from_the_logs_and_cannot_write_the_page(
    kit: kits.Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kit.folder / JOB
    folder.mkdir()
    evil = "<script>alert(1)</script>\x1b[2J" + "x" * 1000
    lines = [
        "2026-11-24 10:00:00,001 - Doors - WARNING - TF-733: the doors refused admin:shell of origin server:",
        "  - what is below it",
        "no part of it",
        "  - nor this",
        "2026-11-24 10:00:00,002 - Cell - INFO - TF-999: not a refusal",
        "no line of a log TF-612",
        "2026-99-99 99:99:99,1 - x - ERROR - TF-733",
    ]
    (kit.folder / "log.txt").write_text("\n".join(lines))
    (folder / "log.txt").write_bytes(
        f"2026-11-24 11:00:00,001 - Executor - ERROR - refused: TF-612: {evil}\n".encode() + b"\xff\xfe\n"
    )
    found = known(kit, monkeypatch)
    assert [(one.code, one.job) for one in found.refusals] == [
        ("TF-733", ""),
        ("TF-612", JOB),
        ("TF-733", ""),
    ]
    shown = str(page.content(found).parts)
    assert "<script" not in shown and "\x1b" not in shown and "x" * 400 not in shown
    assert (
        "origin server: what is below it" in shown and "part of it" not in shown and "nor this" not in shown
    )
    assert "2026-99-99 99:99:99" in shown


def test_one_clock_jobs_by_name_and_no_backticks(kit: kits.Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        config = kit.folder / OTHER / "app_hospital-1" / "config"
        config.mkdir(parents=True)
        args = {"job_name": "flat_<b>", "withdraw": {"previous": JOB}}
        job = {"executors": [{"executor": {"args": args}}]}
        (config / "config_fed_client.json").write_text(json.dumps(job))
        (kit.folder / OTHER / "log.txt").write_text(
            "2026-11-24 10:00:00,001 - Doors - WARNING - TF-733: add `pins` here\n"
        )
        found = known(kit, monkeypatch)
        shown = str(page.content(found).parts)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "2026-11-24 01:00 UTC" in shown and "10:00" not in shown
    assert "flat_&lt;b&gt;, a withdrawal (8c41e0d2)" in shown and "add <code>pins</code> here" in shown
    assert found.exact == (OTHER,), "the other one was charged"
    assert "1 job without differential privacy released exact totals, which no epsilon counts" in shown
    assert "tightframe site release show). Of all data sets here: flat_" in shown
    states = [one.state for one in found.findings]
    assert f"{states.count('note')} note" in shown and "finding" not in shown


def test_what_exact_totals_told_and_who_accepted_what_stands_beside_what_was_spent(
    kit: kits.Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = str(page.content(known(kit, monkeypatch)).parts)
    spent = spent[spent.index("What was spent") : spent.index("What was refused")]
    assert "2 models, 0.0% of what the validation records hold, 41.6% of what the test records hold" in spent
    assert "Left: 9 models, 50.0% of" in spent and "hold, 8.4% of what the test records hold" in spent
    assert "layers and features so far: none." in spent
    assert "all exact evaluations of one run of a job; first used in job" in spent


def test_what_cannot_be_read_is_said_on_the_page(kit: kits.Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    looker = page.Looker(kit)
    assert any("TF-702" in one or "signature" in one.lower() for one in looker.look().problems), (
        "the kit's key has not signed this ledger"
    )
    (kit.local / "tightframe.json").write_text('{"policy": {"max_sites": 0}}')
    found = looker.look()
    assert found.policy is None and "max_sites" in found.problems[0]
    assert "cannot be used" in str(page.content(found).parts)


@pytest.mark.whole
def test_keys_screen_readers_and_eyes_follow_it(
    kit: kits.Kit, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = known(kit, monkeypatch)
    assert first.released and first.spendings
    then = replace(first, running=("the engine's client (process 7)",), problems=("a problem",))
    check_in_a_browser(browser, page.KIND, page.content(first), page.content(then))


def test_files_are_read_again_only_when_they_have_changed(
    kit: kits.Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(kit, monkeypatch)
    looker, calls = page.Looker(kit), []
    real = page.Looker._read
    monkeypatch.setattr(page.Looker, "_read", lambda self, known: (calls.append(1), real(self, known))[1])
    for _ in range(3):
        looker.look()
    assert len(calls) == 1
    config = kit.local / "tightframe.json"
    config.write_text(config.read_text().replace('"max_sites": 12', '"max_sites": 11'))
    found = looker.look()
    assert len(calls) == 2 and found.policy is not None and found.policy.max_sites == 11


@pytest.mark.whole
def test_the_command_serves_it_until_ctrl_c_and_changes_nothing(kit: kits.Kit, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED + MAIN, "site", "page", str(kit.folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        line, until = "", time.monotonic() + 60
        while not line.startswith("page: http") and time.monotonic() < until:
            line = process.stdout.readline()
        link = line.split()[1]
        assert link.startswith("http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(link, timeout=10) as answer:
            body = answer.read().decode()
        process.send_signal(signal.SIGINT)
        try:
            rest = process.communicate(timeout=30)[0]
        finally:
            process.kill()  # else a page that goes on is waited for without end
    assert process.returncode == 0 and "the page is closed" in rest, rest
    assert "What left in sums" in body and "<script" in body
    after = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    added = {path: after.pop(path) for path in list(after) if path not in before}
    assert after == before
    # SQLite's own, of every reader of a database that a job may be writing to.
    assert {path.name: len(raw) for path, raw in added.items() if not path.name.endswith("-shm")} in (
        {},
        {"ledger.sqlite-wal": 0},
    )
