"""What privacy costs is never shown as less, and what is left of it never as more."""

from __future__ import annotations

from tightframe.results.parts.evaluation import Evaluation, FoldMetrics
from tightframe.results.rows import Row, round_line
from tightframe.results.words import rounded_down, rounded_up


def test_rounding_for_people() -> None:
    assert rounded_up(8.0041) == "8.005" and rounded_down(8.0049) == "8.004"
    assert rounded_up(8.0) == rounded_down(8.0) == "8.000"
    assert rounded_up(1e-9) == "0.001" and rounded_down(1e-9) == "0.000"


def test_a_model_that_a_sum_made_before_the_first_round_is_no_initial_one() -> None:
    test = FoldMetrics(records=10, accuracy=0.5, balanced_accuracy=0.5)
    evaluation = Evaluation(validation=FoldMetrics(records=0), test=test)
    train = Row(round=1, kind="train", silos=["a"], dropped={})
    for kind, words in (
        ("start", "test of the initial model"),
        ("before", "test of the model before round 1"),
    ):
        before = Row(round=0, kind=kind, silos=["a"], dropped={}, evaluation=evaluation)
        assert words in round_line(train, 1, ["a"], before)
