"""``TIGHTFRAME_COVERAGE``: what a package's own fast tests run is measured, and nothing that others run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coverage import Coverage
from tests.support.securesum.own_coverage import OwnTests

SOURCE = """
def own(value):
    if value:
        return 1
    return 2

def slow():
    return 3

def other():
    return 4
"""


def _item(path: Path, marker: str = "") -> Any:
    return SimpleNamespace(path=path, get_closest_marker=lambda name: name if name == marker else None)


def _protocol(tests: OwnTests, item: Any, call: Callable[[], object]) -> None:
    hook = tests.pytest_runtest_protocol(item)
    next(hook)
    call()
    with pytest.raises(StopIteration):
        hook.send(None)


def test_only_own_fast_tests_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner = tmp_path / "measured_here", tmp_path / "measured_here" / "inner.py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    inner.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = tmp_path / "data"
    coverage = Coverage(data_file=str(data), branch=True, source=[str(package)], config_file=False)
    tests = OwnTests(coverage, tmp_path / "own", "measured_here")
    module = sys.modules["measured_here.inner"]
    _protocol(tests, _item(tmp_path / "own" / "test_a.py"), lambda: module.own(1))
    _protocol(tests, _item(tmp_path / "own" / "test_a.py", "whole"), module.slow)
    _protocol(tests, _item(tmp_path / "own" / "test_a.py", "many"), module.slow)
    _protocol(tests, _item(tmp_path / "others" / "test_b.py"), module.other)
    tests.pytest_sessionfinish()

    read = Coverage(data_file=str(data), branch=True, config_file=False)
    read.load()
    _, _, _, missing, _ = read.analysis2(str(inner))
    assert missing == [5, 8, 11], "the definitions and the branch that was taken are covered"
    for name in ("measured_here", "measured_here.inner"):
        monkeypatch.delitem(sys.modules, name)


def test_a_package_that_was_imported_before_is_refused(tmp_path: Path) -> None:
    """Its definitions would count as not covered, for no reason that a reader could see."""
    importlib.import_module("tightframe.securesum")
    with pytest.raises(pytest.UsageError, match=r"tightframe\.securesum not to be imported before"):
        OwnTests(Coverage(data_file=str(tmp_path / "data")), tmp_path, "tightframe.securesum")
