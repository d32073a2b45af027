"""Register of error codes: meaning, what to do, and what leaves a site with it.

The texts are in ``errors.toml``. ``tightframe explain TF-612`` prints an entry, and the guides' site shows
them all.
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
    """Explanation of a code.

    Attributes:
        do: what to do.
        title: in a few words; empty if in ``tightframe.errors.REASONS``.
        means: beyond the title; may be empty.
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
        about: text on all of them; may be empty.
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
    """Return a code's title.

    >>> title("TF-502"), title("TF-614")
    ('a silo was late', "below the site's policy")
    """
    return ENTRIES[code].title or REASONS[code]
