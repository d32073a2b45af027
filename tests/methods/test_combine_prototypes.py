"""``combine``'s prototypes, FedMR's table 8: the methods without weight, and loops by hand with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.methods.test_combine import ALONE
from tests.methods.test_feddc import FedDC
from tests.methods.test_feddyn import FedDyn
from tests.support.methods import by_hand
from torch import nn

from tightframe.methods.combine import METHOD, CombineConfig
from tightframe.models import Classifier

# The methods of FedMR's table 8.
TABLE_8 = ("fedprox", "fednova", "moon", "feddyn", "feddc")


@pytest.mark.parametrize("name", TABLE_8)
def test_prototypes_of_no_weight_leave_the_method_bit_for_bit(
    name: str, open_sum: Callable[..., Any]
) -> None:
    """And with a weight the term acts, from the second round on."""
    method, config, options = ALONE[name]
    expected, kept = by_hand.federate(method, by_hand.setting_of(method, config), 2, open_sum)
    found, own = _prototypes(options, 0.0, open_sum)
    assert list(found.model) == list(expected.model)
    assert all(torch.equal(found.model[key], item) for key, item in expected.model.items())
    assert all(torch.equal(found.extra[key], item) for key, item in expected.extra.items())
    assert set(found.extra) - set(expected.extra) == {"prototypes", "prototype_valid"}
    for site, state in kept.items():
        assert set(own[site]) == set(state)
        assert all(torch.equal(own[site][key], item) for key, item in state.items())
    acting, _ = _prototypes(options, 0.3, open_sum)
    assert any((acting.model[key] - item).abs().max() > 1e-3 for key, item in expected.model.items())


def _prototypes(options: dict[str, Any], weight: float, open_sum: Callable[..., Any]) -> Any:
    setting = by_hand.setting_of(
        METHOD,
        CombineConfig(**options, prototypes="fedmr", fedmr_inter_units="distance", fedmr_mu_inter=weight),
    )
    return by_hand.federate(METHOD, setting, 2, open_sum)


class WithPrototypes(by_hand.ByHand):
    """Eq. (4) pair by pair, and prototypes that are means over all records of the silos that arrived."""

    prototype_weight = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prototypes: dict[int, torch.Tensor] = {}
        self.features: dict[int, list[torch.Tensor]] = {}

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        whole = super().loss(name, received)

        def objective(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            known = [label for label in sorted(set(labels.tolist())) if label in self.prototypes]
            margins = []
            for label in known:
                for other in set(known) - {label}:
                    own = (features[labels == label] - self.prototypes[label]).norm(dim=1)
                    foreign = (features[labels == label] - self.prototypes[other]).norm(dim=1)
                    margins.append((own - foreign).clamp_min(0).mean())
            loss = whole(model, inputs, labels)
            return loss + self.prototype_weight * sum(margins) / len(margins) if margins else loss

        return objective

    @torch.no_grad()
    def seen(self, name: str, trained: Any, moved: Any, steps: int) -> None:
        super().seen(name, trained, moved, steps)
        trained.eval()
        silo = self.silos[name]
        for inputs, label in zip(silo.inputs, silo.labels.tolist(), strict=True):
            self.features.setdefault(label, []).append(trained.features(inputs[None])[0])

    def _round(self, number: int) -> None:
        super()._round(number)
        for label, found in self.features.items():
            self.prototypes[label] = torch.stack(found).mean(0)
        self.features = {}


LOOPS: dict[str, tuple[type[by_hand.ByHand], dict[str, Any]]] = {
    "fedprox": (by_hand.FedProx, {"local": "fedprox", "fedprox_mu": by_hand.FedProx.mu}),
    "fednova": (by_hand.FedNova, {"server": "fednova"}),
    "moon": (
        by_hand.Moon,
        {"local": "moon", "moon_mu": by_hand.Moon.mu, "moon_tau": by_hand.Moon.tau},
    ),
    "feddyn": (FedDyn, {"local": "feddyn", "server": "feddyn", "feddyn_alpha": FedDyn.alpha}),
    "feddc": (FedDC, {"local": "feddc", "server": "feddc", "feddc_alpha": FedDC.alpha}),
}


@pytest.mark.parametrize("name", TABLE_8)
def test_table_8_is_loops_by_hand(name: str, open_sum: Callable[..., Any]) -> None:
    """Three rounds, site-3 lost in the second; no BatchNorm, as the loops pass their records twice."""
    loop, options = LOOPS[name]

    def without_norm() -> nn.Module:
        return Classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), 8, 3)

    config = CombineConfig(
        **options,
        prototypes="fedmr",
        fedmr_inter_units="distance",
        fedmr_mu_inter=WithPrototypes.prototype_weight,
    )
    setting = dataclasses.replace(
        by_hand.setting_of(METHOD, config, momentum=0.0 if name == "feddc" else 0.5, learning_rate=0.05),
        build_model=without_norm,
    )
    lost = {(2, "site-3")}
    state, _ = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    made = type("Loop", (WithPrototypes, loop), {})(setting, lost=lost)
    by_hand.assert_models_agree(state.model, {**made.run(3)}, atol=2e-5)
    assert state.extra["prototype_valid"].tolist() == [1, 1, 1]
    expected = torch.stack([made.prototypes[label] for label in range(3)])
    torch.testing.assert_close(state.extra["prototypes"], expected, rtol=0, atol=2e-5)


def test_prototypes_keep_their_values_where_class_sums_are_not_opened(open_sum: Callable[..., Any]) -> None:
    setting = by_hand.setting_of(METHOD, CombineConfig(prototypes="fedmr"))
    (phase,) = METHOD.plan(setting, 1, 2)
    sums = {item.name for item in phase.schema.fields if item.per_class}
    assert sums == {"prototype/feature_sums", "prototype/counts"}, "what the class rules bind"
    static = {item.name for item in phase.schema.fields if item.static}
    assert sums < static
    state, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    silos = by_hand.silos_of(setting)
    received = phase.broadcast(state)
    terms = {name: (1, phase.contribute(silo, received, {}).tensors) for name, silo in silos.items()}
    totals, cohort = open_sum(phase.schema, terms)
    opened = {name: total for name, total in totals.items() if name not in static}
    after = phase.update(state, opened, cohort)
    assert torch.equal(after.extra["prototypes"], state.extra["prototypes"])
    assert not torch.equal(phase.update(state, totals, cohort).extra["prototypes"], state.extra["prototypes"])
    assert torch.equal(after.model["head.weight"], phase.update(state, totals, cohort).model["head.weight"])


def test_a_silo_that_offers_no_prototypes_adds_zeros() -> None:
    setting = by_hand.setting_of(METHOD, CombineConfig(prototypes="fedmr"))
    (phase,) = METHOD.plan(setting, 1, 2)
    silo = dataclasses.replace(by_hand.silos_of(setting)["site-1"], offers_prototypes=False)
    sent = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 1)), {}).tensors
    assert not sent["prototype/feature_sums"].any() and not sent["prototype/counts"].any()


def test_a_personal_model_is_trained_without_prototypes(open_sum: Callable[..., Any]) -> None:
    """They are not among what a silo is given at the end; the same model with and without them."""
    models = []
    for options in ({"prototypes": "fedmr", "fedmr_mu_inter": 0.3}, {}):
        setting = by_hand.setting_of(METHOD, CombineConfig(**options))
        silo = by_hand.silos_of(setting)["site-1"]
        assert METHOD.personalise is not None
        models.append(METHOD.personalise(silo, METHOD.init_server(setting, 1).model, {}).state_dict())
    assert all(torch.equal(models[0][name], item) for name, item in models[1].items())
