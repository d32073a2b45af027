"""Verify a ledger from its first entry to its head, and name the first error.

It detects any change of an entry, one that is missing, moved, added or signed by somebody else, and a
shortened ledger, unless its head record and the head file are rolled back with it. It cannot detect both
files rolled back together to an earlier state of the same ledger. Only a head noted elsewhere reveals that;
``verify`` takes such heads as ``known``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tightframe.privacy.ledger.entries import Charge, DataNoted, Entry, TamperError
from tightframe.privacy.ledger.rows import ENTRY, Check, Row, digest, read_row
from tightframe.privacy.ledger.store import Contents, Head, Store, genesis
from tightframe.securesum.primitives import encode_fields


@dataclass(frozen=True)
class Verified:
    """A verified ledger.

    Attributes:
        entries: all, oldest first.
        certificates: SHA-256 -> certificate (DER) of all signers.
        signatures: whether signatures were checked, or only the chain of hashes.
    """

    entries: tuple[Entry, ...]
    head: Head
    certificates: dict[str, bytes]
    signatures: bool

    @property
    def of_records(self) -> tuple[Entry, ...]:
        """The entries on privacy budgets."""
        return tuple(entry for entry in self.entries if isinstance(entry.content, Charge | DataNoted))


class Chain:
    """Verifies a ledger repeatedly; unchanged entries that it has verified are not checked again.

    Args:
        check: holds signatures against certificates; None to look at hashes only.
    """

    def __init__(self, check: Check | None) -> None:
        self._check = check
        self._rows: list[Row] = []
        self._entries: list[Entry] = []
        self._signers: dict[str, bytes] = {}
        self._heads: deque[tuple[Head, bytes]] = deque(maxlen=2)  # record and file, with their certificates

    @property
    def last(self) -> tuple[int, str]:
        """Number and hash of the last verified entry; (0, "") if there is none."""
        return (len(self._entries), self._entries[-1].hash) if self._entries else (0, "")

    def verify(
        self, contents: Contents, published: Head | None, *, known: Sequence[tuple[int, str]] = ()
    ) -> Verified:
        """Verify and return all entries.

        Args:
            contents: of the file, or the part after an entry that was verified before.
            known: (number of entries, hash of the last) of heads seen before.

        Raises:
            TamperError: TF-702, with the number of the first wrong entry, if there is one.
        """
        head = contents.head
        self._check_head(head, contents, "the head record")
        self._read(contents)
        self._check_known(head, head.count, head.hash, "the head record")
        if head.count < len(self._entries):
            raise _unsigned(head.count + 1)
        if published is None and head.count:
            raise TamperError(
                "Expected the head file beside the ledger, but there is none: it was removed, or the ledger "
                "was copied without it. If it is lost, `tightframe ledger verify --renew-head` writes one."
            )
        if published is not None:
            if published.ledger != head.ledger:
                raise TamperError("Expected the head file to be this ledger's, but got another ledger's.")
            self._check_head(published, contents, "the head file")
            self._check_known(head, published.count, published.hash, "the head file")
        for count, hashed in known:
            self._check_known(head, count, hashed, "a head that was written down")
        return Verified(
            tuple(self._entries), head, dict(contents.certificates), signatures=self._check is not None
        )

    def _read(self, contents: Contents) -> None:
        """Read entries in turn; unchanged ones that were read before are reused."""
        same = contents.after
        if same and any(contents.certificates.get(one) != old for one, old in self._signers.items()):
            raise TamperError("Expected the certificates of earlier entries, but got others or none.")
        for old, new in zip(self._rows[same:], contents.rows, strict=False):
            if old != new or contents.certificates.get(old[5]) != self._signers.get(old[5]):
                break
            same += 1
        del self._rows[same:], self._entries[same:]
        previous = self._entries[-1].hash if self._entries else genesis(contents.head.ledger)
        if self._entries and self._entries[0].previous != genesis(contents.head.ledger):
            raise TamperError("Expected the head record to be this ledger's, but got another's.", entry=1)
        for expected, row in enumerate(contents.rows[same - contents.after :], start=same + 1):
            entry = read_row(row, expected=expected, previous=previous)
            message = encode_fields(ENTRY, entry.hash)
            self._check_signature(
                contents, entry.signer, message, entry.signature, entry.time, f"entry {expected}", expected
            )
            self._rows.append(row)
            self._entries.append(entry)
            self._signers[entry.signer] = contents.certificates[entry.signer]
            previous = entry.hash

    def _check_known(self, head: Head, count: int, hashed: str, what: str) -> None:
        if count > len(self._entries):
            raise TamperError(
                f"Expected {count} entries, as {what} says, but found {len(self._entries)}: the last ones "
                "were removed, or an older copy was put in place. Restore the newest backup.",
                entry=len(self._entries) + 1,
            )
        if hashed != (self._entries[count - 1].hash if count else genesis(head.ledger)):
            raise TamperError(
                f"Expected entry {count} to be the one that {what} counts last, but got another.",
                entry=count or None,
            )

    def _check_head(self, head: Head, contents: Contents, what: str) -> None:
        try:
            signature, time = bytes.fromhex(head.signature), datetime.fromisoformat(head.time)
        except ValueError:
            raise TamperError(f"Expected {what} to have a signature and a time, but got others.") from None
        signed = (head, contents.certificates.get(head.signer, b""))
        if signed not in self._heads:
            self._check_signature(contents, head.signer, head.message, signature, time, what, None)
            self._heads.append(signed)

    def _check_signature(
        self,
        contents: Contents,
        signer: str,
        message: bytes,
        signature: bytes,
        time: datetime,
        what: str,
        entry: int | None,
    ) -> None:
        certificate = contents.certificates.get(signer)
        if not isinstance(certificate, bytes) or digest(certificate) != signer:
            raise TamperError(
                f"Expected the certificate that {what} names, but got another or none.", entry=entry
            )
        if self._check is None:
            return
        try:
            self._check(certificate, message, signature, time)
        except Exception as error:  # any exception of a verifier is the same refusal
            raise TamperError(
                f"Expected {what} to be signed by this site, but its signature does not hold: {error}",
                entry=entry,
            ) from error


def read_ledger(path: Path, *, check: Check | None, known: Sequence[tuple[int, str]] = ()) -> Verified:
    """Read and check a ledger without a key and without writing to it.

    Args:
        path: the ledger's file.
        check: holds signatures against certificates; None to look at hashes only.
        known: (number of entries, hash of the last) of heads seen before.

    Raises:
        LedgerError: TF-704.
        TamperError: TF-702.
    """
    store = Store(path, read_only=True)
    try:
        # The head file first: it may lag behind the ledger, but must not appear ahead of it.
        published = store.published_head()
        return Chain(check).verify(store.read(), published, known=known)
    finally:
        store.close()


def renew_head_file(path: Path, *, check: Check, known: Sequence[tuple[int, str]] = ()) -> Verified:
    """Verify a ledger without its head file, and rewrite the head file.

    Raises:
        LedgerError: TF-704.
        TamperError: TF-702; nothing is written then.
    """
    store = Store(path)
    try:
        contents = store.read()
        verified = Chain(check).verify(contents, contents.head, known=known)
        store.publish_head()
        return verified
    finally:
        store.close()


def _unsigned(entry: int) -> TamperError:
    return TamperError(
        f"Expected the head record to count entry {entry}, but it ends before: the entry was not written by "
        "the ledger, or the head was set back.",
        entry=entry,
    )
