"""What silos signed for a sum in version 1 of the protocol, as transcripts of format 1 have it.

Nothing writes this any more. A receipt named the broadcast, and no total; the survivors were signed only
after a drop-out, without a challenge; and no total was verified by the silos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightframe.securesum.messages import SumId
from tightframe.securesum.primitives import encode_fields


@dataclass(frozen=True)
class Receipt1:
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


def survivors_signed(session: bytes, slot: int, sum_id: SumId, survivors: Sequence[str]) -> bytes:
    """Return the bytes that a site signed for a survivor set smaller than the roster."""
    return encode_fields("survivors", session, slot, sum_id.as_value(), list(survivors))
