"""Divide one table of several hospitals into a table for each."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightframe.data.table import TableSite
from tightframe.data.table.proposal import guessed, require_columns
from tightframe.data.table.sources.rows import text_lines
from tightframe.errors import DataError

MOST_SITES = 100


@dataclass(frozen=True)
class SitePart:
    """One site's table.

    Attributes:
        value: of the column that all its rows have.
        entry: for the site's configuration, as far as the file determines it.
    """

    value: str
    rows: int
    entry: dict[str, Any]


def split(path: Path, column: str, folder: Path) -> dict[str, SitePart]:
    """Write ``site-1`` and on, one table for each value of a column in sorted order, without that column.

    Delimiter, encoding and the text of each cell stay as they are.

    Args:
        path: of a text table.
        folder: to create, readable by its owner alone.

    Raises:
        DataError: TF-204 without the column; TF-205 and TF-206 if the table cannot be read; TF-207 for a row
            without a value, and for fewer than 2 values or more than 100.
        FileExistsError: if the folder is there.
    """
    entry = guessed(path)
    source = TableSite.model_validate(entry)
    if not source.is_text:
        raise DataError(f"Expected a text table at {path}, but got Parquet: write it as CSV.", code="TF-206")
    lines = text_lines(path, source)
    _, header = next(lines, (1, []))
    require_columns(path, header, [column])
    if header.count(column) > 1:
        raise DataError(
            f"Expected one column {column!r} in {path}, but it is there {header.count(column)} times.",
            code="TF-204",
        )
    place, rows = header.index(column), dict[str, list[list[str]]]()
    for number, cells in lines:
        if len(cells) != len(header):
            what = f"line {number} has {len(cells)} cells, and the header {len(header)}"
            raise DataError(f"Expected to divide {path}, but {what}.", code="TF-206")
        if not (value := cells[place].strip()):
            what = f"{column!r} is empty in line {number}"
            raise DataError(f"Expected to divide {path}, but {what}.", code="TF-207")
        rows.setdefault(value, []).append(cells)
    if not 2 <= len(rows) <= MOST_SITES:
        raise DataError(
            f"Expected {column!r} to name 2 to {MOST_SITES} sites, but it has {len(rows)} different values.",
            code="TF-207",
        )
    folder.mkdir(mode=0o700)
    parts = {}
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    for number, value in enumerate(sorted(rows), start=1):
        part = (folder / f"site-{number}{ending}").absolute()
        with part.open("w", encoding=source.encoding, newline="") as stream:
            writer = csv.writer(stream, delimiter=source.delimiter, lineterminator="\n")
            writer.writerows([*cells[:place], *cells[place + 1 :]] for cells in (header, *rows[value]))
        parts[f"site-{number}"] = SitePart(value, len(rows[value]), {**entry, "file": str(part)})
    return parts
