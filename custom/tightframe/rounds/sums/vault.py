"""Where a site keeps what the secure sum must remember: journal, state, and the last replies.

Order of one step: the journal's entries are on disk, then the state and the reply are kept, then
the reply is sent. A step whose reply was lost is answered with the identical bytes; one that was
cut off between journal and state is refused, because its slot counts as used.

The journal is in the site's ledger: one entry of it a step. The state, which holds secrets, and the
replies stay in memory, unless every task is a process of its own (the simulator): then they are files
that only their owner can read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from tightframe.files import write_atomically
from tightframe.privacy.ledger.entries import Entry, Remembered
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.rows import Check
from tightframe.rounds.lasting import Lasting, Places, look
from tightframe.securesum import journal
from tightframe.securesum.errors import StateError
from tightframe.securesum.primitives import Value
from tightframe.securesum.site_state import Advertised, Confirmed, Established

State: TypeAlias = Advertised | Confirmed | Established


def restore(raw: bytes) -> State:
    """A stored state of any kind.

    Raises:
        StateError: TF-609 if it is none.
    """
    for kind in (Established, Confirmed):
        with suppress(StateError):
            return kind.from_bytes(raw)
    return Advertised.from_bytes(raw)


def journal_of(entries: Iterable[Entry]) -> list[journal.Entry]:
    """The secure sum's entries among those of a ledger, oldest first.

    Raises:
        MessageError: TF-604 if one is none of this version's: what it says would be allowed again.
    """
    contents = (entry.content for entry in entries)
    return [
        journal.entry_from_value(fact)  # type: ignore[arg-type]  # it checks what it is given
        for content in contents
        if isinstance(content, Remembered)
        for fact in content.facts
    ]


def look_at_journal(places: Places, *, check: Check | None) -> list[journal.Entry]:
    """All entries of a site's secure sums, oldest first, beside a job that may be writing.

    Raises:
        TightframeError: as ``lasting.look``.
        MessageError: TF-604 if one cannot be read.
    """
    looked = look(places, check=check)
    old = [journal.entry_from_value(fact) for fact in looked.facts]  # type: ignore[arg-type]  # checks
    return old + journal_of(looked.entries)


def remember(ledger: Ledger, entries: Sequence[journal.Entry]) -> None:
    """Write the entries of one step, and return when they are on the disk."""
    facts: tuple[dict[str, Value], ...] = tuple(entry.as_value() for entry in entries)
    ledger.remember(Remembered(facts))


@contextmanager
def turn(lasting: Lasting) -> Iterator[Ledger]:
    """A site's ledger, with the lock under which steps of its secure sums take turns.

    Raises:
        LedgerError, TamperError, SecureSumError: as ``Lasting.open``.
    """
    lock = lasting.places.lock
    if not lock.exists():  # the ledger first: without one the lock would tell of one that was lost
        lasting.open().close()
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with lasting.open() as ledger:
            yield ledger
            lasting.keep_witness()
    finally:
        os.close(descriptor)


class Vault:
    """One site's memory of the secure sum.

    Args:
        folder: of this run.
        lasting: opens the ledger, which outlives runs in production, and is shared by jobs that run at a
            time.
        on_disk: whether state and replies are files.
    """

    def __init__(self, folder: Path, lasting: Lasting, *, on_disk: bool) -> None:
        self._folder = folder
        self._lasting = lasting
        self._on_disk = on_disk
        self._history = journal.History()
        self._read: tuple[str, int] = ("", 0)  # which ledger, and how many of its entries the history has
        self._ledger: Ledger | None = None  # while the lock is held
        self._state: State | None = None
        self._kept: dict[str, bytes] = {}

    @contextmanager
    def locked(self) -> Iterator[journal.History]:
        """The journal as it is now, kept from other processes until the step is over."""
        with turn(self._lasting) as ledger:
            self._read_on(ledger)
            self._ledger = ledger
            try:
                yield self._history
            finally:
                self._ledger = None

    def _read_on(self, ledger: Ledger) -> None:
        """Take into account what was added since, by this process or by another job's."""
        whole = ledger.verify()
        name, count = self._read
        if name != whole.head.ledger:
            self._history, count = journal.History(), 0
        for entry in journal_of(whole.entries[count:]):
            self._history.append(entry)
        self._read = (whole.head.ledger, len(whole.entries))

    def state(self) -> State:
        """The state of this run.

        Raises:
            StateError: TF-609 if there is none: this process did not enrol, or lost its memory.
        """
        if self._on_disk and self._state is None:
            raw = self.recall("state")
            self._state = None if raw is None else restore(raw)
        if self._state is None:
            raise StateError("this site's session", expected="set up by enroll and confirm", found="none")
        return self._state

    def commit(self, entries: Sequence[journal.Entry], state: State, kept: dict[str, bytes]) -> None:
        """Make a step durable: journal, then state and what is kept with it."""
        if entries:
            if self._ledger is None:
                raise StateError("the journal", expected="locked while a step is made", found="open")
            remember(self._ledger, entries)
        self._state = state
        if self._on_disk:
            self.keep("state", state.to_bytes())
        for name, data in kept.items():
            self.keep(name, data)

    def keep(self, name: str, data: bytes) -> None:
        """Keep some bytes of this run by name."""
        if self._on_disk:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._folder / name, data, mode=0o600)
        else:
            self._kept[name] = data

    def recall(self, name: str) -> bytes | None:
        """What was kept by a name."""
        if not self._on_disk:
            return self._kept.get(name)
        path = self._folder / name
        return path.read_bytes() if path.is_file() else None
