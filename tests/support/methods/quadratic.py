"""Silos whose objectives are quadratic, so that the optimum of their mean has a closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.support.methods import by_hand
from tests.support.methods.silo import FakeSilo
from torch import nn

from tightframe.learning.stages import BatchView, FitReport, Stage, Term
from tightframe.models import Classifier
from tightframe.phases import Method

SIZE = 21


class QuadraticSilo(FakeSilo):
    """``f_k(v) = (v - b_k)^T A_k (v - b_k) / 2`` in the place of the mean loss of its records.

    All else of a method's stages stays: terms of the parameters, corrections, optimiser.
    """

    curvature: torch.Tensor
    target: torch.Tensor

    def fit(self, model: nn.Module, stages: Sequence[Stage]) -> FitReport:
        def bowl(view: BatchView) -> torch.Tensor:
            away = nn.utils.parameters_to_vector(view.model.parameters()) - self.target.float()
            return 0.5 * away @ self.curvature.float() @ away

        bowls = [
            replace(stage, terms=(Term("cross_entropy", 1.0, bowl, per_record=False),)) for stage in stages
        ]
        return super().fit(model, bowls)


def distance_to_optimum(
    method: Method, config: Any, open_sum: Callable[..., Any], *, rounds: int = 25
) -> float:
    """How far a method ends from the minimum of the silos' mean objective: 5 full steps a round.

    The minimum is the solution of ``sum_k A_k (v - b_k) = 0``.
    """
    local = {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 64, "epochs": 5, "augment": False}
    setting = by_hand.setting_of(method, config, learning_rate=0.2, **local)
    setting = replace(setting, build_model=lambda: Classifier(nn.Identity(), 6, 3))
    silos, stream = {}, torch.Generator().manual_seed(17)
    for name, silo in by_hand.silos_of(setting).items():
        silos[name] = own = QuadraticSilo(name, setting, silo.inputs, silo.labels)
        root = torch.randn(SIZE, SIZE, generator=stream, dtype=torch.float64)
        own.curvature = 0.3 * torch.eye(SIZE, dtype=torch.float64) + root @ root.T / (2 * SIZE)
        own.target = torch.randn(SIZE, generator=stream, dtype=torch.float64)

    state, _ = by_hand.federate(method, setting, rounds, by_hand.equal_sizes(open_sum), silos=silos)
    total = sum(silo.curvature for silo in silos.values())
    optimum = torch.linalg.solve(total, sum(silo.curvature @ silo.target for silo in silos.values()))
    found = setting.build_model()
    found.load_state_dict(dict(state.model))
    return float((nn.utils.parameters_to_vector(found.parameters()).detach().double() - optimum).norm())
