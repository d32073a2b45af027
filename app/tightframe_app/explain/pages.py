"""Explanations as parts of the guides: the guides' site replaces marks in pages by them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files

from tightframe_app.explain import errors, topics
from tightframe_app.jobs import presets

MARK = re.compile(r"^<!--explain:(.+)-->$", re.MULTILINE)
"""A mark in a guide; after the colon ``errors``, ``effects``, or names of ``explain.topics`` joined by +,
optionally with ``file:`` before them, for the docstring of a method's file."""
FILE = "file:"


def filled(page: str) -> str:
    """Return a guide with its marks replaced."""
    return MARK.sub(lambda mark: "\n\n".join(map(_part, mark[1].split("+"))), page)


def _part(name: str) -> str:
    if name == "errors":
        return "\n\n".join(map(_section, errors.SECTIONS))
    if name == "effects":
        return "\n".join(_effects())
    if name.startswith(FILE):
        return _docstring(name.removeprefix(FILE))
    topic = topics.ours()[name]
    lines = [f"- `{value.name}`{value.shown_default}: {value.means}" for value in topic.values] or [
        "No options."
    ]
    return "\n".join(lines if name in topics.of(topics.METHODS) else (topic.about, "", *lines))


def _docstring(place: str) -> str:
    """Return source and equations in a method's file, as Markdown, without importing it.

    Args:
        place: the file, ``fedprox`` or ``fedilc/fishr``, or a function, ``fedmr.intra_class_loss``.
    """
    path, _, function = place.partition(".")
    folder = files("tightframe").joinpath("methods")
    file = folder.joinpath(f"{path}.py")
    tree = ast.parse(
        (file if file.is_file() else folder.joinpath(path, "__init__.py")).read_text(encoding="utf-8")
    )
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = (ast.get_docstring(functions[function] if function else tree) or "").removeprefix("Return ")
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
            label = f"{method.title} (`{effect.options}`)" if effect.options else method.title
            cells = (
                effect.measure,
                effect.numbers,
                str(effect.seeds),
                "**seen**" if effect.seen else "not seen",
            )
            yield f"| {' | '.join((label, effect.setting, *cells))} |"
        yield ""


def _section(section: errors.Section) -> str:
    parts = [f"## {section.title}", section.about]
    for code, entry in section.codes.items():
        leaves = "" if entry.leaves == errors.CODE else f" *Leaves:* {entry.leaves}"
        parts += [f"### {code}: {errors.title(code)}", entry.means, f"*Do:* {entry.do}{leaves}"]
    return "\n\n".join(filter(None, parts))
