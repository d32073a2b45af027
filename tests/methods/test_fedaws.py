"""FedAwS: its regulariser, that class vectors spread step by step, and where it is FedAvg."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.methods import by_hand
from torch import nn

from tightframe import methods
from tightframe.errors import JobError
from tightframe.methods.fedaws import METHOD, FedAwSConfig, spread, spreadout
from tightframe.rounds.setup import prepare


class FedAwS(by_hand.ByHand):
    margin, steps, rate, momentum = 0.6, 5, 0.2, 0.9

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        change = super().step(moves, steps, weights)
        before = self.model.head.weight.detach().double()  # type: ignore[union-attr, operator]
        vectors = nn.Parameter(before + change["head.weight"])
        optimizer = torch.optim.SGD([vectors], lr=self.rate, momentum=self.momentum)
        for _ in range(self.steps):
            optimizer.zero_grad()
            hinges = []
            for one, other in itertools.permutations(range(3), 2):
                cosine = nn.functional.cosine_similarity(vectors[one], vectors[other], dim=0)
                hinges.append(torch.clamp(self.margin - (1 - cosine) / 2, min=0) ** 2)
            torch.stack(hinges).mean().backward()
            optimizer.step()
        return {**change, "head.weight": vectors.detach() - before}


def test_rounds_are_those_of_a_loop_by_hand(open_sum: Callable[..., Any]) -> None:
    config = FedAwSConfig(
        margin=FedAwS.margin,
        steps=FedAwS.steps,
        server_learning_rate=FedAwS.rate,
        momentum=FedAwS.momentum,
    )
    setting = by_hand.setting_of(METHOD, config)
    lost = {(2, "site-1")}
    state, kept = by_hand.federate(METHOD, setting, 3, open_sum, lost=lost)
    by_hand.assert_models_agree(state.model, FedAwS(setting, lost=lost).run(3), atol=5e-6)
    assert not any(kept.values()) and not state.extra, "nobody keeps anything"
    plain = by_hand.ByHand(setting, lost=lost).run(3)
    assert (plain["head.weight"] - state.model["head.weight"]).abs().max() > 1e-2, "the steps matter"


def test_without_steps_or_margin_it_is_fedavg(open_sum: Callable[..., Any]) -> None:
    by_hand.assert_is_fedavg(METHOD, FedAwSConfig(steps=0), open_sum)
    by_hand.assert_is_fedavg(METHOD, FedAwSConfig(margin=0.0), open_sum)


def _distances(vectors: torch.Tensor) -> torch.Tensor:
    cosines = nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=2)
    return ((1 - cosines) / 2)[~torch.eye(len(vectors), dtype=torch.bool)]


@pytest.mark.whole
def test_class_vectors_spread_step_by_step_until_they_are_far_enough() -> None:
    """The regulariser falls with every step; the nearest pair moves apart up to the margin."""
    stream = torch.Generator().manual_seed(4)
    vectors = 1.0 + 0.3 * torch.randn(6, 10, generator=stream, dtype=torch.float64)
    numbers = range(0, 60, 4)
    after = [
        spread(vectors, FedAwSConfig(steps=number, momentum=0.0, server_learning_rate=1.0))
        for number in numbers
    ]
    losses = [float(spreadout(item)) for item in after]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    nearest = [float(_distances(item).min()) for item in after]
    assert all(later > earlier for earlier, later in itertools.pairwise(nearest))
    done = spread(vectors, FedAwSConfig(steps=800, momentum=0.9, server_learning_rate=1.0))
    assert float(_distances(done).min()) > 0.49, "orthogonal is a distance of a half"
    # What is far enough is left alone.
    assert torch.equal(spread(torch.eye(4).double(), FedAwSConfig(margin=0.4)), torch.eye(4).double())


def test_vectors_that_vanish_or_coincide_break_nothing() -> None:
    vectors = torch.zeros(3, 4)
    vectors[1:] = torch.tensor([1.0, 2.0, 0.0, 0.0])
    found = spread(vectors, FedAwSConfig())
    assert bool(found.isfinite().all()) and not found[0].any()


def test_a_head_without_a_vector_for_each_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    job: dict[str, Any] = {
        **{"job_name": "heart", "method": "fedaws", "dataset": "fed_heart_disease", "model": "mlp"},
        **{"rounds": 1, "sites": ["a", "b", "c"], "min_sites": 3},
        "model_options": {"single_logit": True},
    }
    with pytest.raises(JobError, match=r"TF-101[\s\S]*a weight vector for each of the 2 classes"):
        prepare(job)
    prepare(job | {"model_options": {"single_logit": False}})


def test_under_privacy_only_the_update_leaves(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", [METHOD])
    sites = {"sites": ["a", "b", "c", "d", "e", "f"], "min_sites": 5}
    setup = prepare(
        small | sites | {"method": "fedaws", "weights": "uniform", "privacy": {"epsilon": 4.0}, "rounds": 2}
    )
    (phase,) = setup.training_phases(1)
    assert {item.mechanism for item in phase.schema.fields} <= {"training", "charges"}
