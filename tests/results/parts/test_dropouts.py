"""Who a run has lost, in sentences, and what of it a silo takes from a server."""

from __future__ import annotations

from typing import Any

import pytest

from tightframe.results.parts.dropouts import Lost, notes, read, unmeasured_since

GONE = Lost(kind="train", round=3, at="2026-11-22T21:42:10Z", code="TF-502")


def test_a_sentence_has_since_when_and_why() -> None:
    assert GONE.words("a") == "a is missing since round 3 (2026-11-22 21:42:10 UTC): TF-502 (late)."
    assert "since the last evaluation (" in GONE.model_copy(
        update={"kind": "closing", "code": "TF-503"}
    ).words("a")


@pytest.mark.parametrize(
    ("exchanges", "since"),
    [
        ([], None),
        ([("start", 0, False), ("train", 1, False)], None),
        ([("train", 1, False), ("train", 2, True), ("train", 3, True), ("closing", 3, True)], 2),
        # One round that was shut in between is over and done with.
        ([("train", 1, True), ("train", 2, False), ("train", 3, True)], 3),
        ([("train", 1, True), ("train", 2, False)], None),
        # Of a round's phases one has no counts, so that it cannot stay shut.
        ([("train", 1, True), ("train", 1, False), ("train", 2, True), ("train", 2, False)], 1),
    ],
)
def test_metrics_are_missing_from_the_first_of_the_last_rounds_that_stayed_shut(
    exchanges: list[tuple[str, int, bool]], since: int | None
) -> None:
    assert unmeasured_since(exchanges) == since


def test_a_silo_lost_in_the_closing_alone_leaves_all_rounds_measured() -> None:
    lost = {"b": GONE.model_copy(update={"kind": "closing", "round": 4})}
    said = notes(lost, enrolled=4, since=None, closing_shut=True, last_measured=3)
    assert len(said) == 2 and "No loss" not in " ".join(said)
    assert said[1].startswith(
        "The final model was not measured: counts are opened for all 4 enrolled silos or"
    )
    assert "The last measured model is that of round 3." in said[1]


def test_nobody_missing_has_nothing_to_be_said() -> None:
    assert notes({}, enrolled=4, since=None, measured=["a", "b"]) == []
    assert notes({"a": GONE}, enrolled=3, since=None, measured=["b", "c"])[1:] == [
        "The final model was measured without a: by 2 of 3 silos."
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "<b>"},
        {"kind": 3},
        {"round": 9},
        {"round": -1},
        {"round": True},
        {"round": "3"},
        {"at": "now"},
        {"at": GONE.at + "\n"},
        {"code": "TF-999"},
        {"code": None},
        {"more": 1},
    ],
)
def test_a_silo_takes_from_a_server_only_what_a_run_of_its_job_can_say(change: dict[str, Any]) -> None:
    assert read({"a": GONE.as_json()}, ["a", "b"], 4) == {"a": GONE}
    assert read({"a": {**GONE.as_json(), **change}}, ["a", "b"], 4) == {}


@pytest.mark.parametrize("told", [None, [], "a", {"c": GONE.as_json()}, {"a": None}, {"a": []}, {1: 2}])
def test_anything_else_of_a_server_is_left_out(told: Any) -> None:
    assert read(told, ["a", "b"], 4) == {}
