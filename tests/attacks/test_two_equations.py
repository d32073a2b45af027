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

from tightframe.rounds import codec

FIRST = "backbone.1.weight"
TRAINING = {"momentum": 0.0, "learning_rate": 1e-4, "batch_size": 16}


@pytest.mark.xfail(strict=True, reason="open: both fields are in one sum, of two honest hospitals")
@pytest.mark.parametrize(("method", "field"), [("scaffold", "control"), ("feddc", "gradient")])
def test_two_fields_do_not_give_each_honest_hospitals_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, field: str
) -> None:
    terms: list[Mapping[str, Any]] = []
    encode = codec.encode

    def spy(schema: Any, tensors: Mapping[str, Any], **how: Any) -> Any:
        terms.append({name: np.asarray(item, dtype=np.float64) for name, item in tensors.items()})
        return encode(schema, tensors, **how)

    monkeypatch.setattr(codec, "encode", spy)
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
    assert np.linalg.norm(solved - true) > 0.1 * np.linalg.norm(true)
