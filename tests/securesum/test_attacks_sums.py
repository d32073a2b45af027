"""Attacks on one sum: receipts, slots, survivor sets, shares. The server does what it likes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.securesum.hostile import (
    agreed,
    agreeing,
    closed,
    names,
    ready,
    refused,
    refused_by,
    revealing,
    session_key,
    signed_agreement,
    signed_receipt,
)
from tests.support.securesum.protocol import MIXED, World

from tightframe.securesum import rules
from tightframe.securesum.errors import (
    InconsistencyError,
    ProtocolError,
    RecoveryError,
    ReplayError,
    ShareError,
    SignatureError,
    StateError,
    SurvivorsError,
)
from tightframe.securesum.messages import (
    GROUPS,
    Agreement,
    Masked,
    Receipt,
    Reveal,
    SumId,
    TermRequest,
)
from tightframe.securesum.primitives import ed25519_sign
from tightframe.securesum.site.state import slot_share

ONE, TWO, THREE, FOUR = names(4)


# Receipts ----------------------------------------------------------------------------------------


def receipts_of(kind: str, world: World, receipts: tuple[Receipt, ...]) -> tuple[Receipt, ...]:
    """The receipts of three survivors with the third one's replaced; the fourth plays along."""
    if kind == "forged":
        bad = replace(receipts[2], update=bytes(32))
    elif kind == "borrowed":
        bad = replace(receipts[1], name=THREE)
    elif kind == "a stranger's":
        bad = signed_receipt(world, replace(receipts[2], name=FOUR))
        bad = replace(bad, name="site-005")
    elif kind == "another session's":
        other = ready(seed="other")
        bad = closed(other, missing=(FOUR,)).receipts[2]
    elif kind == "another round's":
        bad = signed_receipt(world, receipts[2], sum_id=SumId(7, "train-0"))
    elif kind == "another slot's":
        bad = signed_receipt(world, receipts[2], slot=1)
    else:
        assert kind == "of another model"
        bad = signed_receipt(world, receipts[2], basis=bytes(32))
    return (*receipts[:2], bad)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("forged", SignatureError),
        ("borrowed", SignatureError),
        ("a stranger's", SurvivorsError),
        ("another session's", SignatureError),
        ("another round's", InconsistencyError),
        ("another slot's", InconsistencyError),
        ("of another model", InconsistencyError),
    ],
)
def test_a_bad_receipt_is_refused_before_anything_is_signed_or_revealed(
    kind: str, error: type[ProtocolError]
) -> None:
    world = ready()
    total = closed(world, missing=(FOUR,))
    receipts = receipts_of(kind, world, total.receipts)
    for handler in (agreeing(0, receipts), revealing(0, receipts)):
        refused_by(world, (ONE, TWO), error, handler)
    world.agree(total, names(3))
    refused_by(world, (ONE, TWO), error, revealing(0, receipts, total.agreements))


def test_another_model_for_one_site_is_refused_by_all() -> None:
    """Gradient inversion with a model made for one victim: the others' receipts give it away."""
    world = ready()
    total = world.start(0)
    receipts = []
    for name in names(4):
        shown = bytes(32) if name == TWO else total.basis
        raw = world.sites[name].mask(world.request(name, total), MIXED, world.term(name), shown)
        receipts.append(Masked.from_bytes(raw).receipt)
        if name == TWO:  # an honest server, by whose mistake this came about, notices too
            assert refused(InconsistencyError, total.add, name, raw).blamed == TWO
    refused_by(world, names(4), InconsistencyError, revealing(0, receipts))
    refused_by(world, names(3), InconsistencyError, agreeing(0, receipts[:3]))


def test_a_term_of_another_site_with_equal_hashes_counts_for_nobody_else() -> None:
    """A malicious site sends another's masked bytes as its own: it masks nothing of that site's."""
    world = ready()
    total = world.start(0)
    world.contribute(total, names(3))
    stolen = replace(total.receipts[0], name=FOUR)
    world.sites[FOUR].mask(world.request(FOUR, total), MIXED, world.term(FOUR))
    signed = signed_receipt(world, stolen)
    assert signed.update == total.receipts[0].update
    receipts = (*total.receipts, signed)
    reveal = revealing(0, receipts)
    shares = [Reveal.from_bytes(reveal(world.sites[name])).update for name in names(3)]
    # Every survivor's b comes out, as in any sum; pair masks stay, because no s does.
    assert all(set(item) == set(names(4)) for item in shares)
    held = world.sites[FOUR].state.slots[0].shares
    assert not any(slot_share(held, place, "update", "pair") in shares for place in range(4))


# Slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_a_slot_is_used_once_also_after_a_restart(stored: bool) -> None:
    world = ready(stored=stored)
    for slot in (0, 1):
        world.run(slot)
    other = SumId(5, "train-0", 3)
    for slot in (0, 1):
        request = TermRequest(slot, other, "train").to_bytes()
        refused_by(
            world, names(4), ReplayError, lambda site, r=request: site.mask(r, MIXED, world.term(site.name))
        )
    again = TermRequest(2, SumId(0, "train-0"), "train").to_bytes()
    refused_by(world, names(4), ReplayError, lambda site: site.mask(again, MIXED, world.term(site.name)))


def test_a_crash_between_journal_and_send_loses_the_slot_and_nothing_else() -> None:
    """The journal has the entry, the state is the old one: the same masks must not cover another term."""
    world = ready(stored=True)
    for stage in ("first", "later"):
        slot = 0 if stage == "first" else 2
        total = world.start(slot, sum_id=SumId(slot, "x"))
        site = world.sites[ONE]
        before, request = site.state, world.request(ONE, total)
        site.mask(request, MIXED, world.term(ONE))
        site.state = type(before).from_bytes(before.to_bytes())  # what the disk had
        refused(ReplayError, site.mask, request, MIXED, world.term(ONE))
        refused(
            ReplayError,
            site.mask,
            request,
            MIXED,
            {group: bytes(len(world.term(ONE)[group])) for group in GROUPS},
        )
        if stage == "first":
            opened = world.run(1, sum_id=SumId(1, "x"))
            assert opened.groups == world.plain(names(4))


def test_two_slots_of_one_vector_share_no_mask() -> None:
    """With one vector in two slots, the difference of what was sent tells nothing."""
    long = tuple(replace(item, shape=(512,)) for item in MIXED)
    sent: list[Masked] = []
    world = ready(3, schemas={"train": long})
    for slot in (0, 1):
        total = world.start(slot)
        for name in names(3):
            raw = world.sites[name].mask(world.request(name, total), long, world.term(name))
            sent += [Masked.from_bytes(raw)] * (name == ONE)
    for group in GROUPS:
        one, two = (getattr(item, group) for item in sent)
        blocks = [one[at : at + 16] != two[at : at + 16] for at in range(0, len(one), 16)]
        assert len(blocks) >= 100
        assert all(blocks)


# Survivor sets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", range(3, 13))
def test_no_two_survivor_sets_both_reach_enough_honest_signers(sites: int) -> None:
    """By counting: each honest site answers for one set, each colluder for both."""
    for colluders in range(1, sites - 1):
        least = rules.threshold(sites, colluders)
        for threshold in range(least, sites + 1):
            honest = sites - colluders
            both = [
                split
                for split in range(honest + 1)
                if split + colluders >= threshold and honest - split + colluders >= threshold
            ]
            assert not both, (sites, colluders, threshold)
        # One less would not do wherever the bound is what decides.
        if 2 * (least - 1) <= sites + colluders:
            honest = sites - colluders
            need = max(0, least - 1 - colluders)
            assert 2 * need <= honest


@pytest.mark.parametrize("sites", [4, 5, 7])
def test_two_survivor_sets_at_two_halves_of_the_sites_open_neither(sites: int) -> None:
    world = ready(sites, stored=True)
    receipts = closed(world).receipts
    roster = names(sites)
    sets = (receipts[:-1], (receipts[0], *receipts[2:]))
    halves: tuple[dict[str, Agreement], dict[str, Agreement]] = ({}, {})
    for place, name in enumerate(roster):
        which = place % 2
        chosen = sets[which]
        if name in {item.name for item in chosen}:
            raw = agreeing(0, chosen)(world.sites[name])
            halves[which][name] = Agreement.from_bytes(raw)
            refused_by(world, (name,), SurvivorsError, agreeing(0, sets[1 - which]))
            refused_by(world, (name,), SurvivorsError, revealing(0, receipts))
    for which in (0, 1):
        assert len(halves[which]) < world.params.threshold
        for name in halves[which]:
            handler = revealing(0, sets[which], halves[which].values())
            refused_by(world, (name,), SurvivorsError, handler)
            joined = {key: value for key, value in {**halves[1 - which], **halves[which]}.items()}
            here = {item.name for item in sets[which]}
            handler = revealing(0, sets[which], [joined[key] for key in joined if key in here])
            with pytest.raises((SurvivorsError, SignatureError)):
                handler(world.sites[name])


def test_a_survivor_set_has_one_form() -> None:
    world = ready(5)
    receipts = closed(world).receipts[:4]
    for wrong in (
        receipts[::-1],
        (receipts[1], receipts[0], *receipts[2:]),
        (*receipts, receipts[3]),
        (receipts[0], receipts[0], *receipts[1:]),
    ):
        for handler in (agreeing(0, wrong), revealing(0, wrong)):
            refused_by(world, (ONE, TWO), SurvivorsError, handler)


def test_agreements_of_another_slot_sum_or_epoch_are_no_agreements() -> None:
    world, later = ready(), ready(epoch=1, seed="later")
    agreements: dict[str, list[Agreement]] = {}
    for slot in (0, 1):
        total = agreed(world, slot, (FOUR,))
        agreements[f"slot {slot}"] = [replace(item, slot=1) for item in total.agreements]
    agreements["epoch 1"] = list(agreed(later, 1, (FOUR,)).agreements)
    receipts = total.receipts
    for kind, changes in (
        ("try 1", {"sum_id": SumId(1, "train-0", 1)}),
        ("other receipts", {"receipts": bytes(32)}),
        ("other survivors", {"survivors": names(4)}),
    ):
        agreements[kind] = [signed_agreement(world, name, receipts, **changes) for name in names(3)]
    for kind in sorted(set(agreements) - {"slot 1"}):
        refused_by(world, (ONE, TWO), SignatureError, revealing(1, receipts, agreements[kind]))
    of_slot_0 = [signed_agreement(world, name, receipts, slot=0) for name in names(3)]
    refused_by(world, (ONE, TWO), InconsistencyError, revealing(1, receipts, of_slot_0))
    # One true signature does not stand for three.
    own = agreements["slot 1"]
    copies = [replace(own[0], name=name) for name in names(3)]
    refused_by(world, (ONE,), SignatureError, revealing(1, receipts, copies))
    refused_by(world, (ONE,), SurvivorsError, revealing(1, receipts, [own[0]] * 3))
    world.reveal(total, names(3))
    assert total.open().groups == {"update": world.plain(names(3))["update"]}


def test_below_the_threshold_nothing_is_signed_or_revealed() -> None:
    world = ready(7, stored=True)  # t = 5
    total = world.start(0)
    world.contribute(total, names(4))
    refused(SurvivorsError, total.close)
    for count in (1, 2, 3, 4):
        chosen = total.receipts[:count]
        refused_by(world, names(count), SurvivorsError, agreeing(0, chosen))
        refused_by(world, names(count), SurvivorsError, revealing(0, chosen))


@pytest.mark.parametrize("missing", [(), (FOUR,)])
def test_below_the_threshold_of_reveals_nothing_is_opened(missing: tuple[str, ...]) -> None:
    world = ready()
    total = closed(world, 0, missing)
    here = [name for name in names(4) if name not in missing]
    world.agree(total, here)
    world.reveal(total, here[:2])
    masked = {group: total._totals[group].to_bytes() for group in GROUPS}
    assert refused(RecoveryError, total.open).found == "2"
    assert {group: total._totals[group].to_bytes() for group in GROUPS} == masked


# Shares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [(), ("site-005",)])
def test_one_tampered_reveal_is_survived_and_the_revealer_named(missing: tuple[str, ...]) -> None:
    world = ready(5)  # t = 4
    total = closed(world, 0, missing)
    here = [name for name in names(5) if name not in missing]
    world.agree(total, here)
    if missing:
        assert len(here) == world.params.threshold
    request = total.reveal_request().to_bytes()
    for name in here:
        raw = world.sites[name].reveal(request)
        item = Reveal.from_bytes(raw)
        if name == TWO:
            bad = replace(item, update={**item.update, ONE: bytes(48)})
            signature = ed25519_sign(session_key(world, TWO), bad.signed(world.session.session))
            error = refused(ShareError, total.add_reveal, TWO, replace(bad, signature=signature).to_bytes())
            assert error.blamed == TWO
            if not missing:
                continue  # t + 1 reveals: one may be lost
        total.add_reveal(name, raw)
    opened = total.open()
    assert opened.blamed == {TWO: "TF-607"}
    assert opened.groups["update"] == world.plain(here)["update"]


def test_a_sum_opens_only_with_what_the_dealers_dealt_in_this_slot() -> None:
    """Shares of another slot, group or kind are real shares, signed by their dealers, and fit nothing."""
    world = ready()
    total = agreed(world)
    held = world.sites[ONE].state.slots
    item = Reveal.from_bytes(world.sites[ONE].reveal(total.reveal_request().to_bytes()))
    for slot, group, kind in ((1, "update", "self"), (0, "static", "self"), (0, "update", "pair")):
        share = slot_share(held[slot].shares, 2, group, kind)  # type: ignore[arg-type]
        bad = replace(item, update={**item.update, THREE: share})
        signature = ed25519_sign(session_key(world, ONE), bad.signed(world.session.session))
        refused(ShareError, total.add_reveal, ONE, replace(bad, signature=signature).to_bytes())


def test_a_slot_given_up_gives_nothing_any_more() -> None:
    """Neither later in the epoch nor after a restart: what was not asked for in time is gone."""
    world = ready(stored=True)
    lost = closed(world)
    assert world.run(1).groups == world.plain(names(4))
    refused_by(world, names(4), StateError, revealing(0, lost.receipts))
    refused_by(world, names(4), StateError, agreeing(0, lost.receipts[:3]))
    for site in world.sites.values():
        assert type(site.state.slots[0]).__name__ == "Abandoned"
