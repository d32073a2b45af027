"""Files that a reader finds whole at every moment, old or new; importable without torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, TextIO

_waits = ContextVar("waits", default=True)


def quoted(path: Path) -> str:
    """Return a path as a command that is printed contains it.

    >>> quoted(Path("kits/a b"))
    "'kits/a b'"
    """
    return shlex.quote(str(path))


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's values, for ``object_pairs_hook``: of a repeated key a person may see the other.

    Raises:
        ValueError: if a key stands twice.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice")
    return values


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, locked: bool = False) -> None:
    """Replace ``path`` by ``data``: temporary file, fsync, rename; written by root, it stays its owner's.

    Args:
        locked: the caller holds a lock on the file, so that the temporary one needs no name of its own
            process: what a kill has left of it is overwritten the next time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp" if locked else f".{path.name}.{os.getpid()}.tmp")
    # What a kill has left of it may have another mode, or be somebody's link.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            _keep_owner(descriptor, path)
            stream.write(data)
            stream.flush()
            sync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _keep_owner(descriptor: int, path: Path) -> None:
    """Give a file that root writes to the account that has the one it replaces, which has to read it."""
    if os.geteuid() == 0 and path.exists() and (before := path.stat()).st_uid != 0:
        os.fchown(descriptor, before.st_uid, before.st_gid)


def link_over(source: Path, path: Path) -> None:
    """Make ``path`` another name of a file, in one step: it names that file or what it named before."""
    temporary = path.with_name(f".{path.name}.before")
    temporary.unlink(missing_ok=True)  # a kill has left it
    os.link(source, temporary)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # a rename to another name of the same file does nothing


def write_json(path: Path, values: Any, *, mode: int = 0o644) -> None:
    """Plain values as indented JSON, atomically."""
    write_atomically(path, (indented(values) + "\n").encode(), mode=mode)


def indented(values: Any, step: int = 2) -> str:
    """Return what ``json.dumps(values, indent=step, allow_nan=False)`` does, in half its time.

    Python's encoder in C knows no indent.

    >>> print(indented({"widths": [8]}, step=1))
    {
     "widths": [
      8
     ]
    }
    """
    parts: list[str] = []
    _indent(values, parts.append, "\n", " " * step)
    return "".join(parts)


def _indent(value: Any, append: Callable[[str], None], outer: str, step: str) -> None:
    kind = type(value)
    if kind is str:
        append(encode_basestring_ascii(value))
    elif kind is int or (kind is float and math.isfinite(value)):
        append(repr(value))
    elif value is None:
        append("null")
    elif isinstance(value, dict | list | tuple) and value:
        inner = outer + step
        begin, end = "{}" if isinstance(value, dict) else "[]"
        before = begin + inner
        for item in value:
            append(before)
            if begin == "{":
                # A key that is no text becomes one.
                append(encode_basestring_ascii(item) if type(item) is str else json.dumps({item: 0})[1:-4])
                append(": ")
                item = value[item]
            _indent(item, append, inner, step)
            before = f",{inner}"
        append(outer + end)
    else:
        append(json.dumps(value, allow_nan=False))


def new_file(path: Path) -> TextIO:
    """Open a new text file that its owner alone can read, for what is made of records; UTF-8, lines as given.

    Raises:
        FileExistsError: if there is one of this name, or a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="")


def append_durably(path: Path, lines: bytes, *, mode: int = 0o600) -> None:
    """Append whole lines and return when they are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    with os.fdopen(descriptor, "ab") as stream:
        stream.write(lines)
        stream.flush()
        sync(stream.fileno())
    if new:
        sync_folder(path.parent)


@contextmanager
def waiting(wait: bool) -> Iterator[None]:
    """Wait for the disk in a block, in this thread, or not.

    A simulation need not wait: a kill leaves its files whole, and only a power cut may lose them.
    """
    before = _waits.set(wait)
    try:
        yield
    finally:
        _waits.reset(before)


def waits() -> bool:
    """Check whether writes wait for the disk here."""
    return _waits.get()


def sync(descriptor: int) -> None:
    """Return when an open file is on the disk, where writes wait for that."""
    if waits():
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold a lock file, created where there is none, waiting for whoever holds it: thread or process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder; yield False if another process holds it or has deleted it."""
    handle = _lock(folder)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _lock(folder: Path) -> int | None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    free = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(folder.stat(), os.fstat(handle))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not free:
            os.close(handle)
    return handle if free else None


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that a crash left without its end.

    ``append_durably`` had not returned then, so nobody was told that the line exists.
    """
    with path.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        start = end
        while start > 0:
            size = min(start, 1 << 16)
            stream.seek(start - size)
            last = stream.read(size).rfind(b"\n")
            if last >= 0:
                start = start - size + last + 1
                break
            start -= size
        if start < end:
            stream.truncate(start)
            sync(stream.fileno())


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
