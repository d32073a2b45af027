"""HTML and SVG as values: text is escaped on entry, so that no name can become markup.

All markup is well-formed XML, which tests parse.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Markup(str):
    """Text that is already markup; only this module creates it."""

    __slots__ = ()


Part = str | Markup | None
_EMPTY = frozenset(("meta", "br", "col"))


def text(value: object) -> Markup:
    """Return a value as escaped text, with control characters made visible."""
    shown = str(value)
    if not shown.isprintable():
        shown = "".join(
            part if part.isprintable() or part == "\n" else part.encode("unicode_escape").decode()
            for part in shown
        )
    return Markup(html.escape(shown, quote=True))


def coded(sentence: str) -> Markup:
    """Return a sentence with text between backticks as code.

    >>> coded("set `a`"), coded("a ` alone")
    ('set <code>a</code>', 'a ` alone')
    """
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        return text(sentence)
    return join(tag("code", part) if i % 2 else part for i, part in enumerate(parts))


def tag(name: str, /, *parts: Part, **attributes: object) -> Markup:
    """Return an element; parts that are not markup are escaped, None is left out.

    Attributes: ``class_`` for ``class``, ``_`` for ``-``; None is left out.

    >>> tag("p", "a < b", tag("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    markup = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{markup} />")
    return Markup(f"<{name}{markup}>{join(parts)}</{name}>")


def join(parts: Iterable[Part], between: str = "") -> Markup:
    """Join parts; those that are not markup are escaped."""
    return Markup(
        between.join(part if isinstance(part, Markup) else text(part) for part in parts if part is not None)
    )


LONG = 36
"""Most characters of a table cell on one line."""


def _signs(cell: Part) -> int:
    return len(re.sub("<[^>]*>", "", cell)) if cell else 0


def table(
    head: Sequence[Part],
    rows: Iterable[Sequence[Part]],
    *,
    caption: str | None = None,
    wrapped: Collection[int] = (),
) -> Markup:
    """Return a table that scrolls if it is too wide; a row's first cell is its header.

    No cell is cut: one of more than ``LONG`` characters is wrapped.

    Args:
        wrapped: columns of sentences, always wrapped.
    """
    body = [
        tag(
            "tr",
            *(
                tag(
                    "th" if i == 0 else "td",
                    cell,
                    scope="row" if i == 0 else None,
                    class_="wrap" if i in wrapped or _signs(cell) > LONG else None,
                )
                for i, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else None,
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
            tag("tbody", *body),
        ),
        class_="scroll",
        tabindex="0",
        role="group",
        aria_label="table, scrolls where it is wide",
    )


def facts(rows: Iterable[tuple[str, Part]]) -> Markup:
    """Return a list of names and values; a value of None is left out."""
    shown = [(name, value) for name, value in rows if value is not None]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in shown))


def listed(items: Iterable[Part]) -> Markup:
    """Return a bulleted list."""
    return tag("ul", *(tag("li", item) for item in items))


def section(title: str, *parts: Part) -> Markup:
    """Return a section of the page under its title, with an id for the contents list."""
    return tag("section", tag("h2", title), *parts, id=anchor(title))


def anchor(title: str) -> str:
    """Return the id of a section on its page.

    >>> anchor("Course of training"), anchor("\N{GREEK SMALL LETTER EPSILON}?")
    ('course-of-training', 'part')
    """
    return "-".join(re.findall("[a-z0-9]+", title.lower())) or "part"


def without(why: str, word: str = "missing") -> Markup:
    """Return the word for a cell without a value, with the reason as a tooltip."""
    return tag("abbr", word, title=why, class_="missing")


DESK, PHONE = 720.0, 350.0
"""Greatest width of a picture in pixels: on a desktop screen and paper, and on a phone."""


class Drawing(Protocol):
    """A picture that can be drawn at a given width."""

    def __call__(self, *, width: float) -> Markup:
        """Draw it, at most ``width`` pixels wide."""


def figure(draw: Drawing, caption: str, *parts: Part) -> Markup:
    """Return a picture and its caption, drawn for desktop and phone; the style shows one of them."""
    desk, phone = draw(width=DESK), draw(width=PHONE)
    both = [tag("div", desk, class_="desk"), tag("div", phone, class_="phone")]
    return tag("figure", *([desk] if desk == phone else both), tag("figcaption", caption), *parts)


def folded(summary: str, *parts: Part) -> Markup:
    """Return a long table, folded on screen and open in print."""
    return tag("details", tag("summary", summary), *parts)
