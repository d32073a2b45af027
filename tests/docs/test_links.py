"""Every relative link of the guides leads to a file that exists, and every anchor to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "provisioning").rglob("*.md")],
    key=str,
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a text."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in headings)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def anchors(page: Path) -> set[str]:
    return anchors_of(page.read_text(encoding="utf-8"))


def broken_in(text: str, page: Path) -> list[str]:
    """The links of a text that lead nowhere, if it stands in a page."""
    found = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in (anchors(target) if place else anchors_of(text))):
            found.append(link)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return broken_in(page.read_text(encoding="utf-8"), page)


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A site's own file: `local/x.json`\n```sh\n# no heading\n```\n### 1. Ask, then [go](x.md)\n"
    )
    assert anchors(page) == {"a-sites-own-file-localxjson", "1-ask-then-go"}
    page.write_text("## Here\n[a](#here) [b](#there) [c](gone.md) [d](page.md#here) [e](https://x.org/#z)\n")
    assert broken(page) == ["#there", "gone.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []
