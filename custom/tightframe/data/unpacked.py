"""Compressed files and long lines, read no further than honest ones go. Torch-free.

A file of one megabyte can hold a thousand of zeros; records do not shrink like that.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FREE = 2**25
"""Bytes to which any file may unpack: 400,000 rows of 40 flags do, as text."""
TIMES = 30
"""Larger ones may unpack to so many times their packed size; a row of a table takes forty times its text."""
LONGEST = 2**24
"""Characters of a line."""
_STEP = 2**20


class UnpackedError(OSError):
    """A file that unpacks to more than records do.

    Args:
        found: what it does, in place of its bytes.
    """

    def __init__(self, found: str = f"it unpacks to more than {TIMES} times its size") -> None:
        super().__init__(found)


def allowed(packed: int) -> int:
    """Return the number of bytes to which a file of a packed size may unpack."""
    return max(FREE, TIMES * packed)


def check_cells(rows: int, columns: int, packed: int) -> None:
    """Check how many cells of a table would be read: equal ones take no bytes of a file, but memory.

    Raises:
        UnpackedError: for more than a file of that packed size may have bytes.
    """
    if (cells := rows * columns) > (most := allowed(packed)):
        raise UnpackedError(
            f"the {columns} columns to be read have {cells:,} cells, more than {most:,} for its size"
        )


def open_gzip(path: Path) -> io.BufferedReader:
    """Open a gzip file.

    Raises:
        UnpackedError: by the stream, as soon as it has read more than is allowed.
    """
    return io.BufferedReader(_Limited(gzip.open(path, "rb"), allowed(path.stat().st_size)))


def check_zip(path: Path) -> None:
    """Check what the members of a zip claim to unpack to; a reader of zips gets no byte more than that.

    Raises:
        UnpackedError: for more than is allowed.
    """
    if not zipfile.is_zipfile(path):
        return  # which its reader will tell
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > allowed(path.stat().st_size):
            raise UnpackedError


def lines_of(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a text; one without an end is not read whole.

    Raises:
        csv.Error: for a line that is too long.
    """
    for line in iter(partial(stream.readline, LONGEST + 1), ""):
        if len(line) > LONGEST:
            raise csv.Error(f"more than {LONGEST} characters without an end of line")
        yield line


class _Limited(io.RawIOBase):
    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self._stream, self._left = stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._stream.readinto(memoryview(buffer)[: min(_STEP, self._left + 1)])
        self._left -= count
        if self._left < 0:
            raise UnpackedError
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
