"""Sources of typed values, read as the text that a contract expects: Parquet files and databases.

Packages are imported only where a site names such a source: pyarrow for Parquet; SQLAlchemy for a query of
the site's own, from PostgreSQL or SQLite: read, and nothing else. A database's address contains its password:
it comes from the site's environment or a file, and is in no message; neither are the database's own messages,
which may contain values.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Collection, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from tightframe.data.table import Database
from tightframe.data.unpacked import UnpackedError, allowed, check_cells
from tightframe.errors import DataError
from tightframe.files import quoted


def as_text(value: object) -> str | None:
    """Return a value as text, the same for equal values from any source; None for a missing one.

    Dates have a form that is not a number; values other than text, numbers and booleans become their type's
    name, which is no code of any contract.

    >>> [as_text(value) for value in (None, True, 3, 3.0, 0.1, Decimal("2.50"), " a ", b"x")]
    [None, 'true', '3', '3', '0.1', '2.50', 'a', '<bytes>']
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else "nan"
    if isinstance(value, str):
        return value.strip()
    shown = getattr(value, "isoformat", None)
    return str(shown()) if shown is not None else f"<{type(value).__name__}>"


def missing_package(package: str, extra: str) -> DataError:
    """Return the error for a missing package that a kind of source needs."""
    return DataError(
        f"Expected the package {package}, which reads this kind of table, but it is not installed: "
        f"pip install 'tightframe[{extra}]' at this site.",
        code="TF-219",
    )


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
        # A single file: no folder of parts, and no columns from the names of folders.
        stored = pq.ParquetFile(path)
        header = list(stored.schema_arrow.names)
        chosen = [name for name in dict.fromkeys(header) if wanted is None or name in wanted]
        _check_size(stored.metadata, len(chosen), path.stat().st_size)
        # A repeated text is held once, as in the file.
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


def _check_size(metadata: Any, columns: int, packed: int) -> None:
    """Check the claimed size of a file, before it is read.

    Raises:
        UnpackedError: for more than is allowed.
    """
    unpacked = sum(metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups))
    if unpacked > allowed(packed):
        raise UnpackedError
    check_cells(metadata.num_rows, columns, packed)


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


_SECONDS = 30


def open_query(database: Database) -> tuple[list[str], Iterator[tuple[int, list[str | None]]]]:
    """Return the columns of a site's query, and its rows as text, in the database's order.

    PostgreSQL runs it as a prepared statement, so that it is only one, in a session of read-only
    transactions; SQLite opens the file for reading.

    Raises:
        DataError: TF-217 if the database cannot be queried, TF-219 without SQLAlchemy or a driver.
    """
    try:
        from sqlalchemy import create_engine, exc, pool
    except ImportError:
        raise missing_package("sqlalchemy", "sql") from None
    address = _address(database)
    if address.get_backend_name() == "sqlite":
        arguments: dict[str, Any] = {"creator": _sqlite(address.database)}
    else:
        address = address.set(drivername="postgresql+psycopg")
        options = "-c default_transaction_read_only=on -c client_encoding=UTF8"
        arguments = {
            "connect_args": {"prepare_threshold": 0, "connect_timeout": _SECONDS, "options": options}
        }
    problem: DataError | None = None
    try:
        engine = create_engine(address, poolclass=pool.NullPool, hide_parameters=True, **arguments)
        with engine.connect() as connection:
            # No parameters: a % in the query stays a %.
            plain = connection.execution_options(no_parameters=True)
            result = plain.exec_driver_sql(database.query)
            if not result.returns_rows:
                raise _failed("the query returns no rows: write a SELECT")
            header, rows = list(result.keys()), [list(row) for row in result]
            connection.rollback()
    except ImportError:
        problem = missing_package("psycopg", "sql")
    except (exc.SQLAlchemyError, sqlite3.Error, OSError, UnicodeError) as error:
        problem = _failed(_kind(error))
    if problem is not None:
        raise problem  # outside the handler, so that no traceback shows the database's own message
    return header, ((place, [as_text(value) for value in row]) for place, row in enumerate(rows, start=1))


def _address(database: Database) -> Any:
    """Return the address, which must not be printed.

    Raises:
        DataError: TF-217 if there is none, or it is of another kind.
    """
    from sqlalchemy.engine import make_url

    if database.url_env is not None:
        source, text = f"the environment variable {database.url_env}", os.environ.get(database.url_env, "")
    else:
        assert database.url_file is not None  # noqa: S101 - the entry has checked
        source, text = str(database.url_file), _secret(database.url_file)
    address = None
    if text.strip():
        try:
            address = make_url(text.strip())
        except Exception:  # its message contains the address
            address = None
    if address is None or address.get_backend_name() not in ("postgresql", "sqlite"):
        what = "is empty or not set" if not text.strip() else "is another text"
        raise DataError(
            f"Expected {source} to hold the address of a database, postgresql://USER:PASSWORD@HOST/NAME or "
            f"sqlite:////PATH, but it {what}. The engine's client must have it.",
            code="TF-217",
        )
    return address


def sqlite_file(database: Database) -> Path | None:
    """Return the file named by a site's address of a SQLite database; None if there is none."""
    try:
        text = database.url_file.read_text(encoding="utf-8") if database.url_file is not None else ""
    except (OSError, UnicodeError):
        return None  # reported when records are read
    text = text if database.url_env is None else os.environ.get(database.url_env, "")
    kind, _, place = text.strip().partition(":///")
    path = place.partition("?")[0]
    return Path(path).absolute() if kind.partition("+")[0] == "sqlite" and path else None


def _secret(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise DataError(
                f"Expected {path}, which holds a password, to be closed to others, but its mode is "
                f"{stat.S_IMODE(mode):04o}: chmod 600 {quoted(path)}",
                code="TF-217",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"Expected to read {path}, but got {type(error).__name__}.", code="TF-217") from None


def _sqlite(path: str | None) -> Any:
    """Return a function that opens a SQLite file for reading only."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{Path(path or '').absolute().as_uri()}?mode=ro", uri=True)

    return connect


def _kind(error: Exception) -> str:
    """Describe an error of a database without its own message."""
    cause = getattr(error, "orig", None) or error
    state = getattr(cause, "sqlstate", None)
    name = getattr(cause, "sqlite_errorname", None)
    return f"{type(cause).__name__}" + (f", {state or name}" if state or name else "")


def _failed(what: str) -> DataError:
    return DataError(
        f"Expected the site's query to give rows, but got: {what}. Try the query with the database's own "
        "program, in the same account; it must be one SELECT, which changes nothing.",
        code="TF-217",
    )
