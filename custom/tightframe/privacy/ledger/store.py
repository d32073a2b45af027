"""The ledger's file: one SQLite database, and a small file beside it with its length.

WAL with ``synchronous=FULL``: a commit is on the disk when it returns, and a crash at any moment leaves
either the complete entry or nothing; in a simulation (``files.waiting``) only a crash of the process does.
Writers take the lock *before* they read, so that two processes never decide on the same state. This needs a
local disk: WAL does not work over a network.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from tightframe.files import indented, sync, sync_folder, waits, write_atomically
from tightframe.privacy.ledger.entries import LedgerError, TamperError
from tightframe.privacy.ledger.rows import HEAD, Row, Signer, digest
from tightframe.securesum.primitives import encode_fields

VERSION = 1
_APPLICATION = 0x54464C47  # "TFLG", in the file's header
_BUSY_SECONDS = 60.0
_SECRET_BYTES = 32
_SCHEMA = {
    "signers": "CREATE TABLE signers (id TEXT PRIMARY KEY NOT NULL, certificate BLOB NOT NULL)",
    "entries": (
        "CREATE TABLE entries (sequence INTEGER PRIMARY KEY NOT NULL, time TEXT NOT NULL, "
        "kind TEXT NOT NULL, "
        "content TEXT NOT NULL, previous TEXT NOT NULL, signer TEXT NOT NULL REFERENCES signers (id), "
        "hash TEXT NOT NULL, signature BLOB NOT NULL)"
    ),
    "head": (
        "CREATE TABLE head (id INTEGER PRIMARY KEY NOT NULL CHECK (id = 1), ledger TEXT NOT NULL, "
        "count INTEGER NOT NULL, hash TEXT NOT NULL, time TEXT NOT NULL, "
        "signer TEXT NOT NULL REFERENCES signers (id), signature TEXT NOT NULL)"
    ),
}


@dataclass(frozen=True)
class Head:
    """The ledger's length and last hash, signed by the writer of the last entry.

    Attributes:
        ledger: the ledger's own random name, in hexadecimal digits.
        count: number of entries.
        hash: of the last entry; of an empty ledger ``genesis(ledger)``.
        time: when it was signed.
        signer: SHA-256 of the certificate.
    """

    ledger: str
    count: int
    hash: str
    time: str
    signer: str
    signature: str

    @property
    def message(self) -> bytes:
        """The signed bytes."""
        return encode_fields(HEAD, self.ledger, self.count, self.hash, self.time)


@dataclass(frozen=True)
class Contents:
    """Contents of the file, unverified.

    Attributes:
        rows: all, or those after number ``after``.
    """

    rows: tuple[Row, ...]
    head: Head
    certificates: dict[str, bytes]
    after: int = 0


def genesis(ledger: str) -> str:
    """Return the hash before the first entry."""
    return digest(f"privacy-ledger {ledger}".encode())


def make_head(ledger: str, count: int, hashed: str, time: datetime, signer: Signer) -> Head:
    """Make a signed head."""
    text = time.astimezone(UTC).isoformat(timespec="microseconds")
    bare = Head(ledger, count, hashed, text, digest(signer.certificate), "")
    return replace(bare, signature=signer.sign(bare.message).hex())


def head_file(path: Path) -> Path:
    """Return the path of the head's copy, beside the ledger."""
    return path.with_name(path.name + ".head")


def secret_file(path: Path) -> Path:
    """Return the path of the secret beside the ledger, which keys its sketches of columns and looks."""
    return path.with_name(path.name + ".secret")


def read_secret(path: Path) -> bytes | None:
    """Read a ledger's secret; None if there is none yet.

    Args:
        path: of the ledger.

    Raises:
        LedgerError: TF-704, if it cannot be read.
    """
    with _named(path):
        try:
            return secret_file(path).read_bytes()[:_SECRET_BYTES] or None
        except FileNotFoundError:
            return None


def expected(path: Path) -> bool:
    """Return whether there are traces of a ledger: its file, SQLite's files beside it, or the head."""
    return any(item.exists() for item in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), head_file(path)))


def create_file(path: Path, signer: Signer, time: datetime) -> None:
    """Create an empty ledger, atomically.

    Raises:
        LedgerError: TF-704, if there are traces of one already, or it cannot be written.
    """
    if expected(path):
        raise LedgerError(
            f"Expected no ledger at {path}, but found one or traces of one. Open it as it is; if it is lost, "
            "restore it from a backup: a new one would forget what was spent."
        )
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
            with closing(sqlite3.connect(new, isolation_level=None)) as connection:
                _fill(connection, make_head(*_first(), time, signer), signer)
            descriptor = os.open(new, os.O_RDONLY)
            sync(descriptor)
            os.close(descriptor)
            os.link(new, path)  # fails if another process was faster
            sync_folder(path.parent)
        finally:
            for leftover in (new, Path(f"{new}-wal"), Path(f"{new}-shm")):
                leftover.unlink(missing_ok=True)


def _first() -> tuple[str, int, str]:
    ledger = secrets.token_hex(16)
    return ledger, 0, genesis(ledger)


def _fill(connection: sqlite3.Connection, head: Head, signer: Signer) -> None:
    _synchronise(connection)
    connection.execute(f"PRAGMA application_id={_APPLICATION}")
    connection.execute(f"PRAGMA user_version={VERSION}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.values():
        connection.execute(statement)
    connection.execute("INSERT INTO signers VALUES (?, ?)", (head.signer, signer.certificate))
    connection.execute("INSERT INTO head VALUES (1, ?, ?, ?, ?, ?, ?)", tuple(vars(head).values()))
    connection.execute("COMMIT")


class Store:
    """An open ledger file.

    Args:
        path: of the file, which must exist.
        read_only: change nothing, and no file beside it where that can be avoided.

    Raises:
        LedgerError: TF-704.
        TamperError: TF-702, if it has other tables, or triggers.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path, self._head = path, head_file(path)
        if not path.is_file():
            raise LedgerError(
                f"Expected the ledger at {path}, but there is none. Restore it from a backup; only a site "
                "that never had one may start a new one, because a new one would forget what was spent."
            )
        with _named(path):
            self._connection = _connect(path, read_only=read_only)
            try:
                self._prepare(read_only=read_only)
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self, *, read_only: bool) -> None:
        application, version = self._pragma("application_id"), self._pragma("user_version")
        if application != _APPLICATION:
            raise LedgerError(
                f"Expected {self.path} to be a ledger, but found another file. Look at the path."
            )
        if version != VERSION:
            raise LedgerError(
                f"Expected {self.path} to be of version {VERSION}, but found {version}. Use the version of "
                "Tightframe that wrote it, or a later one."
            )
        self._connection.execute("PRAGMA trusted_schema=OFF")
        if read_only:
            return
        self._connection.execute("PRAGMA foreign_keys=ON")
        level = _synchronise(self._connection)
        settings = [self._pragma(name) for name in ("journal_mode", "synchronous", "foreign_keys")]
        if settings != ["wal", level, 1]:
            raise LedgerError(
                f"Expected the ledger {self.path} to be written in WAL mode with synchronisation {level}, "
                f"but got {settings}. Put `state_dir` on a local disk."
            )

    def _pragma(self, name: str) -> object:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold one exclusive write transaction; rolled back on any exception.

        Raises:
            LedgerError: TF-704, if it cannot be begun or committed.
        """
        with _named(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, known: tuple[int, str] = (0, "")) -> Contents:
        """Read a consistent snapshot of the file.

        Args:
            known: (number, hash) of an entry; if it exists, entries up to it are left out.

        Raises:
            LedgerError: TF-704, if it cannot be read.
            TamperError: TF-702, if it does not have a ledger's form.
        """
        run = self._connection.execute
        with _named(self.path):
            own = not self._connection.in_transaction
            if own:
                run("BEGIN")
            try:
                schema = dict(
                    run("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex%'")
                )
                if schema != _SCHEMA:
                    raise TamperError(
                        f"Expected the tables {sorted(_SCHEMA)} in {self.path}, but found "
                        f"{sorted(str(name)[:40] for name in schema)} or others of these names. "
                        "The file was altered: restore it from a backup."
                    )
                row = run("SELECT sequence, hash FROM entries WHERE sequence = ?", known[:1]).fetchone()
                after = known[0] if row == known else 0
                rows = tuple(run("SELECT * FROM entries WHERE sequence > ? ORDER BY sequence", (after,)))
                head = self.read_head()
                certificates = dict(run("SELECT id, certificate FROM signers"))
            finally:
                if own:
                    run("ROLLBACK")
        return Contents(rows, head, certificates, after)

    def append(self, rows: Sequence[Row], head: Head, signer: Signer) -> None:
        """Add entries and the head that counts them; within ``writing``."""
        run = self._connection.execute
        run("INSERT OR IGNORE INTO signers VALUES (?, ?)", (head.signer, signer.certificate))
        for row in rows:
            run("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        run(
            "UPDATE head SET ledger = ?, count = ?, hash = ?, time = ?, signer = ?, signature = ?",
            tuple(vars(head).values()),
        )

    def publish_head(self) -> None:
        """Write the head file, under the lock, so that it never goes back; skipped if it is current."""
        with self.writing():
            text = (indented(vars(self.read_head()), step=1) + "\n").encode()
            if not (self._head.is_file() and self._head.read_bytes() == text):
                write_atomically(self._head, text, mode=0o600, locked=True)

    def secret(self) -> bytes:
        """Return the ledger's secret, drawn on first use.

        Raises:
            LedgerError: TF-704, if it cannot be read or written.
        """
        known = read_secret(self.path)
        if known is None:
            with self.writing():
                known = read_secret(self.path) or secrets.token_bytes(_SECRET_BYTES)
                write_atomically(secret_file(self.path), known, mode=0o600, locked=True)
        return known

    def read_head(self) -> Head:
        """Read only the head record of the file.

        Raises:
            LedgerError: TF-704.
            TamperError: TF-702.
        """
        with _named(self.path):
            heads = self._connection.execute(
                "SELECT ledger, count, hash, time, signer, signature FROM head"
            ).fetchall()
        if len(heads) != 1:
            raise TamperError(f"Expected one head record in {self.path}, but found {len(heads)}.")
        return _typed_head(heads[0])

    def published_head(self) -> Head | None:
        """Read the head file; None if there is none.

        Raises:
            LedgerError: TF-704, if it cannot be read.
            TamperError: TF-702, if it is none.
        """
        return read_head_file(self._head)


def read_head_file(path: Path) -> Head | None:
    """Read a head file, beside the ledger or elsewhere; None if there is none.

    Raises:
        LedgerError: TF-704, if it cannot be read.
        TamperError: TF-702, if it is none.
    """
    with _named(path):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        values = json.loads(raw)
        return _typed_head([values[name] for name in Head.__dataclass_fields__])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TamperError(f"Expected {path} to be a ledger's head, but found something else.") from None


def _typed_head(values: Sequence[object]) -> Head:
    ledger, count, *texts = values
    sized = type(count) is int and 0 <= count < 2**63
    if not sized or not all(isinstance(text, str) and text.isascii() for text in (ledger, *texts)):
        raise TamperError("Expected the head record to have values of its types, but got others.")
    return Head(ledger, count, *texts)  # type: ignore[arg-type]  # looked at above


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    where = f"file:{quote(str(path.absolute()))}"
    if not read_only:
        return _opened(f"{where}?mode=rw")
    wal = Path(f"{path}-wal")
    try:
        opened = _opened(f"{where}?mode=ro")
        opened.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A copy on a read-only medium: SQLite cannot create its shared memory beside it.
        if wal.exists() and wal.stat().st_size:
            raise
        return _opened(f"{where}?immutable=1")
    return opened


def _synchronise(connection: sqlite3.Connection) -> int:
    """Let commits wait for the disk, except in a simulation; return the setting's number."""
    level = 2 if waits() else 0  # FULL, OFF
    connection.execute(f"PRAGMA synchronous={level}")
    return level


def _opened(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the system into ``LedgerError``."""
    try:
        yield
    except sqlite3.OperationalError as error:
        _refuse(path, error, "See that the disk has room, the folder is the site's own and on a local disk")
    except (sqlite3.Error, OSError, UnicodeError) as error:  # invalid text raises the last one
        _refuse(path, error, "If it is damaged, restore it from a backup and keep the damaged one")


def _refuse(path: Path, error: Exception, advice: str) -> NoReturn:
    raise LedgerError(
        f"Expected to use the ledger {path}, but got {type(error).__name__}: {error}. {advice}. Nothing is "
        "released without it."
    ) from error
