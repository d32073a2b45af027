"""The server and one hospital of three: two sums of one job that weigh the hospitals' updates otherwise.

SCAFFOLD and FedDC send the update and, beside it, the update over the number of steps. CCVR's moments tell
the sum of gradients in the head, which updates at a small rate weigh by steps. Without the colluding
hospital's own terms these are two equations in the two others' updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.attacks.malicious_server import Federation, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.rounds import codec

FIRST = "backbone.1.weight"
Terms: TypeAlias = Mapping[str, NDArray[np.float64]]
TRAINING = {"momentum": 0.0, "learning_rate": 1e-4, "batch_size": 16}


@pytest.mark.parametrize(
    "named",
    [
        {"method": "scaffold"},
        {"method": "feddc"},
        {"method": "combine", "method_options": {"local": "scaffold", "server": "scaffold"}},
        {"method": "combine", "method_options": {"local": "feddc", "server": "feddc"}},
        {"method": "ccvr", "method_options": {"covariance": "shared"}},
        {"method": "fedavg", "start": "fed3r", "model": "random_features", "model_options": {"width": 8}},
    ],
    ids=str,
)
def test_two_fields_are_summed_over_three_honest_hospitals_at_least(tmp_path: Path, named: Any) -> None:
    """A sum may have fewer terms than hospitals, down to ``min_sites``, and one of them is a colluder's."""
    values = {**named, "training": TRAINING, "answer_grid": 0.0}
    for hospitals, least, refused in ((3, 3, True), (4, 3, True), (4, 4, False)):
        folder = tmp_path / f"{hospitals}-{least}"
        federation = Federation({**values, "min_sites": least}, hearts(hospitals), state=folder)
        if not refused:
            federation.enroll()
            continue
        with pytest.raises(BelowPolicyError, match=r"minimum_cohort.*at least 4 with"):
            federation.enroll()


def without_the_rule(monkeypatch: pytest.MonkeyPatch) -> list[Terms]:
    """Let any number of hospitals take part; return the terms that they send, as they come."""
    terms: list[Terms] = []
    encode = codec.encode

    def spy(schema: Any, tensors: Mapping[str, Any], **how: Any) -> Any:
        terms.append({name: np.asarray(item, dtype=np.float64) for name, item in tensors.items()})
        return encode(schema, tensors, **how)

    monkeypatch.setattr(codec, "encode", spy)
    monkeypatch.setattr("tightframe.config.policy.least_sites", lambda job, options: 0)
    return terms


@pytest.mark.parametrize(("method", "field"), [("scaffold", "control"), ("feddc", "gradient")])
def test_else_two_fields_would_give_each_honest_hospitals_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, field: str
) -> None:
    terms = without_the_rule(monkeypatch)
    values = {"method": method, "training": TRAINING, "answer_grid": 0.0}
    federation = Federation(values, hearts(3), state=tmp_path).enroll()
    totals = federation.sum("train", 1)
    victim, _, colluder = terms
    # Public: the weights are the numbers of records, the batches are the job's.
    first, second, _ = (
        -1 / (TRAINING["learning_rate"] * math.ceil(weight / TRAINING["batch_size"]))
        for _, weight in sorted(federation.weights().items())
    )
    updates = totals[f"update/{FIRST}"] - colluder[f"update/{FIRST}"]
    over_steps = totals[f"{field}/{FIRST}"] - colluder[f"{field}/{FIRST}"]
    solved = (over_steps - second * updates) / (first - second)
    true = victim[f"update/{FIRST}"]
    assert np.linalg.norm(solved - true) < 1e-3 * np.linalg.norm(true)


RATE = 1e-5
LINEAR: dict[str, Any] = {
    "method": "ccvr",
    "method_options": {"covariance": "shared", "virtual_features": 2, "epochs": 1},
    "model": "identity",
    "model_options": {"standardise": True},
    "training": {"momentum": 0.0, "learning_rate": RATE, "batch_size": 1, "weight_decay": 0.0},
}


def test_else_moments_beside_updates_would_give_each_honest_hospitals_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a linear model, by full batches; of drawn ones of 150 epochs with errors of 2 and 15 %."""
    terms = without_the_rule(monkeypatch)
    every = hearts(4)
    data = {
        name: every[name] for name in ("hospital-1", "hospital-2", "hospital-4")
    }  # the second one colludes
    policy = PolicyBlock(profile="standard", full_batches=True)
    federation = Federation(LINEAR, data, state=tmp_path, policy=policy).enroll()
    federation.statistics()
    weight, bias = (
        np.asarray(federation.shared.state.model[f"head.{name}"], float) for name in ("weight", "bias")
    )
    updates = row(federation.sum("train", 1))
    first, own, other = (row(item) for item in terms[-3:])
    steps = np.array([federation.weights()[name] for name in sorted(data)])  # as many as records
    weighed = -(updates * steps.max() - steps[1] * own) / RATE
    for exchange in federation.setup.plan.at("after", 1):
        total = federation.sum(*exchange.place)
    counts, sums, upper = (
        total[name] - terms[-2][name] for name in ("moments/counts", "moments/sums", "moments/products")
    )
    products = np.zeros((sums.shape[1],) * 2)
    products[np.triu_indices(len(products))] = upper
    products += np.triu(products, 1).T
    summed = gradients(counts, sums, products, weight[0] - weight[1], bias[0] - bias[1])
    for solved, true, error in (
        ((weighed - steps[2] * summed) / (steps[0] - steps[2]), first, 0.03),
        ((weighed - steps[0] * summed) / (steps[2] - steps[0]), other, 0.1),
    ):
        true = -true / RATE
        assert np.linalg.norm(solved - true) < error * np.linalg.norm(true)
        along = summed * (summed @ true) / (summed @ summed)
        assert np.linalg.norm(along - true) > 4 * error * np.linalg.norm(true), "nor does their sum tell it"


def row(tensors: Terms) -> NDArray[np.float64]:
    """Return the head's update of the first class: weights, then bias."""
    return np.r_[tensors["update/head.weight"][0], np.ravel(tensors["update/head.bias"])[0]]


def gradients(
    counts: NDArray[np.float64],
    sums: NDArray[np.float64],
    products: NDArray[np.float64],
    slope: Any,
    offset: float,
) -> NDArray[np.float64]:
    """Return the sum of records' gradients in the first class's row, were their features normal.

    Then features covary with probabilities as with logits, times the mean slope of the probabilities.
    """
    number, total = counts.sum(), sums.sum(0)
    covariance = products / number - np.outer(total, total) / number**2
    nodes, masses = np.polynomial.hermite_e.hermegauss(40)
    logits = total @ slope / number + offset + np.sqrt(slope @ covariance @ slope) * nodes
    likely = 1 / (1 + np.exp(-logits))
    mean, rise = masses @ np.c_[likely, likely * (1 - likely)] / masses.sum()
    return np.r_[mean * total + rise * number * covariance @ slope - sums[0], mean * number - counts[0]]
