"""Attacks on who a site is: the server relays what it likes, and every honest site refuses by name."""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.securesum import certificates
from tests.support.securesum.hostile import (
    closed,
    custom,
    make_params,
    names,
    ready,
    refused,
    refused_by,
    session_key,
    signed_advertisement,
    signer,
    verifier,
)
from tests.support.securesum.protocol import FixedSigner, World, root

from tightframe.securesum import messages
from tightframe.securesum.checks import verify
from tightframe.securesum.errors import (
    IdentityError,
    KeyAgreementError,
    ProtocolError,
    RecoveryError,
    RosterError,
    SignatureError,
)
from tightframe.securesum.identity import Anchor, KeySigner, public_key_hash, verify_signature
from tightframe.securesum.messages import Advertisement, Advertisements, Agreement, SumId
from tightframe.securesum.primitives import ed25519_sign, encode_fields
from tightframe.securesum.server import Session

ONE, TWO, THREE, FOUR = names(4)


def shown_with(world: World, shown: Advertisements, item: Advertisement | bytes, place: int = 1) -> bytes:
    """What the server relays, with one advertisement replaced."""
    raw = item if isinstance(item, bytes) else item.to_bytes()
    return Advertisements((*shown.items[:place], raw, *shown.items[place + 1 :])).to_bytes()


def advertisement(shown: Advertisements, place: int = 1) -> Advertisement:
    return Advertisement.from_bytes(shown.items[place], slots=3)


@pytest.mark.parametrize(
    "earlier",
    [
        {"job": "job-0"},
        {"epoch": 1},
        {"roster": (ONE, TWO, THREE), "threshold": 3},
        {"lineage": "job-0"},
        {"static_open": False},
        {"config_sha256": bytes(32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_replayed_advertisement_of_another_job_epoch_or_cohort_is_refused(earlier: dict[str, Any]) -> None:
    """All that the provisioned key signed in an earlier setup is signed for that setup."""
    before = make_params(4, **earlier)
    old = World(4).sites[TWO]
    old.expected = replace(
        old.expected, job=before.job, lineage=before.lineage, config_sha256=before.config_sha256
    )
    replayed = old.advertise(before.to_bytes())
    world = World(4)
    shown = world.enroll()
    error = refused(SignatureError, world.sites[ONE].confirm, shown_with(world, shown, replayed))
    assert error.blamed == TWO
    refused_by(
        world,
        (ONE, THREE, FOUR),
        SignatureError,
        lambda site: site.confirm(shown_with(world, shown, replayed)),
    )


@pytest.mark.parametrize("part", ["channel_key", "session_key", "slots", "application", "encapsulation_key"])
@pytest.mark.parametrize("by", ["nobody", "another site", "a key of the server"])
def test_forged_keys_are_refused_whoever_signs_them(part: str, by: str) -> None:
    world = World(4)
    shown = world.enroll()
    value = b"a lighter weight" if part == "application" else getattr(other_world(), part)
    assert value != getattr(advertisement(shown), part)
    forged = replace(advertisement(shown), **{part: value})
    key = {"another site": signer(THREE), "a key of the server": FixedSigner(certificates.fresh_key(), b"")}
    if by in key:
        signature = key[by].sign(forged.signed(world.params.digest()))
        forged = replace(forged, signature=signature)
    message = shown_with(world, shown, forged)
    refused_by(world, (ONE, THREE), SignatureError, lambda site: site.confirm(message))


def other_world() -> Advertisement:
    return advertisement(World(4, seed="forger").enroll())


def impostor(world: World, shown: Advertisements, issued: certificates.Issued) -> bytes:
    """The second site's place, taken by whoever has this key: its keys are signed as they should be."""
    item = replace(advertisement(shown), certificate=issued.certificate)
    signature = FixedSigner(issued.key, b"").sign(item.signed(world.params.digest()))
    return shown_with(world, shown, replace(item, signature=signature))


def site_as_issuer() -> certificates.Issued:
    return certificates.Issued(signer(THREE).key, signer(THREE).certificate)


IMPOSTORS = {
    "another CA": lambda: certificates.issue(certificates.make_root("other"), TWO),
    "another CA of the same name": lambda: certificates.issue(certificates.make_root("project"), TWO),
    "another site": lambda: certificates.Issued(signer(THREE).key, signer(THREE).certificate),
    "expired": lambda: certificates.issue(root(), TWO, end=certificates.AT - timedelta(seconds=1)),
    "not yet valid": lambda: certificates.issue(root(), TWO, start=certificates.AT + timedelta(seconds=1)),
    "issued by a site's leaf": lambda: certificates.issue(site_as_issuer(), TWO),
    "an admin's": lambda: certificates.issue(root(), TWO, role="project_admin"),
    "a lead's": lambda: certificates.issue(root(), TWO, role="lead"),
    "the server's": lambda: certificates.issue(root(), TWO, role="server"),
    "the server's own name": lambda: certificates.issue(root(), "server", role=None),
    "two roles": lambda: certificates.issue(root(), TWO, roles=("client", "server")),
    "two names": lambda: certificates.issue(root(), TWO, THREE),
    "a CA": lambda: certificates.issue(root(), TWO, extensions=certificates.leaf_extensions(ca=True)),
    "a longer name": lambda: certificates.issue(root(), TWO + "0"),
    "a shorter name": lambda: certificates.issue(root(), TWO[:-1]),
}


@pytest.mark.parametrize("who", IMPOSTORS)
def test_a_certificate_that_is_not_the_sites_own_is_refused(who: str) -> None:
    world = World(4)
    shown = world.enroll()
    message = impostor(world, shown, IMPOSTORS[who]())
    refused_by(world, (ONE, THREE), IdentityError, lambda site: site.confirm(message))


def test_a_site_minted_with_the_ca_key_is_accepted_without_pins_and_refused_with() -> None:
    """Who holds the root's key can be any site. Only what a site has pinned itself stops that."""
    minted = certificates.issue(root(), TWO)
    world = World(4)
    world.sites[TWO].signer = FixedSigner(minted.key, minted.certificate)
    shown = world.enroll()
    pins = {TWO: frozenset({public_key_hash(signer(TWO).certificate)})}
    careful = world.sites[THREE]
    careful.verifier = verifier(pins=pins)
    error = refused(IdentityError, careful.confirm, shown.to_bytes())
    assert error.blamed == TWO
    assert next(iter(pins[TWO])).hex() in error.expected
    careful.verifier = verifier()
    world.confirm(shown)
    assert world.run(0).groups == world.plain(names(4))  # the impostor takes part, unnoticed
    strict = World(4)
    strict.sites[ONE].verifier = verifier(pinned_only=True)
    refused(IdentityError, strict.confirm, strict.enroll())


def test_the_servers_own_certificate_in_a_roster_with_its_name_is_refused() -> None:
    """Central test provisioning writes no role: then only the name tells the server from a site."""
    roster = ("site-a", "site-b", "the-server")
    world = custom(roster)
    anchor = Anchor(root().certificate, missing_role=True, not_sites=frozenset({"the-server"}))
    for site in world.sites.values():
        site.verifier = verifier(anchor=anchor)
    shown = world.enroll()
    error = refused(IdentityError, world.sites["site-a"].confirm, shown.to_bytes())
    assert error.blamed == "the-server"


def test_every_kind_of_signature_is_good_for_one_purpose_only() -> None:
    """A session key signs five kinds of strings: none of these signatures passes for another."""
    world = ready()
    total = closed(world, missing=(FOUR,))
    session, key = world.session.session, session_key(world, ONE)
    receipt = total.receipts[0]
    reveal = messages.Reveal(ONE, 0, {}, {}, b"")
    strings = {
        "hashes": messages.hashes_signed(session, ONE, []),
        "ready": messages.ready_signed(session, ONE),
        "receipt": receipt.signed(session),
        "agreement": messages.agreement_signed(session, 0, total.sum_id, total.survivors, bytes(32)),
        "reveal": reveal.signed(session),
    }
    public = world.session.peers[ONE].session_key
    for (one, signed), (_, string) in itertools.permutations(strings.items(), 2):
        signature = ed25519_sign(key, signed)
        verify(public, signature, signed, owner=ONE, what=one)
        refused(SignatureError, lambda s=string, g=signature: verify(public, g, s, owner=ONE, what="x"))
    for signed in strings.values():
        if signed != strings["agreement"]:
            raw = Agreement(ONE, 0, ed25519_sign(key, signed)).to_bytes()
            refused(SignatureError, total.add_agreement, ONE, raw)


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_cross_protocol_signatures_of_the_provisioned_key_are_no_advertisements(kind: Any) -> None:
    """The engine lets the server choose text that a site signs with the same key: a login challenge."""
    issued = certificates.issue(root(), ONE, key=kind)
    world = World(3)
    shown = world.enroll()
    item = replace(advertisement(shown, 0), certificate=issued.certificate)
    wanted = item.signed(world.params.digest())
    with pytest.raises(UnicodeDecodeError):
        wanted.decode()
    if kind == "ec":  # what the oracle would sign for the text that comes closest
        text = wanted.decode("utf-8", errors="replace").encode()
        oracle = [issued.key.sign(text, ec.ECDSA(hashes.SHA256()))]
        oracle += [issued.key.sign(hashlib.sha256(wanted).hexdigest().encode(), ec.ECDSA(hashes.SHA256()))]
    else:
        from cryptography.hazmat.primitives.asymmetric import padding

        longest = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH)
        # Even were it to sign these very bytes, its padding is another.
        oracle = [issued.key.sign(wanted, longest, hashes.SHA256())]
        oracle += [issued.key.sign(wanted, padding.PKCS1v15(), hashes.SHA256())]
    for signature in oracle:
        forged = replace(item, signature=signature)
        message = shown_with(world, shown, forged, 0)
        refused(SignatureError, world.sites[TWO].confirm, message)
        refused(
            SignatureError,
            lambda s=signature: verify_signature(
                issued.certificate, wanted, s, owner=ONE, what="an advertisement"
            ),
        )
    with pytest.raises(ValueError, match="protocol's strings"):
        KeySigner(issued.key, issued.certificate).sign(b"a login challenge")
    # The provisioned key's own strings are one kind, and are not those of a session key.
    assert not wanted.startswith(encode_fields("receipt"))


@pytest.mark.parametrize("thief_first", [False, True])
@pytest.mark.parametrize("stolen", ["channel_key", "session_key", "encapsulation_key"])
def test_a_malicious_site_that_uses_anothers_public_key_is_refused(stolen: str, thief_first: bool) -> None:
    """Reflected keys: its boxes could be opened by another."""
    thief, victim = (ONE, TWO) if thief_first else (THREE, TWO)
    world = World(4)
    shown = world.enroll()
    own, other = (advertisement(shown, world.params.index(name)) for name in (thief, victim))
    forged = signed_advertisement(world, own, **{stolen: getattr(other, stolen)})
    message = shown_with(world, shown, forged, world.params.index(thief))
    sites = [name for name in names(4) if name != thief]
    refused_by(world, sites, KeyAgreementError, lambda site: site.confirm(message))


def test_another_sites_commitments_are_of_no_use() -> None:
    """They have the name of their site in them: who copies them can reveal nothing that fits."""
    world = World(4)
    shown = world.enroll()
    own, other = advertisement(shown, 3), advertisement(shown, 1)
    forged = signed_advertisement(world, own, slots=other.slots)
    shown = Advertisements.from_bytes(shown_with(world, shown, forged, 3))
    thief, victim = world.sites[FOUR], world.sites[TWO]
    # It even has the other's secrets, by collusion.
    thief.state = replace(thief.state, advertisement=forged.to_bytes(), secrets=victim.state.secrets)
    world.confirm(shown)
    total = world.start(0)
    world.contribute(total, names(4))
    total.close()
    world.agree(total, names(4))
    world.reveal(total, names(4))
    assert refused(RecoveryError, total.open).blamed == FOUR


@pytest.mark.parametrize("thief", [TWO, THREE])
def test_a_stolen_key_does_not_get_its_owner_blamed(thief: str) -> None:
    """Whoever comes later in the roster shows "another's" key, and may be whom it was stolen from."""
    world = World(4)
    shown = world.enroll()
    victim = THREE if thief == TWO else TWO
    own, other = (advertisement(shown, world.params.index(name)) for name in (thief, victim))
    forged = signed_advertisement(world, own, channel_key=other.channel_key)
    message = shown_with(world, shown, forged, world.params.index(thief))
    error = refused(KeyAgreementError, world.sites[ONE].confirm, message)
    assert error.blamed is None
    assert {TWO, THREE} == {name for name in names(4) if name in str(error)}


@pytest.mark.parametrize("number", [9, 9 + 2**255, 9 + 2**255 - 19, 9 + 2**255 - 19 + 2**255])
def test_another_encoding_of_anothers_key_is_the_same_key(number: int) -> None:
    """X25519 ignores the top bit and takes numbers from 2^255 - 19 on, so that a key has several forms."""
    world = World(4)
    shown = world.enroll()
    for place, key in ((1, 9), (2, number)):
        forged = signed_advertisement(
            world, advertisement(shown, place), channel_key=key.to_bytes(32, "little")
        )
        shown = Advertisements.from_bytes(shown_with(world, shown, forged, place))
    error = refused(KeyAgreementError, world.sites[ONE].confirm, shown.to_bytes())
    assert error.found == f"also one of {TWO}"


UNUSUAL = {
    "prefixes of each other": ("a", "aa", "aaa", "aaaa"),
    "look like joined names": ("a", "a,b", "b", "b]"),
    "unicode that normalises equal": tuple(
        sorted((unicodedata.normalize("NFC", "zürich"), unicodedata.normalize("NFD", "zürich"), "x"))
    ),
    "other scripts and signs": tuple(sorted(("клиника", "病院", "site\n2", "\U0001f3e5"))),
    "longest": tuple(sorted(("x" * 64, "x" * 63, "é" * 32))),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_names_are_different_sites_and_their_sum_is_exact(kind: str) -> None:
    world = custom(UNUSUAL[kind], stored=True)
    world.set_up()
    assert world.run(0).groups == world.plain(world.params.roster)
    if len(world.params.roster) == 4:
        opened = world.run(1, drop_term=[world.params.roster[1]])
        assert opened.groups["update"] == world.plain(opened.survivors)["update"]


def test_a_name_that_only_normalises_to_a_sites_name_is_not_that_site() -> None:
    composed, decomposed = (unicodedata.normalize(form, "zürich") for form in ("NFC", "NFD"))
    assert composed != decomposed
    world = custom(("x", "y", composed))
    shown = world.enroll()
    stolen = certificates.issue(root(), decomposed)
    item = replace(advertisement(shown, 2), certificate=stolen.certificate)
    signature = FixedSigner(stolen.key, b"").sign(item.signed(world.params.digest()))
    message = shown_with(world, shown, replace(item, signature=signature), 2)
    refused(IdentityError, world.sites["x"].confirm, message)
    renamed = signed_advertisement(world, advertisement(shown, 2))
    message = shown_with(world, shown, replace(renamed, name=decomposed), 2)
    refused(RosterError, world.sites["x"].confirm, message)


def test_an_honest_server_names_who_sent_the_forgery_and_goes_on() -> None:
    world = World(4, seed=1)
    raw = {name: site.advertise(world.params.to_bytes()) for name, site in world.sites.items()}
    one = Advertisement.from_bytes(raw[ONE], slots=3)
    world.enrolment.add(ONE, raw[ONE])
    two = Advertisement.from_bytes(raw[TWO], slots=3)
    for forged in (
        signed_advertisement(world, two, session_key=one.session_key),
        signed_advertisement(world, two, channel_key=bytes(32)),
        replace(two, signature=one.signature),
        replace(two, certificate=one.certificate),
    ):
        with pytest.raises(ProtocolError) as caught:
            world.enrolment.add(TWO, forged.to_bytes())
        assert caught.value.blamed == TWO
    for name in (TWO, THREE, FOUR):
        world.enrolment.add(name, raw[name])
    assert isinstance(world.confirm(world.enrolment.relay()), Session)
    assert world.run(0, sum_id=SumId(3, "x")).groups == world.plain(names(4))
