"""The list of methods, and those that other packages offer."""

from __future__ import annotations

import pytest

from tightframe import methods
from tightframe.errors import JobError


def test_known_methods() -> None:
    names = [method.name for method in methods.METHODS]
    assert len(set(names)) == len(names)
    for name in names:
        assert methods.get(name).config().model_config["extra"] == "forbid"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"'fedavg'.*'fedmr'.*'fedsomething'"):
        methods.get("fedsomething")
