"""Combinations: equal to the methods that they are made of, and with frozen heads to loops by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.methods import by_hand
from torch import nn

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.errors import JobError
from tightframe.methods import (
    combine,
    fedavg,
    feddc,
    feddyn,
    fedmr,
    fednova,
    fedopt,
    fedprox,
    fedrs,
    moon,
    scaffold,
)
from tightframe.methods.combine import METHOD, OPTIONS, CombineConfig, options_of
from tightframe.models import Classifier
from tightframe.models.geometry_heads import EtfHead, NormalisedPrototypeHead
from tightframe.rounds.setup import prepare

ALONE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "fedavg": (fedavg.METHOD, fedavg.FedAvgConfig(), {}),
    "fedprox": (fedprox.METHOD, fedprox.FedProxConfig(mu=0.2), {"local": "fedprox", "fedprox_mu": 0.2}),
    "fedrs": (fedrs.METHOD, fedrs.FedRSConfig(form="soft"), {"loss": "fedrs", "fedrs_form": "soft"}),
    "moon": (moon.METHOD, moon.MoonConfig(mu=5.0), {"local": "moon", "moon_mu": 5.0}),
    "fednova": (fednova.METHOD, fednova.FedNovaConfig(), {"server": "fednova"}),
    "fedadam": (fedopt.METHOD, fedopt.FedOptConfig(tau=0.01), {"server": "fedadam", "fedopt_tau": 0.01}),
    "fedyogi": (fedopt.METHOD, fedopt.FedOptConfig(variant="yogi"), {"server": "fedyogi"}),
    "fedadagrad": (
        fedopt.METHOD,
        fedopt.FedOptConfig(variant="adagrad", beta1=0.0),
        {"server": "fedadagrad", "fedopt_beta1": 0.0},
    ),
    "scaffold": (
        scaffold.METHOD,
        scaffold.ScaffoldConfig(momentum="normalise"),
        {"local": "scaffold", "server": "scaffold", "scaffold_momentum": "normalise"},
    ),
    "feddyn": (
        feddyn.METHOD,
        feddyn.FedDynConfig(alpha=0.1),
        {"local": "feddyn", "server": "feddyn", "feddyn_alpha": 0.1},
    ),
    "feddc": (
        feddc.METHOD,
        feddc.FedDCConfig(alpha=0.2, momentum="normalise"),
        {"local": "feddc", "server": "feddc", "feddc_alpha": 0.2, "feddc_momentum": "normalise"},
    ),
    "fedmr": (
        fedmr.METHOD,
        fedmr.FedMRConfig(mu_intra=0, mu_inter=0.3, inter_support="all", lite_m=5),
        {"prototypes": "fedmr", "fedmr_mu_inter": 0.3, "fedmr_inter_support": "all", "fedmr_lite_m": 5},
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_with_the_linear_head_it_is_the_method_bit_for_bit(name: str, open_sum: Callable[..., Any]) -> None:
    method, config, options = ALONE[name]
    expected, kept = by_hand.federate(method, by_hand.setting_of(method, config), 2, open_sum)
    setting = by_hand.setting_of(METHOD, CombineConfig(**options))
    found, own = by_hand.federate(METHOD, setting, 2, open_sum)
    for ours, theirs in ((found.model, expected.model), (found.extra, expected.extra)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for site, state in kept.items():
        assert all(torch.equal(own[site][key], item) for key, item in state.items())


class Balanced(by_hand.ByHand):
    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        counts = [max(by_hand.LABELS[name].count(label), 1) for label in range(3)]

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            likelihood = torch.exp(model(inputs)) * torch.tensor(counts)
            return -torch.log(likelihood / likelihood.sum(1, keepdim=True))[range(len(labels)), labels].mean()

        return objective


# The rows of FedAvg_ETF's Table 2 (+ETF: FedAvg, SCAFFOLD, FedNova, FedOpt, MOON), and others.
MOON = {"local": "moon", "moon_mu": by_hand.Moon.mu, "moon_tau": by_hand.Moon.tau}
ADAM = {"server": "fedadam", "fedopt_server_learning_rate": by_hand.FedOpt.learning_rate}
SCAFFOLD = {"local": "scaffold", "server": "scaffold", "scaffold_global_learning_rate": 0.7}
PROX = {"local": "fedprox", "fedprox_mu": by_hand.FedProx.mu}
ROWS: dict[str, tuple[type[by_hand.ByHand], dict[str, Any]]] = {
    "etf-fedavg": (by_hand.ByHand, {"head": "etf"}),
    "etf-scaffold": (by_hand.Scaffold, {"head": "etf", **SCAFFOLD}),
    "etf-fednova": (by_hand.FedNova, {"head": "etf", "server": "fednova"}),
    "etf-fedopt": (by_hand.FedOpt, {"head": "etf", **ADAM}),
    "etf-moon": (by_hand.Moon, {"head": "etf", **MOON}),
    "etf-fedprox": (by_hand.FedProx, {"head": "etf", **PROX}),
    "fedetf-head": (
        by_hand.ByHand,
        {"head": "etf", "etf_projection": True, "etf_normalise": True, "etf_temperature": 4.0},
    ),
    "normalised-fedprox-fednova": (by_hand.FedProxNova, {"head": "normalised", **PROX, "server": "fednova"}),
    "scaffold-rs": (by_hand.ScaffoldRS, {**SCAFFOLD, "loss": "fedrs", "fedrs_alpha": by_hand.FedRS.alpha}),
    "balanced-softmax": (Balanced, {"local": "balanced_softmax"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_table_2_and_others_are_loops_by_hand(row: str, open_sum: Callable[..., Any]) -> None:
    loop, options = ROWS[row]
    momentum = 0.0 if issubclass(loop, by_hand.Scaffold) else 0.9
    setting = by_hand.setting_of(METHOD, CombineConfig(**options), momentum=momentum)
    lost = {(1, "site-3")}
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum, lost=lost)
    uniform = issubclass(loop, by_hand.FedOpt | by_hand.Scaffold)
    expected = loop(setting, uniform=uniform, lost=lost)
    start = {name: item.clone() for name, item in expected.model.state_dict().items()}
    by_hand.assert_models_agree(state.model, expected.run(2), atol=1e-5)
    fields = {item.name for item in METHOD.plan(setting, 1, 2)[0].schema.fields}
    for name in ("head.etf", "head.prototypes"):
        if name in start:
            assert torch.equal(state.model[name], start[name])
            assert not any(name in field for field in fields), "what is frozen is never sent up"
    assert not torch.equal(state.model["backbone.0.weight"], start["backbone.0.weight"])


class MoonRS(by_hand.Moon):
    """MOON, with the logits of its cross-entropy scaled."""

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        held = torch.tensor([float(label in by_hand.LABELS[name]) for label in range(3)])
        whole, scales = super().loss(name, received), held + 0.5 * (1 - held)

        def objective(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            plain = by_hand.cross_entropy(model, inputs, labels)
            scaled = nn.functional.cross_entropy(model(inputs) * scales, labels)
            return whole(model, inputs, labels) - plain + scaled

        return objective


def test_a_loss_takes_the_place_of_the_cross_entropy_alone(open_sum: Callable[..., Any]) -> None:
    """MOON's contrast stays; without BatchNorm, because the loop by hand passes its records three times."""
    options = {**MOON, "loss": "fedrs"}

    def without_norm() -> nn.Module:
        return Classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), 8, 3)

    setting = dataclasses.replace(
        by_hand.setting_of(METHOD, CombineConfig(**options)), build_model=without_norm
    )
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum)
    by_hand.assert_models_agree(state.model, MoonRS(setting).run(2), atol=1e-5)
    names = {item.name for item in METHOD.plan(setting, 1, 2)[0].schema.fields}
    assert {"training/restricted", "training/contrastive"} < names and "training/cross_entropy" not in names


def _job(small: dict[str, Any], **options: Any) -> Any:
    return prepare(parse_job(small | {"method": "combine", "method_options": options}))


def test_a_job_gets_the_head_that_it_names(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    etf = _job(small, head="etf", etf_scale=2.0).setting.build_model().head
    assert isinstance(etf, EtfHead)
    torch.testing.assert_close(etf.etf.norm(dim=0), torch.full((8,), 2.0))
    normalised = _job(small, head="normalised", normalised_scale=20.0, normalised_learn_scale=False)
    head = normalised.setting.build_model().head
    assert isinstance(head, NormalisedPrototypeHead) and float(head.scale) == 20.0
    assert not any(parameter.requires_grad for parameter in head.parameters())
    own = _job(small | {"model_options": {"widths": [8], "dropout": 0.25}}).setting.build_model().head
    assert own.dropout == 0.25, "the linear head is the backbone's own"


def test_silos_on_other_processors_agree_within_rounding_where_the_servers_steps_are_fedopts(
    small: dict[str, Any],
) -> None:
    rounded = {server: _job(small, server=server).rounded for server in ("fedavg", "fedadam", "fednova")}
    assert rounded == {"fedavg": False, "fedadam": True, "fednova": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": "scaffold"}, "both 'scaffold' or neither.*'scaffold' and `server` 'fedavg'"),
        ({"server": "scaffold", "local": "moon"}, "both 'scaffold' or neither.*'moon' and"),
        ({"local": "feddyn"}, "both 'feddyn' or neither.*'feddyn' and `server` 'fedavg'"),
        ({"local": "moon", "server": "feddc"}, "both 'feddc' or neither"),
        ({"local": "scaffold", "server": "feddyn"}, "both 'feddyn' or neither"),
        ({"fedmr_mu_inter": 0.1}, r"chosen parts.*\['fedmr_mu_inter'\], which would change nothing"),
        ({"prototypes": "fedmr", "fedmr_mu_intra": 1.0}, "method_options.fedmr_mu_intra: no such key"),
        ({"moon_mu": 1.0}, r"chosen parts.*\['moon_mu'\], which would change nothing"),
        ({"head": "etf", "normalised_scale": 2.0}, "normalised_scale"),
        ({"local": "moon", "moon_mu": -1.0}, "method_options.moon_mu: .*greater than or equal to 0"),
        ({"local": "moon", "fedrs_alpha": 0.1}, r"chosen parts.*\['fedrs_alpha'\]"),
        ({"local": "balanced_softmax", "loss": "fedrs"}, "`local` with a cross-entropy.*'balanced_softmax'"),
        ({"local": "ditto"}, "method_options.local: "),
        ({"ditto_mu": 1.0}, "method_options.ditto_mu: no such key"),
        (
            {"head": "etf", "etf_temperature_form": "clamp"},
            "Expected `etf_temperature` with `etf_temperature_form` 'clamp'",
        ),
        ({"head": "etf", "etf_temperature": 0.0}, "method_options.etf_temperature: .*greater than 0.001"),
        ({"head": "etf", "etf_temperature": -1.0}, "method_options.etf_temperature: "),
        ({"head": "etf", "etf_dim": 5}, "cannot be planned.*`dim` to be the feature width 8"),
        (
            {"head": "etf", "etf_projection": True, "etf_dim": 3},
            "cannot be planned.*at least num_classes - 1",
        ),
        ({"local": "fedprox", "server": "fednova", "fedprox_mu": 25.0}, "cannot be planned.*times mu"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    with pytest.raises(JobError, match=rf"TF-101[\s\S]*{message}"):
        _job(small, **options)


def test_the_halves_refuse_the_training_that_they_refuse_alone(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    with pytest.raises(JobError, match=r"`training.momentum` to be 0"):
        _job(small, local="scaffold", server="scaffold")
    with pytest.raises(JobError, match=r"`training.momentum` to be 0.*FedDC"):
        _job(small, local="feddc", server="feddc", prototypes="fedmr")
    adam = small | {"training": small["training"] | {"optimizer": "adam"}}
    with pytest.raises(JobError, match=r"FedNova"):
        _job(adam, server="fednova")
    _job(adam, server="fedyogi")


def test_options_are_those_of_the_parts_with_their_defaults_and_bounds() -> None:
    for part, model in OPTIONS.items():
        assert options_of(CombineConfig(), part) == model()
        for name in model.model_fields:
            assert f"{part}_{name}" in CombineConfig.model_fields
    assert set(CombineConfig.model_fields) == {"head", "local", "loss", "server", "prototypes"} | {
        f"{part}_{name}" for part, model in OPTIONS.items() for name in model.model_fields
    }
    with pytest.raises(ValidationError, match="fedopt_beta1"):
        CombineConfig.model_validate({"server": "fedadam", "fedopt_beta1": 1.0})
    assert combine.head(CombineConfig(), 8, 3) is None
