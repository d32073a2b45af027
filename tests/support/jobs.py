"""Small valid jobs."""

from __future__ import annotations

from typing import Any

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
"""Values of a job that trains in a fraction of a second."""

HEART: dict[str, Any] = {
    **SMALL,
    "method": "fedmr",
    "dataset": "fed_heart_disease",
    "dataset_options": {},
    "model": "mlp",
    "model_options": {"widths": [4], "standardise": True},
    "min_sites": 3,
    "rounds": 3,
    "training": {"epochs": 1, "batch_size": 64, "learning_rate": 0.05, "momentum": 0.0},
}
"""The same on a table, whose inputs are scaled by pooled moments."""
