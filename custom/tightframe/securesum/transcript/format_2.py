"""Messages that silos signed in version 2 of the protocol, in transcripts of format 2.

Nothing writes this any more. A receipt had fresh random bytes and no combinations; all survivors of each
sum signed an agreement, on a challenge made from these bytes, with the combinations of their terms; and the
digest of a total did not name its receipts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightframe.securesum import reading
from tightframe.securesum.messages import Group, SumId, Told
from tightframe.securesum.primitives import Value, digest, encode_fields


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
