"""Geometric means against golden values, against the written formulas, and on hard numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightframe.errors import ContributionError
from tightframe.methods.fedilc.geometric_mean import (
    RANGES,
    Rule,
    RunningMean,
    sign_log_terms,
    substitute_geometric_mean,
    substitute_terms,
    weighted_geometric_mean,
    weighted_geometric_mean_from_sums,
)

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "golden" / "fedilc.npz")
CASES = range(int(GOLDEN["n_cases"]))
RULES: list[Any] = ["neutral", "official"]


def _case(index: int) -> tuple[torch.Tensor, float]:
    return torch.tensor(GOLDEN[f"c{index}_g"]), float(GOLDEN[f"c{index}_threshold"])


def _close(found: torch.Tensor, expected: Any) -> None:
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-30)  # of case 5 all are 1e-9


def _summed(gradients: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    terms = [sign_log_terms(gradient, **options) for gradient in gradients]
    return {name: torch.stack([term[name] for term in terms]).sum(0) for name in terms[0]}


@pytest.mark.parametrize("index", CASES)
def test_weighted_mean_of_the_authors(index: int) -> None:
    gradients, threshold = _case(index)
    options: dict[str, Any] = {"zero": "official", "threshold": threshold}
    _close(weighted_geometric_mean(gradients, **options), GOLDEN[f"c{index}_weighted_geo"])
    sums = _summed(gradients, **options)
    _close(sums["positive"], GOLDEN[f"c{index}_sum_npos"])
    _close(sums["log_positive"], GOLDEN[f"c{index}_sum_logpos"])
    _close(sums["log_negative"], GOLDEN[f"c{index}_sum_lognonpos"])
    assert len(sums) == (4 if threshold else 3)
    if threshold:
        _close(sums["positive"] - sums["negative"], GOLDEN[f"c{index}_sum_sign"])


@pytest.mark.parametrize("index", CASES)
def test_weighted_mean_with_neutral_zeros(index: int) -> None:
    """The golden values are without a threshold, which masks what it masks in the authors' mean."""
    gradients, threshold = _case(index)
    expected = GOLDEN[f"c{index}_weighted_geo_strict"]
    _close(weighted_geometric_mean(gradients), expected)
    sums = _summed(gradients)
    _close(weighted_geometric_mean_from_sums(sums, len(gradients)), expected)
    _close(sums["positive"] - sums["negative"], GOLDEN[f"c{index}_sum_sign"])
    if threshold:
        masked = weighted_geometric_mean_from_sums(sums, len(gradients), threshold=threshold)
        _close(masked, np.where(GOLDEN[f"c{index}_weighted_geo"] == 0, 0.0, expected))


@pytest.mark.parametrize("index", CASES)
def test_substitute_mean_of_the_authors(index: int) -> None:
    gradients, _ = _case(index)
    _close(substitute_geometric_mean(gradients, zero="official"), GOLDEN[f"c{index}_substitute_geo"])


def test_golden_cases_have_the_zeros_that_matter() -> None:
    """Else the two rules for zeros would not be told apart above."""
    zeros = [index for index in CASES if (GOLDEN[f"c{index}_g"] == 0).any()]
    assert zeros and (GOLDEN["c3_weighted_geo"] != GOLDEN["c3_weighted_geo_strict"]).any()


def _by_hand(column: list[float]) -> float:
    """The paper's formula, one number after another."""
    plus, minus = [a for a in column if a > 0], [-a for a in column if a < 0]
    found = 0.0
    for side, sign in ((plus, 1.0), (minus, -1.0)):
        if side:
            found += sign * len(side) / len(column) * math.prod(side) ** (1 / len(side))
    return found


values = st.one_of(st.just(0.0), st.floats(1e-6, 1e3), st.floats(-1e3, -1e-6))


@given(st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_properties(rows: list[list[float]]) -> None:
    gradients = torch.tensor(rows, dtype=torch.float64)
    mean = weighted_geometric_mean(gradients)
    expected = [_by_hand(column) for column in gradients.T.tolist()]
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert (mean.abs() <= gradients.abs().mean(0) * (1 + 1e-9) + 1e-12).all()
    for rule in RULES:
        mean = weighted_geometric_mean(gradients, zero=rule)
        torch.testing.assert_close(weighted_geometric_mean(gradients.flip(0), zero=rule), mean)
        if not (gradients == 0).any():
            torch.testing.assert_close(-weighted_geometric_mean(-gradients, zero=rule), mean)
        masked = weighted_geometric_mean(gradients, zero=rule, threshold=0.5)
        agreed = gradients.sign().mean(0).abs() >= 0.5
        assert torch.equal(masked, torch.where(agreed, mean, 0.0))


def test_the_mean_of_one_is_itself() -> None:
    gradient = torch.tensor([[3.0, -2e-9], [0.0, 1e4]], dtype=torch.float64)
    torch.testing.assert_close(weighted_geometric_mean([gradient]), gradient, rtol=1e-12, atol=0.0)


def test_a_zero_spoils_only_the_authors_negative_side() -> None:
    gradients = torch.tensor([[-0.3, 0.3, 0.0]] * 4 + [[0.0, 0.0, 0.0]])
    neutral = weighted_geometric_mean(gradients)
    np.testing.assert_allclose(neutral.numpy(), [-0.24, 0.24, 0.0], rtol=1e-6)
    official = weighted_geometric_mean(gradients, zero="official").numpy()
    np.testing.assert_allclose(official, [-(0.3**0.8) * 1e-2, 0.24, -1e-10], rtol=1e-6)


def test_a_majority_below_the_substitute_changes_its_sign() -> None:
    """As in golden case 5: the sign is that of the mean in which the substitutes stand."""
    small = torch.tensor([[-1e-9], [-1e-9], [1e-9]])
    assert float(substitute_geometric_mean(small)) > 0
    assert float(substitute_geometric_mean(1e9 * small)) < 0


@pytest.mark.parametrize("terms", [sign_log_terms, substitute_terms])
@pytest.mark.parametrize("zero", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_lie_in_their_ranges(terms: Any, zero: Any, dtype: torch.dtype) -> None:
    least = math.exp(-50)
    gradient = torch.tensor([22026.0, -22026.0, 1.0, -1.0, 2 * least, -2 * least, 1e-30, -1e-30, 0.0, -0.0])
    found = terms(gradient.to(dtype), zero=zero)
    for name, term in found.items():
        assert torch.isfinite(term).all() and term.abs().max() <= RANGES[name][1], name
    if zero == "neutral":
        assert found["positive"].tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0, 0]
        assert found["negative"].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0]
        assert not found["log_negative"][6:].any() and not found["log_positive"][6:].any()


@pytest.mark.parametrize("terms", [sign_log_terms, substitute_terms])
@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (math.nan, "TF-401"),
        (math.inf, "TF-401"),
        (-math.inf, "TF-401"),
        (22027.0, "TF-402"),
        (-1e9, "TF-402"),
    ],
)
def test_what_has_no_logarithm_is_refused(terms: Any, bad: float, code: str) -> None:
    for gradient in (torch.tensor([1.0, bad, -1.0]), torch.tensor([bad, 1e-9])):
        with pytest.raises(ContributionError, match=rf"^{code}: "):
            terms(gradient)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'neutral' or 'official', but got 'none'"):
        weighted_geometric_mean(torch.ones(2, 2), zero="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one gradient, but got 0"):
        weighted_geometric_mean([])
    with pytest.raises(ValueError, match="at least one gradient, but got 0"):
        RunningMean(Rule("substitute")).result()
