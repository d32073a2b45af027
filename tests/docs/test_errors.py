"""``docs/errors.md`` has an entry for every code in the source, and no entry without a code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"TF-\d{3}")
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
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        parts = re.findall(r"^\*(Means|Do|Leaves the site)\.\*", entry, flags=re.MULTILINE)
        assert parts == ["Means", "Do", "Leaves the site"], entry.splitlines()[0]


def test_codes_that_entries_refer_to_have_entries() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(CODE.findall(text)) <= set(HEADING.findall(text))
