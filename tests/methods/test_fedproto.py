"""FedProto: prototypes are ratios of sums, models stay; rounds against a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand
from torch import nn

from tightframe.learning.class_sums import ratio_of_sums
from tightframe.learning.own_models import OWN, TRAINED
from tightframe.methods.fedproto import (
    METHOD,
    PROTOTYPES,
    SHARES,
    SUMS,
    VALID,
    FedProtoConfig,
    prototype_loss,
)


def test_the_loss_is_the_distance_to_prototypes_that_exist() -> None:
    stream = torch.Generator().manual_seed(2)
    features = torch.randn(6, 4, generator=stream, dtype=torch.float64)
    prototypes = torch.randn(3, 4, generator=stream, dtype=torch.float64)
    prototypes[1] = float("nan")  # never used
    labels, valid = torch.tensor([0, 0, 1, 2, 2, 1]), torch.tensor([True, False, True])
    known = [0, 1, 3, 4]
    expected = nn.functional.mse_loss(features[known], prototypes[labels[known]])
    torch.testing.assert_close(prototype_loss(features, labels, prototypes, valid), expected)
    features.requires_grad_()
    prototype_loss(features, labels, prototypes, valid).backward()
    assert features.grad is not None and features.grad.isfinite().all()
    assert not features.grad[[2, 5]].any(), "a class without prototype pulls nowhere"
    assert float(prototype_loss(features, labels, prototypes, torch.zeros(3, dtype=torch.bool))) == 0.0


def test_prototypes_are_the_ratio_of_two_sums() -> None:
    previous = torch.full((3, 2), 7.0)
    found, seen = ratio_of_sums(
        previous, torch.tensor([[2.0, 4.0], [0.0, 0.0], [3.0, 3.0]]), torch.tensor([2.0, 0.0, 1.0])
    )
    assert found.tolist() == [[1.0, 2.0], [7.0, 7.0], [3.0, 3.0]] and seen.tolist() == [True, False, True]


class FedProto(by_hand.ByHand):
    """Every silo trains its own model near the mean of the holders' class means."""

    lam = 0.8

    def __init__(self, setting: Any, starts: dict[str, dict[str, torch.Tensor]], **others: Any) -> None:
        super().__init__(setting, **others)
        self.own = starts
        self.prototypes: dict[int, torch.Tensor] = {}

    def _round(self, number: int) -> None:
        means: dict[int, list[torch.Tensor]] = {}
        for name, silo in self.silos.items():
            model: Any = self.setting.build_model()
            model.load_state_dict(self.own[name])

            def loss(net: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                features = net.features(inputs)
                total = nn.functional.cross_entropy(net.head(features), labels)
                near = [
                    (features[i] - self.prototypes[int(y)]).square().mean()
                    for i, y in enumerate(labels)
                    if int(y) in self.prototypes
                ]
                return total + self.lam * torch.stack(near).mean() if near else total

            by_hand.train(model, silo, number, loss)
            if (number, name) in self.lost:
                continue
            self.own[name] = model.eval().state_dict()
            with torch.no_grad():
                features = model.features(silo.inputs)
            for label in silo.labels.unique().tolist():
                means.setdefault(label, []).append(features[silo.labels == label].mean(0))
        self.prototypes |= {label: torch.stack(rows).mean(0) for label, rows in means.items()}


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    """In round 2 site-2's term is lost, so in round 3 it goes on with its model of round 1."""
    setting, lost = by_hand.setting_of(METHOD, FedProtoConfig(lam=FedProto.lam)), {(2, "site-2")}
    assert METHOD.own_model is not None
    starts = {name: dict(METHOD.own_model(silo, {})) for name, silo in by_hand.silos_of(setting).items()}
    assert not torch.equal(starts["site-1"]["head.weight"], starts["site-2"]["head.weight"])
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    assert not state.model, "the server has no model"
    loop = FedProto(setting, starts, lost=lost)
    loop.run(3)
    for name, own in loop.own.items():
        mine = {key.removeprefix(OWN): item for key, item in kept[name].items()}
        by_hand.assert_models_agree(mine, own, atol=2e-5)
    for label, prototype in loop.prototypes.items():
        torch.testing.assert_close(state.extra[PROTOTYPES][label], prototype, rtol=0, atol=2e-5)
    assert state.extra[VALID].tolist() == [1, 1, 1]


def test_what_leaves(make_setting: Any, make_silo: Any) -> None:
    setting = make_setting(FedProtoConfig(weighting="records"))
    (phase,) = METHOD.plan(setting, 1, 2)
    assert {item.name for item in phase.schema.fields} == {
        *("training/loss", "training/cross_entropy", "training/prototype"),
        *(TRAINED.name, SUMS, SHARES),
    }
    state = METHOD.init_server(setting, 1)
    silo = make_silo(setting, [0] * 5 + [1])
    made = phase.contribute(silo, phase.broadcast(state), {})
    assert made.tensors[SHARES].tolist() == [5, 1, 0] and not made.tensors[SUMS][2].any()
    silo.offers_prototypes = False
    quiet = phase.contribute(silo, phase.broadcast(state), {})
    assert not quiet.tensors[SUMS].any() and not quiet.tensors[SHARES].any()
    # After a drop-out the class sums stay shut.
    cohort: Any = None
    assert phase.update(state, {"training/loss": made.tensors["training/loss"].numpy()}, cohort) is state


@pytest.mark.whole
def test_a_run_has_no_global_model_and_says_so_and_plain_sums_are_secure_sums() -> None:
    plain, secure = (by_hand.whole_run("fedproto", summation=kind) for kind in ("plain", "secure"))
    for result in (plain, secure):
        assert (
            result.state.model == {}
            and result.outcome.own_models
            and not result.outcome.best_round_by_validation
        )
        final = result.outcome.final()
        assert final is not None and final.evaluation is not None, "each silo's own model is evaluated"
        assert "There is no global model" in result.outcome.screen()
    assert all(torch.equal(plain.state.extra[name], secure.state.extra[name]) for name in (PROTOTYPES, VALID))
    assert plain.state.extra[VALID].any()
