"""A site refuses, in the right state, with the right name, and keeps no secret longer than it must."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from tests.support.securesum import certificates, mlkem
from tests.support.securesum.hostile import opened_box, ready, resealed_box, signed_agreement
from tests.support.securesum.protocol import (
    DATASET,
    JOB,
    MIXED,
    FixedSigner,
    World,
    make_params,
    names,
    root,
    seeded,
    signer,
    verifier,
)

from tightframe.securesum import site as site_module
from tightframe.securesum.checks import LOW_ORDER, commitment
from tightframe.securesum.errors import (
    IdentityError,
    InconsistencyError,
    KeyAgreementError,
    MessageError,
    ParametersError,
    ProtocolError,
    ReplayError,
    RosterError,
    ShareError,
    SignatureError,
    StateError,
    StaticCohortError,
    SurvivorsError,
)
from tightframe.securesum.identity import public_key_hash
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    Advertisement,
    Advertisements,
    Agreement,
    AgreementRequest,
    FieldSpec,
    RevealRequest,
    Setup,
    SumId,
    TermRequest,
    hashes_digest,
    hashes_signed,
    receipts_digest,
)
from tightframe.securesum.primitives import HASH_BYTES, Secret, ed25519_sign, x25519, x25519_public
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.site import check_request, journal, reveal
from tightframe.securesum.site.state import (
    Abandoned,
    Advertised,
    Agreed,
    Confirmed,
    Established,
    Fresh,
    Masked,
    Revealed,
    slot_secret,
    slot_share,
)

ONE, TWO, THREE, FOUR = names(4)


def masked(world: World, slot: int = 0, drop: tuple[str, ...] = ()) -> Any:
    """A closed sum whose terms are in."""
    total = world.start(slot)
    world.contribute(total, [name for name in world.params.roster if name not in drop])
    total.close()
    return total


# Advertise ---------------------------------------------------------------------------------------


def test_what_an_advertisement_holds() -> None:
    world = World(3)
    site = world.sites[ONE]
    raw = site.advertise(world.params.to_bytes())
    item = Advertisement.from_bytes(raw, slots=3)
    state = site.state
    assert isinstance(state, Advertised)
    assert item.application == b"weight of site-001"
    assert item.channel_key == x25519_public(state.channel)
    assert item.encapsulation_key == mlkem.keys(state.decapsulation.expose())[0]
    places = [(slot, group, kind) for slot in range(3) for group in GROUPS for kind in KINDS]
    for slot, group, kind in places:
        secret = slot_secret(state.secrets[slot], group, kind).expose()
        assert item.commitment(slot, group, kind) == commitment(ONE, slot, group, kind, secret)
    assert len({item.commitment(*place) for place in places}) == 12
    verifier().check(item, world.params.digest())
    assert [type(entry) for entry in site.entries] == [journal.Advertised]


def test_parameters_are_held_against_the_sites_own_rules() -> None:
    site = World(3).sites[ONE]
    with pytest.raises(ParametersError, match="threshold"):
        site.advertise(replace(make_params(3), threshold=2).to_bytes())
    assert site.state is None
    assert site.entries == []


@pytest.mark.parametrize(
    "item",
    [
        FieldSpec("wraps", (1,), 32, 30, 1.0, "update"),
        FieldSpec("senseless bound", (1,), 32, 8, 0.0, "update"),
        FieldSpec("senseless bits", (1,), 64, 1000, 1.0, "update"),
    ],
)
def test_a_ring_that_could_wrap_is_refused_before_any_key_is_made(item: FieldSpec) -> None:
    site = World(3).sites[ONE]
    with pytest.raises(ParametersError, match=rf"field {item.name} of schema train .* over 3 sites"):
        site.advertise(make_params(3, schemas={"train": (MIXED[0], item)}).to_bytes())


@pytest.mark.parametrize("overrides", [{}, {"slots": 2}, {"epoch": 0, "slots": 4}])
def test_an_epoch_is_begun_once_even_with_the_same_parameters(overrides: dict[str, Any]) -> None:
    site = World(3).sites[ONE]
    site.advertise(make_params(3).to_bytes())
    site.state = None  # a restart
    with pytest.raises(ReplayError, match="epoch"):
        site.advertise(make_params(3, **overrides).to_bytes())
    site.advertise(make_params(3, epoch=1).to_bytes())


def test_the_static_group_of_another_cohort_is_refused_at_once() -> None:
    world = World(4)
    site = world.sites[ONE]
    site.entries.append(journal.StaticOpened(DATASET, (ONE, TWO, THREE), "an earlier job"))
    with pytest.raises(StaticCohortError) as caught:
        site.advertise(world.params.to_bytes())
    assert caught.value.code == "TF-612"
    site.rules = SiteRules(any_static_cohort=True)
    site.advertise(world.params.to_bytes())
    site.rules, site.expected = SiteRules(), replace(site.expected, job="job-2")
    site.advertise(make_params(4, job="job-2", static_open=False).to_bytes())
    with pytest.raises(StaticCohortError):
        site.advertise(make_params(4, job="job-2", epoch=1).to_bytes())
    site.entries.append(journal.CohortAccepted(DATASET, world.params.roster))
    site.advertise(make_params(4, job="job-2", epoch=1).to_bytes())


# Confirm -----------------------------------------------------------------------------------------


def enrolled(**options: Any) -> tuple[World, list[Advertisement]]:
    world = World(4, **options)
    shown = world.enroll()
    return world, [Advertisement.from_bytes(raw, slots=3) for raw in shown.items]


def signed(world: World, item: Advertisement, by: Any = None) -> Advertisement:
    """An advertisement signed again by whoever it names."""
    key = by or signer(item.name)
    return replace(item, signature=key.sign(item.signed(world.params.digest())))


def refused(world: World, items: list[Advertisement], name: str = ONE) -> ProtocolError:
    before = world.sites[name].state
    with pytest.raises(ProtocolError) as caught:
        world.sites[name].confirm(Advertisements(tuple(item.to_bytes() for item in items)).to_bytes())
    assert world.sites[name].state is before
    return caught.value


def test_exactly_the_roster_in_its_order() -> None:
    world, items = enrolled()
    one, two, three, four = items
    for wrong in ([one, two, three], [one, three, two, four], [one, two, three, three], [*items, four]):
        assert isinstance(refused(world, wrong), RosterError)
    stranger = signed(world, replace(four, name="site-005"), signer("site-005"))
    assert isinstance(refused(world, [one, two, three, stranger]), RosterError)


def test_the_sites_own_advertisement_must_be_as_it_was_sent() -> None:
    world, items = enrolled()
    own = replace(items[0], application=b"another weight")
    error = refused(world, [signed(world, own), *items[1:]])
    assert isinstance(error, RosterError)
    assert error.what == "the advertisement of site-001"


def test_an_altered_or_unsigned_advertisement_is_named() -> None:
    world, items = enrolled()
    for change in (
        {"application": b"other"},
        {"channel_key": x25519_public(Secret(bytes(range(32))))},
        {"session_key": items[2].session_key},
        {"slots": items[1].slots[::-1]},
        {"signature": items[2].signature},
    ):
        error = refused(world, [items[0], replace(items[1], **change), *items[2:]])
        assert isinstance(error, SignatureError)
        assert error.blamed == TWO


def test_an_advertisement_of_another_epoch_is_no_advertisement_of_this_one() -> None:
    world, items = enrolled()
    other, old = enrolled(epoch=1)
    assert old[1].name == TWO
    error = refused(world, [items[0], old[1], *items[2:]])
    assert isinstance(error, SignatureError)
    assert error.blamed == TWO
    assert isinstance(refused(other, [old[0], items[1], *old[2:]]), SignatureError)


def test_certificates_are_held_against_the_root_and_the_pins() -> None:
    world, items = enrolled()
    elsewhere = certificates.issue(certificates.make_root("elsewhere"), TWO)
    foreign = replace(items[1], certificate=elsewhere.certificate)
    key = FixedSigner(elsewhere.key, elsewhere.certificate)
    error = refused(world, [items[0], signed(world, foreign, key), *items[2:]])
    assert isinstance(error, IdentityError)
    assert error.blamed == TWO

    site = world.sites[ONE]
    pins = {name: frozenset({public_key_hash(signer(name).certificate)}) for name in (TWO, THREE)}
    site.verifier = verifier(pins=pins, pinned_only=True)
    error = refused(world, items)
    assert isinstance(error, IdentityError)
    assert error.blamed == FOUR
    # A site needs no pin of itself.
    site.verifier = verifier(
        pins={**pins, FOUR: frozenset({public_key_hash(signer(FOUR).certificate)})}, pinned_only=True
    )
    site.confirm(Advertisements(tuple(item.to_bytes() for item in items)).to_bytes())
    assert isinstance(site.state, Confirmed)


def test_one_provisioned_key_is_one_site() -> None:
    world, items = enrolled()
    twin = certificates.issue(root(), TWO, key=signer(THREE).key)
    copy = replace(items[1], certificate=twin.certificate)
    error = refused(
        world, [items[0], signed(world, copy, FixedSigner(twin.key, twin.certificate)), *items[2:]]
    )
    assert isinstance(error, IdentityError)
    assert error.blamed is None
    assert "site-002" in str(error) and "site-003" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda two, one: replace(two, channel_key=one.channel_key),
        lambda two, one: replace(two, session_key=one.session_key),
        lambda two, one: replace(two, encapsulation_key=one.encapsulation_key),
        lambda two, one: replace(two, session_key=one.channel_key),
        # The same point: the top bit is ignored by X25519.
        lambda two, one: replace(two, channel_key=one.channel_key[:31] + bytes([one.channel_key[31] | 128])),
    ],
)
def test_no_public_key_is_used_twice(change: Callable[..., Advertisement]) -> None:
    world, items = enrolled()
    two = signed(world, change(items[1], items[0]))
    error = refused(world, [items[0], two, *items[2:]], THREE)
    assert isinstance(error, KeyAgreementError)
    assert error.blamed == (TWO if TWO in error.found else None)


# Wycheproof's low-order points and their encodings that are not canonical.
POINTS = [*sorted(LOW_ORDER), 2**255 - 19, 2**255 - 18, 2**255, 2**255 + 1, 2**256 - 19]


@pytest.mark.parametrize("point", POINTS)
def test_points_of_low_order_are_refused_when_shown_and_when_used(point: int) -> None:
    key = point.to_bytes(32, "little")
    with pytest.raises(KeyAgreementError):
        x25519(Secret(bytes(range(32))), key, owner=TWO)
    world, items = enrolled()
    two = replace(items[1], channel_key=key)
    error = refused(world, [items[0], signed(world, two), *items[2:]])
    assert isinstance(error, KeyAgreementError)
    assert error.blamed == TWO


@pytest.mark.parametrize("place", [0, 1, 381, 382, 1149])
def test_a_malformed_encapsulation_key_is_refused_and_named(place: int) -> None:
    """Three bytes are two coefficients; of FF they are 4095 and not below 3329."""
    world, items = enrolled()
    key = items[1].encapsulation_key
    two = replace(items[1], encapsulation_key=key[:place] + b"\xff" * 3 + key[place + 3 :])
    error = refused(world, [items[0], signed(world, two), *items[2:]])
    assert isinstance(error, KeyAgreementError)
    assert (error.blamed, error.what) == (TWO, "the ML-KEM-768 key of site-002")


def test_a_low_order_key_that_got_into_a_state_is_refused_at_use() -> None:
    world = ready()
    site = world.sites[ONE]
    bad = replace(site.state.peers[TWO], channel_key=bytes(32))
    site.state = replace(
        site.state,
        advertisements=(site.state.advertisements[0], bad.to_bytes(), *site.state.advertisements[2:]),
    )
    with pytest.raises(KeyAgreementError, match="site-002"):
        world.contribute(world.start(0), [ONE])


def test_confirm_comes_once_and_after_advertise() -> None:
    world, _ = enrolled()
    shown = world.enrolment.relay()
    site = world.sites[ONE]
    site.confirm(shown.to_bytes())
    with pytest.raises(StateError, match="Advertised, but found Confirmed"):
        site.confirm(shown.to_bytes())


def test_peers_and_their_applications_are_known_after_confirm() -> None:
    world = ready()
    for name, site in world.sites.items():
        assert site.state.applications == {peer: f"weight of {peer}".encode() for peer in world.params.roster}
        assert list(site.state.peers) == list(world.params.roster)
        with pytest.raises(TypeError):
            site.state.applications[name] = b""
    world.contribute(world.start(0), [ONE])
    assert isinstance(world.sites[ONE].state, Established)
    assert world.sites[ONE].state.applications[TWO] == b"weight of site-002"


# The setup with the first request ----------------------------------------------------------------


def first_request(world: World, name: str = ONE, **changes: Any) -> bytes:
    return replace(TermRequest.from_bytes(world.request(name, world.start(0))), **changes).to_bytes()


def setup_refused(change: Callable[[World, dict[str, Any]], None]) -> ProtocolError:
    """What site 1 says to a setup in which ``change`` altered something."""
    world = ready()
    dealt = dict(world.session.setup_for(ONE).dealt)
    change(world, dealt)
    site = world.sites[ONE]
    before = site.state
    with pytest.raises(ProtocolError) as caught:
        site.mask(first_request(world, setup=Setup(dealt).to_bytes()), MIXED, world.term(ONE))
    assert site.state is before
    assert not any(isinstance(entry, journal.SlotUsed) for entry in site.entries)
    return caught.value


def alter(dealer: str, **parts: Callable[[bytes], bytes]) -> Callable[[World, dict[str, Any]], None]:
    def change(world: World, dealt: dict[str, Any]) -> None:
        item = dealt[dealer]
        dealt[dealer] = replace(item, **{key: how(getattr(item, key)) for key, how in parts.items()})

    return change


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"signature": flip}, SignatureError),
        ({"ready": flip}, SignatureError),
        ({"digests": flip_last}, SignatureError),
        ({"hashes": flip}, ShareError),
        ({"box": flip}, ShareError),
        ({"box": flip_last}, ShareError),
        ({"box": lambda box: b""}, ShareError),
    ],
)
def test_what_was_altered_in_a_setup_is_named(parts: dict[str, Any], kind: type[ProtocolError]) -> None:
    error = setup_refused(alter(THREE, **parts))
    assert type(error) is kind
    assert error.blamed == THREE


def test_readiness_for_another_session_ends_a_split_view() -> None:
    other = ready(seed="another view")

    def change(world: World, dealt: dict[str, Any]) -> None:
        dealt[TWO] = replace(dealt[TWO], ready=other.session.setup_for(ONE).dealt[TWO].ready)

    error = setup_refused(change)
    assert isinstance(error, SignatureError)
    assert error.blamed == TWO
    assert "readiness" in error.what


def test_another_sites_part_is_refused() -> None:
    def swapped(world: World, dealt: dict[str, Any]) -> None:
        dealt[TWO], dealt[THREE] = dealt[THREE], dealt[TWO]

    assert isinstance(setup_refused(swapped), SignatureError)

    def of_another_holder(world: World, dealt: dict[str, Any]) -> None:
        dealt[TWO] = replace(dealt[TWO], box=world.session.setup_for(THREE).dealt[TWO].box)

    error = setup_refused(of_another_holder)
    assert isinstance(error, ShareError)
    assert error.blamed == TWO


def test_the_dealers_are_exactly_the_roster() -> None:
    def stranger(world: World, dealt: dict[str, Any]) -> None:
        dealt["site-005"] = dealt.pop(TWO)

    error = setup_refused(stranger)
    assert isinstance(error, RosterError)
    assert "site-005" in error.found

    def too_few(world: World, dealt: dict[str, Any]) -> None:
        del dealt[TWO]

    assert isinstance(setup_refused(too_few), MessageError)


def deal_again(world: World, dealer: str) -> Any:
    """Another confirmation by a dealer that was made to confirm twice: other shares of the same secrets."""
    other = World(4)
    other.enroll()
    for name, site in other.sites.items():
        site.random = seeded(("again", name))
    other.confirm(other.enrolment.relay())
    assert other.session.session == world.session.session
    return other.session.setup_for(ONE).dealt[dealer]


def test_a_sites_own_confirmation_must_be_its_own() -> None:
    def another(world: World, dealt: dict[str, Any]) -> None:
        dealt[ONE] = deal_again(world, ONE)

    error = setup_refused(another)
    assert isinstance(error, InconsistencyError)
    assert "site-001" in error.what

    def with_a_box(world: World, dealt: dict[str, Any]) -> None:
        dealt[ONE] = replace(dealt[ONE], box=dealt[TWO].box)

    assert isinstance(setup_refused(with_a_box), InconsistencyError)


# Salt and share of the first secret, the last share, the first and the last pair secret.
@pytest.mark.parametrize("place", [0, 16, 3 * 192 - 1, 3 * 192, 3 * 256 - 1])
def test_a_share_or_pair_secret_that_is_not_the_signed_one_is_the_dealers_fault(place: int) -> None:
    """The dealer signs its hashes and seals its box properly, but one byte in it is another."""

    def change(world: World, dealt: dict[str, Any]) -> None:
        plain = bytearray(opened_box(world, TWO, ONE, dealt[TWO].box))
        plain[place] ^= 1
        dealt[TWO] = replace(dealt[TWO], box=resealed_box(world, TWO, ONE, bytes(plain)))

    error = setup_refused(change)
    assert isinstance(error, ShareError)
    assert error.blamed == TWO
    assert "hashes it signed" in error.expected


def test_hashes_that_a_dealer_did_not_sign_for_this_holder() -> None:
    """Hashes signed by the dealer, with another holder's digest in this one's place."""

    def change(world: World, dealt: dict[str, Any]) -> None:
        digests = [dealt[TWO].digests[i : i + HASH_BYTES] for i in range(0, 4 * HASH_BYTES, HASH_BYTES)]
        digests[0] = hashes_digest(b"other")
        message = hashes_signed(world.session.session, TWO, digests)
        signature = ed25519_sign(world.sites[TWO].state.signing, message)
        dealt[TWO] = replace(dealt[TWO], digests=b"".join(digests), signature=signature)

    error = setup_refused(change)
    assert isinstance(error, ShareError)
    assert error.blamed == TWO


def test_the_first_request_needs_a_setup_and_later_ones_the_same() -> None:
    world = ready()
    site = world.sites[ONE]
    with pytest.raises(StateError, match="with a setup"):
        site.mask(first_request(world, setup=b""), MIXED, world.term(ONE))
    setup = world.session.setup_for(ONE).to_bytes()
    site.mask(first_request(world), MIXED, world.term(ONE))
    second = TermRequest(1, SumId(1, "train-0"), "train", setup)
    with pytest.raises(ReplayError, match="setup"):
        site.mask(replace(second, setup=setup + b"\x00").to_bytes(), MIXED, world.term(ONE))
    site.mask(second.to_bytes(), MIXED, world.term(ONE))


def test_a_term_needs_a_session() -> None:
    world, _ = enrolled()
    with pytest.raises(StateError, match="Confirmed or Established, but found Advertised"):
        world.sites[ONE].mask(TermRequest(0, SumId(0, "x"), "train").to_bytes(), MIXED, {})


# Mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"slot": 3}, "below 3"), ({"schema": "other"}, "one of \\['seal', 'train'\\]")],
)
def test_slot_and_schema_must_be_of_the_epoch(changes: dict[str, Any], what: str) -> None:
    world = ready()
    with pytest.raises(ParametersError, match=what):
        world.sites[ONE].mask(first_request(world, **changes), MIXED, world.term(ONE))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (MIXED[:-1], "flags"),
        ((*MIXED[:-1], replace(MIXED[-1], bound=2.0)), "flags"),
        ((*MIXED[:-1], replace(MIXED[-1], group="update")), "flags"),
        ((MIXED[1], MIXED[0], *MIXED[2:]), "the order"),
    ],
)
def test_the_schema_must_be_the_sites_own(fields: tuple[FieldSpec, ...], what: str) -> None:
    world = ready()
    site, request = world.sites[ONE], first_request(world)
    with pytest.raises(ParametersError, match=what):
        site.mask(request, fields, world.term(ONE))
    with pytest.raises(ParametersError, match=what):
        check_request(site.state, TermRequest.from_bytes(request), fields)


def test_terms_must_fit_the_schema() -> None:
    world = ready()
    term = world.term(ONE)
    for wrong in (
        {},
        {"update": term["update"]},
        {**term, "update": term["update"][:-1]},
        {**term, "static": term["static"] + b"\x00"},
    ):
        with pytest.raises(MessageError):
            world.sites[ONE].mask(first_request(world), MIXED, wrong)
    with pytest.raises(ValueError, match="two groups"):
        world.sites[ONE].mask(first_request(world), MIXED, {**term, "other": b""})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="SHA-256"):
        world.sites[ONE].mask(first_request(world), MIXED, term, b"short")
    assert isinstance(world.sites[ONE].state, Confirmed)


def test_a_slot_is_used_once_with_or_without_a_journal() -> None:
    world = ready()
    site = world.sites[ONE]
    request = first_request(world)
    site.mask(request, MIXED, world.term(ONE))
    for sum_id in (SumId(0, "train-0"), SumId(1, "train-0")):
        again = TermRequest(0, sum_id, "train").to_bytes()
        with pytest.raises(ReplayError, match="after 0"):
            site.mask(again, MIXED, world.term(ONE))
        kept, site.entries = site.entries, []  # what the state alone forbids
        with pytest.raises(ReplayError, match="masked"):
            site.mask(again, MIXED, world.term(ONE))
        site.entries = kept


def test_a_sum_is_masked_once_with_or_without_a_journal() -> None:
    world = ready()
    site = world.sites[ONE]
    site.mask(first_request(world), MIXED, world.term(ONE))
    again = TermRequest(1, SumId(0, "train-0"), "train").to_bytes()
    with pytest.raises(ReplayError, match="used before"):
        site.mask(again, MIXED, world.term(ONE))
    site.entries = []
    with pytest.raises(ReplayError, match="used before"):
        site.mask(again, MIXED, world.term(ONE))


def test_a_request_is_refused_before_anything_is_done_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check_request`` changes nothing, and says what ``mask`` would say; its set-up is verified once."""
    world = ready()
    site = world.sites[ONE]
    first, before = TermRequest.from_bytes(first_request(world)), site.state
    site.state = check_request(before, first, MIXED)
    with monkeypatch.context() as verified:
        verified.setattr(site_module, "establish", None)
        site.mask(first.to_bytes(), MIXED, world.term(ONE))
    for again in (TermRequest(0, SumId(1, "train-0"), "train"), TermRequest(1, SumId(0, "train-0"), "train")):
        with pytest.raises(ReplayError):
            check_request(site.state, again, MIXED)
    site.state = None
    with pytest.raises(StateError, match="Confirmed or Established"):
        check_request(site.state, first, MIXED)


def test_a_slot_is_not_used_again_after_a_crash_between_journal_and_state() -> None:
    world = ready()
    site = world.sites[ONE]
    before = site.state
    site.mask(first_request(world), MIXED, world.term(ONE))
    site.state = before  # the state was not stored, the journal was
    with pytest.raises(ReplayError, match="after 0"):
        site.mask(first_request(world), MIXED, world.term(ONE))
    site.mask(
        replace(
            TermRequest.from_bytes(first_request(world)), slot=1, sum_id=SumId(0, "train-0", 1)
        ).to_bytes(),
        MIXED,
        world.term(ONE),
    )


def test_slots_only_rise_and_older_ones_are_erased() -> None:
    world = ready(slots=4)
    masked(world, 1)
    site = world.sites[ONE]
    assert [type(slot) for slot in site.state.slots] == [Abandoned, Masked, Fresh, Fresh]
    site.entries = []
    with pytest.raises(ReplayError, match="abandoned"):
        site.mask(TermRequest(0, SumId(9, "x"), "train").to_bytes(), MIXED, world.term(ONE))
    world.run(2)
    masked(world, 3)
    assert [type(slot) for slot in site.state.slots] == [Abandoned, Abandoned, Revealed, Masked]


def test_secrets_go_as_soon_as_they_can() -> None:
    world = ready()
    site = world.sites[ONE]
    seeds = [secret.expose() for secret in site.state.secrets]
    channel = site.state.channel.expose()
    total = masked(world, 0, (FOUR,))
    stored = site.state.to_bytes()
    assert seeds[0] not in stored
    assert channel not in stored
    assert seeds[1] in stored
    share = slot_share(site.state.slots[0].shares, 1, "update", "self")
    assert share in stored
    world.agree(total, names(3))
    assert isinstance(site.state.slots[0], Agreed)
    assert share in site.state.to_bytes()
    world.reveal(total, names(3))
    assert share not in site.state.to_bytes()
    digest = receipts_digest(world.session.session, total.receipts)
    assert site.state.slots[0] == Revealed("train", SumId(0, "train-0"), names(3), digest, ("update",))


def test_a_term_is_held_back_if_another_cohort_was_opened_meanwhile() -> None:
    world = ready()
    site = world.sites[ONE]
    site.entries.append(journal.StaticOpened(DATASET, (ONE, TWO, THREE), "another job"))
    with pytest.raises(StaticCohortError):
        site.mask(first_request(world), MIXED, world.term(ONE))
    site.state = replace(site.state, epoch=replace(site.state.epoch, any_static_cohort=True))
    site.mask(first_request(world), MIXED, world.term(ONE))


# Agree and reveal --------------------------------------------------------------------------------


def test_receipts_are_held_against_the_sites_own() -> None:
    world = ready()
    total = masked(world, 0, (FOUR,))
    one, two, three = total.agreement_request().receipts
    key = world.sites[TWO].state.signing

    def resigned(**changes: Any) -> Any:
        item = replace(two, **changes)
        return replace(item, signature=ed25519_sign(key, item.signed(world.session.session)))

    own = replace(one, update=bytes(32))
    own_signature = ed25519_sign(world.sites[ONE].state.signing, own.signed(world.session.session))
    for receipts, kind, what in (
        ((one, replace(two, update=bytes(32)), three), SignatureError, "a receipt"),
        ((one, replace(two, signature=three.signature), three), SignatureError, "a receipt"),
        ((one, replace(three, name=TWO), three), SignatureError, "a receipt"),
        ((one, resigned(slot=1), three), InconsistencyError, "the slot in the receipt of site-002"),
        (
            (one, resigned(sum_id=SumId(0, "train-0", 1)), three),
            InconsistencyError,
            "the sum in the receipt of site-002",
        ),
        (
            (one, resigned(basis=bytes(32)), three),
            InconsistencyError,
            "the basis in the receipt of site-002",
        ),
        (
            (one, resigned(total=bytes(31) + b"1"), three),
            InconsistencyError,
            "the total in the receipt of site-002",
        ),
        ((replace(own, signature=own_signature), two, three), InconsistencyError, "the receipt of site-001"),
        ((two, three), SurvivorsError, "the survivors"),
        ((one, three, two), SurvivorsError, "the survivors"),
        ((one, two, two, three), SurvivorsError, "the survivors"),
        ((one, two, three, replace(three, name="site-005")), SurvivorsError, "the survivors"),
        ((one, two), SurvivorsError, "the number of survivors"),
    ):
        for handler, request in (
            (world.sites[ONE].agree, AgreementRequest(0, receipts)),
            (world.sites[ONE].reveal, RevealRequest(0, receipts, ())),
        ):
            with pytest.raises(ProtocolError) as caught:
                handler(request.to_bytes())
            assert type(caught.value) is kind, caught.value
            assert what in caught.value.what
            assert isinstance(world.sites[ONE].state.slots[0], Masked)
    world.agree(total, [ONE])


def test_the_sites_own_minimum_counts_too() -> None:
    world = ready(5, min_sites=5)
    total = world.start(0)
    world.contribute(total, names(4))
    receipts = tuple(total._receipts.values())
    for least in (world.params.min_sites, 5):
        with pytest.raises(SurvivorsError, match=f"at least {least}"):
            world.sites[ONE].agree(AgreementRequest(0, receipts).to_bytes())
    world = ready(5)
    site = world.sites[ONE]
    site.state = replace(site.state, epoch=replace(site.state.epoch, minimum_cohort=5))
    total = masked(world, 0, ("site-005",))
    with pytest.raises(SurvivorsError, match="at least 5"):
        site.agree(total.agreement_request().to_bytes())


@pytest.mark.parametrize("first", ["agree", "reveal"])
@pytest.mark.parametrize("journalled", [False, True])
def test_one_survivor_set_a_slot_for_ever(first: str, journalled: bool) -> None:
    world = ready(5)
    total = world.start(0)
    world.contribute(total, names(5))
    receipts = tuple(total._receipts[name] for name in names(5))
    total.close()
    fewer = AgreementRequest(0, receipts[:4]).to_bytes()
    site = world.sites[ONE]
    before = site.state
    if first == "agree":
        site.agree(fewer)
        everybody = RevealRequest(0, receipts, ()).to_bytes()
    else:
        world.agree(total, names(5))
        everybody = total.reveal_request().to_bytes()
        site.reveal(everybody)
    if journalled:
        site.state = before  # as after a crash: the journal alone remembers
    else:
        site.entries = []
    with pytest.raises(SurvivorsError, match="before") as caught:
        if first == "agree":
            site.reveal(everybody)
        else:
            site.agree(fewer)
    assert caught.value.code == "TF-611"
    with pytest.raises(SurvivorsError):
        site.agree(AgreementRequest(0, (receipts[0], *receipts[2:])).to_bytes())


def test_after_a_crash_the_same_answer_is_given_bit_for_bit() -> None:
    world = ready()
    total = masked(world, 0, (FOUR,))
    site = world.sites[ONE]
    request = total.agreement_request().to_bytes()
    before = site.state
    agreed = site.agree(request)
    site.state = before
    assert site.agree(request) == agreed
    assert site.agree(request) == agreed
    world.agree(total, names(3))
    before, request = site.state, total.reveal_request().to_bytes()
    revealed = site.reveal(request)
    site.state = before
    assert site.reveal(request) == revealed
    with pytest.raises(StateError, match="revealed"):
        site.reveal(request)


def test_a_slot_without_a_term_answers_nothing() -> None:
    world = ready()
    receipts = masked(world).receipts
    for slot in (1, 2):
        with pytest.raises(StateError, match="masked, but found fresh"):
            world.sites[ONE].reveal(RevealRequest(slot, receipts, ()).to_bytes())
    with pytest.raises(StateError, match="below 3"):
        world.sites[ONE].reveal(RevealRequest(3, receipts, ()).to_bytes())
    with pytest.raises(StateError, match="below 3"):
        world.sites[ONE].agree(AgreementRequest(255, receipts).to_bytes())
    fresh = ready()
    for handler, message in (
        (fresh.sites[ONE].agree, AgreementRequest(0, receipts)),
        (fresh.sites[ONE].reveal, RevealRequest(0, receipts, ())),
    ):
        with pytest.raises(StateError, match="Established"):
            handler(message.to_bytes())


def agreements(
    world: World, receipts: Any, signers: tuple[str, ...], /, **changes: Any
) -> dict[str, Agreement]:
    return {name: signed_agreement(world, name, receipts, **changes) for name in signers}


def test_t_survivors_must_have_signed_this_very_set() -> None:
    world = ready(7)  # t = 5
    gone = ("site-007",)
    here = names(6)
    total = masked(world, 0, gone)
    receipts = total.agreement_request().receipts
    site = world.sites[ONE]
    good = agreements(world, receipts, here[:5])

    def asked(given: dict[str, Agreement]) -> bytes:
        return RevealRequest(0, receipts, tuple(given.values())).to_bytes()

    with pytest.raises(SurvivorsError, match="signed by this site"):
        site.reveal(asked(good))
    world.agree(total, here)
    with pytest.raises(SurvivorsError, match="at least 5, but found 4"):
        site.reveal(asked(agreements(world, receipts, here[:4])))
    with pytest.raises(SurvivorsError, match="at least 5, but found 0"):
        site.reveal(asked({}))
    with pytest.raises(SurvivorsError, match="site-007"):
        site.reveal(asked({**good, **agreements(world, receipts, gone)}))
    for doubled in (dict(reversed(good.items())), {**good, "again": good[here[4]]}):
        with pytest.raises(SurvivorsError, match="sorted, each once"):
            site.reveal(asked(doubled))
    for wrong in (
        agreements(world, receipts, (TWO,), survivors=list(here[:5]))[TWO],
        agreements(world, receipts, (TWO,), receipts=bytes(32))[TWO],
        replace(good[THREE], name=TWO),
        replace(good[TWO], signature=bytes(64)),
    ):
        with pytest.raises(SignatureError) as caught:
            site.reveal(asked({**good, TWO: wrong}))
        assert caught.value.blamed == TWO
    assert isinstance(site.state.slots[0], Agreed)
    shares = msgpack.unpackb(site.reveal(asked(good)))
    assert set(shares["update"]) == set(names(7))
    assert shares["static"] == {}


def test_a_survivors_share_is_of_b_and_a_gone_sites_of_a() -> None:
    world = ready()
    total = masked(world, 0, (FOUR,))
    world.agree(total, names(3))
    held = world.sites[ONE].state.slots[0].shares
    revealed = msgpack.unpackb(world.sites[ONE].reveal(total.reveal_request().to_bytes()))
    expected = {
        name: slot_share(held, place, "update", "pair" if name == FOUR else "self")
        for place, name in enumerate(names(4))
    }
    assert revealed["update"] == expected


def test_the_static_group_is_shut_if_another_job_opened_another_cohort_after_the_term() -> None:
    world = ready()
    total = masked(world)
    world.agree(total, names(4))
    site = world.sites[ONE]
    site.entries.append(journal.StaticOpened(DATASET, (ONE, TWO, THREE), "another job"))
    revealed = msgpack.unpackb(site.reveal(total.reveal_request().to_bytes()))
    assert revealed["static"] == {}
    assert site.entries[-1] == journal.Revealed(JOB, 0, 0, names(4), ("update",))


def test_both_kinds_of_share_are_refused_by_themselves() -> None:
    """Even where a journal's survivor sets were lost, what was revealed forbids the other kind."""
    world = ready()
    total = masked(world)
    world.agree(total, names(4))
    site = world.sites[ONE]
    history = site.history
    history.append(journal.Revealed(JOB, 0, 0, names(3), ("update",)))
    history._survivors.clear()
    with pytest.raises(SurvivorsError, match="of one kind"):
        reveal(site.state, total.reveal_request(), history=history, kept=site.kept.get)


# States ------------------------------------------------------------------------------------------


def states() -> list[Any]:
    world = World(4, slots=5)
    shown = world.enroll()
    found = [world.sites[ONE].state]
    world.confirm(shown)
    found.append(world.sites[ONE].state)
    world.run(1)
    total = masked(world, 2, (FOUR,))
    world.agree(total, names(3))
    found.append(world.sites[ONE].state)
    masked(world, 3)
    found.append(world.sites[ONE].state)
    return found


def test_states_come_back_as_they_were() -> None:
    kinds = []
    for state in states():
        read = type(state).from_bytes(state.to_bytes())
        assert read == state
        assert read.to_bytes() == state.to_bytes()
        kinds.append(type(state).__name__)
    assert kinds == ["Advertised", "Confirmed", "Established", "Established"]


def test_no_state_shows_a_secret() -> None:
    for state in states():
        shown = repr(state) + str(state)
        secrets = [
            state.signing,
            *getattr(state, "secrets", ()),
            *filter(None, [getattr(state, "channel", None)]),
        ]
        secrets += [slot.shares for slot in getattr(state, "slots", ()) if hasattr(slot, "shares")]
        secrets += [slot.secrets for slot in getattr(state, "slots", ()) if hasattr(slot, "secrets")]
        assert len(secrets) > 2
        for secret in secrets:
            for start in range(0, len(secret.expose()) - 31, 16):
                piece = secret.expose()[start : start + 16]
                assert repr(piece)[2:-1] not in shown
                assert piece.hex() not in shown
        with pytest.raises(TypeError):
            pickle.dumps(state)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([]),
        msgpack.packb([1, "advertised", 1, 2, 3, 4, 5, 6]),
        msgpack.packb([2, "advertised", 1, 2, 3, 4, 5, 6]),
        msgpack.packb([4, "advertised", 1, 2, 3, 4, 5, 6]),
        msgpack.packb([3, "confirmed", 1, 2, 3, 4, 5, 6]),
        msgpack.packb([3, "advertised", 1]),
        msgpack.packb([3, "advertised", None, None, None, None, None, None]),
        msgpack.packb(
            [3, "advertised", [make_params(3).to_bytes(), "a", "b", 3, False], b"", 32, b"", b"", []]
        ),
    ],
)
def test_what_is_no_stored_state_is_refused(raw: bytes) -> None:
    with pytest.raises(StateError, match="version 3 of advertised") as caught:
        Advertised.from_bytes(raw)
    assert caught.value.code == "TF-609"


@pytest.mark.parametrize("kind", [Confirmed, Established])
def test_a_state_is_not_read_as_another(kind: Any) -> None:
    raw = states()[0].to_bytes()
    with pytest.raises(StateError):
        kind.from_bytes(raw)


def test_a_slot_of_an_unknown_kind_is_refused() -> None:
    raw = msgpack.unpackb(states()[2].to_bytes())
    raw[-3][0] = ["forgotten"]
    with pytest.raises(StateError):
        Established.from_bytes(msgpack.packb(raw))


def test_only_slots_are_stored_as_slots() -> None:
    state = states()[2]
    with pytest.raises(AssertionError):
        replace(state, slots=(*state.slots[:-1], "fresh")).to_bytes()
