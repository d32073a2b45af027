"""One hospital alone, whose terms keep to norm and bound, makes the model on which the next round trains.

Each unit is a direction with a threshold that about one record of hundreds passes, so that in the next total
the quotient of the updates of the unit's weights and bias is that record: unless each silo leaves units that
few of its records move as they were.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Federation, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.phases import Schema, Tensors
from tightframe.rounds import codec
from tightframe.rounds.silo.session import SiloSession

LIAR, UNITS = "hospital-1", 64
JOB = {
    "weights": "exact",
    "rounds": 2,
    "model_options": {"widths": [UNITS], "standardise": True},
    "training": {"learning_rate": 0.01, "weight_decay": 0.0},
}
WEIGHT, BIAS, HEAD = "backbone.1.weight", "backbone.1.bias", "head.weight"


@pytest.mark.whole
@pytest.mark.parametrize(("policy", "least", "most"), [(ANY_WIDTH, 5, 64), (STANDARD, 0, 0)])
def test_one_hospital_reads_records_in_the_round_after_its_update_where_units_of_few_records_move(
    policy: PolicyBlock, least: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hearts(4)
    true = np.concatenate([records.raw("train") for name, records in data.items() if name != LIAR])
    own = data[LIAR].raw("train").astype(float)
    at, term = [""], dict[str, torch.Tensor]()
    handle, encode = SiloSession.handle, codec.encode

    def noted(self: SiloSession, task: str, message: dict[str, object]) -> dict[str, object]:
        at[0] = self.context.name
        return handle(self, task, message)

    def lied(schema: Schema, tensors: Tensors, *, share: float, parties: int) -> dict[str, bytes]:
        own_term = term if at[0] == LIAR and f"update/{WEIGHT}" in tensors else {}
        return encode(schema, {**tensors, **own_term}, share=share, parties=parties)

    monkeypatch.setattr(SiloSession, "handle", noted)
    monkeypatch.setattr(codec, "encode", lied)
    federation = Federation(JOB, data, state=tmp_path, policy=policy).enroll()
    federation.statistics()
    start = federation.shared.state.model
    mean, std = (start[f"standardise.{name}"].double().numpy() for name in ("mean", "std"))
    directions = np.random.default_rng(1).normal(size=(UNITS, 13))
    scores = (own - mean) / std @ directions.T
    directions /= scores.std(0)[:, None]
    crafted = {name: torch.zeros_like(value).double() for name, value in start.items()}
    crafted[WEIGHT] = torch.tensor(directions)
    crafted[BIAS] = torch.tensor(-scores.mean(0) / scores.std(0) - 2.6)
    crafted[HEAD][0], crafted[HEAD][1] = 0.3, -0.3
    names = (WEIGHT, BIAS, HEAD, "head.bias")
    weights = federation.applied()
    times = sum(weights.values()) / weights[LIAR]
    term |= {f"update/{name}": times * (crafted[name] - start[name].double()) for name in names}
    length = sum(float(value.square().sum()) for value in term.values()) ** 0.5
    assert length < federation.job.update_norm  # so its own copy of the codec changes nothing

    def read(number: int) -> int:
        total = federation.sum("train", number)
        weight, bias = total[f"update/{WEIGHT}"], total[f"update/{BIAS}"]
        moved = np.abs(bias) > 1e-5
        found = weight[moved] / bias[moved, None] * std + mean
        distance = np.abs((found[:, None] - true) / true.std(0).clip(0.05)).max(2)
        return len(set(distance.argmin(1)[distance.min(1) < 0.05]))

    assert read(1) == 0
    term.update({name: torch.zeros_like(value) for name, value in term.items()})
    assert least <= read(2) <= most
