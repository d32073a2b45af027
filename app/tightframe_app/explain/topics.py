"""Topics of ``tightframe explain`` besides codes: related values, by name.

Ours are kept in ``topics.json`` (``tightframe_app.kept``), those of installed packages are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tightframe_app import kept_files

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
    entries = kept_files.read(KEPT)[kind]
    return {
        item["name"]: Topic(item["name"], item["about"], tuple(Value(**value) for value in item["values"]))
        for item in entries
    }


def ours() -> dict[str, Topic]:
    """Return all our topics, by name."""
    return {name: topic for kind in KINDS for name, topic in of(kind).items()}
