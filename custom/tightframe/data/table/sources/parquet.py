"""Rows of a Parquet file, by pyarrow, which is imported here only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tightframe.data.table.sources.cells import as_text, missing_package
from tightframe.data.unpacked import UnpackedError, allowed, check_cells
from tightframe.errors import DataError


def open_parquet(
    path: Path, wanted: Collection[str] | None
) -> tuple[list[str], Iterator[tuple[int, list[str | None]]]]:
    """Return a file's columns, and its rows as text with their places from 1.

    Args:
        wanted: columns to read; the others' cells are None. None reads all.

    Raises:
        DataError: TF-205 without the file, TF-206 if it cannot be read, TF-219 without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package("pyarrow", "parquet") from None
    if not path.exists():
        raise DataError(f"Expected a table at {path}, but there is no such file.", code="TF-205")
    try:
        # One file as it is: no folder of parts, and no columns from the names of folders.
        stored = pq.ParquetFile(path)
        header = list(stored.schema_arrow.names)
        chosen = [name for name in dict.fromkeys(header) if wanted is None or name in wanted]
        _check_size(stored.metadata, len(chosen), path.stat().st_size)
        # A text that repeats is held once: a file has it once, too.
        kinds = {field.name: field.type for field in stored.schema_arrow}
        texts = [name for name in chosen if pa.types.is_string(kinds[name])]
        table = pq.ParquetFile(path, read_dictionary=texts).read(columns=chosen, use_threads=False)
        columns = {name: _texts(table.column(place)) for place, name in enumerate(table.column_names)}
    except UnpackedError as error:
        raise DataError(
            f"Expected to read the table {path}, but {error}: if that is right, write it as CSV.",
            code="TF-206",
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"Expected {path} to be a Parquet file, but got {type(error).__name__}: write it again.",
            code="TF-206",
        ) from None
    return header, _rows(header, columns, table.num_rows)


def _check_size(told: Any, columns: int, packed: int) -> None:
    """Check what a file claims to hold, before it is read.

    Raises:
        UnpackedError: for more than is allowed.
    """
    unpacked = sum(told.row_group(place).total_byte_size for place in range(told.num_row_groups))
    if unpacked > allowed(packed):
        raise UnpackedError
    check_cells(told.num_rows, columns, packed)


def _texts(column: Any) -> list[str | None]:
    """Return a column's cells as text, equal ones as one object."""
    cells, shared = list[str | None](), dict[str | None, str | None]()
    for chunk in column.chunks:
        if hasattr(chunk, "dictionary"):
            known = [as_text(value) for value in chunk.dictionary.to_pylist()]
            cells += (None if place is None else known[place] for place in chunk.indices.to_pylist())
        else:
            cells += (shared.setdefault(text, text) for text in map(as_text, chunk.to_pylist()))
    return cells


def _rows(
    header: list[str], columns: dict[str, list[str | None]], count: int
) -> Iterator[tuple[int, list[str | None]]]:
    for place in range(count):
        yield place + 1, [columns[name][place] if name in columns else None for name in header]
