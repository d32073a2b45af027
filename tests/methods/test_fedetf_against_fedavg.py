"""The gate at CPU scale: on real digits whose silos see two or three classes each, FedETF beats FedAvg."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tightframe import federation
from tightframe.data.image_sets import open_silos

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

LOCAL = {"epochs": 2, "batch_size": 32, "learning_rate": 0.04}


def _accuracy(method: str, partition: dict[str, Any], seed: int) -> float:
    options = {"partition": "class_disjoint", "partition_seed": seed, "test": "own", **partition}
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
@pytest.mark.parametrize("partition", [(5, 2), (10, 3)], ids=["P5C2", "P10C3"])
def test_fedetf_is_above_fedavg_in_the_mean_of_three_seeds(partition: tuple[int, int]) -> None:
    silos, classes = partition
    options = {"silos": silos, "classes_per_silo": classes}
    ours, plain = (
        [_accuracy(method, options, seed) for seed in (1, 2, 3)] for method in ("fedetf", "fedavg")
    )
    assert statistics.mean(ours) > statistics.mean(plain) + 0.05, (ours, plain)
    assert statistics.mean(ours) > 0.6
