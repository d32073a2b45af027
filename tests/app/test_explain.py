"""What ``tightframe explain`` has kept."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from tightframe import data, methods, models
from tightframe.data.contract import Contract
from tightframe_app.cli import app
from tightframe_app.explain import errors, options, topics
from tightframe_app.kept_files import ANEW


def test_what_is_kept_is_what_the_docstrings_say() -> None:
    computed = options.computed()
    for kind, found in computed.items():
        assert list(topics.of(kind).values()) == found, f"{topics.KEPT.name} is stale: {ANEW}"
    assert sum(map(len, computed.values())) == len(topics.ours()), "no two have one name"
    assert list(topics.of(topics.METHODS)) == [item.name for item in methods.METHODS]
    assert list(topics.of(topics.MODELS)) == [item.name for item in models.BACKBONES]
    assert list(topics.of(topics.DATA)) == [item.name for item in data.DATASETS]


def test_contracts_and_files_of_a_run_say_what_each_key_is() -> None:
    for kind in (topics.CONTRACTS, topics.RESULTS):
        for topic in topics.of(kind).values():
            assert len(topic.values) > 10 and all(value.means for value in topic.values), topic.name
    names = {value.name for value in topics.of(topics.CONTRACTS)["contract"].values}
    assert names >= {*Contract.model_fields, "columns.missing", "label.findings.missing", "survival.beyond"}
    assert {value.name for value in topics.of(topics.RESULTS)["metrics.jsonl"].values} >= {
        "counts",
        "training",
    }


def test_without_words_topics_and_codes_are_listed_by_kind_and_subject() -> None:
    said = CliRunner().invoke(app, ["explain"]).output
    topics_said, codes_said = said.split("\nCodes\n")
    assert {*topics.ours()} <= {*re.findall(r"[\w.]+", topics_said)}
    told = set[int]()
    for first, last in re.findall(r"TF-(\d+)(?: to TF-(\d+))?", codes_said):
        told |= {*range(int(first), int(last or first) + 1)}
    assert told == {int(code[3:]) for code in errors.ENTRIES}, "a range has no code that does not exist"
    assert "  The egress guard: TF-730\n" in re.sub(" +\n", "\n", codes_said)
