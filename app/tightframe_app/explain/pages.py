"""The same as parts of the guides: a page has a mark, and the site of the guides what stands for it."""

from __future__ import annotations

import re

from tightframe_app.explain import errors, topics

MARK = re.compile(r"^<!--explain:(.+)-->$", re.MULTILINE)
"""A line of a guide; after the colon ``errors``, or names of ``explain.topics``, with + between them."""


def filled(page: str) -> str:
    """Return a guide with what its marks stand for."""
    return MARK.sub(lambda mark: "\n\n".join(map(_part, mark[1].split("+"))), page)


def _part(name: str) -> str:
    if name == "errors":
        return "\n\n".join(map(_section, errors.SECTIONS))
    topic = topics.ours()[name]
    lines = [f"- `{value.name}`{value.shown_default}: {value.means}" for value in topic.values] or [
        "No options."
    ]
    return "\n".join(lines if name in topics.of(topics.METHODS) else (topic.about, "", *lines))


def _section(section: errors.Section) -> str:
    parts = [f"## {section.title}", section.about]
    for code, entry in section.codes.items():
        leaves = "" if entry.leaves == errors.CODE else f" *Leaves:* {entry.leaves}"
        parts += [f"### {code}: {errors.title(code)}", entry.means, f"*Do:* {entry.do}{leaves}"]
    return "\n\n".join(filter(None, parts))
