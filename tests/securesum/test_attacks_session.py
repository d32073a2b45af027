"""Attacks on an epoch's setup: split views, other settings, boxes that are another's or another time's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import (
    make_params,
    names,
    opened_box,
    ready,
    refused,
    refused_by,
    resealed_box,
    session_key,
    signed_advertisement,
    signer,
    verifier,
)
from tests.support.securesum.protocol import MIXED, World

from tightframe.securesum import messages
from tightframe.securesum.checks import box_bound, box_key
from tightframe.securesum.errors import (
    InconsistencyError,
    MessageError,
    ParametersError,
    ReplayError,
    RosterError,
    ShareError,
    SignatureError,
    StateError,
)
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    Confirmation,
    Dealt,
    FieldSpec,
    Params,
    Setup,
    TermRequest,
)
from tightframe.securesum.primitives import ed25519_sign, kem_decapsulate, open_sealed, x25519
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.server import Enrolment, Session

ONE, TWO, THREE, FOUR = names(4)


def first_request(world: World, name: str, change: Any = lambda parts: parts) -> bytes:
    """The first request of an epoch, with what was dealt to a site altered on its way."""
    total = world.start(0)
    request = TermRequest.from_bytes(world.request(name, total))
    setup = Setup.from_bytes(request.setup, sites=len(world.params.roster), slots=world.params.slots)
    return replace(request, setup=Setup(change(dict(setup.dealt))).to_bytes()).to_bytes()


def asked(world: World, change: Any) -> Any:
    """Hands a site its altered first request."""
    return lambda site: site.mask(first_request(world, site.name, change), MIXED, world.term(site.name))


def part(dealer: str, **changes: Any) -> Any:
    return lambda parts: {**parts, dealer: replace(parts[dealer], **changes)}


# Split views -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_a_split_view_is_refused_before_anything_is_masked(stored: bool) -> None:
    """A colluding fourth site signs two advertisements; the server shows half of the sites each."""
    world = World(4, stored=stored)
    shown = world.enroll()
    item = Advertisement.from_bytes(shown.items[3], slots=3)
    twin = signed_advertisement(world, item, application=b"another weight")
    second = Advertisements((*shown.items[:3], twin.to_bytes()))
    confirmed: dict[str, Confirmation] = {}
    for name, view in ((ONE, shown), (TWO, second), (THREE, shown), (FOUR, shown)):
        raw = world.sites[name].confirm(view.to_bytes())
        confirmed[name] = Confirmation.from_bytes(raw, slots=3)
    session_of = {name: world.sites[name].state.session for name in names(4)}
    assert session_of[ONE] == session_of[THREE] != session_of[TWO]
    # The honest server notices at once; the malicious one relays all the same.
    honest = Session(world.params, shown)
    assert refused(SignatureError, honest.add, TWO, confirmed[TWO].to_bytes()).blamed == TWO

    def request(holder: str) -> bytes:
        digests = {
            dealer: b"".join(messages.hashes_digest(item.hashes[name]) for name in names(4))
            for dealer, item in confirmed.items()
        }
        dealt = {
            dealer: Dealt(
                item.boxes.get(holder, b""),
                item.hashes[holder],
                digests[dealer],
                item.hashes_signature,
                item.ready,
            )
            for dealer, item in confirmed.items()
        }
        return TermRequest(0, messages.SumId(0, "train-0"), "train", Setup(dealt).to_bytes()).to_bytes()

    refused_by(
        world,
        (ONE, TWO, THREE),
        SignatureError,
        lambda site: site.mask(request(site.name), MIXED, world.term(site.name)),
    )
    assert not any(hasattr(world.sites[name].state, "sums") for name in (ONE, TWO, THREE))


def test_other_parameters_at_one_site_end_in_a_signature_that_does_not_hold() -> None:
    """Settings that its own job permits there: its advertisement is signed for them, and for no others."""
    for changes in (
        {"threshold": 4},
        {"colluders": 2, "threshold": 4},
        {"min_sites": 4},
        {"static_open": False},
    ):
        world = World(4)
        kept = {name: value for name, value in changes.items() if name != "static_open"}
        world.sites[TWO].expected = replace(world.sites[TWO].expected, **kept)
        raw = {
            name: site.advertise(
                (replace(world.params, **changes) if name == TWO else world.params).to_bytes()
            )
            for name, site in world.sites.items()
        }
        enrolment = Enrolment(world.params, verifier=verifier())
        assert refused(SignatureError, enrolment.add, TWO, raw[TWO]).blamed == TWO
        relayed = Advertisements(tuple(raw[name] for name in names(4))).to_bytes()
        refused_by(world, (ONE, THREE, FOUR), SignatureError, lambda site, raw=relayed: site.confirm(raw))
        refused_by(world, (TWO,), SignatureError, lambda site, raw=relayed: site.confirm(raw))


def test_other_job_settings_at_one_site_are_refused() -> None:
    """Whether the server alters what it announces, or one site was given another job to run."""
    world = World(4)
    site = world.sites[TWO]
    refused(ParametersError, site.advertise, replace(world.params, config_sha256=bytes(32)).to_bytes())
    site.expected = replace(site.expected, config_sha256=bytes(32))
    refused(ParametersError, site.advertise, world.params.to_bytes())
    assert site.state is None
    assert not site.entries


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 2},
        {"threshold": 1},
        {"min_sites": 1},
        {"min_sites": 2},
        {"colluders": 0},
        {"trust": "semi_honest", "threshold": 3},
        {"roster": (ONE, TWO), "threshold": 2},
        {"schemas": {"train": (FieldSpec("wraps", (1,), 32, 31, 1.0, "update"),)}},
    ],
    ids=str,
)
def test_the_server_cannot_lower_what_a_site_demands(changes: dict[str, Any]) -> None:
    world = World(4, site_rules=SiteRules())
    for site in world.sites.values():
        refused(ParametersError, site.advertise, replace(world.params, **changes).to_bytes())
        assert site.state is None
        assert not site.entries


# Boxes and shares --------------------------------------------------------------------------------


# In the ciphertext, the nonce, the shares, the pair secrets, the tag.
@pytest.mark.parametrize("place", [0, 1087, 1088, 1600, 1790, -1])
def test_a_tampered_box_is_refused_and_its_dealer_named(place: int) -> None:
    world = ready(stored=True)

    def tampered(parts: dict[str, Dealt]) -> dict[str, Dealt]:
        box = bytearray(parts[FOUR].box)
        box[place] ^= 1
        return {**parts, FOUR: replace(parts[FOUR], box=bytes(box))}

    refused_by(world, (ONE, TWO), ShareError, asked(world, tampered))


def test_a_ciphertext_or_the_rest_of_another_box_is_refused_and_the_dealer_named() -> None:
    """Another dealer's, another holder's, an earlier epoch's: with none of them does a box open."""
    world, earlier = ready(stored=True), ready(epoch=1)
    own = {name: item.boxes for name, item in world.session._confirmed.items()}
    old = earlier.session._confirmed[THREE].boxes[ONE]
    good = own[THREE][ONE]
    for other in (own[FOUR][ONE], own[THREE][TWO], own[ONE][THREE], old):
        for box in (other[:1088] + good[1088:], good[:1088] + other[1088:]):
            call = asked(world, part(THREE, box=box))
            refused_by(world, (ONE,), ShareError, call)
            assert refused(ShareError, call, world.sites[ONE]).blamed == THREE


def test_swapped_boxes_are_refused() -> None:
    world = ready(stored=True)
    own = {name: item.boxes for name, item in world.session._confirmed.items()}
    for box in (own[FOUR][ONE], own[THREE][TWO], own[ONE][THREE]):  # another dealer's, holder's, sent back
        refused_by(world, (ONE,), ShareError, asked(world, part(THREE, box=box)))
    refused_by(world, (ONE,), SignatureError, asked(world, lambda parts: {**parts, THREE: parts[FOUR]}))


@pytest.mark.parametrize("whole", [False, True])
def test_a_setup_with_one_dealers_part_of_another_epoch_is_refused(whole: bool) -> None:
    """A site signs and seals for one session: T is in the box's key and frame, and in each hash."""
    world, later = World(4), World(4, epoch=1, seed="later")
    for name, site in later.sites.items():
        site.signer = signer(name)
    world.set_up()
    later.set_up()
    old = world.session.setup_for(ONE).dealt[FOUR]
    changes = (
        {"box": old.box}
        if not whole
        else {key: getattr(old, key) for key in ("box", "hashes", "digests", "signature", "ready")}
    )
    kind = SignatureError if whole else ShareError
    refused_by(later, (ONE,), kind, asked(later, part(FOUR, **changes)))


def test_a_box_of_the_same_channel_keys_opens_in_no_other_session() -> None:
    """Even if a site used its channel key again, which it never does: the session is in key and frame."""
    world = ready()
    box = world.session.setup_for(ONE).dealt[FOUR].box
    session, ciphertext, nonce, sealed = world.session.session, box[:1088], box[1088:1100], box[1100:]
    assert opened_box(world, FOUR, ONE, box)
    state = world.sites[ONE].state
    agreed = x25519(state.channel, world.session.peers[FOUR].channel_key, owner=FOUR)
    encapsulated = kem_decapsulate(state.decapsulation, ciphertext, owner=FOUR)
    good = (encapsulated, agreed, session, FOUR, ONE, ciphertext)
    frame = (session, FOUR, ONE)
    assert open_sealed(box_key(*good), nonce, sealed, box_bound(*frame), owner=FOUR)
    others = (bytes(32), bytes(32), bytes(32), ONE, FOUR, bytes(1088))
    wrong = [((*good[:at], other, *good[at + 1 :]), frame) for at, other in enumerate(others)]
    wrong += [(good, (bytes(32), FOUR, ONE)), (good, (session, ONE, FOUR))]
    # Either shared secret in the other's place, so that their order counts too.
    wrong += [((agreed, encapsulated, *good[2:]), frame)]
    for key, bound in wrong:
        with pytest.raises(ShareError):
            open_sealed(box_key(*key), nonce, sealed, box_bound(*bound), owner=FOUR)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hash of another share", "another share"])
def test_a_dealer_whose_shares_are_not_what_it_signed_is_named_before_anything_is_masked(kind: str) -> None:
    world = World(4)
    shown = world.enroll()
    world.session = Session(world.params, shown)
    for name, site in world.sites.items():
        raw = site.confirm(shown.to_bytes())
        if name == FOUR:
            raw = crooked(world, Confirmation.from_bytes(raw, slots=3), kind).to_bytes()
        world.session.add(name, raw)  # the server cannot see it: shares are sealed
    with pytest.raises(ShareError) as caught:
        asked(world, lambda parts: parts)(world.sites[ONE])
    assert caught.value.blamed == FOUR
    assert "hashes it signed" in caught.value.expected
    asked(world, lambda parts: parts)(world.sites[TWO])  # only the first site got bad ones


def crooked(world: World, item: Confirmation, kind: str) -> Confirmation:
    """The fourth site's confirmation, with a share for the first that does not fit its signed hash."""
    session, state = world.session.session, world.sites[FOUR].state
    if kind == "another share":
        plain = bytearray(opened_box(world, FOUR, ONE, item.boxes[ONE]))
        plain[100] ^= 1
        return replace(item, boxes={**item.boxes, ONE: resealed_box(world, FOUR, ONE, bytes(plain))})
    hashes = {**item.hashes, ONE: bytes(32) + item.hashes[ONE][32:]}
    digests = [messages.hashes_digest(hashes[name]) for name in names(4)]
    signature = ed25519_sign(state.signing, messages.hashes_signed(session, FOUR, digests))
    return replace(item, hashes=hashes, hashes_signature=signature)


# Order and repetition ----------------------------------------------------------------------------


def test_a_site_confirms_one_view_even_if_it_is_asked_again_after_a_restart() -> None:
    world = World(4, stored=True)
    shown = world.enroll()
    world.confirm(shown)
    item = Advertisement.from_bytes(shown.items[3], slots=3)
    other = Advertisements((*shown.items[:3], signed_advertisement(world, item, application=b"x").to_bytes()))
    for message in (shown.to_bytes(), other.to_bytes()):
        refused_by(world, names(4), StateError, lambda site, raw=message: site.confirm(raw))


def test_an_epoch_is_begun_once_also_after_a_restart_that_lost_the_state() -> None:
    world = World(4)
    world.enroll()
    for site in world.sites.values():
        site.state = None
        refused(ReplayError, site.advertise, world.params.to_bytes())
        refused(ReplayError, site.advertise, replace(world.params, static_open=False).to_bytes())
        site.advertise(make_params(4, epoch=1).to_bytes())
        refused(ReplayError, site.advertise, world.params.to_bytes())


def test_a_roster_that_is_not_whole_or_in_another_order_is_refused() -> None:
    world = World(4)
    items = world.enroll().items
    for wrong in (items[:3], (*items, items[0]), items[::-1], (items[0], items[1], items[1], items[3])):
        message = Advertisements(wrong).to_bytes()
        refused_by(world, (ONE, FOUR), RosterError, lambda site, raw=message: site.confirm(raw))


def test_a_site_is_not_shown_another_confirmation_of_its_own() -> None:
    """What it dealt itself comes back to it; in another's hands its own key could sign other hashes."""
    world = ready()
    own = world.session.setup_for(ONE).dealt[ONE]
    digests = [own.digests[i : i + 32] for i in range(0, 128, 32)]
    signed = messages.hashes_signed(world.session.session, ONE, [*digests[:3], bytes(32)])
    other = {
        "digests": b"".join(digests[:3]) + bytes(32),
        "signature": ed25519_sign(session_key(world, ONE), signed),
    }
    refused_by(world, (ONE,), InconsistencyError, asked(world, part(ONE, **other)))


def test_at_the_largest_epoch_every_slot_is_its_own() -> None:
    """256 slots: the last slot's secrets, shares and hashes lie where they should."""
    world = ready(3, slots=256)
    for slot in (0, 255):
        assert world.run(slot).groups == world.plain(names(3))
    refused(ParametersError, lambda: world.start(256))
    commitments = {
        item.commitment(slot, group, kind)
        for item in world.session.peers.values()
        for slot in range(256)
        for group in messages.GROUPS
        for kind in messages.KINDS
    }
    assert len(commitments) == 3 * 256 * 2 * 2
    refused(MessageError, Params.from_bytes, replace(world.params, slots=257).to_bytes())
