"""Which exchange may come after which, as a table."""

from __future__ import annotations

import pytest

from tightframe.rounds.order import Place, after, may_follow, place_of
from tightframe.securesum.messages import SumId

GROUPS = [
    ("statistics", 0, 2),
    ("before", 0, 1),
    ("train", 1, 2),
    ("train", 2, 1),
    ("after", 2, 2),
    ("closing", 2, 1),
    ("personal", 2, 1),
]
ENDING = [("after", 2, 0), ("after", 2, 1), ("closing", 2, 0), ("personal", 2, 0)]
TABLE: list[tuple[Place | None, list[Place]]] = [
    (None, [("statistics", 0, 0)]),
    (("statistics", 0, 0), [("statistics", 0, 1)]),
    (("statistics", 0, 1), [("before", 0, 0)]),
    (("before", 0, 0), [("train", 1, 0)]),
    (("train", 1, 0), [("train", 1, 1)]),
    (("train", 1, 1), [("train", 2, 0)]),
    (("train", 2, 0), ENDING),
    (("after", 2, 0), ENDING[1:]),
    (("after", 2, 1), ENDING[2:]),
    (("closing", 2, 0), ENDING[3:]),
    (("personal", 2, 0), []),
]


@pytest.mark.parametrize(("last", "allowed"), TABLE)
def test_the_next_one_and_what_follows_one_that_may_stay_shut(
    last: Place | None, allowed: list[Place]
) -> None:
    assert list(after(GROUPS, last)) == allowed


@pytest.mark.parametrize(("last", "allowed"), TABLE)
def test_schemas_tell_it_but_for_the_number_of_a_rounds_exchanges(
    last: Place | None, allowed: list[Place]
) -> None:
    schemas = [f"{kind}-{index}/hash" for kind, _, count in GROUPS for index in range(count)]
    places = [(kind, number, index) for kind, number, count in GROUPS for index in range(count)]
    found = [place for place in places if may_follow(["seal", *schemas], last, place)]
    # By the schemas any round may be the last of its exchanges, and of the run that ends in it.
    more = {("train", 1, 0): [("train", 2, 0)]}.get(last, []) if last is not None else []
    assert found == [*allowed, *more]


def test_a_kind_without_a_schema_is_not_in_the_plan() -> None:
    schemas = ["train-0/hash", "closing-0/hash", "other-0/hash", "train-x/hash"]
    assert may_follow(schemas, None, ("train", 1, 0)) and may_follow(
        schemas, ("train", 1, 0), ("closing", 1, 0)
    )
    assert not may_follow(schemas, None, ("statistics", 0, 0))
    assert not may_follow(schemas, ("closing", 1, 0), ("personal", 1, 0))
    assert may_follow(["closing-0/hash"], None, ("closing", 1, 0))


def test_any_number_of_a_round_is_told_at_once() -> None:
    schemas, number = ["train-0/hash", "train-1/hash", "closing-0/hash"], 2**31
    last = "train", number, 1
    assert may_follow(schemas, last, ("train", number + 1, 0)) and may_follow(
        schemas, last, ("closing", number, 0)
    )
    assert may_follow(schemas, ("train", number, 0), last)
    assert not may_follow(schemas, last, ("closing", number + 1, 0))
    for other in (None, ("train", 3, 0), ("statistics", 7, 0), ("closing", 7, 0)):
        assert not may_follow(schemas, other, last)


def test_a_place_is_read_from_a_sums_id() -> None:
    assert place_of(SumId.of("train", 3, 1, 2)) == ("train", 3, 1)
    assert place_of(SumId(1, "seal")) == ("", 1, -1)
