"""A false total is never followed by an opening: what a site checks of totals, one check a test.

The server is malicious, and where it says so one site plays along. ``test_limits`` has what the two of
them can do nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.securesum.hostile import (
    World,
    agreed,
    closed,
    names,
    ready,
    refused,
    refused_by,
    signed_agreement,
    signed_receipt,
)
from tests.support.securesum.protocol import JOB, MIXED

from tightframe.securesum import messages
from tightframe.securesum.checks import group_layout
from tightframe.securesum.errors import (
    FollowersError,
    InconsistencyError,
    MessageError,
    ParametersError,
    ProtocolError,
    StateError,
    SurvivorsError,
    TotalError,
    VerificationError,
)
from tightframe.securesum.messages import (
    GROUPS,
    AgreementRequest,
    Group,
    RevealRequest,
    SumId,
    TermRequest,
    Total,
)
from tightframe.securesum.proofs import combinations
from tightframe.securesum.server import Evidence, Sum
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import slot_secret
from tightframe.securesum.site.totals import KeptTerm, check_told

ONE, TWO, THREE, FOUR = names(4)
PLACES: Mapping[Group, list[tuple[int, int]]] = {
    # Start and width of the first and the last element of each ring: see MIXED.
    "update": [(0, 4), (20, 4), (24, 8), (56, 8), (64, 4), (68, 4)],
    "static": [(0, 8), (16, 8), (24, 4), (28, 4)],
}


def lied(evidence: Evidence, **changes: Any) -> Evidence:
    """The same sum, but with another total."""
    return replace(evidence, total=replace(evidence.total, **changes))


def changed(evidence: Evidence, group: Group, start: int, width: int, by: int) -> Evidence:
    """A total with one element changed."""
    data = evidence.total.groups[group]
    value = (int.from_bytes(data[start : start + width], "little") + by) % 2 ** (8 * width)
    other = data[:start] + value.to_bytes(width, "little") + data[start + width :]
    return lied(evidence, groups={**evidence.total.groups, group: other})


def asked(total: Sum, **changes: Any) -> bytes:
    """What a server that checks nothing sends: receipts and agreements as they are."""
    return replace(RevealRequest(total.slot, total.receipts, total.agreements), **changes).to_bytes()


def revealing(raw: bytes) -> Callable[[Any], Any]:
    return lambda site: site.reveal(raw)


def verified(world: World, name: str) -> list[int]:
    entries = world.sites[name].entries
    return [entry.slot for entry in entries if isinstance(entry, journal.TotalVerified)]


# False totals ------------------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize(
    ("group", "start", "width"), [(group, *place) for group in GROUPS for place in PLACES[group]]
)
@pytest.mark.parametrize("power", ["lowest bit", "highest bit", "minus one"])
def test_nothing_that_rests_on_a_false_total_is_opened(
    group: Group, start: int, width: int, power: str
) -> None:
    world = ready()
    world.run(0)
    assert world.evidence is not None
    by = {"lowest bit": 1, "highest bit": 2 ** (8 * width - 1), "minus one": -1}[power]
    world.evidence = changed(world.evidence, group, start, width, by)
    total = agreed(world, 1)
    error = refused(VerificationError, total.reveal_request)
    assert f"the {group} total of sum 0/train-0/0" in error.what, "an honest server would notice, too"
    refused_by(world, names(4), VerificationError, revealing(asked(total)))
    assert all(verified(world, name) == [] for name in names(4))


def test_a_true_total_is_verified_by_all() -> None:
    world = ready()
    world.run(0)
    assert world.run(1).groups == world.plain(names(4))
    assert all(verified(world, name) == [0] for name in names(4))


def test_a_false_total_of_which_a_silo_dropped_out() -> None:
    world = ready()
    world.run(0, drop_term=[FOUR])
    assert world.evidence is not None
    good = world.evidence
    world.evidence = changed(good, "update", 0, 4, 1)
    total = agreed(world, 1)
    refused_by(world, names(4), VerificationError, revealing(asked(total)))
    world.evidence = good
    # The site was told a false total of this slot, so that the epoch is lost, and not only the sum.
    other = world.start(2)
    refused_by(
        world,
        names(4),
        TotalError,
        lambda site: site.mask(world.request(site.name, other), MIXED, world.term(site.name)),
    )


# Combinations ------------------------------------------------------------------------------------


def flipped(combined: Mapping[Group, bytes], place: int = 0) -> dict[Group, bytes]:
    data = combined["update"]
    return {**combined, "update": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]}


def collected(world: World, slot: int, *, missing: Sequence[str] = (), **combined: Any) -> Sum:
    """A sum whose terms are in, with receipts of sites that play along: ``site_003`` -> its combinations.

    The site goes on with the receipt that it signed for the server.
    """
    total = world.start(slot)
    for name in names(len(world.sites)):
        if name in missing:
            continue
        raw = world.sites[name].mask(world.request(name, total), MIXED, world.term(name))
        if (says := combined.get(name.replace("-", "_"))) is not None:
            masked = messages.Masked.from_bytes(raw)
            said = says(masked.receipt.combinations) if callable(says) else says
            receipt = signed_receipt(world, masked.receipt, combinations=said)
            raw = replace(masked, receipt=receipt).to_bytes()
            site = world.sites[name]
            site.state = site.state.with_slot(slot, replace(site.state.slots[slot], receipt=receipt))
        total.add(name, raw)
    total.close()
    return total


@pytest.mark.parametrize("place", [0, 511, 512, 1535])
def test_a_silo_that_lies_about_its_combinations_is_named_and_its_term_is_shown(place: int) -> None:
    world = ready()
    world.run(0)
    total = collected(world, 1, site_003=lambda own: flipped(own, place))
    refused_by(world, (ONE, TWO, FOUR), VerificationError, revealing(asked(total)))
    world.reveal(total, (ONE, TWO, FOUR))
    assert total.proved == (THREE,)
    opened = world.finish(total)
    assert opened.blamed == {THREE: "TF-623"}
    assert opened.groups == world.plain(names(4))
    assert all(verified(world, name) == [0] for name in (ONE, TWO, FOUR))


def test_no_proof_stands_in_for_combinations_that_a_silo_gave() -> None:
    """The server chooses whose term it shows; with a silo that dealt false secrets, a proof can be false."""
    world = ready()
    world.run(0)
    evidence = world.evidence
    assert evidence is not None
    raw = asked(collected(world, 1), missing={ONE: evidence.proof(ONE)})
    refused_by(world, (ONE,), VerificationError, revealing(raw))
    world.sites[TWO].reveal(raw)


def test_a_slot_that_the_epoch_does_not_have_is_refused_before_a_record_is_read() -> None:
    world = ready()
    world.run(0)
    last = world.params.slots
    request = messages.TermRequest.from_bytes(world.request(ONE, world.start(1)))
    for slot in (last, 255):
        with pytest.raises(ParametersError, match="the slot"):
            check_told(world.sites[ONE].state, replace(request, slot=slot), world.sites[ONE].history)
    assert check_told(world.sites[ONE].state, request, world.sites[ONE].history) is not None


def test_combinations_of_the_right_form_or_none() -> None:
    world = ready()
    world.run(0, drop_term=[FOUR])
    total = world.start(1)
    raw = {
        name: world.sites[name].mask(world.request(name, total), MIXED, world.term(name)) for name in names(4)
    }
    masked = {name: messages.Masked.from_bytes(data) for name, data in raw.items()}
    one = masked[ONE].receipt.combinations
    assert masked[FOUR].receipt.combinations == {}, "its term is not in the total"
    for name, combined in (
        (ONE, {"update": one["update"][:-1]}),
        (ONE, {"update": b""}),
        (ONE, {"static": one["update"]}),
        (ONE, {**one, "static": b""}),
        (FOUR, one),
    ):
        bad = signed_receipt(world, masked[name].receipt, combinations=combined)
        error = refused(MessageError, total.add, name, replace(masked[name], receipt=bad).to_bytes())
        assert error.blamed == name
    for name in names(4):
        total.add(name, raw[name])
    total.close()
    for name, combined, kind in (
        (ONE, {"update": one["update"][:-1]}, "of their size"),
        (ONE, {"static": one["update"]}, "of their size"),
        (FOUR, one, "of ["),
    ):
        bad = signed_receipt(world, masked[name].receipt, combinations=combined)
        others = [item for item in total.receipts if item.name != name]
        both = tuple(sorted([*others, bad], key=lambda item: item.name))
        call = revealing(asked(total, receipts=both))
        refused_by(world, (TWO, THREE), VerificationError, call)
        assert kind in refused(VerificationError, call, world.sites[TWO]).expected
    world.reveal(total, names(3))
    assert world.finish(total).groups["update"] == world.plain(names(4))["update"]


def test_a_term_is_shown_with_the_seeds_of_exactly_the_dropped_sites() -> None:
    world = ready()
    world.run(0, drop_term=[FOUR])
    evidence = world.evidence
    assert evidence is not None
    total = collected(world, 1, site_003={})
    seeds, proofs = evidence.seeds_of_dropped(), {THREE: evidence.proof(THREE)}
    wrong: tuple[Mapping[str, Mapping[Group, bytes]], ...] = (
        {},
        {**seeds, "stranger": seeds[FOUR]},
        {**seeds, THREE: seeds[FOUR]},
    )
    for dropped in wrong:
        call = revealing(asked(total, missing=proofs, dropped=dropped))
        refused_by(world, (ONE, TWO, FOUR), VerificationError, call)
        assert "seeds" in refused(VerificationError, call, world.sites[ONE]).what
    world.sites[ONE].reveal(asked(total, missing=proofs, dropped=seeds))


def test_no_combinations_where_there_is_no_total() -> None:
    world = ready()
    with pytest.raises(MessageError) as caught:
        collected(world, 0, site_001={"update": bytes(1536)})
    assert caught.value.blamed == ONE


# Which total a request rests on ------------------------------------------------------------------


def told(world: World, total: bytes, slot: int) -> Callable[[Any], Any]:
    """A request for a term that rests on this total."""
    seeds = {}
    if world.evidence is not None:
        seeds = world.evidence.seeds_of_survivors()
    raw = TermRequest(slot, SumId(slot, "train-0"), "train", b"", total, seeds).to_bytes()
    return lambda site: site.mask(raw, MIXED, world.term(site.name))


def test_what_was_told_stays_told() -> None:
    world = ready(slots=6)
    first, second = (world.run(slot).evidence.total for slot in (0, 1))
    world.run(2)
    refused_by(world, names(4), TotalError, told(world, b"", 3))
    refused_by(world, names(4), TotalError, told(world, first.to_bytes(), 3))
    other = replace(second, groups={**second.groups, "update": bytes(72)})
    refused_by(world, names(4), TotalError, told(world, other.to_bytes(), 3))
    assert world.evidence is not None
    assert world.run(3).groups == world.plain(names(4))


@pytest.mark.parametrize("gave_more_shares", [True, False])
def test_a_sum_that_was_passed_over_does_not_come_back(gave_more_shares: bool) -> None:
    """A server that says that nothing was opened cannot say later that it was.

    What was told with a later slot counts, and not only the slots for which shares were given.
    """
    world = ready(slots=6)
    world.run(0)
    assert world.evidence is not None
    hidden = replace(world.evidence.total, slot=1, sum_id=closed(world, 1).sum_id)
    (world.run if gave_more_shares else partial(closed, world))(2)
    refused_by(world, names(4), TotalError, told(world, hidden.to_bytes(), 3))


def test_a_sum_for_which_a_site_gave_shares_is_not_passed_over() -> None:
    """Else one state could be summed again and again, with a site and without it."""
    world = ready(slots=6)
    first = world.run(0).evidence.total
    refused_by(world, names(4), TotalError, told(world, b"", 1))
    world.run(1)
    refused_by(world, names(4), TotalError, told(world, first.to_bytes(), 2))
    later = replace(world.params, epoch=1).to_bytes()
    refused_by(world, names(4), TotalError, lambda site: site.advertise(later))


def test_what_was_told_stays_told_to_a_site_that_gave_no_shares() -> None:
    world = ready(slots=6)
    for slot in (0, 1):
        world.run(slot, drop_reveal=[FOUR])
    assert world.sites[FOUR].state.last_revealed == -1  # type: ignore[union-attr]
    refused_by(world, (FOUR,), TotalError, told(world, b"", 2))


def test_a_total_of_a_later_slot_or_of_the_slot_itself_is_none() -> None:
    world = ready()
    total = world.run(0).evidence.total
    for slot in (1, 2):
        refused_by(world, names(4), TotalError, told(world, replace(total, slot=slot).to_bytes(), 1))


def test_a_site_whose_first_request_comes_late_accepts_a_total_that_it_has_no_term_in() -> None:
    world = ready()
    world.run(0, drop_term=[FOUR])
    assert world.run(1).groups == world.plain(names(4))
    other = ready()
    with_it = replace(world.run(2).evidence.total, survivors=names(4), slot=0)
    request = TermRequest.from_bytes(other.request(ONE, other.start(1)))
    for slot in (0, 1):
        raw = replace(request, slot=slot, total=with_it.to_bytes()).to_bytes()
        refused_by(other, (ONE,), TotalError, lambda site, r=raw: site.mask(r, MIXED, other.term(ONE)))


def test_two_totals_for_two_sites_are_refused_by_both() -> None:
    world = ready()
    world.run(0)
    assert world.evidence is not None
    good, false = world.evidence, changed(world.evidence, "update", 0, 4, 1)
    receipts = []
    for name in names(4):
        world.evidence = false if name == TWO else good
        raw = world.sites[name].mask(world.request(name, world.start(1)), MIXED, world.term(name))
        receipts.append(messages.Masked.from_bytes(raw).receipt)
    request = RevealRequest(1, tuple(receipts), ()).to_bytes()
    refused_by(world, names(4), InconsistencyError, revealing(request))
    three = AgreementRequest(1, tuple(receipts[1:])).to_bytes()
    refused_by(world, names(4)[1:], InconsistencyError, lambda site: site.agree(three))
    without = AgreementRequest(1, tuple(item for item in receipts if item.name != TWO)).to_bytes()
    for name in (ONE, THREE, FOUR):
        world.sites[name].agree(without)


def test_a_total_over_others_than_its_silos_signed_gets_no_answer() -> None:
    """Masks with a site that did not drop out would come off: a site subtracts them for one set only."""
    world = ready(7)
    total = world.run(0, drop_term=[names(7)[6]], drop_reveal=[FOUR]).evidence.total
    for survivors in (names(5), names(7)):
        refused_by(
            world, names(4), SurvivorsError, told(world, replace(total, survivors=survivors).to_bytes(), 1)
        )
    whole = ready()
    total = whole.run(0).evidence.total
    for survivors in (names(3), names(4)[1:]):
        refused_by(
            whole, names(4), SurvivorsError, told(whole, replace(total, survivors=survivors).to_bytes(), 1)
        )


def test_a_total_of_another_sum_schema_or_group_gets_no_answer() -> None:
    world = ready()
    total = world.run(0, drop_term=[FOUR]).evidence.total
    static = bytes(32)
    for wrong in (
        replace(total, sum_id=SumId(0, "train-0", 1)),
        replace(total, schema="seal", groups={"update": b""}),
        replace(total, groups={**total.groups, "static": static}),
        replace(total, receipts=bytes(32)),
    ):
        refused_by(world, names(3), TotalError, told(world, wrong.to_bytes(), 1))
    for wrong in (
        replace(total, schema="other"),
        replace(total, survivors=()),
        replace(total, survivors=names(2)),
        replace(total, survivors=names(3)[::-1]),
        replace(total, survivors=(ONE, ONE, TWO)),
        replace(total, survivors=(ONE, TWO, "site-005")),
        replace(total, groups={}),
        replace(total, groups={"static": static}),
        replace(total, groups={"update": total.groups["update"][:-4]}),
        replace(total, groups={"update": total.groups["update"] + bytes(4)}),
    ):
        raw = replace(TermRequest(1, SumId(1, "train-0"), "train"), total=wrong.to_bytes()).to_bytes()
        for name in names(4):
            site = world.sites[name]
            with pytest.raises(ProtocolError) as caught:
                site.mask(raw, MIXED, world.term(name))
            assert isinstance(caught.value, TotalError | SurvivorsError | MessageError)
    # The fourth site, which dropped out, has nothing to compare with but itself.
    for name, wrong in ((FOUR, replace(total, survivors=names(4))),):
        world.sites[name].entries = [
            item for item in world.sites[name].entries if not isinstance(item, journal.Agreed)
        ]
        refused_by(world, (name,), TotalError, told(world, wrong.to_bytes(), 1))


def test_a_group_without_elements_is_in_no_total() -> None:
    world = ready()
    total = world.run(0, schema="seal", sum_id=SumId(0, "seal-0"), drop_term=[FOUR]).evidence.total
    wrong = replace(total, groups={"update": b"", "static": b""})
    refused_by(world, names(4), TotalError, told(world, wrong.to_bytes(), 1))


def test_a_site_with_a_term_that_it_did_not_reveal_for_accepts_the_total_and_combines_nothing() -> None:
    world = ready()
    world.run(0, drop_reveal=[FOUR])
    total = closed(world, 1)
    assert total.receipts[3].combinations == {} != total.receipts[2].combinations
    assert "term-0" not in world.sites[FOUR].kept, "nor does it keep what it will not be asked for"
    world.reveal(total, names(4))
    assert total.proved == (FOUR,)
    assert world.finish(total).groups == world.plain(names(4))


# What the combinations are made from --------------------------------------------------------------


def test_the_challenge_is_a_hash_of_session_total_and_receipts() -> None:
    """And of nothing else: a site that is asked again, in another slot, tells nothing new."""
    world = ready(slots=6)
    told = world.run(0).evidence.total.told()
    session = world.session.session
    made = messages.challenge(session, told)
    assert messages.challenge(bytes(32), told) != made
    for changes in (
        {"slot": 1},
        {"sum_id": SumId(9, "x")},
        {"schema": "seal"},
        {"survivors": names(3)},
        {"hashes": {**told.hashes, "update": bytes(32)}},
        {"hashes": {"update": told.hashes["update"]}},
        {"receipts": bytes(32)},
    ):
        assert messages.challenge(session, replace(told, **changes)) != made  # type: ignore[arg-type]
    assert len({item.combinations["update"] for item in closed(world, 1).receipts}) == 4
    first = [item.combinations for item in closed(world, 2).receipts]
    assert [item.combinations for item in closed(world, 3).receipts] == first


def test_the_digest_of_receipts_is_of_all_that_they_say() -> None:
    world = ready()
    total = world.run(0).evidence.total
    receipts = closed(world, 1).receipts
    session = world.session.session
    made = messages.receipts_digest(session, receipts)
    assert made != total.receipts and messages.receipts_digest(bytes(32), receipts) != made
    assert messages.receipts_digest(session, receipts[:3]) != made
    for changes in (
        {"name": "x"},
        {"slot": 2},
        {"sum_id": SumId(9, "x")},
        {"basis": bytes(32)},
        {"total": bytes(31) + b"1"},
        {"combinations": {}},
        {"follows": False},
        {"update": bytes(32)},
        {"static": bytes(32)},
        {"pairs": bytes(32)},
    ):
        other = (*receipts[:3], replace(receipts[3], **changes))  # type: ignore[arg-type]
        assert messages.receipts_digest(session, other) != made, changes


def test_combinations_of_one_total_show_no_other() -> None:
    """Each total has combinations of its own: what vanishes for one does not for the next."""
    world = ready(slots=6)
    world.run(0)
    assert world.evidence is not None
    good = world.evidence
    told = {
        by: changed(good, "update", 0, 4, by).total.told() if by else good.total.told() for by in range(3)
    }
    ground = good.ground
    one = good.term(good.proof(ONE))
    session = world.session.session
    made = {ground.combine(messages.challenge(session, item), one)["update"] for item in told.values()}
    assert len(made) == 3


def test_who_did_not_give_shares_takes_the_receipts_as_told_and_others_do_not() -> None:
    """The digest is in the total's, which all receipts of the next sum must name."""
    world = ready()
    world.run(0, drop_reveal=[FOUR])
    assert world.evidence is not None
    good, false = world.evidence, lied(world.evidence, receipts=bytes(32))
    world.evidence = false
    raw = world.sites[FOUR].mask(world.request(FOUR, world.start(1)), MIXED, world.term(FOUR))
    other = messages.Masked.from_bytes(raw).receipt
    total = world.start(1)
    refused_by(world, names(3), TotalError, told(world, false.total.to_bytes(), 1))
    world.evidence = good
    total = world.start(1)
    world.contribute(total, names(3))
    receipts = (*total.receipts, other)
    call = revealing(RevealRequest(1, receipts, ()).to_bytes())
    refused_by(world, names(4), InconsistencyError, call)


def test_a_site_agrees_to_one_choice_of_receipts() -> None:
    """A site that plays along signs two receipts: others hold to what they signed first."""
    world = ready(5)
    world.run(0)
    gone = names(5)[4]
    total = closed(world, 1, [gone])
    other = signed_receipt(world, total.receipts[3], static=bytes(32))
    receipts = (*total.receipts[:3], other)
    world.agree(total, names(4))
    again = AgreementRequest(1, receipts).to_bytes()
    refused_by(world, names(3), InconsistencyError, lambda site: site.agree(again))
    agreements = tuple(signed_agreement(world, item.name, receipts) for item in total.agreements)
    refused_by(world, names(3), InconsistencyError, revealing(asked(total, receipts=receipts)))
    both = asked(total, receipts=receipts, agreements=agreements)
    refused_by(world, names(3), InconsistencyError, revealing(both))
    world.reveal(total, names(4))
    assert world.finish(total).groups["update"] == world.plain(names(4))["update"]


def test_two_receipts_of_one_silo_open_nothing_false_and_end_the_epoch() -> None:
    """Nobody signs the whole roster, so that its receipts may differ: then the next total is refused."""
    world = ready()
    total = closed(world)
    other = signed_receipt(world, total.receipts[3], static=bytes(32))
    first = asked(total)
    second = asked(total, receipts=(*total.receipts[:3], other))
    for name, raw in ((ONE, first), (TWO, first), (THREE, second)):
        total.add_reveal(name, world.sites[name].reveal(raw))
    evidence = world.finish(total).evidence
    assert evidence.total.groups == world.plain(names(4))
    lies = lied(
        evidence, receipts=messages.receipts_digest(world.session.session, (*total.receipts[:3], other))
    )
    for name, right, wrong in ((ONE, evidence, lies), (TWO, evidence, lies), (THREE, lies, evidence)):
        refused_by(world, (name,), TotalError, told(world, wrong.total.to_bytes(), 1))
        told(world, right.total.to_bytes(), 1)(world.sites[name])


# The whole roster --------------------------------------------------------------------------------


def test_the_whole_roster_is_revealed_for_without_signatures() -> None:
    world = ready()
    total = closed(world)
    given = tuple(signed_agreement(world, name, total.receipts) for name in names(4))
    for signed in (given, given[:1]):
        refused_by(world, names(4), SurvivorsError, revealing(asked(total, agreements=signed)))
    refused_by(world, names(4), SurvivorsError, lambda site: site.agree(total.agreement_request().to_bytes()))
    world.reveal(total, names(4))
    assert world.finish(total).groups == world.plain(names(4))


def test_who_revealed_for_the_whole_roster_signs_and_reveals_for_nothing_less() -> None:
    """And the other way round. The journal says so, too, if the state is that of before."""
    world = ready(5)
    total = closed(world)
    receipts, before = total.receipts, {name: site.state for name, site in world.sites.items()}
    fewer = AgreementRequest(0, receipts[:4]).to_bytes()
    whole = asked(total)
    for name in (ONE, TWO):
        world.sites[name].reveal(whole)
    for name in (THREE, FOUR):
        world.sites[name].agree(fewer)
    agreements = tuple(signed_agreement(world, name, receipts[:4]) for name in names(4))
    less = asked(total, receipts=receipts[:4], agreements=agreements)
    for _ in range(2):
        refused_by(world, (ONE, TWO), SurvivorsError, lambda site: site.agree(fewer))
        refused_by(world, (ONE, TWO), SurvivorsError, revealing(less))
        refused_by(world, (THREE, FOUR), SurvivorsError, revealing(whole))
        for name, site in world.sites.items():
            site.state = before[name]  # the worst that a crash can leave


def test_a_silo_combines_no_term_of_a_sum_that_the_server_cannot_open() -> None:
    """The whole roster for the victim, a set without it for the others: its pair masks open, its own stays.

    128 combinations of its term would then be 128 of its update's. It wants to see the seed of its own mask.
    """
    world = ready(5)
    total = closed(world)
    victim, rest = names(5)[4], names(5)[:4]
    world.sites[victim].reveal(asked(total))
    fewer = total.receipts[:4]
    for name in rest:
        world.sites[name].agree(AgreementRequest(0, fewer).to_bytes())
    given = tuple(signed_agreement(world, name, fewer) for name in rest)
    for name in rest:
        world.sites[name].reveal(asked(total, receipts=fewer, agreements=given))
    whole = messages.receipts_digest(world.session.session, total.receipts)
    lie = Total(0, total.sum_id, "train", names(5), world.plain(names(5)), whole)
    wrong: tuple[Mapping[str, Mapping[Group, bytes]], ...] = (
        {},
        {victim: {}},
        {victim: {"update": bytes(32), "static": bytes(32)}},
    )
    for seeds in wrong:
        raw = TermRequest(1, SumId(1, "train-0"), "train", b"", lie.to_bytes(), seeds).to_bytes()
        refused_by(world, (victim,), TotalError, lambda site, r=raw: site.mask(r, MIXED, world.term(victim)))


def test_the_seed_of_each_group_of_a_total_is_asked_for() -> None:
    world = ready()
    world.run(0)
    request = TermRequest.from_bytes(world.request(ONE, world.start(1)))
    own = request.seeds[ONE]
    for seeds in (
        {"update": own["update"]},
        {**own, "static": own["update"]},
        {**own, "update": own["static"]},
    ):
        raw = replace(request, seeds={**request.seeds, ONE: seeds}).to_bytes()
        refused_by(world, (ONE,), TotalError, lambda site, r=raw: site.mask(r, MIXED, world.term(ONE)))
    world.sites[ONE].mask(replace(request, seeds={ONE: own}).to_bytes(), MIXED, world.term(ONE))


def test_a_set_without_one_silo_of_the_roster_needs_signatures() -> None:
    world = ready(5)
    total = closed(world)
    fewer = total.receipts[:4]
    refused_by(world, names(4), SurvivorsError, revealing(asked(total, receipts=fewer)))
    for name in names(4):
        world.sites[name].agree(AgreementRequest(0, fewer).to_bytes())
    refused_by(world, names(4), SurvivorsError, revealing(asked(total, receipts=fewer)))
    given = tuple(signed_agreement(world, name, fewer) for name in names(4))
    refused_by(world, names(4), SurvivorsError, revealing(asked(total, receipts=fewer, agreements=given[:3])))
    for name in names(4):
        world.sites[name].reveal(asked(total, receipts=fewer, agreements=given))


# Followers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sites", "colluders"), [(4, 1), (7, 2)])
def test_more_silos_than_collude_must_follow_by_themselves(sites: int, colluders: int) -> None:
    roster = names(sites)
    for following in (colluders, colluders + 1):
        world = ready(sites, colluders=colluders)
        for place, name in enumerate(roster):
            world.sites[name].follows = place < following
        total = closed(world)
        assert [item.follows for item in total.receipts] == [place < following for place in range(sites)]
        if following > colluders:
            world.reveal(total, roster)
            assert total.open().groups == world.plain(roster)
            continue
        refused_by(world, roster, FollowersError, revealing(asked(total)))
        if sites - 1 < total._params.threshold:
            continue
        fewer = total.receipts[:-1]
        request = AgreementRequest(0, fewer).to_bytes()
        refused_by(world, roster[:-1], FollowersError, lambda site, raw=request: site.agree(raw))


def test_a_site_that_agreed_checks_followers_again_before_it_reveals() -> None:
    """Not that it could change: the receipts are those that it signed. But nothing rests on that."""
    world = ready(5)
    total = agreed(world, 0, [names(5)[4]])
    receipts = [signed_receipt(world, item, follows=False) for item in total.receipts[1:]]
    own = total.receipts[0]
    call = revealing(asked(total, receipts=(own, *receipts)))
    refused_by(world, (ONE,), FollowersError, call)


# What is kept, and for how long ------------------------------------------------------------------


def kept_names(world: World) -> set[str]:
    found = {frozenset(site.kept) for site in world.sites.values()}
    assert len(found) == 1
    return set(found.pop())


def test_a_term_is_kept_until_a_request_rests_on_a_later_total() -> None:
    world = ready(slots=6)
    total = closed(world, 0)
    assert kept_names(world) == {"term-0"}
    with_keys = KeptTerm.from_bytes(world.sites[ONE].kept["term-0"])
    assert set(with_keys.keys) == set(GROUPS) and set(with_keys.keys["update"]) == set(names(4)[1:])
    world.reveal(total, names(4))
    world.finish(total)
    assert KeptTerm.from_bytes(world.sites[ONE].kept["term-0"]).keys == {}
    assert kept_names(world) == {"term-0"}
    total = closed(world, 1)
    assert kept_names(world) == {"term-0", "term-1"}
    world.reveal(total, names(4))
    world.finish(total)
    assert kept_names(world) == {"term-0", "term-1"}
    closed(world, 2)
    assert kept_names(world) == {"term-1", "term-2"}
    closed(world, 3)  # the sum before was given up: its term goes, that in the total stays
    assert kept_names(world) == {"term-1", "term-3"}


def test_what_is_kept_shows_neither_the_term_nor_the_secrets() -> None:
    world = ready()
    world.run(0)
    total = closed(world, 1)
    site = world.sites[ONE]
    assert "KeptTerm" in repr(KeptTerm.from_bytes(site.kept["term-0"]))
    assert repr(site.kept["term-0"])[10:40] not in repr(KeptTerm.from_bytes(site.kept["term-0"]))
    everything = b"".join(site.kept.values())
    for data in world.term(ONE).values():
        assert not any(data[at : at + 8] in everything for at in range(0, len(data) - 7, 8))
    assert total.rests_on is not None


def test_a_sum_that_fails_before_any_share_leaves_the_total_for_the_next() -> None:
    world = ready(slots=5, stored=True)
    world.run(0)
    agreed(world, 1)
    opened = world.run(2)
    assert opened.groups == world.plain(names(4))
    assert world.run(3).groups == world.plain(names(4))
    assert verified(world, ONE) == [0, 2]


def test_who_gave_shares_for_a_sum_that_failed_waits_for_its_total() -> None:
    """A site cannot tell whether enough others gave theirs."""
    world = ready(slots=5)
    total = world.run(0).evidence.total
    world.reveal(agreed(world, 1), names(2))
    refused_by(world, (ONE, TWO), TotalError, told(world, total.to_bytes(), 2))
    for name in (THREE, FOUR):
        told(world, total.to_bytes(), 2)(world.sites[name])


def test_what_is_lost_is_told() -> None:
    world = ready()
    world.run(0)
    site, kept = world.sites[ONE], dict(world.sites[ONE].kept)
    assert set(kept) == {"term-0"}
    site.kept = {}
    request = world.request(ONE, world.start(1))
    assert refused(StateError, site.mask, request, MIXED, world.term(ONE)).found == "nothing"
    site.kept = kept
    total = closed(world, 1)
    site.kept = {key: data for key, data in site.kept.items() if key != "term-1"}
    assert refused(StateError, site.reveal, asked(total)).what == "what this site kept of slot 1"


# Epochs ------------------------------------------------------------------------------------------


def test_no_new_epoch_before_the_last_total_that_was_told_is_verified() -> None:
    world = ready()
    world.run(0)
    assert world.evidence is not None
    world.evidence = changed(world.evidence, "update", 0, 4, 1)
    agreed(world, 1)
    later = replace(world.params, epoch=1).to_bytes()
    refused_by(world, names(4), TotalError, lambda site: site.advertise(later))


def test_a_seal_verifies_the_last_total_and_opens_the_way_to_the_next_epoch() -> None:
    world = ready(stored=True)
    last = world.run(0).evidence.total
    opened = world.seal(1)
    assert opened.groups == {"update": b"", "static": b""}
    assert all(verified(world, name) == [0] for name in names(4))
    entry = world.sites[ONE].entries[-2]
    assert entry == journal.TotalVerified(JOB, 0, 0, last.digest())
    later = replace(world.params, epoch=1)
    for site in world.sites.values():
        site.advertise(later.to_bytes())
        assert site.kept == {}, "nothing of the epoch before is asked for any more"


def test_a_seal_of_a_false_total_is_not_opened() -> None:
    world = ready()
    world.run(0)
    assert world.evidence is not None
    world.evidence = changed(world.evidence, "static", 0, 8, 1)
    seal = world.start(1, "seal", SumId(0, "seal-0"))
    world.contribute(seal, names(4), "seal")
    seal.close()
    world.agree(seal, names(4))
    refused_by(world, names(4), VerificationError, revealing(asked(seal)))


# The server's own side ---------------------------------------------------------------------------


def test_the_spool_has_terms_until_their_total_is_verified() -> None:
    world = ready(slots=4)
    world.run(0)
    slots = lambda: {slot for slot, _, _ in world.spool._kept}  # noqa: E731
    assert slots() == {0}
    total = agreed(world, 1)
    assert slots() == {0, 1}
    world.reveal(total, names(4))
    world.finish(total)
    assert slots() == {1}
    world.spool.erase(1)
    assert slots() == set()


def test_a_false_total_of_the_servers_own_is_no_silos_fault() -> None:
    world = ready()
    world.run(0)
    assert world.evidence is not None
    world.evidence = changed(world.evidence, "update", 0, 4, 1)
    total = agreed(world, 1)
    assert refused(VerificationError, total.reveal_request).blamed is None
    assert total._blamed == {}


# Any strategy ------------------------------------------------------------------------------------


@pytest.mark.whole
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_no_strategy_gets_shares_of_a_sum_that_rests_on_a_false_total(data: st.DataObject) -> None:
    """The server tells each site any total, asks with any receipts, agreements and proofs, in any order.

    Whatever it does, a site that gave shares had verified the total it was told; and what it verified is, in
    Python's integers, the sum of the terms of the total's silos.
    """
    world = ready(5, seed=0, slots=6)
    roster = names(5)
    told_totals: list[Evidence] = []
    for slot in range(5):
        truth = told_totals[-1:] or [None]
        lies: list[Evidence | None] = [*told_totals[:-1], None]
        if told_totals:
            last = told_totals[-1]
            lies += [changed(last, "update", 0, 4, 1), changed(last, "update", 24, 8, 2**63)]
            lies += [lied(last, survivors=last.total.survivors[:-1])]
        honest, same = data.draw(st.sampled_from([(False, True), (True, True), (False, False)]))
        gone = data.draw(st.sampled_from([(), (roster[4],), (roster[0],)]))
        here = [name for name in roster if name not in gone]
        uploads: dict[str, tuple[Evidence | None, bytes]] = {}
        common = data.draw(st.sampled_from([*lies[::-1], *truth]))
        for name in here:
            several = st.just(common) if same else st.sampled_from([common, common, *truth, *lies])
            choice = truth[0] if honest else data.draw(several)
            world.evidence = choice
            total = world.start(slot)
            try:
                raw = world.sites[name].mask(world.request(name, total), MIXED, world.term(name))
            except ProtocolError:
                continue
            uploads[name] = (choice, raw)
        chosen = [name for name in here if name in uploads]
        if len(chosen) < 4:
            continue
        choice = uploads[chosen[0]][0]
        world.evidence = choice
        total = world.start(slot)
        for name in chosen:
            with suppress(ProtocolError):
                total.add(name, uploads[name][1])
        if len(total.receipts) < 4:
            continue
        total.close()
        request = total.agreement_request().to_bytes()
        for name in data.draw(st.permutations(total.survivors)) if not total.full else ():
            with suppress(ProtocolError):
                total.add_agreement(name, world.sites[name].agree(request))
        requests = [asked(total)]
        with suppress(ProtocolError):
            requests.append(total.reveal_request().to_bytes())
        if choice is not None and len(choice.total.survivors) == len(choice.receipts):
            proofs = {name: choice.proof(name) for name in choice.total.survivors}
            requests.append(asked(total, missing=proofs, dropped=choice.seeds_of_dropped()))
        for name in data.draw(st.permutations(total.survivors)):
            raw = data.draw(st.sampled_from(requests)) if not honest else requests[-1]
            with suppress(ProtocolError):
                total.add_reveal(name, world.sites[name].reveal(raw))
        try:
            told_totals.append(total.open().evidence)
        except ProtocolError:
            assert not honest or len(total.revealers) < world.params.threshold
    true = {item.total.digest(): item.total for item in told_totals}
    for name in roster:
        for entry in world.sites[name].entries:
            if isinstance(entry, journal.TotalVerified):
                total_told: Total = true[entry.total]
                plain = world.plain(total_told.survivors)
                assert all(plain[group] == part for group, part in total_told.groups.items())
        state = world.sites[name].state
        for place, slot_state in enumerate(getattr(state, "slots", ())):
            if type(slot_state).__name__ == "Revealed":
                receipts = [e for e in world.sites[name].entries if isinstance(e, journal.Revealed)]
                assert any(entry.slot == place for entry in receipts)


def test_the_combinations_are_of_the_term_without_masks_of_dropped_sites() -> None:
    """What a site tells is what the server knows already: the opened sum's part of this site."""
    world = ready()
    world.run(0, drop_term=[FOUR])
    evidence = world.evidence
    assert evidence is not None
    total = agreed(world, 1)
    made = messages.challenge(world.session.session, evidence.total.told())
    layout = group_layout(MIXED, "update")
    for item in total.receipts:
        if item.name == FOUR:
            assert item.combinations == {}
            continue
        term = evidence.term(evidence.proof(item.name))
        assert item.combinations == {"update": combinations.combine(made, "update", layout, term["update"])}


@pytest.mark.many
def test_each_false_total_that_is_tried_has_bits_of_its_own() -> None:
    """Half of them are not seen by the first combination, a quarter by two: what it takes for 128 is 2**128.

    The server tries totals that are off by 1, 2, 3, ... in one element, as it does to find one that passes.
    """
    world = ready()
    world.run(0)
    evidence = world.evidence
    assert evidence is not None
    ground, session, tries = evidence.ground, bytes(32), 512
    leading = []
    for by in range(1, 2 * tries, 2):  # odd, so that one bit of each combination decides
        told = replace(changed(evidence, "update", 0, 4, by).total.told(), receipts=bytes(32))
        false = by.to_bytes(4, "little") + bytes(len(evidence.total.groups["update"]) - 4)
        term: dict[Group, bytes] = {"update": false, "static": bytes(len(evidence.total.groups["static"]))}
        made = ground.combine(messages.challenge(session, told), term)["update"]
        shown = [made[4 * place : 4 * place + 4] != bytes(4) for place in range(combinations.COUNT)]
        leading.append(next(place for place, seen in enumerate(shown) if seen))
    assert len(leading) == tries
    for vanishing, least, most in ((1, 0.42, 0.58), (2, 0.18, 0.32), (4, 0.03, 0.1)):
        assert least < sum(place >= vanishing for place in leading) / tries < most
    assert max(leading) < 24


def test_a_group_that_a_silo_kept_shut_is_in_no_total_whoever_opened_it() -> None:
    """Not even for a server that has the static seed, from t others who gave their shares."""
    world = ready()
    seed = slot_secret(world.sites[ONE].state.secrets[0], "static", "self").expose()
    total = world.run(0, drop_term=[FOUR]).evidence.total
    request = TermRequest.from_bytes(world.request(ONE, world.start(1)))
    more = replace(total, groups={**total.groups, "static": bytes(32)})
    seeds = {ONE: {**request.seeds[ONE], "static": seed}}
    raw = replace(request, total=more.to_bytes(), seeds=seeds).to_bytes()
    error = refused(TotalError, world.sites[ONE].mask, raw, MIXED, world.term(ONE))
    assert "['update'], for which this site gave its shares" in error.expected


def test_an_epoch_follows_one_in_which_no_total_was_told_unless_shares_were_given() -> None:
    world = ready()
    later = replace(world.params, epoch=1).to_bytes()
    total = agreed(world, 0)
    world.sites[ONE].advertise(later)
    others = names(4)[1:]
    world.reveal(total, others)
    refused_by(world, others, TotalError, lambda site: site.advertise(later))


def test_a_silo_gives_no_shares_for_a_smaller_set_that_it_did_not_sign() -> None:
    """Not even if everybody else signed it, and somebody in its name."""
    world = ready(5)
    total = closed(world)
    fewer = total.receipts[:4]
    given = tuple(signed_agreement(world, name, fewer) for name in names(4))
    error = refused(SurvivorsError, world.sites[ONE].reveal, asked(total, receipts=fewer, agreements=given))
    assert error.expected == "signed by this site"
