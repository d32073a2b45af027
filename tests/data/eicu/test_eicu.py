from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError

from tightframe.data.eicu import EicuOptions, EicuSite, vocabulary_sha256


def test_a_job_asks_the_papers_shape_by_default() -> None:
    options = EicuOptions()
    assert (options.window, options.silos, options.drugs, options.train_hospitals) == (
        "48h",
        "regions",
        1399,
        20,
    )
    assert not options.equal_sizes
    assert not options.oversample_minority


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": "24h"},
        {"silos": "patients"},
        {"drugs": 0},
        {"drugs": 920.0},
        {"vocabulary": "d7d46c"},
        {"vocabulary": "D" * 64},
        {"train_hospitals": 0},
        {"equal_sizes": 1},
        {"twin_scale": 0.0},
        {"twin_scale": 1.5},
        {"root": "/data"},
    ],
)
def test_a_job_asks_for_nothing_else(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EicuOptions.model_validate(wrong)


def test_a_site_says_where_and_which() -> None:
    region = EicuSite.model_validate({"root": "/data/eicu", "region": "South"})
    assert (region.region, region.hospitals, region.vocabulary) == ("South", None, None)
    listed = {"root": "/data/eicu", "hospitals": [146, 243], "vocabulary": "/data/drugs.json"}
    assert EicuSite.model_validate(listed).hospitals == (146, 243)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "either `region` or `hospitals`"),
        ({"region": "South", "hospitals": [1]}, "and not both"),
        ({"hospitals": [7, 7]}, r"different `hospitals`, but got \[7, 7\]"),
        ({"hospitals": []}, "at least 1 item"),
        ({"hospitals": ["146"]}, "valid integer"),
        ({"hospitals": [1.0]}, "valid integer"),
        ({"region": "Texas"}, "'Midwest', 'South', 'West', 'Northeast' or 'unknown'"),
        ({"region": "South", "root": "data"}, "absolute path"),
        ({"region": "South", "vocabulary": "drugs.json"}, "absolute path"),
        ({"region": "South", "center": 1}, "Extra inputs"),
    ],
)
def test_a_site_says_nothing_else(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EicuSite.model_validate({"root": "/data"} | wrong)


def test_the_fingerprint_is_that_of_the_codes_as_lines() -> None:
    assert vocabulary_sha256([4, 11, 15]) == hashlib.sha256(b"4\n11\n15\n").hexdigest()
    assert vocabulary_sha256([4, 15, 11]) != vocabulary_sha256([4, 11, 15])
    assert vocabulary_sha256([41, 1]) != vocabulary_sha256([4, 11])
