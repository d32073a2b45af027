"""A live page in a real browser, where Debian's chromium is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.app.watch.test_web import view_of, whole_run
from tests.support.browser import Browser
from tests.support.live_pages import check_in_a_browser

from tightframe_app.live.server import Live
from tightframe_app.watch import web

CHROMIUM = shutil.which("chromium")
OLD = "asking the server"


@pytest.mark.whole
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_follows_the_link_once_and_puts_in_what_has_changed(tmp_path: Path) -> None:
    """The policy lets the page's own script run and ask; what the page was sent with is replaced."""
    first, then = web.content(web.View("job")), web.content(view_of(whole_run()))
    with Live("Job", web.KIND, first) as live:
        # The page itself is the first content, and what it asks for the second.
        bodies, _ = live._shown
        live.show(then)
        newest, version = live._shown
        live._shown = {"": bodies[""], "state": newest["state"]}, version
        seen = looked(live.link, tmp_path / "one")
        again = looked(live.link, tmp_path / "two")
    assert OLD in bodies[""].decode() and OLD not in seen
    assert "hospital-2" in seen and "<svg" in seen
    assert re.search("Looked at [0-9]", seen), "the script says when it asked last"
    assert re.search('id="lost"[^>]*hidden', seen)
    assert "used before" in again and "hospital-2" not in again


@pytest.mark.whole
def test_keys_screen_readers_and_eyes_follow_it(browser: Browser) -> None:
    now = whole_run()
    later = now.summing("closing", 4, 0, 1)
    check_in_a_browser(browser, web.KIND, web.content(view_of(now)), web.content(view_of(later)))


def looked(link: str, profile: Path) -> str:
    """Return the page's elements after some seconds of its script."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--timeout=4000"]
    more = [f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom", link]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
