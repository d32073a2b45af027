"""FedProc: its loss, rounds by hand with a schedule and prototypes, classes that are missing or shut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand, lossy
from torch import nn

from tightframe import methods
from tightframe.errors import JobError, TrainingError
from tightframe.methods import fedavg
from tightframe.methods.fedproc import (
    HOLDERS,
    MEANS,
    METHOD,
    FedProcConfig,
    ProjectedHead,
    class_means,
    prototypical_losses,
)
from tightframe.phases import Cohort
from tightframe.rounds.setup import prepare

TAU = 0.4
CONFIG = FedProcConfig(tau=TAU, projection_width=5)


class FedProc(by_hand.ByHand):
    """Prototypes and schedule as the paper has them, over ``rounds`` rounds."""

    rounds = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done = 0
        self.prototypes: dict[int, torch.Tensor] = {}
        self.told: dict[int, list[torch.Tensor]] = {label: [] for label in range(3)}

    def project(self, model: Any, features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model.head.projection(features)
        return found

    def loss(self, name: str, received: nn.Module) -> by_hand.Loss:
        alpha = 1 - (self.done + 1) / self.rounds
        prototypes = dict(self.prototypes)

        def objective(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            logits, vectors = model.head(features), self.project(model, features)
            losses = []
            for row, label in enumerate(labels.tolist()):
                entropy = nn.functional.cross_entropy(logits[row], labels[row])
                if label not in prototypes:
                    losses.append(entropy)
                    continue
                cosines = {
                    other: nn.functional.cosine_similarity(vectors[row], anchor, dim=0) / TAU
                    for other, anchor in prototypes.items()
                }
                total = torch.stack([torch.exp(item) for item in cosines.values()]).sum()
                drawn = -torch.log(torch.exp(cosines[label]) / total)
                losses.append(alpha * drawn + (1 - alpha) * entropy)
            return torch.stack(losses).mean()

        return objective

    def seen(self, name: str, trained: Any, moved: Any, steps: int) -> None:
        trained.eval()
        silo = self.silos[name]
        with torch.no_grad():
            vectors = self.project(trained, trained.features(silo.inputs))
        for label in range(3):
            if bool((silo.labels == label).any()):
                self.told[label].append(vectors[silo.labels == label].mean(0))

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        self.done += 1
        for label, found in self.told.items():
            if found:
                self.prototypes[label] = torch.stack(found).mean(0)
        self.told = {label: [] for label in range(3)}
        return super().step(moves, steps, weights)


class Unprojected(FedProc):
    def project(self, model: Any, features: torch.Tensor) -> torch.Tensor:
        return features


@pytest.mark.parametrize(
    ("loop", "config"),
    [
        (FedProc, CONFIG),
        (Unprojected, CONFIG.model_copy(update={"projection_width": None})),
    ],
)
def test_rounds_are_those_of_a_loop_by_hand(
    loop: type[FedProc], config: FedProcConfig, open_sum: Callable[..., Any]
) -> None:
    """Three rounds; in the first site-2's term is lost, so that class 2 has one holder."""
    setting = by_hand.setting_of(METHOD, config)
    lost = {(1, "site-2")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    expected = loop(setting, lost=lost)
    by_hand.assert_models_agree(state.model, expected.run(3), atol=2e-5)
    assert not any(kept.values())
    for label, anchor in expected.prototypes.items():
        torch.testing.assert_close(state.extra["prototypes"][label], anchor, rtol=0, atol=2e-5)
    plain = by_hand.ByHand(setting, lost=lost).run(3)
    assert any((plain[name] - state.model[name]).abs().max() > 1e-2 for name in plain), "it is not FedAvg"


def test_a_class_without_a_prototype_has_the_cross_entropy_and_is_in_no_denominator(
    open_sum: Callable[..., Any],
) -> None:
    """As under the class rules, where only class 1 has silos that may tell of it."""
    setting = by_hand.setting_of(METHOD, CONFIG)
    state, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    kept = torch.tensor([0, 1, 0], dtype=state.extra["prototypes_valid"].dtype)
    state = state.evolve(extra={**state.extra, "prototypes_valid": kept})
    stream = torch.Generator().manual_seed(1)
    vectors = torch.randn(4, 5, generator=stream, requires_grad=True)
    valid = state.extra["prototypes_valid"].bool()
    losses = prototypical_losses(
        vectors, torch.tensor([0, 1, 2, 1]), state.extra["prototypes"], valid, tau=TAU
    )
    assert losses.tolist() == [0.0] * 4, "the others' are not theirs, and one class alone cannot be missed"
    losses.sum().backward()
    assert vectors.grad is not None and bool(vectors.grad.isfinite().all())
    # A whole silo of records without prototypes trains as in FedAvg.
    silo = by_hand.silos_of(setting)["site-3"]
    (phase,) = METHOD.plan(setting, 2, 3)
    (bare,) = METHOD.plan(setting, 3, 3)
    received = phase.broadcast(state)
    ours = phase.contribute(silo, received, {}).tensors
    none = {**received, "prototypes_valid": torch.zeros(3, dtype=torch.uint8)}
    theirs = bare.contribute(silo, none, {}).tensors
    for name, item in theirs.items():
        if name.startswith("update/"):
            torch.testing.assert_close(ours[name], item, rtol=0, atol=1e-6)


def test_the_loss_is_the_papers_and_differentiable() -> None:
    stream = torch.Generator().manual_seed(5)
    vectors, anchors = (
        torch.randn(6, 4, generator=stream, dtype=torch.float64),
        torch.randn(3, 4, generator=stream, dtype=torch.float64),
    )
    labels, valid = torch.tensor([0, 1, 2, 0, 1, 2]), torch.ones(3, dtype=torch.bool)
    cosines = nn.functional.cosine_similarity(vectors[:, None], anchors[None], dim=2) / TAU
    expected = -torch.log(torch.exp(cosines)[range(6), labels] / torch.exp(cosines).sum(1))
    found = prototypical_losses(vectors, labels, anchors, valid, tau=TAU)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    vectors.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: prototypical_losses(z, labels, anchors, valid, tau=TAU), vectors
    )


def test_where_class_sums_stay_shut_the_prototypes_stay(open_sum: Callable[..., Any]) -> None:
    """After a drop-out the sum opens without its static fields."""
    setting = by_hand.setting_of(METHOD, CONFIG)
    state, _ = by_hand.federate(METHOD, setting, 2, open_sum)
    (phase,) = METHOD.plan(setting, 3, 3)
    silos = by_hand.silos_of(setting)
    terms = {
        name: (1, phase.contribute(silo, phase.broadcast(state), {}).tensors) for name, silo in silos.items()
    }
    totals, cohort = open_sum(phase.schema, terms)
    shut = {name: item for name, item in totals.items() if not phase.schema[name].static}
    assert {MEANS, HOLDERS}.isdisjoint(shut)
    after = phase.update(state, shut, Cohort(3, cohort.weights, cohort.largest, enrolled=4))
    assert all(torch.equal(after.extra[name], item) for name, item in state.extra.items())
    assert not torch.equal(after.model["backbone.0.weight"], state.model["backbone.0.weight"])
    held = {item.name: item for item in phase.schema.fields if item.per_class}
    assert set(held) == {MEANS, HOLDERS} and all(item.static for item in held.values())


def test_a_silo_tells_of_no_class_that_it_has_not_or_if_it_keeps_them_to_itself() -> None:
    setting = by_hand.setting_of(METHOD, CONFIG)
    silo = by_hand.silos_of(setting)["site-3"]
    model = by_hand.start(setting).eval()
    told = class_means(silo, model)
    assert told[HOLDERS].tolist() == [1.0, 0.0, 1.0] and not told[MEANS][1].any() and told[MEANS][2].any()
    silo.offers_prototypes = False
    assert not any(item.any() for item in class_means(silo, model).values())
    silo.offers_prototypes = True
    with torch.no_grad():
        model.head.output.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
        model.head.projection[2].bias.fill_(torch.inf)  # type: ignore[union-attr, index]
    with pytest.raises(TrainingError, match="finite features"):
        class_means(silo, model)


def test_in_the_last_round_it_is_fedavg_on_the_projected_network(open_sum: Callable[..., Any]) -> None:
    """alpha_T is zero; so is that of a job of one round."""
    setting = by_hand.setting_of(METHOD, CONFIG)
    state, _ = by_hand.federate(METHOD, setting, 1, open_sum)
    by_hand.assert_models_agree(state.model, by_hand.ByHand(setting).run(1))
    silo = by_hand.silos_of(setting)["site-1"]
    ours = METHOD.plan(setting, 4, 4)[0].contribute(silo, METHOD.plan(setting, 4, 4)[0].broadcast(state), {})
    plain = by_hand.setting_of(METHOD, CONFIG)
    (theirs,) = fedavg.METHOD.plan(type(plain)(**{**plain.__dict__, "config": fedavg.FedAvgConfig()}), 4, 4)
    silo.setting = type(plain)(**{**plain.__dict__, "config": fedavg.FedAvgConfig()})
    for name, item in theirs.contribute(silo, theirs.broadcast(state), {}).tensors.items():
        if name.startswith("update/"):
            torch.testing.assert_close(ours.tensors[name], item, rtol=0, atol=1e-6)


def test_a_job_gets_the_projection_that_it_names_and_none_with_privacy(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    job = small | {"method": "fedproc"}
    head = prepare(job | {"method_options": {"projection_width": 7}}).setting.build_model().head
    assert isinstance(head, ProjectedHead) and head.output.in_features == 7
    bare = prepare(job | {"method_options": {"projection_width": None}}).setting.build_model().head
    assert isinstance(bare, nn.Linear)
    with pytest.raises(JobError, match="fedproc has no form for differential privacy"):
        prepare(job | {"privacy": {"epsilon": 4.0}, "weights": "uniform"})


@pytest.mark.whole
def test_under_the_class_rules_prototypes_follow_the_first_sum_and_a_drop_out_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secure sums of four silos: round 2 brings the first means, round 3 none."""
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    options = {"projection_width": 6}
    states = [
        lossy.run("fedproc", tmp_path / str(rounds), lost, rounds=rounds, method_options=options)[0]
        for rounds, lost in ((2, ()), (3, {(3, "site-2")}))
    ]
    valid = [state.extra["prototypes_valid"].bool() for state in states]
    assert valid[0].any() and torch.equal(valid[1], valid[0])
    prototypes = states[0].extra["prototypes"]
    assert prototypes[valid[0]].any(1).all() and not prototypes[~valid[0]].any()
    assert not torch.equal(states[1].model["head.output.weight"], states[0].model["head.output.weight"])
