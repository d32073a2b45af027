"""``tightframe explain``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.padding import Padding

from tightframe_app import formats
from tightframe_app.explain import errors, lookup, topics
from tightframe_app.explain.topics import Topic
from tightframe_app.screens import console

WIDTH = 100
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")


def explain(
    words: Annotated[
        list[str] | None, typer.Argument(help="TF-612, privacy, min_sites, policy, fedmr, small_cnn ...")
    ] = None,
    form: formats.Form = "text",
) -> None:
    """Explain an error code, a value of a job or site, or the options of a method, model or data set.

    Without words it lists what it knows, by subject. A value stands with its (default).
    """
    codes: list[str] = []
    matches: list[Topic] = []
    known: tuple[str, ...] = ()
    for word in words or ():
        if re.fullmatch(r"TF-\d+", word, re.IGNORECASE):
            codes.append(_code(word.upper()))
        else:
            matches += lookup.find(word)
    if not words:
        known = (*errors.ENTRIES, *lookup.offered(), *topics.ours())
    if form == "json":
        from tightframe_app.outputs import CodeExplained, Explained, TopicExplained

        explained = [CodeExplained(code=code, title=errors.title(code), **_plain(code)) for code in codes]
        blocks = [TopicExplained.model_validate(asdict(topic)) for topic in matches]
        formats.show(Explained(codes=tuple(explained), topics=tuple(blocks), known=known))
        return
    if known:
        _print_known()
    for code in codes:
        _print_code(code)
    for topic in matches:
        _print_topic(topic)


def _print_known() -> None:
    """List all topics by kind, and all codes by subject."""
    out, added = console(WIDTH), lookup.offered()
    out.print("tightframe explain WORD ...: a topic, any value in one (min_sites), or a code")
    for kind, title in topics.KINDS.items():
        names = [*topics.of(kind), *(name for name, other in added.items() if other == kind)]
        out.print(title)
        out.print(Padding(", ".join(names), (0, 0, 0, 2)))
    out.print("Codes")
    for section in errors.SECTIONS:
        out.print(Padding(f"{section.title}: {', '.join(_runs(section.codes))}", (0, 0, 0, 2)))


def _runs(codes: Iterable[str]) -> list[str]:
    """Return codes, with consecutive ones as a range."""
    runs: list[list[str]] = []
    for code in codes:
        if runs and int(code[3:]) == int(runs[-1][-1][3:]) + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]


def _code(word: str) -> str:
    """Refuse an unknown code."""
    if word not in errors.ENTRIES:
        from tightframe.options import unknown_name

        raise typer.BadParameter(unknown_name("code", word, list(errors.ENTRIES)))
    return word


def _plain(code: str) -> dict[str, str]:
    """Return an entry's texts, with links as text."""
    entry = errors.ENTRIES[code]
    texts = {"means": entry.means, "do": entry.do, "leaves": entry.leaves}
    return {name: _LINK.sub(r"\1 (docs/\2)", text) for name, text in texts.items()}


def _print_code(code: str) -> None:
    texts, out = _plain(code), console(WIDTH)
    (about,) = (section.about for section in errors.SECTIONS if code in section.codes)
    out.print(f"{code}: {errors.title(code)}")
    for line in (texts["means"], _LINK.sub(r"\1 (docs/\2)", about)):
        if line:
            out.print(Padding(line, (0, 0, 0, 2)))
    out.print(Padding(f"Do: {texts['do']}", (0, 0, 0, 2)))
    out.print(Padding(f"Leaves the site: {texts['leaves']}", (0, 0, 0, 2)))


def _print_topic(topic: Topic) -> None:
    out = console(WIDTH)
    out.print(topic.about)
    for value in topic.values:
        out.print(f"  {value.name}{value.shown_default}")
        out.print(Padding(value.means, (0, 0, 0, 6)))
    if not topic.values:
        out.print("  no options")
