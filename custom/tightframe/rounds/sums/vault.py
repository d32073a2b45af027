"""Storage of a site's side of secure sums: journal, state, and the last replies.

Order of one step: the journal's entries are written to disk, then the state and the reply are stored, then
the reply is sent. A step whose reply was lost is answered with the identical bytes; one that was
interrupted between journal and state is refused, because its slot counts as used.

The journal is part of the site's ledger: one ledger entry per step. The state, which holds secrets, and the
replies stay in memory, unless every task is a process of its own (the simulator): then they are files
that only their owner can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from tightframe.files import locked_file, write_atomically
from tightframe.privacy.ledger.entries import Entry, Remembered
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.rows import Check
from tightframe.rounds.site_ledger import LedgerPaths, SiteLedger, read_contents
from tightframe.securesum.errors import StateError
from tightframe.securesum.primitives import Value
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import Advertised, Confirmed, Established

State: TypeAlias = Advertised | Confirmed | Established


def restore(raw: bytes) -> State:
    """Read a stored state of any kind.

    Raises:
        StateError: TF-609 if the bytes are not a state.
    """
    for kind in (Established, Confirmed):
        with suppress(StateError):
            return kind.from_bytes(raw)
    return Advertised.from_bytes(raw)


def journal_of(entries: Iterable[Entry]) -> list[journal.Entry]:
    """Return the journal of secure sums in a ledger's entries, oldest first.

    Raises:
        MessageError: TF-604 if this version cannot read one: skipping it would allow its step again.
    """
    contents = (entry.content for entry in entries)
    return [
        journal.entry_from_value(fact)  # type: ignore[arg-type]  # it checks what it is given
        for content in contents
        if isinstance(content, Remembered)
        for fact in content.facts
    ]


def read_journal(paths: LedgerPaths, *, check: Check | None) -> list[journal.Entry]:
    """Read the journal of a site's secure sums, oldest first; a job may be writing at the same time.

    Raises:
        TightframeError: as ``site_ledger.read_contents``.
        MessageError: TF-604 if an entry cannot be read.
    """
    contents = read_contents(paths, check=check)
    return [] if contents is None else journal_of(contents.entries)


def remember(ledger: Ledger, entries: Sequence[journal.Entry]) -> None:
    """Write the journal entries of one step; returns once they are on disk."""
    facts: tuple[dict[str, Value], ...] = tuple(entry.as_value() for entry in entries)
    ledger.remember(Remembered(facts))


@contextmanager
def locked_ledger(site_ledger: SiteLedger) -> Iterator[Ledger]:
    """Open a site's ledger under the lock that serialises the steps of its secure sums.

    Raises:
        LedgerError, TamperError, SecureSumError: as ``SiteLedger.open``.
    """
    lock = site_ledger.paths.lock
    if not lock.exists():  # the ledger first: a lock without a ledger is evidence of a lost one
        site_ledger.open().close()
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked_file(lock), site_ledger.open() as ledger:
        yield ledger
        site_ledger.keep_witness()


class Vault:
    """Journal, state and last replies of one site's secure sums.

    Args:
        site_ledger: opens the ledger, which outlives runs in production and is shared by concurrent jobs.
        on_disk: whether state and replies are files.
    """

    def __init__(self, folder: Path, site_ledger: SiteLedger, *, on_disk: bool) -> None:
        self._folder = folder
        self._site_ledger = site_ledger
        self._on_disk = on_disk
        self._history = journal.History()
        self._read: tuple[str, int] = ("", 0)  # the ledger's id, and how many of its entries were read
        self._ledger: Ledger | None = None  # while the lock is held
        self._state: State | None = None
        self._stored: dict[str, bytes] = {}

    @contextmanager
    def locked(self) -> Iterator[journal.History]:
        """Yield the current journal, locked against other processes until the step is done."""
        with locked_ledger(self._site_ledger) as ledger:
            self._read_new_entries(ledger)
            self._ledger = ledger
            try:
                yield self._history
            finally:
                self._ledger = None

    def _read_new_entries(self, ledger: Ledger) -> None:
        """Add to the history the entries that this process or another job's has written since the last step.

        Args:
            ledger: opened under the lock, under which alone the journal is written.
        """
        contents = ledger.seen
        name, count = self._read
        if name != contents.head.ledger:
            self._history, count = journal.History(), 0
        for entry in journal_of(contents.entries[count:]):
            self._history.append(entry)
        self._read = (contents.head.ledger, len(contents.entries))

    def state(self) -> State:
        """Return the state of this run.

        Raises:
            StateError: TF-609 if there is none: this process did not enrol, or was restarted.
        """
        if self._on_disk and self._state is None:
            raw = self.recall("state")
            self._state = None if raw is None else restore(raw)
        if self._state is None:
            raise StateError("this site's session", expected="set up by enroll and confirm", found="none")
        return self._state

    def forgotten(self) -> bool:
        """Return True if this process has no state of this run, and none is kept on disk."""
        return self._state is None and not self._on_disk

    def established(self) -> Established | None:
        """Return the state of this run, if it can take part in sums."""
        with suppress(StateError):
            state = self.state()
            return state if isinstance(state, Established) else None
        return None

    def commit(
        self,
        entries: Sequence[journal.Entry],
        state: State,
        replies: Mapping[str, bytes],
        kept: Mapping[str, bytes | None],
    ) -> None:
        """Make a step durable: the journal first, then kept bytes, the state and the replies by name.

        Args:
            replies: name -> bytes.
            kept: name -> bytes; None to erase them.
        """
        if entries:
            self.note(*entries)
        for name, part in kept.items():
            if part is not None:
                self.keep(name, part)
        self._state = state
        if self._on_disk:
            self.keep("state", state.to_bytes())
        for name, data in replies.items():
            self.keep(name, data)
        for name, part in kept.items():
            if part is None:
                self.erase(name)

    def note(self, *entries: journal.Entry) -> None:
        """Write journal entries; returns once they are on disk. The journal must be locked."""
        if self._ledger is None:
            raise StateError("the journal", expected="locked while a step is made", found="open")
        remember(self._ledger, entries)

    def erase(self, name: str) -> None:
        """Erase the bytes stored under a name, if there are any."""
        self._stored.pop(name, None)
        if self._on_disk:
            (self._folder / name).unlink(missing_ok=True)

    def keep(self, name: str, data: bytes) -> None:
        """Store bytes of this run under a name."""
        if self._on_disk:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._folder / name, data, mode=0o600)
        else:
            self._stored[name] = data

    def recall(self, name: str) -> bytes | None:
        """Return the bytes stored under a name; None if there are none."""
        if not self._on_disk:
            return self._stored.get(name)
        path = self._folder / name
        return path.read_bytes() if path.is_file() else None
