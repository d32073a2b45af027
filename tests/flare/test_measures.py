"""A run in numbers: what belongs to a round of several phases, and what is left out."""

from __future__ import annotations

import math

from tests.support.results.building import evaluated, row, spent
from tests.support.results.building import status as begun

from tightframe.flare.monitoring.measures import (
    COUNTED,
    EVALUATED,
    NOISY,
    OF_ROUND,
    OF_RUN,
    OF_SUM,
    of_rounds,
    of_run,
)
from tightframe.results.rows import Row

ROWS = [
    row(0, "start", [], {}, 0.0, 0, 0, evaluation=evaluated(accuracy=0.25, recall={"x": 0.5, "y": None})),
    row(0, "statistics", ["a", "b", "c"], {}, 4.0, 40, 400),
    row(1, "train", ["a", "b"], {"c": "TF-502"}, 1.0, 10, 100, training={"loss": 0.5}, phase=0, phases=2),
    row(1, "train", ["a"], {"b": "TF-301", "c": "TF-502"}, 2.0, 20, 200, phase=1, phases=2),
]


def _points(rows: list[Row]) -> dict[tuple[str, str | None, int], float]:
    return {(name, of_class, number): value for ((name, of_class), number), value in of_rounds(rows).items()}


def test_a_round_is_the_sum_of_its_phases_and_is_told_when_the_last_is_there() -> None:
    before = {("accuracy", None, 0): 0.25, ("recall", "x", 0): 0.5, ("one_answer", None, 0): 0}
    assert _points(ROWS[:3]) == before, "half of round 1 is no round"
    assert _points(ROWS) == before | {
        ("loss", None, 1): 0.5,
        ("silos_answered", None, 1): 1,
        ("silos_late", None, 1): 1,
        ("silos_dropped", None, 1): 1,
        ("round_seconds", None, 1): 3.0,
        ("round_bytes_down", None, 1): 30,
        ("round_bytes_up", None, 1): 300,
    }


def test_rounds_do_not_run_into_each_other() -> None:
    second = row(2, "train", ["a", "b", "c"], {}, 8.0, 1, 2, training={"loss": 0.25})
    points = _points([*ROWS, second])
    assert points["round_seconds", None, 2] == 8.0 and points["silos_late", None, 2] == 0
    assert points["loss", None, 1] == 0.5


def test_a_run_is_all_of_its_sums_and_its_newest_values() -> None:
    status = begun("job", 5).enrolled(["a", "b", "c"], {"d": "TF-701"}).summing("train", 2, 0, 2).answer("a")
    told = {name: value for (name, of_class), value in of_run(status, ROWS).items() if of_class is None}
    assert told == {
        "running": 1,
        "trained": 0,
        "round": 2,
        "rounds": 5,
        "silos_joined": 3,
        "silos_refused": 1,
        "silos_lost": 0,
        "silos_answered": 1,
        "silos_late": 1,
        "silos_dropped": 1,
        "left_out": 3,
        "loss": 0.5,
        "accuracy": 0.25,
        "one_answer": 0,
        "evaluated_round": 0,
        "run_seconds": 7.0,
        "run_bytes_down": 70,
        "run_bytes_up": 700,
    }
    assert of_run(status, ROWS)["recall", "x"] == 0.5 and ("recall", "y") not in of_run(status, ROWS)


def test_before_anything_is_summed_there_are_zeros_and_nothing_else() -> None:
    assert of_rounds([]) == {}
    told = {name: value for (name, _), value in of_run(begun("job", 5), []).items()}
    assert told.pop("running") == 1 and told.pop("rounds") == 5
    assert set(told.values()) == {0} and "loss" not in told and "accuracy" not in told


def test_a_run_that_trained_and_was_not_evaluated_has_trained() -> None:
    ended = begun("job", 5).ended(trained=True, reason="TF-501: too few silos in the closing")
    told = of_run(ended, [])
    assert (told["running", None], told["trained", None]) == (0, 1)
    told = of_run(begun("job", 5).ended(trained=False, reason="TF-501"), [])
    assert (told["running", None], told["trained", None]) == (0, 0)


def test_of_epsilon_the_upper_end_alone_is_told_and_nothing_where_no_silo_tells() -> None:
    told = row(1, "train", ["a", "b"], privacy=spent(1, 2, 1.0, 4.0, a=3.5))
    assert _points([told])["epsilon", None, 1] == 4.0
    promised = of_run(begun("job", 1, (8.0, 1e-5)), [told])
    assert (promised["epsilon", None], promised["epsilon_promised", None]) == (4.0, 8.0)
    assert ("epsilon", None, 1) not in _points([row(1, "train", ["a", "b"], privacy=spent(1, 2))])


def test_what_is_noisy_or_no_number_is_never_told_as_an_exact_number() -> None:
    found = evaluated(
        noisy=True,
        accuracy=0.5,
        accuracy_interval=[0.25, 0.75],
        classes_told=1,
        recall={"x": 0.25, "y": None},
        recall_interval={"x": [0.0, 0.5], "y": None},
        one_answer={"class": "x", "share": 0.9, "interval": [0.8, 1.0], "certain": False},
    )
    # A row that was read has finite numbers only; one that is made anew from another is not checked again.
    diverged = row(1, "train", ["a"], evaluation=found).model_copy(update={"training": {"loss": math.nan}})
    points = _points([diverged])
    assert points["accuracy_noisy", None, 1] == 0.5 and points["recall_noisy", "x", 1] == 0.25
    limits = [points[f"accuracy_noisy{end}", None, 1] for end in ("_low", "_high")]
    assert limits + [points[f"recall_noisy{end}", "x", 1] for end in ("_low", "_high")] == [
        0.25,
        0.75,
        0.0,
        0.5,
    ]
    assert (points["classes_told_noisy", None, 1], points["one_answer", None, 1]) == (1, 1)
    assert not {"accuracy", "recall", "loss"} & {name for name, _, _ in points}


def test_of_findings_nobody_says_whether_the_model_gives_one_answer() -> None:
    found = {"confusion": [[5, 1], [2, 4]], "sensitivity": 2 / 3}
    points = _points([row(1, "train", ["a"], evaluation=evaluated(accuracy=0.75, findings={"edema": found}))])
    assert points["accuracy", None, 1] == 0.75 and ("one_answer", None, 1) not in points


def test_every_name_is_described() -> None:
    described = {*OF_SUM, *OF_RUN, *OF_ROUND, *EVALUATED, *COUNTED}
    rows = [*ROWS, row(2, "train", ["a"], evaluation=evaluated(noisy=True, auroc=0.5))]
    status = begun("job", 5, (8.0, 1e-5))
    told = {name for name, _, _ in _points(rows)} | {name for name, _ in of_run(status, rows)}
    assert {name.removesuffix(NOISY) for name in told} <= described
