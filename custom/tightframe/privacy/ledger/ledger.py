"""A site's ledger: every release is charged here before its noise is drawn, or does not happen.

One file per site, outside of any job, for all jobs on the site's records. It also has the journal of the
site's secure sums, so that one chain and one head show whether anything is lost. A charge is decided and
written in one transaction: all events of the data set, of every job, are composed with the new one and
compared with the site's cap. A charge that does not fit is refused and leaves no trace; one that fits is on
the disk, signed and chained, when ``charge`` returns. Nothing is ever refunded: a round that failed, a reply
that was lost, a process that was killed after the charge stay charged.

**Repeats.** A charge's key is job, purpose and attempt. It is charged once:

- New noise is a new attempt, which is charged and counts as a retry.
- The same bytes sent again need no charge. The caller declares that (``resend``) and gets the entry back; it
  is refused unless exactly this charge was made. A caller without the bytes, after a crash for example, must
  use a new attempt.

**Neighbours.** The first charge of a data set fixes whom its noise protects, records or patients; a job of
the other kind is refused. Neither guarantee implies the other at a comparable epsilon, and two separate
budgets would each ignore what the other one spent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from tightframe.phases import Neighbours
from tightframe.privacy.accounting import Epsilons, epsilons
from tightframe.privacy.ledger import store as ledger_store
from tightframe.privacy.ledger.chain import Chain, Verified
from tightframe.privacy.ledger.entries import (
    Begun,
    Cap,
    Charge,
    Content,
    DataNoted,
    Entry,
    Remembered,
    RepeatError,
    checked_neighbours,
)
from tightframe.privacy.ledger.rows import Check, Row, Signer, make_row, read_row
from tightframe.privacy.ledger.rules import (
    charges_of,
    check_name,
    check_neighbours,
    check_rules,
    describe,
    events_of,
    overspent,
    retries_of,
)

FOLDER, FILE = "privacy", "ledger.sqlite"


def ledger_path(state_dir: Path, site: str) -> Path:
    """Return the path of a site's ledger: in its lasting state, outside of any job."""
    return state_dir / FOLDER / site / FILE


def ledger_expected(path: Path) -> bool:
    """Return whether there are traces of a ledger: a new one may be created only where there are none."""
    return ledger_store.expected(path)


class Ledger:
    """A site's open ledger; use it in a ``with`` block, in the thread that opened it.

    Args:
        path: of the file (see ``ledger_path``).
        signer: the site's key and certificate.
        check: verifies a signature with the certificate, and the certificate with the site's trust anchors.
        create: create a new ledger. Only for a site that never had one (see ``ledger_expected``).
        chain: entries verified by an earlier opening in this process: they are read again before a charge,
            but neither when the ledger is opened nor when facts are remembered.
        clock: the time, with a time zone.

    Attributes:
        seen: the ledger as last verified, at the earliest when it was opened.

    Raises:
        LedgerError: TF-704, if the file is missing, damaged, of another version or not writable; with
            ``create`` also if there are traces of a ledger.
        TamperError: TF-702, if it was altered.
    """

    seen: Verified

    def __init__(
        self,
        path: Path,
        signer: Signer,
        *,
        check: Check,
        create: bool = False,
        chain: Chain | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._signer, self._clock = signer, clock
        self._chain = Chain(check) if chain is None else chain
        if create:
            ledger_store.create_file(path, signer, clock())
        self._store = ledger_store.Store(path)
        try:
            published = self._store.published_head()  # first: it must not seem to run ahead
            self.seen = self._chain.verify(self._store.read(self._chain.last), published)
            if published != self.seen.head:  # possibly outdated after a crash
                self._store.publish_head()
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def charge(self, charge: Charge, *, cap: Cap, resend: bool = False) -> Entry:
        """Charge a release, before its noise is drawn.

        Args:
            charge: of the release.
            cap: of the site's policy.
            resend: the same bytes of an earlier release are sent again: nothing is charged, and the entry of
                that release is returned, if exactly this was charged.

        Returns:
            The entry, which is on the disk.

        Raises:
            BudgetError: TF-701, with the spent and remaining budget, and what would fit.
            RepeatError: TF-705, if it was charged before, is one retry too many, or is not a resend.
            NeighboursError: TF-706.
            TamperError, LedgerError: TF-702, TF-704. Nothing may be released then.
        """
        if not resend:
            return self.charge_all([charge], cap=cap)[0]
        for entry in self.entries():
            if entry.charge is not None and entry.charge.key == charge.key:
                if entry.charge != charge:
                    break
                return entry
        raise RepeatError(
            f"Expected the resend of {describe(charge)} to be charged before with the same values, but it "
            "was not. Charge what is released; only identical bytes may be sent again without."
        )

    def charge_all(
        self,
        charges: Sequence[Charge],
        *,
        cap: Cap,
        check: Callable[[Sequence[Entry]], None] = lambda entries: None,
    ) -> tuple[Entry, ...]:
        """Charge several releases that belong together: all of them, or none.

        Args:
            charges: in their order.
            check: the caller's own check of the entries, to which nothing is added before these charges.

        Raises:
            BudgetError, RepeatError, NeighboursError, TamperError, LedgerError: as ``charge``.
        """
        with self._store.writing():
            verified = self._verified()
            check(verified.entries)
            check_rules(verified.entries, charges, cap)
            over = overspent(verified.entries, charges, cap)
            written = () if over else self._append(verified, charges)
        if over:
            raise over.error()  # after the lock is released: computing what would fit takes seconds
        self._store.publish_head()
        return written

    def note_data(
        self,
        dataset_id: str,
        fingerprint: str,
        sketch: str = "",
        columns: str | None = None,
        *,
        also: Sequence[str] = (),
    ) -> Entry | None:
        """Record these records' hashes under their name; a new fingerprint never resets a budget.

        Args:
            dataset_id: the site's name of its records.
            fingerprint: a hash of them, hexadecimal digits.
            sketch, columns: see ``DataNoted``.
            also: other hashes of them, which are compared and not stored.

        Returns:
            The new entry; None if it already exists.

        Raises:
            DatasetError: TF-703, if the same records, or most of them, are known by another name.
            PrivacyValueError: TF-700.
        """
        noted = DataNoted(dataset_id, fingerprint, sketch, columns)
        with self._store.writing():
            verified = self._verified()
            check_name(verified.entries, noted, also)
            if any(entry.content == noted for entry in verified.entries):
                return None
            (entry,) = self._append(verified, [noted])
        self._store.publish_head()
        return entry

    def secret(self) -> bytes:
        """Return the secret that keys sketches of records; beside the ledger, so that it discloses nothing.

        Raises:
            LedgerError: TF-704, if it cannot be read or written.
        """
        return self._store.secret()

    def remember(self, content: Remembered | Begun) -> None:
        """Write facts that must never be forgotten, and return when they are on the disk.

        Args:
            content: the facts.

        Raises:
            TamperError, LedgerError: TF-702, TF-704. The step that depends on them must not happen then.
        """
        with self._store.writing():
            self._append(self._verified(self._chain.last), [content])
        self._store.publish_head()

    def spent(
        self,
        dataset_id: str,
        neighbours: Neighbours,
        delta: float,
        *,
        job_id: str | None = None,
        alone: bool = False,
        prv: bool = True,
    ) -> Epsilons:
        """Return the spending on a data set.

        Args:
            dataset_id: the site's name of its records.
            neighbours: whom the noise protects.
            delta: at which epsilon is meant.
            job_id: by one job only; else by all.
            alone: if no other silo adds noise.
            prv: whether to compute PRV, which can take a second.

        Raises:
            NeighboursError: TF-706, if the charges are in the other relation.
            PrivacyValueError: TF-700.
        """
        entries = self.entries()
        check_neighbours(charges_of(entries), dataset_id, checked_neighbours(neighbours))
        return epsilons(events_of(entries, dataset_id, job_id=job_id, alone=alone), delta, prv=prv)

    def entries(self) -> tuple[Entry, ...]:
        """Verify and return all entries, oldest first.

        Raises:
            TamperError: TF-702.
            LedgerError: TF-704.
        """
        return self.verify().entries

    def verify(self, *, known: Sequence[tuple[int, str]] = ()) -> Verified:
        """Verify the chain: hashes, signatures, numbers, and the head; see ``chain`` for its limits.

        Args:
            known: (number of entries, hash of the last) of heads noted elsewhere.

        Raises:
            TamperError: TF-702, naming the first wrong entry.
            LedgerError: TF-704.
        """
        published = self._store.published_head()  # first: it must not seem to run ahead
        self.seen = self._chain.verify(self._store.read(), published, known=known)
        return self.seen

    def _verified(self, known: tuple[int, str] = (0, "")) -> Verified:
        """Verify the ledger, by default completely, in time linear in its entries."""
        return self._chain.verify(self._store.read(known), self._store.published_head())

    def _append(self, verified: Verified, contents: Sequence[Content]) -> tuple[Entry, ...]:
        """Write entries and the head that counts them, within the transaction."""
        written: list[Entry] = []
        rows: list[Row] = []
        previous = verified.head.hash
        for content in contents:
            number, retry = len(verified.entries) + len(written) + 1, 0
            if isinstance(content, Charge):
                retry = retries_of(charges_of((*verified.entries, *written)), content)
            rows.append(make_row(number, self._clock(), content, retry, previous, self._signer))
            written.append(read_row(rows[-1], expected=number, previous=previous))
            previous = written[-1].hash
        if rows:
            count = len(verified.entries) + len(written)
            head = ledger_store.make_head(verified.head.ledger, count, previous, self._clock(), self._signer)
            self._store.append(rows, head, self._signer)
        return tuple(written)
