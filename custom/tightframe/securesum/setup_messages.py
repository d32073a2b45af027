"""The messages of an epoch's setup: keys advertised, shares dealt, and that every site is ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tightframe.securesum import reading
from tightframe.securesum.params import GROUPS, Group, Params
from tightframe.securesum.primitives import (
    HASH_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    Value,
    digest,
    encode_fields,
)
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS

Kind = Literal["self", "pair"]
"""What a share is of: the self mask's seed b, or the slot's X25519 private key s."""
KINDS: tuple[Kind, ...] = ("self", "pair")

SALT_BYTES = 16
SHARE_BYTES = SALT_BYTES + KEY_BYTES
"""A share as it travels: its salt, then the share."""
MAX_CERTIFICATE = 8192
MAX_SIGNATURE = 1024
MAX_APPLICATION = 4096
MAX_ADVERTISEMENT = MAX_CERTIFICATE + MAX_APPLICATION + MAX_SIGNATURE + 512 + MAX_SLOTS * 128
"""Of an advertisement as it travels: its longest parts, and room for the rest."""


@dataclass(frozen=True)
class Advertisement(reading.SizedMessage):
    """i -> S -> all: a site's identity and public keys of one epoch, signed with its provisioned key.

    Attributes:
        name: the site.
        certificate: its certificate, DER.
        channel_key: X25519 public key of its boxes.
        session_key: Ed25519 public key of everything that it signs in this epoch.
        slots: for each slot, for each group: X25519 public key (32 bytes), commitment to b (32 bytes).
        application: bytes of the application, bound like the rest (public weight, and so on).
        signature: by the provisioned key, over ``signed(params_digest)``.
    """

    name: str
    certificate: bytes
    channel_key: bytes
    session_key: bytes
    slots: bytes
    application: bytes
    signature: bytes

    def signed(self, params_digest: bytes) -> bytes:
        """The string that ``signature`` is over."""
        return encode_fields(
            "advertisement",
            params_digest,
            self.name,
            self.certificate,
            self.channel_key,
            self.session_key,
            self.slots,
            self.application,
        )

    def slot_key(self, slot: int, group: Group) -> bytes:
        """The X25519 public key of a slot and group."""
        return self._slot_part(slot, group)[:KEY_BYTES]

    def commitment(self, slot: int, group: Group) -> bytes:
        """The commitment to b of a slot and group."""
        return self._slot_part(slot, group)[KEY_BYTES:]

    def _slot_part(self, slot: int, group: Group) -> bytes:
        start = (slot * len(GROUPS) + GROUPS.index(group)) * (KEY_BYTES + HASH_BYTES)
        return self.slots[start : start + KEY_BYTES + HASH_BYTES]

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Advertisement:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls.read(
            raw,
            {
                "name": reading.text(64),
                "certificate": reading.blob(1, MAX_CERTIFICATE),
                "channel_key": reading.blob(KEY_BYTES),
                "session_key": reading.blob(KEY_BYTES),
                "slots": reading.blob(slots * len(GROUPS) * (KEY_BYTES + HASH_BYTES)),
                "application": reading.blob(0, MAX_APPLICATION),
                "signature": reading.blob(1, MAX_SIGNATURE),
            },
        )


def session_id(params: Params, advertisements: Sequence[Advertisement]) -> bytes:
    """T: SHA-256 over the parameters and all advertisements in roster order, signatures included."""
    parameters = params.digest()
    shown: list[Value] = [[item.signed(parameters), item.signature] for item in advertisements]
    return digest("session", parameters, shown)


@dataclass(frozen=True)
class Advertisements(reading.Message):
    """S -> i: all advertisements, each as it came, in roster order."""

    items: tuple[bytes, ...]

    KEYS = MappingProxyType(
        {
            "items": reading.sequence(reading.blob(1, MAX_ADVERTISEMENT), 1, MAX_SITES),
        }
    )


def box_plain_bytes(slots: int) -> int:
    """Plain size of a box: for each slot, group and kind a salt and a share."""
    return slots * len(GROUPS) * len(KINDS) * SHARE_BYTES


def share_offset(slot: int, group: Group, kind: Kind, width: int) -> int:
    """Where a share (or its hash) lies in a box (or list of hashes) whose entries have ``width`` bytes."""
    return ((slot * len(GROUPS) + GROUPS.index(group)) * len(KINDS) + KINDS.index(kind)) * width


def share_hash(
    session: bytes, dealer: str, holder: str, slot: int, group: Group, kind: Kind, salted: bytes
) -> bytes:
    """The salted hash of one share, which its dealer signs: 32 bytes. ``salted`` is salt then share."""
    return digest("share", session, dealer, holder, slot, group, kind, salted)


@dataclass(frozen=True)
class Confirmation(reading.SizedMessage):
    """i -> S: the boxes for all others, hashes of every share, and that this site is ready.

    Attributes:
        name: the dealer.
        boxes: holder (every other site) -> nonce (12 bytes) and sealed shares.
        hashes: holder (every site, the dealer too) -> hashes of its shares, in the order of ``share_offset``.
        hashes_signature: Ed25519 over ``hashes_signed``.
        ready: Ed25519 over ``ready_signed``.
    """

    name: str
    boxes: Mapping[str, bytes]
    hashes: Mapping[str, bytes]
    hashes_signature: bytes
    ready: bytes

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Confirmation:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls.read(
            raw,
            {
                "name": reading.text(64),
                "boxes": reading.mapping(_box(slots), 0, MAX_SITES),
                "hashes": reading.mapping(_hashes(slots), 1, MAX_SITES),
                "hashes_signature": reading.blob(SIGNATURE_BYTES),
                "ready": reading.blob(SIGNATURE_BYTES),
            },
        )


def hashes_digest(hashes: bytes) -> bytes:
    """SHA-256 over one holder's list of share hashes."""
    return digest("share-hashes-of-one", hashes)


def hashes_signed(session: bytes, dealer: str, digests: Sequence[bytes]) -> bytes:
    """What a dealer signs of its share hashes: ``hashes_digest`` of every holder, in roster order."""
    return encode_fields("share-hashes", session, dealer, list(digests))


def ready_signed(session: bytes, name: str) -> bytes:
    """What a site signs to say that it has seen this session and no other."""
    return encode_fields("ready", session, name)


@dataclass(frozen=True)
class Dealt(reading.Record):
    """What one dealer dealt to one site: part of ``Setup``.

    Attributes:
        box: nonce and sealed shares; empty for the site itself.
        hashes: of this site's shares.
        digests: ``hashes_digest`` of every holder, in roster order, joined.
        signature: the dealer's, over ``hashes_signed``.
        ready: the dealer's ``Ready``.
    """

    box: bytes
    hashes: bytes
    digests: bytes
    signature: bytes
    ready: bytes


@dataclass(frozen=True)
class Setup(reading.SizedMessage):
    """S -> i, with the first request for a term: dealer (every site) -> what it dealt to this site."""

    dealt: Mapping[str, Dealt]

    @classmethod
    def from_bytes(cls, raw: bytes, *, sites: int, slots: int) -> Setup:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        dealt = reading.built(
            Dealt,
            {
                "box": reading.either(reading.blob(0), _box(slots)),
                "hashes": _hashes(slots),
                "digests": reading.blob(sites * HASH_BYTES),
                "signature": reading.blob(SIGNATURE_BYTES),
                "ready": reading.blob(SIGNATURE_BYTES),
            },
        )
        return cls.read(raw, {"dealt": reading.mapping(dealt, sites, sites)})


def _box(slots: int) -> reading.Check:
    """Reads a box: nonce, sealed shares and the tag of AES-GCM."""
    return reading.blob(NONCE_BYTES + box_plain_bytes(slots) + 16)


def _hashes(slots: int) -> reading.Check:
    """Reads the hashes of one holder's shares."""
    return reading.blob(slots * len(GROUPS) * len(KINDS) * HASH_BYTES)
