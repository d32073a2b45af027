"""The weighted mean of models, against an independent computation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.learning import model_update
from tightframe.learning.stages import FitReport
from tightframe.phases import Cohort, Setting


def _network() -> torch.nn.Module:
    layers = [
        ("backbone", torch.nn.Linear(4, 3)),
        ("norm", torch.nn.BatchNorm1d(3)),
        ("head", torch.nn.Linear(3, 2)),
    ]
    model = torch.nn.Sequential(OrderedDict(layers))
    model.get_submodule("backbone").get_parameter("bias").requires_grad_(False)
    model.register_buffer("scratch", torch.zeros(7), persistent=False)
    return model


@pytest.fixture
def setting() -> Setting:
    return Setting(
        config=None,
        num_classes=2,
        input_shape=(4,),
        build_model=_network,
        local=SimpleNamespace(),
        update_norm=3.0,
    )


def test_fields(setting: Setting) -> None:
    fields = {item.name: item for item in model_update.model_fields(setting)}
    assert list(fields) == [
        "update/backbone.weight",
        "update/norm.weight",
        "update/norm.bias",
        "update/head.weight",
        "update/head.bias",
        "buffer/norm.running_mean",
        "buffer/norm.running_var",
    ]
    update, buffer = fields["update/head.weight"], fields["buffer/norm.running_var"]
    assert (update.shape, update.ring, update.norm, update.bound) == ((2, 3), 32, 3.0, 8.0)
    assert (buffer.ring, buffer.bound, buffer.norm) == (64, 1e6, None)
    assert all(item.weighted for item in fields.values())
    static = {name for name, item in fields.items() if item.static}
    assert static == {"buffer/norm.running_mean", "buffer/norm.running_var"}, "they hardly change"
    assert model_update.model_fields(setting, _network()) == tuple(fields.values())


def test_building_leaves_the_random_streams_alone(
    setting: Setting, _begun_once: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_update, "initial_model", _begun_once)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model_update.model_fields(setting)
    one, other = model_update.initial_model(setting, 1), model_update.initial_model(setting, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["head.weight"], model_update.initial_model(setting, 2)["head.weight"])


def test_broadcast_and_back(setting: Setting) -> None:
    model = model_update.initial_model(setting, 1)
    sent = {**model_update.broadcast_model(model), "prototypes": torch.zeros(1)}
    assert "model/norm.num_batches_tracked" in sent
    received = model_update.received_model(sent)
    assert list(received) == list(model)
    _network().load_state_dict(received)


def _trained(start: dict[str, Any], seed: int) -> torch.nn.Module:
    model = _network()
    model.load_state_dict(start)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=stream)
        model.get_submodule("norm").get_buffer("running_var").mul_(seed + 40.0)
        model.get_submodule("norm").get_buffer("num_batches_tracked").add_(seed)
    return model


def test_mean_of_three_silos(setting: Setting) -> None:
    start = model_update.initial_model(setting, 1)
    weights = {"site-1": 300.0, "site-2": 17.0, "site-3": 1000.0}
    models = {name: _trained(start, seed) for seed, name in enumerate(weights, start=1)}
    cohort = Cohort(round=1, weights=weights, largest=2000.0)  # the largest silo is not in the sum
    totals: dict[str, Any] = {}
    for name, model in models.items():
        for field, tensor in model_update.model_terms(start, model).items():
            assert tensor.dtype == torch.float32
            part = weights[name] / cohort.largest * tensor.double().numpy()
            totals[field] = totals.get(field, 0) + part
    after = model_update.apply_mean(start, totals, cohort)
    states = [model.state_dict() for model in models.values()]
    for name, before in start.items():
        assert after[name].dtype == before.dtype
        assert after[name].shape == before.shape
        if name in ("norm.num_batches_tracked", "backbone.bias"):
            assert torch.equal(after[name], before)
            continue
        stacked = np.stack([state[name].double().numpy() for state in states])
        expected = np.average(stacked, axis=0, weights=list(weights.values()))
        np.testing.assert_allclose(after[name].numpy(), expected, rtol=3e-7, atol=1e-7)


def test_scalar_parameters(setting: Setting) -> None:
    after = model_update.apply_mean(
        {"beta": torch.tensor(1.0)}, {"update/beta": np.float64(3.0)}, Cohort(1, {"a": 1.0, "b": 0.5}, 1.0)
    )
    assert float(after["beta"]) == 3.0


def test_a_cohort_without_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="positive weight"):
        model_update.apply_mean({}, {}, Cohort(1, {}, 1.0))


def test_training_terms() -> None:
    fields = model_update.training_fields(("cross_entropy", "intra"))
    assert [item.name for item in fields] == ["training/loss", "training/cross_entropy", "training/intra"]
    assert all(item.static and item.weighted and item.shape == () and item.ring == 64 for item in fields)
    report = FitReport(2, 9, {"loss": 1.5, "cross_entropy": 1.25})
    terms = model_update.training_terms(report, ("cross_entropy", "intra"))
    assert {name: float(term) for name, term in terms.items()} == {
        "training/loss": 1.5,
        "training/cross_entropy": 1.25,
        "training/intra": 0.0,
    }
    assert set(model_update.training_terms(report)) == {"training/loss", "training/cross_entropy"}
