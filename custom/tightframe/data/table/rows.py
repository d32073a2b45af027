"""Rows of a site's table as text, whatever they come from. Torch-free, pandas-free.

A message of this module tells no cell: of a file without a header the first row would be its header.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tightframe.data.contract import Contract
from tightframe.data.table import TableSite
from tightframe.errors import DataError

Cells = list[str | None]
_FIELD_LIMIT = 1 << 20
_UTF8 = frozenset({"utf-8", "utf8", "utf_8"})


@dataclass
class Rows:
    """The columns that a contract wants, as text.

    Attributes:
        cells: the contract's column -> text of each row, None where there is no value.
        numbers: number of each row: the line of a text file, else its place from 1.
        ragged: numbers of rows with more or fewer cells than the header, which are not among the others.
        where: what it was read from, for messages.
    """

    cells: dict[str, Cells]
    numbers: list[int]
    where: str
    ragged: list[int] = field(default_factory=list)


def own_names(contract: Contract, site: TableSite) -> dict[str, str]:
    """Return the contract's columns -> the site's names of them."""
    renamed = {theirs: own for own, theirs in site.columns.items()}
    return {column: renamed.get(column, column) for column in contract.wanted}


def places(header: Sequence[str], names: Mapping[str, str], where: str, hint: str = "") -> dict[str, int]:
    """Return the contract's columns -> their places in the header.

    Args:
        header: of the table.
        names: the contract's columns -> the site's names.
        where: for messages.
        hint: what else may be wrong if columns are missing.

    Raises:
        DataError: TF-204 if columns are missing or there twice, listing all.
    """
    at: dict[str, list[int]] = {}
    for place, name in enumerate(header):
        at.setdefault(name, []).append(place)
    problems = []
    for column, own in names.items():
        if len(at.get(own, ())) > 1:
            problems.append(f"the column {own!r} is there {len(at[own])} times")
        elif own not in at:
            near = difflib.get_close_matches(own, list(at)[:1000], n=1)
            meant = [
                f", did you mean {name!r}? Write {{{name!r}: {column!r}}} into `columns`" for name in near
            ]
            problems.append(f"there is no column {own!r}{''.join(meant)}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise DataError(
            f"Expected {where} to have the contract's columns once each, but it has {len(header)} columns and"
            f"{listed}\nName the site's own columns in `columns` of its entry.{hint}",
            code="TF-204",
        )
    return {column: at[own][0] for column, own in names.items()}


def read_text(contract: Contract, site: TableSite) -> Rows:
    """Read a text file with a header.

    Raises:
        DataError: TF-205 without the file, TF-206 if it cannot be decoded or parsed, TF-204 for its header.
    """
    path, missing = site.file, frozenset(site.missing)
    lines = text_lines(path, site)
    header = next(lines, None)
    if header is None:
        raise DataError(f"Expected {path} to have a header and rows, but it is empty.", code="TF-208")
    hint = _delimiter_hint(header[1], site.delimiter)
    found = places(header[1], own_names(contract, site), str(path), hint)
    width, taken = len(header[1]), list(found.items())
    columns: dict[str, Cells] = {column: [] for column in found}
    rows = Rows(columns, [], str(path))
    for number, cells in lines:
        if len(cells) != width:
            rows.ragged.append(number)
            continue
        rows.numbers.append(number)
        for column, place in taken:
            text = cells[place].strip()
            columns[column].append(None if text in missing else text)
    return rows


def text_lines(path: Path, site: TableSite) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a text file, the header first, each with the line that it begins in; no empty ones.

    Raises:
        DataError: TF-205, TF-206.
    """
    encoding = "utf-8-sig" if site.encoding.lower() in _UTF8 else site.encoding
    try:
        csv.field_size_limit(_FIELD_LIMIT)
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as stream:
            reader = csv.reader(stream, delimiter=site.delimiter, strict=True)
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
        raise _unreadable(path, what, "name its `encoding`, often cp1252 or utf-16") from None
    except csv.Error as error:
        raise _unreadable(path, f"line {begins}: {error}", "quotes must be doubled inside quotes") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, type(error).__name__, "is it whole, and may this process read it?") from None


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _unreadable(path: Path, what: str, do: str) -> DataError:
    return DataError(f"Expected to read the table {path}, but {what}: {do}", code="TF-206")


def _delimiter_hint(header: Sequence[str], delimiter: str) -> str:
    """Return what to say of a header that another character divides."""
    if len(header) > 1:
        return ""
    counts = {other: header[0].count(other) for other in ",;\t|" if other != delimiter}
    likely = max(counts, key=lambda other: counts[other])
    if not counts[likely]:
        return ""
    return f" Its header has {likely!r} {counts[likely]} times: is that the `delimiter`?"
