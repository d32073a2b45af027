"""A contract: what it may say, the values that follow from it, its place in a job and in hashes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from pydantic import ValidationError
from tests.rounds.sums.test_release import SITES
from tests.support.attacks.malicious_server import HEART
from tests.support.tables import WARD, contract, options

from tightframe import data
from tightframe.config.job import BUILD_KEYS, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.contract import Contract
from tightframe.data.table.encoding import form
from tightframe.data.table.tabulated import Layout
from tightframe.errors import JobError
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.release import release_profile


def job(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base = {key: value for key, value in HEART.items() if not key.startswith("dataset")}
    own = {"dataset": "table", "dataset_options": {"contract": values}, "model": "mlp", "model_options": {}}
    return {**base, **own, "sites": SITES, "min_sites": 3, "rounds": 2, "method": "fedavg", **changes}


def columns(*items: dict[str, Any]) -> dict[str, Any]:
    return contract(columns=[{"column": f"c{place}", **item} for place, item in enumerate(items)])


def test_values_of_a_record_follow_from_the_columns() -> None:
    assert Contract.model_validate(WARD).features == (
        *("age", "sex = male", "smoker", "smoker missing"),
        *("pain = mild", "pain = strong", "pain missing", "weight"),
    )
    assert data.get("table").input_shape(options()) == (8,)


def test_title_and_classes_follow_from_the_job_and_from_nothing_else() -> None:
    spec = data.get("table")
    assert spec.class_names == ()
    made = prepare(job(WARD)).dataset
    assert (made.title, made.class_names, made.num_classes) == ("My ward", ("well", "ill"), 2)
    assert made.no_patients and not spec.of(options(contract(patient="who"))).no_patients
    heart = data.get("fed_heart_disease")
    assert heart.of(heart.options()) is heart


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (columns({"kind": "date"}), "a date is no measurement"),
        (contract(label={"findings": [{"column": "a"}]}), "at least 2"),
        (contract(label={"findings": [{"column": "a"}] * 2}), "a column each"),
        (contract(label={"findings": [{"column": "a", "title": "b"}, {"column": "b"}]}), "a title each"),
        (contract(label={"findings": [{"column": "a"}, {"column": "age"}]}), "'age' as label and not among"),
        (contract(label={"findings": [{"column": "a"}, {"column": "id"}]}), "one role for the column 'id'"),
        (
            contract(label={"findings": [{"column": "a"}, {"column": "b", "missing": "maybe"}]}),
            "contract.label.findings.1.missing: Input should be 'refuse', 'absent' or 'unknown'",
        ),
        (
            contract(label={"findings": [{"column": "a"}, {"column": "b", "titel": "B"}]}),
            "contract.label.findings.1.titel: Extra inputs",
        ),
        (contract(label={"column": "o", "classes": [], "code": "0"}), "contract.label.code: no such key"),
        (contract(label=None, labels=["a", "b"]), "multi-label"),
        (contract(label=[WARD["label"], WARD["label"]]), "multi-label"),
        (columns({"kind": "number"}), "a range"),
        (columns({"kind": "number", "low": 1, "high": 1}), "a range"),
        (columns({"kind": "number", "low": 0, "high": 1e300}), "less than or equal"),
        (columns({"kind": "number", "low": 0, "high": 1, "vocabulary": ["a", "b"]}), "no vocabulary"),
        (columns({"kind": "category", "vocabulary": ["a"]}), "at least two levels"),
        (columns({"kind": "category", "vocabulary": ["a", "a"]}), "each once"),
        (columns({"kind": "boolean", "missing": "fill"}), "true or false"),
        (columns({"kind": "boolean", "missing": "fill", "fill": 2.5}), "true or false"),
        (columns({"kind": "category", "vocabulary": ["a", "b"], "missing": "fill", "fill": "c"}), "a level"),
        (columns({"kind": "number", "low": 0, "high": 1, "missing": "fill", "fill": 2}), "in its range"),
        (columns({"kind": "number", "low": 0, "high": 1, "fill": 1}), "no `fill`"),
        (contract(columns=[WARD["columns"][0]] * 2), "'age' once"),
        (contract(label={**WARD["label"], "column": "age"}), "not among `columns`"),
        (contract(patient="outcome"), "one role"),
        (contract(shares=[0.5, 0.5, 0.5]), "add up to 1"),
        (contract(fold={"column": "split"}, shares=[0.8, 0.1, 0.1]), "no `shares`"),
        (contract(label={"column": "o", "classes": [{"code": "0"}]}), "at least 2"),
        (contract(label={"column": "o", "classes": [{"code": "0"}, {"code": "0"}]}), "a code each"),
        (contract(title="${SECRET} {$HOME}"), "no braces"),
        (contract(title=" a"), "printable"),
        (contract(colour="red"), "no such key"),
    ],
)
def test_what_a_contract_cannot_say_is_refused_with_the_job(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match="TF-101") as caught:
        prepare(job(wrong))
    assert said in str(caught.value)


def test_findings_have_titles_and_columns_and_a_hash_of_their_own() -> None:
    values = contract(label={"findings": [{"column": "a", "title": "A"}, {"column": "b"}]})
    made = Contract.model_validate(values)
    assert (made.label.titles, made.label.columns) == (("A", "b"), ("a", "b"))
    assert made.wanted == ("age", "sex", "smoker", "pain", "weight", "a", "b", "id")
    absent = contract(
        label={"findings": [{"column": "a", "title": "A"}, {"column": "b", "missing": "absent"}]}
    )
    assert len({Contract.model_validate(item).sha256() for item in (values, absent, WARD)}) == 3
    assert Contract.model_validate(made.model_dump(mode="json")) == made


def test_one_class_keeps_the_hash_that_sites_have_pinned() -> None:
    """SHA-256 of the JSON as it was before there were findings, written out by hand."""
    small = contract(columns=[{"column": "smoker", "kind": "boolean"}], record=None)
    column = '{"column":"smoker","fill":null,"high":null,"kind":"boolean","low":null,"missing":"refuse",'
    classes = '[{"code":"0","title":"well"},{"code":"1","title":"ill"}]'
    text = (
        f'{{"columns":[{column}"unit":null,"vocabulary":[]}}],"fold":null,"label":{{"classes":{classes},'
        '"column":"outcome"},"patient":null,"record":null,"shares":[0.7,0.15,0.15],"title":"My ward"}'
    )
    assert Contract.model_validate(small).sha256() == hashlib.sha256(text.encode()).hexdigest()


def test_a_record_may_be_a_patient() -> None:
    assert Contract.model_validate(contract(patient="id")).patient == "id"


@pytest.mark.parametrize("key", sorted(BUILD_KEYS))
@pytest.mark.parametrize("deep", [False, True])
def test_no_key_at_any_depth_builds_an_object(key: str, deep: bool) -> None:
    block = {key: "os.system"}
    values: Any = {"columns": [{"vocabulary": [block]}]} if deep else block
    with pytest.raises(JobError, match="the engine would build an object"):
        parse_job(job(values))


def test_options_are_plain_values_of_a_few_levels() -> None:
    deep: Any = "x"
    for _ in range(9):
        deep = [deep]
    for values in (deep, {"a": float("nan")}, {"a": object()}, {1: "a"}):
        with pytest.raises(JobError, match="dataset_options"):
            parse_job(job(values))


def test_the_contract_is_in_the_hash_of_the_job_and_in_the_release_profile() -> None:
    """Two jobs with another range over the same silos would disclose the records between."""
    other = json.loads(json.dumps(WARD))
    other["columns"][0]["high"] = 90
    before, after = (prepare(job(values)) for values in (WARD, other))
    assert before.job.sha256() != after.job.sha256()
    profiles = [dict(release_profile(setup, SiteEntry()) or ()) for setup in (before, after)]
    assert profiles[0]["records"] != profiles[1]["records"]
    assert Contract.model_validate(WARD).sha256() != Contract.model_validate(other).sha256()


def test_the_order_of_classes_is_in_the_hash() -> None:
    turned = contract(label={"column": "outcome", "classes": WARD["label"]["classes"][::-1]})
    assert prepare(job(turned)).job.sha256() != prepare(job(WARD)).job.sha256()


def test_a_contract_cannot_be_changed() -> None:
    made = Contract.model_validate(WARD)
    with pytest.raises(ValidationError):
        made.title = "another"  # type: ignore[misc]


def test_the_formulas_of_a_record_give_the_values_that_the_reader_makes() -> None:
    agreed = options().contract
    made = dict(zip(agreed.features, agreed.formulas, strict=True))
    names = ("age", "sex", "smoker", "pain", "weight")
    rows = [("30", "male", "yes", "mild", "60"), ("70", "female", "", "", "")]
    of = [
        dict(zip(form(options()).values, form(options()).encode(names, row)[0].tolist(), strict=True))
        for row in rows
    ]
    for name, x, place in (("age", 30, 0), ("age", 70, 1), ("weight", 60, 0), ("weight", 120.0, 1)):
        scaled, _, said = made[name].partition(", x: ")
        assert eval(scaled, {"x": x}) == pytest.approx(of[place][name], abs=1e-6)  # noqa: S307
    assert said == "weight in kg; without a value x = 120.0"
    assert made["sex = male"] == "1 if male, else 0" and (of[0]["sex = male"], of[1]["sex = male"]) == (1, 0)
    assert made["smoker"] == "1 if true, 0 if false; without a value 0"
    assert made["pain = strong"] == "1 if strong, else 0; without a value as none"
    assert made["pain missing"] == "1 without a value, else 0" and of[1]["pain missing"] == 1
    assert [of[1][name] for name in ("smoker", "pain = mild", "pain = strong")] == [0, 0, 0]


def test_a_level_of_times_names_its_own_bin() -> None:
    """It counts who had the event in that bin, not until its end."""
    timed = Contract.model_validate(contract(survival={"time": "days", "event": "died", "high": 365}))
    assert Layout(timed, 2, (181.0, 365.0)).columns[-1].vocabulary == (
        "died, days 0 to 181",
        "died, days 181 to 365",
        "censored, days 0 to 181",
        "censored, days 181 to 365",
    )
