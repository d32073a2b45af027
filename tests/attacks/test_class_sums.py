"""Records of a rare class computed from class sums in training, and the rule that leaves such a class out.

CReFF's class gradients are of the model that all silos have, so that each round's total is that many known
functions of the class's few records, summed. With fewer numbers than the records have values none is found by
least squares (33 of four records of 13 columns: none in 40 searches), with a quarter more they are: both of
two records from 33 numbers, all of four from 129 to 264.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import STANDARD, Chosen, Federation, hearts

from tightframe.config.policy import PolicyBlock
from tightframe.errors import RunError, TightframeError
from tightframe.learning import model_update
from tightframe.methods.creff import GRADIENTS, RETRAINED

RULED = STANDARD.model_copy(update={"min_class_count": 2})
OFF = RULED.model_copy(update={"records_per_feature": 0})
UNITS, RARE = 64, 2
JOB: dict[str, Any] = {
    "method": "creff",
    "method_options": {"epochs": 3, "match_steps": 5},
    "weights": "exact",
    "rounds": 6,
    "evaluation": {"models": 1},
    "training": {"learning_rate": 1.0, "batch_size": 16, "momentum": 0.5, "epochs": 3},
    "model_options": {"widths": [UNITS], "standardise": True},
}


class Few(Chosen):
    """A hospital with so many training records of class 1."""

    def __init__(self, data: Any, rare: int) -> None:
        labels = np.asarray(data.labels("train"))
        of = np.flatnonzero(labels == 1)[:rare]
        super().__init__(data, np.sort(np.concatenate([np.flatnonzero(labels == 0), of])))

    def of_rare_class(self) -> torch.Tensor:
        return torch.as_tensor(self.raw("train")[self.labels("train") == 1]).double()


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Few]:
    every = hearts(12)
    return {name: Few(every[name]._data, RARE) for name in ("hospital-1", "hospital-2", "hospital-6")}


def federation(
    data: dict[str, Few], state: Path, policy: PolicyBlock, job_id: str = "job-a", **changes: Any
) -> Federation:
    return Federation({**JOB, **changes}, data, state=state, job_id=job_id, policy=policy)


def told(found: Federation) -> list[tuple[torch.nn.Module, np.ndarray]]:
    """Sum each round, as an honest server does: the model received, and both classes' gradients."""
    opened = []
    for exchange in found.enroll().setup.plan:
        model: Any = model_update.build_template(found.setup.setting)
        model.load_state_dict(dict(found.shared.state.model))
        total = found.sum(*exchange.place)
        if GRADIENTS in total:
            opened.append((model.eval(), total[GRADIENTS]))
    return opened  # the silos' flags came with the moments of inputs


def search(phi: Any, sums: torch.Tensor, start: torch.Tensor, steps: int) -> tuple[float, torch.Tensor]:
    """Return cost and points (K, p) of which ``phi`` adds up to sums: Levenberg-Marquardt."""
    value, slope = torch.func.vmap(phi), torch.func.vmap(torch.func.jacfwd(phi))
    points, damped, size = start, 1e-2, start.numel()
    residual = value(points).sum(0).flatten() - sums
    for _ in range(steps):
        jacobian = slope(points).flatten(1, -2).permute(1, 0, 2).reshape(-1, size)
        normal = jacobian.T @ jacobian
        scaled = torch.diag(damped * normal.diagonal().clamp_min(1e-6) + 1e-9)
        moved = points - torch.linalg.solve(normal + scaled, jacobian.T @ residual).view_as(points)
        left = value(moved).sum(0).flatten() - sums
        if left.square().sum() < residual.square().sum():
            points, residual, damped = moved, left, max(damped / 3, 1e-9)
        else:
            damped = min(damped * 4, 1e9)
    return float(residual.square().sum()), points


def read(opened: list[tuple[Any, np.ndarray]], data: dict[str, Few], own: str) -> int:
    """Return how many of others' records of class 1 a hospital reads, each column to 0.1 deviations."""
    standardise = opened[0][0].standardise
    mean, deviation = (getattr(standardise, name).detach().double() for name in ("mean", "std"))
    mine, true = (
        torch.cat(
            [(data[name].of_rare_class() - mean) / deviation for name in data if (name == own) is given]
        )
        for given in (True, False)
    )
    states = [model.state_dict() for model, _ in opened]
    weight, bias, last, shift = (
        torch.stack([state[name].double() for state in states])
        for name in ("backbone.1.weight", "backbone.1.bias", f"{RETRAINED}weight", f"{RETRAINED}bias")
    )

    def phi(point: torch.Tensor) -> torch.Tensor:
        features = torch.relu(torch.einsum("rdp,p->rd", weight, point) + bias)
        gap = torch.softmax(torch.einsum("rcd,rd->rc", last, features) + shift, 1)[:, 1:] - 1
        return gap * torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)

    means = torch.stack([torch.as_tensor(sums[1]).view(2, -1)[1] for _, sums in opened])
    others = (means * RARE - torch.func.vmap(phi)(mine).sum(0)).flatten()
    starts = torch.randn(12, *true.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = (search(phi, others, start, 50) for start in starts)
    points = next(
        (points for cost, points in found if cost < 1e-6), starts[0]
    )  # half of the starts end there
    nearest = points[torch.cdist(true, points).argmin(1)]
    return int(((nearest - true).abs() < 0.1).all(1).sum())


@pytest.mark.whole
def test_a_rare_class_is_read_from_the_rounds_of_one_job_and_left_out_under_the_rule(
    hospitals: dict[str, Few], tmp_path: Path
) -> None:
    opened = told(federation(hospitals, tmp_path / "off", OFF))
    assert read(opened, hospitals, "hospital-1") == 2 * RARE
    ruled = told(federation(hospitals, tmp_path / "on", RULED))
    assert len(ruled) == len(opened) and not any(sums[1].any() for _, sums in ruled)


def test_a_job_that_no_class_could_take_part_in_is_refused_before_anything_runs(
    hospitals: dict[str, Few], tmp_path: Path
) -> None:
    with pytest.raises(TightframeError, match=r"^TF-625: [\s\S]*3900 numbers of each class"):
        federation(hospitals, tmp_path, RULED, rounds=60).enroll()


@pytest.mark.whole
def test_a_second_run_adds_to_the_first_ones_numbers(hospitals: dict[str, Few], tmp_path: Path) -> None:
    short: dict[str, Any] = {"rounds": 1, "model_options": {"widths": [4], "standardise": True}}
    ((_, sums),) = told(federation(hospitals, tmp_path, RULED, **short))
    assert sums[0].any() and not sums[1].any(), "a class with records enough is told"
    with pytest.raises(TightframeError, match=r"^TF-625: [\s\S]*1 more sum by class, of 1 in a run"):
        federation(hospitals, tmp_path, RULED, job_id="job-b", **short).enroll()
    with pytest.raises(TightframeError, match=r"^TF-617: [\s\S]*own class_values"):
        federation(hospitals, tmp_path, RULED, job_id="job-c", **{**short, "rounds": 2}).enroll()


def test_nor_are_its_moments(hospitals: dict[str, Few], tmp_path: Path) -> None:
    """Of all classes, less the sums of those with enough, they were the rare class's."""
    run = federation(hospitals, tmp_path, RULED).enroll()
    common = sum(int((item.labels("train") == 0).sum()) for item in hospitals.values())
    assert run.statistics()["statistics/values"] == common


class OfPatients(Few):
    """A hospital whose records of class 1 are of so many patients."""

    def __init__(self, data: Any, rare: int, patients: int) -> None:
        super().__init__(data, rare)
        self._patients = patients

    def groups(self, fold: str) -> np.ndarray:
        labels = np.asarray(self.labels(fold))
        return np.where(labels == 1, labels.cumsum() % self._patients, np.arange(len(labels)) + 99)


@pytest.mark.parametrize("patients", [5, 4])
def test_a_class_of_a_hospitals_few_patients_is_in_no_sum(patients: int, tmp_path: Path) -> None:
    """Three hospitals have seven records of it each."""
    every = hearts(12)
    names = ("hospital-1", "hospital-2", "hospital-6")
    data: Any = {name: OfPatients(every[name]._data, 7, patients) for name in names}
    options = {"width": 16, "standardise": True}
    job = {"method": "fedncm", "model": "random_features", "model_options": options}
    made = Federation(job, data, state=tmp_path, policy=STANDARD).enroll()
    with nullcontext() if patients == 5 else pytest.raises(RunError, match=r"^TF-510: .* got 1: "):
        for item in made.setup.plan:
            made.sum(*item.place)


@pytest.mark.parametrize("method", ["creff", "fedmr"])
def test_no_number_of_a_class_sum_is_one_records_own(method: str, tmp_path: Path) -> None:
    """Of units that it alone of its class fires, as some do on raw columns; the model is the one received."""
    every = hearts(12)
    data = {name: every[name] for name in ("hospital-1", "hospital-2", "hospital-3", "hospital-6")}
    job = {**JOB, "method": method, "rounds": 2, "seed": 1, "model_options": {"widths": [72]}}
    name = GRADIENTS
    if method == "fedmr":
        job |= {"method_options": {}, "training": {"learning_rate": 1e-9, "batch_size": 16}}
        name = "prototype/feature_sums"
    rows = torch.as_tensor(np.concatenate([item.raw("train") for item in data.values()])).double()
    labels = np.concatenate([item.labels("train") for item in data.values()])
    told = []
    for place, policy in enumerate((STANDARD.model_copy(update={"records_per_feature": 0}), STANDARD)):
        made = Federation(job, data, state=tmp_path / str(place), policy=policy).enroll()
        for item in made.setup.plan:
            model: Any = model_update.build_template(made.setup.setting)
            model.load_state_dict(dict(made.shared.state.model))
            if len(found := made.sum(*item.place).get(name, ())):
                total, received = np.asarray(found), model.double()
        with torch.no_grad():
            fire = (received.features(rows) > 0).numpy()
        numbers = np.abs(total.reshape(2, 2 if name == GRADIENTS else 1, -1)).max(1)[:, :72]
        few = np.stack([(fire[labels == label].sum(0) < 5) for label in (0, 1)])
        told.append(int((numbers[few] > 1e-9).sum()))
        assert (numbers[~few] > 1e-9).any()
    assert told[0] and not told[1]
