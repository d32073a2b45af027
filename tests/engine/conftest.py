"""Jobs and runs of a test's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.engine.simulation import Run, export_job, simulate_job


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """``export_job`` into the test's own folder."""
    return functools.partial(export_job, tmp_path)


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Run]:
    """``simulate_job`` in the test's own workspace."""
    return lambda job, **how: simulate_job(job, tmp_path, **how)
