"""What attacks have in common: worlds that are ready for sums, refusals, and what a server can compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.protocol import World, add_integers, make_params, names, signer, verifier

from tightframe.securesum import messages
from tightframe.securesum.checks import box_bound, box_key, link, pair_secret
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.masks import keystream, pair_key
from tightframe.securesum.messages import (
    Advertisement,
    Agreement,
    AgreementRequest,
    Group,
    Masked,
    RevealRequest,
    links_of,
)
from tightframe.securesum.primitives import (
    KEM_CIPHERTEXT_BYTES,
    NONCE_BYTES,
    Secret,
    ed25519_sign,
    kem_decapsulate,
    kem_encapsulate,
    open_sealed,
    seal,
    x25519,
)
from tightframe.securesum.server import Enrolment, Session, Sum
from tightframe.securesum.shamir import recover
from tightframe.securesum.site.state import slot_secret


def ready(sites: int = 4, **options: Any) -> World:
    """Sites and server with an epoch set up."""
    world = World(sites, **options)
    world.set_up()
    return world


def dealing_falsely(
    monkeypatch: pytest.MonkeyPatch,
    liar: str,
    victim: str,
    *,
    slot: int,
    group: Group = "update",
    sites: int = 6,
    **options: Any,
) -> World:
    """A world in which a silo seals another pair secret for a victim than its seed gives, and signs its hash.

    The victim cannot see it. It is that of one slot and group.
    """
    world = World(sites, **options)
    shown = world.enroll()
    world.session = Session(world.params, shown)

    def crooked(seed: bytes, session: bytes, at: int, of: Group, dealer: str, holder: str) -> bytes:
        right = pair_secret(seed, session, at, of, dealer, holder)
        return bytes(32) if (holder, at, of) == (victim, slot, group) else right

    for name, site in world.sites.items():
        with monkeypatch.context() as patch:
            if name == liar:
                patch.setattr("tightframe.securesum.site.setup.pair_secret", crooked)
            world.session.add(name, site.confirm(shown.to_bytes()))
    return world


def custom(roster: Iterable[str], **options: Any) -> World:
    """A world of sites with names of one's choice."""
    roster = tuple(roster)
    world = World(len(roster), roster=roster, **options)
    for site in world.sites.values():
        site.expected = replace(site.expected, sites=frozenset(roster))
    return world


def agreeing(slot: int, receipts: Any) -> Any:
    """A site's agreement to these receipts, as a call on the site."""
    return lambda site: site.agree(AgreementRequest(slot, tuple(receipts)).to_bytes())


def revealing(slot: int, receipts: Any, agreements: Iterable[Agreement] = ()) -> Any:
    """A site's shares after these agreements, as a call on the site."""
    given = tuple(sorted(agreements, key=lambda item: item.name))
    return lambda site: site.reveal(RevealRequest(slot, tuple(receipts), given).to_bytes())


def refused(kind: type[ProtocolError], call: Callable[..., Any], *arguments: Any) -> ProtocolError:
    """The refusal, of exactly this class."""
    with pytest.raises(ProtocolError) as caught:
        call(*arguments)
    assert type(caught.value) is kind, caught.value
    return caught.value


def refused_by(
    world: World, sites: Iterable[str], kind: type[ProtocolError], call: Callable[[Any], Any]
) -> None:
    """Each of the sites refuses, stays as it was, and refuses again after a restart."""
    for name in sites:
        site = world.sites[name]
        state, entries = site.state, list(site.entries)
        refused(kind, call, site)
        site.state = type(state).from_bytes(state.to_bytes())
        refused(kind, call, site)
        assert (site.state, site.entries) == (state, entries)


def closed(world: World, slot: int = 0, missing: Iterable[str] = (), **options: Any) -> Sum:
    """A sum whose terms are in."""
    total = world.start(slot, **options)
    world.contribute(total, [name for name in world.params.roster if name not in set(missing)])
    total.close()
    return total


def session_key(world: World, name: str) -> Secret:
    """A site's key of this epoch: what a colluding site tells the server."""
    found: Secret = world.sites[name].state.signing
    return found


def signed_receipt(world: World, receipt: messages.Receipt, **changes: Any) -> messages.Receipt:
    """A receipt with something else in it, signed by a site that plays along."""
    receipt = replace(receipt, **changes)
    key = session_key(world, receipt.name)
    return replace(receipt, signature=ed25519_sign(key, receipt.signed(world.session.session)))


def signed_agreement(
    world: World,
    name: str,
    receipts: Sequence[messages.Receipt],
    /,
    **changes: Any,
) -> messages.Agreement:
    """An agreement of a site that plays along; ``changes`` are of what is signed."""
    first, session = receipts[0], world.session.session
    values: dict[str, Any] = {
        "slot": first.slot,
        "sum_id": first.sum_id,
        "survivors": [item.name for item in receipts],
        "receipts": messages.receipts_digest(session, receipts),
        **changes,
    }
    signature = ed25519_sign(session_key(world, name), messages.agreement_signed(session, **values))
    return messages.Agreement(name, values["slot"], signature)


def agreed(world: World, slot: int = 0, missing: Iterable[str] = (), **options: Any) -> Sum:
    """A sum whose survivors have agreed, if one is missing."""
    total = closed(world, slot, missing, **options)
    world.agree(total, total.survivors)
    return total


def signed_advertisement(world: World, item: Advertisement, **changes: Any) -> Advertisement:
    """An advertisement with something else in it, signed by a site that plays along."""
    item = replace(item, **changes)
    signature = world.sites[item.name].signer.sign(item.signed(world.params.digest()))
    return replace(item, signature=signature)


def own_secrets(world: World, slot: int) -> dict[tuple[str, Group, messages.Kind], bytes]:
    """All b and a of a slot, which no test that plays the server may use but to compare."""
    found = {}
    for name, site in world.sites.items():
        state = site.state
        secrets = state.secrets[slot] if hasattr(state, "secrets") else state.slots[slot].secrets
        for group in messages.GROUPS:
            for kind in messages.KINDS:
                found[name, group, kind] = slot_secret(secrets, group, kind).expose()
    return found


def from_shares(world: World, shares: Mapping[str, bytes]) -> bytes:
    """A secret from holders' shares as they travel, salt first."""
    places = {world.params.index(name): data[messages.SALT_BYTES :] for name, data in shares.items()}
    return recover(places, threshold=world.params.threshold)


def without_pair_masks(
    world: World, name: str, slot: int, group: Group, uploads: Mapping[str, Masked], seed: bytes
) -> bytes:
    """What is left of a site's term once its seed a is known: every mask that it shares comes off.

    For those with earlier sites these sites' links are needed too.
    """
    fields, session, roster = world.params.schemas["train"], world.session.session, world.params.roster
    left = masked = getattr(uploads[name], group)
    for other in roster:
        if other != name:
            secret = pair_secret(seed, session, slot, group, name, other)
            if other < name:
                secret = link(links_of(uploads[other].links, group, roster, other)[name], secret)
            first, second = sorted((name, other))
            mask = keystream(pair_key(secret, session, slot, group, first, second), len(masked))
            plus = negative(fields, group, mask) if name < other else mask
            left = add_integers(fields, group, [{group: left}, {group: plus}])
    return left


def key_of_box(
    world: World, dealer: str, holder: str, box: bytes, session: bytes | None = None
) -> tuple[bytes, bytes]:
    """Key and frame of a box, from its holder's private keys; in another session if one is given."""
    session = world.session.session if session is None else session
    state, ciphertext = world.sites[holder].state, box[:KEM_CIPHERTEXT_BYTES]
    encapsulated = kem_decapsulate(state.decapsulation, ciphertext, owner=dealer)
    agreed = x25519(state.channel, world.session.peers[dealer].channel_key, owner=dealer)
    key = box_key(encapsulated, agreed, session, dealer, holder, ciphertext)
    return key, box_bound(session, dealer, holder)


def opened_box(world: World, dealer: str, holder: str, box: bytes) -> bytes:
    """The plaintext of a box, as its holder opens it."""
    key, bound = key_of_box(world, dealer, holder, box)
    rest = box[KEM_CIPHERTEXT_BYTES:]
    return open_sealed(key, rest[:NONCE_BYTES], rest[NONCE_BYTES:], bound, owner=dealer)


def resealed_box(world: World, dealer: str, holder: str, plain: bytes) -> bytes:
    """A box with other contents, properly sealed by its dealer."""
    peer = world.session.peers[holder]
    encapsulated, ciphertext = kem_encapsulate(peer.encapsulation_key)
    agreed = x25519(world.sites[dealer].state.channel, peer.channel_key, owner=holder)
    key = box_key(encapsulated, agreed, world.session.session, dealer, holder, ciphertext)
    nonce, bound = bytes(NONCE_BYTES), box_bound(world.session.session, dealer, holder)
    return ciphertext + nonce + seal(key, nonce, plain, bound)


def negative(fields: Any, group: Group, data: bytes) -> bytes:
    """The negative of a term, element by element."""
    found, start = b"", 0
    for item in fields:
        if item.group == group:
            width = item.ring // 8
            for _ in range(item.size):
                value = -int.from_bytes(data[start : start + width], "little") % 2**item.ring
                found += value.to_bytes(width, "little")
                start += width
    return found


def difference(fields: Any, group: Group, one: bytes, other: bytes) -> bytes:
    """One total less another."""
    return add_integers(fields, group, [{group: one}, {group: negative(fields, group, other)}])


__all__ = [
    "Enrolment",
    "World",
    "agreed",
    "closed",
    "custom",
    "dealing_falsely",
    "difference",
    "from_shares",
    "key_of_box",
    "make_params",
    "names",
    "negative",
    "opened_box",
    "own_secrets",
    "ready",
    "refused",
    "refused_by",
    "resealed_box",
    "session_key",
    "signed_advertisement",
    "signed_agreement",
    "signed_receipt",
    "signer",
    "verifier",
    "without_pair_masks",
]
