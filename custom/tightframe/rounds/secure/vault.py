"""Where a site keeps what the secure sum must remember: journal, state, and the last replies.

Order of one step: the journal's entries are on disk, then the state and the reply are kept, then
the reply is sent. A step whose reply was lost is answered with the identical bytes; one that was
cut off between journal and state is refused, because its slot counts as used.

The journal is a file in either case. The state, which holds secrets, and the replies stay in
memory, unless every task is a process of its own (the simulator): then they are files that only
their owner can read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from tightframe.files import append_durably, drop_torn_line, write_atomically
from tightframe.securesum import journal
from tightframe.securesum.errors import MessageError, StateError
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


def read_journal(path: Path) -> list[journal.Entry]:
    """All entries of a journal, oldest first; none if there is no file yet.

    Raises:
        MessageError: TF-604 if a line cannot be read: what is missing would be allowed again.
    """
    return _entries(path, path.read_bytes()) if path.exists() else []


def look_at_journal(path: Path) -> list[journal.Entry]:
    """As ``read_journal``, beside a job that may be writing: without a lock, and nothing is changed.

    A last line without its end is left out: nobody was told yet that it exists.
    """
    lines = path.read_bytes() if path.exists() else b""
    return _entries(path, lines[: lines.rfind(b"\n") + 1])


def _entries(path: Path, lines: bytes) -> list[journal.Entry]:
    try:
        values = [json.loads(line) for line in lines.splitlines()]
    except ValueError:
        raise MessageError(
            f"the journal {path}", expected="one JSON object a line", found="another"
        ) from None
    return [journal.entry_from_value(value) for value in values]


def append_entries(path: Path, entries: Sequence[journal.Entry]) -> None:
    """Append to a journal and return when it is on the disk."""
    append_durably(path, b"".join(json.dumps(entry.as_value()).encode() + b"\n" for entry in entries))


class Vault:
    """One site's memory of the secure sum.

    Args:
        folder: of this run.
        journal_file: outlives runs in production, and may be shared by jobs that run at a time.
        on_disk: whether state and replies are files.
    """

    def __init__(self, folder: Path, journal_file: Path, *, on_disk: bool) -> None:
        self._folder = folder
        self._journal = journal_file
        self._on_disk = on_disk
        self._history = journal.History()
        self._read = 0  # bytes of the journal that the history has
        self._state: State | None = None
        self._kept: dict[str, bytes] = {}

    @contextmanager
    def locked(self) -> Iterator[journal.History]:
        """The journal as it is now, kept from other processes until the step is over."""
        self._journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._journal.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._read_on()
            yield self._history
        finally:
            os.close(descriptor)

    def _read_on(self) -> None:
        """Take into account what was appended since, by this process or by another job's."""
        if not self._journal.exists():
            return
        drop_torn_line(self._journal)
        with self._journal.open("rb") as stream:
            stream.seek(self._read)
            new = stream.read()
        for entry in _entries(self._journal, new):
            self._history.append(entry)
        self._read += len(new)

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
            append_entries(self._journal, entries)
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
