"""Meaning of every error code: what it means, what to do, and what leaves a site with it.

The texts stand in ``errors.toml``. ``tightframe explain TF-612`` prints an entry, and the site of the guides
shows them all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from tightframe.errors import REASONS

CODE = "The code."


@dataclass(frozen=True)
class Entry:
    """What a code means.

    Attributes:
        do: what to do.
        title: in a few words; empty where ``tightframe.errors.REASONS`` has them.
        means: more than the title says; may be empty.
        leaves: what the server learns besides the silo's name.
    """

    do: str
    title: str = ""
    means: str = ""
    leaves: str = CODE


@dataclass(frozen=True)
class Section:
    """Codes of one subject.

    Attributes:
        codes: in order.
        about: what holds for all of them; may be empty.
    """

    title: str
    codes: Mapping[str, Entry]
    about: str = ""


def _sections() -> tuple[Section, ...]:
    read = tomllib.loads((files(__package__) / "errors.toml").read_text(encoding="utf-8"))
    return tuple(
        Section(**{**section, "codes": {code: Entry(**texts) for code, texts in section["codes"].items()}})
        for section in read["section"]
    )


SECTIONS = _sections()
ENTRIES: Mapping[str, Entry] = {code: entry for section in SECTIONS for code, entry in section.codes.items()}


def title(code: str) -> str:
    """Return what a code means in a few words.

    >>> title("TF-502"), title("TF-614")
    ('a silo was late', "below the site's policy")
    """
    return ENTRIES[code].title or REASONS[code]
