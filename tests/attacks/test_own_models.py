"""Evaluations of silos' own models: whoever writes the job chooses models that tell no records apart.

Each silo's own head then learns its class shares alone, and gives all its records one score: a bin of the
total is one hospital. Where others' models are such and one is not, what is left of the total is that one's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.test_false_flags import Some
from tests.support.attacks.malicious_server import Federation, Records, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.errors import PolicyError
from tightframe.rounds.phases.personal import public_class_counts
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import Evaluated

JOB: dict[str, Any] = {
    "method": "local_only",
    "model": "random_features",
    "model_options": {"width": 8, "bandwidth": 1e6},
    "weights": "uniform",
    "personalise": True,
}


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    found = hearts(5)
    return {name: found[name] for name in ("hospital-1", "hospital-2", "hospital-3", "hospital-5")}


def test_no_bin_of_a_total_is_one_hospitals_class_counts(
    tmp_path: Path, hospitals: dict[str, Records]
) -> None:
    """Of 1 and 15 test records at one of four hospitals both numbers were read, and all others' too."""
    run = Federation(JOB, hospitals, state=tmp_path, policy=PolicyBlock(profile="standard")).enroll()
    totals = {exchange.place[0]: run.sum(*exchange.place) for exchange in run.setup.plan}
    told = {name: item for name, item in totals["closing"].items() if name.startswith("evaluation/")}
    assert len(told) == 6 and not any(item.any() for item in told.values())
    assert totals["personal"]["personal/silos"] == 4, "their mean accuracy is still told"
    ledger = read_journal(run.sessions["hospital-1"].context.ledger_paths, check=None)
    assert [item.models for item in ledger if isinstance(item, Evaluated)] == [0]


@pytest.mark.parametrize("method", ["local_only", "fedproto"])
def test_no_hospital_alone_has_another_model(
    tmp_path: Path, hospitals: dict[str, Records], method: str
) -> None:
    mlp = {"model": "mlp", "model_options": {"widths": [4]}}
    others = {"hospital-2": {**mlp, "model_options": {"widths": [3, 4]}}}
    run = Federation({**JOB, **mlp, "method": method, "site_models": others}, hospitals, state=tmp_path)
    with pytest.raises(PolicyError, match="a model that 1 of 4 silos train") as caught:
        run.enroll()
    assert caught.value.code == "TF-614"


@pytest.mark.parametrize("few", [0, 1, 4])
def test_nor_does_a_personal_models_accuracy_tell_of_a_class_of_few(
    few: int, tmp_path: Path, hospitals: dict[str, Records]
) -> None:
    """PM(V) is of classes with a training record: less the accuracy it told whether there was one or none."""
    data = {**hospitals, "hospital-2": Some(hospitals["hospital-2"], {0: 40, 1: few})}
    run = Federation(JOB, data, state=tmp_path)
    silo = LocalSilo(run.sessions["hospital-2"].context, run.setup, torch.device("cpu"), 1)
    assert public_class_counts(silo).tolist() == [40, 0]
