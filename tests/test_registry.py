"""Names of ours come first; an installed package can add some; nothing else can be named."""

from __future__ import annotations

from typing import Any

import pytest

from tightframe import data, methods, models, registry
from tightframe.errors import JobError


class _Entry:
    def __init__(self, name: str, offered: Any) -> None:
        self.name, self.value, self._offered = name, f"package:{name}", offered
        self.loaded = 0

    def load(self) -> Any:
        self.loaded += 1
        return self._offered


@pytest.mark.parametrize(
    ("module", "own", "group"),
    [
        (methods, methods.METHODS, "tightframe.methods"),
        (models, models.BACKBONES, "tightframe.backbones"),
        (data, [listed.load() for listed in data.DATASETS], "tightframe.datasets"),
    ],
)
def test_installed_packages_add_names(
    module: Any, own: list[Any], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, wrong, stolen = _Entry("other", own[0]), _Entry("wrong", object()), _Entry(own[0].name, object())
    offered = [other, wrong, stolen]
    monkeypatch.setattr(registry, "entry_points", lambda group: offered if group == asked else [])
    asked = group
    assert module.get("other") is own[0]
    assert module.get(own[0].name) is own[0], "no package takes the name of one of ours"
    assert (other.loaded, wrong.loaded, stolen.loaded) == (1, 0, 0), "only what is named is imported"
    with pytest.raises(JobError, match="package:wrong"):
        module.get("wrong")
    with pytest.raises(JobError, match=r"other.*'nothing'"):
        module.get("nothing")


def test_a_name_that_two_packages_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _Entry("other", methods.METHODS[0]), _Entry("other", methods.METHODS[0])
    two.value = "another_package:other"
    monkeypatch.setattr(registry, "entry_points", lambda group: [one, two])
    with pytest.raises(JobError, match=r"one installed package.*another_package:other.*package:other"):
        methods.get("other")
    assert (one.loaded, two.loaded) == (0, 0)
    two.value = one.value  # the same distribution, seen twice on the path
    assert methods.get("other") is methods.METHODS[0]


def test_a_name_in_the_wrong_case_is_answered_with_the_right_one() -> None:
    from tightframe import methods

    with pytest.raises(JobError, match=r"but got 'FedAvg'; did you mean 'fedavg'\?"):
        methods.get("FedAvg")
    with pytest.raises(JobError, match=r"but got 'nothing'$"):
        methods.get("nothing")
