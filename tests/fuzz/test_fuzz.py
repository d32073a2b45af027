"""A short run of every fuzzer, the same each time; for hours by hand: ``python -m tests.fuzz``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz.targets import TARGETS


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Targets say nothing while they run; the tests after them are to be heard."""
    level = logging.getLogger("tightframe").level
    yield
    logging.getLogger("tightframe").setLevel(level)


@pytest.mark.whole
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_read_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    for seed in range(target.examples):
        target.check(seed)
