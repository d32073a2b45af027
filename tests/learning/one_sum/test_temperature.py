"""The temperature of a head, from sums of losses."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit

from tightframe.learning.one_sum.temperature import (
    BIAS,
    GRID,
    KNOWN,
    LOSSES,
    MOST,
    UNIT,
    WEIGHT,
    chosen,
    losses,
    reported,
    update,
    warned,
)
from tightframe.phases import ServerState


def scored(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn by the probabilities of scores at temperature 1, which are told a tenth as large."""
    rng = np.random.default_rng(seed)
    scores = 2 * rng.normal(size=(4000, 3))
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    labels = (chances.cumsum(1) < rng.random((4000, 1))).sum(1)
    return torch.from_numpy(scores / 10), torch.from_numpy(labels)


def test_the_best_of_the_grid_is_next_to_the_optimum() -> None:
    scores, labels = scored()
    total = losses(scores, labels, torch.ones(3, dtype=torch.bool))

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(scores / temperature, labels))

    best = minimize_scalar(loss, bounds=(1e-3, 10), method="bounded").x
    chosen = GRID[int(total.argmin())]
    assert best / 2**0.5 <= chosen <= best * 2**0.5 and 0.05 < best < 0.2
    for index in (18, 22):
        np.testing.assert_allclose(float(total[index]) / 4000, loss(GRID[index]), atol=UNIT)


def test_records_without_an_error_do_not_make_the_head_certain() -> None:
    """SciPy's loss of 20 separable records: within 1 nat at the chosen temperature, not at the next."""
    margins = np.random.default_rng(5).uniform(0.05, 1.0, 20)
    scores = torch.from_numpy(np.stack([margins, np.zeros(20), np.full(20, -30.0)], 1))
    scores[10:, :2] = scores[10:, :2].flip(1)
    labels = torch.tensor([0] * 10 + [1] * 10 + [2] * 6)  # no head knows class 2
    known = torch.tensor([True, True, False])
    total = losses(torch.cat([scores, torch.zeros(6, 3)]), labels, known).numpy()

    def loss(temperature: float) -> float:
        return float(-log_expit(margins / temperature).sum())

    place = GRID.index(chosen(total))
    assert loss(GRID[place]) <= 1.0 < loss(GRID[place + 1]) and int(np.argmin(total)) == 0
    assert expit(margins / GRID[0]).max() == 1.0 > expit(margins / GRID[place]).max()
    assert "no error on the validation records" in warned({LOSSES: total})[0]
    assert "largest of the grid" in warned({LOSSES: total.max() + 1 - np.arange(len(GRID))})[0]
    assert not warned({LOSSES: losses(*scored(), torch.ones(3, dtype=torch.bool)).numpy()})


def test_a_total_does_not_depend_on_how_records_are_spread() -> None:
    scores, labels = scored()
    known = torch.ones(3, dtype=torch.bool)
    parts = torch.randperm(4000, generator=torch.Generator().manual_seed(3)).split([1, 3, 1996, 2000])
    spread = sum(losses(scores[part], labels[part], known) for part in parts)
    assert torch.equal(losses(scores, labels, known), spread)  # type: ignore[arg-type]


def test_what_leaves_a_silo_is_few_whole_numbers_and_gives_the_same_temperature() -> None:
    """Of two silos: next to the optimum of all records, whose margins no number tells."""
    scores, labels = scored()
    known = torch.ones(3, dtype=torch.bool)
    leaving = sum(
        reported(losses(scores[part], labels[part], known), len(part), 3).numpy()
        for part in torch.arange(4000).split([40, 3960])
    )
    whole = losses(scores, labels, known).numpy()
    assert np.array_equal(leaving, np.round(leaving))
    assert abs(GRID.index(chosen(leaving)) - GRID.index(chosen(whole))) <= 1
    one, other = (reported(losses(scores[:1] * by, labels[:1], known), 1, 3) for by in (1.0, 1.01))
    assert torch.equal(one, other), "a margin"
    rough = torch.tensor([1e9, 3.0, 5.0, 1.0, 4.0, 2.0, 6.0])  # as records' limits could make them
    assert reported(rough, 9, 3).tolist() == [18, 5, 5, 1, 4, 4, 6]


def test_records_of_unknown_classes_and_wild_scores_do_not_decide() -> None:
    scores, labels = scored()
    known = torch.tensor([True, False, True])
    kept = labels != 1
    two = losses(scores[kept][:, [0, 2]], labels[kept] // 2, torch.ones(2, dtype=torch.bool))
    assert torch.equal(losses(scores, labels, known), two)
    wild = torch.tensor([[float("nan"), 0.0], [1e30, 0.0]], dtype=torch.float64)
    total = losses(wild, torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool))
    assert bool((total == 2 * MOST).all())


def test_the_head_is_divided_but_for_the_score_of_an_unknown_class() -> None:
    model = {WEIGHT: torch.eye(3), BIAS: torch.tensor([1.0, -30.0, 2.0]), "backbone": torch.ones(1)}
    state = ServerState(model, {KNOWN: torch.tensor([1, 0, 1], dtype=torch.uint8)})
    found = np.full(len(GRID), 9.0)
    found[GRID.index(0.25)] = 8.0
    after = update(state, {LOSSES: found}).model
    assert torch.equal(after[WEIGHT], 4 * torch.eye(3)) and after[BIAS].tolist() == [4.0, -30.0, 8.0]
    assert after["backbone"] is model["backbone"]
    assert update(state, {LOSSES: np.zeros(len(GRID))}) is state, "no validation records"
    assert update(state, {}) is state, "a drop-out"
    single = ServerState({WEIGHT: torch.ones(1, 2), BIAS: torch.ones(1)}, {KNOWN: torch.ones(2)})
    assert update(single, {LOSSES: found}).model[BIAS].tolist() == [4.0]
