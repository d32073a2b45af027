"""Live pages as a visitor reaches them, and what keyboards and screen readers need of any page."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from itertools import pairwise

from tests.support.pages import Page, said

from tightframe_app.live.server import Live


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
