"""Page layout of a report: one file without script or external resources, for light, dark and print."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from importlib.resources import files

from tightframe.report.drawing.markup import Markup, Part, join, tag

STYLE = (files(__package__) / "style.css").read_text(encoding="utf-8")


_SECTION = re.compile(r'<section id="([^"]+)"><h2>(.*?)</h2>')
FEW = 3
"""Most sections of a page without a contents list."""


def policy(script: str | None = None) -> str:
    """Return a page's content security policy, under which nothing in it can load anything.

    Args:
        script: the only one allowed, by its hash; it may ask the page's own server. None for no script.
    """
    parts = ["default-src 'none'", f"style-src {_hash(STYLE)}"]
    if script is not None:
        parts += [f"script-src {_hash(script)}", "connect-src 'self'"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(title: str, kind: str, *parts: Part, script: str | None = None) -> str:
    """Return a whole page, with a list of its sections before the first of them.

    Args:
        kind: of report, above the title.
        script: of this package, for a live page; a report has none.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="robots", content="noindex"),
        tag("title", title),
        tag("style", Markup(STYLE)),
        None if script is None else tag("script", Markup(script), type="module"),
    )
    content = join(parts)
    if script is None:
        content = _with_contents(content)
    body = tag("body", tag("main", tag("p", kind, class_="kind"), tag("h1", title), content))
    return str(join([Markup("<!DOCTYPE html>\n"), tag("html", head, "\n", body, lang="en"), "\n"]))


def _with_contents(content: Markup) -> Markup:
    """Put the list of sections before the first one, unless there are few."""
    uses: Counter[str] = Counter()

    def once(match: re.Match[str]) -> str:
        """Give distinct ids to sections whose titles differ only in signs."""
        uses[match[1]] += 1
        place = match[1] if uses[match[1]] == 1 else f"{match[1]}-{uses[match[1]]}"
        return f'<section id="{place}"><h2>{match[2]}</h2>'

    content = Markup(_SECTION.sub(once, content))
    sections = list(_SECTION.finditer(content))
    if len(sections) <= FEW:
        return content
    links = [tag("li", tag("a", Markup(of[2]), href=f"#{of[1]}")) for of in sections]
    listed = tag(
        "nav",
        tag("h2", "Contents", id="contents"),
        tag("ul", *links),
        class_="contents",
        aria_labelledby="contents",
    )
    start = sections[0].start()
    return join([Markup(content[:start]), listed, Markup(content[start:])])


def notice(kind: str, *parts: Part) -> Markup:
    """Return a notice of kind ``good``, ``bad`` or ``warn``."""
    return tag("div", *(tag("p", part) for part in parts), class_=f"said {kind}")


def tiles(values: list[tuple[str, str]]) -> Markup:
    """Return the key numbers as tiles: a value and its name."""
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", name), class_="tile") for value, name in values),
        class_="tiles",
    )
