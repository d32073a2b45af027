"""The protocol's messages: frozen values, and the one form in which each travels.

A message is a msgpack map with exactly the keys of its class. Whatever is read is checked before
it is used: keys, types, sizes, trailing bytes. What is signed or hashed is never the travelling
form but ``primitives.encode_fields`` of the fields. Everything else imports the messages from here.

Order of exchanges (S the server, i a site)::

    S -> i  Params              i -> S  Advertisement     task "enroll"
    S -> i  Advertisements      i -> S  Confirmation      task "confirm"
    S -> i  TermRequest         i -> S  Masked            task "contribute" (the first with a Setup)
    S -> i  AgreementRequest    i -> S  Agreement         task "agree", only after a drop-out
    S -> i  RevealRequest       i -> S  Reveal            task "reveal"
"""

from __future__ import annotations

from tightframe.securesum.params import (
    GROUPS,
    FieldSpec,
    Group,
    Params,
    SumId,
    read_sum_id,
)
from tightframe.securesum.primitives import (
    HASH_BYTES,
)
from tightframe.securesum.setup_messages import (
    KINDS,
    MAX_ADVERTISEMENT,
    MAX_APPLICATION,
    MAX_CERTIFICATE,
    MAX_SIGNATURE,
    SALT_BYTES,
    SHARE_BYTES,
    Advertisement,
    Advertisements,
    Confirmation,
    Dealt,
    Kind,
    Setup,
    box_plain_bytes,
    hashes_digest,
    hashes_signed,
    ready_signed,
    session_id,
    share_hash,
    share_offset,
)
from tightframe.securesum.sum_messages import (
    MAX_TERM,
    Agreement,
    AgreementRequest,
    Masked,
    Receipt,
    Reveal,
    RevealRequest,
    TermRequest,
    survivors_signed,
)

__all__ = [
    "GROUPS",
    "HASH_BYTES",
    "KINDS",
    "MAX_ADVERTISEMENT",
    "MAX_APPLICATION",
    "MAX_CERTIFICATE",
    "MAX_SIGNATURE",
    "MAX_TERM",
    "SALT_BYTES",
    "SHARE_BYTES",
    "Advertisement",
    "Advertisements",
    "Agreement",
    "AgreementRequest",
    "Confirmation",
    "Dealt",
    "FieldSpec",
    "Group",
    "Kind",
    "Masked",
    "Params",
    "Receipt",
    "Reveal",
    "RevealRequest",
    "Setup",
    "SumId",
    "TermRequest",
    "box_plain_bytes",
    "hashes_digest",
    "hashes_signed",
    "read_sum_id",
    "ready_signed",
    "session_id",
    "share_hash",
    "share_offset",
    "survivors_signed",
]
