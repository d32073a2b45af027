"""A job small enough to train in a fraction of a second."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.fixture
def small() -> dict[str, Any]:
    """Values of a small valid job; a fresh copy for each test."""
    return {key: (value.copy() if isinstance(value, dict | list) else value) for key, value in SMALL.items()}
