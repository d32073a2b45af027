"""The protocol's messages: frozen values, each with one wire format.

A message is a msgpack map with exactly the keys of its class. Keys, types, sizes and trailing bytes
are checked before any value is used. Signatures and hashes never cover the wire format, but
``primitives.encode_fields`` of the fields. All other modules import the messages from here.

Order of exchanges (S is the server, i a site)::

    S -> i  Params              i -> S  Advertisement     task "enroll"
    S -> i  Advertisements      i -> S  Confirmation      task "confirm"
    S -> i  TermRequest         i -> S  Masked            task "contribute" (the first with a Setup)
    S -> i  AgreementRequest    i -> S  Agreement         task "agree", if a site is missing
    S -> i  RevealRequest       i -> S  Reveal            task "reveal"

This is version 3. In version 2 ``agree`` was sent in each sum, receipts had fresh random bytes from which
the bits of the combinations were made, and agreements had the combinations. In version 1 no total was
verified, and keys between sites came from X25519 alone. Transcripts of both are still read
(``transcript.earlier_formats``).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from tightframe.securesum import reading
from tightframe.securesum.errors import MessageError
from tightframe.securesum.primitives import (
    HASH_BYTES,
    KEM_CIPHERTEXT_BYTES,
    KEM_KEY_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    Value,
    digest,
    encode_fields,
)
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS, Trust

Group = Literal["update", "static"]
GROUPS: tuple[Group, ...] = ("update", "static")


@dataclass(frozen=True)
class FieldSpec(reading.Record):
    """One field of a sum: name, shape, ring (32 or 64 bits), fraction bits, bound, group."""

    name: Annotated[str, reading.text(1024)]
    shape: Annotated[tuple[int, ...], reading.sequence(reading.integer(0, 2**40), 0, 16)]
    ring: Annotated[int, reading.integer(32, 64)]
    bits: Annotated[int, reading.integer(0, 1024)]
    bound: Annotated[float, reading.number]
    group: Annotated[Group, reading.one_of(*GROUPS)]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def as_value(self) -> dict[str, Value]:
        """Return plain values, for the wire and for hashing."""
        # A bound given as an integer would be sent and hashed as another value.
        return {**super().as_value(), "bound": float(self.bound)}


def read_field(value: object, where: str) -> FieldSpec:
    """Read a field from plain values.

    Raises:
        MessageError: TF-604.
    """
    field: FieldSpec = _FIELD(value, where)
    if field.ring not in (32, 64):
        raise MessageError(f"{where}.ring", expected="32 or 64", found=str(field.ring))
    return field


_FIELD = reading.built(FieldSpec)


@dataclass(frozen=True)
class SumId:
    """The id of one sum: the round, the phase (its kind and index, as ``train-0``), and the try."""

    round: int
    phase: str
    attempt: int = 0

    @classmethod
    def of(cls, kind: str, round_number: int, index: int, attempt: int) -> SumId:
        """Return the id of a sum; ``index`` counts the phases of its kind in the round."""
        return cls(round_number, f"{kind}-{index}", attempt)

    def as_value(self) -> list[Value]:
        """Return plain values, for the wire and for hashing."""
        return [self.round, self.phase, self.attempt]

    def __str__(self) -> str:
        """``round/phase/try``."""
        return f"{self.round}/{self.phase}/{self.attempt}"


def read_sum_id(value: object, where: str) -> SumId:
    """Read the id of a sum from plain values.

    Raises:
        MessageError: TF-604.
    """
    if not isinstance(value, list) or len(value) != 3:
        raise MessageError(where, expected="round, phase, try", found=reading.described(value))
    return SumId(
        reading.integer(0, 2**31)(value[0], where),
        reading.text(256)(value[1], where),
        reading.integer(0, 2**16)(value[2], where),
    )


@dataclass(frozen=True)
class Params(reading.Message):
    """S -> i: the parameters of an epoch, which each site checks against its own rules.

    Attributes:
        job: the engine's id of the job.
        lineage: the first job of a chain of resumed jobs; the job itself if it resumes none.
        epoch: 0 for the first setup of a job, one more for each that follows.
        roster: the sites, sorted; a site's index is its position here.
        threshold: t, shares needed to open a sum.
        colluders: c, colluding sites assumed.
        slots: K, the number of one-time slots of each site; each sum uses one slot.
        schemas: name of a schema -> its fields in order.
        weights: public weight rule.
        trust: the trust model of the server.
        min_sites: the smallest survivor set.
        static_open: whether this epoch's static group may be opened, for the full roster.
        config_sha256: SHA-256 of the validated job configuration.
    """

    job: Annotated[str, reading.text(256)]
    lineage: Annotated[str, reading.text(256)]
    epoch: Annotated[int, reading.integer(0, 2**31)]
    roster: Annotated[tuple[str, ...], reading.sequence(reading.text(64), 1, MAX_SITES)]
    threshold: Annotated[int, reading.integer(1, MAX_SITES)]
    colluders: Annotated[int, reading.integer(0, MAX_SITES)]
    slots: Annotated[int, reading.integer(1, MAX_SLOTS)]
    schemas: Annotated[
        Mapping[str, tuple[FieldSpec, ...]],
        reading.mapping(reading.sequence(read_field, 0, 100_000), 0, 4096),
    ]
    weights: Annotated[str, reading.text(64)]
    trust: Annotated[Trust, reading.one_of("malicious", "semi_honest")]
    min_sites: Annotated[int, reading.integer(1, MAX_SITES)]
    static_open: Annotated[bool, reading.flag]
    config_sha256: Annotated[bytes, reading.blob(HASH_BYTES)]
    version: Annotated[str, reading.text(64)]

    @property
    def may_open_static(self) -> bool:
        """True if a schema of this epoch has a static group that may be opened."""
        fields = (item for schema in self.schemas.values() for item in schema)
        return self.static_open and any(item.group == "static" and item.size for item in fields)

    def index(self, site: str) -> int:
        """Return the site's index in the roster, from 0."""
        return self.roster.index(site)

    def digest(self) -> bytes:
        """Return the SHA-256 over all fields: 32 bytes."""
        return digest("params", self.as_value())


Kind = Literal["self", "pair"]
"""The secret that a share is of: the self mask's seed b, or the pair seed a, from which a site derives the
slot's pair secrets (``checks.pair_secret``)."""
KINDS: tuple[Kind, ...] = ("self", "pair")

SALT_BYTES = 16
SHARE_BYTES = SALT_BYTES + KEY_BYTES
"""Length of a share on the wire: its salt, then the share."""
MAX_CERTIFICATE = 8192
MAX_SIGNATURE = 1024
MAX_APPLICATION = 4096
MAX_ADVERTISEMENT = (
    MAX_CERTIFICATE + MAX_APPLICATION + MAX_SIGNATURE + KEM_KEY_BYTES + 512 + MAX_SLOTS * 4 * HASH_BYTES
)
"""Longest advertisement on the wire, in bytes: its longest parts, and room for the rest."""


class AnyAdvertisement(Protocol):
    """Fields checked in an advertisement of any version (``transcript.earlier_formats``)."""

    @property
    def name(self) -> str:
        """The site."""

    @property
    def certificate(self) -> bytes:
        """Its certificate, DER."""

    @property
    def session_key(self) -> bytes:
        """Ed25519 public key of its signatures."""

    @property
    def agreement_keys(self) -> tuple[bytes, ...]:
        """X25519 public keys."""

    @property
    def encapsulation_keys(self) -> tuple[bytes, ...]:
        """ML-KEM-768 public keys."""

    @property
    def signature(self) -> bytes:
        """Signature by the provisioned key."""

    def signed(self, params_digest: bytes) -> bytes:
        """Return the bytes that the signature covers."""

    def to_bytes(self) -> bytes:
        """Return the message in its wire format."""


@dataclass(frozen=True)
class Advertisement(reading.SizedMessage):
    """i -> S -> all: a site's identity and public keys of one epoch, signed with its provisioned key.

    Attributes:
        certificate: its certificate, DER.
        channel_key: X25519 public key of its boxes.
        session_key: Ed25519 public key of all its signatures in this epoch.
        slots: for each slot, for each group: commitments to b and to a, 32 bytes each.
        application: application data (public weight, and so on), signed with the rest.
        encapsulation_key: ML-KEM-768 public key of its boxes.
        signature: by the provisioned key, over ``signed(params_digest)``.
    """

    name: str
    certificate: bytes
    channel_key: bytes
    session_key: bytes
    slots: bytes
    application: bytes
    encapsulation_key: bytes
    signature: bytes

    def signed(self, params_digest: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("advertisement 2", params_digest, *self.unsigned())

    @property
    def agreement_keys(self) -> tuple[bytes, ...]:
        """Its X25519 public keys."""
        return (self.channel_key,)

    @property
    def encapsulation_keys(self) -> tuple[bytes, ...]:
        """Its ML-KEM-768 public keys."""
        return (self.encapsulation_key,)

    def commitment(self, slot: int, group: Group, kind: Kind) -> bytes:
        """Return the commitment to b or to a of a slot and group: 32 bytes."""
        start = share_offset(slot, group, kind, HASH_BYTES)
        return self.slots[start : start + HASH_BYTES]

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Advertisement:
        """Read a message from the wire and check it.

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
                "slots": reading.blob(slots * ADVERTISED_SLOT),
                "application": reading.blob(0, MAX_APPLICATION),
                "encapsulation_key": reading.blob(KEM_KEY_BYTES),
                "signature": reading.blob(1, MAX_SIGNATURE),
            },
        )


def session_id(params: Params, advertisements: Sequence[Advertisement]) -> bytes:
    """Return T: SHA-256 over the parameters and all advertisements in roster order, signatures included."""
    parameters = params.digest()
    signed: list[Value] = [[item.signed(parameters), item.signature] for item in advertisements]
    return digest("session 2", parameters, signed)


@dataclass(frozen=True)
class Advertisements(reading.Message):
    """S -> i: all advertisements as the server received them, in roster order."""

    items: Annotated[tuple[bytes, ...], reading.sequence(reading.blob(1, MAX_ADVERTISEMENT), 1, MAX_SITES)]


ADVERTISED_SLOT = len(GROUPS) * len(KINDS) * HASH_BYTES
"""Bytes of a slot in an advertisement: a commitment for each group and kind."""
HASHED_SLOT = len(GROUPS) * (len(KINDS) + 1) * HASH_BYTES
"""Bytes of a slot in one holder's list of hashes: for each group of two shares and a pair secret."""


def box_plain_bytes(slots: int) -> int:
    """Return the plaintext size of a box.

    For each slot, group and kind a salt and a share; then for each slot and group the pair secret from
    the dealer to the holder.
    """
    return slots * len(GROUPS) * (len(KINDS) * SHARE_BYTES + KEY_BYTES)


def share_offset(slot: int, group: Group, kind: Kind, width: int) -> int:
    """Return the offset of a share in a box, or of its hash in a list; entries have ``width`` bytes."""
    return ((slot * len(GROUPS) + GROUPS.index(group)) * len(KINDS) + KINDS.index(kind)) * width


def pair_secret_offset(slot: int, group: Group, slots: int, width: int) -> int:
    """Return the offset of a pair secret in a box, or of its hash in a list: they follow all shares.

    Args:
        slots: K of the epoch.
        width: bytes of a share's entry. A pair secret's is 32 in both.
    """
    start = share_offset(slots, GROUPS[0], KINDS[0], width)
    return start + (slot * len(GROUPS) + GROUPS.index(group)) * KEY_BYTES


def share_hash(
    session: bytes, dealer: str, holder: str, slot: int, group: Group, kind: Kind, salted: bytes
) -> bytes:
    """Return the hash of one share that its dealer signs: 32 bytes. ``salted`` is salt, then share."""
    return digest("share", session, dealer, holder, slot, group, kind, salted)


def pair_secret_hash(
    session: bytes, dealer: str, holder: str, slot: int, group: Group, secret: bytes
) -> bytes:
    """Return the hash of a pair secret that its dealer signs: 32 bytes.

    It needs no salt, because a pair secret has 256 bits that nobody can guess.
    """
    return digest("pair secret hash", session, dealer, holder, slot, group, secret)


@dataclass(frozen=True)
class Confirmation(reading.SizedMessage):
    """i -> S: the boxes for all other sites, hashes of every share, and a signature of readiness.

    Attributes:
        boxes: holder (every other site) -> ML-KEM-768 ciphertext (1088 bytes), nonce (12 bytes), sealed
            shares and pair secrets.
        hashes: holder (every site, the dealer included) -> hashes of its shares and pair secrets, ordered
            as in a box.
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
        """Read a message from the wire and check it.

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
    """Return the SHA-256 over one holder's list of hashes."""
    return digest("share-hashes-of-one", hashes)


def hashes_signed(session: bytes, dealer: str, digests: Sequence[bytes]) -> bytes:
    """Return the bytes that a dealer signs for its share hashes.

    Args:
        session: T.
        dealer: the site that dealt the shares.
        digests: ``hashes_digest`` of every holder, in roster order.
    """
    return encode_fields("share-hashes", session, dealer, list(digests))


def ready_signed(session: bytes, name: str) -> bytes:
    """Return the bytes that a site signs to confirm that it takes part in this session and no other."""
    return encode_fields("ready", session, name)


@dataclass(frozen=True)
class Dealt(reading.Record):
    """The shares that one dealer dealt to one site: part of ``Setup``.

    Attributes:
        box: as in ``Confirmation``; empty for the site itself.
        hashes: of this site's shares and pair secrets.
        digests: ``hashes_digest`` of every holder, in roster order, joined.
        signature: the dealer's, over ``hashes_signed``.
        ready: the dealer's, over ``ready_signed``.
    """

    box: bytes
    hashes: bytes
    digests: bytes
    signature: bytes
    ready: bytes


@dataclass(frozen=True)
class Setup(reading.SizedMessage):
    """S -> i, with the first request for a term: dealer (every site) -> the shares it dealt to this site."""

    dealt: Mapping[str, Dealt]

    @classmethod
    def from_bytes(cls, raw: bytes, *, sites: int, slots: int) -> Setup:
        """Read a message from the wire and check it.

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


BOX_OVERHEAD = KEM_CIPHERTEXT_BYTES + NONCE_BYTES + 16
"""Bytes of a box besides its plaintext: the ciphertext, the nonce and the tag of AES-GCM."""


def _box(slots: int) -> reading.Check:
    """Return a check for a box."""
    return reading.blob(BOX_OVERHEAD + box_plain_bytes(slots))


def _hashes(slots: int) -> reading.Check:
    """Return a check for the hashes of one holder's shares and pair secrets."""
    return reading.blob(slots * HASHED_SLOT)


def by_group(item: reading.Check) -> reading.Check:
    """Return a check for a map of groups to items."""
    read = reading.mapping(item, 0, len(GROUPS))

    def check(value: object, where: str) -> dict[Group, Any]:
        return {
            reading.one_of(*GROUPS)(key, f"{where} key"): part for key, part in read(value, where).items()
        }

    return check


MAX_TERM = 2**33

_NAME = reading.text(64)
_SLOT = reading.integer(0, MAX_SLOTS - 1)
_HASH = reading.blob(HASH_BYTES)
_SHARES = reading.mapping(reading.blob(SHARE_BYTES), 0, MAX_SITES)
_SIGNATURE = reading.blob(SIGNATURE_BYTES)
_LINKS = reading.blob(0, len(GROUPS) * MAX_SITES * KEY_BYTES)


NO_TOTAL = bytes(HASH_BYTES)
"""Entry of a receipt for the total if an epoch has none yet."""
MAX_COMBINATIONS = 128 * (4 + 8)
"""Most bytes of one group's combinations (``combinations``)."""


@dataclass(frozen=True)
class Told(reading.Record):
    """A total that a site was told, without its integers.

    Attributes:
        survivors: the sites whose terms are in it, in roster order.
        hashes: opened group -> SHA-256 of its integers.
        receipts: ``receipts_digest`` of its terms.
    """

    slot: int
    sum_id: SumId
    schema: str
    survivors: tuple[str, ...]
    hashes: Mapping[Group, bytes]
    receipts: bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that were opened, in their order."""
        return tuple(group for group in GROUPS if group in self.hashes)

    def digest(self) -> bytes:
        """Return the digest by which receipts name the total: 32 bytes."""
        hashes: Any = dict(self.hashes)
        survivors: list[Value] = list(self.survivors)
        return digest(
            "total 3", self.slot, self.sum_id.as_value(), self.schema, survivors, hashes, self.receipts
        )


@dataclass(frozen=True)
class Total(reading.Message):
    """S -> i, with the next request for a term: the last sum that was opened in this epoch.

    Attributes:
        survivors: the sites whose terms are in it, in roster order.
        groups: group -> its integers as opened, little-endian in schema order: ``update``, and ``static`` if
            it was opened and is not empty.
        receipts: ``receipts_digest`` of its terms.
    """

    slot: Annotated[int, _SLOT]
    sum_id: Annotated[SumId, read_sum_id]
    schema: Annotated[str, reading.text(256)]
    survivors: Annotated[tuple[str, ...], reading.sequence(_NAME, 1, MAX_SITES)]
    groups: Annotated[Mapping[Group, bytes], by_group(reading.blob(0, MAX_TERM))] = field(repr=False)
    receipts: Annotated[bytes, _HASH]

    def told(self) -> Told:
        """Return all of it but its integers."""
        return self._told

    @functools.cached_property
    def _told(self) -> Told:  # its integers are hashed once, however often it is named
        hashes: dict[Group, bytes] = {
            group: hashlib.sha256(data).digest() for group, data in self.groups.items()
        }
        return Told(self.slot, self.sum_id, self.schema, self.survivors, hashes, self.receipts)

    def digest(self) -> bytes:
        """Return the digest by which receipts name this total: 32 bytes."""
        return self.told().digest()


@dataclass(frozen=True)
class TermRequest(reading.Message):
    """S -> i: the request for a site's term of a sum.

    Attributes:
        slot: the slot whose one-time secrets mask the term.
        schema: name of the schema in ``Params.schemas``.
        setup: a ``Setup`` with the first request of an epoch, else empty.
        total: the last ``Total`` of this epoch; empty if none was opened yet.
        seeds: survivor of that total -> group of it -> b, the seed of its own mask, by which the site sees
            that the server has opened the sum. A site reads its own alone.
    """

    slot: Annotated[int, _SLOT]
    sum_id: Annotated[SumId, read_sum_id]
    schema: Annotated[str, reading.text(256)]
    setup: Annotated[bytes, reading.blob(0, 2**30)] = b""
    total: Annotated[bytes, reading.blob(0, 2 * MAX_TERM)] = field(default=b"", repr=False)
    seeds: Annotated[
        Mapping[str, Mapping[Group, bytes]], reading.mapping(by_group(reading.blob(KEY_BYTES)), 0, MAX_SITES)
    ] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Receipt(reading.Record):
    """A site's signed statement of the inputs of its masked term, with its part of the proof of a total.

    Attributes:
        basis: SHA-256 of the state that the term rests on.
        total: digest of the total that the site was told with the request; ``NO_TOTAL`` if none.
        combinations: group of the total told -> combinations of this site's term of that total; empty if its
            term is not in it, if it gave no shares for it, or if no total was told.
        follows: whether the site computed the state by itself, from totals that were verified.
        update, static: ``checks.masked_hash`` of each group.
        pairs: ``pairs_digest`` of the pair secrets that key the term's masks with all other sites.
        signature: Ed25519 over ``signed(session)``.
    """

    name: Annotated[str, _NAME]
    slot: Annotated[int, _SLOT]
    sum_id: Annotated[SumId, read_sum_id]
    basis: Annotated[bytes, _HASH]
    total: Annotated[bytes, _HASH]
    combinations: Annotated[Mapping[Group, bytes], by_group(reading.blob(0, MAX_COMBINATIONS))] = field(
        repr=False
    )
    follows: Annotated[bool, reading.flag]
    update: Annotated[bytes, _HASH]
    static: Annotated[bytes, _HASH]
    pairs: Annotated[bytes, _HASH]
    signature: Annotated[bytes, _SIGNATURE]

    def signed(self, session: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("receipt 3", session, *self.unsigned())


_RECEIPT = reading.built(Receipt)


@dataclass(frozen=True)
class Masked(reading.Message):
    """i -> S: the masked integers of both groups, little-endian in schema order, links, and the receipt.

    Attributes:
        receipt: signed, with a hash of the rest.
        links: for each group, for each site after this one in the roster, 32 bytes (``links_of``): with
            them the server finds the pair secret of a later site that drops out.
    """

    update: Annotated[bytes, reading.blob(0, MAX_TERM)] = field(repr=False)
    static: Annotated[bytes, reading.blob(0, MAX_TERM)] = field(repr=False)
    receipt: Annotated[Receipt, _RECEIPT]
    links: Annotated[bytes, _LINKS] = field(repr=False)


def links_of(links: bytes, group: Group, roster: Sequence[str], site: str) -> dict[str, bytes]:
    """Return later site -> link of one group, from ``Masked.links`` of a site.

    Raises:
        MessageError: TF-604, if the links are not of both groups and all later sites.
    """
    return _parts(f"the links of {site}", links, group, roster[roster.index(site) + 1 :])


def pairs_of(hashes: bytes, group: Group, roster: Sequence[str], site: str) -> dict[str, bytes]:
    """Return other site -> ``pair_secret_hash`` of the secret that keys the mask with it, of one group.

    Args:
        hashes: for each group, for each other site in roster order, 32 bytes.
        site: whose term it is.

    Raises:
        MessageError: TF-604, if the hashes are not of both groups and all other sites.
    """
    others = [name for name in roster if name != site]
    return _parts(f"the hashes of the pair secrets of {site}", hashes, group, others)


def pairs_digest(hashes: bytes) -> bytes:
    """Return the SHA-256 over the hashes of one term's pair secrets, as in a receipt: 32 bytes."""
    return digest("pair secrets of a term", hashes)


def _parts(what: str, joined: bytes, group: Group, names: Sequence[str]) -> dict[str, bytes]:
    """Return name -> its 32 bytes of one group, from those of both groups."""
    size = len(names) * KEY_BYTES
    if len(joined) != len(GROUPS) * size:
        raise MessageError(what, expected=f"{len(GROUPS) * size} bytes", found=f"{len(joined)} bytes")
    start = GROUPS.index(group) * size
    return {
        name: joined[start + place * KEY_BYTES : start + (place + 1) * KEY_BYTES]
        for place, name in enumerate(names)
    }


def receipts_digest(session: bytes, receipts: Sequence[Receipt]) -> bytes:
    """Return the digest of a sum's receipts, in roster order: 32 bytes.

    The receipts name all masked bytes, links and keys of masks, so that session, survivors and this digest
    fix every honest site's term of the sum.
    """
    signed: list[Value] = [item.signed(session) for item in receipts]
    return digest("receipts", signed)


def challenge(session: bytes, told: Told) -> bytes:
    """Return the challenge that the combinations of a total are made with: 32 bytes.

    It is a hash of all that the combinations are to show of: the total as it was told, and the terms, by
    their receipts. So nobody knows it before both are fixed.

    Args:
        session: T.
    """
    return digest("challenge 3", session, told.digest())


def agreement_signed(
    session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str], receipts: bytes
) -> bytes:
    """Return the bytes that a site signs for a sum's survivors; ``receipts`` is their ``receipts_digest``."""
    return encode_fields("agreement 3", session, slot, sum_id.as_value(), list(survivors), receipts)


@dataclass(frozen=True)
class AgreementRequest(reading.Message):
    """S -> survivors, fewer than the roster: all receipts; the survivor set is their names, sorted."""

    slot: Annotated[int, _SLOT]
    receipts: Annotated[tuple[Receipt, ...], reading.sequence(_RECEIPT, 1, MAX_SITES)]


@dataclass(frozen=True)
class Agreement(reading.Message):
    """i -> S: a site's signature of the survivors of a sum and of their receipts.

    Attributes:
        signature: Ed25519 over ``agreement_signed``.
    """

    name: Annotated[str, _NAME]
    slot: Annotated[int, _SLOT]
    signature: Annotated[bytes, _SIGNATURE]


_AGREEMENT = reading.built(Agreement)


@dataclass(frozen=True)
class TermProof(reading.Record):
    """Evidence that shows a site's term of an opened sum, up to the masks that cancel.

    Attributes:
        receipt: the site's, of that sum.
        masked: group -> the masked bytes that the receipt names.
        links: of both groups, which the receipt names as well.
        pairs: hashes of the secrets that key its masks with all other sites (``pairs_of``), of which the
            receipt has the digest.
        seeds: group -> b, which the site's advertisement commits to.
    """

    receipt: Annotated[Receipt, _RECEIPT]
    masked: Annotated[Mapping[Group, bytes], by_group(reading.blob(0, MAX_TERM))] = field(repr=False)
    links: Annotated[bytes, _LINKS] = field(repr=False)
    pairs: Annotated[bytes, _LINKS] = field(repr=False)
    seeds: Annotated[Mapping[Group, bytes], by_group(reading.blob(KEY_BYTES))] = field(repr=False)


_PROOF = reading.built(TermProof)


@dataclass(frozen=True)
class RevealRequest(reading.Message):
    """S -> survivors: all receipts, agreements after a drop-out, and what proves the total told.

    Attributes:
        receipts: of the survivors, in roster order.
        agreements: of at least t of them, in roster order; none if the survivors are the whole roster.
        missing: site -> the proof of its term, for each site in the total whose combinations are not used.
        dropped: site -> group -> pair seed a of the total's slot, for each site of the roster that is not in
            the total; empty if nothing is missing.
    """

    slot: Annotated[int, _SLOT]
    receipts: Annotated[tuple[Receipt, ...], reading.sequence(_RECEIPT, 1, MAX_SITES)]
    agreements: Annotated[tuple[Agreement, ...], reading.sequence(_AGREEMENT, 0, MAX_SITES)]
    missing: Annotated[Mapping[str, TermProof], reading.mapping(_PROOF, 0, MAX_SITES)] = field(
        default_factory=dict
    )
    dropped: Annotated[
        Mapping[str, Mapping[Group, bytes]], reading.mapping(by_group(reading.blob(KEY_BYTES)), 0, MAX_SITES)
    ] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Reveal(reading.Message):
    """i -> S: signed shares; of b for each survivor, of a for each dropped site.

    Attributes:
        update, static: dealer -> salt and share (48 bytes); ``static`` is empty unless it is opened.
        signature: Ed25519 over ``signed(session)``.
    """

    name: Annotated[str, _NAME]
    slot: Annotated[int, _SLOT]
    update: Annotated[Mapping[str, bytes], _SHARES] = field(repr=False)
    static: Annotated[Mapping[str, bytes], _SHARES] = field(repr=False)
    signature: Annotated[bytes, _SIGNATURE]

    def signed(self, session: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("reveal", session, *self.unsigned())
