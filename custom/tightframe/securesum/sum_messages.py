"""The messages of one sum: masked terms with receipts, agreement on survivors, revealed shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tightframe.securesum import reading
from tightframe.securesum.params import SumId, read_sum_id
from tightframe.securesum.primitives import HASH_BYTES, SIGNATURE_BYTES, encode_fields
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS
from tightframe.securesum.setup_messages import SHARE_BYTES

MAX_TERM = 2**33

_NAME = reading.text(64)
_SLOT = reading.integer(0, MAX_SLOTS - 1)
_HASH = reading.blob(HASH_BYTES)
_SIGNATURE = reading.blob(SIGNATURE_BYTES)


@dataclass(frozen=True)
class TermRequest(reading.Message):
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

    KEYS = MappingProxyType(
        {
            "slot": _SLOT,
            "sum_id": read_sum_id,
            "schema": reading.text(256),
            "setup": reading.blob(0, 2**30),
        }
    )


@dataclass(frozen=True)
class Receipt(reading.Record):
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


_RECEIPT = reading.built(
    Receipt,
    {
        "name": _NAME,
        "slot": _SLOT,
        "sum_id": read_sum_id,
        "broadcast": _HASH,
        "update": _HASH,
        "static": _HASH,
        "signature": _SIGNATURE,
    },
)


@dataclass(frozen=True)
class Masked(reading.Message):
    """i -> S: the masked integers of both groups, little-endian in schema order, and the receipt."""

    update: bytes = field(repr=False)
    static: bytes = field(repr=False)
    receipt: Receipt

    KEYS = MappingProxyType(
        {
            "update": reading.blob(0, MAX_TERM),
            "static": reading.blob(0, MAX_TERM),
            "receipt": _RECEIPT,
        }
    )


def survivors_signed(session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str]) -> bytes:
    """What a site signs of a survivor set smaller than the roster."""
    return encode_fields("survivors", session, slot, sum_id.as_value(), list(survivors))


@dataclass(frozen=True)
class AgreementRequest(reading.Message):
    """S -> survivors, after a drop-out: all receipts; the survivor set is their names, sorted."""

    slot: int
    receipts: tuple[Receipt, ...]

    KEYS = MappingProxyType({"slot": _SLOT, "receipts": reading.sequence(_RECEIPT, 1, MAX_SITES)})


@dataclass(frozen=True)
class Agreement(reading.Message):
    """i -> S: Ed25519 over ``survivors_signed``."""

    name: str
    slot: int
    signature: bytes

    KEYS = MappingProxyType({"name": _NAME, "slot": _SLOT, "signature": _SIGNATURE})


@dataclass(frozen=True)
class RevealRequest(reading.Message):
    """S -> survivors: all receipts, and after a drop-out at least t agreements (site -> signature)."""

    slot: int
    receipts: tuple[Receipt, ...]
    agreements: Mapping[str, bytes]

    KEYS = MappingProxyType(
        {
            "slot": _SLOT,
            "receipts": reading.sequence(_RECEIPT, 1, MAX_SITES),
            "agreements": reading.mapping(_SIGNATURE, 0, MAX_SITES),
        }
    )


@dataclass(frozen=True)
class Reveal(reading.Message):
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

    KEYS = MappingProxyType(
        {
            "name": _NAME,
            "slot": _SLOT,
            "update": reading.mapping(reading.blob(SHARE_BYTES), 0, MAX_SITES),
            "static": reading.mapping(reading.blob(SHARE_BYTES), 0, MAX_SITES),
            "signature": _SIGNATURE,
        }
    )

    def signed(self, session: bytes) -> bytes:
        """The string that ``signature`` is over."""
        return encode_fields("reveal", session, self.name, self.slot, dict(self.update), dict(self.static))
