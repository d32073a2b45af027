"""A module handed to ``federation.run`` in place of a backbone's name: same bits, and named refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tightframe
from tightframe import federation, methods, models
from tightframe.errors import JobError, ModelError
from tightframe.phases import stream_seed

SILOS = ["a", "b", "c"]
TRAINING = {"epochs": 1, "batch_size": 16}
HEART: dict[str, Any] = {"dataset": "fed_heart_disease", "training": TRAINING, "seed": 3}
PLAIN = sorted(item.name for item in methods.METHODS if item.network == "logits")
KEEPS = {"scaffold", "feddyn", "feddc", "fedcurv", "fedopt", "ditto", "local_only"}
"""What one round leaves to the next one, at the silos or the server."""
OTHERS = sorted(item.name for item in methods.METHODS if item.network != "logits")


def _registered() -> nn.Module:
    """The registered network with the values that a run of seed 3 draws."""
    spec = models.get("mlp")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(3, "server", "init"))
        return spec.build(spec.options(widths=[4]), (13,), 2)


class Plain(nn.Module):
    """The same arithmetic and the same names, without ``features`` and ``head``'s meaning."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.backbone, self.last = whole.backbone, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.backbone(x))
        return logits


def _net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.fixture(scope="module")
def by_name() -> federation.Result:
    return federation.run("fedavg", SILOS, 2, model="mlp", model_options={"widths": [4]}, **HEART)


@pytest.mark.parametrize("make", [_registered, lambda: Plain(_registered())], ids=["features", "logits"])
def test_a_module_gives_the_bits_of_the_registered_network(
    by_name: federation.Result, make: Callable[[], nn.Module]
) -> None:
    module = make()
    before = {name: item.clone() for name, item in module.state_dict().items()}
    result = federation.run("fedavg", SILOS, 2, model=module, **HEART)
    assert len(result.state.model) == len(before)
    for mine, theirs in zip(result.state.model.values(), by_name.state.model.values(), strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(before[name], item) for name, item in module.state_dict().items())
    module.load_state_dict(dict(result.state.model))  # the names are the module's own
    assert any(not torch.equal(before[name], item) for name, item in module.state_dict().items())
    mine_row, theirs_row = (item.outcome.final().as_json() for item in (result, by_name))
    assert mine_row["balanced_accuracy"] == theirs_row["balanced_accuracy"]


@pytest.mark.whole
@pytest.mark.parametrize("method", PLAIN)
def test_methods_that_need_logits_only_train_a_plain_module_with_buffers(method: str) -> None:
    needs = {"momentum": 0.0} if method in ("scaffold", "feddyn", "feddc") else {}
    training = {"training": {**TRAINING, **needs}}
    rounds = 2 if method in KEEPS else 1
    result = federation.run(method, SILOS, rounds, model=_net(), **{**HEART, **training}, summation="plain")
    assert result.outcome.trained
    if result.state.model:
        assert not torch.equal(result.state.model["0.weight"], _net().state_dict()["0.weight"])
        assert not torch.equal(result.state.model["1.running_mean"], torch.zeros(6)), "buffers are summed"


@pytest.mark.parametrize("method", OTHERS)
def test_all_other_methods_refuse_a_plain_module_by_name(method: str, tmp_path: Path) -> None:
    rounds = methods.get(method).rounds or 1
    with pytest.raises(JobError, match=f"model: {method} needs more than logits: give.*`features"):
        federation.run(method, SILOS, rounds, model=_net(), folder=tmp_path / "run", **HEART)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["fedmr", "fedproto"])
def test_a_module_with_features_and_head_trains_with_others(method: str) -> None:
    result = federation.run(method, SILOS, 1, model=_registered(), **HEART)
    assert result.outcome.trained


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"encoder": "random"}, "encoder: what is frozen"),
        ({"privacy": {"epsilon": 8.0}, "weights": "uniform"}, "privacy: gradients of single records"),
        ({"start": "fed3r"}, "start: it sets the head"),
        ({"model_options": {"widths": [3]}}, "model_options"),
    ],
)
def test_options_that_need_a_head_refuse_a_plain_module(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        federation.run("fedavg", SILOS, 1, model=_net(), **HEART, **values)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 2))
    net[1].weight = net[0].weight
    return net


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}


class Odd(nn.Module):
    """``forward`` is not ``head(features(x))``, as in networks that flatten in between."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(13, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.features(x))


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: nn.LazyLinear(2), "weight, bias is lazy"),
        (lambda: nn.Flatten(), "parameter that trains"),
        (lambda: nn.Linear(13, 2).requires_grad_(False), "parameter that trains"),
        (lambda: nn.Linear(13, 2).double(), r"torch.float32, but got weight \(torch.float64\)"),
        (lambda: nn.Linear(13, 2).half(), r"float16"),
        (lambda: nn.Linear(13, 2, device="meta"), r"on the CPU, but got weight \(meta\)"),
        (_tied, "1.weight and 0.weight are one tensor"),
        (lambda: Extra(13, 2), "_extra_state"),
        (lambda: Locked(13, 2), "not to be copied"),
        (lambda: nn.Linear(12, 2), r"inputs of shape \(B, 13\)"),
        (lambda: nn.Linear(13, 3), r"logits of shape \(2, 2\).*got \(2, 3\)"),
        (Odd, "has `features` and `head`, but not as Expected"),
    ],
)
def test_what_cannot_be_summed_is_named_before_anything_runs(
    module: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=f"TF-101(.|\n)*model: (.|\n)*{said}"):
        federation.run("fedavg", SILOS, 1, model=module(), folder=tmp_path / "run", **HEART)
    assert not (tmp_path / "run").exists()


def test_the_job_of_a_module_is_no_other_process_s(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 4)), np.arange(90) % 3
    result = federation.run(
        "fedavg", {name: (x[i::3], y[i::3]) for i, name in enumerate("abc")}, 1,
        model=nn.Linear(4, 3), folder=tmp_path,
    )  # fmt: skip
    assert result.outcome.job["model"].startswith("object:Linear:")
    with pytest.raises(JobError, match="was an object of the process"):
        tightframe.prepare(result.outcome.job)
    with pytest.raises(ModelError, match="was an object of the process"):
        tightframe.load_model(tmp_path / "server")
