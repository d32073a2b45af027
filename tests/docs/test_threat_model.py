"""Each attack of the threat model has tests that exist, and every field of every sum stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_methods import _values, rows
from tests.docs.test_private_methods import choices
from tests.rounds.sums import test_release
from tests.support.tables import statistics_job

from tightframe import methods
from tightframe.config.job import JobConfig
from tightframe.errors import JobError
from tightframe.rounds.setup import prepare

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "threat-model.md"
NAMED = TESTS / "threats.md"
NOISY = {"weights": "uniform", "privacy": {"evaluation": "noisy"}}
WITHDRAW = {"lineage": "x", "previous": "x", "checkpoint_sha256": "0" * 64, "state_sha256": "0" * 64}
HEART = {"dataset": "fed_heart_disease", "dataset_options": {}, "model": "mlp"}


def test_every_test_that_is_named_for_an_attack_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", NAMED.read_text(encoding="utf-8"))
    assert len(named) > 230
    defined = {
        file: set(re.findall(r"^ *def (\w+)\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE))
        for file in {file for file, _ in named}
        if (TESTS / file).is_file()
    }
    assert [f"{file}::{test}" for file, test in named if test not in defined.get(file, ())] == []


def test_every_attack_has_its_tests_or_says_that_there_is_none() -> None:
    """An item of the page begins with its id; its tests stand in a line that begins with the same id."""
    text = PAGE.read_text(encoding="utf-8")
    attacks = re.findall(r"^- ([A-Z]\d+) \S", text, flags=re.MULTILINE) + re.findall(r"\(([A-Z]\d+)\)", text)
    under = re.findall(
        r"^([A-Z]\d+) (none|`[\w/]+\.py::\w+`(?: `[\w/]+\.py::\w+`)*)$",
        NAMED.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert len(attacks) == len(set(attacks)) > 80
    assert sorted(attacks) == sorted(name for name, _ in under)
    assert sum(tests == "none" for _, tests in under) <= 5, "these rest on reading the code alone"


def findings_job() -> dict[str, Any]:
    column = {"column": "age", "kind": "number", "low": 0, "high": 100}
    contract = {
        **{"title": "Chests", "columns": [column], "record": "id", "fold": {"column": "fold"}},
        "label": {"findings": [{"column": "edema"}, {"column": "nodule", "missing": "unknown"}]},
    }
    table = {"dataset": "table", "dataset_options": {"contract": contract}, "model": "mlp"}
    return {**_values("fedavg"), **table, "model_options": {}}


def option_jobs() -> Iterator[JobConfig]:
    """Jobs with another value of each option, of which every new one has its place in these tables."""
    for name, (value, _) in {**test_release.IN, **test_release.OUT}.items():
        if value is not None:
            yield test_release.job_with({**test_release.BASE.get(name, {}), name: value})


def jobs() -> Iterator[dict[str, Any] | JobConfig]:
    """Jobs of every method, with each choice among names, with personal models, noise, and each option."""
    yield from option_jobs()
    for method in methods.METHODS:
        for options in choices(method):
            for more in ({"personalise": True}, {}, {"weights": "uniform", "privacy": {}}, NOISY):
                yield {**_values(method.name), "method_options": options, **more}
    yield {**_values("fed3r"), "withdraw": WITHDRAW}
    yield {**_values("combine"), "method_options": {"prototypes": "fedmr"}}
    yield {**_values("fedavg"), **HEART, "model_options": {"standardise": True}}
    yield {**_values("fedavg"), "model": "resnet20", "model_options": {}}  # with running statistics
    yield findings_job()
    yield statistics_job()
    yield {**statistics_job(), "privacy": {}}


def fields() -> set[str]:
    """Names of all fields that these jobs sum; a job that is refused has none."""
    found = set()
    for values in jobs():
        try:
            plan = prepare(values).plan
        except JobError:
            continue
        found |= {item.name for exchange in plan for phase in exchange.phases for item in phase.schema.fields}
    return found


@pytest.mark.whole
def test_every_field_of_every_sum_stands_in_the_table() -> None:
    table = rows(PAGE.read_text(encoding="utf-8"), "| field | what its total tells |")
    patterns = {pattern for row in table for pattern in re.findall(r"`([^`]+)`", row[0])} - {"combine"}
    names = fields()
    assert len(names) > 40
    untold = sorted(name for name in names if not any(fnmatchcase(name, one) for one in patterns))
    assert untold == [], f"{PAGE.name} says in its table what a total of each field tells"
    assert sorted(one for one in patterns if not any(fnmatchcase(name, one) for name in names)) == []
