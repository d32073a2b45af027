"""A job's values are validated as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.options import listed
from tightframe.rounds.setup import prepare


def test_all_problems_come_at_once(small: dict[str, Any]) -> None:
    small |= {"bogus": 1, "rounds": "4", "training": {"epochs": 0, "lr": 1.0}, "seed": -1}
    with pytest.raises(JobError) as caught:
        parse_job(small)
    text = str(caught.value)
    assert caught.value.code == "TF-101"
    for key in ("bogus", "rounds", "training.epochs", "training.lr", "seed"):
        assert key in text


def test_problems_of_names_options_and_values_come_together(small: dict[str, Any]) -> None:
    small |= {"method": "fedmr", "method_options": {"mu_intra": "abc"}, "model": "resnet"}
    small |= {"foo": 3, "min_sites": 7, "training": {"epochs": -1, "learning_rate": 0.0}}
    with pytest.raises(JobError) as caught:
        prepare(small)
    for part in ("mu_intra", "model:", "foo", "min_sites", "training.epochs", "training.learning_rate"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"method": "fedxyz", "model": "huge", "dataset": "nothing"},
            ["method", "model", "dataset", "fedmr"],
        ),
        ({"method_options": {"mu": 1.0}}, ["method_options.mu"]),
        (
            {"method": "fedmr", "method_options": {"intra_form": "other", "mu_inter": -1}},
            ["intra_form", "mu_inter"],
        ),
        ({"dataset_options": {"image_size": 48, "root": "/etc"}}, ["dataset_options.root"]),
        ({"model_options": {"widths": "wide"}}, ["model_options.widths"]),
    ],
)
def test_names_and_options_are_checked(
    small: dict[str, Any], changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        prepare(small | changes)
    for word in named:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_sites": 4},
        {"sites": ["a", "a", "b"]},
        {"prototype_sites": ["elsewhere"]},
        {"sites": ["../up", "site-2"]},
        {"job_name": "a/b"},
        {"training": {"learning_rate": float("nan")}},
        {"update_norm": 0.0},
        {"summation": "fast"},
    ],
)
def test_values_that_make_no_sense_are_refused(small: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        parse_job(small | changes)


@pytest.mark.parametrize("key", ["path", "class_path", "name", "config_type"])
@pytest.mark.parametrize("options", ["method_options", "dataset_options", "model_options"])
def test_options_that_the_engine_would_build_an_object_from_are_refused(
    small: dict[str, Any], options: str, key: str
) -> None:
    small[options] = {key: "tightframe.data.isic.fed_isic2019.FedIsic2019", "args": {"split_path": "/x"}}
    with pytest.raises(JobError) as caught:
        parse_job(small)
    assert f"{options}: " in str(caught.value) and repr(key) in str(caught.value)
    assert "the engine would build an object" in str(caught.value)


@pytest.mark.parametrize("key", ["prototype_sites", "site_models"])
def test_a_site_that_is_none_is_answered_with_those_that_are(small: dict[str, Any], key: str) -> None:
    asked = ["site-22", "x"] if key == "prototype_sites" else {"site-22": {}, "x": {}}
    with pytest.raises(JobError) as caught:
        parse_job(small | {"sites": ["site-1", "site-2", "site-3"], key: asked})
    known = "Known are site-1, site-2, site-3"
    wanted = [f"{key}: site-22: no such site of `sites`: did you mean 'site-2'? {known}"]
    wanted.append(f"{key}: x: no such site of `sites`: {known}")
    assert [problem for problem in caught.value.problems if "no such site" in problem] == wanted


def test_hash_depends_on_every_value(small: dict[str, Any]) -> None:
    first = parse_job(small)
    assert first.sha256() == parse_job(dict(reversed(small.items()))).sha256()
    assert first.sha256() != parse_job(small | {"seed": 4}).sha256()


def test_plain_sums_do_not_open_whole(small: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="whole_sums: not possible with plain sums"):
        parse_job(small | {"summation": "plain", "whole_sums": True})
    private = {"method": "fedncm", "weights": "uniform", "privacy": {}}
    assert parse_job(small | {"summation": "plain"} | private).whole_sums is None


def test_roster_is_sorted(small: dict[str, Any]) -> None:
    assert parse_job(small | {"sites": ["b", "a", "c"]}).roster == ("a", "b", "c")


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = 0


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    one: Inner | None = None
    many: dict[str, Inner] = {}
    rows: list[Inner] = []
    either: Inner | dict[str, int] = {}


def test_a_key_that_does_not_exist_is_answered_with_those_that_do(small: dict[str, Any]) -> None:
    small |= {"rouds": 3, "training": {"learning_rat": 0.1}, "evaluation": {"zzz": 1}}
    with pytest.raises(JobError) as caught:
        parse_job(small)
    first, second, third = caught.value.problems
    assert first.startswith(
        "training.learning_rat: no such key: did you mean 'learning_rate'? Known are epochs,"
    )
    assert second.startswith("evaluation.zzz: no such key: Known are batch_size, score_bins")
    assert third.startswith("rouds: no such key: did you mean 'rounds'? Known are job_name, method,")
    assert "Extra inputs" not in str(caught.value)


def test_text_in_place_of_a_block_is_named_without_the_programs_words(small: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(small | {"privacy": "none"})
    assert "privacy: Expected a block of keys, but got 'none'" in caught.value.problems


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"onee": {}}, "onee: no such key: did you mean 'one'? Known are one, many, rows, either"),
        ({"one": {"dept": 1}}, "one.dept: no such key: did you mean 'depth'? Known are depth"),
        ({"many": {"a.b": {"dept": 1}}}, "many.a.b.dept: no such key: did you mean 'depth'? Known are depth"),
        ({"rows": [{}, {"dept": 1}]}, "rows.1.dept: no such key: did you mean 'depth'? Known are depth"),
        ({"either": {"x": "text"}}, "either.Inner.x: Extra inputs are not permitted (got 'text')"),
    ],
)
def test_keys_are_those_of_the_place(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    assert listed(caught.value, model=Outer)[0] == told
    assert "Extra inputs" in listed(caught.value)[0], "without the model nothing is known of its keys"


def test_a_model_without_keys_says_so() -> None:
    class Nothing(BaseModel):
        model_config = ConfigDict(extra="forbid")

    with pytest.raises(ValidationError) as caught:
        Nothing.model_validate({"x": 1})
    assert listed(caught.value, "model_options.", Nothing) == [
        "model_options.x: no such key: none is known here"
    ]
