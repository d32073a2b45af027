"""Messages that silos signed in version 1 of the protocol, in transcripts of format 1.

Nothing writes this any more. An advertisement had an X25519 key for each slot and group, and no key of
ML-KEM-768; a receipt named the broadcast, and no total; the survivors were signed only after a drop-out,
without a challenge; and no total was verified by the silos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightframe.securesum import reading
from tightframe.securesum.messages import (
    GROUPS,
    MAX_APPLICATION,
    MAX_CERTIFICATE,
    MAX_SIGNATURE,
    Params,
    SumId,
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
        """What the term rested on: then the broadcast."""
        return self.broadcast

    def signed(self, session: bytes) -> bytes:
        """Return the bytes that ``signature`` covers."""
        return encode_fields("receipt", session, *self.unsigned())


def survivors_signed(session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str]) -> bytes:
    """Return the bytes that a site signed for a survivor set smaller than the roster."""
    return encode_fields("survivors", session, slot, sum_id.as_value(), list(survivors))
