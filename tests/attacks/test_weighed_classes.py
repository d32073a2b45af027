"""Class sums that weigh each record by what the model answers, or are means of yes and no."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Federation, Records, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.data.heart import FEATURES, NUMBERS
from tightframe.errors import PolicyError
from tightframe.learning import model_update
from tightframe.methods import creff, fednh, fedproto

JOB: dict[str, Any] = {
    "weights": "exact",
    "evaluation": {"models": 1},
    "training": {"learning_rate": 1e-30, "batch_size": 64, "momentum": 0.0, "weight_decay": 0.0},
}
SURE: dict[str, Any] = {
    "method": "creff",
    "method_options": {"learning_rate": 1e6, "epochs": 3, "match_steps": 5},
    "rounds": 4,
    "model_options": {"widths": [16], "standardise": True},
}
STEEP: dict[str, Any] = {
    "method": "fednh",
    "method_options": {"client_adv": True, "scale": 1000.0, "learn_scale": False},
    "rounds": 2,
    "seed": 1,
    "model_options": {"widths": [24]},
}
HOSPITALS = ("hospital-1", "hospital-2", "hospital-5")


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    every = hearts(6)
    return {name: every[name] for name in HOSPITALS}


def last_round(
    values: dict[str, Any], data: dict[str, Records], state: Path, policy: PolicyBlock
) -> tuple[Any, dict[str, np.ndarray]]:
    """The model behind the last round of an honest server's run, and its total."""
    found = Federation({**JOB, **values}, data, state=state, policy=policy).enroll()
    places = [exchange.place for exchange in found.setup.plan if exchange.place[0] != "closing"]
    for place in places:
        model: Any = model_update.build_template(found.setup.setting)
        model.load_state_dict(dict(found.shared.state.model))
        total = found.sum(*place)
    return model.eval(), total


def of_class(data: Records, label: int) -> torch.Tensor:
    return torch.as_tensor(data.raw("train"))[torch.as_tensor(data.labels("train")) == label]


@pytest.mark.whole
@pytest.mark.parametrize("policy", [ANY_WIDTH, STANDARD])
def test_a_head_that_is_sure_of_all_shows_no_few_wrong_answers(
    hospitals: dict[str, Records], tmp_path: Path, policy: PolicyBlock
) -> None:
    model, total = last_round(SURE, hospitals, tmp_path, policy)
    opened = total[creff.GRADIENTS].reshape(2, 2, -1)
    few = 0
    for label in (0, 1):
        wrong = [model(of_class(data, label)).argmax(1).ne(label).sum() for data in hospitals.values()]
        if max(wrong) < 5:
            few += 1
            assert opened[label].any() == (policy is ANY_WIDTH), wrong
    assert few, "else the job would show nothing"


@pytest.mark.parametrize("policy", [ANY_WIDTH, STANDARD])
def test_no_vector_of_a_class_is_of_its_likeliest_record_alone(
    hospitals: dict[str, Records], tmp_path: Path, policy: PolicyBlock
) -> None:
    model, total = last_round(STEEP, hospitals, tmp_path, policy)
    opened = torch.as_tensor(total[fednh.SUMS])
    assert opened[0].any(), "a class of which the model is sure"
    alone = torch.zeros(24, dtype=torch.float64)
    for data in hospitals.values():
        features = model.features(of_class(data, 1)).detach()
        likely = model.head(features).detach().double().softmax(1)[:, 1]
        assert likely.max() > 0.9 * likely.sum()
        alone += len(features) * torch.nn.functional.normalize(features[likely.argmax()].double(), dim=0)
    gap = float((opened[1] - alone).norm() / alone.norm())
    assert (gap < 0.05) == (policy is ANY_WIDTH) and opened[1].any() == (policy is ANY_WIDTH)


def test_means_of_yes_and_no_tell_hospitals_own_numbers_and_are_refused(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    job = {**JOB, "method": "fedproto", "rounds": 2, "model_options": {"widths": []}}
    federation = Federation(job, hospitals, state=tmp_path, policy=ANY_WIDTH).enroll()
    for place in [exchange.place for exchange in federation.setup.plan if exchange.training]:
        total = federation.sum(*place)
    yes_or_no = [place for place, name in enumerate(FEATURES) if name not in NUMBERS]
    opened = total[fedproto.SUMS][0, yes_or_no]
    pairs = itertools.combinations(range(2, 120), 2)
    found = {(n, m) for n, m in pairs if (abs(np.round(opened * n * m) - opened * n * m) < 1e-3).all()}
    assert found == {tuple(sorted({len(of_class(data, 0)) for data in hospitals.values()}))}

    def enroll(name: str, **other: Any) -> None:
        Federation({**job, **other}, hospitals, state=tmp_path / name, policy=STANDARD).enroll()

    with pytest.raises(PolicyError, match=r"TF-625: [\s\S]*class means of each silo's own columns"):
        enroll("refused")
    enroll("records", method_options={"weighting": "records"})
    enroll("units", model_options={"widths": [16]})
