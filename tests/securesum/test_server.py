"""The server relays and adds only what it has checked, and says who is to blame for the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import ready, refused
from tests.support.securesum.protocol import BASIS, MIXED, World, make_params, names, signer, verifier

from tightframe.securesum import shamir
from tightframe.securesum.checks import masked_hash
from tightframe.securesum.errors import (
    InconsistencyError,
    KeyAgreementError,
    MessageError,
    ParametersError,
    RecoveryError,
    ReplayError,
    RosterError,
    ShareError,
    SignatureError,
    StateError,
    SurvivorsError,
)
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    Agreement,
    Confirmation,
    Masked,
    Reveal,
    SumId,
)
from tightframe.securesum.primitives import KEY_BYTES, Random, ed25519_sign
from tightframe.securesum.server import Enrolment, Session, Sum
from tightframe.securesum.site.state import slot_share

ONE, TWO, THREE, FOUR = names(4)


# Enrolment ---------------------------------------------------------------------------------------


def advertised(sites: int = 4) -> tuple[World, dict[str, bytes]]:
    world = World(sites)
    return world, {name: site.advertise(world.params.to_bytes()) for name, site in world.sites.items()}


def test_enrolment_waits_for_the_whole_roster() -> None:
    world, raw = advertised()
    enrolment = Enrolment(world.params, verifier=verifier())
    for name in (THREE, ONE, FOUR):
        enrolment.add(name, raw[name])
    assert enrolment.missing == [TWO]
    assert enrolment.applications == {name: f"weight of {name}".encode() for name in (ONE, THREE, FOUR)}
    assert list(enrolment.applications) == [ONE, THREE, FOUR]
    with pytest.raises(StateError, match="site-002"):
        enrolment.relay()
    enrolment.add(TWO, raw[TWO])
    assert enrolment.relay() == Advertisements(tuple(raw[name] for name in names(4)))


def test_what_enrolment_refuses_it_does_not_take() -> None:
    world, raw = advertised()
    enrolment = Enrolment(world.params, verifier=verifier())
    enrolment.add(ONE, raw[ONE])
    one, two = (Advertisement.from_bytes(raw[name], slots=3) for name in (ONE, TWO))
    for kind, site, message, blamed in (
        (RosterError, "site-005", raw[TWO], None),
        (RosterError, TWO, raw[THREE], TWO),
        (ReplayError, ONE, raw[ONE], ONE),
        (MessageError, TWO, raw[TWO][:-1], TWO),
        (MessageError, TWO, raw[TWO] + b"\x00", TWO),
        (SignatureError, TWO, replace(two, application=b"other").to_bytes(), TWO),
    ):
        assert refused(kind, enrolment.add, site, message).blamed == blamed
    reflected = replace(two, channel_key=one.channel_key)
    signature = signer(TWO).sign(reflected.signed(world.params.digest()))
    error = refused(KeyAgreementError, enrolment.add, TWO, replace(reflected, signature=signature).to_bytes())
    assert error.blamed == TWO
    assert "site-001" in error.found
    assert enrolment.missing == [TWO, THREE, FOUR]
    enrolment.add(TWO, raw[TWO])
    assert enrolment.missing == [THREE, FOUR]


def test_an_advertisement_of_another_job_or_epoch_is_refused() -> None:
    for overrides in ({"epoch": 1}, {"job": "job-2"}, {"threshold": 4}, {"slots": 2}):
        raw = advertised()[1]
        other = Enrolment(make_params(4, **overrides), verifier=verifier())
        kind = MessageError if "slots" in overrides else SignatureError
        assert refused(kind, other.add, ONE, raw[ONE]).blamed == ONE


# Session -----------------------------------------------------------------------------------------


def confirmed() -> tuple[World, Session, dict[str, bytes]]:
    world = World(4)
    shown = world.enroll()
    raw = {name: site.confirm(shown.to_bytes()) for name, site in world.sites.items()}
    return world, Session(world.params, shown), raw


def test_a_session_waits_for_everybody() -> None:
    world, session, raw = confirmed()
    session.add(TWO, raw[TWO])
    assert session.missing == [ONE, THREE, FOUR]
    with pytest.raises(StateError, match="site-003"):
        session.setup_for(ONE)
    for name in (ONE, THREE, FOUR):
        session.add(name, raw[name])
    assert session.session == world.sites[ONE].state.session
    assert list(session.setup_for(ONE).dealt) == list(names(4))
    assert session.setup_for(ONE).dealt[ONE].box == b""


def test_a_session_needs_the_rosters_advertisements() -> None:
    world, raw = advertised()
    refused(RosterError, Session, world.params, Advertisements(tuple(raw[name] for name in names(3))))


def test_what_a_session_refuses_it_does_not_take() -> None:
    _, session, raw = confirmed()
    session.add(ONE, raw[ONE])
    two = Confirmation.from_bytes(raw[TWO], slots=3)
    hashes, boxes = dict(two.hashes), dict(two.boxes)
    less = {name: part for name, part in hashes.items() if name != TWO}
    for kind, site, message, blamed in (
        (RosterError, "site-005", raw[TWO], None),
        (RosterError, TWO, raw[THREE], TWO),
        (ReplayError, ONE, raw[ONE], ONE),
        (MessageError, TWO, raw[TWO][1:], TWO),
        (MessageError, TWO, replace(two, hashes=less).to_bytes(), TWO),
        (MessageError, TWO, replace(two, hashes={**less, "site-005": hashes[TWO]}).to_bytes(), TWO),
        (MessageError, TWO, replace(two, boxes={**boxes, TWO: boxes[ONE]}).to_bytes(), TWO),
        (SignatureError, TWO, replace(two, hashes={**hashes, ONE: hashes[TWO]}).to_bytes(), TWO),
        (SignatureError, TWO, replace(two, hashes_signature=bytes(64)).to_bytes(), TWO),
        (SignatureError, TWO, replace(two, ready=two.hashes_signature).to_bytes(), TWO),
    ):
        assert refused(kind, session.add, site, message).blamed == blamed
    assert session.missing == [TWO, THREE, FOUR]


def test_a_site_that_saw_other_advertisements_is_not_ready_for_this_session() -> None:
    world, session, _ = confirmed()
    other = ready(seed="another")
    raw = other.sites[TWO]
    again = World(4, seed="another")
    site = again.sites[TWO]
    site.random = raw.random
    again.enroll()
    strange = site.confirm(again.enrolment.relay().to_bytes())
    assert refused(SignatureError, session.add, TWO, strange).blamed == TWO
    assert world.params == again.params


# A sum: terms ------------------------------------------------------------------------------------


def start(world: World, **changes: Any) -> Sum:
    values = {"slot": 0, "sum_id": SumId(0, "train-0"), "schema": "train", "basis": BASIS}
    return Sum(world.session, **{**values, "spool": world.spool, **changes})


def term(world: World, name: str, total: Sum) -> bytes:
    return world.sites[name].mask(world.request(name, total), MIXED, world.term(name))


def signed_term(world: World, name: str, masked: Masked, **changes: Any) -> bytes:
    """A term with a receipt that its site would never sign, signed with its key."""
    receipt = replace(masked.receipt, **changes)
    signature = ed25519_sign(world.sites[name].state.signing, receipt.signed(world.session.session))
    return replace(masked, receipt=replace(receipt, signature=signature)).to_bytes()


@pytest.mark.parametrize("changes", [{"slot": 3}, {"slot": -1}, {"schema": "other"}])
def test_a_sum_is_of_the_epochs_parameters(changes: dict[str, Any]) -> None:
    refused(ParametersError, lambda: start(ready(), **changes))


def test_a_term_is_checked_before_any_of_it_is_added() -> None:
    world = ready()
    total = start(world)
    raw = term(world, TWO, total)
    masked = Masked.from_bytes(raw)
    short = replace(masked, static=masked.static[:-1])
    long = replace(masked, update=masked.update + bytes(4))
    total.add(ONE, term(world, ONE, total))
    three = Masked.from_bytes(term(world, THREE, total))
    for kind, message in (
        (MessageError, raw[:-1]),
        (RosterError, three.to_bytes()),
        (SignatureError, replace(masked, receipt=replace(three.receipt, name=TWO)).to_bytes()),
        (SignatureError, replace(masked, receipt=replace(masked.receipt, slot=1)).to_bytes()),
        (InconsistencyError, replace(masked, update=three.update).to_bytes()),
        (InconsistencyError, replace(masked, static=three.static).to_bytes()),
        (InconsistencyError, signed_term(world, TWO, masked, slot=1)),
        (InconsistencyError, signed_term(world, TWO, masked, sum_id=SumId(1, "train-0"))),
        (InconsistencyError, signed_term(world, TWO, masked, basis=bytes(32))),
        (InconsistencyError, signed_term(world, TWO, masked, total=bytes(31) + b"1")),
        (InconsistencyError, signed_term(world, TWO, masked, pairs=three.receipt.pairs)),
        (MessageError, signed_term(world, TWO, short, static=masked_hash(short.static, short.links))),
        (MessageError, signed_term(world, TWO, long, update=masked_hash(long.update, long.links))),
        (InconsistencyError, replace(masked, links=masked.links[::-1]).to_bytes()),
        *(
            (
                MessageError,
                signed_term(
                    world,
                    TWO,
                    replace(masked, links=links),
                    update=masked_hash(masked.update, links),
                    static=masked_hash(masked.static, links),
                ),
            )
            for links in (b"", masked.links[:-1], masked.links + bytes(64))
        ),
    ):
        assert refused(kind, total.add, TWO, message).blamed == TWO
    assert refused(RosterError, total.add, "site-005", raw).blamed is None
    total.add(TWO, raw)
    assert refused(ReplayError, total.add, TWO, raw).blamed == TWO
    assert not total.full
    total.add(THREE, three.to_bytes())
    total.add(FOUR, term(world, FOUR, total))
    assert total.full
    total.close()
    world.agree(total, names(4))
    world.reveal(total, names(4))
    assert total.open().groups == world.plain(names(4))


def test_a_receipt_of_another_session_is_refused() -> None:
    world, other = ready(), ready(seed="another")
    assert refused(SignatureError, start(world).add, ONE, term(other, ONE, start(other))).blamed == ONE


def test_no_term_comes_after_the_survivors_were_named() -> None:
    world = ready()
    total = start(world)
    world.contribute(total, names(3))
    late = term(world, FOUR, total)
    assert total.close() == names(3)
    refused(StateError, total.add, FOUR, late)
    assert not total.full


def test_too_few_terms_can_wait_for_more() -> None:
    world = ready()
    total = start(world)
    world.contribute(total, [THREE, ONE])
    error = refused(SurvivorsError, total.close)
    assert error.found == "2"
    for call in (total.agreement_request, total.reveal_request, total.open):
        refused(StateError, call)
    for call in (total.add_agreement, total.add_reveal):
        refused(StateError, call, ONE, b"")
    world.contribute(total, [TWO])
    assert total.close() == names(3)


# A sum: agreement --------------------------------------------------------------------------------


def dropped(sites: int = 4) -> tuple[World, Sum]:
    """A closed sum without its last site."""
    world = ready(sites)
    total = start(world)
    world.contribute(total, names(sites)[:-1])
    total.close()
    return world, total


def test_nobody_agrees_if_nobody_dropped_out() -> None:
    world = ready()
    total = start(world)
    world.contribute(total, names(4))
    total.close()
    for site in world.sites.values():
        refused(SurvivorsError, site.agree, total.agreement_request().to_bytes())
    assert [item.name for item in total.reveal_request().receipts] == list(names(4))
    assert total.reveal_request().agreements == ()


def test_t_survivors_agree_after_a_drop_out() -> None:
    world = ready(5)
    total = start(world)
    world.contribute(total, names(4))
    total.close()
    refused(RecoveryError, total.reveal_request)
    world.agree(total, names(3))
    refused(RecoveryError, total.reveal_request)
    late = world.sites[FOUR].agree(total.agreement_request().to_bytes())
    total.add_agreement(FOUR, late)
    assert [item.name for item in total.reveal_request().agreements] == list(names(4))
    assert "late" in refused(StateError, total.add_agreement, FOUR, late).found


def test_agreements_are_checked() -> None:
    world, total = dropped()
    request = total.agreement_request().to_bytes()
    raw = {name: world.sites[name].agree(request) for name in names(3)}
    one = Agreement.from_bytes(raw[ONE])
    for kind, site, message, blamed in (
        (RosterError, "site-005", raw[ONE], None),
        (RosterError, ONE, raw[TWO], ONE),
        (MessageError, ONE, raw[ONE][:-1], ONE),
        (SurvivorsError, FOUR, replace(one, name=FOUR).to_bytes(), FOUR),
        (InconsistencyError, ONE, replace(one, slot=1).to_bytes(), ONE),
        (SignatureError, ONE, replace(one, signature=bytes(64)).to_bytes(), ONE),
        (SignatureError, TWO, replace(one, name=TWO).to_bytes(), TWO),
    ):
        assert refused(kind, total.add_agreement, site, message).blamed == blamed
    error = refused(RecoveryError, total.reveal_request)
    assert (error.expected, error.found) == ("at least 3", "0")
    total.add_agreement(ONE, raw[ONE])
    assert refused(ReplayError, total.add_agreement, ONE, raw[ONE]).blamed == ONE
    total.add_agreement(THREE, raw[THREE])
    refused(RecoveryError, total.reveal_request)
    total.add_agreement(TWO, raw[TWO])
    assert [item.name for item in total.reveal_request().agreements] == list(names(3))


# A sum: reveals ----------------------------------------------------------------------------------


def resigned(world: World, reveal: Reveal, **changes: Any) -> bytes:
    item = replace(reveal, **changes)
    signature = ed25519_sign(world.sites[reveal.name].state.signing, item.signed(world.session.session))
    return replace(item, signature=signature).to_bytes()


def flip(share: bytes, at: int) -> bytes:
    return share[:at] + bytes([share[at] ^ 1]) + share[at + 1 :]


@pytest.mark.parametrize("group", ["update", "static"])
@pytest.mark.parametrize("at", [0, 16, 47])
def test_a_bad_share_names_its_revealer_and_does_no_harm(group: str, at: int) -> None:
    world = ready()
    total = start(world)
    world.contribute(total, names(4))
    total.close()
    world.agree(total, names(4))
    request = total.reveal_request().to_bytes()
    raw = {name: world.sites[name].reveal(request) for name in names(4)}
    two = Reveal.from_bytes(raw[TWO])
    shares = dict(getattr(two, group))
    shares[THREE] = flip(shares[THREE], at)
    error = refused(ShareError, total.add_reveal, TWO, resigned(world, two, **{group: shares}))
    assert error.blamed == TWO
    assert f"the {group} share of site-003 that site-002 revealed" in error.what
    for name in (ONE, THREE):
        total.add_reveal(name, raw[name])
    assert refused(RecoveryError, total.open).found == "2"
    total.add_reveal(FOUR, raw[FOUR])
    opened = total.open()
    assert opened.groups == world.plain(names(4))
    assert opened.blamed == {TWO: "TF-607"}
    refused(StateError, total.open)


def test_reveals_are_checked() -> None:
    world, total = dropped(5)
    world.agree(total, names(4))
    request = total.reveal_request().to_bytes()
    raw = {name: world.sites[name].reveal(request) for name in names(4)}
    one, two = Reveal.from_bytes(raw[ONE]), Reveal.from_bytes(raw[TWO])
    update = dict(one.update)
    less = {name: share for name, share in update.items() if name != THREE}
    swapped = {**update, TWO: update[THREE], THREE: update[TWO]}
    for kind, site, message, blamed in (
        (RosterError, "site-006", raw[ONE], None),
        (RosterError, ONE, raw[TWO], ONE),
        (MessageError, ONE, raw[ONE][:-1], ONE),
        (SurvivorsError, "site-005", replace(one, name="site-005").to_bytes(), "site-005"),
        (InconsistencyError, ONE, resigned(world, one, slot=1), ONE),
        (SignatureError, ONE, replace(one, update=two.update).to_bytes(), ONE),
        (SignatureError, ONE, replace(one, signature=two.signature).to_bytes(), ONE),
        (MessageError, ONE, resigned(world, one, update=less), ONE),
        (MessageError, ONE, resigned(world, one, update={**less, "site-006": update[THREE]}), ONE),
        (MessageError, ONE, resigned(world, one, static=less), ONE),
        (ShareError, ONE, resigned(world, one, update=swapped), ONE),
        (ShareError, ONE, resigned(world, one, update=dict(two.update)), ONE),
        (ShareError, ONE, resigned(world, one, static=update), ONE),
    ):
        assert refused(kind, total.add_reveal, site, message).blamed == blamed
    for name in names(4):
        total.add_reveal(name, raw[name])
    assert refused(ReplayError, total.add_reveal, ONE, raw[ONE]).blamed == ONE
    opened = total.open()
    assert opened.groups == {"update": world.plain(names(4))["update"]}
    # The last refusal counts; a second message of a site is no reveal and blames nobody.
    assert opened.blamed == {ONE: "TF-607", "site-005": "TF-611"}


def test_the_other_kind_of_share_is_no_share_of_this_sum() -> None:
    """A survivor's share of a matches a hash that its dealer signed, but not the one that is asked for."""
    world, total = dropped(5)
    world.agree(total, names(4))
    site = world.sites[ONE]
    held = site.state.slots[0].shares
    one = Reveal.from_bytes(site.reveal(total.reveal_request().to_bytes()))
    forged = {**one.update, TWO: slot_share(held, 1, "update", "pair")}
    error = refused(ShareError, total.add_reveal, ONE, resigned(world, one, update=forged))
    assert "site-002" in error.what


def liar(dealer: World, name: str, position: int) -> None:
    """Make a site deal shares of another secret than the one that it advertised, and sign them."""
    state = dealer.sites[name].state
    secrets = list(state.secrets)
    secrets[0] = type(secrets[0])(flip(secrets[0].expose(), position * KEY_BYTES + 1))
    dealer.sites[name].state = replace(state, secrets=tuple(secrets))


@pytest.mark.parametrize(("position", "gone"), [(0, False), (2, False), (1, True)])
def test_a_dealer_that_dealt_another_secret_is_named(position: int, gone: bool) -> None:
    """Positions of a slot's secrets: b and a of update, b and a of static."""
    world = World(4)
    shown = world.enroll()
    liar(world, FOUR, position)
    world.confirm(shown)
    total = start(world)
    here = names(3) if gone else names(4)
    world.contribute(total, here)
    total.close()
    world.agree(total, here)
    world.reveal(total, here)
    assert not world.refused
    error = refused(RecoveryError, total.open)
    assert error.blamed == FOUR
    assert "shares that it signed" in error.found


def test_a_dealer_whose_shares_lie_on_no_one_polynomial_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4)
    shown = world.enroll()
    whole = shamir.split_many

    def crooked(secrets: Any, *, threshold: int, holders: int, random: Random) -> Any:
        shares = whole(secrets, threshold=threshold, holders=holders, random=random).copy()
        shares[1, 0] ^= 1
        return shares

    world.session = Session(world.params, shown)
    for name, site in world.sites.items():
        with monkeypatch.context() as patch:
            if name == FOUR:
                patch.setattr("tightframe.securesum.site.setup.split_many", crooked)
            world.session.add(name, site.confirm(shown.to_bytes()))
    total = start(world)
    world.contribute(total, names(4))
    total.close()
    world.agree(total, names(4))
    world.reveal(total, names(3))
    assert refused(RecoveryError, total.open).blamed == FOUR


def test_what_is_public_of_a_sum_and_of_a_session() -> None:
    world = ready(5, epoch=7)
    assert list(world.session.ready) == list(names(5))
    total = start(world)
    assert (total.epoch, total.survivors, total.receipts, total.revealers) == (7, (), (), ())
    world.contribute(total, [FOUR, TWO, ONE, THREE])
    assert [item.name for item in total.receipts] == list(names(4))
    assert total.close() == total.survivors == names(4)
    world.agree(total, [FOUR, THREE, ONE, TWO])
    assert [item.name for item in total.agreements] == list(names(4))
    world.reveal(total, [THREE, ONE])
    assert total.revealers == (ONE, THREE)


def test_repr_of_what_was_opened_shows_no_total() -> None:
    opened = ready().run(0)
    assert "groups" not in repr(opened)
    assert "site-001" in repr(opened)
