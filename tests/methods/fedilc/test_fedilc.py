"""FedILC: its two phases against one process that holds all silos, cohorts, schedules, whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.fedilc_by_hand import (
    VARIANTS,
    WIDTH,
    WITH_FISHR,
    adam,
    assert_agree,
    direction_of,
    federate,
    setting_of,
    silos_of,
    slopes_of,
    whole,
)
from tests.support.methods.silo import FakeSilo
from tests.support.runs import FOUR, twin
from torch import nn

from tightframe import federation
from tightframe.errors import RunError
from tightframe.learning.gradients.fold import same_batches
from tightframe.methods import fedilc
from tightframe.methods.fedilc import METHOD, FedILCConfig
from tightframe.models import Classifier
from tightframe.models.heads import SingleLogit

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "golden" / "fedilc.npz")

CHOICES: list[dict[str, Any]] = [
    *({"variant": variant} for variant in VARIANTS),
    {"variant": "intra_geo", "zero": "official", "threshold": 0.3},
    {"variant": "inter_geo", "zero": "official"},
    {"variant": "inter_geo", "zero": "official", "threshold": 0.5},
    {"variant": "inter_geo", "threshold": 0.5, "penalty_scale": "mean"},
    {"variant": "intra_arith", "penalty_scale": "mean"},
    {"variant": "geo_substitute", "zero": "official"},
]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("options", CHOICES, ids=lambda options: "-".join(map(str, options.values())))
def test_two_rounds_equal_one_process_that_holds_all_silos(
    options: dict[str, Any], classes: int, make_setting: Any, open_sum: Any
) -> None:
    setting = setting_of(make_setting, classes=classes, **options)
    silos = silos_of(setting)
    directions = []
    for number in (1, 2):
        state, _ = federate(setting, silos, open_sum, number - 1)
        directions.append(direction_of(setting, state, silos, number)[0])
    state, opened = federate(setting, silos, open_sum, 2)
    assert_agree(state, adam(setting, METHOD.init_server(setting, 7), directions))
    names = [["fishr", "gradient"] if options["variant"] in WITH_FISHR else ["gradient"]] * 2
    assert [list(found) for found in opened] == names
    assert "fishr/mean" not in state.extra, "a vbar is for its own round only"


@pytest.mark.parametrize("norm", [False, True])
def test_fishr_gradient_is_that_through_all_silos(norm: bool, make_setting: Any, open_sum: Any) -> None:
    """The sum that is opened, not what Adam makes of it; with BatchNorm and dropout, too."""
    setting = setting_of(make_setting, norm=norm, dropout=0.4, variant="inter_geo")
    silos = silos_of(setting)
    start = METHOD.init_server(setting, 7)
    model = setting.build_model()
    model.load_state_dict(dict(start.model))
    found = [whole(silo, model, one_by_one=True) for silo in silos.values()]  # type: ignore[arg-type]
    variances = torch.stack([part[0] for part in found])
    penalty = (variances - variances.mean(0)).square().sum()
    expected = slopes_of(penalty, model)
    state, (opened,) = federate(setting, silos, open_sum, 1)
    names = [name for name, _ in model.named_parameters()]
    totals = opened["gradient"]
    slopes = np.concatenate([totals[f"fishr/gradient/{name}"].reshape(-1) for name in names]) / fedilc.SCALE
    np.testing.assert_allclose(slopes, expected.numpy(), rtol=1e-8, atol=1e-12)
    assert np.abs(slopes).max() > 1e-3
    layer = opened["fishr"]["fishr/variance"] / fedilc.SCALE
    np.testing.assert_allclose(layer[:, :-1].reshape(-1), variances.sum(0)[: 3 * WIDTH].detach(), rtol=1e-9)
    np.testing.assert_allclose(layer[:, -1], variances.sum(0)[3 * WIDTH :].detach(), rtol=1e-9)
    buffers = [name for name in totals if name.startswith("buffer/")]
    assert bool(buffers) == norm
    for name in buffers:
        weights = [len(silo.labels) / 19 for silo in silos.values()]
        expected_buffer = totals[name] / sum(weights)
        own = name.removeprefix("buffer/")
        np.testing.assert_allclose(state.model[own].numpy(), expected_buffer, rtol=1e-12)
        assert not torch.equal(state.model[own], start.model[own])


@pytest.mark.parametrize("index", range(int(GOLDEN["n_fishr"])))
def test_two_phases_give_the_golden_gradient(index: int, make_setting: Any, open_sum: Any) -> None:
    golden = {
        name.removeprefix(f"f{index}_"): GOLDEN[name] for name in GOLDEN if name.startswith(f"f{index}_")
    }
    classes, width = golden["clf_W"].shape
    body = nn.Sequential(nn.Linear(golden["body_W"].shape[1], width), nn.ReLU())
    names = {"backbone.0.weight": "body_W", "backbone.0.bias": "body_b"}
    names |= {"head.weight": "clf_W", "head.bias": "clf_b"}

    def build_model() -> nn.Module:
        head = SingleLogit(width) if classes == 1 else nn.Linear(width, classes)
        model = Classifier(body, width, classes, head=head).double()
        model.load_state_dict({own: torch.tensor(golden[name]) for own, name in names.items()})
        return model

    assert golden["binary"] == (classes == 1)
    config = FedILCConfig(variant="inter_geo", penalty_weight=1.0)
    setting = replace(
        make_setting(config, classes=max(classes, 2), batch_size=3, augment=False), build_model=build_model
    )
    silos = {}
    while f"k{len(silos)}_x" in golden:
        inputs, labels = (torch.tensor(golden[f"k{len(silos)}_{part}"]) for part in "xy")
        silos[f"site-{len(silos)}"] = FakeSilo(f"site-{len(silos)}", setting, inputs, labels)
    _, (opened,) = federate(setting, silos, open_sum, 1)
    for own, name in names.items():
        found = opened["gradient"][f"fishr/gradient/{own}"] / fedilc.SCALE
        np.testing.assert_allclose(found, golden[f"fishr_grad_{name}"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found, golden[f"twophase_grad_{name}"], rtol=1e-9, atol=1e-12)
    biased = opened["fishr"]["fishr/variance"] / fedilc.SCALE
    summed = np.concatenate([biased[:, -1], biased[:, :-1].reshape(-1)])
    np.testing.assert_allclose(summed, golden["sum_v"], rtol=1e-9, atol=1e-12)
    weights = [len(silo.labels) for silo in silos.values()]
    if len(set(weights)) == 1:  # then the weighted mean that is reported is the plain one
        value = opened["gradient"]["training/fishr"]
        np.testing.assert_allclose(value, golden["fishr_loss"], rtol=1e-9)


# ---------------------------------------------------------------- cohorts, rounds, schedules


@pytest.mark.parametrize("variant", WITH_FISHR)
def test_a_silo_that_leaves_between_the_phases(variant: Any, make_setting: Any, open_sum: Any) -> None:
    """vbar is that of phase 1's silos; the gradient is the mean over phase 2's."""
    setting = setting_of(make_setting, variant=variant)
    silos = silos_of(setting)
    start = METHOD.init_server(setting, 7)
    _, vbar = direction_of(setting, start, silos, 1)
    direction, _ = direction_of(setting, start, silos, 1, mean=vbar, staying=["site-1", "site-3"])
    state, _ = federate(setting, silos, open_sum, 1, lost=[(1, "gradient", "site-2")])
    assert_agree(state, adam(setting, start, [direction]))


@pytest.mark.parametrize("variant", WITH_FISHR)
def test_a_silo_that_misses_a_round(variant: Any, make_setting: Any, open_sum: Any) -> None:
    setting = setting_of(make_setting, variant=variant)
    silos = silos_of(setting)
    start = METHOD.init_server(setting, 7)
    two = {name: silo for name, silo in silos.items() if name != "site-2"}
    direction, _ = direction_of(setting, start, two, 1)
    state, _ = federate(setting, silos, open_sum, 1, lost=[(1, "fishr", "site-2")])
    assert_agree(state, adam(setting, start, [direction]))


@pytest.mark.parametrize("variant", ["inter_geo", "intra_geo"])
def test_a_stale_mean_is_that_of_the_round_before(variant: Any, make_setting: Any, open_sum: Any) -> None:
    setting = setting_of(make_setting, variant=variant, stale=True)
    silos = silos_of(setting)
    start = METHOD.init_server(setting, 7)
    plain = replace(setting, config=setting.config.model_copy(update={"penalty_weight": 0.0}))
    first, _ = direction_of(plain, start, silos, 1)
    _, vbar = direction_of(setting, start, silos, 1)
    between, opened = federate(setting, silos, open_sum, 1)
    assert [list(found) for found in opened] == [["gradient"]]
    assert opened[0]["gradient"]["training/fishr"] == 0
    second, _ = direction_of(setting, between, silos, 2, mean=vbar)
    state, opened = federate(setting, silos, open_sum, 2)
    assert opened[1]["gradient"]["training/fishr"] > 0
    assert_agree(state, adam(setting, start, [first, second]))


def test_the_penalty_begins_after_its_anneal_rounds(make_setting: Any) -> None:
    late = setting_of(make_setting, variant="intra_geo", penalty_anneal_rounds=2)
    assert [len(METHOD.plan(late, number, 5)) for number in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [late.config.weight_in(number) for number in (1, 2, 3)] == [0.0, 0.0, 0.3]
    early = setting_of(
        make_setting,
        variant="inter_geo",
        penalty_anneal_rounds=1,
        penalty_weight=0.0,
        penalty_weight_before=1.0,
    )
    assert [len(METHOD.plan(early, number, 5)) for number in (1, 2)] == [2, 1]
    stale = setting_of(make_setting, variant="intra_geo", penalty_anneal_rounds=2, stale=True)
    asked = [fedilc.VARIANCE in METHOD.plan(stale, number, 5)[0].schema for number in (1, 2, 3)]
    assert asked == [False, True, True], "the round before the first penalty measures for it"
    for variant in ("fedsgd", "geometric", "geo_substitute"):
        assert len(METHOD.plan(setting_of(make_setting, variant=variant), 1, 1)) == 1


def test_a_gradient_without_this_rounds_mean_is_refused(make_setting: Any, open_sum: Any) -> None:
    setting = setting_of(make_setting, variant="intra_geo")
    silos = silos_of(setting)
    state, _ = federate(setting, silos, open_sum, 1)
    (_, gradient) = METHOD.plan(setting, 2, 2)
    broadcast = gradient.broadcast(state)
    assert not any(name.startswith("fishr") for name in broadcast)
    with pytest.raises(RunError, match=r"^TF-505: "):
        gradient.contribute(silos["site-1"], broadcast, {})


def test_both_phases_see_the_same_records(make_setting: Any) -> None:
    """With augmentation, dropout and BatchNorm, the stale and the two-phase variances are one."""
    found = []
    for stale in (False, True):
        setting = setting_of(make_setting, norm=True, dropout=0.5, variant="intra_geo", stale=stale)
        silo = silos_of(setting)["site-1"]
        phase = METHOD.plan(setting, 1, 1)[0]
        contribution = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 7)), {})
        found.append(contribution.tensors[fedilc.VARIANCE])
        assert all(asked["augment"] and asked["shuffle"] and asked["epoch"] == 0 for asked in silo.asked)
    assert torch.equal(found[0], found[1])
    model, before = setting.build_model(), torch.random.get_rng_state()
    passes = [[model(inputs) for inputs, _ in same_batches(silo, model)] for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's stream was moved"
    assert all(torch.equal(one, other) for one, other in zip(*passes, strict=True))


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def run() -> Callable[..., federation.Result]:
    """Two rounds of four silos in this process."""

    def start(summation: str, **options: Any) -> federation.Result:
        return federation.run(
            "fedilc",
            {site: twin(site) for site in FOUR},
            2,
            dataset="fed_isic2019",
            dataset_options={"image_size": 16},
            model_options={"widths": [8, 8]},
            method_options={"learning_rate": 0.01, **options},
            training={"batch_size": 16},
            seed=3,
            summation=summation,
        )

    return start


@pytest.mark.whole
@pytest.mark.parametrize("variant", ["fishr_arith_fullbatch", "geo_substitute", "intra_geo"])
def test_plain_and_secure_sums_agree_bit_for_bit(variant: str, run: Callable[..., federation.Result]) -> None:
    """Without a split by sign, with it, in two phases; ``test_silos`` encodes the sums of every variant."""
    plain, secure = (run(summation, variant=variant) for summation in ("plain", "secure"))
    for ours, theirs in ((plain.state.model, secure.state.model), (plain.state.extra, secure.state.extra)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = [row for row in plain.outcome.rows if row.kind == "train"]
    assert [row.training for row in rows] == [
        row.training for row in secure.outcome.rows if row.kind == "train"
    ]
    assert all(row.silos == FOUR for row in rows)
    last = [row.training for row in rows if row.training]
    assert len(last) == 2 and last[1]["cross_entropy"] < last[0]["cross_entropy"]
