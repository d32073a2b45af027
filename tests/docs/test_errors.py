"""``docs/errors.md`` has an entry for every code in the source, and no entry without a code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"TF-\d{3}")
RULE = "*the code* and no more, unless the entry ends in *Leaves:* or is on this list."
NOTHING = re.compile(r"^\*Nothing leaves with\* ((?:TF-\d{3},\s)*TF-\d{3})\.$", re.MULTILINE)
HEADING = re.compile(r"^#+ (TF-\d{3}):", re.MULTILINE)


def codes_in_source() -> set[str]:
    paths = [path for folder in ("custom", "app") for path in (ROOT / folder).rglob("*.py")]
    return {code for path in paths for code in CODE.findall(path.read_text(encoding="utf-8"))}


def test_every_code_has_exactly_one_entry_and_every_entry_a_code() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = HEADING.findall(text)
    in_source = codes_in_source()
    assert len(in_source) > 10, "the search itself is broken"
    assert sorted(set(documented)) == sorted(documented), "a code has two entries"
    assert sorted(in_source - set(documented)) == [], "codes without an entry in docs/errors.md"
    assert sorted(set(documented) - in_source) == [], "entries of docs/errors.md that no source names"


def test_every_entry_says_what_it_means_what_to_do_and_what_leaves_the_site() -> None:
    """What it means (title, and a paragraph if it takes more), what to do, what leaves but the code."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    head, *entries = re.split(r"^### ", text, flags=re.MULTILINE)
    assert RULE in " ".join(head.split())
    (listed,) = NOTHING.findall(head)
    nothing = CODE.findall(listed)
    assert nothing == sorted(set(nothing)) and set(nothing) <= set(HEADING.findall(text))
    for entry in entries:
        title, _, body = entry.partition("\n")
        body = " ".join(re.split(r"^## ", body, flags=re.MULTILINE)[0].split())
        parts = re.fullmatch(r"(?:.+ )?\*Do:\* (?P<do>.+?)(?: \*Leaves:\* (?P<leaves>.+))?", body)
        assert parts and re.fullmatch(r"TF-\d{3}: .+", title), title
        assert body.count("*Do:*") == 1 and body.count("*Leaves:*") <= 1, title
        assert parts["leaves"] not in ("The code.", "Nothing."), f"{title}: the page's rule says so already"
        assert not (title[:6] in nothing and parts["leaves"]), f"{title}: more than nothing leaves"


def test_codes_that_entries_refer_to_have_entries() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(CODE.findall(text)) <= set(HEADING.findall(text))
