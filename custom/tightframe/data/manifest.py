"""Resumable preparation of files: atomic writes, and a manifest of the finished files. Torch-free.

A manifest is a file of JSON lines: the recipe, then a line for each finished file with the SHA-256 of
its input and of itself. A line is appended as soon as its file is written, so that an interrupted run
loses only the files in progress.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A finished file.

    Attributes:
        input_sha256, output_sha256: hex, of the file's input and of the file itself.
        facts: further information on the file; plain values.
    """

    name: str
    input_sha256: str
    output_sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def vouches(self, input_sha256: str, output: Path) -> bool:
        """Return True if the file was made from this input and is unchanged."""
        if input_sha256 != self.input_sha256:
            return False
        try:
            return sha256(output.read_bytes()) == self.output_sha256
        except OSError:
            return False


class Manifest:
    """The manifest of one folder; open it with ``Manifest.open`` in a ``with`` statement.

    Attributes:
        entries: finished files by name, according to the file; the caller verifies those of earlier runs.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], entries: dict[str, Entry]) -> None:
        self.path = path
        self.entries = entries
        self._head = {"format": FORMAT, "recipe": dict(recipe)}
        self._stream: IO[bytes] | None = None

    @classmethod
    def open(cls, path: Path, recipe: Mapping[str, Any], *, folder: Path) -> Manifest:
        """Read the manifest, or begin one.

        Lines that a crash left incomplete are ignored: their files are made again.

        Args:
            recipe: plain values that describe how files are made.

        Raises:
            FileExistsError: if the folder's files were made with another recipe, or have no manifest.
        """
        if not path.exists():
            if folder.is_dir() and any(folder.iterdir()):
                raise FileExistsError(
                    f"Expected {folder} to be empty or the output of an earlier run, but it holds files and "
                    f"there is no {path}: choose another output."
                )
            return cls(path, recipe, {})
        first, *lines = [_parsed(line) for line in path.read_bytes().split(b"\n")]
        if first != {"format": FORMAT, "recipe": dict(recipe)}:
            raise FileExistsError(
                f"Expected {path} to list files made with {dict(recipe)}, but its first line is {first}: "
                "choose another output, or remove that one."
            )
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        return cls(path, recipe, {entry.name: entry for entry in entries})

    def __enter__(self) -> Manifest:
        """Write the whole file again and keep it open for further lines."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rewrite()
        self._stream = self.path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; after a complete run its lines are in the order of names."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if kind is None:
            self.rewrite()

    def add(self, entry: Entry) -> None:
        """Add a finished file."""
        if self._stream is None:
            raise ValueError("Expected the manifest to be open, but it is not: use it in a `with` statement.")
        self.entries[entry.name] = entry
        self._stream.write(_line(asdict(entry)))
        self._stream.flush()

    def forget(self, name: str) -> None:
        """Remove a file's entry."""
        self.entries.pop(name, None)

    def rewrite(self) -> None:
        """Write the file from ``entries``, in the order of names, so that equal work gives equal files."""
        lines = [self._head, *(asdict(self.entries[name]) for name in sorted(self.entries))]
        write_whole(self.path, b"".join(_line(line) for line in lines))


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes, hex."""
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file of records, its owner's alone, atomically: a reader sees the old or the new content.

    It does not wait for the disk: a file damaged by a loss of power is detected by its hash in the manifest.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or somebody's link
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)
    os.replace(temporary, path)


def worker_starts() -> None:
    """Initialise a process of a pool: leave Ctrl-C to the parent, and exit when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: wait([sentinel]) and os._exit(1), daemon=True).start()


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, allow_nan=False).encode() + b"\n"


def _parsed(line: bytes) -> Any:
    """Parse a line's JSON; None if it is incomplete."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _entry(values: Any) -> Entry | None:
    """Return the entry of a parsed line; None if it is not an entry."""
    if not isinstance(values, dict) or values.keys() != {"name", "input_sha256", "output_sha256", "facts"}:
        return None
    return Entry(**values)
