"""Rows of a site's table as text, from any source. Torch-free, pandas-free.

No message of this module shows a cell: in a file without a header the first row would be the header.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tightframe.data.columns import Row
from tightframe.data.contract import Contract
from tightframe.data.table import TableSite
from tightframe.data.unpacked import UnpackedError, lines_of, open_gzip
from tightframe.errors import DataError

Cells = list[str | None]
Line = tuple[int, Sequence[str | None]]
_FIELD_LIMIT = 1 << 20
_UTF8 = frozenset({"utf-8", "utf8", "utf_8"})
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_EXCEL = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""First bytes of ``.xlsx`` (a zip archive) and of ``.xls``."""


@dataclass
class Rows:
    """The columns that a contract wants, as text.

    Attributes:
        cells: the contract's column -> text of each row, None for a missing value.
        numbers: number of each row: the line of a text file, else its place from 1.
        ragged: numbers of rows with more or fewer cells than the header, which are left out of ``cells``.
        where: the source, for messages.
    """

    cells: dict[str, Cells]
    numbers: list[int]
    where: str
    ragged: list[int] = field(default_factory=list)


def own_names(columns: Sequence[str], site: TableSite) -> dict[str, str]:
    """Return columns of a contract -> the site's names of them."""
    renamed = {theirs: own for own, theirs in site.columns.items()}
    return {column: renamed.get(column, column) for column in columns}


def places(header: Sequence[str], names: Mapping[str, str], where: str, hint: str = "") -> dict[str, int]:
    """Return the contract's columns -> their places in the header.

    Args:
        names: the contract's columns -> the site's names.
        hint: another possible reason if columns are missing.

    Raises:
        DataError: TF-204 if columns are missing or repeated, listing all.
    """
    at: dict[str, list[int]] = {}
    for place, name in enumerate(header):
        at.setdefault(name, []).append(place)
    problems, wanted = [], set(names.values())
    for column, own in names.items():
        if len(at.get(own, ())) > 1:
            problems.append(f"the column {own!r} is there {len(at[own])} times")
        elif own not in at:
            near = difflib.get_close_matches(own, [name for name in at if name not in wanted][:1000], n=1)
            meant = [
                f", did you mean {name!r}? Write {{{name!r}: {column!r}}} into `columns`" for name in near
            ]
            problems.append(f"there is no column {own!r}{''.join(meant)}")
    if problems:
        if len(problems) == len(names) and len(header) > 1 and not at.keys() & wanted:
            hint += " Is its first line a record, not names?"
        listed = "".join(f"\n  - {problem}" for problem in problems)
        number = f"{len(header)} column{'s' if len(header) != 1 else ''}"
        raise DataError(
            f"Expected {where} to have the contract's columns once each, but it has {number} and{listed}\n"
            f"Name the site's own columns in `columns` of its entry.{hint}",
            code="TF-204",
        )
    return {column: at[own][0] for column, own in names.items()}


def read(contract: Contract, site: TableSite, wanted: Sequence[str] | None = None) -> Rows:
    """Read the columns of a site's table that a contract wants, or ``wanted`` of them.

    Rows of a database are sorted by their records' names, or by all their cells, because a database
    guarantees no order: so folds and runs are repeatable.

    Raises:
        DataError: TF-205 without the file, TF-206 if it cannot be read, TF-204 for its header, TF-217 for a
            database, TF-219 without a package that it takes.
    """
    names = own_names(contract.wanted if wanted is None else wanted, site)
    missing = frozenset(site.missing)
    header, lines = opened(site, names.values())
    hint = _delimiter_hint(header, site.delimiter) if site.is_text else ""
    place_of = places(header, names, site.place, hint)
    wanted_places = list(place_of.items())
    columns: dict[str, Cells] = {column: [] for column in place_of}
    rows = Rows(columns, [], site.place)
    if site.database is not None:
        first = [place_of[column] for column in (contract.record,) if column is not None]
        order = [*first, *(place for _, place in wanted_places)]
        sorted_lines = sorted(
            (cells for _, cells in lines), key=lambda cells: [cells[i] or "" for i in order]
        )
        lines = enumerate(sorted_lines, start=1)
    for number, cells in lines:
        if len(cells) != len(header):
            rows.ragged.append(number)
            continue
        rows.numbers.append(number)
        for column, place in wanted_places:
            text = cells[place]
            columns[column].append(None if text is None or text in missing else text)
    return rows


def opened(site: TableSite, wanted: Collection[str] | None) -> tuple[list[str], Iterator[Line]]:
    """Return the header of a site's table, and its rows with their numbers, as text.

    Args:
        wanted: the site's names of the columns that are needed; None for all.

    Raises:
        DataError: as ``read``.
    """
    if site.database is not None:
        from tightframe.data.table.sources.typed import open_query

        return open_query(site.database)
    assert site.file is not None  # noqa: S101 - the entry has checked
    if not site.is_text:
        from tightframe.data.table.sources.typed import open_parquet

        return open_parquet(site.file, wanted)
    lines = text_lines(site.file, site)
    first = next(lines, None)
    if first is None:
        raise DataError(f"Expected {site.file} to have a header and rows, but it is empty.", code="TF-208")
    return first[1], ((number, [cell.strip() for cell in cells]) for number, cells in lines)


def row_contents(site: TableSite) -> Iterator[Row]:
    """Yield all rows of a site's table, independent of any contract and of the site's entry.

    Raises:
        DataError: as ``read``.
    """
    _, lines = opened(site, None)
    return (row_content(cells) for _, cells in lines)


def row_content(cells: Sequence[str | None]) -> Row:
    """Return a row's cells in the order of its columns, without their names."""
    return Row.of(json.dumps(sorted(cell or "" for cell in cells)).encode(), cells)


def read_all(site: TableSite, most: int) -> tuple[list[str], dict[str, Cells], list[int]]:
    """Return a file's header, the cells of each of its columns, and its ragged rows' numbers, for a proposal.

    Args:
        site: an entry with the file.
        most: number of columns.

    Raises:
        DataError: TF-204 with more columns, or one twice; TF-206; TF-208 without rows.
    """
    header, lines = opened(site, None)
    if len(header) > most:
        raise DataError(
            f"Expected {site.place} to have {most} columns at most, but got {len(header)}.", code="TF-204"
        )
    if twice := sorted({name for name in header if header.count(name) > 1})[:5]:
        repeated = ", ".join(f"the column {name!r} is there {header.count(name)} times" for name in twice)
        raise DataError(
            f"Expected {site.place} to have a name for each column, but {repeated}: rename or remove them.",
            code="TF-204",
        )
    missing, rows, ragged = frozenset(site.missing), list[Sequence[str | None]](), list[int]()
    for number, cells in lines:
        if len(cells) == len(header):
            rows.append(cells)
        else:
            ragged.append(number)
    if not rows:
        raise DataError(f"Expected {site.place} to have rows, but it has none.", code="TF-208")
    columns: dict[str, Cells] = {
        name: [None if (cell := cells[place]) is None or cell in missing else cell for cells in rows]
        for place, name in enumerate(header)
    }
    return header, columns, ragged


def in_utf16(path: Path) -> bool:
    """Check whether a text file begins with the byte order mark of UTF-16."""
    try:
        with _opened(path) as raw:
            return raw.peek(4)[:2] in _UTF16
    except (OSError, EOFError, zlib.error):
        return False


def text_header(site: TableSite) -> str:
    """Return the first line of a text file that can be decoded to its end.

    Raises:
        DataError: as ``text_lines``.
    """
    assert site.file is not None  # noqa: S101 - a text file
    first, *_ = [cells[0] for _, cells in text_lines(site.file, site)] or [""]
    return first


def text_lines(path: Path, site: TableSite) -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty rows of a text file, the header first, each with the line in which it begins.

    Raises:
        DataError: TF-205, TF-206.
    """
    encoding = "utf-8-sig" if site.encoding.lower() in _UTF8 else site.encoding
    try:
        csv.field_size_limit(_FIELD_LIMIT)
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as stream:
            begin, mark = raw.peek(4)[:4], "utf-16"
            if begin in _EXCEL:
                raise _unreadable(path, "it is an Excel file or another archive", "save the table as CSV")
            if begin[:2] not in _UTF16:
                mark = "often cp1252 or utf-16"
            reader = csv.reader(lines_of(stream), delimiter=site.delimiter, strict=True)
            begins = 1
            for cells in reader:
                if any(cells):
                    if any("\0" in cell for cell in cells):
                        raise _unreadable(path, f"line {begins} holds zero bytes", "is its `encoding` right?")
                    stripped = [cell.strip() for cell in cells] if begins == 1 else cells
                    yield begins, stripped
                begins = reader.line_num + 1
    except FileNotFoundError:
        raise DataError(f"Expected a table at {path}, but there is no such file.", code="TF-205") from None
    except UnicodeError as error:
        place = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
        what = f"it is not in {site.encoding}{place}"
        raise _unreadable(path, what, f"name its `encoding`, {mark}") from None
    except csv.Error as error:
        raise _unreadable(path, f"line {begins}: {error}", "quotes must be doubled inside quotes") from None
    except UnpackedError as error:
        raise _unreadable(path, str(error), "if that is right, unpack it first") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, type(error).__name__, "is it whole, and may this process read it?") from None


def _opened(path: Path) -> io.BufferedReader:
    return open_gzip(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _unreadable(path: Path, what: str, do: str) -> DataError:
    return DataError(f"Expected to read the table {path}, but {what}: {do}", code="TF-206")


def _delimiter_hint(header: Sequence[str], delimiter: str) -> str:
    """Return a hint if another character divides the header."""
    if len(header) != 1:
        return ""
    counts = {other: header[0].count(other) for other in ",;\t|" if other != delimiter}
    likely = max(counts, key=lambda other: counts[other])
    if not counts[likely]:
        return ""
    return f" Its header has {likely!r} {counts[likely]} times: is that the `delimiter`?"
