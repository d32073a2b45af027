"""The journal: every entry comes back as it was, and what is forbidden stays so for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.securesum.protocol import make_params

from tightframe.securesum.errors import (
    EvaluationsError,
    MessageError,
    ReplayError,
    StaticCohortError,
    SurvivorsError,
)
from tightframe.securesum.messages import GROUPS, SumId
from tightframe.securesum.site.journal import (
    MAX_ENROLMENTS,
    MAX_JOBS_OF_STATE,
    MAX_STARTS,
    Advertised,
    Agreed,
    CohortAccepted,
    Entry,
    Evaluated,
    EvaluationsAccepted,
    History,
    Most,
    Multiplied,
    ProfileAccepted,
    ProfileUsed,
    Requested,
    Revealed,
    RoundsAccepted,
    SlotUsed,
    StateMasked,
    StateSummed,
    StaticMasked,
    StaticOpened,
    Trained,
    differences,
    entry_from_value,
    in_words,
)

HASH = bytes(range(32))
SUM = SumId(3, "train-0", 1)
ENTRIES: list[Entry] = [
    Advertised("job", 2, HASH, HASH[::-1]),
    SlotUsed("job", 2, 5, SUM, HASH, HASH[::-1]),
    Agreed("job", 2, 5, ("a", "b", "c")),
    Revealed("job", 2, 5, ("a", "b", "c"), GROUPS),
    StaticMasked("lesions", ("a", "b", "c"), "first-job"),
    StaticOpened("lesions", ("a", "b", "c"), "first-job"),
    CohortAccepted("lesions", ("a", "b", "d")),
    ProfileUsed("lesions", (("update_norm", "none"), ("weights", "exact")), "first-job"),
    ProfileAccepted("lesions", (("weights", "uniform"),)),
    Evaluated("lesions", "job", 3, "train-0", HASH, 1, 40, 90),
    EvaluationsAccepted("lesions", HASH),
    Trained("lesions", "job", 3, "train-0", "first-job", HASH, 16, 16, 13, 260, 339),
    Multiplied("lesions", "job", 3, "after-0", "first-job", HASH, 2080, 4407),
    RoundsAccepted("lesions", HASH),
    Requested("job", 2, 5, HASH),
    StateMasked("first-job", "job", 3, HASH),
    StateSummed("first-job", "job", 3, HASH),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_every_entry_comes_back_from_json(entry: Entry) -> None:
    read = entry_from_value(json.loads(json.dumps(entry.as_value())))
    assert read == entry
    assert type(read) is type(entry)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_every_part_of_an_entry_is_checked(entry: Entry) -> None:
    value = dict(entry.as_value())
    for key in value:
        for wrong in (None, 1.5, True, {}, ["a", 1]):
            with pytest.raises(MessageError) as caught:
                entry_from_value({**value, key: wrong})
            assert caught.value.code == "TF-604"
        with pytest.raises(MessageError):
            entry_from_value({name: part for name, part in value.items() if name != key})
    with pytest.raises(MessageError):
        entry_from_value({**value, "more": 1})


@pytest.mark.parametrize(
    ("entry", "key", "wrong"),
    [
        (ENTRIES[0], "params", "no digits"),
        (ENTRIES[0], "entry", "agreed"),
        (ENTRIES[3], "groups", ["update", "other"]),
        (ENTRIES[0], "entry", "unheard of"),
    ],
)
def test_values_of_the_right_type_but_no_meaning(entry: Entry, key: str, wrong: Any) -> None:
    with pytest.raises(MessageError):
        entry_from_value({**entry.as_value(), key: wrong})


@pytest.mark.parametrize("value", [None, [], "advertised", {}])
def test_what_is_no_entry_at_all(value: Any) -> None:
    with pytest.raises(MessageError, match="a journal entry"):
        entry_from_value(value)


def test_an_entry_is_never_read_as_another_kind() -> None:
    with pytest.raises(MessageError):
        Advertised.from_value(ENTRIES[1].as_value())


def test_epochs_of_a_job_only_rise() -> None:
    history = History(Advertised("job-1", epoch, HASH, HASH) for epoch in (4, 2))
    for epoch in (0, 2, 4):
        with pytest.raises(ReplayError, match="after 4"):
            history.check_epoch(make_params(3, epoch=epoch))
    history.check_epoch(make_params(3, epoch=5))
    history.check_epoch(make_params(3, epoch=0, job="another"))


def test_enrolments_without_a_term_are_few() -> None:
    """Each is in the ledger for good, and costs a server one message."""
    tries = [Advertised("job", epoch, HASH, HASH) for epoch in range(MAX_ENROLMENTS)]
    following = make_params(3, job="job", epoch=MAX_ENROLMENTS)
    History(tries[1:]).check_epoch(following)
    with pytest.raises(ReplayError, match="in a row without a term to be at most 64"):
        History(tries).check_epoch(following)
    History([*tries, SlotUsed("job", 9, 5, SUM, HASH, HASH)]).check_epoch(following)
    History(tries).check_epoch(make_params(MAX_ENROLMENTS, job="job", epoch=MAX_ENROLMENTS))


def test_slots_of_an_epoch_rise_and_sums_of_a_job_come_once() -> None:
    history = History(SlotUsed("job", 0, slot, SumId(slot, "train-0"), HASH, HASH) for slot in (5, 3))
    for slot in (0, 4, 5):
        with pytest.raises(ReplayError, match="after 5"):
            history.check_slot("job", 0, slot, SUM)
    history.check_slot("job", 0, 6, SUM)
    history.check_slot("job", 1, 0, SUM)
    for epoch, slot in ((0, 6), (1, 0)):
        with pytest.raises(ReplayError, match="used before"):
            history.check_slot("job", epoch, slot, SumId(3, "train-0"))
    history.check_slot("another", 0, 0, SumId(3, "train-0"))
    history.check_slot("job", 1, 0, SumId(3, "train-0", 1))


def test_one_request_a_slot_a_limited_number_of_times() -> None:
    wanted = Requested("job", 0, 1, HASH)
    for times in range(MAX_STARTS):
        History([wanted] * times).check_request(wanted)
    with pytest.raises(ReplayError, match="once more"):
        History([wanted] * MAX_STARTS).check_request(wanted)
    for other in (Requested("job", 0, 2, HASH), Requested("job", 1, 1, HASH), Requested("a", 0, 1, HASH)):
        History([wanted] * MAX_STARTS).check_request(other)
    with pytest.raises(ReplayError, match="the first one"):
        History([wanted]).check_request(Requested("job", 0, 1, HASH[::-1]))


@pytest.mark.parametrize(
    "entry", [Agreed("job", 0, 1, ("a", "b", "c")), Revealed("job", 0, 1, ("a", "b", "c"), GROUPS)]
)
def test_one_survivor_set_a_slot(entry: Entry) -> None:
    history = History([entry])
    history.check_survivors("job", 0, 1, ["a", "b", "c"])
    for other in (("job", 0, 2), ("job", 1, 1), ("another", 0, 1)):
        history.check_survivors(*other, ["a", "b", "d"])
    for survivors in (["a", "b"], ["a", "b", "c", "d"], ["a", "b", "d"]):
        with pytest.raises(SurvivorsError, match=r"'a', 'b', 'c'"):
            history.check_survivors("job", 0, 1, survivors)


def test_a_journal_that_holds_two_sets_allows_none() -> None:
    history = History([Agreed("job", 0, 1, ("a", "b", "c")), Agreed("job", 0, 1, ("a", "b", "d"))])
    for survivors in (["a", "b", "c"], ["a", "b", "d"]):
        with pytest.raises(SurvivorsError):
            history.check_survivors("job", 0, 1, survivors)


def test_never_both_kinds_of_share_for_one_site_and_group() -> None:
    history = History([Revealed("job", 0, 1, ("a", "b", "c"), ("update",))])
    history.check_kinds("job", 0, 1, ("a", "b", "c"), "update")
    history.check_kinds("job", 0, 1, ("a", "b", "c", "d"), "static")
    history.check_kinds("job", 0, 2, ("a", "b", "c", "d"), "update")
    with pytest.raises(SurvivorsError, match=r"revealed before for \['c', 'd'\]"):
        history.check_kinds("job", 0, 1, ("a", "b", "d"), "update")


def test_a_static_group_has_one_cohort_until_a_person_accepts_another() -> None:
    history = History()
    history.check_static("lesions", ("a", "b", "c"))
    history.append(StaticOpened("lesions", ("a", "b", "c"), "job"))
    history.append(StaticOpened("lesions", ("a", "b", "c"), "next job"))
    history.check_static("lesions", ["a", "b", "c"])
    history.check_static("other records", ["a", "b", "d"])
    with pytest.raises(StaticCohortError, match="lesions") as caught:
        history.check_static("lesions", ["a", "b", "d"])
    assert caught.value.code == "TF-612"
    history.append(CohortAccepted("lesions", ("a", "b", "d")))
    history.check_static("lesions", ["a", "b", "d"])
    with pytest.raises(StaticCohortError):
        history.check_static("lesions", ["a", "b", "c"])


def test_cohorts_opened_under_a_lax_rule_count_all() -> None:
    history = History([StaticOpened("lesions", ("a", "b", letter), "job") for letter in "cd"])
    for letter in "cd":
        with pytest.raises(StaticCohortError):
            history.check_static("lesions", ["a", "b", letter])


def test_a_history_takes_entries_only() -> None:
    with pytest.raises(AssertionError):
        History(["advertised"])  # type: ignore[list-item]


def test_repr_counts() -> None:
    assert repr(History(ENTRIES)) == "History(1 jobs, 1 sums)"


def test_a_profile_that_was_used_and_accepted_is_one() -> None:
    profile = (("weights", "exact"),)
    history = History([ProfileUsed("lesions", profile, "job"), ProfileAccepted("lesions", profile)])
    assert history.profiles("lesions") == (profile,) and history.profiles("other records") == ()


MOST = Most(3, 100_000, None)


def evaluation(
    number: int, job: str = "a", *, config: bytes = HASH, parts: int = 40_000, models: int = 1
) -> Evaluated:
    return Evaluated("lesions", job, number, "train-0", config, models, parts, 10**6)


def too_much(history: History, wanted: Evaluated) -> str:
    with pytest.raises(EvaluationsError) as caught:
        history.check_evaluations(wanted, MOST)
    assert caught.value.code == "TF-627"
    return str(caught.value)


def test_evaluations_of_all_jobs_add_up_to_a_sites_limits() -> None:
    history = History([evaluation(1), evaluation(1), evaluation(1, "b")])
    assert history.evaluated("lesions") == (2, 80_000, 2 * 10**6) and history.evaluated("other") == (0, 0, 0)
    assert history.left("lesions", MOST) == (1, 20_000, None)
    history.check_evaluations(evaluation(2, parts=20_000), MOST)
    history.check_evaluations(evaluation(1), MOST)  # the same sum again: one of its tries is opened
    assert "within 10.0% of what the validation records hold, but found 2.1% of " in too_much(
        history, evaluation(2, parts=21_000)
    )
    assert "within 3 models, but found 2 models" in too_much(history, evaluation(2, parts=0, models=2))
    history.append(evaluation(3, "c", models=9, parts=200_000))  # of a looser policy
    assert history.left("lesions", MOST) == (0, 0, None)
    history.check_evaluations(evaluation(2, models=0, parts=0), MOST)


def rounds(number: int, job: str = "a", dataset: str = "lesions") -> Trained:
    return Trained(dataset, job, number, "train-0", job, HASH, 16, 16, 13, 260, 339)


def test_rounds_of_a_data_set_are_kept_and_one_run_is_accepted() -> None:
    again = rounds(1)
    history = History([rounds(1), again, rounds(1, "b"), rounds(1, "c", "other")])
    assert history.trained("lesions") == (again, rounds(1, "b")) and history.trained("none") == ()
    assert not history.accepts_rounds(rounds(1, "d"))
    history.append(RoundsAccepted("lesions", HASH))
    assert not history.accepts_rounds(rounds(2)), "it has begun"
    assert not history.accepts_rounds(rounds(1, "d", "other"))
    assert history.accepts_rounds(rounds(1, "d")) and history.accepts_rounds(rounds(1, "e"))
    history.append(rounds(1, "d"))
    assert history.accepts_rounds(rounds(2, "d")) and not history.accepts_rounds(rounds(1, "e"))


def test_a_person_accepts_evaluations_for_one_run_of_one_job() -> None:
    history = History([evaluation(1, models=3)])
    too_much(history, evaluation(1, "b", config=HASH[::-1]))
    history.append(EvaluationsAccepted("lesions", HASH[::-1]))
    history.append(EvaluationsAccepted("other", HASH))
    too_much(history, evaluation(1, "b"))
    too_much(history, evaluation(2))
    for number in (1, 2):
        history.check_evaluations(evaluation(number, "b", config=HASH[::-1]), MOST)
        history.append(evaluation(number, "b", config=HASH[::-1]))
    too_much(history, evaluation(1, "c", config=HASH[::-1]))
    history.append(EvaluationsAccepted("lesions", HASH))
    too_much(history, evaluation(2))  # a run that has begun without is no new one
    history.check_evaluations(evaluation(3, "b", config=HASH[::-1]), MOST)


# Resumed jobs ------------------------------------------------------------------------------------

STATES = [bytes([number] * 32) for number in range(10)]


def chain(*summed: tuple[str, int]) -> History:
    """Shares of one sum a round, of a state that is the same in each job: (job, round)."""
    return History(StateSummed("first", job, number, STATES[number]) for job, number in summed)


def begins(history: History, number: int, *, state: int | None = None, job: str = "new", **more: Any) -> None:
    params = make_params(3, job=job, lineage=more.pop("lineage", "first"))
    basis = STATES[number if state is None else state]
    history.check_resumed(params, SumId(number, "train-0"), basis, **{"first": True, **more})


def test_a_resumed_job_goes_back_by_one_round_at_most() -> None:
    history = chain(*(("first", number) for number in (1, 2, 3, 4, 5)))
    for number in (4, 5, 6):
        begins(history, number)
    for number in (0, 1, 2, 3):
        with pytest.raises(ReplayError, match="4 at least"):
            begins(history, number)
        with pytest.raises(ReplayError, match="4 at least"):
            begins(history, number, first=False)
        begins(history, number, lineage="another")
    begins(History(), 1)


def test_the_round_is_that_of_all_jobs_of_the_chain() -> None:
    """Whichever job it names as the one before."""
    history = chain(("first", 3), ("second", 4), ("second", 8), ("third", 8))
    begins(history, 7)
    with pytest.raises(ReplayError, match="7 at least"):
        begins(history, 4)
    begins(chain(("new", 8), ("first", 3)), 3)  # what the job itself has done is for `check_slot`


def test_a_state_is_summed_in_its_own_round() -> None:
    history = chain(*(("first", number) for number in (1, 2, 3, 4, 5)))
    with pytest.raises(ReplayError, match=r"found that of \[2\]"):
        begins(history, 5, state=2)
    begins(history, 5, state=9)  # this site was not in its sum, and does not vouch for it
    begins(history, 5, state=2, first=False)  # what follows from a total is for `FollowedState`
    history.append(StateSummed("first", "new", 5, STATES[5]))
    begins(history, 6, state=2)


def test_a_state_is_summed_in_a_few_jobs() -> None:
    jobs = [f"job-{number}" for number in range(MAX_JOBS_OF_STATE)]
    begins(chain(*((job, 5) for job in jobs[1:])), 5)
    with pytest.raises(ReplayError, match="one more job"):
        begins(chain(*((job, 5) for job in jobs)), 5)
    begins(chain(*((job, 5) for job in jobs)), 5, job=jobs[0])
    begun = History(StateMasked("first", job, 5, STATES[5]) for job in jobs)  # whether or not it gave shares
    with pytest.raises(ReplayError, match="one more job"):
        begins(begun, 5)
    begins(begun, 5, job=jobs[0])


@pytest.mark.parametrize(
    ("earlier", "value", "expected"),
    [
        (["5"], "7", (["5"], "7")),
        (["none"], '{"a":1}', (["none"], '{"a":1}')),
        (["none", '{"a":1}'], '{"a":2}', (["none", '{"a":1}'], '{"a":2}')),
        (['{"a":false}'], '{"a":true}', (["a false"], "a true")),
        (['{"a":1,"b":2}'], '{"a":1,"b":3}', (["b 2"], "b 3")),
        (['{"a":1,"b":2}', '{"a":1,"b":4}'], '{"a":1,"b":2}', (["b 2", "b 4"], "b 2")),
        (['{"a":1,"b":2}', '{"a":2,"b":2}'], '{"a":2,"b":3}', (["a 1, b 2", "a 2, b 2"], "a 2, b 3")),
        (['{"a":{"c":"x"}}'], '{"a":{"c":"y"},"b":[1]}', (["c x, b none"], "c y, b [1]")),
        (['{"a":{"c":1},"b":{"c":1}}'], '{"a":{"c":2},"b":{"c":2}}', (["a.c 1, b.c 1"], "a.c 2, b.c 2")),
        (['{"a":{}}'], '{"a":{"c":1}}', (["a {}, c none"], "a none, c 1")),
        (['{"a":1}'], '{"a":1}', (['{"a":1}'], '{"a":1}')),
        (['{"a":1,"b":null}'], '{"a":2}', (["a 1"], "a 2")),
        (
            ['{"method":"x","method_options":{"mu":1,"dim":2},"rate":1}'],
            '{"method":"y","method_options":{"mu":3,"kept":4},"rate":2}',
            (["method x, mu 1, rate 1"], "method y, mu 3, rate 2"),
        ),
        (
            ['{"method":"x","method_options":{"mu":1}}'],
            '{"method":"x","method_options":{"kept":4}}',
            (["mu 1, kept none"], "mu none, kept 4"),
        ),
        (
            ['{"method":"x","method_options":{"mu":1}}'],
            '{"method":"y","method_options":{}}',
            (["method x"], "method y"),
        ),
    ],
)
def test_of_settings_with_parts_those_are_told_that_differ(
    earlier: list[str], value: str, expected: tuple[list[str], str]
) -> None:
    assert in_words(earlier, value) == expected


def test_a_value_that_one_of_several_profiles_lacks_differs() -> None:
    known = [(("a", "1"),), (("a", "2"),)]
    assert differences(known, (("a", "2"),)) == [("a", ["1", "2"], "2")]
