"""Whole runs. The oracle is the sum in Python's integers, element by element, modulo the ring."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.securesum import mlkem
from tests.support.securesum.protocol import BASIS, JOB, MIXED, World, names

from tightframe.securesum import checks, rules
from tightframe.securesum.errors import ProtocolError, RecoveryError, StateError, SurvivorsError
from tightframe.securesum.messages import GROUPS, FieldSpec, SumId
from tightframe.securesum.rules import SiteRules, minimum_survivors
from tightframe.securesum.server import setup as server_setup
from tightframe.securesum.site import setup as site_setup
from tightframe.securesum.site.journal import (
    Agreed,
    Revealed,
    SlotUsed,
    StateMasked,
    StateSummed,
    StaticOpened,
    TotalVerified,
)

FIELDS = st.builds(
    FieldSpec,
    name=st.text("xyz", min_size=1, max_size=3),
    shape=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    ring=st.sampled_from([32, 64]),
    bits=st.integers(0, 8),
    bound=st.just(1.0),
    group=st.sampled_from(GROUPS),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[World, list[dict[str, list[str]]]]:
    """A world, and for each of its slots who drops out at which stage."""
    sites = draw(st.integers(3, 8))
    colluders = draw(st.integers(1, max(1, (sites - 2) // 2)))
    least = rules.threshold(sites, colluders)
    world = World(
        sites,
        seed=draw(st.integers(0, 2**32)),
        stored=draw(st.booleans()),
        schemas={"train": tuple(draw(st.lists(FIELDS, max_size=4)))},
        colluders=colluders,
        threshold=draw(st.integers(min(least, sites), sites)),
        slots=2,
    )
    someone = st.lists(st.sampled_from(names(sites)), unique=True, max_size=sites // 2)
    stages = ("drop_term", "drop_agree", "drop_reveal")
    return world, [{stage: draw(someone) for stage in stages} for _ in range(2)]


@pytest.mark.whole
@settings(deadline=None, max_examples=40)
@given(runs())
def test_the_total_is_exact_or_nothing_is_opened(case: tuple[World, list[dict[str, list[str]]]]) -> None:
    world, sums = case
    world.set_up()
    for slot, drops in enumerate(sums):
        survivors = [name for name in world.params.roster if name not in drops["drop_term"]]
        full = len(survivors) == len(world.params.roster)
        agreeing = [name for name in survivors if name not in drops["drop_agree"]]
        revealing = [name for name in agreeing if name not in drops["drop_reveal"]]
        needed = world.params.threshold
        if len(survivors) < minimum_survivors(world.params):
            with pytest.raises(SurvivorsError):
                world.run(slot, **drops)
            assert not any(isinstance(e, Agreed | Revealed) and e.slot == slot for e in entries(world))
        elif len(agreeing) < needed or len(revealing) < needed:
            with pytest.raises(RecoveryError):
                world.run(slot, **drops)
            if any(isinstance(e, Revealed) and e.slot == slot for e in entries(world)):
                break  # who gave shares waits for this total
        else:
            opened = world.run(slot, **drops)
            plain = world.plain(survivors)
            assert opened.survivors == tuple(survivors)
            assert opened.groups["update"] == plain["update"]
            assert opened.groups.get("static") == (plain["static"] if full or not plain["static"] else None)
            assert opened.blamed == {}
    assert not world.refused


def entries(world: World) -> list[object]:
    return [entry for site in world.sites.values() for entry in site.entries]


@pytest.mark.parametrize("stored", [False, True])
def test_one_epoch_with_and_without_drop_outs(stored: bool) -> None:
    world = World(5, stored=stored, slots=4)
    world.set_up()
    everybody = world.run(0)
    assert everybody.groups == world.plain(world.params.roster)
    without = world.run(1, drop_term=["site-002"])
    assert set(without.groups) == {"update"}
    assert without.groups["update"] == world.plain(without.survivors)["update"]
    late = world.run(2, drop_reveal=["site-001"])
    assert late.groups == world.plain(world.params.roster)
    both = world.run(3, drop_term=["site-005"])
    assert both.groups["update"] == world.plain(both.survivors)["update"]
    first = world.sites["site-001"].entries
    assert [type(entry).__name__ for entry in first] == [
        "Advertised",
        *("StaticMasked", "StateMasked", "SlotUsed", "StateSummed", "Revealed", "StaticOpened"),
        *("StateMasked", "SlotUsed", "Agreed", "StateSummed", "TotalVerified", "Revealed"),
        *("StateMasked", "SlotUsed"),
        *("StateMasked", "SlotUsed", "Agreed", "StateSummed", "TotalVerified", "Revealed"),
    ]
    assert first[2] == StateMasked(JOB, JOB, 0, BASIS)
    assert first[4] == StateSummed(JOB, JOB, 0, BASIS)
    assert first[5] == Revealed(JOB, 0, 0, world.params.roster, GROUPS)
    assert first[6] == StaticOpened("lesions", world.params.roster, JOB)
    assert first[10] == StateSummed(JOB, JOB, 1, BASIS)
    assert first[11] == TotalVerified(JOB, 0, 0, everybody.evidence.total.digest())
    assert first[12] == Revealed(JOB, 0, 1, without.survivors, ("update",))
    assert first[19] == TotalVerified(JOB, 0, 2, late.evidence.total.digest())


@pytest.mark.whole
def test_seventy_sites_of_which_seven_drop_out_and_seven_reveal_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Checks of certificates, and of one signature by each site, cost most of the time; both have their tests.
    for module in (site_setup, server_setup):
        monkeypatch.setattr(module, "verify_advertisement", lambda *anything: None)
    monkeypatch.setattr(checks, "ed25519_verify", functools.cache(checks.ed25519_verify))
    world = World(70, slots=1, seed=100)
    assert world.params.threshold == 47
    world.set_up()
    opened = world.run(0, drop_term=names(70)[5::10], drop_reveal=names(70)[9::10])
    assert len(opened.survivors) == 63
    assert opened.groups["update"] == world.plain(opened.survivors)["update"]
    assert "static" not in opened.groups


def test_two_sites_may_drop_out_of_seven_at_once() -> None:
    world = World(7, seed=2)
    world.set_up()
    opened = world.run(0, drop_term=["site-001", "site-007"])
    assert opened.groups["update"] == world.plain(opened.survivors)["update"]
    assert world.params.threshold == 5


def test_a_semi_honest_server_needs_fewer() -> None:
    world = World(7, trust="semi_honest")
    world.set_up()
    opened = world.run(0, drop_term=names(7)[:3])
    assert len(opened.survivors) == world.params.threshold == 4
    assert opened.groups["update"] == world.plain(opened.survivors)["update"]


def test_the_same_randomness_gives_the_same_bytes() -> None:
    seen: list[list[bytes]] = []
    for _ in range(2):
        sent: list[bytes] = []

        def keep(stage: str, site: str, raw: bytes, sent: list[bytes] = sent) -> bytes:
            sent.append(raw)
            return raw

        world = World(4, seed="again", tamper=keep)
        for site in world.sites.values():
            # The library's encapsulation takes no randomness; the oracle's does.
            site.encapsulate = lambda key, random=site.random: mlkem.encapsulate(key, random(32))  # type: ignore[misc]
        world.set_up()
        world.run(0)
        world.run(1, drop_term=["site-003"])
        seen.append(sent)
    assert len(seen[0]) == 4 * 2 * 2 + 4 * 4 + 3 * 6
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > len(seen[0]) // 2


@pytest.mark.parametrize("static_open", [False, True])
@pytest.mark.parametrize("any_cohort", [False, True])
@pytest.mark.parametrize("gone", [[], ["site-004"]])
def test_when_the_static_group_is_opened(static_open: bool, any_cohort: bool, gone: list[str]) -> None:
    world = World(4, static_open=static_open, site_rules=SiteRules(any_static_cohort=any_cohort))
    world.set_up()
    opened = world.run(0, drop_term=gone)
    plain = world.plain(opened.survivors)
    assert opened.groups["update"] == plain["update"]
    expected = plain["static"] if static_open and (any_cohort or not gone) else None
    assert opened.groups.get("static") == expected
    told = [entry for entry in entries(world) if isinstance(entry, StaticOpened)]
    assert [entry.roster for entry in told] == (
        [opened.survivors] * len(opened.survivors) if expected is not None else []
    )


def test_a_static_group_without_elements_binds_nobody() -> None:
    empty = FieldSpec("none", (0, 7), 64, 0, 1.0, "static")
    world = World(3, schemas={"train": (MIXED[0], empty)})
    world.set_up()
    assert world.run(0).groups == world.plain(world.params.roster)
    assert not any(isinstance(entry, StaticOpened) for entry in entries(world))


def test_a_schema_without_any_field() -> None:
    world = World(4, schemas={"train": ()})
    world.set_up()
    assert world.run(0).groups == {"update": b"", "static": b""}
    assert world.run(1, drop_term=["site-001"]).groups == {"update": b"", "static": b""}


def test_the_static_group_stays_shut_if_too_few_sites_open_it() -> None:
    world = World(5)
    for name in names(2):
        world.sites[name].rules = SiteRules(any_static_cohort=True)
    world.set_up()
    total = world.start(0)
    world.contribute(total, world.params.roster)
    total.close()
    # Another job opened the data set for another cohort after the terms were out.
    for name in names(2):
        site = world.sites[name]
        site.state = replace(site.state, epoch=replace(site.state.epoch, any_static_cohort=False))
        site.entries.append(StaticOpened("lesions", ("others",), "other"))
    world.agree(total, world.params.roster)
    world.reveal(total, world.params.roster)
    opened = total.open()
    assert opened.groups == {"update": world.plain(world.params.roster)["update"]}


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_below_the_threshold_nothing_is_opened(missing: int) -> None:
    world = World(4)
    world.set_up()
    total = world.start(0)
    world.contribute(total, world.params.roster)
    total.close()
    world.agree(total, world.params.roster)
    world.reveal(total, names(4)[missing:])
    if missing == 1:
        assert total.open().groups == world.plain(world.params.roster)
        return
    with pytest.raises(RecoveryError, match=rf"at least 3, but found {4 - missing}"):
        total.open()
    # A reveal that comes later still opens it: the refusal left the totals masked and whole.
    world.reveal(total, names(4)[:missing])
    assert total.open().groups == world.plain(world.params.roster)


def test_a_sum_given_up_leaves_nothing_behind() -> None:
    world = World(4)
    world.set_up()
    given_up = world.start(0)
    world.contribute(given_up, world.params.roster)
    given_up.close()
    world.agree(given_up, world.params.roster)
    again = world.run(1, sum_id=SumId(0, "train-0", 1))
    assert again.groups == world.plain(world.params.roster)
    with pytest.raises(StateError, match="abandoned"):
        world.reveal(given_up, ["site-001"])
    assert sum(isinstance(entry, SlotUsed) for entry in world.sites["site-001"].entries) == 2


def test_masked_terms_do_not_show_the_terms() -> None:
    sent: dict[str, bytes] = {}

    def keep(stage: str, site: str, raw: bytes) -> bytes:
        if stage == "masked":
            sent[site] = raw
        return raw

    world = World(4, tamper=keep)
    world.set_up()
    world.run(0)
    for name, raw in sent.items():
        term = world.term(name)
        for group in GROUPS:
            assert not any(term[group][at : at + 4] in raw for at in range(0, len(term[group]), 4))


def test_one_missing_in_the_setup_stops_it() -> None:
    world = World(4)
    shown = world.enroll()
    assert world.enrolment.missing == []
    world.sites.pop("site-002")
    world.confirm(shown)
    assert world.session.missing == ["site-002"]
    with pytest.raises(StateError, match="site-002") as caught:
        world.start(0)
    assert isinstance(caught.value, ProtocolError)


def test_a_seal_is_no_sum_that_a_resumed_job_could_repeat() -> None:
    """No term is in it: noted as one, its round would keep the job that resumes the run from its last one."""
    world = World(4, schemas={"train": MIXED, "seal": ()})
    world.set_up()
    for slot, schema in enumerate(("train", "seal")):
        world.run(slot, schema=schema)
    for site in world.sites.values():
        summed = [entry for entry in site.entries if isinstance(entry, StateSummed)]
        assert [entry.round for entry in summed] == [0]
        assert sum(isinstance(entry, Revealed) for entry in site.entries) == 2


def test_a_seal_sums_no_state_and_shows_no_seed_that_no_proof_needs() -> None:
    """Another sum of the same state is refused; a seal of it, which has no term, is no such sum."""
    world = World(4, schemas={"train": MIXED, "seal": ()})
    world.set_up()
    world.run(0, drop_term=[names(4)[3]])
    before = {name: len(site.entries) for name, site in world.sites.items()}
    seal = world.start(1, "seal", SumId(0, "seal-0"))
    world.contribute(seal, world.params.roster, "seal")
    seal.close()
    assert seal.reveal_request().missing == {} == seal.reveal_request().dropped
    world.reveal(seal, world.params.roster)
    world.finish(seal)
    for name, site in world.sites.items():
        kinds = {type(entry) for entry in site.entries[before[name] :]}
        assert not kinds & {StateMasked, StateSummed} and Revealed in kinds
