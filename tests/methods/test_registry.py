"""The list of methods, and those that other packages offer."""

from __future__ import annotations

from typing import Any

import pytest

from tightframe import methods
from tightframe.errors import JobError


class _Entry:
    name = "other"
    value = "other_package:METHOD"

    def __init__(self, offered: Any) -> None:
        self._offered = offered

    def load(self) -> Any:
        return self._offered


def test_known_methods() -> None:
    names = [method.name for method in methods.METHODS]
    assert len(set(names)) == len(names)
    for name in names:
        assert methods.get(name).config().model_config["extra"] == "forbid"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"'fedavg', 'fedmr'.*'fedsomething'"):
        methods.get("fedsomething")


def test_an_installed_package_offers_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[Any] = [_Entry(methods.METHODS[0])]
    monkeypatch.setattr(
        methods, "entry_points", lambda group: offered if group == "tightframe.methods" else []
    )
    assert methods.get("other") is methods.METHODS[0]
    offered[0] = _Entry(object())
    with pytest.raises(JobError, match="to be a Method"):
        methods.get("other")
