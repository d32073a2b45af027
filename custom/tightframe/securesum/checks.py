"""Formulas and checks that sites and the server share, so that each is written once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tightframe.securesum.errors import IdentityError, KeyAgreementError, RosterError, SignatureError
from tightframe.securesum.identity import Verifier, public_key_hash
from tightframe.securesum.masks import Layout, pair_key
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    AnyAdvertisement,
    FieldSpec,
    Group,
    Kind,
    Params,
    Receipt,
    pair_secret_hash,
)
from tightframe.securesum.primitives import Secret, derive, digest, ed25519_verify, encode_fields, kem_check

Item = TypeVar("Item", bound=AnyAdvertisement)

_PRIME = 2**255 - 19
LOW_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)
"""The u-coordinates of Curve25519 and of its twist whose order divides 8 (RFC 7748, section 6.1)."""

LOW_ORDER_SIGNING = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        2707385501144840649318225287225658788936804267575313519463743609750303402022,
        55188659117513257062467267217118295137698188065244968500265048394206261417927,
    }
)
"""The y-coordinates of edwards25519 whose points' order divides 8 (RFC 8032, section 5.1). With such a key
one signature is valid for any message, and the library does not refuse it."""


def commitment(name: str, slot: int, group: Group, kind: Kind, secret: bytes) -> bytes:
    """Return the commitment of a site to one of its secrets, b or a, of a slot and group: 32 bytes.

    It has the site's name in it, so that another site's commitment is of no use to a site that copies it.
    """
    return digest("commitment", name, slot, group, kind, secret)


def box_key(
    encapsulated: bytes, agreed: bytes, session: bytes, dealer: str, holder: str, ciphertext: bytes
) -> bytes:
    """Derive the AES-256 key of the box from ``dealer`` to ``holder`` from two shared secrets.

    Whoever finds one of the two has nothing. Their order is that of X25519MLKEM768 in TLS
    (draft-ietf-tls-ecdhe-mlkem). The session binds all four public keys, ``fields`` the names and the
    ciphertext, so that a ciphertext works for one dealer, holder and session only.

    Args:
        encapsulated: of ML-KEM-768, from the dealer to the holder's encapsulation key: 32 bytes.
        agreed: X25519 of their channel keys: 32 bytes.
        session: T.
        dealer: the site that dealt the shares.
        holder: the site that receives them.
        ciphertext: of ``encapsulated``.
    """
    return derive(encapsulated + agreed, salt=session, tag="box", fields=(dealer, holder, ciphertext))


def box_bound(session: bytes, dealer: str, holder: str) -> bytes:
    """Return the associated data of a box."""
    return encode_fields("box", session, dealer, holder)


def pair_secret(seed: bytes, session: bytes, slot: int, group: Group, dealer: str, holder: str) -> bytes:
    """Derive the pair secret r from ``dealer`` to ``holder``: 32 bytes.

    If the dealer comes first in the roster, it keys the mask between the two (``masks.pair_key``). If the
    dealer comes second, it is the one-time pad of a link (``link``) and used for nothing else.

    Args:
        seed: a of the dealer, of this slot and group.
        session: T.
        dealer: the site that derives it, and seals it for the holder.
        holder: the other.
    """
    return derive(seed, salt=session, tag="pair secret", fields=(slot, group, dealer, holder))


def link(one: bytes, other: bytes) -> bytes:
    """Return the XOR of the two pair secrets between two sites: each of them gives the other, by itself none.

    The first site sends it with its term. The server has one of the two secrets once it has recovered the
    seed a of one of the sites.
    """
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def key_hash(session: bytes, slot: int, group: Group, one: str, other: str, secret: bytes) -> bytes:
    """Return the hash of the pair secret that keys the mask between two sites: 32 bytes.

    It is the one that its dealer, the first of the two in the roster, signed at the setup.
    """
    first, second = sorted((one, other))  # the roster is sorted
    return pair_secret_hash(session, first, second, slot, group, secret)


def dropped_secrets(
    session: bytes,
    slot: int,
    group: Group,
    site: str,
    seeds: Mapping[str, Secret],
    links: Mapping[str, bytes],
) -> dict[str, tuple[bytes, bytes]]:
    """Return every dropped site -> the pair secret from it to a survivor, and the one that keys their mask.

    The two are the same if the dropped site comes before the survivor. If it comes after it, the second is
    the survivor's own, which its link gives.

    Args:
        session: T.
        seeds: dropped site -> its pair seed a of this slot and group.
        links: the survivor's, of this group (``messages.links_of``).
    """
    pair_secrets = {}
    for dropped, seed in sorted(seeds.items()):
        dealt = pair_secret(seed.expose(), session, slot, group, dropped, site)
        pair_secrets[dropped] = (dealt, dealt if dropped < site else link(links[dropped], dealt))
    return pair_secrets


def dropped_masks(
    session: bytes, slot: int, group: Group, site: str, secrets: Mapping[str, tuple[bytes, bytes]]
) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of the streams to add and to subtract, so that no mask with a dropped site is left.

    Args:
        session: T.
        site: a survivor.
        secrets: from ``dropped_secrets``.
    """
    plus: list[bytes] = []
    minus: list[bytes] = []
    for dropped, (_, secret) in secrets.items():
        first, second = sorted((site, dropped))  # the roster is sorted
        # The survivor added this stream if the dropped site comes after it, else it subtracted it.
        (minus if site == first else plus).append(pair_key(secret, session, slot, group, first, second))
    return plus, minus


def masked_hash(masked: bytes, links: bytes) -> bytes:
    """Return the SHA-256 of a group's masked bytes after all links, as in a receipt.

    The parameters fix the length of either.
    """
    hashed = hashlib.sha256(links)
    hashed.update(masked)
    return hashed.digest()


def group_layout(fields: Sequence[FieldSpec], group: Group) -> Layout:
    """Return the layout of one group of a schema."""
    return Layout.of([item for item in fields if item.group == group])


def verify(public: bytes, signature: bytes, message: bytes, *, owner: str, what: str) -> None:
    """Check an Ed25519 signature and, if it is wrong, set ``blamed`` to its owner.

    A site receives all messages from the server, which checks the same before it relays them. So a
    site may rely on ``blamed`` only if the server follows the protocol.

    Raises:
        SignatureError: TF-603.
    """
    try:
        ed25519_verify(public, signature, message, owner=owner, what=what)
    except SignatureError as error:
        error.blamed = owner
        raise


def verify_advertisement(verifier: Verifier, item: AnyAdvertisement, params_digest: bytes) -> None:
    """Verify an advertisement and, if it is invalid, set ``blamed`` to its site.

    Raises:
        IdentityError: TF-602.
        SignatureError: TF-603.
    """
    try:
        verifier.check(item, params_digest)
    except (IdentityError, SignatureError) as error:
        error.blamed = error.blamed or item.name
        raise


def verify_receipt(receipt: Receipt, session: bytes, key: bytes) -> None:
    """Check that a receipt is signed, in this session, with its site's session key.

    Raises:
        SignatureError: TF-603.
    """
    verify(key, receipt.signature, receipt.signed(session), owner=receipt.name, what="a receipt")


def read_advertisements(params: Params, message: Advertisements) -> tuple[Advertisement, ...]:
    """Read the advertisements of exactly the roster, in its order.

    Raises:
        MessageError: TF-604.
        RosterError: TF-605, if one is missing, extra or out of order.
    """
    return in_roster_order(
        params, [Advertisement.from_bytes(raw, slots=params.slots) for raw in message.items]
    )


def in_roster_order(params: Params, items: Sequence[Item]) -> tuple[Item, ...]:
    """Return advertisements that are of exactly the roster, in its order.

    Raises:
        RosterError: TF-605, if one is missing, extra or out of order.
    """
    names = [item.name for item in items]
    if names != list(params.roster):
        raise RosterError(
            "the sites of the advertisements", expected=f"the roster {list(params.roster)}", found=str(names)
        )
    return tuple(items)


class Keys:
    """Every public key of an epoch seen so far, so that none is used twice."""

    def __init__(self) -> None:
        self._owners: dict[bytes, str] = {}

    def add(self, item: AnyAdvertisement) -> None:
        """Add one advertisement's keys.

        If two sites use the same key, neither is blamed: both signed it, and which of them had it first
        is not known.

        Raises:
            IdentityError: TF-602, if another site has the same provisioned key.
            KeyAgreementError: TF-606, if another key is malformed, of low order or occurred before.
        """
        owners = {public_key_hash(item.certificate): item.name}
        if owners.keys() & self._owners.keys():
            raise IdentityError(
                f"the provisioned key of {item.name}",
                expected="its own",
                found=f"that of {self._owners[next(iter(owners))]}",
            )
        _check_signing(item.session_key, item.name)
        agreement = [_canonical(key, item.name) for key in item.agreement_keys]
        for key in item.encapsulation_keys:
            kem_check(key, owner=item.name)
        for key in (item.session_key, *agreement, *item.encapsulation_keys):
            if key in owners or key in self._owners:
                other = self._owners.get(key, item.name)
                raise KeyAgreementError(
                    f"a public key of {item.name}",
                    expected="used once",
                    found=f"also one of {other}",
                    blamed=item.name if other == item.name else None,
                )
            owners[key] = item.name
        self._owners |= owners


def _check_signing(key: bytes, owner: str) -> None:
    """Check that an Ed25519 key is in its canonical encoding and of full order."""
    coordinate = int.from_bytes(key, "little") & (2**255 - 1)  # the last bit is the sign of x
    if coordinate >= _PRIME or coordinate in LOW_ORDER_SIGNING:
        raise KeyAgreementError(
            f"the session key of {owner}",
            expected="a point of full order",
            found="one of low order, or not in its canonical encoding",
            blamed=owner,
        )


def _canonical(key: bytes, owner: str) -> bytes:
    """Return the canonical one of an X25519 key's encodings (RFC 7748, section 5); refuse low order."""
    coordinate = (int.from_bytes(key, "little") & (2**255 - 1)) % _PRIME
    if coordinate in LOW_ORDER:
        raise KeyAgreementError(
            f"an X25519 key of {owner}",
            expected="a point of full order",
            found="one of low order",
            blamed=owner,
        )
    return coordinate.to_bytes(32, "little")
