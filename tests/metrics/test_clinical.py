"""Clinical readings of score histograms: the oracles see the raw scores that made the histogram."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, roc_curve

from tightframe.metrics import clinical, score_histogram

Case = tuple[np.ndarray, np.ndarray, clinical.Scores]


@st.composite
def scored(draw: st.DrawFn) -> Case:
    """(scores (n,), whether positive (n,), their histogram): both kinds are there."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(2, 120))
    positive = rng.random(n) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    positive[:2] = True, False
    logits = rng.normal(size=n) * draw(st.sampled_from([0.2, 1.0, 6.0])) + positive * draw(
        st.sampled_from([0.0, 1.0, 5.0])
    )
    scores = 1 / (1 + np.exp(-logits))
    if draw(st.booleans()):
        scores = scores.round(1)
    bins = draw(st.sampled_from([2, 7, 10, 32, 256]))
    histogram = score_histogram(np.stack([1 - scores, scores], 1), positive.astype(int), bins)
    return scores, positive, clinical.Scores(*histogram[1])


@given(scored())
def test_brier_score_and_mean_score_lie_in_their_bounds(case: Case) -> None:
    scores, positive, counts = case
    low, high = clinical.brier(counts)
    assert low - 1e-9 <= brier_score_loss(positive, scores) <= high + 1e-9
    assert high - low <= 2 / counts.bins, (
        "a score that is off by a bin moves its square by less than twice that"
    )
    low, high = clinical.mean_score(counts)
    assert low - 1e-9 <= scores.mean() <= high + 1e-9 and high - low == pytest.approx(1 / counts.bins)


@given(scored())
def test_calibration_curve_and_error_against_scikit_learn(case: Case) -> None:
    scores, positive, counts = case
    # Scores on an edge fall to one side or the other by scikit-learn's rounding.
    at_edge = np.abs(scores * counts.bins - np.rint(scores * counts.bins)) < 1e-9
    found = [item for item in clinical.calibration(counts) if item.records]
    if not at_edge.any():
        shares, means = calibration_curve(positive, scores, n_bins=counts.bins)
        assert [item.share.value for item in found if item.share] == pytest.approx(list(shares))
        for item, mean in zip(found, means, strict=True):
            assert item.low <= mean <= item.high
        weights = np.array([item.records for item in found]) / len(scores)
        low, high = clinical.calibration_error(counts)
        assert low - 1e-9 <= (weights * np.abs(shares - means)).sum() <= high + 1e-9
        assert high - low <= 1 / counts.bins + 1e-9


def test_bounds_are_reached_by_scores_at_the_ends_of_their_bins() -> None:
    positives, negatives = np.array([1, 0, 2, 5]), np.array([6, 3, 1, 0])
    counts = clinical.Scores(positives, negatives)
    for place, own, other in ((0, 1, 0), (1, 0, 1)):  # lower bound: positives at the top of their bins
        edges = np.arange(4)
        scores = np.concatenate(
            [np.repeat((edges + own) / 4, positives), np.repeat((edges + other) / 4, negatives)]
        )
        truth = np.repeat([1, 0], [8, 10])
        assert clinical.brier(counts)[place] == pytest.approx(brier_score_loss(truth, scores))


@given(scored(), st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95, 1.0]))
def test_the_best_operating_point_on_raw_scores_lies_between_the_edge_and_what_is_reachable(
    case: Case, least: float
) -> None:
    scores, positive, counts = case
    false, true, _ = roc_curve(positive, scores, drop_intermediate=False)
    point = clinical.at_specificity(counts, least)
    assert point is not None and point.reachable is not None
    best = true[1 - false >= least - 1e-9].max()
    assert point.sensitivity.value - 1e-9 <= best <= point.reachable + 1e-9
    assert point.specificity.value >= least - 1e-9
    # At the edge itself both are exact.
    called = scores * counts.bins >= point.edge
    if point.edge == counts.bins:
        called = np.zeros_like(positive)
    assert point.sensitivity.value == pytest.approx(called[positive].mean())
    assert point.specificity.value == pytest.approx(1 - called[~positive].mean())
    point = clinical.at_sensitivity(counts, least)
    assert point is not None and point.reachable is not None
    best = (1 - false)[true >= least - 1e-9].max()
    assert point.specificity.value - 1e-9 <= best <= point.reachable + 1e-9
    assert point.sensitivity.value >= least - 1e-9


@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([0.9, 0.95, 0.99]))
def test_wilson_against_scipy(part: int, more: int, level: float) -> None:
    whole = part + more - 1
    if not whole:
        return
    for hits in (part, whole - part):
        expected = stats.binomtest(hits, whole).proportion_ci(level, method="wilson")
        found = clinical.wilson(hits, whole, level)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_predictive_values_and_net_benefit_by_hand() -> None:
    # 10 of the class, 90 others; at 0.5: 8 and 9 are called positive.
    counts = clinical.Scores(np.array([2, 8]), np.array([81, 9]))
    values = clinical.predictive_values(counts, 1, 0.1)
    assert values is not None
    assert values[0].value == pytest.approx(8 / 17) and values[1].value == pytest.approx(81 / 83)
    rare = clinical.predictive_values(counts, 1, 0.01)
    assert rare is not None
    # Of 10,000 people 100 have it: 80 hits, 990 false alarms; 8910 clear, 20 missed.
    assert rare[0].value == pytest.approx(80 / 1070) and rare[1].value == pytest.approx(8910 / 8930)
    each = 0.95**0.5
    se = stats.binomtest(8, 10).proportion_ci(each, method="wilson")
    sp = stats.binomtest(81, 90).proportion_ci(each, method="wilson")
    assert rare[0].low == pytest.approx(se.low * 0.01 / (se.low * 0.01 + (1 - sp.low) * 0.99))
    assert rare[0].high == pytest.approx(se.high * 0.01 / (se.high * 0.01 + (1 - sp.high) * 0.99))
    benefit = clinical.net_benefit(counts, 1)
    assert benefit is not None
    assert (
        benefit.value == pytest.approx(8 / 100 - 9 / 100 * 1) and benefit.low < benefit.value < benefit.high
    )
    stated = clinical.net_benefit(counts, 1, 0.5)
    assert stated is not None and stated.value == pytest.approx(0.8 * 0.5 - 0.1 * 0.5)
    everybody = clinical.net_benefit(counts, 0)
    assert everybody is not None and everybody.value == pytest.approx(clinical.treat_all(0.1, 0.0))
    nobody = clinical.predictive_values(counts, 2, 0.1)
    assert nobody is not None and np.isnan(nobody[0].value) and nobody[1].value == pytest.approx(0.9)


def test_the_corner_box_covers_a_predictive_value_at_its_level() -> None:
    """Binomial counts of few records, drawn 2,000 times: the true PPV and NPV are in their intervals."""
    rng = np.random.default_rng(3)
    se, sp, pi = 0.8, 0.9, 0.05
    truth = (se * pi / (se * pi + (1 - sp) * (1 - pi)), sp * (1 - pi) / (sp * (1 - pi) + (1 - se) * pi))
    inside = np.zeros(2)
    for _ in range(2000):
        hits, clear = rng.binomial(30, se), rng.binomial(60, sp)
        found = clinical.predictive_values(
            clinical.Scores(np.array([30 - hits, hits]), np.array([clear, 60 - clear])), 1, pi
        )
        assert found is not None
        inside += [item.low <= value <= item.high for item, value in zip(found, truth, strict=True)]
    assert (inside / 2000 >= 0.95).all()


def test_noisy_readings_contain_those_of_the_exact_counts() -> None:
    rng = np.random.default_rng(5)
    positives = rng.multinomial(400, rng.dirichlet(np.linspace(0.2, 3, 16))).astype(float)
    negatives = rng.multinomial(900, rng.dirichlet(np.linspace(3, 0.2, 16))).astype(float)
    exact = clinical.Scores(positives, negatives)
    noise, cell, tries = 6.0, 3.0, 400
    names = ("brier", "ece", "sensitivity", "share", "ppv", "benefit")
    inside = dict.fromkeys(names, 0)
    for _ in range(tries):
        total = 1300 + rng.normal(0, cell)
        noisy = clinical.Scores(
            positives + rng.normal(0, noise, 16),
            negatives + rng.normal(0, noise, 16),
            noise,
            (total - 2.1701 * cell, total + 2.1701 * cell),
        )
        for name, bounds in (("brier", clinical.brier), ("ece", clinical.calibration_error)):
            low, high = bounds(noisy)
            truth = bounds(exact)
            inside[name] += low <= truth[0] and truth[1] <= high
        point, truth_at = clinical.at_specificity(noisy, 0.9), None
        assert point is not None and point.reachable is None
        truth_at = clinical.point_at(exact, point.edge)
        assert truth_at is not None
        inside["sensitivity"] += point.sensitivity.low <= truth_at.sensitivity.value <= point.sensitivity.high
        for name, kind, edge in (("ppv", 0, 8), ("benefit", 1, 8)):
            if kind:
                own, real = clinical.net_benefit(noisy, edge), clinical.net_benefit(exact, edge)
            else:
                found, of = (clinical.predictive_values(item, edge, 0.1) for item in (noisy, exact))
                assert found is not None and of is not None
                own, real = found[0], of[0]
            assert own is not None and real is not None
            inside[name] += own.low <= real.value <= own.high
        curve = clinical.calibration(noisy)[-1].share
        inside["share"] += (
            curve is not None and curve.low <= positives[-1] / (positives[-1] + negatives[-1]) <= curve.high
        )
    # 95 % of 400 less three standard deviations of the count.
    assert {name: count >= 367 for name, count in inside.items()} == dict.fromkeys(names, True), inside


def test_what_cannot_be_told_is_not() -> None:
    nothing = clinical.Scores(np.zeros(4), np.array([3, 0, 0, 1]))
    assert not nothing.told and clinical.at_specificity(nothing, 0.9) is None
    assert (
        clinical.at_sensitivity(nothing, 0.9) is None and clinical.predictive_values(nothing, 1, 0.1) is None
    )
    assert np.isnan(clinical.brier(clinical.Scores(np.zeros(4), np.zeros(4)))).all()
    drowned = clinical.Scores(np.full(8, 10.0), np.full(8, 12.0), 40.0, (0.0, 400.0))
    assert not drowned.told and clinical.net_benefit(drowned, 4) is None
    assert clinical.calibration(drowned)[0].share is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clinical.Scores(np.zeros(3), np.zeros(4)), "of one shape"),
        (lambda: clinical.Scores(np.zeros(0), np.zeros(0)), "at least one bin"),
        (lambda: clinical.Scores(np.zeros(3), np.zeros(3), 1.0), "both or neither"),
        (lambda: clinical.wilson(3, 2), "part of at least one record"),
        (lambda: clinical.at_specificity(clinical.Scores(np.ones(2), np.ones(2)), 1.5), "from 0 to 1"),
        (lambda: clinical.predictive_values(clinical.Scores(np.ones(2), np.ones(2)), 1, 1.0), "below 1"),
        (lambda: clinical.net_benefit(clinical.Scores(np.ones(2), np.ones(2)), 2), "from 0 to 1"),
    ],
)
def test_wrong_arguments_are_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


@settings(max_examples=20)
@given(scored())
def test_the_decision_curve_is_that_of_the_counts(case: Case) -> None:
    scores, positive, counts = case
    for edge in {1, counts.bins // 2, counts.bins - 1}:
        called = scores * counts.bins >= edge
        odds = (edge / counts.bins) / (1 - edge / counts.bins)
        expected = (called & positive).mean() - (called & ~positive).mean() * odds
        found = clinical.net_benefit(counts, edge)
        assert found is not None and found.value == pytest.approx(expected)
