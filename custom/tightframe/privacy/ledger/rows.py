"""Stored form of entries, with their chaining and signatures.

An entry's hash is SHA-256 over a canonical text (JSON, sorted keys) of all its values and of the previous
hash; the first one's previous hash is the ledger's own. Signed are ``encode_fields(ENTRY, hash)``, and for
the head ``encode_fields(HEAD, ledger, count, hash, time)``.

A site's key signs strings that begin with a fixed prefix and a tag, each tag for one purpose
(``securesum.primitives.encode_fields``). The ledger has tags of its own, so that the same signer can sign
both, and no signature of the ledger is valid in the protocol, nor the reverse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

from tightframe.privacy.events import PrivacyValueError, from_value, whole
from tightframe.privacy.ledger.entries import (
    MAX_ATTEMPT,
    Begun,
    Charge,
    Content,
    DataNoted,
    Entry,
    Remembered,
    TamperError,
)
from tightframe.securesum.primitives import encode_fields

ENTRY, HEAD = "privacy-ledger/entry/1", "privacy-ledger/head/1"

Check: TypeAlias = Callable[[bytes, bytes, bytes, datetime], None]
"""Returns if ``check(certificate, message, signature, time)`` is the signature of a site that is
accepted, whose certificate (DER) was valid at that time; raises otherwise."""


class Signer(Protocol):
    """The site's provisioned identity, for any holder of the key."""

    @property
    def certificate(self) -> bytes:
        """The site's certificate, DER."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Sign with the key."""
        ...


Row: TypeAlias = tuple[int, str, str, str, str, str, str, bytes]
"""Columns: sequence, time, kind, content, previous, signer, hash, signature."""


def make_row(
    sequence: int, time: datetime, content: Content, retry: int, previous: str, signer: Signer
) -> Row:
    """Make a new entry, signed, as it is stored."""
    values = content.as_value()
    if isinstance(content, Charge):
        values["retry"] = retry
    columns = (
        sequence,
        _time_text(time),
        content.KIND,
        canonical(values),
        previous,
        digest(signer.certificate),
    )
    hashed = _hash_of(*columns)
    return (*columns, hashed, signer.sign(encode_fields(ENTRY, hashed)))


_UNREADABLE = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    PrivacyValueError,
)


def read_row(row: Row, *, expected: int, previous: str) -> Entry:
    """Read a stored row that continues the chain; the caller checks its signature.

    Raises:
        TamperError: TF-702, naming the entry.
    """
    sequence, time, kind, content, before, signer, hashed, signature = row
    if sequence != expected:
        raise TamperError(
            f"Expected entry {expected} of the ledger, but got entry {sequence}: what lies between was "
            "removed or renumbered. Restore the file from a backup.",
            entry=expected,
        )
    texts = (time, kind, content, before, signer, hashed)
    if not all(isinstance(text, str) for text in texts) or not isinstance(signature, bytes):
        raise _altered(expected, "columns of their types")
    if before != previous:
        raise _altered(expected, "the hash of the entry before it")
    if hashed != _hash_of(sequence, time, kind, content, before, signer):
        raise _altered(expected, "the hash of what it says")
    try:
        values, retry = json.loads(content), 0
        if kind == Charge.KIND:
            retry = whole("retry", values.pop("retry"), 0, MAX_ATTEMPT)
        read = Entry(
            sequence, _read_time(time), _content(kind, values), retry, before, signer, hashed, signature
        )
    except _UNREADABLE:
        raise _altered(expected, "an entry that can be read") from None
    return read


def digest(data: bytes) -> str:
    """Return SHA-256 as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def canonical(values: Mapping[str, object]) -> str:
    """Return the canonical text of plain values."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _content(kind: str, values: dict[str, object]) -> Content:
    if kind == DataNoted.KIND:
        return DataNoted(**values)  # type: ignore[arg-type]  # it checks itself
    if kind == Remembered.KIND:
        facts = values.pop("facts")
        if not isinstance(facts, list):
            raise TypeError("facts")
        return Remembered(tuple(facts), **values)  # type: ignore[arg-type]  # it checks itself
    if kind == Begun.KIND:
        return Begun(**values)  # type: ignore[arg-type]  # it checks itself
    if kind != Charge.KIND:
        raise ValueError(kind)
    cohort, alone = values.pop("cohort"), values.pop("alone")
    if not isinstance(cohort, list):
        raise TypeError("cohort")
    return Charge(
        event=from_value(values.pop("event")),
        alone=None if alone is None else from_value(alone),
        cohort=tuple(cohort),
        **values,  # type: ignore[arg-type]  # it checks itself
    )


def _hash_of(sequence: int, time: str, kind: str, content: str, previous: str, signer: str) -> str:
    values = {
        "sequence": sequence,
        "time": time,
        "kind": kind,
        "content": content,
        "previous": previous,
        "signer": signer,
    }
    return digest(canonical(values).encode())


def _altered(entry: int, expected: str) -> TamperError:
    return TamperError(
        f"Expected entry {entry} of the ledger to have {expected}, but got something else: the file was "
        "altered. Restore it from a backup, and find out who wrote to it.",
        entry=entry,
    )


def _time_text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def _read_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if _time_text(time) != text:
        raise ValueError("not in UTC as it is written")
    return time
