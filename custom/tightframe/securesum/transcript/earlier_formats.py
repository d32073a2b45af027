"""Messages that silos signed in versions 1 and 2 of the protocol, in transcripts of formats 1 and 2.

Nothing writes them any more. In version 1 an advertisement had an X25519 key for each slot and group, and no
key of ML-KEM-768; a receipt named the broadcast, and no total; the survivors were signed only after a
drop-out, without a challenge; and no total was verified by the silos. In version 2 a receipt had fresh random
bytes and no combinations; all survivors of each sum signed an agreement, on a challenge made from these
bytes, with the combinations of their terms; and the digest of a total did not name its receipts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightframe.securesum import reading
from tightframe.securesum.messages import (
    GROUPS,
    MAX_APPLICATION,
    MAX_CERTIFICATE,
    MAX_SIGNATURE,
    Group,
    Params,
    SumId,
    Told,
)
from tightframe.securesum.primitives import HASH_BYTES, KEY_BYTES, Value, digest, encode_fields

_SLOT_PART = KEY_BYTES + HASH_BYTES


@dataclass(frozen=True)
class Advertisement1(reading.SizedMessage):
    """An advertisement of version 1; see ``messages.Advertisement``.

    Attributes:
        slots: for each slot, for each group: X25519 public key (32 bytes), commitment to b (32 bytes).
    """

    name: str
    certificate: bytes
    channel_key: bytes
    session_key: bytes
    slots: bytes
    application: bytes
    signature: bytes

    @property
    def agreement_keys(self) -> tuple[bytes, ...]:
        """Its X25519 public keys: of the channel, and of every slot and group."""
        starts = range(0, len(self.slots), _SLOT_PART)
        return (self.channel_key, *(self.slots[start : start + KEY_BYTES] for start in starts))

    @property
    def encapsulation_keys(self) -> tuple[bytes, ...]:
        """None."""
        return ()

    def signed(self, params_digest: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("advertisement", params_digest, *self.unsigned())

    @classmethod
    def from_bytes(cls, raw: bytes, *, slots: int) -> Advertisement1:
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
                "slots": reading.blob(slots * len(GROUPS) * _SLOT_PART),
                "application": reading.blob(0, MAX_APPLICATION),
                "signature": reading.blob(1, MAX_SIGNATURE),
            },
        )


def session_id(params: Params, advertisements: Sequence[Advertisement1]) -> bytes:
    """Return T of version 1."""
    parameters = params.digest()
    signed: list[Value] = [[item.signed(parameters), item.signature] for item in advertisements]
    return digest("session", parameters, signed)


@dataclass(frozen=True)
class Receipt1(reading.Record):
    """A receipt of version 1; see ``messages.Receipt``.

    Attributes:
        broadcast: SHA-256 of the broadcast's canonical tensor bytes, as received.
    """

    name: str
    slot: int
    sum_id: SumId
    broadcast: bytes
    update: bytes
    static: bytes
    signature: bytes

    @property
    def basis(self) -> bytes:
        """Message that the term rested on: then the broadcast."""
        return self.broadcast

    def signed(self, session: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("receipt", session, *self.unsigned())


def survivors_signed(session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str]) -> bytes:
    """Return the bytes that a site signed for a survivor set smaller than the roster."""
    return encode_fields("survivors", session, slot, sum_id.as_value(), list(survivors))


@dataclass(frozen=True)
class Receipt2(reading.Record):
    """A receipt of version 2; see ``messages.Receipt``.

    Attributes:
        seed: 32 random bytes, drawn after the site was told the total.
    """

    name: str
    slot: int
    sum_id: SumId
    basis: bytes
    total: bytes
    seed: bytes
    follows: bool
    update: bytes
    static: bytes
    signature: bytes

    def signed(self, session: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("receipt 2", session, *self.unsigned())


@dataclass(frozen=True)
class Agreement2(reading.Record):
    """An agreement of version 2, with the site's combinations; see ``messages.Receipt``."""

    name: str
    slot: int
    combinations: Mapping[Group, bytes]
    signature: bytes


def total_digest(told: Told) -> bytes:
    """Return the digest by which receipts named a total; ``told.receipts`` is not in it."""
    hashes: Any = dict(told.hashes)
    return digest("total", told.slot, told.sum_id.as_value(), told.schema, list(told.survivors), hashes)


def challenge(session: bytes, receipts: Sequence[Receipt2]) -> bytes:
    """Return the challenge of the combinations, made from the survivors' random bytes."""
    first = receipts[0]
    seeds: list[Value] = [[item.name, item.seed] for item in receipts]
    return digest("challenge", session, first.slot, first.sum_id.as_value(), first.basis, first.total, seeds)


def agreement_signed(
    session: bytes,
    slot: int,
    sum_id: SumId,
    receipts: Sequence[Receipt2],
    combinations: Mapping[Group, bytes],
) -> bytes:
    """Return the bytes that a site signed for the survivors, the challenge, and its own combinations."""
    made: Any = dict(combinations)
    survivors: list[Value] = [item.name for item in receipts]
    bits = challenge(session, receipts)
    return encode_fields("agreement", session, slot, sum_id.as_value(), survivors, bits, made)
