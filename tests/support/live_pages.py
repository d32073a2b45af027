"""Live pages as a visitor reaches them, and what keyboards and screen readers need of any page."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from itertools import pairwise

from tests.support.browser import DESK, PHONE, Browser
from tests.support.pages import Page, said
from tests.support.screens import contrast_problems, shown_problems

from tightframe_app.live.server import Content, Live


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str


@dataclass
class Visitor:
    """Whoever reaches the page's port."""

    live: Live
    cookie: str = ""

    def ask(self, target: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request; ``_`` in a header's name stands for ``-``."""
        found = http.client.HTTPConnection("127.0.0.1", self.live.port, timeout=10)
        try:
            found.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            given = {"Host": f"127.0.0.1:{self.live.port}", **headers}
            if self.cookie:
                given = {"Cookie": self.cookie, **given}
            for name, value in given.items():
                if value:
                    found.putheader(name.replace("_", "-"), value)
            found.endheaders()
            answer = found.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            found.close()

    def opened(self) -> Answer:
        """Follow the link, and keep the cookie."""
        target = self.live.link.removeprefix(f"http://127.0.0.1:{self.live.port}")
        answer = self.ask(target)
        self.cookie = answer.headers.get("Set-Cookie", "").partition(";")[0]
        return answer

    @property
    def path(self) -> str:
        """The page's own path, which only an opened page tells."""
        return self.live._path


def check_basics(page: Page) -> None:
    """What WCAG asks for and the page's source can show."""
    tree = page.tree
    assert tree.get("lang") == "en" and tree.findtext("head/title")
    assert len(list(tree.iter("main"))) == 1 == len(list(tree.iter("h1")))
    headings = [int(item.tag[1]) for item in tree.iter() if item.tag in ("h1", "h2", "h3", "h4")]
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(headings)), headings
    assert all(said(item) for item in tree.iter() if item.tag in ("h1", "h2", "h3", "summary", "a"))
    for table in tree.iter("table"):
        cells = list(table.iter("th"))
        assert cells and all(cell.get("scope") in ("row", "col") for cell in cells)
    for item in tree.iter():
        assert (item.get("tabindex") or "0") == "0", "keys go in the order of the page"
        if item.get("tabindex"):
            assert item.get("role") and item.get("aria-label")
        if item.tag == "abbr":
            assert item.get("title")
        if item.tag == "progress":
            assert item.get("aria-label")
    places = [item.get("id") for item in tree.iter() if item.get("id")]
    assert len(places) == len(set(places))


FOCUSED = """(() => {
  const now = document.activeElement;
  return [now.tagName, now.getAttribute("aria-label") || now.textContent,
    getComputedStyle(now).outlineStyle];
})()"""


def check_in_a_browser(browser: Browser, kind: str, first: Content, then: Content) -> None:
    """What keys, screen readers and eyes need of a live page, before and after it has changed."""
    with Live("A page", kind, first) as live:
        browser.size(DESK)
        browser.open(live.link)
        browser.until("document.getElementById('when').textContent.startsWith('Looked at')")
        spoken = browser.spoken()
        roles = [role for role, _, _ in spoken]
        assert roles.count("main") == roles.count("status") == 1
        levels = [values["level"] for role, name, values in spoken if role == "heading" and name]
        assert levels.count(1) == 1 and roles.count("heading") == len(levels) > 3
        (live_region,) = [values for role, _, values in spoken if role == "status"]
        assert (live_region["live"], live_region["atomic"]) == ("polite", True)
        assert all(name for role, name, _ in spoken if role in ("progressbar", "image", "DisclosureTriangle"))
        named = [name for role, name, values in spoken if values.get("focusable") and role != "RootWebArea"]
        assert named and all(named)

        stops = []
        for _ in named:
            browser.press("Tab", 9)
            stops.append(browser.value(FOCUSED))
        assert [name for _, name, _ in stops] == browser.value(WITHIN), "in the order of the page"
        assert all(outline == "solid" for _, _, outline in stops), "one sees where one is"

        while browser.value(FOCUSED)[0] != "SUMMARY":
            browser.press("Tab", 9)
        focused = browser.value(FOCUSED)
        browser.press("Enter", 13)
        opened = "document.activeElement.parentElement.open"
        assert browser.value(opened) is True
        live.show(then)
        browser.until(f"document.getElementById('said').textContent === {then.said!r}")
        assert browser.value(FOCUSED)[0] == focused[0] and browser.value(opened) is True

        browser.value("document.querySelectorAll('details').forEach(item => { item.open = true; })")
        assert contrast_problems(browser) == []
        assert [*shown_problems(browser, DESK), *shown_problems(browser, PHONE)] == []
        browser.open("about:blank")


WITHIN = """[...document.querySelectorAll("[tabindex],summary,a")].filter(item => item.checkVisibility())
  .map(item => item.getAttribute("aria-label") || item.textContent)"""
"""What keys reach, in order."""
