"""Every code in the source has an entry that says what it means, what to do and what leaves; no other has."""

from __future__ import annotations

import re
from dataclasses import astuple
from pathlib import Path

from tests.docs.test_links import anchors_of, broken_in
from tests.support.outputs import checked
from typer.testing import CliRunner

from tightframe.errors import REASONS
from tightframe_app.cli import app
from tightframe_app.explain import errors, pages

ROOT = Path(__file__).resolve().parents[2]
REGISTER = Path(errors.__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "errors.md"
CODE = re.compile(r"TF-\d{3}")


def codes_in_source() -> set[str]:
    paths = [path for folder in ("custom", "app") for path in (ROOT / folder).rglob("*.py")]
    return {code for path in paths for code in CODE.findall(path.read_text(encoding="utf-8"))}


def test_every_code_has_exactly_one_entry_and_every_entry_a_code() -> None:
    documented = [code for section in errors.SECTIONS for code in section.codes]
    in_source = codes_in_source()
    assert len(in_source) > 10, "the search itself is broken"
    assert sorted(set(documented)) == sorted(documented), "a code has two entries"
    written = re.findall(
        r"^\[section\.codes\.(TF-\d{3})\]$", REGISTER.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert written == documented, "an entry was not read"
    assert sorted(in_source - set(documented)) == [], "codes without an entry"
    assert sorted(set(documented) - in_source) == [], "entries that no source names"
    assert set(REASONS) <= set(documented)


def test_every_entry_says_what_it_means_what_to_do_and_what_leaves_the_site() -> None:
    for code, entry in errors.ENTRIES.items():
        assert errors.title(code) and entry.do and entry.leaves, code
        assert not entry.title or entry.title != REASONS.get(code), f"{code}: its reason says so already"


def test_codes_that_entries_refer_to_have_entries() -> None:
    texts = [text for entry in errors.ENTRIES.values() for text in astuple(entry)]
    assert set(CODE.findall(" ".join(texts))) <= set(errors.ENTRIES)


def test_the_page_of_the_site_and_the_command_have_every_entry() -> None:
    page = pages.filled(PAGE.read_text(encoding="utf-8"))
    assert broken_in(page, PAGE) == [] and "tf-733-the-doors-refused-a-message" in anchors_of(page)
    assert re.findall(r"^### (TF-\d{3}): ", page, re.MULTILINE) == list(errors.ENTRIES)
    done = CliRunner().invoke(app, ["explain", "tf-703", "TF-214"])
    printed = " ".join(done.output.split())
    assert (
        done.exit_code == 0
        and errors.ENTRIES["TF-703"].do in printed
        and "its form (docs/jobs.md#" in printed
    )
    assert CliRunner().invoke(app, ["explain", "TF-999"]).exit_code == 2


def test_words_of_a_job_and_a_site_are_explained() -> None:
    told = CliRunner().invoke(app, ["explain", "epochs", "policy.minimum_cohort", "moon", "--format", "json"])
    topics = checked("explain", told.output)["topics"]
    assert [[value["name"] for value in topic["values"]] for topic in topics] == [
        ["training.epochs"],
        ["policy.minimum_cohort"],
        ["mu", "tau"],
    ]
    assert topics[1]["values"][0]["default"] == "5; 3; 1"
    unknown = CliRunner().invoke(app, ["explain", "min_site"])
    assert unknown.exit_code == 2 and "'min_sites'" in unknown.output
