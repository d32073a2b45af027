"""Jobs whose updates are of few of the records that the rule on dense layers counts.

A row of a dense layer's update is the sum of its inputs over the records that the unit is active for, and of
the bias the sum of the same factors. So of a unit that sees one record their quotient is that record.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.test_job_rounds import journal
from tests.attacks.test_products import least_squares, small
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Chosen, Federation, Records, hearts

from tightframe.errors import TightframeError
from tightframe.learning import losses, model_update, outputs
from tightframe.methods import combine, fedcurv

JOB: dict[str, Any] = {
    "weights": "exact",
    "training": {"learning_rate": 1e-3, "batch_size": 16},
    "model_options": {"widths": [72], "standardise": True},
}
"""Of 72 units, which three hospitals' 216 surely honest records allow."""
STEP = {"batch_size": 1, "momentum": 0.0}
FEW: dict[str, dict[str, Any]] = {
    "drawn": {"method": "fedsgd", "method_options": {"sampling_rate": 1e-6}},
    "dropped out": {"model_options": {**JOB["model_options"], "dropout": 0.99}},
    "pulled back": {
        "method": "fedprox",
        "method_options": {"mu": 1e4},
        "training": {**STEP, "learning_rate": 1e-4, "weight_decay": 0.0},
    },
}


def in_clear(federation: Federation) -> int:
    """Return how many training records are quotients of a total's rows."""
    found = set[int]()
    for exchange in federation.setup.plan:
        total = federation.sum(*exchange.place)
        if exchange.training:
            rows, bias = (
                next(total[name] for name in total if name.endswith(f"/backbone.1.{kind}"))
                for kind in ("weight", "bias")
            )
            moves = np.abs(bias) > 1e-6 * np.abs(bias).max()
            read = rows[moves] / bias[moves, None]
            model = federation.shared.state.model
            true = np.concatenate([item.raw("train") for item in federation.data.values()]).astype(float)
            if "standardise.mean" in model:
                mean, deviation = (model[f"standardise.{name}"].double().numpy() for name in ("mean", "std"))
                true = (true - mean) / deviation
            away = np.abs((read[:, None] - true) / true.std(0)).max(2)
            if not len(read):
                continue
            found |= set(away.argmin(1)[away.min(1) < 0.01].tolist())
    return len(found)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "least"),
    [(None, 0), ("drawn", 3), ("dropped out", 15), ("pulled back", 1)],
)
def test_without_the_rule_updates_of_few_records_tell_these(
    how: str | None, least: int, tmp_path: Path
) -> None:
    job = {**JOB, **({} if how is None else FEW[how])}
    found = in_clear(Federation(job, small(), state=tmp_path, policy=ANY_WIDTH).enroll())
    assert found >= least and bool(found) is bool(least)


@pytest.mark.parametrize("how", FEW)
def test_what_is_not_behind_an_update_does_not_count(how: str, tmp_path: Path) -> None:
    Federation(JOB, small(), state=tmp_path / "whole").enroll()
    with pytest.raises(TightframeError, match=r"^TF-625: [\s\S]*72 units, .* trained on [0-3] declared"):
        Federation({**JOB, **FEW[how]}, small(), state=tmp_path).enroll()


@pytest.mark.whole
def test_records_of_a_hospital_that_a_server_declares_dead_do_not_count(tmp_path: Path) -> None:
    """The largest of the others may lie."""
    every = hearts(12)
    data = {f"hospital-{place}": every[f"hospital-{place}"] for place in (1, 4, 5, 8, 12)}
    sizes = {name: len(records.labels("train")) for name, records in data.items()}
    least = sum(sorted(sizes.values())[:3])
    policy = STANDARD.model_copy(update={"max_evaluations": None})

    def run(units: int) -> Federation:
        job = {**JOB, "model_options": {"widths": [units]}}
        found = Federation(job, data, state=tmp_path / str(units), job_id=f"job-{units}", policy=policy)
        found.enroll().sum("train", 1, dead={"hospital-1"})
        return found

    assert sizes["hospital-1"] == max(sizes.values()) and least // 2 + 1 <= (least + 100) // 2
    with pytest.raises(
        TightframeError, match=rf"^TF-625: [\s\S]*trained on {least} records of silos .* left"
    ):
        run(least // 2 + 1)
    assert [each.records for each in journal(run(least // 2), "hospital-5")] == [least]


HONEST: dict[str, dict[str, Any]] = {
    "one step on raw columns": {
        "method": "fedsgd",
        "method_options": {"learning_rate": 1e-5},
        "model_options": {"widths": [72]},
    },
    "a high rate": {"training": {"learning_rate": 10.0, "momentum": 0.0}},
}
"""Of which units fire for few of all records; no value says so."""


@pytest.mark.whole
@pytest.mark.parametrize("how", ["one step on raw columns", "a high rate"])
def test_units_that_few_of_a_silos_records_move_stay_as_they_were(how: str, tmp_path: Path) -> None:
    job = {**JOB, "rounds": 4, "seed": 1, "evaluation": {"models": 1}, **HONEST[how]}
    without, found = (
        in_clear(Federation(job, small(), state=tmp_path / str(place), policy=policy).enroll())
        for place, policy in enumerate((ANY_WIDTH, STANDARD))
    )
    assert without and not found


def told_by_two(federation: Federation, number: int) -> list[bool]:
    """Return of each record that a reader takes out of two units' rows in a round whether it is one.

    Rows over how a unit enters the logits differ by the records that fire one unit only. Whether one record
    is left shows in the columns of yes and no.
    """
    head = federation.shared.state.model["head.weight"].double().numpy()
    total = federation.sum("train", number)
    rows, bias = (
        next(total[name] for name in total if name.endswith(f"/backbone.1.{kind}"))
        for kind in ("weight", "bias")
    )
    moves = np.abs(bias) > 1e-9 * np.abs(bias).max()
    rows = np.c_[rows, bias][moves] / (head[1] - head[0])[moves, None]
    one, other = np.triu_indices(len(rows), 1)
    apart = rows[one] - rows[other]
    apart = apart[np.abs(apart[:, -1]) > 1e-7 * np.abs(rows[:, -1]).max()]
    points = apart[:, :-1] / apart[:, -1:]
    true = np.concatenate([item.raw("train") for item in federation.data.values()]).astype(float)
    values = [len(np.unique(column)) for column in true.T]
    flags, numbers = (
        [place for place, number in enumerate(values) if (number > 2) == many] for many in (False, True)
    )
    taken = points[(np.minimum(np.abs(points), np.abs(points - 1)) < 0.01)[:, flags].all(1)][:, numbers]
    away = np.abs((taken[:, None] - true[:, numbers]) / true[:, numbers].std(0)).max(2)
    return (away.min(1) < 0.02).tolist()


@pytest.mark.whole
def test_no_record_is_the_difference_of_two_units(tmp_path: Path) -> None:
    """Of units that all records fire, and one that all but one fire, as on raw columns many do."""
    job = {
        **JOB,
        "method": "fedsgd",
        "method_options": {"learning_rate": 1e-9},
        "model_options": {"widths": [24]},
    }
    told = []
    for place, policy in enumerate((ANY_WIDTH, STANDARD)):
        more = {"rounds": 3, "seed": 3, "evaluation": {"models": 1}}
        federation = Federation({**job, **more}, small(), state=tmp_path / str(place), policy=policy).enroll()
        told.append([sum(told_by_two(federation, number)) for number in (1, 2, 3)])
    assert any(told[0]) and not any(told[1])


def test_variances_of_units_that_few_of_a_silos_records_move_are_not_told(tmp_path: Path) -> None:
    """Of the one record that fires a unit, it is the slope times the feature, squared."""
    variant = {"method": "fedilc", "method_options": {"variant": "fishr_arith_fullbatch"}}
    job = {**JOB, **variant, "model_options": {"widths": [72]}}
    told = []
    for place, policy in enumerate((ANY_WIDTH, STANDARD)):
        federation = Federation(job, small(), state=tmp_path / str(place), policy=policy).enroll()
        model: Any = model_update.build_template(federation.setup.setting)
        model.load_state_dict(dict(federation.shared.state.model))
        variances = federation.sum("train", 1)["fishr/variance"][:, :-1].max(0)
        rows = (torch.as_tensor(item.raw("train")) for item in federation.data.values())
        fire = sum((model.features(item) > 0).sum(0) for item in rows).numpy()
        told.append(set(np.flatnonzero((variances > 0) & (fire == 1)).tolist()))
        assert (variances[fire > 60] > 0).any()
    assert told[0] and not told[1]


@pytest.mark.whole
def test_no_record_makes_most_of_a_units_row_of_squared_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the root of its quotient by the bias's would be near that record."""
    honest, seen = fedcurv.diagonal_fisher, list[tuple[torch.Tensor, torch.Tensor]]()

    def watched(silo: Any, model: Any) -> dict[str, torch.Tensor]:
        found, bias = honest(silo, model), model.backbone[1].bias
        each = [
            torch.autograd.grad(outputs.loss(model(inputs[[row]]), labels[[row]]), bias)[0].double().square()
            for inputs, labels in silo.batches("train", augment=False, shuffle=False)
            for row in range(len(labels))
        ]
        seen.append((torch.stack(each) / len(each), found["backbone.1.bias"]))
        return found

    monkeypatch.setattr(fedcurv, "diagonal_fisher", watched)
    shares = []
    for place, policy in enumerate((ANY_WIDTH, STANDARD)):
        seen.clear()
        job = {**JOB, "method": "fedcurv", "training": {"learning_rate": 1.0, "batch_size": 16}}
        federation = Federation(job, small(), state=tmp_path / str(place), policy=policy).enroll()
        for exchange in federation.setup.plan:
            total = federation.sum(*exchange.place)
            if exchange.training:
                break
        sums = torch.as_tensor(total["fisher/backbone.1.bias"]) / fedcurv.SCALE
        told = [each * (summed > 0) for each, summed in seen[-len(federation.data) :]]  # after rehearsals
        assert torch.allclose(sums, sum(each.sum(0) for each in told), rtol=1e-3, atol=1e-6)  # type: ignore[arg-type]
        most = torch.stack([each.max(0).values for each in told]).max(0).values
        shares.append(float((most / sums)[sums > 1e-6].max()))
    assert shares[0] > 0.6 and shares[1] <= 5**-0.5


NO_LOSS: dict[str, Any] = {
    "weights": "exact",
    "method": "combine",
    "method_options": {"local": "balanced_softmax", "balanced_softmax_gamma": 10.0},
    "training": {"learning_rate": 1.0, "batch_size": 16, "momentum": 0.0, "weight_decay": 0.0},
    "evaluation": {"models": 1},
    "model": "random_features",
    "model_options": {"width": 72, "standardise": True},
}
"""Whose loss says nothing of the more frequent class: of 216 records 48 are behind the head."""


def features(federation: Federation) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the map from standardised columns to features, the training records' columns, and classes."""
    module: Any = model_update.build_template(federation.setup.setting)
    module.load_state_dict(dict(federation.shared.state.model))
    mean, deviation = (getattr(module.standardise, name).detach().double() for name in ("mean", "std"))
    weight, offset = module.backbone.weight.double(), module.backbone.offset.double()
    data = federation.data.values()
    raw, labels = (
        np.concatenate(items)
        for items in zip(*((item.raw("train"), item.labels("train")) for item in data), strict=True)
    )

    def phi(points: torch.Tensor) -> torch.Tensor:
        return math.sqrt(2 / len(weight)) * (points @ weight.T + offset).cos()

    return phi, (torch.as_tensor(raw).double() - mean) / deviation, torch.as_tensor(labels)


def heads(federation: Federation) -> np.ndarray:
    """Return the head's rows in each round's total, one under the other."""
    found = []
    for exchange in federation.setup.plan:
        total = federation.sum(*exchange.place)
        if exchange.training:
            found.append(total["update/head.weight"])
    return np.concatenate(found)


@pytest.mark.whole
def test_a_head_that_most_records_have_no_loss_at_stays_as_it_was(tmp_path: Path) -> None:
    """Without the rule the total is a combination of the rarer class's records, but for columns of few."""
    usual = {**NO_LOSS, "method_options": {"local": "balanced_softmax"}}
    told = []
    for place, (job, policy) in enumerate(((NO_LOSS, ANY_WIDTH), (usual, STANDARD), (NO_LOSS, STANDARD))):
        federation = Federation(job, small(), state=tmp_path / str(place), policy=policy).enroll()
        told.append(heads(federation)[0])
    phi, rows, labels = features(federation)
    span = np.linalg.qr(phi(rows[labels == 0]).numpy().T)[0]
    few, most, none = (
        float(np.linalg.norm(row - span @ (span.T @ row))) / max(1e-9, float(np.linalg.norm(row)))
        for row in told
    )
    assert few < 0.02 < most and none == 0.0 and not told[2].any(), (few, most)


@pytest.mark.whole
def test_without_the_rule_those_that_have_a_loss_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three hospitals with five of the rarer class each, who lie in what the rounds' totals span."""
    data: dict[str, Records] = {
        name: Chosen(
            item, np.r_[np.flatnonzero(item.labels("train") == 0)[:5], np.flatnonzero(item.labels("train"))]
        )
        for name, item in small().items()
    }

    def steep(*given: Any, gamma: float, **how: Any) -> torch.Tensor:
        return losses.balanced_softmax_loss(*given, gamma=100 * gamma, **how)

    monkeypatch.setattr(combine, "balanced_softmax_loss", steep)  # beyond what the option now takes
    job = {**NO_LOSS, "rounds": 20, "model_options": {"width": 60, "standardise": True}}
    federation = Federation(job, data, state=tmp_path, policy=ANY_WIDTH).enroll()
    null = torch.as_tensor(np.linalg.svd(heads(federation))[2][15:])
    phi, rows, labels = features(federation)
    start = torch.randn(30, rows.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near, which = torch.cdist(least_squares(phi, null, start, 40, 1e-7), rows).min(1)
    read = which[near < 0.05].unique()
    # The others are a record in whose column of few the rule on these has put another value.
    assert len(read) >= 5 and not labels[read].any() and (near < 0.05).double().mean() > 0.5
