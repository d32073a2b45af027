"""Pages of reports as a reader of XML and a browser's parser see them, and which runs write them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
SVG = "{http://www.w3.org/2000/svg}"


_written = True


@contextmanager
def written(wanted: bool) -> Iterator[None]:
    """Let runs in this process write their pages or not, which is a sixth of a small run's time."""
    global _written
    before, _written = _written, wanted
    try:
        yield
    finally:
        _written = before


def where_wanted(leave: Callable[[Path, logging.Logger], None]) -> Callable[[Path, logging.Logger], None]:
    """``writing.leave``, or nothing where pages are not wanted."""

    def maybe(folder: Path, log: logging.Logger) -> None:
        if _written:
            leave(folder, log)

    return maybe


def values(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Page:
    """A page as a reader of XML and a browser's parser see it."""

    source: str

    @classmethod
    def of(cls, folder: Path) -> Page:
        return cls((folder / "report.html").read_text(encoding="utf-8"))

    @property
    def tree(self) -> Element:
        return ElementTree.fromstring(self.source)  # noqa: S314 - made by this program

    @property
    def text(self) -> str:
        """All that is shown, in one line."""
        body = self.tree.find("body")
        assert body is not None
        return " ".join(" ".join(body.itertext()).split())

    def section(self, title: str) -> Element:
        (found,) = [item for item in self.tree.iter("section") if item.findtext("h2") == title]
        return found

    def titles(self) -> list[str | None]:
        return [item.findtext("h2") for item in self.tree.iter("section")]

    def tables(self, title: str) -> list[list[dict[str, str]]]:
        """The tables of a section, each row by its columns' names."""
        found = []
        for item in self.section(title).iter("table"):
            head = [said(cell) for cell in item.findall("thead/tr/th")]
            found.append([dict(zip(head, map(said, row), strict=True)) for row in item.findall("tbody/tr")])
        return found

    def facts(self, title: str) -> dict[str, str]:
        rows = [item for facts in self.section(title).iter("dl") for item in facts]
        return {said(row[0]): said(row[1]) for row in rows}

    def pictures(self) -> list[Element]:
        """Those for a desk: for a phone each is drawn again."""
        tree = self.tree
        again = {id(item) for of in tree.iter("div") if of.get("class") == "phone" for item in of}
        return [item for item in tree.iter(f"{SVG}svg") if id(item) not in again]

    def picture(self, title: str) -> Element:
        (found,) = [item for item in self.pictures() if item.findtext(f"{SVG}title") == title]
        return found


def said(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


class Loads(HTMLParser):
    """Elements and attributes, as a browser's tolerant parser finds them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
