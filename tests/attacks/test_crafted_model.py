"""A server that wants silos to train its model ("Robbing the Fed", Fowl et al. 2022, arXiv:2110.13057).

Every hidden unit is the same direction with another threshold, so that the gradients of two neighbouring
units differ by the records between their thresholds alone; where that is one record, the quotient of the
weights' and the bias' difference is the record. Silos train no model but the one that follows from the job
and from verified totals: there is no way to get this one summed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import ANY_WIDTH, Federation, Records, hearts

from tightframe.errors import RunError, SecureSumError
from tightframe.phases import ServerState
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.silo import followed_state as followed
from tightframe.securesum import server

UNITS = 1024
# Public knowledge of the thirteen columns: typical values and spreads, of nobody's records.
_MEAN = np.array([53, 0.7, 131, 220, 0.15, 142, 0.35, 1, 0.2, 0.25, 0.45, 0.1, 0.2])
_SPREAD = np.array([9, 0.46, 17, 90, 0.36, 24, 0.48, 1, 0.4, 0.43, 0.5, 0.3, 0.4])
_SCALE = np.array([50, 1, 130, 240, 1, 140, 1, 1, 1, 1, 1, 1, 1])


def _crafted(federation: Federation) -> ServerState:
    rng = np.random.default_rng(101)
    direction = rng.normal(size=13) / _SCALE * 1e-3
    middle, spread = float(direction @ _MEAN), float(np.linalg.norm(direction * _SPREAD))
    thresholds = torch.linspace(middle - 3 * spread, middle + 3 * spread, UNITS)
    state = federation.shared.state
    model = {name: torch.zeros_like(tensor) for name, tensor in state.model.items()}
    model["backbone.1.weight"] = torch.tensor(direction, dtype=torch.float32).repeat(UNITS, 1)
    model["backbone.1.bias"] = -thresholds
    model["head.weight"][0], model["head.weight"][1] = 0.05, -0.05
    return state.evolve(model=model)


def _read_records(totals: dict[str, np.ndarray], data: dict[str, Records]) -> set[int]:
    """Return which records of all hospitals one total gives away, each value within one half."""
    weights, biases = totals["update/backbone.1.weight"], totals["update/backbone.1.bias"]
    true = np.concatenate([records.raw("train") for records in data.values()])
    read = set()
    for weight, bias in zip(weights[:-1] - weights[1:], biases[:-1] - biases[1:], strict=True):
        if abs(bias) > 1e-6:
            distance = np.abs(true - weight / bias).max(axis=1)
            if distance.min() < 0.5:
                read.add(int(distance.argmin()))
    return read


WIDE = {"model_options": {"widths": [UNITS]}, "update_bound": 1e4}


def test_as_the_start_of_the_run_each_silo_refuses_it(tmp_path: Path) -> None:
    federation = Federation(WIDE, hearts(3), state=tmp_path, policy=ANY_WIDTH).enroll()
    with pytest.raises(RunError, match=r"^TF-518: "):
        federation.sum("train", 1, named=SharedState(_crafted(federation)))


def test_as_a_state_that_all_have_missed_each_silo_refuses_it(tmp_path: Path) -> None:
    federation = Federation(WIDE, hearts(3), state=tmp_path, policy=ANY_WIDTH).enroll()
    with pytest.raises(RunError, match=r"^TF-518: "):
        federation.sum("train", 1, named=SharedState(_crafted(federation), before="0" * 64))


@pytest.mark.parametrize("hidden", [False, True])
def test_behind_a_false_total_its_sum_stays_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """The total that gives this model, one of many: silos compute it, train it, and then verify the total.

    Nor does it help to have the sum after the false total fail, and to leave the total out from then on.
    """
    monkeypatch.setattr(server.Sum, "_settle", lambda self, evidence: {})  # this server sees nothing wrong
    federation = Federation({**WIDE, "rounds": 3}, hearts(3), state=tmp_path, policy=ANY_WIDTH).enroll()
    federation.sum("train", 1)
    start, crafted = federation.setup.initial_state(), _crafted(federation)
    assert federation.evidence is not None
    true = federation.evidence.total
    names = [item.name for item in federation.setup.plan.round(1)[0].carrying(True).schema.fields]
    assert names[0].startswith("update/")
    shift = np.frombuffer(true.groups["update"], "<u4").copy()
    shift[: crafted.model["backbone.1.weight"].numel()] += 1 << 20
    false = replace(true, groups={**true.groups, "update": shift.tobytes()})
    federation.evidence = replace(federation.evidence, total=false)
    state = followed.next_state(federation.setup, start, false, federation.applied())
    assert state_sha256(state) != federation.shared.sha256
    named = SharedState(state, state_sha256(start))
    with pytest.raises(SecureSumError, match=r"^TF-623: "):
        federation.sum("train", 2, named=named)
    if hidden:
        federation.evidence = None
        with pytest.raises(SecureSumError, match=r"^TF-622: "):
            federation.sum("train", 2, named=named, attempt=1)


@pytest.mark.whole
def test_where_silos_took_it_over_one_total_would_give_records_and_none_with_privacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the refusals are worth: without them 50 of 727 records, and none where noise covers them."""
    data = hearts(6)
    monkeypatch.setattr(followed, "differences", lambda own, other: [])
    wide = {"model_options": WIDE["model_options"]}
    private = {**WIDE, "weights": "uniform", "privacy": {"epsilon": 8.0}}
    read = {}
    for name, values in (("open", wide), ("private", private)):
        federation = Federation(values, data, state=tmp_path / name, policy=ANY_WIDTH).enroll()
        totals = federation.sum("train", 1, named=SharedState(_crafted(federation)))
        read[name] = len(_read_records(totals, data))
    assert read["open"] > 50 and read["private"] == 0
