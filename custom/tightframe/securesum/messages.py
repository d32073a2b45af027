"""The protocol's messages: frozen values, and the one form in which each travels.

A message is a msgpack map with exactly the keys of its class. Whatever is read is checked before
it is used: keys, types, sizes, trailing bytes. What is signed or hashed is never the travelling
form but ``primitives.encode_fields`` of the fields.

Order of exchanges (S the server, i a site)::

    S -> i  Params              i -> S  Advertisement     task "enroll"
    S -> i  Advertisements      i -> S  Confirmation      task "confirm"
    S -> i  TermRequest         i -> S  Masked            task "contribute" (the first with a Setup)
    S -> i  AgreementRequest    i -> S  Agreement         task "agree", only after a drop-out
    S -> i  RevealRequest       i -> S  Reveal            task "reveal"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import msgpack

from tightframe.securesum.errors import MessageError
from tightframe.securesum.primitives import (
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
Kind = Literal["self", "pair"]
"""What a share is of: the self mask's seed b, or the slot's X25519 private key s."""
KINDS: tuple[Kind, ...] = ("self", "pair")

HASH_BYTES = 32
SALT_BYTES = 16
SHARE_BYTES = SALT_BYTES + KEY_BYTES
"""A share as it travels: its salt, then the share."""
MAX_CERTIFICATE = 8192
MAX_SIGNATURE = 1024
MAX_APPLICATION = 4096
MAX_TERM = 2**33

Item = TypeVar("Item")
Check = Callable[[object, str], Any]


@dataclass(frozen=True)
class FieldSpec:
    """One field of a sum: name, shape, ring (32 or 64 bits), fraction bits, bound, group."""

    name: str
    shape: tuple[int, ...]
    ring: int
    bits: int
    bound: float
    group: Group

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def as_value(self) -> dict[str, Value]:
        """Plain values, for travelling and hashing."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "ring": self.ring,
            "bits": self.bits,
            "bound": float(self.bound),
            "group": self.group,
        }


@dataclass(frozen=True)
class SumId:
    """Names one sum: the round, the phase (its kind and place, as ``train-0``), and the try."""

    round: int
    phase: str
    attempt: int = 0

    @classmethod
    def of(cls, kind: str, round_number: int, index: int, attempt: int) -> SumId:
        """The id of phase ``index`` among those of its kind in a round."""
        return cls(round_number, f"{kind}-{index}", attempt)

    def as_value(self) -> list[Value]:
        """Plain values, for travelling and hashing."""
        return [self.round, self.phase, self.attempt]

    def __str__(self) -> str:
        """``round/phase/try``."""
        return f"{self.round}/{self.phase}/{self.attempt}"


@dataclass(frozen=True)
class Params:
    """S -> i: what an epoch is; each site holds it against its own rules.

    Attributes:
        job: the engine's id of the job.
        lineage: the first job of a chain of resumed ones; the job itself if it is none.
        epoch: 0 for the first setup of a job, one more for each that follows.
        roster: the sites, sorted; a site's index is its place here.
        threshold: t, shares needed to open a sum.
        colluders: c, colluding sites assumed.
        slots: K, one-time secrets a site; each sum uses one slot.
        schemas: name of a schema -> its fields in order.
        weights: public weight rule.
        trust: what the server is assumed to do.
        min_sites: the smallest survivor set.
        static_open: whether this epoch's static group may be opened, for the full roster.
        config_sha256: SHA-256 of the validated job configuration.
        version: of the package.
    """

    job: str
    lineage: str
    epoch: int
    roster: tuple[str, ...]
    threshold: int
    colluders: int
    slots: int
    schemas: Mapping[str, tuple[FieldSpec, ...]]
    weights: str
    trust: Trust
    min_sites: int
    static_open: bool
    config_sha256: bytes
    version: str

    def index(self, site: str) -> int:
        """The site's place in the roster, from 0."""
        return self.roster.index(site)

    def as_value(self) -> dict[str, Value]:
        """Plain values, for travelling and hashing."""
        return {
            "job": self.job,
            "lineage": self.lineage,
            "epoch": self.epoch,
            "roster": list(self.roster),
            "threshold": self.threshold,
            "colluders": self.colluders,
            "slots": self.slots,
            "schemas": {name: [item.as_value() for item in fields] for name, fields in self.schemas.items()},
            "weights": self.weights,
            "trust": self.trust,
            "min_sites": self.min_sites,
            "static_open": self.static_open,
            "config_sha256": self.config_sha256,
            "version": self.version,
        }

    def digest(self) -> bytes:
        """SHA-256 over all fields."""
        return digest("params", self.as_value())

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(self.as_value())

    @classmethod
    def from_bytes(cls, raw: bytes) -> Params:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        read = _unpack(
            raw,
            "Params",
            {
                "job": _text(256),
                "lineage": _text(256),
                "epoch": _integer(0, 2**31),
                "roster": _sequence(_text(64), 1, MAX_SITES),
                "threshold": _integer(1, MAX_SITES),
                "colluders": _integer(0, MAX_SITES),
                "slots": _integer(1, MAX_SLOTS),
                "schemas": _mapping(_sequence(_field, 0, 100_000), 0, 4096),
                "weights": _text(64),
                "trust": _one_of("malicious", "semi_honest"),
                "min_sites": _integer(1, MAX_SITES),
                "static_open": _flag,
                "config_sha256": _blob(HASH_BYTES),
                "version": _text(64),
            },
        )
        return cls(
            **{
                **read,
                "roster": tuple(read["roster"]),
                "schemas": {name: tuple(fields) for name, fields in read["schemas"].items()},
            }
        )


@dataclass(frozen=True)
class Advertisement:
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

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {
                "name": self.name,
                "certificate": self.certificate,
                "channel_key": self.channel_key,
                "session_key": self.session_key,
                "slots": self.slots,
                "application": self.application,
                "signature": self.signature,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Advertisement:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "Advertisement",
                {
                    "name": _text(64),
                    "certificate": _blob(1, MAX_CERTIFICATE),
                    "channel_key": _blob(KEY_BYTES),
                    "session_key": _blob(KEY_BYTES),
                    "slots": _blob(slots * len(GROUPS) * (KEY_BYTES + HASH_BYTES)),
                    "application": _blob(0, MAX_APPLICATION),
                    "signature": _blob(1, MAX_SIGNATURE),
                },
            )
        )


def session_id(params: Params, advertisements: Sequence[Advertisement]) -> bytes:
    """T: SHA-256 over the parameters and all advertisements in roster order, signatures included."""
    parameters = params.digest()
    shown: list[Value] = [[item.signed(parameters), item.signature] for item in advertisements]
    return digest("session", parameters, shown)


@dataclass(frozen=True)
class Advertisements:
    """S -> i: all advertisements, each as it came, in roster order."""

    items: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack({"items": list(self.items)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Advertisements:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        largest = MAX_CERTIFICATE + MAX_APPLICATION + MAX_SIGNATURE + 512 + MAX_SLOTS * 128
        return cls(
            tuple(
                _unpack(raw, "Advertisements", {"items": _sequence(_blob(1, largest), 1, MAX_SITES)})["items"]
            )
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
class Confirmation:
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

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {
                "name": self.name,
                "boxes": dict(self.boxes),
                "hashes": dict(self.hashes),
                "hashes_signature": self.hashes_signature,
                "ready": self.ready,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Confirmation:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "Confirmation",
                {
                    "name": _text(64),
                    "boxes": _mapping(_box(slots), 0, MAX_SITES),
                    "hashes": _mapping(_blob(_hashes_bytes(slots)), 1, MAX_SITES),
                    "hashes_signature": _blob(SIGNATURE_BYTES),
                    "ready": _blob(SIGNATURE_BYTES),
                },
            )
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
class Dealt:
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
class Setup:
    """S -> i, with the first request for a term: dealer (every site) -> what it dealt to this site."""

    dealt: Mapping[str, Dealt]

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {
                "dealt": {
                    name: {
                        "box": item.box,
                        "hashes": item.hashes,
                        "digests": item.digests,
                        "signature": item.signature,
                        "ready": item.ready,
                    }
                    for name, item in self.dealt.items()
                }
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, *, sites: int, slots: int) -> Setup:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        keys: Mapping[str, Check] = {
            "box": _either(_blob(0), _box(slots)),
            "hashes": _blob(_hashes_bytes(slots)),
            "digests": _blob(sites * HASH_BYTES),
            "signature": _blob(SIGNATURE_BYTES),
            "ready": _blob(SIGNATURE_BYTES),
        }
        one = _record(keys)
        read = _unpack(raw, "Setup", {"dealt": _mapping(one, sites, sites)})
        return cls({name: Dealt(**values) for name, values in read["dealt"].items()})


@dataclass(frozen=True)
class TermRequest:
    """S -> i: send your term of this sum, in this slot.

    Attributes:
        slot: which one-time secrets.
        sum_id: which sum.
        schema: name of the schema in ``Params.schemas``.
        setup: a ``Setup`` with the first request of an epoch, else empty.
    """

    slot: int
    sum_id: SumId
    schema: str
    setup: bytes = b""

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {"slot": self.slot, "sum_id": self.sum_id.as_value(), "schema": self.schema, "setup": self.setup}
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> TermRequest:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "TermRequest",
                {
                    "slot": _integer(0, MAX_SLOTS - 1),
                    "sum_id": _sum_id,
                    "schema": _text(256),
                    "setup": _blob(0, 2**30),
                },
            )
        )


@dataclass(frozen=True)
class Receipt:
    """A site's signed statement of what its masked term was made from.

    Attributes:
        name: the site.
        slot, sum_id: of the term.
        broadcast: SHA-256 of the broadcast's canonical tensor bytes, as received.
        update, static: SHA-256 of the masked bytes of each group.
        signature: Ed25519 over ``signed(session)``.
    """

    name: str
    slot: int
    sum_id: SumId
    broadcast: bytes
    update: bytes
    static: bytes
    signature: bytes

    def signed(self, session: bytes) -> bytes:
        """The string that ``signature`` is over."""
        return encode_fields(
            "receipt",
            session,
            self.name,
            self.slot,
            self.sum_id.as_value(),
            self.broadcast,
            self.update,
            self.static,
        )

    def as_value(self) -> dict[str, Value]:
        """Plain values, for travelling."""
        return {
            "name": self.name,
            "slot": self.slot,
            "sum_id": self.sum_id.as_value(),
            "broadcast": self.broadcast,
            "update": self.update,
            "static": self.static,
            "signature": self.signature,
        }


@dataclass(frozen=True)
class Masked:
    """i -> S: the masked integers of both groups, little-endian in schema order, and the receipt."""

    update: bytes = field(repr=False)
    static: bytes = field(repr=False)
    receipt: Receipt

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack({"update": self.update, "static": self.static, "receipt": self.receipt.as_value()})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Masked:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "Masked",
                {"update": _blob(0, MAX_TERM), "static": _blob(0, MAX_TERM), "receipt": _receipt},
            )
        )


def survivors_signed(session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str]) -> bytes:
    """What a site signs of a survivor set smaller than the roster."""
    return encode_fields("survivors", session, slot, sum_id.as_value(), list(survivors))


@dataclass(frozen=True)
class AgreementRequest:
    """S -> survivors, after a drop-out: all receipts; the survivor set is their names, sorted."""

    slot: int
    receipts: tuple[Receipt, ...]

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack({"slot": self.slot, "receipts": [item.as_value() for item in self.receipts]})

    @classmethod
    def from_bytes(cls, raw: bytes) -> AgreementRequest:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        read = _unpack(
            raw,
            "AgreementRequest",
            {"slot": _integer(0, MAX_SLOTS - 1), "receipts": _sequence(_receipt, 1, MAX_SITES)},
        )
        return cls(read["slot"], tuple(read["receipts"]))


@dataclass(frozen=True)
class Agreement:
    """i -> S: Ed25519 over ``survivors_signed``."""

    name: str
    slot: int
    signature: bytes

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack({"name": self.name, "slot": self.slot, "signature": self.signature})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Agreement:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "Agreement",
                {"name": _text(64), "slot": _integer(0, MAX_SLOTS - 1), "signature": _blob(SIGNATURE_BYTES)},
            )
        )


@dataclass(frozen=True)
class RevealRequest:
    """S -> survivors: all receipts, and after a drop-out at least t agreements (site -> signature)."""

    slot: int
    receipts: tuple[Receipt, ...]
    agreements: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {
                "slot": self.slot,
                "receipts": [item.as_value() for item in self.receipts],
                "agreements": dict(self.agreements),
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> RevealRequest:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        read = _unpack(
            raw,
            "RevealRequest",
            {
                "slot": _integer(0, MAX_SLOTS - 1),
                "receipts": _sequence(_receipt, 1, MAX_SITES),
                "agreements": _mapping(_blob(SIGNATURE_BYTES), 0, MAX_SITES),
            },
        )
        return cls(read["slot"], tuple(read["receipts"]), read["agreements"])


@dataclass(frozen=True)
class Reveal:
    """i -> S: shares, signed. For a survivor a share of b, for a dropped site one of s.

    Attributes:
        name: the site that reveals.
        slot: of the sum.
        update, static: dealer -> salt and share (48 bytes); ``static`` is empty unless it is opened.
        signature: Ed25519 over ``signed(session)``.
    """

    name: str
    slot: int
    update: Mapping[str, bytes] = field(repr=False)
    static: Mapping[str, bytes] = field(repr=False)
    signature: bytes

    def signed(self, session: bytes) -> bytes:
        """The string that ``signature`` is over."""
        return encode_fields("reveal", session, self.name, self.slot, dict(self.update), dict(self.static))

    def to_bytes(self) -> bytes:
        """The travelling form."""
        return _pack(
            {
                "name": self.name,
                "slot": self.slot,
                "update": dict(self.update),
                "static": dict(self.static),
                "signature": self.signature,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Reveal:
        """Read and check.

        Raises:
            MessageError: TF-604.
        """
        return cls(
            **_unpack(
                raw,
                "Reveal",
                {
                    "name": _text(64),
                    "slot": _integer(0, MAX_SLOTS - 1),
                    "update": _mapping(_blob(SHARE_BYTES), 0, MAX_SITES),
                    "static": _mapping(_blob(SHARE_BYTES), 0, MAX_SITES),
                    "signature": _blob(SIGNATURE_BYTES),
                },
            )
        )


def _hashes_bytes(slots: int) -> int:
    return slots * len(GROUPS) * len(KINDS) * HASH_BYTES


def _pack(value: Mapping[str, Value]) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def _unpack(raw: bytes, what: str, keys: Mapping[str, Check]) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(
            raw, raw=False, strict_map_key=True, use_list=True, object_pairs_hook=_each_key_once
        )
    except Exception:  # msgpack raises many kinds; each means that this is no message
        raise MessageError(
            what, expected="one msgpack map", found=f"{len(raw)} bytes that are none"
        ) from None
    return cast("dict[str, Any]", _record(keys)(value, what))


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A map, unless a key stands in it twice: two readers could see two different values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value


def _record(keys: Mapping[str, Check]) -> Check:
    def check(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MessageError(where, expected="a map", found=type(value).__name__)
        if set(value) != set(keys):
            raise MessageError(
                where,
                expected=f"a map with the keys {sorted(keys)}",
                found=f"{len(set(keys) - set(value))} missing, {len(set(value) - set(keys))} unknown",
            )
        return {key: test(value[key], f"{where}.{key}") for key, test in keys.items()}

    return check


def _text(longest: int) -> Check:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value.encode()) <= longest:
            raise MessageError(where, expected=f"text of 1 to {longest} bytes", found=_shape(value))
        return value

    return check


def _one_of(*allowed: str) -> Check:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise MessageError(where, expected=f"one of {list(allowed)}", found=_shape(value))
        return value

    return check


def _integer(least: int, most: int) -> Check:
    def check(value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise MessageError(where, expected=f"an integer from {least} to {most}", found=_shape(value))
        return value

    return check


def _number(value: object, where: str) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise MessageError(where, expected="a finite number", found=_shape(value))
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise MessageError(where, expected="true or false", found=_shape(value))
    return value


def _blob(least: int, most: int | None = None) -> Check:
    largest = least if most is None else most

    def check(value: object, where: str) -> bytes:
        if not isinstance(value, bytes) or not least <= len(value) <= largest:
            size = f"{least}" if least == largest else f"{least} to {largest}"
            raise MessageError(where, expected=f"{size} bytes", found=_shape(value))
        return value

    return check


def _box(slots: int) -> Check:
    return _blob(NONCE_BYTES + box_plain_bytes(slots) + 16)


def _either(first: Check, second: Check) -> Check:
    def check(value: object, where: str) -> Any:
        try:
            return first(value, where)
        except MessageError:
            return second(value, where)

    return check


def _sequence(item: Check, least: int, most: int) -> Check:
    def check(value: object, where: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a list of {least} to {most}", found=_shape(value))
        return [item(part, f"{where}[{place}]") for place, part in enumerate(value)]

    return check


def _mapping(item: Check, least: int, most: int) -> Check:
    name = _text(256)

    def check(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not least <= len(value) <= most:
            raise MessageError(where, expected=f"a map of {least} to {most}", found=_shape(value))
        return {name(key, f"{where} key"): item(part, f"{where}.{key}") for key, part in value.items()}

    return check


def _sum_id(value: object, where: str) -> SumId:
    if not isinstance(value, list) or len(value) != 3:
        raise MessageError(where, expected="round, phase, try", found=_shape(value))
    return SumId(
        _integer(0, 2**31)(value[0], where), _text(256)(value[1], where), _integer(0, 2**16)(value[2], where)
    )


def _field(value: object, where: str) -> FieldSpec:
    read = _record(
        {
            "name": _text(1024),
            "shape": _sequence(_integer(0, 2**40), 0, 16),
            "ring": _integer(32, 64),
            "bits": _integer(0, 1024),
            "bound": _number,
            "group": _one_of(*GROUPS),
        }
    )(value, where)
    if read["ring"] not in (32, 64):
        raise MessageError(f"{where}.ring", expected="32 or 64", found=str(read["ring"]))
    return FieldSpec(**{**read, "shape": tuple(read["shape"])})


def _receipt(value: object, where: str) -> Receipt:
    return Receipt(
        **_record(
            {
                "name": _text(64),
                "slot": _integer(0, MAX_SLOTS - 1),
                "sum_id": _sum_id,
                "broadcast": _blob(HASH_BYTES),
                "update": _blob(HASH_BYTES),
                "static": _blob(HASH_BYTES),
                "signature": _blob(SIGNATURE_BYTES),
            }
        )(value, where)
    )


def _shape(value: object) -> str:
    """What a wrong value is, without showing it."""
    if isinstance(value, (str, bytes, list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
