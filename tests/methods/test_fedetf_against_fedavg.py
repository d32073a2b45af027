"""The gate at CPU scale: on real digits whose silos see two classes each, FedETF beats FedAvg."""

from __future__ import annotations

import statistics

import pytest

from tightframe import federation
from tightframe.data.image_sets import open_silos

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

LOCAL = {"epochs": 2, "batch_size": 32, "learning_rate": 0.04}


def _accuracy(method: str, seed: int) -> float:
    parts = {"partition": "class_disjoint", "silos": 5, "classes_per_silo": 2}
    options = {**parts, "partition_seed": seed, "test": "own"}
    result = federation.run(
        method,
        open_silos("digits", **options),
        4,
        dataset="digits",
        dataset_options=options,
        model_options={"widths": [16, 32, 64]},
        training=LOCAL,
        evaluation={"models": 1},  # the last one's is looked at
        seed=seed,
        summation="plain",
    )
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None
    return float(final.evaluation.test.accuracy)


@pytest.mark.whole
def test_fedetf_is_above_fedavg_in_the_mean_of_two_seeds() -> None:
    ours, plain = ([_accuracy(method, seed) for seed in (1, 2)] for method in ("fedetf", "fedavg"))
    assert statistics.mean(ours) > statistics.mean(plain) + 0.05, (ours, plain)
    assert statistics.mean(ours) > 0.6
