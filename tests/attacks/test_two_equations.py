"""The server and one hospital of three: two sums of one round that weigh the hospitals' updates otherwise.

SCAFFOLD and FedDC send the update and, beside it, the update over the number of steps. Without the colluding
hospital's own terms these are two equations in the two others' updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.attacks.malicious_server import Federation, hearts

from tightframe.config.policy import Policy
from tightframe.config.refusals import BelowPolicyError
from tightframe.rounds import codec

FIRST = "backbone.1.weight"
TRAINING = {"momentum": 0.0, "learning_rate": 1e-4, "batch_size": 16}


@pytest.mark.parametrize(
    "named",
    [
        {"method": "scaffold"},
        {"method": "feddc"},
        {"method": "combine", "method_options": {"local": "scaffold", "server": "scaffold"}},
        {"method": "combine", "method_options": {"local": "feddc", "server": "feddc"}},
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


@pytest.mark.parametrize(("method", "field"), [("scaffold", "control"), ("feddc", "gradient")])
def test_else_two_fields_would_give_each_honest_hospitals_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, field: str
) -> None:
    terms: list[Mapping[str, Any]] = []
    encode = codec.encode

    def spy(schema: Any, tensors: Mapping[str, Any], **how: Any) -> Any:
        terms.append({name: np.asarray(item, dtype=np.float64) for name, item in tensors.items()})
        return encode(schema, tensors, **how)

    monkeypatch.setattr(codec, "encode", spy)
    monkeypatch.setattr(Policy, "_least_for", lambda self, job, options: 0)
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
