"""The same as parts of the guides: a page has a mark, and the site of the guides what stands for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files

from tightframe_app.explain import errors, topics
from tightframe_app.jobs import presets

MARK = re.compile(r"^<!--explain:(.+)-->$", re.MULTILINE)
"""A line of a guide; after the colon ``errors``, ``effects``, or names of ``explain.topics`` joined by +,
before which ``file:`` may stand, for what a method's file says first."""
FILE = "file:"


def filled(page: str) -> str:
    """Return a guide with what its marks stand for."""
    return MARK.sub(lambda mark: "\n\n".join(map(_part, mark[1].split("+"))), page)


def _part(name: str) -> str:
    if name == "errors":
        return "\n\n".join(map(_section, errors.SECTIONS))
    if name == "effects":
        return "\n".join(_effects())
    if name.startswith(FILE):
        return _said_first(name.removeprefix(FILE))
    topic = topics.ours()[name]
    lines = [f"- `{value.name}`{value.shown_default}: {value.means}" for value in topic.values] or [
        "No options."
    ]
    return "\n".join(lines if name in topics.of(topics.METHODS) else (topic.about, "", *lines))


def _said_first(place: str) -> str:
    """Return source and equations from a method's file, which is not imported, as Markdown.

    Args:
        place: the file, ``fedprox`` or ``fedilc/fishr``, or a function, ``fedmr.intra_class_loss``.
    """
    path, _, function = place.partition(".")
    folder = files("tightframe").joinpath("methods")
    one = folder.joinpath(f"{path}.py")
    tree = ast.parse(
        (one if one.is_file() else folder.joinpath(path, "__init__.py")).read_text(encoding="utf-8")
    )
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = (ast.get_docstring(named[function] if function else tree) or "").removeprefix("Return ")
    text = text.partition("\nArgs:\n")[0].rstrip()
    return re.sub(r"::$", ":", text[:1].upper() + text[1:], flags=re.MULTILINE)


def _effects() -> Iterator[str]:
    """Yield a table of all measured comparisons for each baseline."""
    from tightframe import methods

    measured = [(method, effect) for method in methods.METHODS for effect in presets.effects(method.name)]
    for baseline in dict.fromkeys(effect.baseline for _, effect in measured):
        yield f"| method, options | setting | measure | less {baseline}'s [95 %] | seeds | |"
        yield "|---|---|---|---|---|---|"
        for method, effect in (pair for pair in measured if pair[1].baseline == baseline):
            named = f"{method.title} (`{effect.options}`)" if effect.options else method.title
            found = (
                effect.measure,
                effect.numbers,
                str(effect.seeds),
                "**seen**" if effect.seen else "not seen",
            )
            yield f"| {' | '.join((named, effect.setting, *found))} |"
        yield ""


def _section(section: errors.Section) -> str:
    parts = [f"## {section.title}", section.about]
    for code, entry in section.codes.items():
        leaves = "" if entry.leaves == errors.CODE else f" *Leaves:* {entry.leaves}"
        parts += [f"### {code}: {errors.title(code)}", entry.means, f"*Do:* {entry.do}{leaves}"]
    return "\n\n".join(filter(None, parts))
