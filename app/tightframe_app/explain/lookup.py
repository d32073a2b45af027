"""Look up a word among the topics of ``tightframe explain``."""

from __future__ import annotations

from dataclasses import replace

import typer

from tightframe_app.explain.topics import BLOCKS, DATA, METHODS, MODELS, Topic, of, ours


def offered() -> dict[str, str]:
    """Return name -> kind of the methods, models and data sets that installed packages add."""
    from importlib.metadata import entry_points

    from tightframe import registry

    groups = {METHODS: registry.METHODS, MODELS: registry.BACKBONES, DATA: registry.DATASETS}
    return {entry.name: kind for kind, group in groups.items() for entry in entry_points(group=group)}


def find(word: str) -> list[Topic]:
    """Return the topics that a word names, or topics reduced to the value that it names.

    Raises:
        typer.BadParameter: if there is none, suggesting the closest word.
    """
    blocks = of(BLOCKS)
    if word in blocks:
        return [blocks[word]]
    if single := [item for item in (_single(item, word) for item in blocks.values()) if item.values]:
        return single
    known = ours()
    if word in known:
        return [known[word]]
    packages = offered()
    if word in packages:
        from tightframe_app.explain import options

        return [options.of_package(packages[word], word)]
    if elsewhere := [item for item in (_single(item, word) for item in known.values()) if item.values]:
        return elsewhere
    from tightframe.options import did_you_mean

    values = [value.name for item in blocks.values() for value in item.values]
    suggestion = did_you_mean(word, [*packages, *known, *values])
    raise typer.BadParameter(f"no such word as {word!r}: {suggestion}`tightframe explain` lists them all")


def _single(item: Topic, word: str) -> Topic:
    """Return a topic with only the values of a name, which may include its block."""
    values = [value for value in item.values if f".{value.name}".endswith(f".{word}")]
    return replace(item, values=tuple(values))
