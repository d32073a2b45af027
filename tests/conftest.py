"""Shared by all tests: where real data lie, and one thread of torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A job small enough to train in a fraction of a second.
SMALL: dict[str, Any] = {
    "job_name": "small",
    "method": "fedavg",
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model": "small_cnn",
    "model_options": {"widths": [8, 8, 8]},
    "sites": ["site-1", "site-2", "site-3"],
    "min_sites": 2,
    "rounds": 1,
    "seed": 3,
    "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.05},
}

ROOT = Path(__file__).resolve().parent.parent


# Two cores are shared by everything that the tests start. Here and not in a hook, because the
# `conftest` of a folder imports torch before hooks run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes depends on what else runs; tests time nothing.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root."""
    return ROOT


def _real_data() -> Path:
    return Path(os.environ.get("TIGHTFRAME_TEST_DATA", ROOT.parent / "shared" / "data")).resolve()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real records, which are not part of the project."""
    path = _real_data()
    if not path.is_dir():
        pytest.skip(f"no real data: {path} does not exist (set TIGHTFRAME_TEST_DATA)")
    return path


@pytest.fixture(scope="session")
def images() -> Path | None:
    """The real dermoscopy images of four centres; None for tests that have the twin instead."""
    path = _real_data() / "fed_isic_ham"
    return path if path.is_dir() else None


@pytest.fixture
def small() -> dict[str, Any]:
    """Values of a small valid job; a fresh copy for each test."""
    return {key: (value.copy() if isinstance(value, dict | list) else value) for key, value in SMALL.items()}


def pytest_xdist_auto_num_workers() -> int:
    """Processes of ``-n auto``: one more than cores, because tests of the engine mostly wait."""
    return (os.cpu_count() or 1) + 1
