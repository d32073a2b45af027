"""Limits for compressed files and long lines, beyond the sizes of honest ones. Torch-free.

A file of one megabyte can unpack to a gigabyte of zeros; records do not shrink like that.
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
"""Bytes to which any file may unpack: the size of 400,000 rows of 40 flags, as text."""
TIMES = 30
"""Largest ratio of unpacked to packed size of larger files; a row of a table takes forty times its text."""
LONGEST = 2**24
"""Most characters of a line."""
_STEP = 2**20


class UnpackedError(OSError):
    """A file that unpacks to more than records can.

    Args:
        found: description of the fault, if not the unpacked size.
    """

    def __init__(self, found: str = f"it unpacks to more than {TIMES} times its size") -> None:
        super().__init__(found)


def allowed(packed: int) -> int:
    """Return the number of bytes to which a file of a packed size may unpack."""
    return max(FREE, TIMES * packed)


def check_cells(rows: int, columns: int, packed: int) -> None:
    """Check the number of a table's cells: equal cells take no bytes of a file, but memory.

    Raises:
        UnpackedError: for more cells than a file of that packed size may have bytes.
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
    """Check the claimed unpacked sizes of a zip's members; a reader of zips gets no more bytes than that.

    Raises:
        UnpackedError: for more than is allowed.
    """
    if not zipfile.is_zipfile(path):
        return  # its reader reports that
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > allowed(path.stat().st_size):
            raise UnpackedError


def lines_of(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a text; an endless one is not read completely.

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
