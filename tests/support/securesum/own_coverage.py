"""Coverage of the protocol by its own tests, measured while they run among all others."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
from coverage import Coverage
from tests.support import ROOT


class OwnTests:
    """Measures the tests of a folder, and of those the fast ones that do not repeat others with many cases.

    What runs at imports is measured at the start, as the first to import a module may be any test.
    """

    def __init__(self, coverage: Coverage, tests: Path, package: str) -> None:
        if package in sys.modules:
            raise pytest.UsageError(f"Expected {package} not to be imported before coverage begins.")
        self._coverage = coverage
        self._tests = tests
        coverage.start()
        _import_all(importlib.import_module(package))
        coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure the test with its fixtures, if it is one of these."""
        left_out = any(item.get_closest_marker(name) is not None for name in ("whole", "many"))
        if left_out or not item.path.is_relative_to(self._tests):
            return (yield)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    def pytest_sessionfinish(self) -> None:
        """Leave what was measured."""
        self._coverage.save()


def _import_all(package: ModuleType) -> None:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)


def of_protocol() -> OwnTests:
    """The protocol and its tests; each process leaves a data file in the current folder."""
    settings = Coverage(config_file=str(ROOT / "pyproject.toml"))
    return OwnTests(settings, ROOT / "tests" / "securesum", "tightframe.securesum")
