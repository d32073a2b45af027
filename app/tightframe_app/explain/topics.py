"""Topics of ``tightframe explain`` besides codes: related values, by name.

Ours are kept in ``topics.json`` (``tightframe_app.kept``), those of installed packages are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import typer

from tightframe_app import kept

KEPT = Path(__file__).with_name("topics.json")
BLOCKS, STATUS, METHODS, MODELS, DATA = "blocks", "status", "methods", "models", "data"
CONTRACTS, RESULTS = "contracts", "results"
KINDS = {
    BLOCKS: "A job, a site, its policy",
    CONTRACTS: "Contracts of own records",
    STATUS: "A running job",
    RESULTS: "Files of a run",
    METHODS: "Methods",
    MODELS: "Models",
    DATA: "Data sets",
}
"""Kind -> title, in the order of the list."""


@dataclass(frozen=True)
class Value:
    """A value of a configuration or a result.

    Attributes:
        name: with its blocks, such as ``training.epochs``.
        default: in a configuration's notation, ``none`` (empty) or ``required``; for a policy's rule that of
            each profile; empty for a value that is not set.
        means: its meaning.
    """

    name: str
    default: str
    means: str

    @property
    def shown_default(self) -> str:
        """The default in brackets, after a blank; empty without one."""
        return f" ({self.default})" if self.default else ""


@dataclass(frozen=True)
class Topic:
    """Related values.

    Attributes:
        name: to ask for them by.
        about: describes them in a sentence.
        values: in the order of the model.
    """

    name: str
    about: str
    values: tuple[Value, ...]


@cache
def of(kind: str) -> Mapping[str, Topic]:
    """Return our topics of a kind, by name; ``BLOCKS`` are a job's and a site's values."""
    entries = kept.read(KEPT)[kind]
    return {
        item["name"]: Topic(item["name"], item["about"], tuple(Value(**value) for value in item["values"]))
        for item in entries
    }


def ours() -> dict[str, Topic]:
    """Return all our topics, by name."""
    return {name: topic for kind in KINDS for name, topic in of(kind).items()}


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
